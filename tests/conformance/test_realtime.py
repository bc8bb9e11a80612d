"""Transcription sessions over WebSockets, with every kind of recognizer."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import soundfile
import soxr
from aiohttp import WSMsgType
from msgspec.structs import replace

from tests.cases import every_case
from tests.conformance.calls import in_session_loop
from tests.conformance.test_transcriptions import settings_for
from tests.proxy_fixture import Proxy, serving
from tests.speech import RATE, SENTENCE, speak
from tests.triton_fixture import TestTriton
from triton_openai.api.realtime import input_audio, turn_runner, turns
from triton_openai.api.realtime import session as sessions
from triton_openai.app import SERVICE
from triton_openai.config.tree import AccessSettings, AudioLimits, RestrictedApi, ServerSettings
from triton_openai.draining import DRAINING
from triton_openai.media.voice_activity import LevelDetector

pytestmark = in_session_loop

PATH = "/v1/realtime?intent=transcription"
TEXT = " ".join(SENTENCE)
PREFIX = "conversation.item.input_audio_transcription"
# The length of the events that audio is sent in.
_EVENT_SECONDS = 0.1


@pytest.fixture(autouse=True)
def level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take tones for speech: a network of voices does not."""
    monkeypatch.setattr(sessions, "detector_for", LevelDetector)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def proxy(recognizers: TestTriton) -> AsyncIterator[Proxy]:
    """The service."""
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(settings_for(recognizers, "grpc")))
        await served.ready()
        yield served


class Client:
    """One session."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self.socket.send_str(json.dumps({"type": kind, **fields}))

    async def update(self, *, model: str | None = None, **fields: Any) -> dict[str, Any]:
        """Update the session, and return it as it is then."""
        if model is not None:
            fields["transcription"] = {"model": model, **fields.get("transcription", {})}
        await self.send("session.update", session={"type": "transcription", "audio": {"input": fields}})
        updated = await self.until("session.updated")
        return dict(updated[-1]["session"])

    async def speak(self, samples: Any, rate: int = 24_000, subtype: str = "PCM_16") -> None:
        """Send *samples* of the tests' rate piece by piece, at another *rate* and as *subtype*."""
        data = encoded(soxr.resample(samples, RATE, rate), subtype)
        size = int(_EVENT_SECONDS * rate) * (2 if subtype == "PCM_16" else 1)
        for start in range(0, len(data), size):
            await self.append(data[start : start + size])

    async def append(self, data: bytes) -> None:
        """Send audio in one event."""
        await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    async def event(self) -> dict[str, Any]:
        """Return the next event."""
        event = dict(json.loads(await asyncio.wait_for(self.socket.receive_str(), 120)))
        assert event["event_id"].startswith("event_")
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        """Return the events up to the first one of *kind*."""
        events = [await self.event()]
        while events[-1]["type"] != kind:
            assert "error" != events[-1]["type"], events[-1]
            events.append(await self.event())
        return events

    async def error(self) -> dict[str, Any]:
        """Return the error that comes next."""
        event = await self.event()
        assert "error" == event["type"], event
        assert {"message", "type", "param", "code", "event_id"} == event["error"].keys()
        return dict(event["error"])


def encoded(samples: Any, subtype: str) -> bytes:
    """Return *samples* without a container."""
    with soundfile.SoundFile(target := _Target(), "w", 8000, 1, format="RAW", subtype=subtype) as file:
        file.write(samples)
    return target.content


class _Target:
    """A file that can only be written."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: Any) -> int:
        """Add *data*."""
        self.content += bytes(data)
        return len(data)

    def seek(self, *_: int) -> int:
        """Stay at the end."""
        return len(self.content)

    def tell(self) -> int:
        """Return the end."""
        return len(self.content)


@asynccontextmanager
async def session(proxy: Proxy, path: str = PATH, **options: Any) -> AsyncIterator[Client]:
    """Yield a session, after its first event."""
    async with proxy.client.ws_connect(path, **options) as socket:
        client = Client(socket)
        created = await client.event()
        assert "transcription" == created["session"]["type"]
        yield client


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of *events*, without those of deltas that follow a delta."""
    types = [event["type"] for event in events]
    return [kind for number, kind in enumerate(types) if not number or kind != types[number - 1]]


def text_of(events: Sequence[dict[str, Any]]) -> str:
    """Return the text of the deltas among *events*, and check it against the last event."""
    text = "".join(event["delta"] for event in events if event["type"] == f"{PREFIX}.delta")
    assert text == events[-1]["transcript"]
    return text


silence = np.zeros(RATE, np.float32)


@every_case("model", ["infer_bls", "whisper", "whisper_bls", "zipformer", "transducer", "dictating"])
async def test_turns_by_voice_activity(proxy: Proxy, model: str) -> None:
    """Each stretch of speech is an item, with the events and the order of OpenAI's API."""
    async with session(proxy) as client:
        await client.update(model=model, transcription={"language": "en"})
        previous = None
        for words in (SENTENCE[:3], SENTENCE[3:]):
            await client.speak(np.concatenate([silence, speak(words), silence]))
            events = await client.until(f"{PREFIX}.completed")
            assert " ".join(words) == text_of(events)
            named = [event for event in events if not event["type"].endswith(".delta")]
            assert [
                "input_audio_buffer.speech_started",
                "input_audio_buffer.speech_stopped",
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
                f"{PREFIX}.completed",
            ] == [event["type"] for event in named]
            item = named[0]["item_id"]
            assert {item} == {event["item_id"] for event in events if "item_id" in event}
            assert [previous] * 3 == [event["previous_item_id"] for event in named[2:5]]
            previous = item
            assert item == named[3]["item"]["id"]
            seconds = (named[1]["audio_end_ms"] - named[0]["audio_start_ms"]) / 1000
            # The words without the last pause, the padding, and the silence.
            assert abs(seconds - (len(words) * 0.5 - 0.1 + 0.3 + 0.5)) < 0.1
            assert abs(named[-1]["usage"]["seconds"] - seconds) < 0.2


async def test_text_before_the_end_of_a_turn(proxy: Proxy) -> None:
    """A streaming recognizer says words while others are still spoken; without detection, the client ends the turn."""
    for model in ("transducer", "dictating"):
        async with session(proxy) as client:
            updated = await client.update(model=model, turn_detection=None)
            assert updated["audio"]["input"]["turn_detection"] is None
            await client.speak(speak(SENTENCE))
            heard: list[dict[str, Any]] = []
            while len(heard) < 3:
                heard.append(await client.event())
            assert [f"{PREFIX}.delta"] * 3 == [event["type"] for event in heard]
            await client.send("input_audio_buffer.commit")
            events = heard + await client.until(f"{PREFIX}.completed")
            assert TEXT == text_of(events)
            assert "input_audio_buffer.committed" in kinds(events)
            assert "input_audio_buffer.speech_stopped" not in kinds(events)


@every_case(
    "audio_format, rate, subtype",
    [
        ({"type": "audio/pcm"}, 24_000, "PCM_16"),
        ({"type": "audio/pcm", "rate": 16_000}, 16_000, "PCM_16"),
        ({"type": "audio/pcm", "rate": 44_100}, 44_100, "PCM_16"),
        ({"type": "audio/pcmu"}, 8_000, "ULAW"),
        ({"type": "audio/pcma"}, 8_000, "ALAW"),
    ],
)
async def test_formats(proxy: Proxy, audio_format: dict[str, Any], rate: int, subtype: str) -> None:
    """PCM of any rate and G.711, for recognizers of both kinds, by detection and by the client."""
    for model in ("infer_bls", "transducer"):
        for detection in ({"type": "server_vad"}, None):
            async with session(proxy) as client:
                updated = await client.update(model=model, format=audio_format, turn_detection=detection)
                assert audio_format.items() <= updated["audio"]["input"]["format"].items()
                await client.speak(np.concatenate([speak(SENTENCE[:2]), silence]), rate, subtype)
                if detection is None:
                    await client.send("input_audio_buffer.commit")
                assert " ".join(SENTENCE[:2]) == text_of(await client.until(f"{PREFIX}.completed"))


async def test_samples_that_are_cut(proxy: Proxy) -> None:
    """Audio may be cut anywhere, also in the middle of a sample, and all of it may come in one event."""
    data = encoded(soxr.resample(np.concatenate([speak(SENTENCE), silence]), RATE, 24_000), "PCM_16")
    for size in (4801, len(data)):
        async with session(proxy, f"{PATH}&model=infer_bls") as client:
            for start in range(0, len(data), size):
                await client.append(data[start : start + size])
            assert TEXT == text_of(await client.until(f"{PREFIX}.completed"))


async def test_clearing(proxy: Proxy) -> None:
    """Audio that is cleared is in no turn, and its recognition ends."""
    for model in ("infer_bls", "transducer"):
        async with session(proxy) as client:
            await client.update(model=model, turn_detection=None)
            await client.speak(speak(SENTENCE[:2]))
            await client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")
            await client.send("input_audio_buffer.commit")
            assert "input_audio_buffer_commit_empty" == (await client.error())["code"]
            await client.speak(speak(SENTENCE[2:]))
            await client.send("input_audio_buffer.commit")
            events = await client.until(f"{PREFIX}.completed")
            assert " ".join(SENTENCE[2:]) == text_of(events)
            # A session that detects turns can be ended and cleared by the client, too.
            await client.update(turn_detection={"type": "server_vad", "silence_duration_ms": 300})
            await client.speak(speak(SENTENCE[:2]))
            await client.until("input_audio_buffer.speech_started")
            await client.send("input_audio_buffer.commit")
            assert " ".join(SENTENCE[:2]) in (await client.until(f"{PREFIX}.completed"))[-1]["transcript"]
            await client.speak(speak(SENTENCE[:1]))
            await client.until("input_audio_buffer.speech_started")
            await client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")


@every_case(
    "frame, param, code",
    [
        ("", None, "invalid_json"),
        ("{", None, "invalid_json"),
        ("[]", None, None),
        ("[" * 100_000, None, None),
        ('{"x": ' + "[" * 100_000, None, "invalid_json"),
        ('"\\ud800"', None, None),
        ("{}", "type", None),
        ('{"type": 7}', "type", None),
        ('{"type": "nothing"}', "type", "invalid_value"),
        ('{"type": "response.create"}', "type", "invalid_value"),
        ('{"type": "conversation.item.create", "item": {}}', "type", "invalid_value"),
        ('{"type": "session.update"}', "session", "missing_required_parameter"),
        ('{"type": "session.update", "session": null}', "session", None),
        ('{"type": "session.update", "session": {"type": "realtime"}}', "session.type", "invalid_value"),
        ('{"type": "input_audio_buffer.append"}', "audio", "missing_required_parameter"),
        ('{"type": "input_audio_buffer.append", "audio": 7}', "audio", None),
        ('{"type": "input_audio_buffer.append", "audio": "AAA"}', "audio", "invalid_base64"),
        ('{"type": "input_audio_buffer.append", "audio": "AA==AAAA"}', "audio", "invalid_base64"),
        ('{"type": "input_audio_buffer.append", "audio": "Ä!"}', "audio", "invalid_base64"),
        ('{"type": "input_audio_buffer.append", "audio": "\xff"}'.encode("latin-1"), None, "invalid_json"),
        ('{"type": "input_audio_buffer.commit"}', None, "input_audio_buffer_commit_empty"),
        (f'{{"type": "input_audio_buffer.clear", "event_id": "{"x" * 1000}"}}', "event_id", None),
        (f'{{"type": "session.update", "session": {{"x": "{"x" * 70_000}"}}}}', "session", "string_too_long"),
    ],
)
async def test_bad_events(proxy: Proxy, frame: str | bytes, param: str | None, code: str | None) -> None:
    """Each is answered by an error, and the session goes on."""
    async with session(proxy, f"{PATH}&model=infer_bls") as client:
        if isinstance(frame, str):
            frame = frame.encode()
        await client.socket.send_frame(frame, WSMsgType.TEXT)
        error = await client.error()
        assert (param, "invalid_request_error") == (error["param"], error["type"])
        assert code is None or code == error["code"]
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")


@every_case(
    "fields, param, code",
    [
        ({"format": {"type": "audio/opus"}}, "session.audio.input.format.type", None),
        ({"format": {"type": "audio/pcm", "rate": 1}}, "session.audio.input.format.rate", None),
        ({"format": {"type": "audio/pcm", "rate": 1e400}}, None, None),
        ({"turn_detection": {"type": "semantic_vad"}}, "session.audio.input.turn_detection.type", "invalid_value"),
        ({"turn_detection": {"threshold": 2}}, "session.audio.input.turn_detection.threshold", None),
        ({"turn_detection": {"prefix_padding_ms": -1}}, "session.audio.input.turn_detection.prefix_padding_ms", None),
        ({"transcription": {"model": "nobody"}}, "model", "model_not_found"),
        ({"transcription": {"model": "chatting"}}, "model", None),
        ({"transcription": {"model": "whisper", "language": "xx"}},
         "session.audio.input.transcription.language", "invalid_language"),
        ({"transcription": {"model": "whisper", "prompt": "Hm."}},
         "session.audio.input.transcription.prompt", "unsupported_parameter"),
    ],
)  # fmt: skip
async def test_bad_settings(proxy: Proxy, fields: dict[str, Any], param: str | None, code: str | None) -> None:
    """The error names the field and the client's event, and the session stays as it was."""
    async with session(proxy, f"{PATH}&model=infer_bls") as client:
        body = json.dumps({"type": "transcription", "audio": {"input": fields}}).replace("Infinity", "1e400")
        await client.socket.send_str(f'{{"type": "session.update", "event_id": "mine", "session": {body}}}')
        error = await client.error()
        assert "mine" == error["event_id"]
        assert param is None or param == error["param"]
        assert code is None or code == error["code"]
        assert "infer_bls" == (await client.update())["audio"]["input"]["transcription"]["model"]


async def test_settings_are_kept(proxy: Proxy) -> None:
    """A field that is left out stays, null is the default, and the form of a field is the client's."""
    async with session(proxy, f"{PATH}&model=infer_bls") as client:
        await client.update(turn_detection={"type": "server_vad", "threshold": 0.25, "prefix_padding_ms": 600})
        detection = (await client.update(turn_detection={"silence_duration_ms": 350, "create_response": False}))[
            "audio"
        ]
        assert {
            "type": "server_vad",
            "threshold": 0.25,
            "prefix_padding_ms": 600,
            "silence_duration_ms": 350,
        } == detection["input"]["turn_detection"]
        await client.update(transcription={"language": "de"})
        kept = (await client.update(transcription={"keywords": []}, noise_reduction={"type": "near_field"}))["audio"]
        assert {"model": "infer_bls", "language": "de"} == kept["input"]["transcription"]
        kept = (await client.update(transcription={"language": None}, turn_detection={"threshold": None}))["audio"]
        assert {"model": "infer_bls"} == kept["input"]["transcription"]
        assert 0.5 == kept["input"]["turn_detection"]["threshold"]
        # Not while somebody speaks.
        await client.speak(speak(SENTENCE[:1]))
        await client.until("input_audio_buffer.speech_started")
        await client.send("session.update", session={"audio": {"input": {"format": {"type": "audio/pcmu"}}}})
        assert "session.audio.input" == (await client.error())["param"]
        await client.update(transcription={"language": "en"})


async def test_the_beta_form(proxy: Proxy) -> None:
    """Clients of the beta have its names: flat fields, and one event for an item."""
    for options in (
        {"headers": {"OpenAI-Beta": "realtime=v1"}},
        {"protocols": ("realtime", "openai-beta.realtime-v1")},
    ):
        async with proxy.client.ws_connect(PATH, **options) as socket:
            client = Client(socket)
            created = await client.event()
            assert "transcription_session.created" == created["type"]
            assert "pcm16" == created["session"]["input_audio_format"]
            fields = {
                "input_audio_format": "g711_ulaw",
                "input_audio_transcription": {"model": "infer_bls", "language": "en"},
                "turn_detection": {"type": "server_vad", "silence_duration_ms": 400},
                "input_audio_noise_reduction": {"type": "near_field"},
                "include": ["item.input_audio_transcription.logprobs"],
            }
            await client.send("transcription_session.update", session=fields)
            updated = (await client.until("transcription_session.updated"))[-1]["session"]
            assert "g711_ulaw" == updated["input_audio_format"]
            assert 400 == updated["turn_detection"]["silence_duration_ms"]
            await client.speak(np.concatenate([speak(SENTENCE), silence]), 8_000, "ULAW")
            events = await client.until(f"{PREFIX}.completed")
            assert TEXT == text_of(events)
            assert "conversation.item.created" in kinds(events)
            assert "conversation.item.added" not in kinds(events)


async def test_a_turn_that_fails(proxy: Proxy) -> None:
    """The client gets the error of its item, and the session goes on."""
    for model in ("infer_bls", "transducer"):
        async with session(proxy, f"{PATH}&model={model}") as client:
            await client.speak(np.concatenate([speak(("fail",)), silence]))
            failed = (await client.until(f"{PREFIX}.failed"))[-1]
            assert failed["item_id"].startswith("item_")
            assert failed["error"]["message"]
            await client.speak(np.concatenate([speak(SENTENCE[:2]), silence]))
            assert " ".join(SENTENCE[:2]) == text_of(await client.until(f"{PREFIX}.completed"))


async def test_frames_that_end_the_connection(proxy: Proxy) -> None:
    """Binary frames, and those that are larger than the largest audio."""
    for kind, size, code in ((WSMsgType.BINARY, 2, 1003), (WSMsgType.TEXT, 22 * 1024 * 1024, 1009)):
        async with session(proxy) as client:
            with suppress(ConnectionError):
                await client.socket.send_frame(b" " * size, kind)
            message = await asyncio.wait_for(client.socket.receive(), 120)
            assert (WSMsgType.CLOSE, code) == (message.type, message.data)


async def test_what_is_no_session(proxy: Proxy) -> None:
    """Other intents are refused before the upgrade, and requests that ask for none."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await proxy.client.ws_connect("/v1/realtime?intent=conversation")
    assert 400 == refused.value.status
    answer = await proxy.get(PATH)
    assert (400, "invalid_request") == (answer.status, answer.error["code"])


@pytest_asyncio.fixture(loop_scope="session")
async def keyed(recognizers: TestTriton, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that serves keys with limits and settings."""
    async with AsyncExitStack() as stack:

        async def serve(keys: str = "", **fields: Any) -> Proxy:
            settings = settings_for(recognizers, "grpc")
            if keys:
                file = tmp_path / "keys.yaml"
                file.write_text(f"keys: [{keys}]")
                settings = replace(settings, access=AccessSettings(api_keys_file=file))
            served = await stack.enter_async_context(serving(replace(settings, **fields)))
            await served.ready()
            return served

        yield serve


async def test_limits_of_a_key(keyed: Callable[..., Any]) -> None:
    """Each turn is a request of the key: its requests and seconds of audio are counted, and its models hold."""
    proxy = await keyed(
        "{name: few, key: one, requests_per_minute: 2}, {name: short, key: two, audio_seconds_per_minute: 3}, "
        "{name: other, key: three, models: [whisper]}"
    )
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await proxy.client.ws_connect(PATH, headers={"Authorization": "Bearer wrong"})
    assert 401 == refused.value.status
    turn = np.concatenate([speak(SENTENCE[:3]), silence])
    for key, allowed in (("one", 2), ("two", 2)):
        protocols = ("realtime", f"openai-insecure-api-key.{key}")
        async with session(proxy, f"{PATH}&model=infer_bls", protocols=protocols) as client:
            assert "realtime" == client.socket.protocol
            for _ in range(allowed):
                await client.speak(turn)
                await client.until(f"{PREFIX}.completed")
            await client.speak(turn)
            failed = (await client.until(f"{PREFIX}.failed"))[-1]
            assert "rate_limit_exceeded" == failed["error"]["code"]
    async with session(proxy, f"{PATH}&model=infer_bls", headers={"api-key": "three"}) as client:
        await client.append(bytes(4800))
        assert "model_not_found" == (await client.error())["code"]


async def test_restricted_apis(recognizers: TestTriton) -> None:
    """A restriction of inference holds for the upgrade, and for each turn."""
    restricted = RestrictedApi(apis=("inference",), header="x-secret", value="open")
    settings = replace(settings_for(recognizers, "grpc"), access=AccessSettings(openai_restricted_api=(restricted,)))
    async with serving(settings) as proxy:
        await proxy.ready()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await proxy.client.ws_connect(PATH)
        assert 401 == refused.value.status
        async with session(proxy, f"{PATH}&model=infer_bls", headers={"x-secret": "open"}) as client:
            await client.speak(np.concatenate([speak(SENTENCE), silence]))
            assert TEXT == text_of(await client.until(f"{PREFIX}.completed"))


async def test_the_number_of_sessions(keyed: Callable[..., Any]) -> None:
    """Keys share the sessions, one that ends makes room, and what is too many is refused before the upgrade."""
    proxy = await keyed("{name: a, key: one}, {name: b, key: two}", audio=AudioLimits(max_sessions=3))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(session(proxy, headers={"api-key": "one"}))
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with session(proxy, headers={"api-key": "one"}):
                await stack.enter_async_context(session(proxy, headers={"api-key": "one"}))
        assert 503 == refused.value.status
        await stack.enter_async_context(session(proxy, headers={"api-key": "two"}))
    sessions = proxy.client.app[SERVICE].realtime_sessions
    async with asyncio.timeout(120):
        while sessions.total():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_memory(keyed: Callable[..., Any]) -> None:
    """Audio takes memory from the budget of media: what does not fit is an error, and all is given back."""
    limits = AudioLimits(max_total_size=8 * 1024 * 1024, max_duration=70)
    proxy = await keyed(audio=limits, server=ServerSettings(queue_timeout=0.05))
    media = proxy.client.app[SERVICE].media
    minute = bytes(60 * 48_000)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(session(proxy, f"{PATH}&model=infer_bls")) for _ in range(3)]
        for client in clients:
            await client.update(turn_detection=None)
            await client.append(minute)
            if client is not clients[2]:
                # It is taken, before the next one comes.
                await client.update()
        assert "overloaded" == (await clients[2].error())["code"]
        await clients[1].send("input_audio_buffer.clear")
        await clients[1].until("input_audio_buffer.cleared")
        await clients[0].append(minute)
        assert "audio_too_long" == (await clients[0].error())["code"]
        await clients[0].send("input_audio_buffer.commit")
        assert "" == text_of(await clients[0].until(f"{PREFIX}.completed"))
    async with asyncio.timeout(120):
        while media.reserved:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_the_end_of_the_service(keyed: Callable[..., Any]) -> None:
    """A turn that is being spoken is written down, and the connection ends with a reason."""
    for model in ("infer_bls", "transducer"):
        proxy = await keyed()
        async with session(proxy, f"{PATH}&model={model}") as client, session(proxy) as idle:
            await client.speak(np.concatenate([speak(SENTENCE[:4])]))
            await client.until("input_audio_buffer.speech_started")
            # It is taken before the end begins.
            await client.send("session.update", session={})
            await client.until("session.updated")
            end = asyncio.create_task(proxy.client.app[DRAINING].drain(120))
            message = await asyncio.wait_for(idle.socket.receive(), 120)
            assert (WSMsgType.CLOSE, 1012, "The service is stopping.") == (message.type, message.data, message.extra)
            events = await client.until(f"{PREFIX}.completed")
            assert " ".join(SENTENCE[:4]) == events[-1]["transcript"]
            message = await asyncio.wait_for(client.socket.receive(), 120)
            assert (WSMsgType.CLOSE, 1012) == (message.type, message.data)
            await end


async def test_a_key_that_is_removed(keyed: Callable[..., Any], tmp_path: Path) -> None:
    """The session ends with the reason, as an event and as a code."""
    proxy = await keyed("{name: a, key: one}, {name: b, key: two}")
    async with session(proxy, headers={"api-key": "one"}) as client:
        draining = proxy.client.app[DRAINING]
        draining.end_removed_keys({})
        assert "invalid_api_key" == (await client.error())["code"]
        message = await asyncio.wait_for(client.socket.receive(), 120)
        assert (WSMsgType.CLOSE, 1008) == (message.type, message.data)
        assert "removed" in str(message.extra)


async def test_a_client_that_leaves(proxy: Proxy, recognizers: TestTriton) -> None:
    """Its turn ends, also at the recognizer, and nothing is left of the session."""
    service = proxy.client.app[SERVICE]
    async with session(proxy, f"{PATH}&model=transducer") as client:
        await client.speak(speak(SENTENCE))
        await client.until(f"{PREFIX}.delta")
    async with asyncio.timeout(120):
        while service.realtime_sessions.total() or service.executor.draining._tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not service.media.reserved


async def test_a_bug(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody expected ends the session with a code, and its details stay in the log."""

    def fail(*_: Any) -> None:
        raise RuntimeError("a secret")

    async with session(proxy, f"{PATH}&model=infer_bls") as client:
        monkeypatch.setattr(input_audio.InputAudio, "append", fail)
        await client.append(bytes(4800))
        error = await client.error()
        assert "server_error" == error["type"]
        assert "secret" not in str(error)
        message = await asyncio.wait_for(client.socket.receive(), 120)
        assert (WSMsgType.CLOSE, 1011) == (message.type, message.data)


async def test_a_model_that_is_late(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, recognizers: TestTriton) -> None:
    """The audio of a turn for which there is no room is dropped with an error, and the session goes on."""
    monkeypatch.setattr(turn_runner, "_MAX_WAIT", 0.05)
    monkeypatch.setattr(turn_runner, "_MAX_TURNS", 1)
    held = asyncio.Event()
    transcribe = turns.WholeTurn.transcribe

    async def wait(*arguments: Any, **options: Any) -> Any:
        await held.wait()
        return await transcribe(*arguments, **options)

    monkeypatch.setattr(turns.WholeTurn, "transcribe", wait)
    spoken = encoded(soxr.resample(np.concatenate([speak(SENTENCE), silence]), RATE, 24_000), "PCM_16")
    async with session(proxy, f"{PATH}&model=infer_bls") as client:
        await client.append(spoken)
        await client.until("conversation.item.done")
        await client.append(spoken)
        assert "overloaded" == (await client.error())["code"]
        # The client was not read meanwhile. That does not happen again and again.
        monkeypatch.setattr(turn_runner, "_MAX_WAIT", 3600)
        await client.append(spoken)
        assert "overloaded" == (await client.error())["code"]
        held.set()
        assert TEXT == text_of(await client.until(f"{PREFIX}.completed"))
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.append(spoken)
        assert TEXT == text_of(await client.until(f"{PREFIX}.completed"))
