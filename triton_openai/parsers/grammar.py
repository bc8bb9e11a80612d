"""What a parser is, and the base of those that read a format from left to right, as if the whole text were there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from triton_openai.parsers.events import Event
from triton_openai.parsers.output import Output
from triton_openai.parsers.reader import Reader, Step


class TextParser(ABC):
    """
    A text stage: text in pieces goes in, events come out. Made per choice; holds that choice's state.

    Neither :meth:`feed` nor :meth:`flush` ever raises for what a model wrote.
    """

    #: Whether the markup is made of tokens that tokenizers count as special: they must then not be skipped.
    special_tokens: ClassVar[bool] = False

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Return what *text*, following on all text before, adds."""

    def flush(self) -> list[Event]:
        """Return what was held back: the text has ended."""
        return []


class Grammar(TextParser):
    """``feed`` and ``flush`` over a generator that reads the whole text."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._output = Output()
        self._reading = self._text()

    @property
    def examined(self) -> int:
        """How many characters were copied or looked at so far: the cost of the stream, for those who measure it."""
        return self._reader.examined

    def feed(self, text: str) -> list[Event]:
        self._reader.add(text)
        next(self._reading)
        return self._output.take()

    def flush(self) -> list[Event]:
        self._reader.end()
        for _ in self._reading:
            pass
        self._output.finish()
        return self._output.take()

    @abstractmethod
    def _text(self) -> Step[None]:
        """Read the text to its end."""
