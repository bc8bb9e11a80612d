"""
Text that arrives in pieces, read as if it were all there.

A grammar over a :class:`Reader` is a generator: where the text ends for now it yields, and goes on with the next piece.
So a format's parser is written as the format is read, from left to right, and how the text was cut cannot matter: every
method looks at characters in order and decides by them alone. What a method has looked at it also consumes, except for
less than one marker; so the cost of a piece is that of its own length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from triton_openai.parsers.markers import Markers

_Result = TypeVar("_Result")

#: A part of a grammar: yields while it waits for text, returns what it found.
Step: TypeAlias = Generator[None, None, _Result]

#: Where text goes that was read.
Sink: TypeAlias = Callable[[str], object]

SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what the grammar expects here. It is not consumed."""


class Ended(Exception):
    """The text has ended in the middle of something."""


def discard(text: str) -> None:
    """Discard text."""


class Reader:
    """The text, a position in it, and what was read since the last :meth:`keep`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None
        #: How many characters were copied or looked at so far, those looked at twice counted twice.
        self.examined = 0

    def add(self, piece: str) -> None:
        """Take the next piece of text."""
        self._text = self._text[self._at :] + piece
        self._at = 0
        self.examined += len(self._text)

    def end(self) -> None:
        """Take the end of the text."""
        self._ended = True

    def keep(self, already: str = "") -> None:
        """Remember what is read from here on, after *already*, in case that it has to be given back."""
        self._kept = [already]

    def release(self) -> str:
        """Return what was read since :meth:`keep`, and forget it."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def attempt(self, step: Step[_Result], otherwise: Sink, already: str = "") -> Step[_Result | None]:
        """
        Read *step*, which begins with the text *already*.

        If the text is something else, give all that was read of it to *otherwise*, and return nothing.
        """
        self.keep(already)
        try:
            result = yield from step
        except (Malformed, Ended):
            otherwise(self.release())
            return None
        self.release()
        return result

    def take(self, size: int = 1) -> str:
        """Consume *size* characters that :meth:`peek` or another look has seen."""
        taken = self._text[self._at : self._at + size]
        self._at += size
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def rest(self) -> str:
        """Return the text at hand that is not consumed yet."""
        return self._text[self._at :]

    def peek(self) -> Step[str]:
        """Return the next character, or nothing at the end of the text."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        self.examined += 1
        return self._text[self._at]

    def next(self) -> Step[str]:
        """Return the next character without consuming it. Raises :class:`Ended`."""
        character = yield from self.peek()
        if not character:
            raise Ended
        return character

    def run(self, characters: re.Pattern[str], sink: Sink) -> Step[None]:
        """Consume as many of the *characters* (a pattern such as ``[a-z]*``) as stand here; pieces go to *sink*."""
        while True:
            match = characters.match(self._text, self._at)
            end = match.end() if match else self._at
            self.examined += end - self._at + 1
            if end > self._at:
                sink(self.take(end - self._at))
            if end < len(self._text) or self._ended:
                return
            yield

    def ahead(self, pattern: re.Pattern[str], sink: Sink) -> None:
        """
        Consume what of the text at hand *pattern* matches, without waiting for more: a short cut past many small steps.

        What it leaves must read the same, so that how the text was cut cannot matter.
        """
        match = pattern.match(self._text, self._at)
        if match is not None and match.end() > self._at:
            self.examined += match.end() - self._at
            sink(self.take(match.end() - self._at))

    def collect(self, characters: re.Pattern[str], longest: int) -> Step[str]:
        """Do :meth:`run` and return what was consumed. Raises :class:`Malformed` beyond *longest* characters."""
        parts: list[str] = []
        while True:
            match = characters.match(self._text, self._at, self._at + longest + 1)
            size = match.end() - self._at if match else 0
            self.examined += size + 1
            if size:
                parts.append(self.take(size))
            if size > longest:
                raise Malformed
            longest -= size
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def space(self) -> Step[None]:
        """Consume white space."""
        yield from self.run(SPACE, discard)

    def token(self, *expected: str) -> Step[str]:
        """Consume white space, then do :meth:`literal`."""
        yield from self.space()
        return (yield from self.literal(*expected))

    def literal(self, *expected: str) -> Step[str]:
        """
        Consume one of *expected*, none of which begins another, and return it. Raises :class:`Malformed`, having
        consumed nothing (what stands here may be another marker), or :class:`Ended`.
        """
        longest = max(map(len, expected))
        while True:
            ahead = self._text[self._at : self._at + longest]
            self.examined += len(ahead)
            for text in expected:
                if ahead.startswith(text):
                    return self.take(len(text))
            if not any(text.startswith(ahead) for text in expected):
                raise Malformed
            if self._ended:
                self.take(len(ahead))
                raise Ended
            yield

    def optional(self, character: str) -> Step[bool]:
        """Consume *character* if it is the next. Return whether it was."""
        if (yield from self.peek()) != character:
            return False
        self.take()
        return True

    def until(self, markers: Markers, sink: Sink) -> Step[str]:
        """
        Give the text up to the first of the *markers* to *sink*; consume and return the marker.

        Returns nothing at the end of the text.
        """
        while True:
            found = markers.search(self._text, self._at, ended=self._ended)
            stop = len(self._text) if found is None else found.start
            self.examined += (len(self._text) if found is None else found.end) - self._at
            if stop > self._at:
                sink(self.take(stop - self._at))
            if found is not None and found.marker:
                return self.take(len(found.marker))
            if self._ended:
                return ""
            yield
