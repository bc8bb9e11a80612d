"""Where the thinking is in the text of an answer, while the text comes."""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.parsers.reader import Markers

#: Where thinking begins and ends in a piece of text.
Span = tuple[int, int]


class ThinkingMeter:
    """
    Finds the thinking in a text that comes in pieces. Has one answer's state.

    One of the *openings* begins the thinking, one of the *ends* ends it; *inside* is whether the prompt has opened it.
    An opening counts at the start of the text, after white space, or *anywhere* in it. What may be the beginning of an
    end is no thinking until it is certain.
    """

    def __init__(
        self, openings: Sequence[str], ends: Sequence[str], *, inside: bool = False, anywhere: bool = False
    ) -> None:
        self.inside = inside
        #: Whether no thinking can follow.
        self.over = False
        self._openings = tuple(openings)
        self._opening = Markers(*openings)
        self._ends = Markers(*ends)
        self._anywhere = anywhere
        # The end of the text so far, which may be the beginning of a marker
        self._rest = ""
        # Whether the prompt has opened the thinking, and the model may repeat that.
        self._may_repeat = inside

    @property
    def is_at_marker(self) -> bool:
        """Whether the text so far ends with what may be the beginning of a marker."""
        return bool(self._rest)

    def feed(self, text: str) -> list[Span]:
        """Return the parts of *text* that are thinking."""
        before = len(self._rest)
        whole = self._rest + text
        self._rest = ""
        spans: list[Span] = []
        at = 0
        while not self.over:
            if not self.inside:
                begin = self._next_opening(whole, at)
                if begin is None:
                    break
                at = begin
                self.inside = True
                self._may_repeat = False
                continue
            if self._may_repeat:
                begin = self._repeated_opening(whole)
                if begin is None:
                    break
                at = begin
                self._may_repeat = False
            start, end, marker = self._ends.search(whole, at, ended=False)
            if start > max(at, before):
                spans.append((max(at - before, 0), start - before))
            if not marker:
                self._rest = whole[start:]
                break
            self.inside = False
            self.over = not self._anywhere
            at = end
        return spans

    def _next_opening(self, whole: str, at: int) -> int | None:
        """Return where the thinking begins in *whole*, from *at* on; ``None`` where no opening is complete."""
        if self._anywhere:
            start, end, marker = self._opening.search(whole, at, ended=False)
            if marker:
                return end
            self._rest = whole[start:]
            return None
        begin = self._repeated_opening(whole)
        if begin == 0:
            self.over = True
            return None
        return begin

    def _repeated_opening(self, whole: str) -> int | None:
        """Return where the opening with which *whole* begins ends, 0 without one, ``None`` if it is not complete."""
        text = whole.lstrip()
        for opening in self._openings:
            if text.startswith(opening):
                return len(whole) - len(text) + len(opening)
        if any(opening.startswith(text) for opening in self._openings):
            # White space before it may be long.
            self._rest = text or whole[-1:]
            return None
        return 0
