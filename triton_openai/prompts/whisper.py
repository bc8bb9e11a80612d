"""
Whisper's special tokens: the prompt of its decoder, and text, language and times in what it answers.

Source: openai/whisper (``tokenizer.py``, ``decoding.py``). The times are ids of their own behind all other tokens, one
for every 0.02 seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.errors import ConfigurationError
from triton_openai.jobs import Segment
from triton_openai.languages import LANGUAGES
from triton_openai.prompts.tokenizer import Tokenizer

_STEP = 0.02
# Half of the decoder's context, without the mark in front: a longer prompt loses its beginning.
_MAX_PROMPT = 223


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
        self._end = special_id("<|endoftext|>")
        self._before = special_id("<|startofprev|>")
        self._no_times = special_id("<|notimestamps|>")
        self._tasks = (special_id("<|transcribe|>"), special_id("<|translate|>"))
        numbers = {code: tokenizer.token_id(f"<|{code}|>") for code in LANGUAGES}
        #: The ids of the languages by code.
        self.languages = {code: number for code, number in numbers.items() if number is not None}

    async def prompt(self, language: str | None, *, translate: bool, times: bool, before: str | None) -> Sequence[int]:
        """
        Return the decoder's prompt; without a *language*, one that the model answers with it.

        *before* is a text that precedes the audio.
        """
        ids: list[int] = []
        if before:
            ids = [self._before, *(await self._tokenizer.encode_async(f" {before.strip()}"))[-_MAX_PROMPT:]]
        ids.append(self._start)
        if language is not None:
            ids += [self.languages[language], self._tasks[translate]]
            if not times:
                ids.append(self._no_times)
        return ids

    def language(self, ids: Sequence[int]) -> str | None:
        """Return the language that an answer begins with."""
        return next((code for code, number in self.languages.items() if number == next(iter(ids), None)), None)

    def read(self, ids: Sequence[int], seconds: float) -> tuple[str, Sequence[Segment]]:
        """Return the text of an answer to *seconds* of audio, and its segments; what has no times is one."""
        words: list[int] = []
        tokens: list[int] = []
        segments: list[Segment] = []
        start = 0.0
        for number in ids:
            if number == self._end:
                break
            if number > self._no_times:
                time = min((number - self._no_times - 1) * _STEP, seconds)
                if tokens:
                    segments.append(self._segment(start, max(start, time), tokens))
                start = max(start, time)
                tokens = []
            elif number < self._end:
                tokens.append(number)
                words.append(number)
        if tokens:
            segments.append(self._segment(start, seconds, tokens))
        return self._tokenizer.decode(words).strip(), [segment for segment in segments if segment.text]

    def _segment(self, start: float, end: float, tokens: Sequence[int]) -> Segment:
        return Segment(start=start, end=end, text=self._tokenizer.decode(tokens).strip(), tokens=tokens)
