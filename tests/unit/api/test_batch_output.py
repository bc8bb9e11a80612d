"""The answers of a batch, before and after its end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from tests.store_fixture import Place
from tests.unit.api.test_batches import MODEL, Client, line, settings_of
from triton_openai.config.tree import BatchesSettings

LINES = 60
# So many lines are answered at once.
FREE = 10


class Holding(FakeTriton):
    """Answers the first requests at once, and the others once *may_end* is set: a batch cannot end before."""

    def __init__(self, *configs: dict[str, Any]) -> None:
        super().__init__(*configs)
        self.may_end = asyncio.Event()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if len(self.asked) >= FREE:
            await self.may_end.wait()
        return await super()._generate(request)


async def output(proxy: Proxy, batch_id: str, query: str = "", key: str = "sk-1") -> tuple[int, Any]:
    """Return the status, and the ids of the answers or the code of the error."""
    path = f"/v1/batches/{batch_id}/output"
    async with proxy.client.get(path + query, headers={"Authorization": f"Bearer {key}"}) as response:
        answer = await proxy._answer("GET", path, response)
        if answer.status != 200:
            return answer.status, answer.error["code"]
        assert "application/x-jsonl" == answer.headers["Content-Type"]
        return answer.status, [json.loads(one)["custom_id"] for one in answer.body.splitlines()]


async def test_answers_can_be_read_before_the_end(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one request has got is in the next one, in the same order; without asking for it, there is nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    triton = Holding(config_of(MODEL))
    async with triton:
        triton.responses = ({"text_output": "an answer"},)
        settings = settings_of(tmp_path, triton)
        batches = BatchesSettings(store=place.batches, max_running=2, checkpoint=0.01)
        settings = replace(settings, batches=batches, files=replace(settings.files, store=place.files))
        async with serving(settings) as proxy:
            await proxy.ready()
            client = Client(proxy, triton)
            # The last one is refused: it is no answer.
            wrong = line(LINES, body={"model": MODEL, "prompt": "x", "max_tokens": -1})
            batch = await client.create([*(line(number) for number in range(LINES)), wrong])
            path = f"/v1/batches/{batch['id']}"
            async with asyncio.timeout(120):
                while batch["request_counts"]["completed"] < 3:
                    _, batch = await client.call("GET", path)
            status, first = await output(proxy, batch["id"], "?partial=true")
            assert 200 == status
            assert len(first) >= 3
            assert (404, "not_found") == await output(proxy, batch["id"])
            assert (404, "not_found") == await output(proxy, batch["id"], "?partial=false")
            assert (404, "not_found") == await output(proxy, batch["id"], "?partial=true", "sk-2")
            assert (400, "invalid_value") == await output(proxy, batch["id"], "?partial=yes")
            triton.may_end.set()
            done = await client.ended(batch)
            last: list[str] = []
            for query in ("", "?partial=true"):
                status, last = await output(proxy, batch["id"], query)
                assert (200, LINES) == (status, len(last))
                assert first == last[: len(first)]
            assert [one["custom_id"] for one in await client.lines(done["output_file_id"])] == last


async def test_a_batch_without_answers_has_no_output(tmp_path: Path) -> None:
    """One that was cancelled before its first answer has none, and of one that waits they are none yet."""
    async with FakeTriton(config_of(MODEL)) as triton, serving(settings_of(tmp_path, triton, paused=True)) as proxy:
        await proxy.ready()
        client = Client(proxy, triton)
        batch = await client.create([line(1)])
        assert (200, []) == await output(proxy, batch["id"], "?partial=true")
        await client.call("POST", f"/v1/batches/{batch['id']}/cancel")
        await client.ended(batch)
        assert (404, "not_found") == await output(proxy, batch["id"], "?partial=true")
