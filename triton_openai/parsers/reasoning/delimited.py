"""Reasoning between two markers at the beginning of the answer."""

from __future__ import annotations

import re
from typing import ClassVar

from triton_openai.parsers.grammar import Grammar
from triton_openai.parsers.markers import markers
from triton_openai.parsers.reader import Ended, Malformed, Step
from triton_openai.parsers.reasoning.base import ReasoningParser

_ANYTHING = re.compile(r"(?s:.*)")


class Delimited(Grammar, ReasoningParser):
    """
    Thinking, its end, and the answer; what stands behind the end is content whatever it looks like.

    An opening marker counts only as the first of the text, where the prompt did not bring it already. White space next
    to the markers is markup: templates put it there when they write a past answer back. Text that ends inside of the
    thinking is all reasoning.
    """

    #: What opens and what closes the thinking; alternatives, none of which begins another.
    openings: ClassVar[tuple[str, ...]] = ("<think>",)
    closings: ClassVar[tuple[str, ...]] = ("</think>",)
    #: The beginnings of tool calls that the model may write without closing its thinking. They stay in the content.
    implied: ClassVar[tuple[str, ...]] = ()
    #: What holds where the prompt shows nothing: whether the family begins inside of its thinking.
    begins_inside: ClassVar[bool] = False
    #: What some families put round the answer behind the thinking: dropped at its beginning and at its end.
    frame: ClassVar[tuple[str, str] | None] = None

    def __init__(self, *, inside: bool | None = None) -> None:
        super().__init__()
        self._inside = self.begins_inside if inside is None else inside
        # Stream state
        self._space: list[str] = []
        self._has_reasoned = False

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:
        """Say whether *prompt* ends with thinking opened (true) or closed (false), or with neither."""
        # Only the end is looked at: messages may speak of the markers.
        end = prompt[-200:].rstrip()
        if end.endswith(cls.openings):
            return True
        return False if end.endswith(cls.closings) else None

    def _text(self) -> Step[None]:
        reader = self._reader
        if (yield from self._opens()):
            end = yield from reader.until(markers(*self.closings, *self.implied), self._think)
            if end in self.implied:
                self._output.content(end)
            else:
                yield from reader.space()
        if self.frame is not None:
            yield from self._framed(*self.frame)
        yield from reader.run(_ANYTHING, self._output.content)

    def _framed(self, opening: str, closing: str) -> Step[None]:
        """Read the answer without what is put round it. Text behind a *closing* shows that it was none."""
        reader = self._reader
        reader.keep()
        try:
            yield from reader.literal(opening)
            reader.release()
            yield from reader.space()
        except (Malformed, Ended):
            self._output.content(reader.release())
        while (yield from reader.until(markers(closing), self._output.content)):
            reader.keep(closing)
            yield from reader.space()
            if not (yield from reader.peek()):
                reader.release()
                self._output.trim()
                return
            self._output.content(reader.release())

    def _opens(self) -> Step[bool]:
        """Read an opening marker, if one is there; say whether the thinking has begun."""
        self._reader.keep()
        try:
            yield from self._reader.space()
            yield from self._reader.one_of(self.openings)
        except (Malformed, Ended):
            before = self._reader.release()
            if self._inside:
                self._think(before)
            else:
                self._output.content(before)
            return self._inside
        self._reader.release()
        return True

    def _think(self, text: str) -> None:
        """Pass on reasoning without white space at its beginning and end."""
        visible = text.rstrip()
        tail = text[len(visible) :]
        if visible:
            if not self._has_reasoned:
                self._space.clear()
                visible = visible.lstrip()
                self._has_reasoned = True
            self._output.reasoning("".join(self._space) + visible)
            self._space.clear()
        if tail:
            self._space.append(tail)
