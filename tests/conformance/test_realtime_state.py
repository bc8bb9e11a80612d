"""What a transcription session keeps, and how it ends with the service."""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
from aiohttp import WSMsgType

from tests.conformance.calls import in_session_loop
from tests.conformance.test_realtime import PATH, PREFIX, session
from tests.conformance.test_transcriptions import settings_for
from tests.proxy_fixture import serving
from tests.speech import SENTENCE, speak
from tests.triton_fixture import TestTriton
from triton_openai import offload
from triton_openai.api.realtime import session as sessions
from triton_openai.app import SERVICE
from triton_openai.draining import DRAINING
from triton_openai.media.voice_activity import LevelDetector

pytestmark = in_session_loop


async def test_rates_one_after_the_other(recognizers: TestTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session keeps the network for its present rate only: there are 40,000 rates."""
    made: WeakSet[Any] = WeakSet()

    def detector_for(rate: int) -> LevelDetector:
        detector = LevelDetector(rate)
        made.add(detector)
        return detector

    monkeypatch.setattr(sessions, "detector_for", detector_for)
    async with serving(settings_for(recognizers, "grpc")) as proxy:
        await proxy.ready()
        async with session(proxy, f"{PATH}&model=infer_bls") as client:
            for rate in range(8_000, 8_010):
                await client.update(format={"type": "audio/pcm", "rate": rate})
                await client.append(bytes(2000))
            # What was sent before is done.
            await client.update()
            gc.collect()
            assert 1 == len(made)


async def test_audio_that_comes_while_the_service_begins_to_stop(
    recognizers: TestTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn has ended then, and further audio does not end it again: it is written down."""
    run = offload.run
    monkeypatch.setattr(sessions, "detector_for", LevelDetector)
    async with serving(settings_for(recognizers, "grpc")) as proxy:
        await proxy.ready()
        draining = proxy.client.app[DRAINING]
        ends: list[asyncio.Task[Any]] = []

        async def late(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            result = await run(function, *arguments, **options)
            if getattr(result, "event_id", None) == "last" and not ends:
                ends.append(asyncio.create_task(draining.drain(120)))
                # The session ends its turn meanwhile.
                for _ in range(20):
                    await asyncio.sleep(0)
            return result

        monkeypatch.setattr(offload, "run", late)
        async with session(proxy, f"{PATH}&model=infer_bls") as client:
            await client.speak(speak(SENTENCE[:4]))
            await client.until("input_audio_buffer.speech_started")
            silence = base64.b64encode(bytes(2 * 24_000)).decode()
            await client.send("input_audio_buffer.append", audio=silence, event_id="last")
            events = await client.until(f"{PREFIX}.completed")
            assert " ".join(SENTENCE[:4]) == events[-1]["transcript"]
            message = await asyncio.wait_for(client.socket.receive(), 120)
            assert (WSMsgType.CLOSE, 1012, "The service is stopping.") == (message.type, message.data, message.extra)
            await ends[0]
        assert not proxy.client.app[SERVICE].media.reserved
