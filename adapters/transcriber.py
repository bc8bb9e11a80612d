"""
Recognizers of speech: Whisper, Parakeet, SenseVoice, transducers, and any model with audio in and text out.

The public model repositories have the same tensors: ``WAV`` and ``WAV_LENS`` in and ``TRANSCRIPTS`` out (k2-fsa/sherpa,
TensorRT-LLM's whisper_bls, WeNet, FunASR), for Whisper with ``TEXT_PREFIX``, the prompt of its decoder as text, for
SenseVoice with ``LANGUAGE`` and ``TEXT_NORM``. Whisper's engine behind sherpa's takes and gives token ids
(``DECODER_INPUT_IDS``, ``OUTPUT_IDS``), which carry the language and times too. The operator describes all others in
the settings (:class:`TensorMapping`).
"""

from __future__ import annotations

import base64
import math
import re
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from triton_openai.adapters._common import tensor_mapping as tensors
from triton_openai.adapters._common.base import Capabilities, Recognition, requires_only
from triton_openai.adapters._common.tensor_mapping import Kind
from triton_openai.adapters._common.wav import pcm, wav_file
from triton_openai.errors import ConfigurationError, InvalidAnswer, UnsupportedParameter
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import Segment, SpokenToken, Transcript, TranscriptionJob, TranslationJob, Word
from triton_openai.languages import LANGUAGES, blank_between, code_of
from triton_openai.triton.tensors import ARRAY_CODES, InferRequest, InferResponse, ModelConfig, Tensor, TensorSpec

_AUDIO = "audio"
_LENGTH = "length"
_PREFIX = "prefix"
_LANGUAGE = "language"
_NORM = "norm"
_IDS = "ids"
_PROMPT = "prompt"
_TEMPERATURE = "temperature"
_TEXT = "text"
_SEGMENTS = "segments"
_WORDS = "words"
_LOGPROBS = "logprobs"
_AVG_LOGPROB = "avg_logprob"
_NO_SPEECH = "no_speech_prob"
# What the public repositories call them.
_INPUTS: Mapping[str, str] = {
    _AUDIO: "WAV", _LENGTH: "WAV_LENS", _PREFIX: "TEXT_PREFIX", _LANGUAGE: "LANGUAGE", _NORM: "TEXT_NORM",
    _IDS: "DECODER_INPUT_IDS",
}  # fmt: skip
_OUTPUTS: Mapping[str, str] = {_TEXT: "TRANSCRIPTS", _IDS: "OUTPUT_IDS"}
#: What the settings can name.
INPUTS: Mapping[str, Kind] = {
    _AUDIO: "audio", _LENGTH: "integer", _LANGUAGE: "code", _PROMPT: "text", _TEMPERATURE: "number",
}  # fmt: skip
OUTPUTS: Mapping[str, Kind] = {
    _TEXT: "text", _LANGUAGE: "text", _SEGMENTS: "text", _WORDS: "text", _LOGPROBS: "text", _AVG_LOGPROB: "number",
    _NO_SPEECH: "number",
}  # fmt: skip
# SenseVoice's languages, and its switch for inverse text normalization: numbers are written in digits.
_SENSEVOICE: Mapping[str, int] = {"auto": 0, "zh": 3, "en": 4, "yue": 7, "ja": 11, "ko": 12}
_AUTO = "auto"
_NORMALIZED = 14
# Seconds of audio. Whisper sees 30 at once. The code of sherpa and of TensorRT-LLM ends its answer after so many tokens
# (max_new_tokens in their model.py), which are enough for the speech of about 20 and 10 seconds. The others take what
# fits into memory; in this service, a request is copied a few times, 4 MB each.
_WINDOW = 30.0
_SHERPA = 20.0
_SHERPA_TOKENS = 96
_TENSORRT_LLM = 10.0
_TENSORRT_LLM_TOKENS = 50
_ANY = 60.0
# Parameters of sherpa's models and of TensorRT-LLM's: both have an engine, and only TensorRT-LLM's model in front of it
# has the number of bands too.
_ENGINE_FOLDER = "engine_dir"
_BANDS = "n_mels"
# Parameters of models that make features of a sequence, and what their code takes for one that is missing. A chunk of
# the decoder has frames of the encoder, each of four.
_FRAMING: Mapping[str, float] = {
    "sample_rate": 16_000, "frame_shift_ms": 10, "frame_length_ms": 25, "chunk_size_s": 0, "decode_chunk_size": 0,
}  # fmt: skip
_SUBSAMPLED = 4
# What sherpa's client pads audio to a multiple of, so that Triton can batch it.
_PADDED = 10.0
# The name that sherpa's code for Whisper calls its engine by.
_ENGINE = "whisper"
# The token that every tokenizer of Whisper's has.
_START = "<|startoftranscript|>"
# What the encoder of sherpa's speech LLM returns.
_SPEECH_FEATURES = "speech_features"
# What the last step of a streaming Paraformer takes: by these weights it finds the words that are new.
_NEW_WORDS = "alphas"
_TAG = re.compile(r"<\|([^|<>]*)\|>")
_Item = TypeVar("_Item")
# The longest recording that a segment can be in: ten days.
_MAX_SECONDS = 864_000


def _known(config: ModelConfig) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Return the inputs and the outputs of a recognizer by their uses; none if *config* is of another model."""
    inputs = {use: config.inputs[name] for use, name in _INPUTS.items() if name in config.inputs}
    outputs = {use: config.outputs[name] for use, name in _OUTPUTS.items() if name in config.outputs}
    audio = inputs.get(_AUDIO)
    by_ids = _IDS in inputs and _IDS in outputs
    fits = audio is not None and audio.datatype in ("FP32", "FP16") and (by_ids or _TEXT in outputs)
    if fits and requires_only(config, _INPUTS.values()):
        return (inputs, outputs)
    return ({}, {})


def _framing(config: ModelConfig, rate: int | None) -> tuple[int, tuple[int, int]] | None:
    """
    Return rate and parts of a recording, in samples, that a model takes in a sequence; ``None`` if its config does not
    have them.

    Source: the code for features of sherpa, WeNet and FunASR: the first part makes as many frames as the encoder
    reads at once, and each further part as many as it advances by.
    """
    parameters = {name: _number(config, name, usual) for name, usual in _FRAMING.items()}
    window = next((spec.dims[0] for spec in config.outputs.values() if len(spec.dims) == 2), 0)
    rate = rate or int(parameters["sample_rate"])
    shift = int(parameters["frame_shift_ms"] * rate / 1000)
    length = int(parameters["frame_length_ms"] * rate / 1000)
    part = int(parameters["chunk_size_s"] * rate)
    if not part:
        part = int(parameters["decode_chunk_size"]) * _SUBSAMPLED * shift
    missing = max(0, length + (window - 1) * shift - part)
    if part and window > 0:
        return (rate, (part + -(-missing // shift) * shift, part))
    return None


def _number(config: ModelConfig, name: str, usual: float) -> float:
    """Return the parameter *name*, *usual* without one. Raises :class:`ConfigurationError`."""
    value = config.parameter(name)
    if value is None:
        return usual
    try:
        return float(value)
    except ValueError as error:
        raise ConfigurationError(
            f"The parameter '{name}' of the model '{config.name}' is '{value}', which is not a number: fill in the "
            "template of its config.pbtxt."
        ) from error


def _is_speech_llm(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> bool:
    """
    Return whether a model is sherpa's front of a speech LLM, which has the tensors of the one of Whisper.

    Source: k2-fsa/sherpa, ``triton/speech_llm``. Its code reads no prefix, and calls an encoder of speech beside it.
    The front of Whisper has ``engine_dir``, from where it reads its tokenizer.
    """
    if _INPUTS[_PREFIX] not in config.inputs or "engine_dir" in config.parameters:
        return False
    return any(_SPEECH_FEATURES in other.outputs for other in repository.values())


def _answers_in_new_words(config: ModelConfig) -> bool:
    """Return whether a streaming model answers with new words only, as Paraformer does (modelscope/FunASR)."""
    return any(_NEW_WORDS in step.input_map for step in config.steps)


class Transcriber(tensors.DescribedAdapter):
    """Sends one recording in each request."""

    name = "transcriber"
    token_level_adds_times = True

    def _bind(self, mapping: TensorMapping | None) -> None:
        config = self.config
        audio = (mapping and mapping.audio) or AudioFormat()
        if mapping is not None and mapping.describes:
            inputs = tensors.named_tensors(config, mapping, "inputs", INPUTS, required=_AUDIO)
            outputs = tensors.named_tensors(config, mapping, "outputs", OUTPUTS, required=_TEXT)
        else:
            mapping = None
            inputs, outputs = _known(config)
            if not inputs:
                raise ConfigurationError(
                    f"The model '{config.name}' has none of the tensors of the public recognizers: describe its own "
                    "with 'inputs', 'constants' and 'outputs' in its settings."
                )
        self._inputs = inputs
        self._outputs = outputs
        self._ids = _IDS in inputs
        self._whisper = self._ids or (_PREFIX in inputs and not _is_speech_llm(config, self.repository))
        if mapping is not None:
            self._text = mapping.text
        elif _answers_in_new_words(config):
            self._text = "delta"
        else:
            self._text = "cumulative"
        spec = inputs[_AUDIO]
        whole = spec.datatype in ("BYTES", "UINT8")
        self._form = audio.form or ("file" if whole else "samples")
        if (self._form == "samples") == whole or (self._form == "base64" and spec.datatype != "BYTES"):
            raise ConfigurationError(
                f"The input '{spec.name}' of the model '{config.name}' is {spec.datatype} and cannot take audio in the "
                f"form '{self._form}'."
            )
        self._languages = self._known_languages(audio)
        if audio.language is None:
            self._language = None
        else:
            self._language = code_of(audio.language)
        if self._language is not None and self._language not in self._languages:
            raise ConfigurationError(
                f"The settings of the model '{config.name}' name the language '{audio.language}', which is none of its "
                "'audio.languages'."
            )
        filled = [spec.name for use, spec in inputs.items() if use not in (_LANGUAGE, _PROMPT)]
        if _LANGUAGE in inputs and (self._language or _AUTO in self._languages):
            filled.append(inputs[_LANGUAGE].name)
        self._constants = tensors.constants(config, mapping, filled=filled)
        self._pad = audio.pad_seconds
        if self._pad is None:
            self._pad = self._default_padding()
        rate, self._parts = self._sequence(audio)
        idle = None
        if self._parts is not None:
            steps = (config, *(self.repository.get(step.model, config) for step in config.steps))
            idle = min(step.sequence_idle for step in steps if step.sequences)
        self.prefers_grpc = config.decoupled
        if self._whisper:
            self.jobs = (TranscriptionJob, TranslationJob)
        else:
            self.jobs = (TranscriptionJob,)
        self.capabilities = Capabilities(
            streaming=(config.decoupled or self._parts is not None) and not self._ids,
            tokens=self._ids,
            tokenizer_has=(_START,) if self._ids else (),
            recognition=Recognition(
                sample_rate=rate,
                max_seconds=audio.max_seconds or self._default_max_seconds(),
                languages=[code for code in self._languages if code != _AUTO],
                language=self._language,
                prompt=bool(audio.prompt) and (self._whisper or _PROMPT in inputs),
                live_idle=idle,
                segments=self._ids or _SEGMENTS in outputs,
                words=_WORDS in outputs,
                logprobs=_LOGPROBS in outputs,
                temperature=_TEMPERATURE in inputs,
                max_tokens=self._max_tokens(),
                invents=self._whisper,
            ),
        )

    def _max_tokens(self) -> int | None:
        """Return the most tokens of an answer, where the code of a published repository limits them."""
        parameters = self.config.parameters
        if self._ids and _ENGINE_FOLDER in parameters:
            return _SHERPA_TOKENS
        if self._ids or not self._whisper:
            return None
        if _ENGINE_FOLDER in parameters and (_BANDS in parameters or self.config.decoupled):
            return _TENSORRT_LLM_TOKENS
        return _SHERPA_TOKENS

    def _default_max_seconds(self) -> float:
        """Return the longest audio of a request, in seconds."""
        max_tokens = self._max_tokens()
        if max_tokens == _TENSORRT_LLM_TOKENS:
            return _TENSORRT_LLM
        if max_tokens == _SHERPA_TOKENS:
            return _SHERPA
        if self._ids:
            return _WINDOW
        if _PREFIX in self._inputs:
            return _SHERPA
        if self._inputs[_AUDIO].datatype == "FP64":
            return _ANY / 2
        return _ANY

    def _default_padding(self) -> float:
        """Return the seconds of which padded audio is a multiple; 0 for audio without padding."""
        if self._ids:
            return _WINDOW
        if _LENGTH in self._inputs and self.config.batching:
            return _PADDED
        return 0.0

    def _known_languages(self, audio: AudioFormat) -> Mapping[str, str | int]:
        """Return the languages of the model, with its own names for them."""
        if isinstance(audio.languages, Mapping):
            languages = {}
            for code, name in audio.languages.items():
                if code == _AUTO:
                    languages[code] = name
                else:
                    languages[code_of(code)] = name
            return languages
        if audio.languages is not None:
            return {code_of(code): code for code in audio.languages}
        if _LANGUAGE in self._inputs and _NORM in self._inputs:
            return _SENSEVOICE
        if self._whisper:
            return {code: code for code in LANGUAGES}
        return {}

    def _sequence(self, audio: AudioFormat) -> tuple[int, tuple[int, int] | None]:
        """Return the rate, and the samples of the first and of each further request, if a recording is a sequence."""
        steps = (self.config, *(self.repository.get(step.model, self.config) for step in self.config.steps))
        sequences = [step for step in steps if step.sequences]
        if not sequences:
            return audio.sample_rate or 16_000, None
        what = f"The model '{self.config.name}' takes a recording as a sequence of requests (sequence_batching)"
        if self.config.decoupled:
            raise ConfigurationError(f"{what} and is decoupled, which is not supported.")
        rate, parts = next(filter(None, (_framing(step, audio.sample_rate) for step in sequences)), (16_000, None))
        if audio.part_seconds is not None:
            rate = audio.sample_rate or rate
            parts = (int(audio.part_seconds * rate),) * 2
        if parts is None:
            raise ConfigurationError(f"{what}. Its config does not say how long each is: set 'audio.part_seconds'.")
        return rate, parts

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the tensors of the public recognizers."""
        inputs, _ = _known(config)
        if not inputs:
            return None
        names = ", ".join(spec.name for spec in inputs.values())
        return f"audio in ({names}) and {'token ids' if _IDS in inputs else 'text'} out"

    @property
    def token_level(self) -> ModelConfig | None:
        if not self._whisper or self._ids:
            return None
        engines = {name: config for name, config in self.repository.items() if _IDS in _known(config)[0]}
        if _ENGINE in engines:
            return engines[_ENGINE]
        if len(engines) == 1:
            return next(iter(engines.values()))
        return None

    def encode(self, job: TranscriptionJob, /) -> Sequence[InferRequest]:
        """
        Return the request, or the first one of a sequence.

        Raises :class:`UnsupportedParameter` for a translation from an unknown language.
        """
        import numpy as np

        samples = np.frombuffer(job.samples, "<f4")
        length = len(samples)
        if self._parts is None:
            if self._pad:
                unit = int(self._pad * self._recognition.sample_rate)
                missing = -length % unit
                if not length:
                    missing = unit
                samples = np.pad(samples, (0, missing))
            return [self._request(job, samples, length)]
        first, further = self._parts
        ends = range(first, first + max(length, 1), further)
        # This silence counts: a short first part would be refused, and models recognize an end by what follows.
        samples = np.pad(samples, (0, ends[-1] - length))
        number = _sequence_number()
        parts = []
        for end in ends:
            start = end - further
            if end == first:
                start = 0
            parts.append(self.part(job, samples[start:end], number, first=end == first, last=end == ends[-1]))
        return [replace(parts[0], following=tuple(parts[1:]))]

    def part(self, job: TranscriptionJob, samples: Any, number: int, *, first: bool, last: bool) -> InferRequest:
        """Return the request of a sequence, by its *number*, with a part of the audio: an array of *samples*."""
        parameters = {"sequence_id": number, "sequence_start": first, "sequence_end": last}
        return replace(self._request(job, samples, len(samples)), parameters=parameters)

    def begin_live(self, job: TranscriptionJob, /) -> AudioSequence:
        assert self._parts is not None, "the model takes sequences"
        return AudioSequence(self, job, *self._parts)

    def _request(self, job: TranscriptionJob, samples: Any, length: int) -> InferRequest:
        inputs = [*self._audio(samples, length), *self._other_inputs(job)]
        constants = tensors.constant_tensors(self.config, self._constants, 1)
        return self.described_request(job.id, inputs, constants, [spec.name for spec in self._outputs.values()])

    def _audio(self, samples: Any, length: int) -> Iterator[Tensor]:
        """Yield the audio and its *length* in samples, without what is padded."""
        spec = self._inputs[_AUDIO]
        rate = self._recognition.sample_rate
        values: Any
        if self._form == "samples":
            count = len(samples)
            if spec.datatype == "INT16":
                values = pcm(samples).tobytes()
            else:
                values = samples.astype({"FP32": "<f4", "FP16": "<f2", "FP64": "<f8"}[spec.datatype]).tobytes()
            if self.config.decoupled and spec.datatype != "FP16":
                # HTTP's generate extension, where there is no gRPC, takes numbers.
                values = array(ARRAY_CODES[spec.datatype], values)
        elif spec.datatype == "UINT8":
            values = wav_file(samples, rate)
            count = len(values)
        else:
            values = _bytes_element(wav_file(samples, rate), encode=self._form == "base64")
            count = 1
        yield Tensor(spec.name, spec.datatype, self.config.wire_shape(spec, count), values)
        if _LENGTH in self._inputs:
            yield self.tensor(self._inputs[_LENGTH].name, length)

    def _other_inputs(self, job: TranscriptionJob) -> Iterator[Tensor]:
        """Yield the inputs beside the audio."""
        language = job.language or self._language
        if self._ids:
            yield self.vector(self._inputs[_IDS].name, job.prompt_ids)
        elif self._whisper:
            yield self.tensor(self._inputs[_PREFIX].name, self._prefix(job, language))
        elif _PREFIX in self._inputs:
            yield self.tensor(self._inputs[_PREFIX].name, "")
        elif _LANGUAGE in self._inputs:
            spec = self._inputs[_LANGUAGE]
            name = self._languages.get(language or _AUTO)
            if name is not None and spec.datatype == "BYTES":
                yield self.tensor(spec.name, str(name))
            elif name is not None:
                yield self.tensor(spec.name, int(name))
        if _NORM in self._inputs:
            yield self.tensor(self._inputs[_NORM].name, _NORMALIZED)
        if _PROMPT in self._inputs and job.prompt is not None:
            yield self.tensor(self._inputs[_PROMPT].name, job.prompt)
        if _TEMPERATURE in self._inputs:
            yield self.tensor(self._inputs[_TEMPERATURE].name, job.temperature or 0.0)

    def _prefix(self, job: TranscriptionJob, language: str | None) -> str:
        """Return the prompt of Whisper's decoder. An empty one would mean Korean to sherpa's code."""
        before = ""
        if job.prompt is not None:
            before = f"<|startofprev|> {job.prompt}"
        translates = isinstance(job, TranslationJob)
        if language is None and translates:
            raise UnsupportedParameter(
                f"The model '{self.config.name}' can translate only from a language that its settings name "
                "('audio.language'): its tensors do not return the language.",
                param="model",
            )
        if language is None:
            # Whisper then begins with the language itself.
            return f"{before}<|startoftranscript|>"
        task = "transcribe"
        if translates:
            task = "translate"
        return f"{before}<|startoftranscript|><|{self._languages[language]}|><|{task}|><|notimestamps|>"

    @property
    def _recognition(self) -> Recognition:
        recognition = self.capabilities.recognition
        assert recognition is not None, "it is a recognizer"
        return recognition

    def decode(self, job: TranscriptionJob, responses: Sequence[InferResponse], /) -> Transcript:
        """Return what is spoken, also for the first of the responses. Raises :class:`UpstreamError`."""
        if self._ids:
            return Transcript(text="", token_ids=self._row(job, responses))
        if self._text == "delta":
            text = "".join(map(self._text_of, responses))
        else:
            # The last response may be empty.
            text = next(filter(None, map(self._text_of, reversed(responses))), "")
        language = next((code for code in _TAG.findall(text) if code in LANGUAGES), None)
        named = self._last_text(_LANGUAGE, responses)
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
            for each in self._listed(_SEGMENTS, _decode_segments, responses)
        ]
        words = [
            Word(start=each.start, end=each.end, text=each.word)
            for each in self._listed(_WORDS, _decode_words, responses)
        ]
        return Transcript(
            text=_TAG.sub("", text).strip(),
            language=language,
            segments=segments,
            words=words,
            logprobs=self._listed(_LOGPROBS, _decode_logprobs, responses),
            avg_logprob=self._last_number(_AVG_LOGPROB, responses),
            no_speech_prob=self._last_number(_NO_SPEECH, responses),
        )

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
            model = self.config.name
            raise InvalidAnswer(f"its {use} cannot be read", model=model, detail=str(error)) from error

    def _text_of(self, response: InferResponse) -> str:
        return reduce(_written, response.texts(self._outputs[_TEXT].name), "")

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

    def _row(self, job: TranscriptionJob, responses: Sequence[InferResponse]) -> Sequence[int]:
        """Return the token ids of the best beam that follow the prompt."""
        name = self._outputs[_IDS].name
        for response in reversed(responses):
            tensor = response.tensor(name)
            ids = list(response.integers(name))
            if ids:
                if tensor is not None and tensor.shape:
                    width = tensor.shape[-1]
                else:
                    width = len(ids)
                row = ids[:width]
                prompt = list(job.prompt_ids)
                if row[: len(prompt)] == prompt:
                    return row[len(prompt) :]
                return row
        return ()


class AudioSequence:
    """
    The requests of a sequence for *job*, made while its audio comes.

    The first has *first* samples and each of the others *further* ones. See :class:`LiveEncoder`.
    """

    def __init__(self, adapter: Transcriber, job: TranscriptionJob, first: int, further: int) -> None:
        import numpy as np

        self._adapter = adapter
        self._job = job
        self._first = first
        self._further = further
        self._number = _sequence_number()
        self._begun = False
        self._rest = np.zeros(0, "<f4")
        self.closing = adapter.part(job, np.zeros(further, "<f4"), self._number, first=False, last=True)

    def feed(self, samples: bytes) -> Sequence[InferRequest]:
        import numpy as np

        self._rest = np.concatenate([self._rest, np.frombuffer(samples, "<f4")])
        requests = []
        while len(self._rest) >= self._size:
            requests.append(self._next(last=False))
        return requests

    def fill(self) -> Sequence[InferRequest]:
        self._pad()
        return [self._next(last=False)]

    def finish(self) -> InferRequest:
        # This silence counts: models recognize an end by what follows.
        self._pad()
        return self._next(last=True)

    @property
    def _size(self) -> int:
        """The samples of the next request."""
        if self._begun:
            return self._further
        return self._first

    def _pad(self) -> None:
        import numpy as np

        self._rest = np.pad(self._rest, (0, self._size - len(self._rest)))

    def _next(self, *, last: bool) -> InferRequest:
        size = self._size
        samples = self._rest[:size]
        self._rest = self._rest[size:]
        request = self._adapter.part(self._job, samples, self._number, first=not self._begun, last=last)
        self._begun = True
        return request


def _sequence_number() -> int:
    """Return the number of a new sequence. Its lower 32 bits are random, too: some models get only these."""
    return 1 + secrets.randbits(62)


def _written(text: str, word: str) -> str:
    return f"{text}{blank_between(text, word)}{word}"


def _bytes_element(data: bytes, *, encode: bool) -> bytes:
    """Return the raw contents of a BYTES tensor with *data*, in base64 if asked to *encode* it."""
    if encode:
        data = base64.b64encode(data)
    return len(data).to_bytes(4, "little") + data


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
