"""
The text-level stop words of ``tensorrt_llm_bls``, with the weaknesses of the original.

In a stream, a word is found only if it begins at the beginning of a piece of text; over several pieces, only if it is
the request's single stop word. Without a stream, the search skips as many characters as the prompt has.
"""

from __future__ import annotations


class StopWords:
    """Watches one sequence."""

    def __init__(self, words: list[str], *, stream: bool, skip: int) -> None:
        self._words = [word for word in words if word]
        self._stream = stream
        self._skip = skip
        self._matched = ""
        self.seen = False

    def feed(self, text: str) -> str:
        """Take the next text and return the part that is sent."""
        if not self._words:
            return text
        if self._stream:
            return self._watch(text)
        return self._cut(text)

    def _watch(self, text: str) -> str:
        for word in self._words:
            if len(self._words) == 1:
                joined = self._matched + text
            else:
                joined = text
            for candidate in (joined, text):
                if candidate.startswith(word):
                    self.seen = True
                    return text
                if candidate and word.startswith(candidate):
                    self._matched = candidate
                    return text
        self._matched = ""
        return text

    def _cut(self, text: str) -> str:
        ends = [start + len(word) for word in self._words if (start := text.find(word, self._skip)) >= 0]
        if ends:
            return text[: min(ends)]
        return text
