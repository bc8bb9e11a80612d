"""Lines of batches as requests of the service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from triton_openai.config.tree import BatchesSettings, FilesSettings, Settings, TritonSettings
from triton_openai.errors import InvalidRequest
from triton_openai.triton.client import Receiver, ResponseStream
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.tensors import InferRequest, InferResponse

PATH = "/v1/completions"


class _Recorder(Endpoint):
    """Remembers the priorities of requests, and sends none."""

    seen: list[int]

    async def infer(self, request: InferRequest) -> InferResponse:
        self.seen.append(request.priority)
        raise InvalidRequest("No.")

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        self.seen.append(request.priority)
        raise InvalidRequest("No.")


async def _ended(proxy: Proxy, path: str, lines: Sequence[Mapping[str, Any]]) -> Any:
    """Return a batch of *lines* to *path* when it has ended."""
    form = FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="input.jsonl")
    async with proxy.client.post("/v1/files", data=form) as response:
        file = (await response.json())["id"]
    made = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
    batch = (await proxy.post("/v1/batches", made)).json
    async with asyncio.timeout(120):
        while batch["completed_at"] is None:
            await asyncio.sleep(0.02)
            batch = (await proxy.get(f"/v1/batches/{batch['id']}")).json
    return batch


def _settings(triton: FakeTriton, folder: Path) -> Settings:
    return Settings(
        triton=TritonSettings(url=(triton.url,)),
        files=FilesSettings(store=f"dir:{folder / 'files'}"),
        batches=BatchesSettings(store=f"sqlite:{folder / 'db'}"),
    )


GENERATES = config_of("m", dynamic_batching={"priority_levels": 3})
EMBEDS = config_of(
    "m", ("text BYTES 1",), ("embedding FP32 4",), backend="python", model_transaction_policy={},
    dynamic_batching={"priority_levels": 3},
)  # fmt: skip


@pytest.mark.parametrize(
    "path, config, body", [(PATH, GENERATES, {"prompt": "a"}), ("/v1/embeddings", EMBEDS, {"input": "a"})]
)
async def test_lines_are_the_last_in_a_queue(
    tmp_path: Path, path: str, config: dict[str, Any], body: dict[str, Any]
) -> None:
    """Whatever its line asks for, a batch has the last level of the model's queue, and live requests have theirs."""
    asked: list[dict[str, Any]] = [{"model": "m", **body}, {"model": "m", **body, "priority": 1}]
    lines = [
        {"custom_id": f"id-{number}", "method": "POST", "url": path, "body": body} for number, body in enumerate(asked)
    ]
    async with FakeTriton(config) as triton:
        recorder = _Recorder((triton.url,))
        recorder.seen = []
        async with serving(_settings(triton, tmp_path), client=recorder) as proxy:
            await proxy.ready()
            for one in asked:
                assert 400 == (await proxy.post(path, one)).status
            batch = await _ended(proxy, path, lines)
    # Embeddings take no notice of a priority.
    assert [0, 1 if path == PATH else 0, 3, 3] == recorder.seen
    assert {"total": 2, "completed": 0, "failed": 2} == batch["request_counts"]


async def test_lines_of_a_model_that_streams_over_http(tmp_path: Path) -> None:
    """Over HTTP such a model knows no priorities: its lines have none, and a client that asks for one is told."""
    body = {"model": "m", "prompt": "a"}
    async with FakeTriton(GENERATES) as triton:
        triton.responses = ({"text_output": "an answer"},)
        async with serving(_settings(triton, tmp_path)) as proxy:
            await proxy.ready()
            assert 501 == (await proxy.post(PATH, {**body, "priority": 1})).status
            lines = [{"custom_id": "a", "method": "POST", "url": PATH, "body": body}]
            assert 1 == (await _ended(proxy, PATH, lines))["request_counts"]["completed"]
