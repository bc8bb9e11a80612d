"""
Public Triton repositories for speech, whole: each of their models is served as its own code needs, or refused with
what to set.

``tests/fixtures/speech_profiles.json`` has what their configs declare.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from msgspec.structs import replace

from tests.cases import every_case
from tests.unit.adapters.test_profiles import spec_of
from triton_openai.adapters._common.base import Recognition, Synthesis
from triton_openai.adapters.transcriber import Transcriber
from triton_openai.config.tree import AudioSettings, ModelSettings, Settings
from triton_openai.jobs import TranscriptionJob, TranslationJob
from triton_openai.models.binding import Binder
from triton_openai.models.loading import Prompters
from triton_openai.models.served import ServedModel, Unserved
from triton_openai.triton.tensors import EnsembleStep, JsonResponse, ModelConfig

_FILE = Path(__file__).parents[2] / "fixtures" / "speech_profiles.json"
#: The model of each repository that clients ask for.
FRONTS = {
    "sherpa whisper": "infer_bls", "sherpa speech_llm": "infer_bls", "sherpa offline": "transducer",
    "sherpa streaming": "transducer", "sherpa streaming zipformer": "transducer",
    "sherpa zipformer offline": "transducer", "wenet cuda": "attention_rescoring", "wenet ft": "attention_rescoring",
    "paraformer offline": "infer_pipeline", "paraformer online": "streaming_paraformer", "sensevoice": "sensevoice",
    "cosyvoice2": "cosyvoice2", "cosyvoice2 dit": "cosyvoice2_dit", "cosyvoice3": "cosyvoice3", "f5": "f5_tts",
    "spark": "spark_tts", "nemo": "asr_ctc", "chai": "ensemble_english_stt", "triton-asr": "whisper-large",
    "wetts": "stream_tts",
}  # fmt: skip
JOB = TranscriptionJob(id="a", samples=np.zeros(1600, "<f4").tobytes())


@cache
def repositories() -> dict[str, dict[str, ModelConfig]]:
    """Return the configs of each repository by the names of the models."""
    entries = json.loads(_FILE.read_text(encoding="utf-8"))
    return {
        name: {model: _config(model, declared) for model, declared in entry["models"].items()}
        for name, entry in entries.items()
        if name != "_legend"
    }


def _config(name: str, declared: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        name=name,
        max_batch_size=declared["max_batch_size"],
        decoupled=declared.get("decoupled", False),
        sequences=declared.get("sequences", False),
        parameters=declared.get("parameters", {}),
        inputs={spec.name: spec for spec in map(spec_of, declared["in"])},
        outputs={spec.name: spec for spec in map(spec_of, declared["out"])},
        steps=tuple(
            EnsembleStep(model=step["model_name"], input_map=step["input_map"], output_map=step["output_map"])
            for step in declared.get("steps", ())
        ),
    )


def bound(repository: str, model: str | None = None, **settings: Any) -> ServedModel | Unserved:
    """Return a model of *repository* as it is bound with *settings*."""
    configs = repositories()[repository]
    name = model or FRONTS[repository]
    own = {name: ModelSettings(**settings)} if settings else {}
    return Binder(Settings(models=own), Prompters()).bind(configs[name], configs)


def served(repository: str, **settings: Any) -> ServedModel:
    """Return the front of *repository*, which is served."""
    model = bound(repository, **settings)
    assert isinstance(model, ServedModel), model
    return model


def recognition_of(model: ServedModel) -> Recognition:
    """Return how *model* recognizes speech."""
    found = model.adapter.capabilities.recognition
    assert found is not None
    return found


def synthesis_of(model: ServedModel) -> Synthesis:
    """Return how *model* speaks."""
    found = model.adapter.capabilities.synthesis
    assert found is not None
    return found


@every_case(
    "repository, streams, languages",
    [
        ("sherpa whisper", False, 100),
        ("sherpa speech_llm", True, 0),
        ("sherpa offline", False, 0),
        ("sherpa streaming", True, 0),
        ("sherpa streaming zipformer", True, 0),
        ("sherpa zipformer offline", False, 0),
        ("wenet cuda", False, 0),
        ("wenet ft", False, 0),
        ("paraformer offline", False, 0),
        ("paraformer online", True, 0),
        ("sensevoice", False, 5),
        ("nemo", False, 0),
    ],
)
def test_recognizers(repository: str, streams: bool, languages: int) -> None:
    """The front of each repository hears as it is; nothing that it calls is offered beside it."""
    model = served(repository)
    assert isinstance(model.adapter, Transcriber)
    assert (streams, languages) == (model.adapter.capabilities.streaming, len(recognition_of(model).languages))
    for request in model.adapter.encode(JOB):
        for part in (request, *request.following):
            names = {tensor.name for tensor in part.inputs}
            assert {spec.name for spec in model.adapter.config.required} <= names, "every required input is filled"
    others = [name for name in repositories()[repository] if name != model.name]
    offered = [name for name in others if isinstance(bound(repository, name), ServedModel)]
    # Whisper's engine can be asked too: it has times and languages.
    assert (["whisper"] if repository == "sherpa whisper" else []) == offered


def test_texts_of_a_streaming_paraformer_are_new_ones() -> None:
    """Its code sends the words of each part once: none of them is lost."""
    adapter = served("paraformer online").adapter
    responses = [JsonResponse({"TRANSCRIPTS": text}) for text in ("\u4f60\u597d", "", "\u4e16\u754c")]
    assert "\u4f60\u597d\u4e16\u754c" == adapter.decode(JOB, responses).text
    cumulative = served("sherpa streaming").adapter
    assert "\u4e16\u754c" == cumulative.decode(JOB, responses).text


def test_a_speech_llm_is_not_whisper() -> None:
    """It has the tensors of Whisper's front, but takes no language, translates nothing, and has no such engine."""
    beside = {**repositories()["sherpa speech_llm"], "whisper": repositories()["sherpa whisper"]["whisper"]}
    model = Binder(Settings(), Prompters()).bind(beside["infer_bls"], beside)
    assert isinstance(model, ServedModel)
    assert model.text_level is None
    assert (TranscriptionJob,) == tuple(model.adapter.jobs)
    (request,) = model.adapter.encode(replace(JOB, language="en"))
    assert [""] == [value for tensor in request.inputs if tensor.name == "TEXT_PREFIX" for value in tensor.values]
    whisper = served("sherpa whisper")
    assert (TranscriptionJob, TranslationJob) == tuple(whisper.adapter.jobs)


@every_case("repository", ["f5", "spark", "cosyvoice2 dit", "cosyvoice3"])
def test_synthesizers_without_voices(repository: str) -> None:
    """What cannot speak without a recording is refused at the start, with what to set."""
    model = bound(repository)
    assert isinstance(model, Unserved)
    assert model.failed
    assert "set 'audio.voices' to a folder" in model.why


@every_case(
    "repository, expected",
    [
        ("f5", Synthesis(rate=24_000, max_seconds=43.7, with_reference=True, reference_rate=24_000)),
        ("spark", Synthesis(rate=16_000, max_seconds=10, overlap=0.1, reference_rate=16_000)),
        ("cosyvoice2", Synthesis(rate=24_000, max_seconds=30, reference_rate=16_000, has_own_voice=True)),
        ("cosyvoice2 dit", Synthesis(rate=24_000, max_seconds=30, reference_rate=16_000, voices_by_transcript=True)),
        ("cosyvoice3", Synthesis(rate=24_000, max_seconds=30, reference_rate=16_000, voices_by_transcript=True)),
    ],
)
def test_synthesizers(repository: str, expected: Synthesis, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With a folder of voices each speaks, at its own rates."""
    folder = tmp_path_factory.mktemp("voices")
    soundfile.write(folder / "ada.wav", np.full(16_000, 0.25), 16_000, subtype="PCM_16")
    (folder / "ada.txt").write_text("I am Ada.")
    model = served(repository, audio=AudioSettings(voices=str(folder)))
    assert expected == synthesis_of(model)


def test_cosyvoice_2_has_a_voice_of_its_own() -> None:
    """Of CosyVoice, only the code of the first repository speaks without a recording."""
    assert synthesis_of(served("cosyvoice2")).has_own_voice


def test_a_model_whose_code_only_streams() -> None:
    """CosyVoice 2 with DiT fails every request unless it is decoupled: the error says how to fill its config."""
    configs = dict(repositories()["cosyvoice2 dit"])
    configs["cosyvoice2_dit"] = replace(configs["cosyvoice2_dit"], decoupled=False)
    model = Binder(Settings(), Prompters()).bind(configs["cosyvoice2_dit"], configs)
    assert isinstance(model, Unserved)
    assert "decoupled_mode:True" in model.why


@every_case("repository", ["cosyvoice2", "spark", "sherpa speech_llm"])
def test_language_models_of_speech(repository: str) -> None:
    """The engine behind a model that hears or speaks is no chat model."""
    engine = bound(repository, "tensorrt_llm")
    assert isinstance(engine, Unserved)
    assert engine.role is not None


@every_case(
    "repository, said",
    [
        ("chai", "adapter: transcriber, inputs: {audio: audio_signal}, outputs: {text: decoded_texts}"),
        ("triton-asr", "adapter: transcriber, inputs: {audio: audio}, outputs: {text: transcription}"),
        ("wetts", "say it with audio.sample_rate"),
    ],
)
def test_what_has_to_be_described(repository: str, said: str) -> None:
    """Models with tensors of their own are refused with the settings that serve them."""
    model = bound(repository)
    assert isinstance(model, Unserved)
    assert said in model.why


@every_case(
    "repository, settings, shape",
    [
        ("chai", {"inputs": {"audio": "audio_signal"}, "outputs": {"text": "decoded_texts"}}, (1, 1600)),
        (
            "triton-asr",
            {
                "inputs": {"audio": "audio"},
                "outputs": {"text": "transcription"},
                "constants": {"sample_rate": 16_000},
            },
            (1, 1600),
        ),
    ],
)
def test_described_recognizers(repository: str, settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    """With the description that the error shows, they are served."""
    adapter = served(repository, adapter="transcriber", **settings).adapter
    (request,) = adapter.encode(JOB)
    assert shape == request.inputs[0].shape
    assert {spec.name for spec in adapter.config.required} == {tensor.name for tensor in request.inputs}


def test_templates_that_were_not_filled() -> None:
    """A placeholder in the place of a number is named in the error."""
    configs = dict(repositories()["sherpa streaming"])
    features = configs["feature_extractor"]
    parameters = {**features.parameters, "decode_chunk_size": "DECODE_CHUNK_SIZE"}
    configs["feature_extractor"] = replace(features, parameters=parameters)
    model = Binder(Settings(), Prompters()).bind(configs["transducer"], configs)
    assert isinstance(model, Unserved)
    assert "'decode_chunk_size' of the model 'feature_extractor' is 'DECODE_CHUNK_SIZE'" in model.why
