"""Reads what a recognizer returns: texts, segments, words and probabilities, or token ids."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from triton_openai.adapters._common.speech_repositories import (
    AVG_LOGPROB,
    IDS,
    LANGUAGE,
    LOGPROBS,
    NO_SPEECH,
    SEGMENTS,
    TEXT,
    WORDS,
)
from triton_openai.errors import InvalidAnswer
from triton_openai.jobs import Segment, SpokenToken, Transcript, Word
from triton_openai.languages import LANGUAGES, blank_between, code_of
from triton_openai.triton.tensors import InferResponse, TensorSpec

_TAG = re.compile(r"<\|([^|<>]*)\|>")
# The longest recording that a segment can be in: ten days.
_MAX_SECONDS = 864_000
_Item = TypeVar("_Item")


class TranscriptReader:
    """
    Reads the *outputs* of a *model*, by their uses.

    A response has the whole text so far, or with *deltas* only what is new.
    """

    def __init__(self, model: str, outputs: Mapping[str, TensorSpec], *, deltas: bool) -> None:
        self._model = model
        self._outputs = outputs
        self._deltas = deltas

    def transcript(self, responses: Sequence[InferResponse]) -> Transcript:
        """Return what is spoken, also for the first of the responses. Raises :class:`UpstreamError`."""
        if self._deltas:
            text = "".join(map(self._text_of, responses))
        else:
            # The last response may be empty.
            text = next(filter(None, map(self._text_of, reversed(responses))), "")
        language = next((code for code in _TAG.findall(text) if code in LANGUAGES), None)
        named = self._last_text(LANGUAGE, responses)
        if named:
            language = code_of(named)
        segments = [
            Segment(
                start=each.start,
                end=each.end,
                text=each.text,
                avg_logprob=each.avg_logprob,
                no_speech_prob=each.no_speech_prob,
            )
            for each in self._listed(SEGMENTS, _decode_segments, responses)
        ]
        words = [
            Word(start=each.start, end=each.end, text=each.word)
            for each in self._listed(WORDS, _decode_words, responses)
        ]
        return Transcript(
            text=_TAG.sub("", text).strip(),
            language=language,
            segments=segments,
            words=words,
            logprobs=self._listed(LOGPROBS, _decode_logprobs, responses),
            avg_logprob=self._last_number(AVG_LOGPROB, responses),
            no_speech_prob=self._last_number(NO_SPEECH, responses),
        )

    def token_ids(self, prompt: Sequence[int], responses: Sequence[InferResponse]) -> Sequence[int]:
        """Return the token ids of the best beam that follow the *prompt*."""
        name = self._outputs[IDS].name
        for response in reversed(responses):
            tensor = response.tensor(name)
            ids = list(response.integers(name))
            if ids:
                if tensor is not None and tensor.shape:
                    width = tensor.shape[-1]
                else:
                    width = len(ids)
                row = ids[:width]
                if row[: len(prompt)] == list(prompt):
                    return row[len(prompt) :]
                return row
        return ()

    def _listed(
        self, use: str, decode: Callable[[str], Sequence[_Item]], responses: Sequence[InferResponse]
    ) -> Sequence[_Item]:
        """Return the JSON list in the output for *use*, which *decode* reads. Raises :class:`UpstreamError`."""
        described = self._last_text(use, responses)
        if not described:
            return ()
        try:
            return decode(described)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidAnswer(f"its {use} cannot be read", model=self._model, detail=str(error)) from error

    def _text_of(self, response: InferResponse) -> str:
        return reduce(_written, response.texts(self._outputs[TEXT].name), "")

    def _last_text(self, use: str, responses: Sequence[InferResponse]) -> str:
        """Return the first text of the output for *use* in the last response that has one."""
        spec = self._outputs.get(use)
        if spec is not None:
            for response in reversed(responses):
                texts = response.texts(spec.name)
                if texts:
                    return texts[0]
        return ""

    def _last_number(self, use: str, responses: Sequence[InferResponse]) -> float | None:
        """Return the first number of the output for *use* in the last response that has one."""
        spec = self._outputs.get(use)
        if spec is not None:
            for response in reversed(responses):
                numbers = response.numbers(spec.name)
                if numbers and math.isfinite(numbers[0]):
                    return numbers[0]
        return None


def _written(text: str, word: str) -> str:
    return f"{text}{blank_between(text, word)}{word}"


class _Segment(msgspec.Struct):
    #: In seconds.
    start: Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
    end: Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
    text: str
    avg_logprob: float | None = None
    no_speech_prob: float | None = None


class _Word(msgspec.Struct):
    #: In seconds.
    start: Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
    end: Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
    word: str


_decode_segments = msgspec.json.Decoder(list[_Segment], strict=False).decode
_decode_words = msgspec.json.Decoder(list[_Word], strict=False).decode
_decode_logprobs = msgspec.json.Decoder(list[SpokenToken], strict=False).decode
