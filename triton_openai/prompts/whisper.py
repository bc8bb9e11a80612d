"""
Whisper's special tokens: the prompt of its decoder, and text, language and times in what it answers.

Source: openai/whisper (``tokenizer.py``, ``decoding.py``). The times are ids of their own behind all other tokens, one
for every 0.02 seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec

from triton_openai.errors import ConfigurationError
from triton_openai.jobs import Segment
from triton_openai.languages import LANGUAGES
from triton_openai.prompts.tokenizer import Tokenizer

_STEP = 0.02
# Half of the decoder's context, without the mark in front: a longer prompt loses its beginning.
_MAX_PROMPT = 223


class Hearing(msgspec.Struct, frozen=True, kw_only=True):
    """What Whisper hears in a window."""

    text: str
    #: What has no times is one.
    segments: Sequence[Segment]
    #: Up to where the answer says what is spoken, in seconds from the window's beginning.
    seconds: float
    #: Whether it says all up to there. An answer that was cut before its first complete segment does not.
    complete: bool


class WhisperTokens:
    """The tokens of one of Whisper's vocabularies for several languages."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises :class:`ConfigurationError` for a tokenizer that is none of Whisper's."""

        def special_id(token: str) -> int:
            number = tokenizer.token_id(token)
            if number is None:
                raise ConfigurationError(f"The model's tokenizer is not Whisper's: it has no '{token}' (--tokenizer).")
            return number

        self._tokenizer = tokenizer
        self._start = special_id("<|startoftranscript|>")
        #: The id that ends a text.
        self.end = special_id("<|endoftext|>")
        self._before = special_id("<|startofprev|>")
        self._no_times = special_id("<|notimestamps|>")
        self._tasks = (special_id("<|transcribe|>"), special_id("<|translate|>"))
        numbers = {code: tokenizer.token_id(f"<|{code}|>") for code in LANGUAGES}
        #: The ids of the languages by code.
        self.languages = {code: number for code, number in numbers.items() if number is not None}

    async def prompt(self, language: str | None, *, translate: bool, before: str | None) -> Sequence[int]:
        """
        Return the decoder's prompt, which asks for times; without a *language*, one that the model answers with it.

        *before* is a text that precedes the audio.
        """
        ids: list[int] = []
        if before:
            ids = [self._before, *(await self._tokenizer.encode_async(f" {before.strip()}"))[-_MAX_PROMPT:]]
        ids.append(self._start)
        if language is not None:
            ids += [self.languages[language], self._tasks[translate]]
        return ids

    def language(self, ids: Sequence[int]) -> str | None:
        """Return the language that an answer begins with."""
        return next((code for code, number in self.languages.items() if number == next(iter(ids), None)), None)

    def read(self, ids: Sequence[int], seconds: float) -> Hearing:
        """
        Return what an answer to *seconds* of audio says, as openai/whisper (``transcribe.py``) reads it.

        Two times at its end say that speech goes on behind the first one. What follows the last pair of times is left
        out then: it is heard again from there, and whole. An answer that was cut ends with its last complete segment.
        """
        answer = list(takewhile(lambda number: number != self.end, ids))
        complete = len(answer) < len(ids) or not answer
        segments: list[Segment] = []
        tokens: list[int] = []
        start = 0.0
        pairs = False
        before = -1
        for number in answer:
            if number > self._no_times:
                time = max(start, min((number - self._no_times - 1) * _STEP, seconds))
                if tokens:
                    segments.append(self._segment(start, time, tokens))
                    tokens = []
                elif before > self._no_times and segments:
                    pairs = True
                start = time
            elif number < self.end:
                tokens.append(number)
            before = number
        goes_on = segments and segments[-1].end > 0 and (not complete or (pairs and self._ends_open(answer)))
        if goes_on:
            end = segments[-1].end
            # It is complete as far as it goes.
            complete = True
        else:
            end = seconds
            if tokens:
                segments.append(self._segment(start, seconds, tokens))
        words = [number for segment in segments for number in segment.tokens]
        text = self._tokenizer.decode(words).strip()
        return Hearing(
            text=text, segments=[segment for segment in segments if segment.text], seconds=end, complete=complete
        )

    def _ends_open(self, answer: Sequence[int]) -> bool:
        """Return whether *answer* ends with two times, or with text that has no time at its end."""
        return answer[-1] <= self._no_times or answer[-2] > self._no_times

    def _segment(self, start: float, end: float, tokens: Sequence[int]) -> Segment:
        return Segment(start=start, end=end, text=self._tokenizer.decode(tokens).strip(), tokens=tokens)
