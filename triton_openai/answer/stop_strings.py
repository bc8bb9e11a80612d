"""Log probabilities beside stop strings: those of tokens that a stop string takes from the answer are not shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from triton_openai.generation import TokenLogprob


class StopStrings:
    """
    Passes text on up to the first stop string, which is passed on too with *include*.

    The string that *ends* first wins, and of those that end together the longest: what reading one character at a
    time would find, so the result does not depend on how the text was cut. What may still become a stop string is
    held back. The cost of a piece is that of its own length plus the longest stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Request
        self._include = include
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        # Stream state
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Return what of the text so far can be shown now. After a match (see ``matched``) that is nothing more."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = self._find(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        keep = self._could_begin(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def end(self, piece: str) -> str:
        """
        Return what can be shown of a text that ends with *piece*, and with the stop string that ended it, if one did.

        A backend that looks for them itself may have found a later one than :meth:`feed`, several being complete at the
        same token. Of those that the text ends with it is the first.
        """
        text, self._held = self._held + piece, ""
        self.matched = next((stop for stop in self._stops if text.endswith(stop)), None)
        return text if self._include or self.matched is None else text.removesuffix(self.matched)

    def flush(self) -> str:
        """Return what was held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def _could_begin(self, text: str) -> int:
        """Return the length of the longest end of *text* that is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            for stop in self._stops:
                if stop.startswith(end):
                    return size
        return 0


class HeldLogprobs:
    """
    Passes entries on once their token cannot be cut from the answer any more. Holds one stream's state.

    A stop string that is still to be completed begins less than its own length before the end, so what has to be held
    is told by the lengths of the tokens themselves, whatever the backend holds back of the text. They are compared as
    bytes, because a token may be a part of a character.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        # Request
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops))
        self._include = include
        # Stream state
        self._held: deque[tuple[TokenLogprob, bytes]] = deque()
        self._size = 0
        # The end of what was passed on: a stop string may begin inside a token that stays.
        self._before = b""

    def feed(self, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Take in *entries* and return those before them that stay in the answer whatever they complete."""
        passed = []
        # Counted without the new ones, which may hold a stop string and more behind it.
        while self._held and self._size >= self._longest:
            entry, raw = self._held.popleft()
            self._size -= len(raw)
            self._before = (self._before + raw)[-self._longest :]
            passed.append(entry)
        for entry in entries:
            raw = _text(entry)
            self._held.append((entry, raw))
            self._size += len(raw)
        return passed

    def end(self) -> list[TokenLogprob]:
        """
        Return the entries that are left, now that the answer has ended: up to the stop string, if one ended it.

        A token of which a part is shown keeps its entry.
        """
        raw = b"".join([self._before, *[raw for _, raw in self._held]])
        before = len(self._before)
        # One that had ended before was none: a backend may look for them only behind so many tokens.
        found = [(raw.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in found if start >= 0]
        kept = [entry for entry, _ in self._held]
        if matches:
            end, start = min(matches)
            border = end if self._include else start
            kept, position = [], before
            for entry, own in self._held:
                if position >= border:
                    break
                kept.append(entry)
                position += len(own)
        self._held.clear()
        self._size = 0
        return kept


def _text(entry: TokenLogprob) -> bytes:
    if entry.hidden:
        return b""
    return entry.token.encode() if entry.raw is None else entry.raw
