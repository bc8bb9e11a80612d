"""The adapter of recognizers: who is claimed, what is sent, and how answers are read."""

from __future__ import annotations

import base64
import io
import struct
import wave
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.cases import every_case
from tests.unit.adapters.test_profiles import check, profiles, registry, spec_of
from triton_openai.adapters.transcriber import Transcriber
from triton_openai.cli.inspect import audio_report
from triton_openai.errors import ConfigurationError, UnsupportedParameter, UpstreamError
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import TranscriptionJob, TranslationJob
from triton_openai.triton.binary_response import BinaryResponse, Layout
from triton_openai.triton.config_reader import read_model_config
from triton_openai.triton.tensors import EnsembleStep, JsonResponse, ModelConfig

WAV = ("WAV FP32 [-1]", "WAV_LENS INT32 [1]")
TEXT = ("TRANSCRIPTS STRING [1]",)
SAMPLES = array("f", [0.5, -0.5, 0.25] * 100)
JOB = TranscriptionJob(id="a", samples=SAMPLES.tobytes())


def config(inputs: tuple[str, ...], outputs: tuple[str, ...] = TEXT, **fields: Any) -> ModelConfig:
    """Return the config of a model with these tensors."""
    return ModelConfig(
        name="m",
        inputs={spec.name: spec for spec in map(spec_of, inputs)},
        outputs={spec.name: spec for spec in map(spec_of, outputs)},
        **{"max_batch_size": 8, **fields},
    )


def adapter(model: ModelConfig, interface: TensorMapping | None = None, **audio: Any) -> Transcriber:
    """Return the adapter of *model*, whose settings have *audio*."""
    if audio:
        interface = msgspec.structs.replace(interface or TensorMapping(), audio=AudioFormat(**audio))
    found = Transcriber.described(model, {}, interface)
    assert isinstance(found, Transcriber)
    return found


def sent(of: Transcriber, job: TranscriptionJob = JOB) -> dict[str, Any]:
    """Return the values of the inputs of the one request, checked as Triton does it."""
    (request,) = of.encode(job)
    raw = [tensor for tensor in request.inputs if isinstance(tensor.values, bytes)]
    check(
        msgspec.structs.replace(request, inputs=[each for each in request.inputs if each not in raw]), _lacking(of, raw)
    )
    return {tensor.name: tensor.values for tensor in request.inputs}


def _lacking(of: Transcriber, tensors: Any) -> ModelConfig:
    names = {tensor.name for tensor in tensors}
    inputs = {name: spec for name, spec in of.config.inputs.items() if name not in names}
    return msgspec.structs.replace(of.config, inputs=inputs)


@every_case(
    "inputs, outputs, claimed",
    [
        (WAV, TEXT, True),
        (("WAV FP16 [-1]",), TEXT, True),
        ((*WAV, "TEXT_PREFIX STRING [1]"), TEXT, True),
        ((*WAV, "LANGUAGE INT32 [1]", "TEXT_NORM INT32 [1]"), TEXT, True),
        ((*WAV, "DECODER_INPUT_IDS INT32 [-1]"), ("OUTPUT_IDS INT32 [-1]",), True),
        ((*WAV, "VOICE STRING [1]"), TEXT, False),
        ((*WAV, "VOICE? STRING [1]"), TEXT, True),
        (("WAV INT16 [-1]", "WAV_LENS INT32 [1]"), TEXT, False),
        (WAV, ("OUTPUT_0 STRING [1]",), False),
        (("INPUT_0 FP32 [-1]",), TEXT, False),
        (("TEXT STRING [1]",), TEXT, False),
    ],
)
def test_who_is_claimed(inputs, outputs, claimed):
    """The tensors of the public recognizers are claimed, and nothing that requires more."""
    claim = registry().claim(config(inputs, outputs))
    assert claimed == (claim is not None and claim.adapter is Transcriber)


@every_case(
    "inputs, fields, audio, seconds, max_tokens",
    [
        (WAV, {}, {}, 60, None),
        ((*WAV, "TEXT_PREFIX STRING [1]"), {}, {}, 20, 96),
        # Sherpa's infer_bls, and TensorRT-LLM's whisper_bls.
        ((*WAV, "TEXT_PREFIX STRING [1]"), {"parameters": {"engine_dir": "/engine"}}, {}, 20, 96),
        ((*WAV, "TEXT_PREFIX STRING [1]"), {"parameters": {"engine_dir": "/engine", "n_mels": "128"}}, {}, 10, 50),
        ((*WAV, "TEXT_PREFIX STRING [1]"), {"parameters": {"engine_dir": "/engine"}, "decoupled": True}, {}, 10, 50),
        ((*WAV, "TEXT_PREFIX STRING [1]"), {}, {"max_seconds": 25.0}, 25, 96),
    ],
)
def test_how_much_is_taken_at_once(inputs, fields, audio, seconds, max_tokens):
    """A limit of the model's own code holds, unless the settings have another."""
    recognition = adapter(config(inputs, **fields), **audio).capabilities.recognition
    assert recognition is not None
    assert (seconds, max_tokens) == (recognition.max_seconds, recognition.max_tokens)


@every_case("parameters, seconds, max_tokens", [({"engine_dir": "/engine", "n_mels": "80"}, 20, 96), ({}, 30, None)])
def test_how_much_an_engine_takes(parameters, seconds, max_tokens):
    """Sherpa's engine ends an answer after 96 tokens."""
    engine = config((*WAV, "DECODER_INPUT_IDS INT32 [-1]"), ("OUTPUT_IDS INT32 [-1]",), parameters=parameters)
    recognition = adapter(engine).capabilities.recognition
    assert recognition is not None
    assert (seconds, max_tokens) == (recognition.max_seconds, recognition.max_tokens)


@every_case(
    "inputs, parameters, said",
    [
        (
            (*WAV, "TEXT_PREFIX STRING [1]"),
            {"engine_dir": "/engine"},
            "20 s at once, answers of up to 96 tokens; silence",
        ),
        (WAV, {}, "60 s at once"),
        (
            (*WAV, "DECODER_INPUT_IDS INT32 [-1]"),
            {"engine_dir": "/engine"},
            "20 s at once, answers of up to 96 tokens; the next window begins where an answer ends; silence",
        ),
    ],
)
def test_what_inspect_says(inputs, parameters, said):
    """A person sees the window and the limit of a recognizer."""
    outputs = ("OUTPUT_IDS INT32 [-1]",) if len(inputs) == 3 and "IDS" in inputs[2] else TEXT
    text = audio_report(adapter(config(inputs, outputs, parameters=parameters)).capabilities)
    assert text is not None
    assert text.startswith(said)


def test_temperatures_and_probabilities():
    """A described model gets a temperature, and may return probabilities; NaN is none."""
    inputs, outputs = (
        ("SPEECH INT16 [-1]", "HEAT FP32 [1]"),
        ("TEXT STRING [1]", "LOGPROB FP32 [1]", "SILENCE FP32 [1]"),
    )
    mapping = TensorMapping(
        inputs={"audio": "SPEECH", "temperature": "HEAT"},
        outputs={"text": "TEXT", "avg_logprob": "LOGPROB", "no_speech_prob": "SILENCE"},
    )
    found = adapter(config(inputs, outputs, max_batch_size=0), mapping)
    recognition = found.capabilities.recognition
    assert recognition is not None
    assert recognition.temperature
    for temperature, expected in ((None, 0.0), (0.4, 0.4)):
        assert [expected] == list(sent(found, msgspec.structs.replace(JOB, temperature=temperature))["HEAT"])
    answer = found.decode(JOB, [JsonResponse(values={"TEXT": "never", "LOGPROB": [-0.5], "SILENCE": [float("nan")]})])
    assert (-0.5, None) == (answer.avg_logprob, answer.no_speech_prob)


def test_releases_of_whisper_bls():
    """Requests to every release of TensorRT-LLM's model are ones that Triton accepts."""
    for name, model in profiles().items():
        if name.startswith("whisper/"):
            inputs = sent(adapter(msgspec.structs.replace(model, decoupled=True)))
            assert ["<|startoftranscript|>"] == list(inputs["TEXT_PREFIX"])
            assert [300] == list(inputs["WAV_LENS"])
            assert 10 * 16_000 == len(inputs["WAV"]), "padded to what can be batched"


@every_case(
    "datatype, form",
    [("FP32", "<f4"), ("FP16", "<f2"), ("FP64", "<f8"), ("INT16", "<i2")],
)
def test_samples(datatype, form):
    """Samples have the type of the input; integers have their whole range."""
    described = TensorMapping(inputs={"audio": "A"}, outputs={"text": "T"})
    model = config((f"A {datatype} [-1,-1]",), ("T STRING [1]",), max_batch_size=0)
    values = sent(adapter(model, described))["A"]
    scale = 32_767 if datatype == "INT16" else 1
    assert np.allclose(np.array(SAMPLES) * scale, np.frombuffer(values, form), atol=0.6 if scale > 1 else 0)
    decoupled = adapter(msgspec.structs.replace(model, decoupled=True), described)
    (request,) = decoupled.encode(JOB)
    # HTTP's generate extension takes numbers, but none of 16 bits.
    assert (datatype != "FP16", True) == (request.json_expressible, request.prefers_grpc)


@every_case("datatype, form", [("UINT8", "file"), ("BYTES", "file"), ("BYTES", "base64")])
def test_files(datatype, form):
    """A file is WAV with 16 bits, as bytes, as one element, or in base64."""
    described = TensorMapping(inputs={"audio": "A"}, outputs={"text": "T"})
    model = config((f"A {'STRING' if datatype == 'BYTES' else datatype} [-1]",), ("T STRING [1]",))
    data = sent(adapter(model, described, form=form))["A"]
    if datatype == "BYTES":
        (length,) = struct.unpack_from("<I", data)
        data = data[4:]
        assert length == len(data)
    if form == "base64":
        data = base64.b64decode(data, validate=True)
    with wave.open(io.BytesIO(data)) as file:
        assert (1, 2, 16_000, 300) == (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes())


@every_case(
    "inputs, outputs, interface, audio, said",
    [
        (("TEXT STRING [1]",), TEXT, None, {}, "describe its own"),
        (WAV, TEXT, TensorMapping(inputs={"audio": "WAV"}, outputs={"text": "TRANSCRIPTS"}), {}, "requires the input"),
        (WAV, TEXT, TensorMapping(inputs={"audio": "WAVE"}, outputs={"text": "TRANSCRIPTS"}), {}, "did you mean 'WAV'"),
        (WAV, TEXT, TensorMapping(inputs={"audio": "WAV", "length": "WAV_LENS"}), {}, "outputs.text"),
        (WAV, TEXT, TensorMapping(outputs={"text": "TRANSCRIPTS"}), {}, "inputs.audio"),
        (WAV, TEXT, None, {"form": "file"}, "cannot take audio in the form 'file'"),
        ((*WAV, "TEXT_PREFIX STRING [1]"), TEXT, None, {"language": "klingon"}, "none of its"),
    ],
)
def test_wrong_settings(inputs, outputs, interface, audio, said):
    """A description that does not fit is an error that names what is wrong."""
    with pytest.raises(ConfigurationError, match=said):
        adapter(config(inputs, outputs), interface, **audio)


FEATURES = {"frame_length_ms": "25", "frame_shift_ms": "10", "sample_rate": "8000", "decode_chunk_size": "16"}


@every_case(
    "outputs, parameters, audio, expected",
    [
        # The public configs: sherpa's streaming zipformer, WeNet's and FunASR's.
        (("x FP32 [83,80]", "x_lens INT64 [1]"), FEATURES, {}, (8000, 6800, 5120)),
        (("speech FP16 [67,80]", "speech_lengths INT32 [1]"), {"chunk_size_s": "0.64"}, {}, (16_000, 11_040, 10_240)),
        (("speech FP32 [61,80]",), {"chunk_size_s": "0.6"}, {}, (16_000, 10_080, 9600)),
        (("x FP32 [83,80]",), FEATURES, {"sample_rate": 16_000}, (16_000, 13_600, 10_240)),
        (("x FP32 [20,80]",), FEATURES, {}, (8000, 5120, 5120)),
        (("x FP32 [-1,80]",), FEATURES, {"part_seconds": 0.5}, (16_000, 8000, 8000)),
        (("x FP32 [1]",), {}, {"part_seconds": 0.5}, (16_000, 8000, 8000)),
    ],
)
def test_sequences(outputs, parameters, audio, expected):
    """A streaming model gets a recording in parts that are as long as its code for features, or the settings, say."""
    features = config(("wav FP32 [-1]",), outputs, sequences=True, parameters=parameters)
    step = EnsembleStep(model="features", input_map={}, output_map={})
    model = config(WAV, steps=(step,))
    interface = TensorMapping(audio=AudioFormat(**audio)) if audio else None
    found = Transcriber.described(model, {"features": features}, interface)
    rate, first, further = expected
    recognition = found.capabilities.recognition
    assert recognition is not None
    assert (rate, True) == (recognition.sample_rate, found.capabilities.streaming)
    samples = np.arange(1, 3 * further + 2, dtype="<f4")
    for length, count in ((1, 1), (further, 1), (further + 1, 2), (3 * further + 1, 4), (0, 1)):
        (request,) = found.encode(TranscriptionJob(id="a", samples=samples[:length].tobytes()))
        parts = [request, *request.following]
        sent: list[dict[str, Any]] = [{tensor.name: tensor.values for tensor in part.inputs} for part in parts]
        lengths = [first, *[further] * (count - 1)]
        assert lengths == [value for each in sent for value in each["WAV_LENS"]], length
        whole = np.frombuffer(b"".join(each["WAV"] for each in sent), "<f4")
        assert [len(whole), 0] == [sum(lengths), np.count_nonzero(whole[length:])]
        assert np.array_equal(samples[:length], whole[:length])
        flags = [(part.parameters["sequence_start"], part.parameters["sequence_end"]) for part in parts]
        assert [(place == 0, place == count - 1) for place in range(count)] == flags
        (number,) = {part.parameters["sequence_id"] for part in parts}
        assert number != found.encode(JOB)[0].parameters["sequence_id"]


def test_sequences_that_are_not_served():
    """Without the length of a part, or decoupled, a streaming model is refused, and the error says what to do."""
    for decoupled, said in ((False, "audio.part_seconds"), (True, "decoupled")):
        with pytest.raises(ConfigurationError, match=said):
            adapter(config(WAV, sequences=True, decoupled=decoupled))
    assert read_model_config({"name": "m", "sequence_batching": {}}, "m").sequences
    # The seconds after which a sequence is forgotten; protobuf's JSON has 64 bits as a text.
    for batching, idle in (({}, 1.0), ({"max_sequence_idle_microseconds": "5000000"}, 5.0)):
        assert idle == read_model_config({"name": "m", "sequence_batching": batching}, "m").sequence_idle
    assert not read_model_config({"name": "m", "dynamic_batching": {}}, "m").sequences


def test_prefixes():
    """Whisper's prefix has the language, the task and the prompt, and a translation needs a language."""
    whisper = config((*WAV, "TEXT_PREFIX STRING [1]"))
    job = msgspec.structs.replace(JOB, language="de", prompt="Triton, vLLM")
    expected = "<|startofprev|> Triton, vLLM<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
    assert [expected] == list(sent(adapter(whisper, prompt=True), job)["TEXT_PREFIX"])
    with pytest.raises(UnsupportedParameter):
        adapter(whisper).encode(TranslationJob(id="a", samples=JOB.samples))
    (prefix,) = sent(adapter(whisper, language="German"), TranslationJob(id="a", samples=JOB.samples))["TEXT_PREFIX"]
    assert "<|startoftranscript|><|de|><|translate|><|notimestamps|>" == prefix


def test_the_engine_behind_a_model():
    """Sherpa's engine is found by its name, another one where there is no other."""
    text = config((*WAV, "TEXT_PREFIX STRING [1]"))
    engine = config((*WAV, "DECODER_INPUT_IDS INT32 [-1]"), ("OUTPUT_IDS INT32 [-1]",))
    for repository, expected in (
        ({"m": text}, None),
        ({"m": text, "other": engine}, engine),
        ({"m": text, "other": text, "whisper": engine, "second": engine}, engine),
        ({"m": text, "first": engine, "second": engine}, None),
    ):
        assert expected is Transcriber(text, repository).token_level
    assert Transcriber(config(WAV), {"whisper": engine}).token_level is None


def _ids(shape: tuple[int, ...], ids: list[int]) -> BinaryResponse:
    return BinaryResponse(Layout([("OUTPUT_IDS", "INT32", shape)]), [array("i", ids).tobytes()])


def test_token_ids_of_an_answer():
    """Of several beams the first counts, and what repeats the prompt is no part of the answer."""
    model = adapter(config((*WAV, "DECODER_INPUT_IDS INT32 [-1]"), ("OUTPUT_IDS INT32 [-1]",)))
    job = msgspec.structs.replace(JOB, prompt_ids=[50_258, 50_259])
    for response in (
        _ids((1, 4), [7, 8, 50_257, 50_257]),
        _ids((1, 2, 4), [7, 8, 50_257, 50_257, 1, 2, 3, 4]),
        _ids((6,), [50_258, 50_259, 7, 8, 50_257, 50_257]),
        JsonResponse({"OUTPUT_IDS": [7, 8, 50_257, 50_257]}),
    ):
        assert [7, 8, 50_257, 50_257] == list(model.decode(job, [response]).token_ids)
    assert not model.decode(job, []).token_ids


def test_texts_of_an_answer():
    """A cumulative text is the last one that is not empty; new texts are joined; tags tell the language."""
    responses = [JsonResponse({"TRANSCRIPTS": text}) for text in ("<|zh|><|NEUTRAL|><|Speech|><|woitn|>a", "", "b")]
    known = adapter(config(WAV, decoupled=True))
    found = known.decode(JOB, responses[:2])
    assert ("a", "zh") == (found.text, found.language)
    described = TensorMapping(
        inputs={"audio": "WAV", "length": "WAV_LENS"}, outputs={"text": "TRANSCRIPTS"}, text="delta"
    )
    assert "ab" == adapter(config(WAV, decoupled=True), described).decode(JOB, responses).text
    assert "" == known.decode(JOB, [JsonResponse({})]).text
    # Sherpa's code for transducers gives words, or the characters of a language without blanks.
    for elements, text in (
        (["never", "tried"], "never tried"),
        (["\u4f60", "\u597d", "ok", "ok"], "\u4f60\u597dok ok"),
    ):
        assert text == known.decode(JOB, [JsonResponse({"TRANSCRIPTS": elements})]).text


def test_segments_that_cannot_be_read():
    """A described output that is no list of segments is an error of the model."""
    described = TensorMapping(
        inputs={"audio": "WAV", "length": "WAV_LENS"}, outputs={"text": "TRANSCRIPTS", "segments": "S"}
    )
    model = adapter(config(WAV, (*TEXT, "S STRING [1]")), described)
    for text in ("no", "[1]", '[{"start": 0}]', '{"a": 1}'):
        with pytest.raises(UpstreamError):
            model.decode(JOB, [JsonResponse({"TRANSCRIPTS": "a", "S": text})])
