"""Options about the thinking, the truncation and beams: what is wrong is refused by the name that the client used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.cases import every_case
from tests.faces import MODEL, Faces, running

HEADER = "x-triton-openai-ignored"


@pytest.fixture
async def faces() -> AsyncIterator[Faces]:
    """The service without sockets."""
    async with running(chat_template="chatml", max_model_len=4000) as service:
        yield service


async def chat(faces: Faces, **fields: Any) -> Any:
    """Return the answer to a chat with these *fields*."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **fields}
    return await faces.post("/v1/chat/completions", body)


@every_case(
    "fields, name",
    [
        ({"thinking_budget": 5}, "thinking_budget"),
        ({"thinking_budget_tokens": 5}, "thinking_budget_tokens"),
        ({"reasoning_budget": 0}, "reasoning_budget"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens"),
        ({"max_reasoning_tokens": 5}, "max_reasoning_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"thinking_budget": 5}}, "thinking.thinking_budget"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"chat_template_kwargs": {"thinking_budget": 5}}, "chat_template_kwargs.thinking_budget"),
        # Unlimited by one name, and limited by another.
        ({"thinking_token_budget": -1, "max_thinking_tokens": 5}, "max_thinking_tokens"),
        ({"thinking_token_budget": -1}, None),
    ],
)
async def test_a_budget_that_is_ignored(faces: Faces, fields: dict[str, Any], name: str | None) -> None:
    """The header has the name that the client used."""
    answer = await chat(faces, **fields)

    assert 200 == answer.status, answer.body
    assert name == answer.headers.get(HEADER)


async def test_a_budget_that_responses_ignore(faces: Faces) -> None:
    """Other APIs have names of their own."""
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 5, "reasoning": {"max_tokens": 5}}
    answer = await faces.post("/v1/responses", body)

    assert 200 == answer.status, answer.body
    assert "reasoning.max_tokens" == answer.headers[HEADER]


async def test_a_budget_that_messages_ignore(faces: Faces) -> None:
    """Anthropic's API has it within ``thinking``."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], "thinking": thinking}
    answer = await faces.post("/v1/messages", body)

    assert 200 == answer.status, answer.body
    assert "thinking.budget_tokens" == answer.headers[HEADER]


@every_case(
    "fields, param",
    [
        ({"reasoning": {"max_tokens": "many"}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": True}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 1.5}}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"reasoning": {"effort": {"level": "high"}}}, "reasoning.effort"),
        ({"reasoning": {"enabled": 1}}, "reasoning.enabled"),
        ({"reasoning": {"enabled": "perhaps"}}, "reasoning.enabled"),
        ({"reasoning": {"exclude": "yes"}}, "reasoning.exclude"),
        ({"reasoning": {"exclude": 1}}, "reasoning.exclude"),
        ({"thinking": {"type": 5}}, "thinking.type"),
        ({"thinking": {"type": ["enabled"]}}, "thinking.type"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "1024"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": {"budget_tokens": 10.5}}, "thinking.budget_tokens"),
        ({"thinking": {"budget_tokens": -7}}, "thinking.budget_tokens"),
        ({"thinking": {"max_thinking_tokens": []}}, "thinking.max_thinking_tokens"),
        ({"reasoning": [1]}, "reasoning"),
        ({"thinking": 7}, "thinking"),
        ({"enable_thinking": {}}, "enable_thinking"),
        ({"think": 1}, "think"),
    ],
)
async def test_thinking_options_that_are_wrong(faces: Faces, fields: dict[str, Any], param: str) -> None:
    """A value of another type would have no effect."""
    answer = await chat(faces, **fields)

    assert (400, param) == (answer.status, answer.json["error"]["param"])
    assert f"'{param}'" in answer.json["error"]["message"]


@every_case(
    "fields",
    [
        {"reasoning": {"effort": "high", "summary": "auto"}},
        {"reasoning": {"effort": None, "max_tokens": None, "enabled": True, "exclude": False}},
        {"reasoning": {}},
        {"thinking": {"type": "enabled", "keep": "all"}},
        {"thinking": {"type": "disabled", "budget_tokens": None}},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {}},
        {"thinking": False},
        {"thinking": "off"},
        {"think": "low"},
    ],
)
async def test_thinking_options_that_are_right(faces: Faces, fields: dict[str, Any]) -> None:
    """Fields that other services have in them are accepted."""
    answer = await chat(faces, **fields)

    assert 200 == answer.status, answer.body


@every_case(
    "path, body, param",
    [
        ("/v1/chat/completions", {"max_tokens": 4000}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ("/v1/completions", {"max_tokens": 4000}, "max_tokens"),
        ("/v1/completions", {"max_tokens": 10**6}, "max_tokens"),
    ],
)
async def test_a_truncation_that_the_answer_leaves_no_room_for(
    faces: Faces, path: str, body: dict[str, Any], param: str
) -> None:
    """The prompt may be as long as the context allows: the error is about the answer, which takes all of it."""
    text = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    key = "messages" if "chat" in path else "prompt"
    request = {"model": MODEL, key: text[key], "truncate_prompt_tokens": -1, **body}
    answer = await faces.post(path, request)

    assert (400, param) == (answer.status, answer.json["error"]["param"])
    assert "context_length_exceeded" == answer.json["error"]["code"]
    assert "4000 tokens" in answer.json["error"]["message"]
    assert "truncat" not in answer.json["error"]["message"]

    fits = await faces.post(path, {**request, param: 3900})
    assert 200 == fits.status, fits.body
