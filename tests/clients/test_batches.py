"""Files and batches by the official clients, in front of a real Triton."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import BadRequestError, OpenAI

from tests.clients.service import Service, steered, until

MODEL = "vllm_model"


def lines(path: str, *bodies: dict[str, Any]) -> bytes:
    """Return the input of a batch."""
    made = [
        {"custom_id": f"id-{number}", "method": "POST", "url": path, "body": body} for number, body in enumerate(bodies)
    ]
    return b"".join([json.dumps(line).encode() + b"\n" for line in made])


def run(client: OpenAI, path: Any, *bodies: dict[str, Any]) -> tuple[Any, list[Any], list[Any]]:
    """Run a batch; return it, and what is in its files."""
    file = client.files.create(
        file=("input.jsonl", lines(path, *bodies)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert file.expires_at == file.created_at + 7200
    assert file == client.files.retrieve(file.id)
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=path,
        completion_window="24h",
        metadata={"job": "nightly"},
    )
    done: Any = until(lambda: (found := client.batches.retrieve(batch.id)).completed_at and found)
    assert ("completed", {"job": "nightly"}) == (done.status, done.metadata)
    contents = [
        [] if one is None else [json.loads(line) for line in client.files.content(one).text.splitlines()]
        for one in (done.output_file_id, done.error_file_id)
    ]
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    return done, contents[0], contents[1]


def test_uploads_in_parts(client: OpenAI, tmp_path: Path) -> None:
    """The client's helper cuts a file into parts and makes one of them."""
    path = tmp_path / "input.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 30_000)
    upload = client.uploads.upload_file_chunked(file=path, mime_type="text/jsonl", purpose="batch", part_size=100_000)
    assert "completed" == upload.status
    assert upload.file is not None
    assert path.read_bytes() == client.files.content(upload.file.id).read()


def test_chats(client: OpenAI) -> None:
    """A batch of chats: answers, usage, and the error of the line that is wrong."""
    good = {"model": MODEL, "messages": [{"role": "user", "content": steered(text="one two")}]}
    done, output, failed = run(client, "/v1/chat/completions", good, good, {"model": MODEL, "messages": []})

    assert ["one two"] * 2 == [one["response"]["body"]["choices"][0]["message"]["content"] for one in output]
    (wrong,) = failed
    assert ("id-2", 400, "messages") == (
        wrong["custom_id"], wrong["response"]["status_code"], wrong["response"]["body"]["error"]["param"]
    )  # fmt: skip
    assert (3, 2, 1) == (done.request_counts.total, done.request_counts.completed, done.request_counts.failed)
    usage = [one["response"]["body"]["usage"] for one in output]
    assert sum(one["total_tokens"] for one in usage) == done.usage.total_tokens > 0


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"model": MODEL, "prompt": steered(text="one")}),
        ("/v1/responses", {"model": MODEL, "input": steered(text="one")}),
        ("/v1/embeddings", {"model": "text_embedding", "input": "one"}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "one"}]}),
        ("/v1/rerank", {"model": "text_embedding", "query": "one", "documents": ["one", "two"]}),
    ],
)
def test_endpoints(client: OpenAI, path: str, body: dict[str, Any]) -> None:
    """Each endpoint that asks a model takes batches; a line's answer is that of the same request."""
    _, output, failed = run(client, path, body)

    assert [] == failed
    live = client.post(path.removeprefix("/v1"), body=body, cast_to=object)
    assert isinstance(live, dict)
    assert live.keys() == output[0]["response"]["body"].keys()


def test_files_and_cancelling(client: OpenAI) -> None:
    """Files are listed, waited for and deleted; a batch that has ended is not cancelled."""
    done, _, _ = run(client, "/v1/completions", {"model": MODEL, "prompt": steered(text="one")})
    with pytest.raises(BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(done.id)
    ids = [one.id for one in client.files.list(purpose="batch", limit=1)]
    assert done.input_file_id in ids
    assert "processed" == client.files.wait_for_processing(done.input_file_id).status
    assert client.files.delete(done.input_file_id).deleted
    assert done.input_file_id not in [one.id for one in client.files.list()]


BREAKS = "a\u0085b\u2028c\u2029d"


def test_line_breaks_in_answers(client: OpenAI, connection: httpx2.Client) -> None:
    """No text breaks a line where the client reads files and streams line by line."""
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": steered(text=BREAKS, eos=True)}]}
    wrong = {**chat, "messages": [{"role": BREAKS, "content": BREAKS}]}
    done, output, failed = run(client, "/v1/chat/completions", chat, wrong)
    assert (1, 1) == (len(output), len(failed))
    for file_id, found in ((done.output_file_id, output), (done.error_file_id, failed)):
        assert found == [json.loads(line) for line in client.files.content(file_id).iter_lines()]
    assert BREAKS == output[0]["response"]["body"]["choices"][0]["message"]["content"]
    bodies: dict[str, dict[str, Any]] = {
        "/chat/completions": chat,
        "/responses": {"model": MODEL, "input": steered(text=BREAKS)},
        "/messages": {**chat, "max_tokens": 50},
    }
    for path, body in bodies.items():
        url = f"{str(client.base_url).rstrip('/')}{path}"
        with connection.stream("POST", url, json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith(("data: ", "event: ", ":")) for line in lines), lines
        assert any("\\u2028" in line for line in lines)


def test_messages(tooled: Service, connection: httpx2.Client) -> None:
    """Anthropic's client makes a batch, waits, and reads its results one by one."""
    anthropic = importlib.import_module("anthropic")
    client = anthropic.Anthropic(base_url=tooled.address, api_key="none", max_retries=0, http_client=connection)
    good = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": steered(text="one")}]}
    requests = [{"custom_id": "good", "params": good}, {"custom_id": "bad", "params": {**good, "max_tokens": 0}}]
    batch = client.messages.batches.create(requests=requests)
    assert ("in_progress", 2) == (batch.processing_status, batch.request_counts.processing)
    done = until(lambda: (found := client.messages.batches.retrieve(batch.id)).processing_status == "ended" and found)
    assert (1, 1, 0) == (
        done.request_counts.succeeded, done.request_counts.errored, done.request_counts.processing
    )  # fmt: skip
    results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert "one" == results["good"].message.content[0].text
    assert "invalid_request_error" == results["bad"].error.error.type
    assert batch.id in [one.id for one in client.messages.batches.list(limit=1)]
    assert batch.id == client.messages.batches.delete(batch.id).id
