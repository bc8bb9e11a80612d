"""Batches of OpenAI's API, from the file to the results, over a Triton that answers whatever is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from triton_openai.app import SERVICE
from triton_openai.config.tree import (
    AccessSettings,
    BatchesSettings,
    FilesSettings,
    ModelDefaults,
    Settings,
    TritonSettings,
)
from triton_openai.errors import StoreUnavailable

MODEL = "vllm"
PATH = "/v1/completions"


def line(number: int, **changes: Any) -> dict[str, Any]:
    """Return the line of a request."""
    body = {"model": MODEL, "prompt": f"number {number}", "max_tokens": 5}
    return {"custom_id": f"id-{number}", "method": "POST", "url": PATH, "body": body, **changes}


def jsonl(lines: Sequence[Any]) -> bytes:
    """Return a file of *lines*."""
    return b"".join([(one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines])


class Client:
    """A client with a key."""

    def __init__(self, proxy: Proxy, triton: FakeTriton, key: str = "sk-1") -> None:
        self.proxy, self.triton, self.key = proxy, triton, key

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Return the status and the body of an answer, which is held against the description."""
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.proxy.client.request(method, path, headers=headers, **options) as response:
            answer = await self.proxy._answer(method, path, response)
            return answer.status, answer.body if path.endswith("/content") else answer.json

    async def upload(self, content: bytes) -> str:
        """Upload the input of a batch; return its id."""
        form = FormData({"purpose": "batch"})
        form.add_field("file", content, filename="input.jsonl")
        status, made = await self.call("POST", "/v1/files", data=form)
        assert 200 == status, made
        return str(made["id"])

    async def create(self, lines: Sequence[Any] | bytes, **fields: Any) -> dict[str, Any]:
        """Make a batch."""
        file = await self.upload(lines if isinstance(lines, bytes) else jsonl(lines))
        body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h", **fields}
        status, batch = await self.call("POST", "/v1/batches", json=body)
        assert 200 == status, batch
        return dict(batch)

    async def ended(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return *batch* when it has ended."""
        open_ones = ("validating", "in_progress", "finalizing", "cancelling")
        async with asyncio.timeout(120):
            while batch["status"] in open_ones:
                await asyncio.sleep(0.02)
                _, batch = await self.call("GET", f"/v1/batches/{batch['id']}")
        return batch

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file."""
        if file_id is None:
            return []
        status, content = await self.call("GET", f"/v1/files/{file_id}/content")
        assert 200 == status
        return [json.loads(one) for one in content.splitlines()]


def settings_of(
    folder: Path, triton: FakeTriton, *, max_total: int = 10**9, template: bool = True, **batches: Any
) -> Settings:
    """Return settings with two keys, and state in *folder*."""
    return Settings(
        triton=TritonSettings(url=(triton.url,)),
        defaults=ModelDefaults(chat_template="chatml" if template else None),
        files=FilesSettings(store=f"dir:{folder / 'files'}", max_total=max_total),
        batches=BatchesSettings(store=f"sqlite:{folder / 'db'}", **batches),
        access=AccessSettings(api_key=("one:sk-1", "two:sk-2")),
    )


@asynccontextmanager
async def running(folder: Path, **batches: Any) -> AsyncIterator[Client]:
    """Run the service."""
    async with FakeTriton(config_of(MODEL)) as triton:
        triton.responses = ({"text_output": "an answer"},)
        async with serving(settings_of(folder, triton, **batches)) as proxy:
            await proxy.ready()
            yield Client(proxy, triton)


async def test_a_batch_from_file_to_results(tmp_path: Path) -> None:
    """Each line has one result: answers in one file, refusals in the other, in the form of OpenAI."""
    async with running(tmp_path) as client:
        lines = [line(number) for number in range(5)]
        lines.append(line(5, body={"model": MODEL, "prompt": "x", "max_tokens": -1}))
        batch = await client.create(lines, metadata={"a": "b"})
        assert ("validating", {"a": "b"}, "24h") == (batch["status"], batch["metadata"], batch["completion_window"])
        done = await client.ended(batch)
        assert ("completed", MODEL) == (done["status"], done["model"])
        assert {"total": 6, "completed": 5, "failed": 1} == done["request_counts"]
        for first, then in (("created_at", "in_progress_at"), ("in_progress_at", "finalizing_at")):
            assert done[first] <= done[then] <= done["completed_at"]
        output, failed = await client.lines(done["output_file_id"]), await client.lines(done["error_file_id"])
        assert {f"id-{number}" for number in range(5)} == {one["custom_id"] for one in output}
        for one in output:
            assert {"id", "custom_id", "response", "error"} == one.keys()
            assert one["id"].startswith("batch_req_")
            assert (None, 200) == (one["error"], one["response"]["status_code"])
            assert one["response"]["body"]["choices"][0]["text"]
        (one,) = failed
        assert ("id-5", None, 400) == (one["custom_id"], one["error"], one["response"]["status_code"])
        assert "max_tokens" == one["response"]["body"]["error"]["param"]
        assert 5 == len(client.triton.asked)
        status, page = await client.call("GET", "/v1/batches")
        assert (200, [done]) == (status, page["data"])
        for path in ("/v1/batches?after=", "/v1/batches?after=batch_1", "/v1/files?after="):
            status, answer = await client.call("GET", path)
            assert (400, "after") == (status, answer["error"]["param"]), path
        client.key = "sk-2"
        assert 404 == (await client.call("GET", f"/v1/batches/{done['id']}"))[0]
        assert [] == (await client.call("GET", "/v1/batches"))[1]["data"]


async def test_wrong_batches_are_refused(tmp_path: Path) -> None:
    """What cannot be a batch is refused at once, with the field to blame; a wrong line fails it and says where."""
    async with running(tmp_path) as client:
        file = await client.upload(jsonl([line(1)]))
        good = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
        for change, status, param in (
            ({"endpoint": "/v1/unknown"}, 400, "endpoint"),
            ({"endpoint": "/v1/files"}, 400, "endpoint"),
            ({"completion_window": "0h"}, 400, "completion_window"),
            ({"completion_window": "169h"}, 400, "completion_window"),
            ({"input_file_id": "file-1"}, 404, "input_file_id"),
            ({"metadata": {"a": "x" * 513}}, 400, None),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ):
            answer = await client.call("POST", "/v1/batches", json={**good, **change})
            assert (status, param) == (answer[0], param and answer[1]["error"]["param"]), answer
        client.key = "sk-2"
        answer = await client.call("POST", "/v1/batches", json=good)
        assert (404, "input_file_id") == (answer[0], answer[1]["error"]["param"])
        wrong = await client.create([line(1), line(2, url="/v1/embeddings"), line(1), b"\xff"])
        done = await client.ended(wrong)
        assert ("failed", None, None) == (done["status"], done["output_file_id"], done["error_file_id"])
        found = [(one["code"], one["line"]) for one in done["errors"]["data"]]
        assert [("invalid_url", 2), ("duplicate_custom_id", 3), ("invalid_json_line", 4)] == found
        assert [] == client.triton.asked


CHAT = [{"role": "user", "content": "a"}]
# By endpoint: a right body, and wrong parameters with the field that the error names.
WRONG_TYPES: dict[str, tuple[dict[str, Any], Sequence[tuple[dict[str, Any], str]]]] = {
    "/v1/completions": (
        {"prompt": "a"},
        [({"temperature": "hot"}, "temperature"), ({"max_tokens": -1}, "max_tokens"), ({"n": 1.5}, "n")],
    ),
    "/v1/chat/completions": (
        {"messages": CHAT},
        [
            ({"temperature": "hot"}, "temperature"),
            ({"messages": "a"}, "messages"),
            ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
            ({"top_p": [1]}, "top_p"),
            ({"tools": {}}, "tools"),
        ],
    ),
    "/v1/responses": ({"input": "a"}, [({"temperature": "hot"}, "temperature"), ({"tools": 1}, "tools")]),
}


@every_case("endpoint", WRONG_TYPES)
async def test_parameters_of_wrong_types(endpoint: str, tmp_path: Path) -> None:
    """They are found in validation, as in live bodies, and cost only their line, which gets the error of a live one."""
    right, wrong = WRONG_TYPES[endpoint]
    bodies = [{"model": MODEL, **right}] + [{"model": MODEL, **right, **change} for change, _ in wrong]
    async with running(tmp_path / endpoint.replace("/", "-"), paused=True) as client:
        lines = [line(number, body=body, url=endpoint) for number, body in enumerate(bodies)]
        batch = await client.create(lines, endpoint=endpoint)
        async with asyncio.timeout(120):
            while batch["request_counts"]["failed"] < len(wrong):
                await asyncio.sleep(0.02)
                _, batch = await client.call("GET", f"/v1/batches/{batch['id']}")
        assert ("in_progress", []) == (batch["status"], client.triton.asked)
        await client.call("POST", f"/v1/batches/{batch['id']}/cancel")
        done = await client.ended(batch)
        assert {"total": len(bodies), "completed": 0, "failed": len(wrong)} == done["request_counts"]
        answers = {one["custom_id"]: one["response"] for one in await client.lines(done["error_file_id"])}
        assert answers.pop("id-0") is None
        for number, (change, param) in enumerate(wrong, 1):
            answer = answers[f"id-{number}"]
            status, live = await client.call("POST", endpoint, json=bodies[number])
            assert (400, param) == (answer["status_code"], answer["body"]["error"]["param"]), change
            assert (status, live["error"]) == (answer["status_code"], answer["body"]["error"]), change


async def test_wrong_messages_cost_only_themselves(tmp_path: Path) -> None:
    """So do those of Anthropic's batches."""
    params = {"model": MODEL, "max_tokens": 5, "messages": CHAT}
    requests = [{"custom_id": "right", "params": params}, {"custom_id": "wrong", "params": {**params, "top_k": "all"}}]
    async with running(tmp_path, paused=True) as client:
        _, batch = await client.call("POST", "/v1/messages/batches", json={"requests": requests})
        path = f"/v1/messages/batches/{batch['id']}"
        runner = client.proxy.client.app[SERVICE].batches
        async with asyncio.timeout(120):
            while not any(one.batch.failed for one in runner._batches.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await client.call("POST", f"{path}/cancel")
        async with asyncio.timeout(120):
            while (batch := (await client.call("GET", path))[1])["results_url"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (1, 1) == (batch["request_counts"]["errored"], batch["request_counts"]["canceled"])


async def test_a_file_that_a_batch_reads_is_kept(tmp_path: Path) -> None:
    """The input of a batch can be deleted when the batch has ended; cancelling it twice is the same as once."""
    async with running(tmp_path, paused=True) as client:
        batch = await client.create([line(1), line(2)])
        path = f"/v1/files/{batch['input_file_id']}"
        assert (409, "in_use") == ((answer := await client.call("DELETE", path))[0], answer[1]["error"]["code"])
        async with asyncio.timeout(120):
            while batch["status"] != "in_progress":
                await asyncio.sleep(0.02)
                _, batch = await client.call("GET", f"/v1/batches/{batch['id']}")
        cancelled = f"/v1/batches/{batch['id']}/cancel"
        assert "cancelling" == (await client.call("POST", cancelled))[1]["status"]
        done = await client.ended(batch)
        assert ("cancelled", None) == (done["status"], done["output_file_id"])
        assert [("id-1", None, "batch_cancelled"), ("id-2", None, "batch_cancelled")] == [
            (one["custom_id"], one["response"], one["error"]["code"])
            for one in await client.lines(done["error_file_id"])
        ]
        assert (200, done) == await client.call("POST", cancelled)
        assert 200 == (await client.call("DELETE", path))[0]
        again = {"input_file_id": batch["input_file_id"], "endpoint": PATH, "completion_window": "24h"}
        assert 404 == (await client.call("POST", "/v1/batches", json=again))[0]


async def test_a_finished_batch_is_not_cancelled(tmp_path: Path) -> None:
    """Cancelling what has ended is an error."""
    async with running(tmp_path) as client:
        done = await client.ended(await client.create([line(1)]))
        status, answer = await client.call("POST", f"/v1/batches/{done['id']}/cancel")
        assert (400, "batch_not_cancellable") == (status, answer["error"]["code"])


async def test_too_many_batches(tmp_path: Path) -> None:
    """A key may have some open batches, and another one as many."""
    async with running(tmp_path, paused=True, max_batches=1) as client:
        await client.create([line(1)])
        file = await client.upload(jsonl([line(1)]))
        body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
        status, answer = await client.call("POST", "/v1/batches", json=body)
        assert (429, "too_many_batches") == (status, answer["error"]["code"])
        client.key = "sk-2"
        await client.create([line(1)])


async def test_what_is_kept_bounds_batches(tmp_path: Path) -> None:
    """One file makes no more batches than its key has room for."""
    async with running(tmp_path, max_total=20_000) as client:
        file = await client.upload(jsonl([line(1)]))
        body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
        made: list[dict[str, Any]] = []
        while (answer := await client.call("POST", "/v1/batches", json=body))[0] == 200:
            made.append(await client.ended(answer[1]))
        assert (413, "storage_limit_exceeded") == (answer[0], answer[1]["error"]["code"])
        # Each counts, and so does its file.
        assert 2 == len(made)
        # They are kept for a month; only files can be deleted.
        for one in made:
            assert 200 == (await client.call("DELETE", f"/v1/files/{one['output_file_id']}"))[0]
        assert 200 == (await client.call("POST", "/v1/batches", json=body))[0]


@pytest.mark.parametrize("is_added", [True, False])
async def test_messages_of_which_nobody_knows(tmp_path: Path, is_added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch may or may not have been made, its requests stay only if it was."""
    async with running(tmp_path) as client:
        store, files = client.proxy.client.app[SERVICE].files.store, tmp_path / "files"
        add = store.batches.add

        async def lost(*given: Any, **options: Any) -> None:
            if is_added:
                await add(*given, **options)
            raise StoreUnavailable("no answer")

        monkeypatch.setattr(store.batches, "add", lost)
        params = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
        path = "/v1/messages/batches"
        status, _ = await client.call("POST", path, json={"requests": [{"custom_id": "a", "params": params}]})
        assert 503 == status
        if not is_added:
            assert [] == [one.name for one in files.iterdir() if one.suffix != ".lock"]
            return
        client.proxy.client.app[SERVICE].batches.wake()
        async with asyncio.timeout(120):
            while (found := (await client.call("GET", path))[1]["data"][0])["results_url"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert 1 == found["request_counts"]["succeeded"] + found["request_counts"]["errored"]


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    """A service that ends in the middle of a batch leaves it to the next one."""
    async with FakeTriton(config_of(MODEL)) as triton:
        triton.responses = ({"text_output": "an"}, {"text_output": " answer"})
        triton.may_go_on.clear()
        settings = settings_of(tmp_path, triton)
        async with serving(settings) as proxy:
            await proxy.ready()
            batch = await Client(proxy, triton).create([line(number) for number in range(20)])
            async with asyncio.timeout(120):
                while not triton.asked:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.01)
        triton.may_go_on.set()
        async with serving(settings) as proxy:
            await proxy.ready()
            client = Client(proxy, triton)
            done = await client.ended(batch)
            assert ("completed", 20) == (done["status"], done["request_counts"]["completed"])
            assert 20 == len({one["custom_id"] for one in await client.lines(done["output_file_id"])})


async def test_messages_in_batches(tmp_path: Path) -> None:
    """Anthropic's batches run on the same engine, with results in the form of its API."""
    async with running(tmp_path) as client:
        params = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
        requests = [{"custom_id": f"m-{number}", "params": params} for number in range(3)]
        requests.append({"custom_id": "wrong", "params": {**params, "max_tokens": -1}})
        path = "/v1/messages/batches"
        status, batch = await client.call("POST", path, json={"requests": requests})
        assert (200, "in_progress", 4) == (status, batch["processing_status"], batch["request_counts"]["processing"])
        assert batch["id"].startswith("msgbatch_")
        async with asyncio.timeout(120):
            while batch["processing_status"] != "ended":
                await asyncio.sleep(0.02)
                _, batch = await client.call("GET", f"{path}/{batch['id']}")
        assert batch["results_url"] == f"{path}/{batch['id']}/results"
        headers = {"x-api-key": "sk-1"}
        async with client.proxy.client.get(batch["results_url"], headers=headers) as response:
            assert "application/x-jsonl" == response.headers["Content-Type"]
            results = {one["custom_id"]: one["result"] for one in map(json.loads, (await response.text()).splitlines())}
        counts = batch["request_counts"]
        assert 4 == len(results) == counts["succeeded"] + counts["errored"]
        assert "errored" == results["wrong"]["type"]
        assert "invalid_request_error" == results["wrong"]["error"]["error"]["type"]
        assert (200, batch) == (200, (await client.call("GET", path))[1]["data"][0])
        assert [] == (await client.call("GET", "/v1/batches"))[1]["data"]
        assert "message_batch_deleted" == (await client.call("DELETE", f"{path}/{batch['id']}"))[1]["type"]
        assert 404 == (await client.call("GET", f"{path}/{batch['id']}"))[0]
        for query in ("after_id=", "before_id=", "after_id=msgbatch_1"):
            status, answer = await client.call("GET", f"{path}?{query}")
            assert (400, "invalid_request_error") == (status, answer["error"]["type"]), query
        none: list[Any] = []
        for wrong in (
            {"requests": none},
            {"requests": [requests[0], requests[0]]},
            {"requests": [{"custom_id": "a b", "params": params}]},
            {"requests": [{"custom_id": "a", "params": {**params, "stream": True}}]},
        ):
            assert 400 == (await client.call("POST", path, json=wrong))[0]


async def test_chats_without_a_template(tmp_path: Path) -> None:
    """A batch of chats to a model without a template fails before any line runs; one of completions does not."""
    async with running(tmp_path, template=False) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        for path, asked in (
            ("/v1/chat/completions", body),
            ("/v1/responses", {"model": MODEL, "input": "Hello"}),
            ("/v1/messages", {**body, "max_tokens": 5}),
        ):
            lines = [line(number, url=path, body=asked) for number in range(2)]
            done = await client.ended(await client.create(lines, endpoint=path))
            (fault,) = done["errors"]["data"]
            assert ("failed", "configuration_error", "body.model", 1) == (
                done["status"], fault["code"], fault["param"], fault["line"]
            )  # fmt: skip
            assert "--chat-template" in fault["message"]
        status, answer = await client.call(
            "POST", "/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": {**body, "max_tokens": 5}}]}
        )
        assert (501, "api_error") == (status, answer["error"]["type"])
        assert [] == client.triton.asked
        assert "completed" == (await client.ended(await client.create([line(1)])))["status"]


async def test_lines_for_a_model_that_does_something_else(tmp_path: Path) -> None:
    """A batch that asks a model for what it does not do fails as a whole, with what it does."""
    async with running(tmp_path) as client:
        lines = [line(1, url="/v1/embeddings", body={"model": MODEL, "input": "Hello"})]
        done = await client.ended(await client.create(lines, endpoint="/v1/embeddings"))
        (fault,) = done["errors"]["data"]
        assert ("failed", "body.model") == (done["status"], fault["param"])
        assert "does not" in fault["message"]
        assert [] == client.triton.asked


async def test_ids_with_line_breaks_are_no_ids(tmp_path: Path) -> None:
    """Whatever stands in a path of Anthropic's API, the error has its form."""
    async with running(tmp_path) as client:
        status, answer = await client.call("GET", "/v1/messages/batches/%0A")
        assert (404, "not_found_error") == (status, answer["error"]["type"])
