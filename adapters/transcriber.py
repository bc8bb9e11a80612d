"""
Recognizers of speech: Whisper, Parakeet, SenseVoice, transducers, and any model with audio in and text out.

The public model repositories have the same tensors: ``WAV`` and ``WAV_LENS`` in and ``TRANSCRIPTS`` out (k2-fsa/sherpa,
TensorRT-LLM's whisper_bls, WeNet, FunASR), for Whisper with ``TEXT_PREFIX``, the prompt of its decoder as text, for
SenseVoice with ``LANGUAGE`` and ``TEXT_NORM``. Whisper's engine behind sherpa's takes and gives token ids
(``DECODER_INPUT_IDS``, ``OUTPUT_IDS``), which carry the language and times too. The operator describes all others in
the settings (:class:`TensorMapping`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from triton_openai.adapters._common import speech_repositories as repositories
from triton_openai.adapters._common import tensor_mapping as tensors
from triton_openai.adapters._common.audio_sequence import AudioSequence, sequence_number
from triton_openai.adapters._common.audio_tensor import AudioTensor
from triton_openai.adapters._common.base import Capabilities, Recognition
from triton_openai.adapters._common.speech_repositories import (
    AUDIO,
    IDS,
    INPUTS,
    LANGUAGE,
    LENGTH,
    LOGPROBS,
    NORM,
    OUTPUTS,
    PREFIX,
    PROMPT,
    SEGMENTS,
    TEMPERATURE,
    TEXT,
    WORDS,
)
from triton_openai.adapters._common.transcript_reader import TranscriptReader
from triton_openai.errors import ConfigurationError, UnsupportedParameter
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import Transcript, TranscriptionJob, TranslationJob
from triton_openai.languages import LANGUAGES, code_of
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor

# SenseVoice's languages, and its switch for inverse text normalization: numbers are written in digits.
_SENSEVOICE: Mapping[str, int] = {"auto": 0, "zh": 3, "en": 4, "yue": 7, "ja": 11, "ko": 12}
_AUTO = "auto"
_NORMALIZED = 14
# The name that sherpa's code for Whisper calls its engine by.
_ENGINE = "whisper"
# The token that every tokenizer of Whisper's has.
_START = "<|startoftranscript|>"


class Transcriber(tensors.DescribedAdapter):
    """Sends one recording in each request."""

    name = "transcriber"
    token_level_adds_times = True

    def _bind(self, mapping: TensorMapping | None) -> None:
        config = self.config
        audio = (mapping and mapping.audio) or AudioFormat()
        if mapping is not None and mapping.describes:
            inputs = tensors.named_tensors(config, mapping, "inputs", INPUTS, required=AUDIO)
            outputs = tensors.named_tensors(config, mapping, "outputs", OUTPUTS, required=TEXT)
        else:
            mapping = None
            inputs, outputs = repositories.known_tensors(config)
            if not inputs:
                raise ConfigurationError(
                    f"The model '{config.name}' has none of the tensors of the public recognizers: describe its own "
                    "with 'inputs', 'constants' and 'outputs' in its settings."
                )
        self._inputs = inputs
        self._outputs = outputs
        self._ids = IDS in inputs
        self._whisper = self._ids or (PREFIX in inputs and not repositories.is_speech_llm(config, self.repository))
        if mapping is not None:
            deltas = mapping.text == "delta"
        else:
            deltas = repositories.answers_in_new_words(config)
        self._reader = TranscriptReader(config.name, outputs, deltas=deltas)
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
        filled = [spec.name for use, spec in inputs.items() if use not in (LANGUAGE, PROMPT)]
        if LANGUAGE in inputs and (self._language or _AUTO in self._languages):
            filled.append(inputs[LANGUAGE].name)
        self._constants = tensors.constants(config, mapping, filled=filled)
        self._pad = audio.pad_seconds
        if self._pad is None:
            self._pad = repositories.padding(config, inputs)
        rate, self._parts = self._sequence(audio)
        self._audio = AudioTensor(config, inputs[AUDIO], audio.form, rate)
        idle = None
        if self._parts is not None:
            steps = (config, *(self.repository.get(step.model, config) for step in config.steps))
            idle = min(step.sequence_idle for step in steps if step.sequences)
        self.prefers_grpc = config.decoupled
        if self._whisper:
            self.jobs = (TranscriptionJob, TranslationJob)
        else:
            self.jobs = (TranscriptionJob,)
        max_tokens = repositories.max_tokens(config, whisper=self._whisper, token_ids=self._ids)
        self.capabilities = Capabilities(
            streaming=(config.decoupled or self._parts is not None) and not self._ids,
            tokens=self._ids,
            tokenizer_has=(_START,) if self._ids else (),
            recognition=Recognition(
                sample_rate=rate,
                max_seconds=audio.max_seconds or repositories.max_seconds(inputs, max_tokens),
                languages=[code for code in self._languages if code != _AUTO],
                language=self._language,
                prompt=bool(audio.prompt) and (self._whisper or PROMPT in inputs),
                live_idle=idle,
                segments=self._ids or SEGMENTS in outputs,
                words=WORDS in outputs,
                logprobs=LOGPROBS in outputs,
                temperature=TEMPERATURE in inputs,
                max_tokens=max_tokens,
                invents=self._whisper,
                token_ids=self._ids,
            ),
        )

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
        if LANGUAGE in self._inputs and NORM in self._inputs:
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
        rate, parts = next(
            filter(None, (repositories.framing(step, audio.sample_rate) for step in sequences)), (16_000, None)
        )
        if audio.part_seconds is not None:
            rate = audio.sample_rate or rate
            parts = (int(audio.part_seconds * rate),) * 2
        if parts is None:
            raise ConfigurationError(f"{what}. Its config does not say how long each is: set 'audio.part_seconds'.")
        return rate, parts

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the tensors of the public recognizers."""
        inputs, _ = repositories.known_tensors(config)
        if not inputs:
            return None
        names = ", ".join(spec.name for spec in inputs.values())
        return f"audio in ({names}) and {'token ids' if IDS in inputs else 'text'} out"

    @property
    def token_level(self) -> ModelConfig | None:
        if not self._whisper or self._ids:
            return None
        engines = {
            name: config for name, config in self.repository.items() if IDS in repositories.known_tensors(config)[0]
        }
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
        number = sequence_number()
        parts = []
        for end in ends:
            start = end - further
            if end == first:
                start = 0
            parts.append(self._part(job, samples[start:end], number, first=end == first, last=end == ends[-1]))
        return [replace(parts[0], following=tuple(parts[1:]))]

    def _part(self, job: TranscriptionJob, samples: Any, number: int, *, first: bool, last: bool) -> InferRequest:
        """Return the request of a sequence, by its *number*, with a part of the audio: an array of *samples*."""
        parameters = {"sequence_id": number, "sequence_start": first, "sequence_end": last}
        return replace(self._request(job, samples, len(samples)), parameters=parameters)

    def begin_live(self, job: TranscriptionJob, /) -> AudioSequence:
        assert self._parts is not None, "the model takes sequences"
        return AudioSequence(partial(self._part, job), *self._parts)

    def _request(self, job: TranscriptionJob, samples: Any, length: int) -> InferRequest:
        inputs = [self._audio.tensor(samples), *self._other_inputs(job)]
        if LENGTH in self._inputs:
            # Without what is padded.
            inputs.append(self.tensor(self._inputs[LENGTH].name, length))
        constants = tensors.constant_tensors(self.config, self._constants, 1)
        return self.described_request(job.id, inputs, constants, [spec.name for spec in self._outputs.values()])

    def _other_inputs(self, job: TranscriptionJob) -> Iterator[Tensor]:
        """Yield the inputs beside the audio."""
        language = job.language or self._language
        if self._ids:
            yield self.vector(self._inputs[IDS].name, job.prompt_ids)
        elif self._whisper:
            yield self.tensor(self._inputs[PREFIX].name, self._prefix(job, language))
        elif PREFIX in self._inputs:
            yield self.tensor(self._inputs[PREFIX].name, "")
        elif LANGUAGE in self._inputs:
            spec = self._inputs[LANGUAGE]
            name = self._languages.get(language or _AUTO)
            if name is not None and spec.datatype == "BYTES":
                yield self.tensor(spec.name, str(name))
            elif name is not None:
                yield self.tensor(spec.name, int(name))
        if NORM in self._inputs:
            yield self.tensor(self._inputs[NORM].name, _NORMALIZED)
        if PROMPT in self._inputs and job.prompt is not None:
            yield self.tensor(self._inputs[PROMPT].name, job.prompt)
        if TEMPERATURE in self._inputs:
            yield self.tensor(self._inputs[TEMPERATURE].name, job.temperature or 0.0)

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
            return Transcript(text="", token_ids=self._reader.token_ids(job.prompt_ids, responses))
        return self._reader.transcript(responses)
