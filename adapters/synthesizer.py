"""
Models that speak a text.

Zero-shot synthesizers (CosyVoice, F5-TTS, Spark-TTS) imitate a recording that comes with every request; they share
their tensors, and differ in rates, lengths and in what their parts are. Any other model that takes a text and gives
audio is taken by an output whose name says so, or as the operator describes it in the settings
(:class:`TensorMapping`).
Sources: ``runtime/triton_trtllm`` of FunAudioLLM/CosyVoice (31a0adc), SparkAudio/Spark-TTS (1e520d3) and SWivid/F5-TTS.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from triton_openai.adapters._common.base import Capabilities, Synthesis, check_range
from triton_openai.adapters._common.tensor_mapping import (
    DescribedAdapter,
    Kind,
    constants,
    fits,
    listed_uses,
    named_tensors,
)
from triton_openai.errors import ConfigurationError, UnsupportedParameter
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import Speech, SynthesisJob
from triton_openai.triton.tensors import ARRAY_CODES, InferRequest, InferResponse, ModelConfig, Tensor

_REFERENCE = "reference_wav"
_LENGTH = "reference_wav_len"
_SAID = "reference_text"
_TARGET = "target_text"
_WAVEFORM = "waveform"
_TEXT = "text"
_VOICE = "voice"
_AUDIO = "audio"
#: What the settings can name, with the kind of its values.
INPUTS: Mapping[str, Kind] = {
    _TEXT: "text", _VOICE: "code", "speed": "number", "instructions": "text", "language": "text",
}  # fmt: skip
OUTPUTS: Mapping[str, Kind] = {_AUDIO: "audio"}
# What models call them; in lower case.
_NAMES: Mapping[str, tuple[str, ...]] = {
    _VOICE: ("voice", "speaker", "speaker_id", "voice_id"),
    "speed": ("speed", "rate"),
    "instructions": ("instructions", "instruction", "instruct_text", "style_prompt"),
    "language": ("language", "lang", "language_code"),
    _AUDIO: (_WAVEFORM, "audio", "wav", "speech", "audio_output"),
}
_END_OF_INSTRUCTIONS = "<|endofprompt|>"
# Of the best audio: 48,000 numbers of 8 bytes.
_BYTES_OF_SECOND = 384_000
# The longest speech of a model whose limit is not known: about two sentences.
_MAX_SECONDS = 30.0


# What is known of the kinds of zero-shot synthesizers, and of all others.
_SPARK = Synthesis(reference_rate=16_000, rate=16_000, max_seconds=10.0, overlap=0.1)
_F5 = Synthesis(reference_rate=24_000, rate=24_000, max_seconds=43.7, with_reference=True)
_COSYVOICE = Synthesis(reference_rate=16_000, rate=24_000, max_seconds=30.0)
# CosyVoice 2 with DiT and CosyVoice 3 keep what they compute of a recording by its text alone.
_COSYVOICE_DIT = Synthesis(reference_rate=16_000, rate=24_000, max_seconds=30.0, voices_by_transcript=True)
_COSYVOICE_3 = Synthesis(reference_rate=16_000, rate=24_000, max_seconds=30.0, voices_by_transcript=True)
_OTHER = Synthesis(rate=0, max_seconds=_MAX_SECONDS)


def _zero_shot(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> Synthesis:
    """
    Return the kind of a zero-shot synthesizer by the names of its parameters.

    All of CosyVoice have the same config. They differ in the models that their code calls, which are in *repository*.
    """
    names = config.parameters.keys()
    if names & {"audio_tokenizer_frame_rate", "stream_factor"}:
        return _SPARK
    if {"vocab_file", "vocoder"} <= names:
        return _F5
    if "model_dir" not in names:
        return _OTHER
    if "token2wav_dit" in repository:
        return _COSYVOICE_DIT
    if "vocoder" in repository:
        return _COSYVOICE_3
    return _COSYVOICE


def _has_own_voice(config: ModelConfig, kind: Synthesis) -> bool:
    """
    Return whether a zero-shot synthesizer speaks without a recording.

    F5-TTS and two of CosyVoice declare a part of the recording as optional, but their code requires it. Only the code
    of CosyVoice 2 without DiT has a speaker of its own (``spk2info.pt``).
    """
    if kind in (_F5, _COSYVOICE_DIT, _COSYVOICE_3):
        return False
    return all(config.inputs[name].optional for name in (_REFERENCE, _LENGTH, _SAID) if name in config.inputs)


def _is_zero_shot(config: ModelConfig) -> bool:
    return {_REFERENCE, _SAID, _TARGET} <= config.inputs.keys() and _WAVEFORM in config.outputs


def _found(config: ModelConfig) -> TensorMapping | None:
    """Return what *config* shows by itself; ``None`` where it is no synthesizer, or more has to be known."""
    tensors: dict[str, dict[str, str]] = {"inputs": {}, "outputs": {}}
    for side, specs, kinds in (("inputs", config.inputs, INPUTS), ("outputs", config.outputs, OUTPUTS)):
        known = {name.lower(): name for name in specs}
        for use, kind in kinds.items():
            fitting = [known[name] for name in _NAMES.get(use, ()) if name in known]
            if fitting and fits(kind, specs[fitting[0]].datatype):
                tensors[side][use] = fitting[0]
    texts = [spec for spec in config.required if spec.name not in tensors["inputs"].values()]
    if len(texts) != 1 or texts[0].datatype != "BYTES" or _AUDIO not in tensors["outputs"]:
        return None
    return TensorMapping(inputs={_TEXT: texts[0].name, **tensors["inputs"]}, outputs=tensors["outputs"])


class Synthesizer(DescribedAdapter):
    """Text in and speech out, in one response or in several."""

    name = "synthesizer"
    jobs = (SynthesisJob,)
    # JSON takes ten times the bytes of samples.
    prefers_grpc = True

    def _bind(self, mapping: TensorMapping | None) -> None:
        config = self.config
        audio = (mapping and mapping.audio) or AudioFormat()
        described = mapping is not None and mapping.describes
        self._zero_shot = _is_zero_shot(config) and not described
        if self._zero_shot:
            kind = _zero_shot(config, self.repository)
            _check_transfer(config, self.repository)
        else:
            kind = _OTHER
        if self._zero_shot:
            tensors = TensorMapping(inputs={_TEXT: _TARGET}, outputs={_AUDIO: _WAVEFORM})
        else:
            tensors = (mapping if described else _found(config)) or TensorMapping()
        named_tensors(config, tensors, "inputs", INPUTS, required=_TEXT)
        self._output = named_tensors(config, tensors, "outputs", OUTPUTS, required=_AUDIO)[_AUDIO]
        self._inputs = tensors.inputs
        self._gives_files = self._output.datatype in ("BYTES", "UINT8")
        filled = [self._inputs[use] for use in (_TEXT, _VOICE, "speed") if use in self._inputs]
        if self._zero_shot:
            filled += [_REFERENCE, _LENGTH, _SAID]
        constant_values = constants(config, mapping, filled=filled)
        self._constants = [self.tensor(name, *values) for name, values in constant_values.items()]
        rate = audio.sample_rate or kind.rate
        reference_rate = 0
        if self._zero_shot:
            reference_rate = audio.reference_sample_rate or _declared(config) or kind.reference_rate
        self._check_rates(rate, reference_rate)
        if self._zero_shot:
            own = _has_own_voice(config, kind) or _REFERENCE in constant_values
        else:
            voice = self._inputs.get(_VOICE)
            own = voice is None or config.inputs[voice].optional or voice in constant_values
        overlap = audio.overlap_seconds
        if overlap is None:
            if kind is not _OTHER and config.decoupled:
                overlap = _overlap(config, kind.overlap)
            else:
                overlap = 0.0
        self._takes_prompt = kind is _COSYVOICE_3
        synthesis = Synthesis(
            rate=0 if self._gives_files else rate,
            max_seconds=audio.max_seconds or kind.max_seconds,
            with_reference=kind.with_reference and audio.max_seconds is None,
            overlap=overlap,
            reference_rate=reference_rate,
            voices_by_transcript=kind.voices_by_transcript,
            voice_type=self._voice_type,
            has_own_voice=own,
        )
        self._max_seconds = synthesis.max_seconds
        self.capabilities = Capabilities(streaming=config.decoupled, synthesis=synthesis)

    def _check_rates(self, rate: int, reference_rate: int) -> None:
        """Raise :class:`ConfigurationError` for a rate that has to be known and is not."""
        if rate or self._gives_files:
            lacking = []
        else:
            lacking = ["audio.sample_rate"]
        if self._zero_shot and not reference_rate:
            lacking.append("audio.reference_sample_rate")
        if lacking:
            raise ConfigurationError(
                f"The config of the model '{self.config.name}' does not show the rate of its audio: say it with "
                f"{' and '.join(lacking)} in its settings."
            )

    @property
    def _voice_type(self) -> type[str] | type[int] | None:
        name = self._inputs.get(_VOICE)
        if name is None:
            return None
        if self.config.inputs[name].datatype == "BYTES":
            return str
        return int

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the tensors of a zero-shot synthesizer, or one required text and an output for audio."""
        if _is_zero_shot(config):
            return f"{_REFERENCE}, {_SAID} and {_TARGET} in and {_WAVEFORM} out"
        tensors = _found(config)
        if tensors is None:
            return None
        return f"one required BYTES input and an output for audio ({listed_uses(tensors)})"

    def encode(self, job: SynthesisJob, /) -> Sequence[InferRequest]:
        """Return the request. Raises :class:`UnsupportedParameter` for what the model does not take."""
        for field in ("speed", "instructions", "language"):
            taken = field in self._inputs or (field == "instructions" and self._takes_prompt)
            if getattr(job, field) is not None and not taken:
                raise UnsupportedParameter(f"The model '{self.config.name}' does not take '{field}'.", param=field)
        if job.voice is None:
            voice = None
        else:
            voice = job.voice.known_as
        values: dict[str, str | float | None] = {
            **{_TEXT: job.text, _VOICE: voice},
            **{"instructions": job.instructions, "language": job.language},
        }
        if "speed" in self._inputs:
            speed = 1.0
            if job.speed is not None:
                speed = job.speed
            values["speed"] = speed
            check_range("speed", speed, self.config.inputs[self._inputs["speed"]].datatype)
        inputs = [
            self.tensor(self._inputs[use], value)
            for use, value in values.items()
            if value is not None and use in self._inputs
        ]
        if self._zero_shot:
            inputs += self._reference(job)
        request = self.described_request(job.id, inputs, self._constants, [self._output.name])
        # Twice the longest, as a model may speak slowly.
        spoken = int(2 * self._max_seconds * _BYTES_OF_SECOND)
        request = msgspec.structs.replace(request, max_answer=max(request.max_answer, spoken))
        if self._output.datatype in ("FP16", "BYTES"):
            request = msgspec.structs.replace(request, json_expressible=False)
        return [request]

    def _reference(self, job: SynthesisJob) -> list[Tensor]:
        """Return the inputs with the recording, none for a model's own voice."""
        if job.voice is None:
            return []
        samples = array("f", job.voice.samples)
        reference_text = job.voice.text
        if job.instructions is not None:
            reference_text = f"{job.instructions}{_END_OF_INSTRUCTIONS}{reference_text}"
        return [
            self.vector(_REFERENCE, samples),
            *self.declared_tensors(**{_LENGTH: len(samples), _SAID: reference_text}),
        ]

    def decode(self, job: SynthesisJob, responses: Sequence[InferResponse], /) -> Speech:
        return Speech(
            data=b"".join([self._data(response) for response in responses]),
            datatype="file" if self._gives_files else self._output.datatype,  # type: ignore[arg-type]
        )

    def _data(self, response: InferResponse) -> bytes:
        name = self._output.name
        datatype = self._output.datatype
        tensor = response.tensor(name)
        if tensor is not None:
            if tensor.datatype != datatype:
                raise response.invalid(f"the output '{name}' is not {datatype}")
            if datatype != "BYTES":
                return bytes(tensor.data)
            # A file's bytes follow their number.
            size = len(tensor.data) - 4
            if size != -4 and int.from_bytes(tensor.data[:4], "little") != size:
                raise response.invalid(f"the output '{name}' is not one file")
            return bytes(tensor.data[4:])
        numbers = response.numbers(name)
        try:
            return array(ARRAY_CODES[datatype], numbers).tobytes()
        except (TypeError, OverflowError, KeyError) as error:
            raise response.invalid(f"the output '{name}' is not {datatype}") from error


def _check_transfer(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
    """Raise :class:`ConfigurationError` for a model whose code only streams, and whose config does not."""
    only_streams = "model_dir" in config.parameters and "token2wav_dit" in repository
    # With both of these models, it may be CosyVoice 2 without DiT.
    if only_streams and "token2wav" not in repository and not config.decoupled:
        raise ConfigurationError(
            f"The code of the model '{config.name}' (CosyVoice 2 with DiT) only streams: fill its config.pbtxt with "
            "decoupled_mode:True."
        )


def _declared(config: ModelConfig) -> int | None:
    value = config.parameter("reference_audio_sample_rate") or ""
    if value.isdecimal():
        return int(value)
    return None


def _overlap(config: ModelConfig, usual: float) -> float:
    try:
        return float(config.parameter("audio_chunk_overlap_duration") or usual)
    except ValueError:
        return usual
