"""A budget of thinking that the engine cannot keep: the service ends the thinking, over the models that generate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cases import every_case
from tests.conformance.calls import ENGINES, TRTLLM_AND_VLLM, end_of, in_session_loop, steered
from tests.conformance.test_tools import CALL, WEATHER, merged
from tests.proxy_fixture import changed, proxy_settings, serving

pytestmark = in_session_loop
TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
TEXT_AND_TOKENS = ("vllm_model", "tensorrt_llm")
# Tokens of the thinking up to the order that it holds, and a little more.
BUDGET = 60
MANY = " and so on" * 60


def thinking(answer: str, **orders: Any) -> str:
    """Return a prompt for thinking without end. It holds an order: what goes on from the thinking is *answer*."""
    return steered(text=f"<think>First {steered('', text=answer, **orders)}{MANY}</think>Too late.")


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["http", "grpc"])
async def budgeted(request, triton):
    """The service with a chat template that shows how the model writes calls and thinking."""
    settings = changed(proxy_settings(triton, request.param), defaults={"chat_template": str(TEMPLATE)})
    async with serving(settings, transport=request.param) as proxy:
        await proxy.ready()
        yield proxy


async def think(proxy, model, prompt, stream, **fields):
    """Return message, finish reason, usage and id of a chat."""
    if stream:
        fields["stream_options"] = {"include_usage": True}
    answer = await proxy.post(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 400,
            "stream": stream,
            **fields,
        },
    )
    assert 200 == answer.status, answer.body
    if stream:
        message, finish = merged(answer)
        return message, finish, answer.chunks[-1]["usage"], answer.chunks[0]["id"]
    (choice,) = answer.json["choices"]
    return choice["message"], choice["finish_reason"], answer.json["usage"], answer.json["id"]


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TRTLLM_AND_VLLM)
async def test_the_thinking_ends_at_the_budget(budgeted, model, stream):
    """The thinking has its budget and no more, the answer follows, and both count once."""
    message, finish, usage, _ = await think(
        budgeted, model, thinking("Done."), stream, thinking_token_budget=BUDGET, max_tokens=900
    )
    tokenizer = (await budgeted.models.served[model].prompter()).tokenizer
    prompt = usage["prompt_tokens"]
    _, _, alone, _ = await think(budgeted, model, thinking("Done."), stream, max_tokens=1)

    assert ("Done.", "stop") == (message["content"], finish)
    assert message["reasoning_content"].startswith("First")
    assert BUDGET - 3 <= tokenizer.count(message["reasoning_content"]) <= BUDGET
    assert alone["prompt_tokens"] == prompt
    assert BUDGET + 4 <= usage["completion_tokens"] <= BUDGET + 20


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TEXT_AND_TOKENS)
async def test_what_ends_within_its_budget(budgeted, triton, model, stream):
    """Thinking that ends by itself is one request, and the same answer as without a budget."""
    prompt = steered(text="<think>Short.</think>Yes.")
    free = await think(budgeted, model, prompt, stream)
    *limited, name = await think(budgeted, model, prompt, stream, thinking_token_budget=20)

    for usage in (free[2], limited[2]):
        # Of an answer that comes whole, only the share of the thinking is known.
        assert usage.pop("completion_tokens_details")["reasoning_tokens"] > 0
    assert list(free[:3]) == limited
    assert not triton.record.events(id=f"{name}-answer")


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TEXT_AND_TOKENS)
async def test_the_limit_counts_both_requests(budgeted, model, stream):
    """The answer has what the thinking left of the limit; a limit within the thinking ends it all."""
    budget: dict[str, Any] = {"thinking_token_budget": BUDGET, "max_tokens": BUDGET + 15}
    message, finish, usage, _ = await think(budgeted, model, thinking("yes ", repeat=50), stream, **budget)
    assert ("length", BUDGET + 15) == (finish, usage["completion_tokens"])
    assert 1 <= message["content"].count("yes") < 15

    message, finish, usage, _ = await think(budgeted, model, thinking("Done."), stream, **budget | {"max_tokens": 30})
    assert ("length", 30) == (finish, usage["completion_tokens"])
    assert not message["content"]
    message, finish, _, _ = await think(
        budgeted, model, thinking("Done."), stream, **budget | {"max_tokens": BUDGET + 3}
    )
    assert "length" == finish
    assert not message["content"]


@every_case("stream", [False, True])
async def test_what_comes_with_the_answer(budgeted, stream):
    """Log probabilities are those of the model's tokens, a stop string ends the answer, a call follows the thinking."""
    budget = {"thinking_token_budget": BUDGET}
    for model in TEXT_AND_TOKENS:
        message, finish, _, _ = await think(
            budgeted, model, thinking("So, yes", repeat=2), stream, stop=["yesSo", "nowhere"], **budget
        )
        assert ("So, ", "stop") == (message["content"], finish)
        # As ids: the text of a call would end the thinking that has it.
        tokenizer = (await budgeted.models.served[model].prompter()).tokenizer
        ids = tokenizer.encode(f"So. {CALL}")
        prompt = steered(text=f"<think>First {steered('', tokens=ids)}{MANY * 4}</think>Too late.")
        message, finish, _, _ = await think(
            budgeted, model, prompt, stream, tools=[WEATHER], thinking_token_budget=400, max_tokens=700
        )
        assert ("So.", "tool_calls") == (message["content"], finish)
        assert {"city": "Bonn"} == json.loads(message["tool_calls"][0]["function"]["arguments"])
        answer = await budgeted.post(
            "/v1/chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": thinking("one two")}],
                "max_tokens": 300,
                "logprobs": True,
                "n": 2,
                "stream": stream,
                **budget,
            },
        )
        texts = ["", ""]
        for chunk in answer.chunks if stream else [answer.json]:
            for choice in chunk["choices"]:
                entries = (choice["logprobs"] or {}).get("content") or ()
                texts[choice["index"]] += "".join([entry["token"] for entry in entries])
        assert texts[0].startswith("<think>First")
        assert "one two" in texts[0]
        assert texts[0] == texts[1]


@every_case("name", ["thinking_budget", "max_thinking_tokens", "reasoning", "thinking", "chat_template_kwargs"])
async def test_other_names(budgeted, name):
    """Every client's name of a budget means the same."""
    value = {
        "reasoning": {"max_tokens": BUDGET},
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        "chat_template_kwargs": {"thinking_budget": BUDGET},
    }.get(name, BUDGET)
    message, _, _, _ = await think(budgeted, "vllm_model", thinking("Done."), False, **{name: value})

    assert "Done." == message["content"]


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", TEXT_AND_TOKENS)
async def test_messages_and_responses(budgeted, model, stream):
    """Both have their own names of the budget, and show thinking and answer in their own way."""
    prompt = thinking("Done.")
    body: dict[str, Any] = {"model": model, "stream": stream}
    messages = await budgeted.post(
        "/v1/messages",
        {
            **body,
            "max_tokens": 400,
            "messages": [{"role": "user", "content": prompt}],
            "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        },
    )
    responses = await budgeted.post("/v1/responses", {**body, "input": prompt, "reasoning": {"max_tokens": BUDGET}})
    if stream:
        events = [json.loads(line[6:]) for line in messages.body.splitlines() if line.startswith(b"data: ")]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        text = "".join([delta.get("text", "") for delta in deltas])
        events = [json.loads(line[6:]) for line in responses.body.splitlines() if line.startswith(b"data: {")]
        (response,) = [event["response"] for event in events if event["type"] == "response.completed"]
    else:
        text = "".join([block.get("text", "") for block in messages.json["content"]])
        response = responses.json
    said = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]

    assert "Done." == text
    assert ["Done."] == said


async def test_where_the_end_of_the_thinking_is_not_known(triton):
    """vLLM's parameter is refused, and the remedy named. What agents send to every model is reported as ignored."""
    settings = changed(
        proxy_settings(triton, "http"), defaults={"chat_template": str(TEMPLATE), "reasoning_parser": "none"}
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        body = {"model": "vllm_model", "messages": [{"role": "user", "content": steered(text="Yes.")}], "max_tokens": 9}
        refused = await proxy.post("/v1/chat/completions", {**body, "thinking_token_budget": 3})
        ignored = await proxy.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}})

    assert (400, "thinking_token_budget") == (refused.status, refused.error["param"])
    assert "--reasoning-parser" in refused.error["message"]
    assert (200, "thinking.budget_tokens") == (ignored.status, ignored.headers["x-triton-openai-ignored"])


@pytest.mark.parametrize("model", TEXT_AND_TOKENS)
async def test_a_client_that_leaves_after_the_thinking(budgeted, triton, model):
    """The second request is stopped."""
    answer = steered("", text="word ", repeat=5000, delay_ms=20)
    prompt = steered(text=f"<think>First {answer}{MANY}</think>")
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 3000,
        "stream": True,
        "thinking_token_budget": 80,
    }
    async with budgeted.client.post("/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if b'"content":"w' in line:
                break
        name = json.loads(line.removeprefix(b"data: "))["id"]
        response.close()
    ended, tokens = await asyncio.wait_for(end_of(triton, ENGINES[model], f"{name}-answer"), 120)

    assert ended in {"cancelled", "stopped"}
    assert tokens < 3000
