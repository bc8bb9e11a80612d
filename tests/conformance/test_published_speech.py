"""Public repositories for speech on a real Triton: stand-ins with exactly their tensors, asked over both transports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import soundfile

from tests.conformance.calls import in_session_loop
from tests.conformance.test_speech import spoken
from tests.conformance.test_transcriptions import TEXT, events, send
from tests.proxy_fixture import TRANSPORTS, Proxy, serving
from tests.speech import RATE, SENTENCE, speak, wav, write_whisper_tokenizer
from tests.standins import repository as standins
from tests.triton_fixture import TestTriton, embedded, shared
from triton_openai.config.tree import AudioSettings, ModelDefaults, ModelSettings, Settings, TritonSettings
from triton_openai.demo.configs import Contract, render
from triton_openai.demo.record import Record
from triton_openai.demo.repository import Builder, Site, build_repository

pytestmark = [in_session_loop, pytest.mark.extended]

_PROFILES = json.loads((Path(__file__).parents[1] / "fixtures" / "speech_profiles.json").read_text(encoding="utf-8"))
#: The models of each repository that clients ask for, by the names that they have here, where all share one Triton.
ENSEMBLES = {
    "sherpa_offline": ("sherpa offline", "transducer"),
    "sherpa_streaming_zipformer": ("sherpa streaming zipformer", "transducer"),
    "sherpa_zipformer": ("sherpa zipformer offline", "transducer"),
    "wenet": ("wenet cuda", "attention_rescoring"),
    "paraformer": ("paraformer offline", "infer_pipeline"),
    "streaming_paraformer": ("paraformer online", "streaming_paraformer"),
}
ALONE = {
    "infer_bls": ("sherpa whisper", "infer_bls", "recognizing"),
    "whisper": ("sherpa whisper", "whisper", "recognizing"),
    "speech_llm": ("sherpa speech_llm", "infer_bls", "recognizing"),
    "speech_encoder": ("sherpa speech_llm", "speech_encoder", "relaying"),
    "asr_ctc": ("nemo", "asr_ctc", "recognizing"),
    "ensemble_english_stt": ("chai", "ensemble_english_stt", "recognizing"),
    "whisper-large": ("triton-asr", "whisper-large", "recognizing"),
    "f5_tts": ("f5", "f5_tts", "synthesizer"),
    "spark_tts": ("spark", "spark_tts", "synthesizer"),
    "cosyvoice3": ("cosyvoice3", "cosyvoice3", "synthesizer"),
    "vocoder": ("cosyvoice3", "vocoder", "relaying"),
    "stream_tts": ("wetts", "stream_tts", "synthesizer"),
}


def _declared(repository: str, model: str) -> tuple[Contract, dict[str, Any]]:
    entry = _PROFILES[repository]["models"][model]
    options = {"max_batch_size": entry["max_batch_size"], "parameters": entry.get("parameters")}
    return Contract(entry["in"], entry["out"], steps=entry.get("steps", [])), options


def _ensemble(site: Site, name: str) -> None:
    repository, front = ENSEMBLES[name]
    contract, options = _declared(repository, front)
    steps = {step["model_name"]: f"{name}_{step['model_name']}" for step in contract.steps}
    site.write(name, render(name, contract, renamed=steps, max_batch_size=options["max_batch_size"]))
    for model, here in steps.items():
        own, settings = _declared(repository, model)
        config = render(here, own, backend="python", instances=1, **settings)
        if _PROFILES[repository]["models"][model].get("sequences"):
            config += standins._SEQUENCES
        site.write(here, config, "relaying")


def _alone(site: Site, name: str) -> None:
    repository, model, module = ALONE[name]
    contract, options = _declared(repository, model)
    decoupled = _PROFILES[repository]["models"][model].get("decoupled", False)
    contract = Contract(contract.inputs, contract.outputs)
    site.build(name, module, contract=contract, decoupled=decoupled, **options)


def _settings(voices: Path, tokenizer: str) -> Mapping[str, ModelSettings]:
    """Return the settings that the guide names for each model."""
    folder = AudioSettings(voices=str(voices))
    described = partial(ModelSettings, adapter="transcriber")
    return {
        "whisper": ModelSettings(tokenizer=tokenizer),
        "ensemble_english_stt": described(inputs={"audio": "audio_signal"}, outputs={"text": "decoded_texts"}),
        "whisper-large": described(
            inputs={"audio": "audio"}, outputs={"text": "transcription"}, constants={"sample_rate": 16_000}
        ),
        **dict.fromkeys(("f5_tts", "spark_tts", "cosyvoice3"), ModelSettings(audio=folder)),
        "stream_tts": ModelSettings(audio=AudioSettings(sample_rate=24_000)),
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A Triton with stand-ins for the published models."""
    folder = tmp_path_factory.mktemp("published")
    builders: dict[str, Builder] = {
        **dict.fromkeys(ENSEMBLES, (_ensemble, ())),
        **dict.fromkeys(ALONE, (_alone, ())),
    }
    modules = sorted((Path(standins.__file__).parent / "models").glob("*.py"))
    record = folder / "record.jsonl"
    repository = build_repository(
        folder / "repository", models=builders, builders=builders, standins=modules, record=record
    )
    server = embedded(repository)
    with shared(server):
        yield TestTriton(server, repository, Record(record))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def services(published: TestTriton, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Proxy]]:
    """The service over each transport."""
    voices = tmp_path_factory.mktemp("voices")
    tone = 0.3 * np.sin(np.arange(RATE) * 0.02)
    await asyncio.to_thread(soundfile.write, voices / "ada.wav", tone, RATE, subtype="PCM_16")
    (voices / "ada.txt").write_text("I am Ada.")
    whisper = str(write_whisper_tokenizer(tmp_path_factory.mktemp("tokenizer") / "whisper"))
    async with AsyncExitStack() as stack:
        found = {}
        for transport in TRANSPORTS:
            url = {"http": published.http_url, "grpc": published.grpc_url}[transport]
            # As an operator has it who serves a language model beside: its tokenizer is the one of all models.
            defaults = ModelDefaults(tokenizer=str(published.tokenizer))
            settings = Settings(triton=TritonSettings(url=(url,)), models=_settings(voices, whisper), defaults=defaults)
            found[transport] = await stack.enter_async_context(serving(settings, transport=transport))
            await found[transport].ready()
        yield found


_RECOGNIZERS = (
    *ENSEMBLES, "infer_bls", "whisper", "speech_llm", "asr_ctc", "ensemble_english_stt", "whisper-large",
)  # fmt: skip


async def test_published_recognizers(services: dict[str, Proxy]) -> None:
    """Each writes down every word of short and of longer recordings, whole and as a stream."""
    for words in (SENTENCE, [*SENTENCE] * 5):
        text = " ".join(words)
        file = wav(speak(words))
        for transport, proxy in services.items():
            for model in _RECOGNIZERS:
                answer = await send(proxy, file, model=model, language="en")
                assert (200, text) == (answer.status, answer.json.get("text")), (model, transport, answer.body[:300])
                stream = events(await send(proxy, file, model=model, stream="true"))
                assert text == stream[-1]["text"], (model, transport)


async def test_published_synthesizers(services: dict[str, Proxy]) -> None:
    """Each speaks, with a recording where its code needs one."""
    for transport, proxy in services.items():
        for model in ("f5_tts", "spark_tts", "cosyvoice3", "stream_tts"):
            body = {"model": model, "input": TEXT, "voice": "ada", "response_format": "flac"}
            answer = await proxy.post("/v1/audio/speech", body)
            assert 200 == answer.status, (model, transport, answer.body)
            assert len(answer.body) > 1000
    body = {"model": "f5_tts", "input": TEXT, "voice": "ada", "response_format": "pcm"}
    answer = await services["grpc"].post("/v1/audio/speech", body)
    assert np.array_equal(spoken(TEXT), np.frombuffer(answer.body, "<i2"))
