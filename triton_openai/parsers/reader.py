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
from functools import lru_cache
from typing import TypeAlias, TypeVar

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


class Markers:
    """
    A set of markers, compiled.

    The leftmost marker wins, and of those that begin together the longest, however the text is cut: where the text
    ends inside of what may become a marker, nothing after that place is looked at. One search by the regular
    expression engine finds both, so a piece costs its own length; what is held back is shorter than a marker.
    """

    def __init__(self, *markers: str) -> None:
        #: The markers themselves.
        self.texts = markers
        self._whole = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
        self._prefixes = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._whole_or_begun = re.compile(_branches(frozenset(markers)))

    def search(self, text: str, start: int, *, ended: bool) -> tuple[int, int, str]:
        """
        Return where the first marker at or after *start* begins and ends, and the marker.

        Without one, this is the end of the text, or where a marker may be beginning there, and nothing for the marker.
        Once the text has *ended*, no marker is incomplete.
        """
        match = (self._whole if ended else self._whole_or_begun).search(text, start)
        if match is None:
            return len(text), len(text), ""
        marker = match.group()
        if not ended and match.end() == len(text) and marker in self._prefixes:
            marker = ""
        return match.start(), match.end(), marker

    def at(self, text: str, start: int, *, ended: bool) -> str | None:
        """Return the marker at *start*, nothing if there is none, and ``None`` if the text may still become one."""
        match = (self._whole if ended else self._whole_or_begun).match(text, start)
        if match is None:
            return ""
        marker = match.group()
        if not ended and match.end() == len(text) and marker in self._prefixes:
            return None
        return marker


@lru_cache(maxsize=1024)
def markers(*texts: str) -> Markers:
    """
    Return the set of these markers, compiled once as long as it is in use: for sets that are put together.

    Some have a parameter's name in them, of which there is no limit.
    """
    return Markers(*texts)


def _branches(rest: frozenset[str]) -> str:
    """Return a pattern for any of *rest*, or for a beginning of one at the end of the text."""
    branches = []
    for first in sorted({marker[0] for marker in rest if marker}):
        following = frozenset(marker[1:] for marker in rest if marker.startswith(first))
        branches.append(re.escape(first) + (_tail(following) if following != {""} else ""))
    if len(branches) == 1:
        return branches[0]
    return f"(?:{'|'.join(branches)})"


def _tail(following: frozenset[str]) -> str:
    """Return a pattern for what follows a first character."""
    branches = _branches(following - {""})
    if "" in following:
        return f"(?:{branches})?"
    return rf"(?:{branches}|\Z)"


class Reader:
    """
    The text, a position in it, and what was read since the last :meth:`keep`.

    It has many methods because they are the steps of which all grammars consist.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        # Since the last `keep`: the text that came, once more of it has come, and where what is kept begins in the text
        # at hand before that.
        self._pieces: list[str] | None = None
        self._since: int | None = None
        #: Whether what the end of the text leaves of a marker, or of an attempt, is dropped.
        self.drops_rest = False
        #: How many characters were copied or looked at so far, those looked at twice counted twice.
        self.examined = 0

    def add(self, piece: str) -> None:
        """Take the next piece of text."""
        if self._pieces is not None:
            if self._since is not None:
                self._pieces.append(self._text[self._since :])
                self._since = None
            self._pieces.append(piece)
        self._text = self._text[self._at :] + piece
        self._at = 0
        self.examined += len(self._text)

    def end(self) -> None:
        """Take the end of the text."""
        self._ended = True

    @property
    def ended(self) -> bool:
        """Whether the text has ended."""
        return self._ended

    def keep(self, already: str = "") -> None:
        """Remember what is read from here on, after *already*, in case that it has to be given back."""
        self._pieces = [already]
        self._since = self._at

    def kept(self) -> str:
        """Return what was read since :meth:`keep`."""
        if self._pieces is None:
            return ""
        text = "".join(self._pieces)
        if self._since is not None:
            return text + self._text[self._since : self._at]
        return text[: len(text) - self._unread]

    @property
    def kept_size(self) -> int:
        """How much was read since :meth:`keep`."""
        size = sum(map(len, self._pieces or ()))
        if self._since is None:
            return size - self._unread
        return size + self._at - self._since

    @property
    def _unread(self) -> int:
        return len(self._text) - self._at

    def rewind(self, at: int) -> None:
        """Read again from the place *at* in what was read since :meth:`keep`, all of which stays remembered."""
        kept = self.kept()
        self._text = kept[at:] + self.rest()
        self._at = self._since = 0
        self._pieces = [kept[:at]]

    def release(self) -> str:
        """Return what was read since :meth:`keep`, and forget it."""
        kept = self.kept()
        self._pieces = None
        return kept

    def release_up_to(self, at: int) -> None:
        """Drop what was read since :meth:`keep` up to the place *at*, and read again from there."""
        already = sum(map(len, self._pieces or ()))
        if self._since is not None and at >= already:
            self._at = self._since + at - already
        else:
            self._text = self.kept()[at:] + self.rest()
            self._at = 0
        self._pieces = None

    def attempt(self, step: Step[_Result], otherwise: Sink, already: str = "") -> Step[_Result | None]:
        """
        Read *step*, which begins with the text *already*.

        If the text is something else, give all that was read of it to *otherwise*, and return nothing.
        """
        self.keep(already)
        try:
            result = yield from step
        except (Malformed, Ended) as end:
            rest = self.release()
            if isinstance(end, Malformed) or not self.drops_rest:
                otherwise(rest)
            return None
        self.release()
        return result

    def take(self, size: int = 1) -> str:
        """Consume *size* characters that :meth:`peek` or another look has seen."""
        taken = self._text[self._at : self._at + size]
        self._at += size
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
            if match:
                end = match.end()
            else:
                end = self._at
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

    def up_to(self, characters: re.Pattern[str], longest: int) -> Step[str]:
        """Consume as many of the *characters* as stand here, at most *longest*, and return them."""
        parts: list[str] = []
        while True:
            match = characters.match(self._text, self._at, self._at + longest)
            if match:
                size = match.end() - self._at
            else:
                size = 0
            self.examined += size + 1
            if size:
                parts.append(self.take(size))
            longest -= size
            if not longest or self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def collect(self, characters: re.Pattern[str], longest: int) -> Step[str]:
        """Do :meth:`run` and return what was consumed. Raises :class:`Malformed` beyond *longest* characters."""
        text = yield from self.up_to(characters, longest + 1)
        if len(text) > longest:
            raise Malformed
        return text

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

    def marker(self, markers: Markers) -> Step[str]:
        """Consume and return the one of *markers* that stands here; return nothing if none does."""
        while (marker := markers.at(self._text, self._at, ended=self._ended)) is None:
            yield
        self.examined += len(marker)
        if marker:
            return self.take(len(marker))
        return ""

    def optional(self, character: str) -> Step[bool]:
        """Consume *character* if it is the next. Return whether it was."""
        if (yield from self.peek()) != character:
            return False
        self.take()
        return True

    def until(self, markers: Markers, sink: Sink, *, drops_begun: bool = False) -> Step[str]:
        """
        Give the text up to the first of the *markers* to *sink*; consume and return the marker.

        Returns nothing at the end of the text. What is there of a marker then goes to *sink*, but with *drops_begun*.
        """
        while True:
            ended = self._ended and not (drops_begun or self.drops_rest)
            start, end, marker = markers.search(self._text, self._at, ended=ended)
            self.examined += end - self._at
            if start > self._at:
                sink(self.take(start - self._at))
            if marker:
                return self.take(len(marker))
            if self._ended:
                self.take(len(self.rest()))
                return ""
            yield
