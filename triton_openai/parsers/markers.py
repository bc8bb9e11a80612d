"""Finds markers in text that comes in pieces."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class Found(NamedTuple):
    """Where a marker is, or (``marker`` empty) where one may be beginning at the end of the text."""

    start: int
    end: int
    marker: str


class Markers:
    """
    A set of markers, compiled.

    The leftmost marker wins, and of those that begin together the longest, however the text is cut: where the text
    ends inside of what may become a marker, nothing after that place is looked at. One search by the regular
    expression engine finds both, so a piece costs its own length; what is held back is shorter than a marker.
    """

    def __init__(self, *markers: str) -> None:
        self.all = markers
        self._whole = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
        self._prefixes = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._whole_or_begun = re.compile(_branches(frozenset(markers)))

    def search(self, text: str, start: int, *, ended: bool) -> Found | None:
        """Find the first marker at or after *start*. Once the text has *ended*, no marker is incomplete."""
        match = (self._whole if ended else self._whole_or_begun).search(text, start)
        if match is None:
            return None
        found = match.group()
        if not ended and match.end() == len(text) and found in self._prefixes:
            found = ""
        return Found(match.start(), match.end(), found)


@cache
def markers(*texts: str) -> Markers:
    """Return the set of these markers, compiled once: for sets that are put together from a class's attributes."""
    return Markers(*texts)


def _branches(rest: frozenset[str]) -> str:
    """Return a pattern for any of *rest*, or for a beginning of one at the end of the text."""
    branches = []
    for first in sorted({marker[0] for marker in rest if marker}):
        following = frozenset(marker[1:] for marker in rest if marker.startswith(first))
        branches.append(re.escape(first) + (_tail(following) if following != {""} else ""))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _tail(following: frozenset[str]) -> str:
    """Return a pattern for what follows a first character."""
    branches = _branches(following - {""})
    return f"(?:{branches})?" if "" in following else rf"(?:{branches}|\Z)"
