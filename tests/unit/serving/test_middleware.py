"""What the middleware does around every request."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from triton_openai.app import create_app
from triton_openai.config.tree import AccessSettings, Settings
from triton_openai.draining import DRAINING, Draining
from triton_openai.serving.execution import Executor
from triton_openai.telemetry import request_record
from triton_openai.telemetry.request_record import RequestRecord


async def test_all_observers_see_the_same_duration() -> None:
    """All observers see the same duration, however long one of them takes."""
    seen: list[float] = []
    observers = Mock(ended=lambda record: seen.extend((record.duration, record.duration)))
    record = RequestRecord(request_id="r", method="POST", path="/")
    await Executor(Draining(), observers).run(record, AsyncMock(), failed=AsyncMock())

    assert 1 == len(set(seen))


async def test_who_asks_when_the_time_is_over_is_refused(aiohttp_client) -> None:
    """A request whose time is over is refused without a look at it, however quick the answer would be."""
    app = create_app(Settings())
    client = await aiohttp_client(app)
    assert 200 == (await client.get("/health/live")).status
    await app[DRAINING].drain(0)
    for answer in (await client.get("/health/live"), await client.post("/v1/completions", data=bytes(100_000))):
        assert (503, "close", "1") == (answer.status, answer.headers["Connection"], answer.headers["Retry-After"])
        assert "service_stopping" == (await answer.json())["error"]["code"]


async def test_every_answer_says_how_long_it_took(aiohttp_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`openai-processing-ms` has the milliseconds until the head, of errors too, and pages may read it."""
    client = await aiohttp_client(create_app(Settings(access=AccessSettings(cors_allow_origin=("*",)))))
    # By its clock, 12 seconds have passed when the head is written.
    monkeypatch.setattr(request_record, "time", Mock(monotonic=lambda: time.monotonic() + 12))
    for path, status in (("/health/live", 200), ("/v1/nothing", 404)):
        answer = await client.get(path, headers={"Origin": "http://page"})
        assert status == answer.status
        assert 12_000 <= int(answer.headers["openai-processing-ms"]) < 42_000
        assert "openai-processing-ms" in answer.headers["Access-Control-Expose-Headers"]
        assert not {"openai-organization", "openai-version"} & {name.lower() for name in answer.headers}
