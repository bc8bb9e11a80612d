"""What a running service writes into its log of prompts and answers: nothing, or what its operator asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import Service, serving, steered, until
from tests.triton_fixture import TestTriton

PROMPT = "the-secret-of-the-prompt"
ANSWER = "the-secret-of-the-answer"
KEY = "sk-the-secret-of-the-key"
PIXELS = "iVBORw0KGgoTheSecretOfTheImage"


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests of all kinds: answered, streamed, refused, unreadable, and failing half-way."""
    told = steered(PROMPT, text=f"{ANSWER} one two")
    chat = {"model": "vllm_model", "messages": [{"role": "user", "content": told}]}
    yield "/v1/chat/completions", chat
    yield "/v1/chat/completions", {**chat, "stream": True}
    yield "/v1/chat/completions", {**chat, "temperature": 99}
    yield "/v1/chat/completions", {**chat, "tools": PROMPT}
    yield "/v1/chat/completions", {**chat, "model": "nobody"}
    failing = steered(PROMPT, text=f"{ANSWER} one two", fail_at=2)
    for stream in (False, True):
        yield "/v1/completions", {"model": "vllm_model", "prompt": failing, "stream": stream}
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}}
    yield "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": [picture]}]}
    yield "/v1/completions", {"model": "ensemble", "prompt": told, "stop": ["one"]}
    yield "/v1/embeddings", {"model": "text_embedding", "input": PROMPT}
    yield "/v1/rerank", {"model": "text_rerank", "query": PROMPT, "documents": [PROMPT]}
    yield "/v1/tokenize", {"model": "vllm_model", "prompt": PROMPT}


def arguments(triton: TestTriton) -> tuple[str, ...]:
    """Return how the service is started."""
    return (
        "--triton-url",
        triton.http_url,
        "--tokenizer",
        f"vllm_model={triton.tokenizer}",
        "--api-key",
        f"team:{KEY}",
    )


def entries(service: Service) -> list[dict[str, Any]]:
    """Return the lines of the log."""
    return [json.loads(line) for line in service.log_lines()]


def asked(service: Service) -> list[dict[str, Any]]:
    """Ask everything, and return the log when every request has its line."""
    headers = {"Authorization": f"Bearer {KEY}"}
    for number, (path, body) in enumerate(requests(), 1):
        service.post(path, body, **{**headers, "x-request-id": f"asked-{number}"})
    service.post("/v1/completions", {"model": "ensemble", "prompt": PROMPT}, Authorization=f"Bearer x{KEY}")

    def written() -> list[dict[str, Any]] | None:
        found = entries(service)
        # One more is refused.
        return found if sum(line["event"] == "request" for line in found) == number + 1 else None

    return list(until(written))


@pytest.mark.parametrize("level", ["debug", "info"])
def test_by_default_there_is_nothing(triton: TestTriton, tmp_path: Path, level: str) -> None:
    """By default the log has neither prompts nor answers nor keys, at any level, whatever becomes of a request."""
    with serving(tmp_path, *arguments(triton), "--log-level", level) as service:
        found = [line for line in asked(service) if line["event"] == "request"]
        log = service.log.read_text()

    assert {200, 400, 401, 404, 502} == {line["status"] for line in found}
    assert not [secret for secret in (PROMPT, ANSWER, KEY, PIXELS) if secret in log]


def test_content_that_was_asked_for(triton: TestTriton, tmp_path: Path) -> None:
    """
    Content that was asked for has lines of its own, is cut and marked, says so at the start, and holds neither
    images nor keys.
    """
    with serving(tmp_path, *arguments(triton), settings={"server": {"log_content": 24}}) as service:
        log = asked(service)

    (warning,) = [line for line in log if line["event"] == "prompts and answers are logged"]
    assert ("warning", 24) == (warning["level"], warning["characters"])
    found = {line["request_id"]: line for line in log if line["event"] == "content"}
    prompt = found["asked-1"]["input_messages"][0]["parts"][0]["content"]
    answer = found["asked-1"]["output_messages"][0]
    assert prompt.startswith(f"{PROMPT}…(+")
    assert (f"{ANSWER}…(+8 characters)", "stop") == (answer["parts"][0]["content"], answer["finish_reason"])
    assert found["asked-1"]["output_messages"] == found["asked-2"]["output_messages"]
    assert PROMPT == found["asked-10"]["input_messages"][0]["parts"][0]["content"]
    # What could not be read, and what was for nobody, is not known to be a prompt.
    assert not {"asked-4", "asked-5"} & found.keys()
    assert {"triton_openai.content"} == {line["logger"] for line in found.values()}
    # The line of every day is what it was.
    assert not [line for line in log if line["event"] != "content" and PROMPT in str(line)]
    assert not [secret for secret in (KEY, PIXELS) if secret in service.log.read_text()]
