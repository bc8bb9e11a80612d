"""Synthesizers: which models are taken for one, what is known of them, what they are sent, and what they answer."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from tests.unit.adapters.test_cross_encoder import config
from triton_openai.adapters._common.base import Synthesis
from triton_openai.adapters._common.registry import Registry
from triton_openai.adapters.synthesizer import Synthesizer
from triton_openai.errors import ConfigurationError, InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import SynthesisJob, Voice
from triton_openai.triton.binary_response import BinaryResponse, Layout
from triton_openai.triton.tensors import JsonResponse, ModelConfig

REGISTRY = Registry()
REFERENCE = ["reference_wav FP32 -1", "reference_wav_len INT32 1", "reference_text BYTES 1"]
TARGET, WAVEFORM = "target_text BYTES 1", ["waveform FP32 -1"]
COSYVOICE = {"llm_tokenizer_dir": "/llm", "model_dir": "/cosyvoice"}
VOICE = Voice(name="ada", known_as="af_ada", samples=array("f", [0.5, -0.5]).tobytes(), text="I am Ada.", seconds=1.0)
KOKORO = config(["target_text BYTES 1", "voice? BYTES 1", "speed? FP32 1"], ["waveform FP32 -1"], 0)


def zero_shot(parameters: dict[str, str], *, decoupled: bool = True, optional: bool = False) -> ModelConfig:
    """Return the config of a zero-shot synthesizer."""
    inputs = [each.replace(" ", "? ", 1) if optional else each for each in REFERENCE]
    return msgspec.structs.replace(config([*inputs, TARGET], WAVEFORM), decoupled=decoupled, parameters=parameters)


def synthesis_of(adapter: Synthesizer) -> Synthesis:
    """Return how the model of *adapter* speaks."""
    found = adapter.capabilities.synthesis
    assert found is not None
    return found


@every_case(
    "model, reason",
    [
        (zero_shot(COSYVOICE), "reference_wav, reference_text and target_text in and waveform out"),
        (KOKORO, "one required BYTES input and an output for audio (target_text is text, voice is voice"),
        (config(["text BYTES 1"], ["audio BYTES 1"]), "text is text, audio is audio"),
        (config(["input BYTES 1", "speaker INT32 1"], ["wav INT16 -1"]), "input is text, speaker is voice, wav is"),
    ],
)  # fmt: skip
def test_claimed(model: ModelConfig, reason: str) -> None:
    """By the tensors that zero-shot synthesizers share, or by a text and an output whose name says what it has."""
    claim = REGISTRY.claim(model)

    assert claim is not None
    assert claim.adapter is Synthesizer
    assert reason in claim.reason


@every_case("model", [
    config(["text BYTES 1"], ["embedding FP32 384"]), config(["audio FP32 -1"], ["waveform FP32 -1"]),
    config(["text BYTES 1", "other BYTES 1"], ["waveform FP32 -1"]), config(["text BYTES 1"], ["audio INT64 -1"]),
])  # fmt: skip
def test_not_claimed(model: ModelConfig) -> None:
    """Embeddings, models of audio, and what needs more than a text are left to others."""
    assert Synthesizer.matches(model) is None


@every_case(
    "model, repository, expected",
    [
        (zero_shot(COSYVOICE), {}, Synthesis(rate=24_000, max_seconds=30, reference_rate=16_000)),
        (zero_shot(COSYVOICE, optional=True), {},
         Synthesis(rate=24_000, max_seconds=30, reference_rate=16_000, has_own_voice=True)),
        (zero_shot(COSYVOICE, optional=True), {"token2wav_dit": config([], [])},
         Synthesis(rate=24_000, max_seconds=30, reference_rate=16_000, voices_by_transcript=True)),
        (zero_shot(COSYVOICE, optional=True), {"vocoder": config([], [])},
         Synthesis(rate=24_000, max_seconds=30, reference_rate=16_000, voices_by_transcript=True)),
        (zero_shot({"audio_tokenizer_frame_rate": "50", "audio_chunk_overlap_duration": "0.2"}), {},
         Synthesis(rate=16_000, max_seconds=10, reference_rate=16_000, overlap=0.2)),
        (zero_shot({"stream_factor": "2", "audio_chunk_overlap_duration": "${overlap}"}), {},
         Synthesis(rate=16_000, max_seconds=10, reference_rate=16_000, overlap=0.1)),
        (zero_shot({"audio_tokenizer_frame_rate": "50"}, decoupled=False), {},
         Synthesis(rate=16_000, max_seconds=10, reference_rate=16_000)),
        (zero_shot({"vocab_file": "v", "vocoder": "vocos", "reference_audio_sample_rate": "22050"}), {},
         Synthesis(rate=24_000, max_seconds=43.7, with_reference=True, reference_rate=22_050)),
    ],
)  # fmt: skip
def test_kinds(model: ModelConfig, repository: dict[str, ModelConfig], expected: Synthesis) -> None:
    """The names of the parameters show rates, the longest output and how parts are joined."""
    assert expected == synthesis_of(Synthesizer(model, repository))


def test_what_the_operator_says() -> None:
    """Rates and lengths in the settings take the place of what the config shows, and of what it does not."""
    told = AudioFormat(sample_rate=22_050, reference_sample_rate=8_000, overlap_seconds=0.5, max_seconds=5)
    found = synthesis_of(Synthesizer(zero_shot({"llm_tokenizer_dir": "/llm"}), {}, TensorMapping(audio=told)))
    assert Synthesis(rate=22_050, max_seconds=5, reference_rate=8_000, overlap=0.5) == found
    found = synthesis_of(Synthesizer(KOKORO, {}, TensorMapping(audio=AudioFormat(sample_rate=24_000))))
    assert Synthesis(rate=24_000, max_seconds=30, voice_type=str, has_own_voice=True) == found


@every_case(
    "model, interface, message",
    [
        (zero_shot({"llm_tokenizer_dir": "/llm"}), None, "audio.sample_rate and audio.reference_sample_rate"),
        (KOKORO, None, "say it with audio.sample_rate in"),
        (KOKORO, TensorMapping(inputs={"txt": "target_text"}), "did you mean 'text'"),
        (KOKORO, TensorMapping(inputs={"text": "target_text"}), "do not name 'outputs.audio'"),
        (KOKORO, TensorMapping(inputs={"text": "target_text", "voice": "speed"}, outputs={"audio": "waveform"}),
         "which takes BYTES or an integer type"),
        (config(["text BYTES 1"], ["embedding FP32 384"]), None, "do not name"),
    ],
)  # fmt: skip
def test_wrong_descriptions(model: ModelConfig, interface: TensorMapping | None, message: str) -> None:
    """A rate that nobody says is no guess, and a mistake in a description is told."""
    with pytest.raises(ConfigurationError, match=message):
        Synthesizer(model, {}, interface)


def sent(adapter: Synthesizer, **fields: Any) -> dict[str, Any]:
    """Return what *adapter* sends for a job."""
    (request,) = adapter.encode(SynthesisJob(id="speech-1", **{"text": "Hello.", **fields}))
    return {tensor.name: list(tensor.values) for tensor in request.inputs}


def test_a_recording_is_sent() -> None:
    """With its samples, their number, and what is said in it; an instruction stands in front of that."""
    recording = {"reference_wav": [0.5, -0.5], "reference_wav_len": [2], "reference_text": ["I am Ada."]}
    expected = {"target_text": ["Hello."], **recording}
    assert expected == sent(Synthesizer(zero_shot(COSYVOICE), {}), voice=VOICE)
    third = Synthesizer(zero_shot(COSYVOICE, optional=True), {"vocoder": config([], [])})
    said = sent(third, voice=VOICE, instructions="Whisper.")["reference_text"]
    assert ["Whisper.<|endofprompt|>I am Ada."] == said
    assert {"target_text": ["Hello."]} == sent(third)


def test_a_described_model_gets_what_it_takes() -> None:
    """Voice and speed by their inputs; a speed of 1 is sent too, and constants where nothing takes their place."""
    told = TensorMapping(
        inputs={"text": "target_text", "voice": "voice", "speed": "speed"},
        outputs={"audio": "waveform"},
        constants={"voice": "af_eve"},
        audio=AudioFormat(sample_rate=24_000),
    )
    adapter = Synthesizer(KOKORO, {}, told)
    assert {"target_text": ["Hello."], "voice": ["af_ada"], "speed": [1.5]} == sent(adapter, voice=VOICE, speed=1.5)
    assert {"target_text": ["Hello."], "voice": ["af_eve"], "speed": [1.0]} == sent(adapter)


@every_case("field, value", [("speed", 1.5), ("instructions", "Sing."), ("language", "en")])
def test_what_a_model_does_not_take(field: str, value: Any) -> None:
    """What a model does not take is refused by its name."""
    with pytest.raises(UnsupportedParameter) as caught:
        sent(Synthesizer(zero_shot(COSYVOICE), {}), voice=VOICE, **{field: value})
    assert field == caught.value.param


def test_a_speed_that_no_input_holds() -> None:
    """It is an error of the request, not of the model."""
    adapter = Synthesizer(KOKORO, {}, TensorMapping(audio=AudioFormat(sample_rate=24_000)))
    with pytest.raises(InvalidRequest, match="speed"):
        sent(adapter, speed=1e300)


@every_case(
    "datatype, raw, values, expected",
    [
        ("FP32", array("f", [0.5]).tobytes(), [0.5], array("f", [0.5]).tobytes()),
        ("INT16", array("h", [-5]).tobytes(), [-5], array("h", [-5]).tobytes()),
        ("FP16", b"\x00\x38", None, b"\x00\x38"),
        ("BYTES", struct.pack("<I", 4) + b"RI\xff\xfe", None, b"RI\xff\xfe"),
        ("UINT8", b"RI\xff", [82, 73, 255], b"RI\xff"),
    ],
)
def test_answers(datatype: str, raw: bytes, values: list[Any] | None, expected: bytes) -> None:
    """Samples and files come out as they are, over both transports, also from responses without any."""
    adapter = Synthesizer(
        config(["text BYTES 1"], [f"audio {datatype} -1"]), {}, TensorMapping(audio=AudioFormat(sample_rate=1))
    )
    job, shape = SynthesisJob(id="1", text=""), (len(raw) if datatype == "UINT8" else 1,)
    layout = Layout([("audio", datatype, shape)])
    found = adapter.decode(job, [BinaryResponse(layout, [raw])])
    assert ("file" if datatype in ("BYTES", "UINT8") else datatype, expected) == (found.datatype, found.data)
    (request,) = adapter.encode(job)
    assert (values is not None) == request.json_expressible
    if values is not None:
        assert expected == adapter.decode(job, [JsonResponse({"audio": values})]).data
        assert b"" == adapter.decode(job, [JsonResponse({})]).data
        with pytest.raises(UpstreamError, match="is invalid: the output"):
            adapter.decode(job, [JsonResponse({"audio": ["x"]})])
