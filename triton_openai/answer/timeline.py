"""
Segments and words of a recording in order, whatever times a model returns.

None ends before it begins, none begins before the last one ends, and none is outside of the audio. Subtitles need a
length that can be written: one of milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from triton_openai.jobs import Segment, Word
from triton_openai.languages import blank_between

# Seconds. Times are written in milliseconds, so a segment that is this long is not empty when they are rounded.
_MIN_SECONDS = 0.002


def add_segment(segments: list[Segment], segment: Segment, start: float, end: float) -> None:
    """
    Add *segment* behind *segments*; its audio is between *start* and *end* of the recording, in seconds.

    A text without a length joins the last segment: it is not lost. Without a text, nothing is added.
    """
    if not segment.text.strip():
        return
    if segments:
        start = max(start, segments[-1].end)
    begins = min(max(segment.start, start), end)
    ends = min(max(segment.end, begins), end)
    if ends - begins >= _MIN_SECONDS:
        segments.append(replace(segment, start=begins, end=ends))
    elif segments:
        last = segments[-1]
        text = last.text + blank_between(last.text, segment.text) + segment.text
        segments[-1] = replace(last, text=text, tokens=[*last.tokens, *segment.tokens])
    else:
        begins = max(start, min(begins, end - _MIN_SECONDS))
        segments.append(replace(segment, start=begins, end=begins + _MIN_SECONDS))


def add_words(words: list[Word], added: Sequence[Word], start: float, end: float) -> None:
    """Add the words *added* behind *words*; their audio is between *start* and *end* of the recording, in seconds."""
    for word in added:
        if words:
            start = max(start, words[-1].end)
        begins = min(max(word.start, start), end)
        ends = min(max(word.end, begins), end)
        words.append(replace(word, start=begins, end=ends))
