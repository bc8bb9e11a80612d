"""Speech of models with known samples, over both transports, in every format, as files and as events."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import uuid
import wave
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import soundfile
from openai import AsyncOpenAI

from tests.conformance.calls import in_session_loop
from tests.proxy_fixture import TRANSPORTS, Proxy, proxy_settings, serving
from tests.standins.repository import SYNTHESIZERS, build_repository
from tests.triton_fixture import TestTriton, embedded, shared
from triton_openai.answer.speech import pieces
from triton_openai.config.tree import AccessSettings, AudioSettings, ModelSettings
from triton_openai.demo.record import Record

pytestmark = in_session_loop

PATH = "/v1/audio/speech"
TEXT = "The quick brown fox jumps over the lazy dog."
TWO = f"{TEXT} Triton answers in plain English, and in several parts."
#: What is said in the recording of each voice.
VOICES = {"ada": "I am Ada, and this is how I speak.", "bob": "I am Bob."}
FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
_PER_LETTER = 240


def spoken(text: str) -> Any:
    """Return the samples that the stand-ins make of *text*, as 16-bit integers."""
    steps = np.arange(_PER_LETTER * len(text)) * 37 + zlib.crc32(text.encode()) % 1999
    return (steps % 1999 - 999).astype(np.int16)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A Triton with all synthesizers."""
    folder = tmp_path_factory.mktemp("speech")
    record = folder / "record.jsonl"
    repository = build_repository(folder / "repository", models=SYNTHESIZERS, record=record)
    server = embedded(repository)
    with shared(server):
        yield TestTriton(server, repository, Record(record))


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings, one of them at another rate and with two channels."""
    folder = tmp_path_factory.mktemp("voices")
    for number, (name, text) in enumerate(VOICES.items(), 1):
        tone = 0.3 * np.sin(np.arange(16_000) * 0.02 * number)
        rate = 16_000 * number
        soundfile.write(folder / f"{name}.wav", np.stack([tone] * number, axis=1), rate, subtype="PCM_16")
        (folder / f"{name}.txt").write_text(text + "\n")
    return folder


def models_of(voices: Path) -> Mapping[str, ModelSettings]:
    """Return the settings of the models that need some."""
    folder = AudioSettings(voices=str(voices), voice_aliases={"alloy": "ada"})
    return {
        "cosyvoice2": ModelSettings(audio=folder, aliases=("tts-1",)),
        "spark_tts": ModelSettings(audio=folder),
        "f5_tts": ModelSettings(audio=folder),
        "described_tts": ModelSettings(
            adapter="synthesizer",
            inputs={"text": "text", "voice": "narrator", "speed": "speed", "instructions": "style", "language": "lang"},
            outputs={"audio": "pcm"},
            audio=AudioSettings(sample_rate=24_000, voices={"ada": 3, "bob": 4}),
        ),
        "int16_tts": ModelSettings(audio=AudioSettings(sample_rate=24_000)),
    }


@asynccontextmanager
async def speech_proxy(triton: TestTriton, transport: str, voices: Path, **parts: Any) -> AsyncIterator[Proxy]:
    """Serve the synthesizers over one transport; *parts* replace parts of the settings."""
    settings = msgspec.structs.replace(proxy_settings(triton, transport), models=models_of(voices), **parts)
    async with serving(settings, transport=transport) as proxy:
        await proxy.ready()
        yield proxy


async def pcm(proxy: Proxy, model: str, text: str = TEXT, **fields: Any) -> Any:
    """Return the samples of *text*."""
    answer = await proxy.post(PATH, {"model": model, "input": text, "response_format": "pcm", **fields})
    assert 200 == answer.status, answer.body
    assert "audio/pcm" == answer.headers["Content-Type"]
    return np.frombuffer(answer.body, "<i2")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_kind_of_model(speaking: TestTriton, voices: Path, transport: str) -> None:
    """Parts are joined to the samples that the model made, whatever its type of samples, files included."""
    async with speech_proxy(speaking, transport, voices) as proxy:
        for model in (
            "cosyvoice2",
            "f5_tts",
            "int16_tts",
            "described_tts",
            "file_tts",
            "cosyvoice2_speaker",
            "bytes_tts",
        ):
            assert np.array_equal(spoken(TEXT), await pcm(proxy, model, voice="ada")), model
        answer = await proxy.post(PATH, {"model": "spark_tts", "input": TEXT, "voice": "ada", "response_format": "wav"})
    # Parts that overlap fade into each other. The head of a file without an end has lengths that nobody knows.
    with wave.open(io.BytesIO(answer.body)) as file:
        assert (1, 2, 16_000) == (file.getnchannels(), file.getsampwidth(), file.getframerate())
    assert struct.pack("<I", 0xFFFFFFFF) == answer.body[4:8] == answer.body[40:44]
    assert np.array_equal(spoken(TEXT), np.frombuffer(answer.body[44:], "<i2"))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_format(speaking: TestTriton, voices: Path, transport: str) -> None:
    """Each format can be decoded, has the length and the sound of the samples, and comes in events as it does alone."""
    kinds = dict.fromkeys(FORMATS, "audio/") | {"mp3": "audio/mpeg", "opus": "audio/ogg"}
    async with speech_proxy(speaking, transport, voices) as proxy:
        for kind in FORMATS:
            body = {"model": "int16_tts", "input": TWO, "voice": "x", "response_format": kind}
            alone = await proxy.post(PATH, body)
            assert alone.headers["Content-Type"].startswith(kinds[kind])
            assert "voice" == alone.headers["x-triton-openai-ignored"]
            events = [json.loads(each) for each in (await proxy.post(PATH, {**body, "stream_format": "sse"})).events]
            *deltas, done = events
            assert {"speech.audio.delta"} == {each["type"] for each in deltas}
            usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
            assert {"type": "speech.audio.done", "usage": usage} == done
            joined = b"".join(base64.b64decode(each["audio"]) for each in deltas)
            if kind != "opus":
                # The number of an Ogg stream is made up.
                assert alone.body == joined, kind
            _check_sound(kind, joined)


def decoded(data: bytes) -> tuple[Any, int]:
    """Return the samples in a file, and their rate."""
    with av.open(io.BytesIO(data), "r") as file:
        frames = [frame.to_ndarray()[0] for frame in file.decode(audio=0)]
        samples = np.concatenate(frames)
        rate = file.streams.audio[0].rate
    return (samples if samples.dtype == np.int16 else np.rint(samples * 32_768).astype(np.int32)), rate


def _check_sound(kind: str, data: bytes) -> None:
    expected = spoken(TWO)
    if kind == "pcm":
        assert np.array_equal(expected, np.frombuffer(data, "<i2"))
        return
    samples, rate = decoded(data)
    if kind in ("wav", "flac"):
        assert 24_000 == rate
        assert np.array_equal(expected, samples)
    else:
        assert rate == (48_000 if kind == "opus" else 24_000)
        # Encoders delay, and fill up their last frame.
        assert 0 <= len(samples) / rate - len(expected) / 24_000 < 0.15, kind
        assert 0.5 < np.abs(samples).mean() / np.abs(expected).mean() < 1.5


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_models_get(speaking: TestTriton, voices: Path, transport: str) -> None:
    """A recording comes at the model's rate with what is said in it; a described model gets what it has inputs for."""
    # No other request has it.
    mark = uuid.uuid4().hex
    async with speech_proxy(speaking, transport, voices) as proxy:
        for model, name, rate in (("cosyvoice2", "bob", 16_000), ("f5_tts", "ada", 24_000), ("tts-1", "alloy", 16_000)):
            await pcm(proxy, model, f"For {model}, {mark}.", voice={"id": name})
            (asked,) = _asked(speaking, f"For {model}, {mark}.")
            voice = "ada" if name == "alloy" else name
            assert [VOICES[voice]] == asked["reference_text"]["value"]
            seconds = 0.5 if voice == "bob" else 1.0
            assert [round(seconds * rate)] == asked["reference_wav_len"]["value"]
            assert [1, round(seconds * rate)] == asked["reference_wav"]["shape"]
            assert 0.25 < max(asked["reference_wav"]["value"]) < 0.35
        fields = {"voice": "bob", "speed": 1.5, "instructions": "Whisper.", "language": "en"}
        await pcm(proxy, "described_tts", f"Described, {mark}.", **fields)
        (asked,) = _asked(speaking, f"Described, {mark}.")
        given = {name: each["value"][0] for name, each in asked.items()}
        assert {
            "text": f"Described, {mark}.",
            "narrator": 4,
            "speed": 1.5,
            "style": "Whisper.",
            "lang": "en",
        } == given
        # A model with a voice of its own.
        answer = await proxy.post(PATH, {"model": "cosyvoice2_speaker", "input": f"Own, {mark}.", "voice": "alloy"})
        assert "voice" == answer.headers["x-triton-openai-ignored"]
        (asked,) = _asked(speaking, f"Own, {mark}.")
        assert {"target_text"} == asked.keys()


def _asked(triton: TestTriton, text: str) -> list[dict[str, Any]]:
    """Return the inputs of the requests for *text*."""
    found = [event["inputs"] for event in triton.record.events() if event["event"] == "request"]
    return [inputs for inputs in found if [text] in [each["value"] for each in inputs.values()]]


@pytest.mark.parametrize("model", ["cosyvoice2", "f5_tts"])
async def test_long_texts(speaking: TestTriton, voices: Path, model: str) -> None:
    """A long text is spoken in pieces of whole sentences; nothing is left out, and all is in its order."""
    text = " ".join(f"{TEXT[:-1]} number {number}." for number in range(40))
    async with speech_proxy(speaking, "grpc", voices) as proxy:
        samples = await pcm(proxy, model, text, voice="ada")
    # 34 letters in a second; F5-TTS speaks for a second less, because the recording counts.
    longest = {"cosyvoice2": 34 * 30, "f5_tts": int(34 * 42.7)}[model]
    expected = pieces(text, longest, streams=model == "cosyvoice2")
    assert len(expected) > 1
    assert np.array_equal(np.concatenate([spoken(piece) for piece in expected]), samples)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_failures(speaking: TestTriton, voices: Path, transport: str) -> None:
    """What fails before any audio has its status; later it is an event, or breaks off the body. Nothing is left."""
    early = [
        ("cosyvoice2", "<nothing>", "ended without an answer"),
        ("f5_tts", "<nothing>", "no audio"),
        ("f5_tts", "<die>", "The model failed"),
        ("f5_tts", "<nan>", "not numbers"),
    ]
    async with speech_proxy(speaking, transport, voices) as proxy:
        for model, text, message in early:
            for stream_format in ("audio", "sse"):
                body = {"model": model, "input": text, "voice": "ada", "stream_format": stream_format}
                answer = await proxy.post(PATH, body)
                assert 502 == answer.status, answer.body
                assert message in answer.error["message"]
        body = {"model": "cosyvoice2", "input": f"{TWO} <die>", "voice": "ada", "response_format": "pcm"}
        answer = await proxy.post(PATH, {**body, "stream_format": "sse"})
        assert 200 == answer.status
        *deltas, failure = map(json.loads, answer.events)
        assert deltas
        assert "The model failed" in failure["error"]["message"]
        async with proxy.client.post(PATH, json=body) as response:
            assert 200 == response.status
            with pytest.raises(Exception, match="payload"):
                await response.read()


async def test_clients_that_leave_or_read_slowly(speaking: TestTriton, voices: Path) -> None:
    """A client that leaves stops the model; for one that does not read, the model waits."""
    text = f"{uuid.uuid4().hex}. {TEXT} <endless>"
    async with speech_proxy(speaking, "grpc", voices) as proxy:
        body = {"model": "cosyvoice2", "input": text, "voice": "ada", "response_format": "pcm"}
        async with proxy.client.post(PATH, json=body) as response:
            assert 200 == response.status
            await response.content.readexactly(1000)
            response.close()

        def ends() -> list[str]:
            found = speaking.record.events()
            ids = [each["id"] for each in found if [text] == each.get("inputs", {}).get("target_text", {}).get("value")]
            return [each["event"] for each in found if each["event"] != "request" and each["id"] in ids]

        async def ended() -> None:
            while not ends():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)

        await asyncio.wait_for(ended(), 120)
        assert ["cancelled"] == ends()


async def test_bad_requests(speaking: TestTriton, voices: Path) -> None:
    """Each mistake is refused with the field to blame."""
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": ""}, "input", "length"),
        ({"input": " \n "}, "input", "nothing to speak"),
        ({"input": "a" * 4097}, "input", "4096"),
        ({"input": 5}, "input", "string"),
        ({"voice": "eve"}, "voice", "It has: ada, alloy, bob"),
        ({"voice": "../ada"}, "voice", "no voice"),
        ({"voice": "ada.wav"}, "voice", "no voice"),
        ({"voice": {"id": "/etc/passwd"}}, "voice", "no voice"),
        ({"voice": None}, "voice", "Missing"),
        ({"response_format": "mp4"}, "response_format", "mp4"),
        ({"speed": 5}, "speed", "4"),
        ({"speed": 1.5}, "speed", "does not take 'speed'"),
        ({"instructions": "Sing."}, "instructions", "does not take 'instructions'"),
        ({"language": "en"}, "language", "does not take 'language'"),
        ({"stream_format": "chunks"}, "stream_format", "chunks"),
        ({"model": "file_tts", "speed": 2}, "speed", "does not take"),
    ]
    async with speech_proxy(speaking, "http", voices) as proxy:
        for fields, param, message in cases:
            answer = await proxy.post(PATH, {"model": "cosyvoice2", "input": TEXT, "voice": "ada", **fields})
            assert (400, param) == (answer.status, answer.error["param"]), (fields, answer.body)
            assert message in answer.error["message"], answer.body
        chat = {"model": "cosyvoice2", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await proxy.post("/v1/chat/completions", chat)
        assert (400, "model") == (answer.status, answer.error["param"])
        assert "It speaks texts (/v1/audio/speech)" in answer.error["message"]


async def test_lists_of_voices(speaking: TestTriton, voices: Path) -> None:
    """All voices are listed, or those of one model; a recording that is added is found without a restart."""
    async with speech_proxy(speaking, "http", voices) as proxy:
        every = (await proxy.get("/v1/audio/voices")).json["voices"]
        assert {"id": "bob", "name": "bob", "model": "described_tts"} in every
        assert {"cosyvoice2", "tts-1", "spark_tts", "f5_tts", "described_tts"} == {each["model"] for each in every}
        answer = await proxy.get("/audio/voices?model=cosyvoice2")
        assert ["ada", "alloy", "bob"] == [each["id"] for each in answer.json["voices"]]
        answer = await proxy.get("/v1/audio/voices?model=nobody")
        assert 404 == answer.status


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_official_client(speaking: TestTriton, voices: Path, transport: str) -> None:
    """OpenAI's client gets the whole file, and with a streaming response its parts."""
    async with (
        speech_proxy(speaking, transport, voices) as proxy,
        AsyncOpenAI(base_url=str(proxy.client.make_url("/v1")), api_key="none") as client,
    ):
        whole = await client.audio.speech.create(model="tts-1", voice="alloy", input=TEXT, response_format="flac")
        assert np.array_equal(spoken(TEXT), decoded(whole.content)[0])
        async with client.audio.speech.with_streaming_response.create(
            model="f5_tts", voice="bob", input=TWO, response_format="pcm"
        ) as response:
            parts = [part async for part in response.iter_bytes()]
    expected = [spoken(piece) for piece in pieces(TWO, 1000, streams=False)]
    assert np.array_equal(np.concatenate(expected), np.frombuffer(b"".join(parts), "<i2"))


async def test_audio_seconds_per_minute(speaking: TestTriton, voices: Path, tmp_path: Path) -> None:
    """What is spoken counts for the key."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: few, key: sk-few, audio_seconds_per_minute: 1}]")
    access = AccessSettings(api_keys_file=keys)
    async with speech_proxy(speaking, "grpc", voices, access=access) as proxy:
        body = {"model": "cosyvoice2", "voice": "ada", "input": TEXT, "response_format": "pcm"}
        for expected in ((200, None), (429, "audio_seconds")):
            async with proxy.client.post(PATH, json=body, headers={"api-key": "sk-few"}) as response:
                data = await response.read()
                kind = None if response.status == 200 else json.loads(data)["error"]["type"]
                assert expected == (response.status, kind)


async def test_metrics(speaking: TestTriton, voices: Path) -> None:
    """The seconds that were spoken are counted, and the time to the first audio."""
    async with speech_proxy(speaking, "grpc", voices) as proxy:
        await pcm(proxy, "cosyvoice2", voice="ada")
        metrics = (await proxy.get("/metrics")).body.decode()
    labels = '{adapter="synthesizer",direction="output",model="cosyvoice2"}'
    seconds = len(spoken(TEXT)) / 24_000
    (line,) = [each for each in metrics.splitlines() if each.startswith("triton_openai_audio_seconds_total{")]
    assert labels in line
    assert pytest.approx(seconds) == float(line.split()[-1])
    first = 'gen_ai_server_time_to_first_token_seconds_count{adapter="synthesizer",gen_ai_operation_name="speech"'
    assert first in metrics
