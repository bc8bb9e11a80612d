"""What a reasoning parser is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from triton_openai.parsers.events import Event


class ReasoningParser(ABC):
    """
    A text stage: text in pieces goes in, reasoning and content come out. Made per choice; holds that choice's state.

    *inside* says whether the prompt itself opened (or closed) the thinking, see :meth:`inside_after`; ``None`` leaves
    it to what the family of models usually does. Base of the classes that the entry-point group
    ``triton_openai.reasoning_parsers`` takes. Neither :meth:`feed` nor :meth:`flush` ever raises for what a model
    wrote.
    """

    #: Whether the markup is made of tokens that tokenizers count as special: they must then not be skipped.
    special_tokens: ClassVar[bool] = False

    def __init__(self, *, inside: bool | None = None) -> None:
        """Begin an answer; *inside* is what :meth:`inside_after` says of its prompt."""
        self.inside = inside

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:  # noqa: ARG003
        """Say whether *prompt* ends with thinking opened (true) or closed (false), or with neither."""
        return None

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Return what *text*, following on all text before, adds."""

    def flush(self) -> list[Event]:
        """Return what was held back: the text has ended."""
        return []
