"""Responses that compact their conversation: beyond a number of tokens the answer goes on from a summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.cases import every_case
from tests.conformance.calls import steered
from tests.faces import MODEL, Faces, running
from tests.proxy_fixture import Answer
from triton_openai.api import agents
from triton_openai.api.agents import unsealed
from triton_openai.api.responses import context_window
from triton_openai.api.service import RequestContext
from triton_openai.errors import ContextLengthExceeded
from triton_openai.telemetry.request_record import RequestRecord

EDITS = [{"type": "compaction", "compact_threshold": 300}]


@pytest.fixture
async def faces() -> AsyncIterator[Faces]:
    """The service without sockets."""
    async with running(chat_template="chatml", max_model_len=4000) as service:
        yield service


def prompts(faces: Faces) -> list[str]:
    """Return the prompts that the model got."""
    return [
        str(next(tensor.values[0] for tensor in request.inputs if tensor.name == "PROMPT"))
        for request in faces.triton.asked
    ]


def history(words: int) -> list[dict[str, Any]]:
    """Return a conversation with a call, of about *words* tokens, which ends with a question."""
    return [
        {"role": "user", "content": "First question."},
        {"role": "assistant", "content": "word " * words},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"role": "user", "content": steered("Last question.", text="Said.")},
    ]


async def ask(faces: Faces, items: list[dict[str, Any]], **fields: Any) -> tuple[Answer, dict[str, Any]]:
    """Return the answer and its response, whole or streamed."""
    answer = await faces.post(
        "/v1/responses", {"model": MODEL, "input": items, "instructions": "Be kind.", "store": False, **fields}
    )
    assert 200 == answer.status, answer.body
    if not fields.get("stream"):
        return answer, answer.json
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    kinds = [event["type"] for event in events]
    if fields.get("context_management") and "response.compaction.compacting" in kinds:
        assert [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.compaction.compacting",
            "response.output_item.done",
        ] == kinds[:5]
    response: dict[str, Any] = events[-1]["response"]
    return answer, response


@every_case("stream", [False, True])
async def test_a_long_conversation(faces: Faces, stream: bool) -> None:
    """The first item is the summary; the model gets instructions, summary and last question; so does the next turn."""
    faces.triton.asked.clear()
    items = history(500)
    _, response = await ask(faces, items, context_management=EDITS, stream=stream)
    summarized, continued = prompts(faces)
    compaction, message = response["output"]

    assert "Summarize this conversation" in summarized
    assert "word word" in summarized
    assert "word word" not in continued
    assert continued.index("Be kind.") < continued.index("Summary of the conversation so far:\nSaid.")
    assert continued.index("Summary of the conversation") < continued.index("Last question.")
    assert ("compaction", "Said.") == (compaction["type"], unsealed(compaction["encrypted_content"]))
    assert "Said." == message["content"][0]["text"]
    assert response["usage"]["input_tokens"] < 300

    faces.triton.asked.clear()
    following = [*items, *response["output"], {"role": "user", "content": steered("Next.", text="Yes.")}]
    _, response = await ask(faces, following, context_management=EDITS, stream=stream)
    (prompt,) = prompts(faces)
    assert ["message"] == [item["type"] for item in response["output"]]
    assert "word word" not in prompt
    assert "First question." not in prompt
    assert "Summary of the conversation so far:\nSaid." in prompt


@every_case("stream", [False, True])
async def test_a_chain_of_stored_responses(faces: Faces, stream: bool) -> None:
    """What a response goes on from begins with the last summary too."""
    _, first = await ask(faces, history(500), context_management=EDITS, stream=stream, store=True)
    faces.triton.asked.clear()
    await ask(faces, [{"role": "user", "content": "Next."}], previous_response_id=first["id"], stream=stream)
    (prompt,) = prompts(faces)

    assert "word word" not in prompt
    assert "Summary of the conversation so far:\nSaid." in prompt


@every_case("edits", [EDITS, [{"type": "compaction"}], [], None])
async def test_a_short_conversation(faces: Faces, edits: list[dict[str, Any]] | None) -> None:
    """It stays as it is, and so does one without a threshold for less than three quarters of the context."""
    faces.triton.asked.clear()
    words = 100 if edits == EDITS else 1000
    _, response = await ask(faces, history(words), context_management=edits)

    assert 1 == len(faces.triton.asked)
    assert ["message"] == [item["type"] for item in response["output"]]


async def test_a_default_threshold(faces: Faces) -> None:
    """Without a number, three quarters of the context are the threshold."""
    _, response = await ask(faces, history(3200), context_management=[{"type": "compaction"}])

    assert ["compaction", "message"] == [item["type"] for item in response["output"]]


@every_case("stream", [False, True])
async def test_a_model_that_writes_no_summary(faces: Faces, stream: bool) -> None:
    """The answer goes on from the whole conversation, and a header says that it was not compacted."""
    faces.triton.asked.clear()
    items = [*history(500)[:-1], {"role": "user", "content": steered("Last question.", text="")}]
    answer, response = await ask(faces, items, context_management=EDITS, stream=stream)
    _, continued = prompts(faces)

    assert "word word" in continued
    assert "Summarize" not in continued
    assert "compaction" not in [item["type"] for item in response["output"]]
    if not stream:
        # A stream has begun before.
        assert "context_management" == answer.headers["x-triton-openai-ignored"]
    # What the attempt took is charged.
    assert response["usage"]["input_tokens"] > 500


async def test_a_compaction_without_a_summary(faces: Faces) -> None:
    """A request for a compaction alone says why there is none; another try would have the same result."""
    items = [*history(500)[:-1], {"role": "user", "content": steered("", text="")}]
    answer = await faces.post("/v1/responses/compact", {"model": MODEL, "input": items})

    assert (422, "false") == (answer.status, answer.headers["x-should-retry"])
    assert ("no_summary", "input") == (answer.json["error"]["code"], answer.json["error"]["param"])
    assert "wrote no summary" in answer.json["error"]["message"]


@every_case("edits", [[{"type": "other"}], [{"type": "compaction", "compact_threshold": 0}], EDITS * 2])
async def test_edits_that_are_wrong(faces: Faces, edits: list[dict[str, Any]]) -> None:
    """The error names the field."""
    answer = await faces.post("/v1/responses", {"model": MODEL, "input": "Hi", "context_management": edits})

    assert 400 == answer.status
    assert answer.json["error"]["param"].startswith("context_management")


async def test_a_conversation_without_a_user(faces: Faces) -> None:
    """It goes on from the summary alone."""
    said = {"role": "assistant", "content": "word " * 500}
    body = {"model": MODEL, "input": [said], "store": False, "context_management": EDITS, "max_output_tokens": 5}
    answer = await faces.post("/v1/responses", body)

    assert 200 == answer.status, answer.body
    assert ["compaction", "message"] == [item["type"] for item in answer.json["output"]]


async def test_instructions_among_the_items(faces: Faces) -> None:
    """No summary replaces them, neither now nor in the next turn."""
    items = [{"role": "developer", "content": "Always rhyme."}, *history(500)]
    _, response = await ask(faces, items, context_management=EDITS)
    faces.triton.asked.clear()
    await ask(faces, [*items, *response["output"], {"role": "user", "content": "Next."}])
    (prompt,) = prompts(faces)

    assert prompt.index("Always rhyme.") < prompt.index("Summary of the conversation")
    assert "First question." not in prompt


async def test_a_summary_for_the_background_is_admitted(faces: Faces, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of running requests hold for the summary too, which is made when the response is no longer queued."""
    admission = faces.service.admission
    enter = admission.enter
    asked: list[int] = []

    async def counting(*args: Any, **options: Any) -> Any:
        asked.append(len(faces.triton.asked))
        return await enter(*args, **options)

    monkeypatch.setattr(admission, "enter", counting)
    faces.triton.asked.clear()
    body = {"model": MODEL, "input": history(500), "background": True, "context_management": EDITS}
    answer = await faces.post("/v1/responses", body)
    assert 200 == answer.status, answer.body
    await asyncio.gather(*[log.task for log in faces.service.responses.live.values() if log.task is not None])
    assert [0] == asked
    assert 2 == len(faces.triton.asked)


async def test_the_summary_is_charged_after_another_attempt(faces: Faces, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend finds the prompt too long, and answers a shorter one: the summary stays among what was answered."""
    render = agents.feed_renderer
    records: list[RequestRecord] = []

    async def refusing_once(*args: Any, **options: Any) -> None:
        if not records:
            raise ContextLengthExceeded("too long")
        await render(*args, **options)

    async def shorten(context: RequestContext[Any], *_: Any) -> None:
        records.append(context.record)

    monkeypatch.setattr(agents, "feed_renderer", refusing_once)
    monkeypatch.setattr(context_window, "_shorten", shorten)
    _, response = await ask(faces, history(500), context_management=EDITS, truncation="auto")
    (record,) = records

    assert ["compaction", "message"] == [item["type"] for item in response["output"]]
    assert 2 == len(record.answers)
    assert record.usage is not None
    assert record.usage.prompt_tokens > 500
