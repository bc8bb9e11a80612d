"""Lines of batches as requests of the service."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import FormData

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.config.tree import BatchesSettings, FilesSettings, Settings, TritonSettings
from triton_openai.errors import InvalidRequest
from triton_openai.triton.client import Receiver, ResponseStream
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.tensors import InferRequest

PATH = "/v1/completions"


class _Recorder(Endpoint):
    """Remembers the priorities of requests, and sends none."""

    seen: list[int]

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        self.seen.append(request.priority)
        raise InvalidRequest("No.")


async def test_lines_are_the_last_in_a_queue(tmp_path: Path) -> None:
    """Whatever its line asks for, a batch has the last level of the model's queue, and live requests have theirs."""
    asked: list[dict[str, Any]] = [{"model": "m", "prompt": "a"}, {"model": "m", "prompt": "a", "priority": 1}]
    lines = [
        {"custom_id": f"id-{number}", "method": "POST", "url": PATH, "body": body} for number, body in enumerate(asked)
    ]
    async with FakeTriton(config_of("m", dynamic_batching={"priority_levels": 3})) as triton:
        recorder = _Recorder((triton.url,))
        recorder.seen = []
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            files=FilesSettings(store=f"dir:{tmp_path / 'files'}"),
            batches=BatchesSettings(store=f"sqlite:{tmp_path / 'db'}"),
        )
        async with serving(settings, client=recorder) as proxy:
            await proxy.ready()
            for body in asked:
                assert 400 == (await proxy.post(PATH, body)).status
            form = FormData({"purpose": "batch"})
            form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="input.jsonl")
            async with proxy.client.post("/v1/files", data=form) as response:
                file = (await response.json())["id"]
            made = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
            batch = (await proxy.post("/v1/batches", made)).json
            async with asyncio.timeout(20):
                while batch["completed_at"] is None:
                    await asyncio.sleep(0.02)
                    batch = (await proxy.get(f"/v1/batches/{batch['id']}")).json
    assert [0, 1, 3, 3] == recorder.seen
    assert {"total": 2, "completed": 0, "failed": 2} == batch["request_counts"]
