"""vLLM's text of one sequence: deltas, without stop strings, and delayed while they may become one."""

from __future__ import annotations

from .text import IncrementalText


class DeltaText:
    """Collects the text of a sequence, and returns it in pieces."""

    def __init__(self, source: IncrementalText, stop: tuple[str, ...], *, include_stop: bool) -> None:
        self._source = source
        self._stop = stop
        self._include_stop = include_stop
        if include_stop:
            self._hold = 0
        else:
            self._hold = max((len(word) for word in stop), default=1) - 1
        self._text = ""
        self._sent = 0

    def feed(self, token: int) -> bool:
        """Add a token; return True if it completes a stop string, where the text then ends."""
        before = len(self._text)
        self._text += self._source.feed(token)
        for word in self._stop:
            start = self._text.find(word, max(0, before - len(word) + 1))
            if start >= 0:
                if self._include_stop:
                    self._text = self._text[: start + len(word)]
                else:
                    self._text = self._text[:start]
                return True
        return False

    def take(self, *, final: bool) -> str:
        """Return the new text that is safe to send; all of it if *final*."""
        if final:
            end = len(self._text)
        else:
            end = max(self._sent, len(self._text) - self._hold)
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece
