"""What ``truncation: "auto"`` leaves of a conversation that is too long."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from tests.unit.prompts.test_template_support import save
from triton_openai.api import agents
from triton_openai.api.responses import context_window
from triton_openai.config.tree import ModelDefaults, ModelSettings, ResponsesSettings, Settings, TritonSettings
from triton_openai.prompts import messages
from triton_openai.prompts.tokenizer import Tokenizer

LIMIT = 2048


@asynccontextmanager
async def service(limit: int | None, tokenizer: str | None) -> AsyncIterator[tuple[Proxy, FakeTriton]]:
    """Run a service with a model that says a word."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": text} for text in ("a", "")]
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            defaults=ModelDefaults(chat_template="chatml"),
            models={"m": ModelSettings(max_model_len=limit, tokenizer=tokenizer)},
            responses=ResponsesSettings(store="memory"),
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            yield proxy, triton


def conversation(turns: int, words: int = 10) -> list[dict[str, Any]]:
    """Return turns of different lengths, each with its number, and a question."""
    rng = random.Random(turns)
    items: list[dict[str, Any]] = []
    for turn in range(turns):
        items.append({"role": "user", "content": f"<{turn}>" + "ab " * rng.randrange(words)})
        items.append({"role": "assistant", "content": "cd\n" * rng.randrange(words)})
    return [*items, {"role": "user", "content": f"<{turns}>"}]


def test_what_can_be_the_first_to_stay() -> None:
    """Whole turns can go, and of the last one calls with their results; instructions and its question stay."""
    user, assistant = messages.UserMessage(content="a"), messages.AssistantMessage(content="b")
    system, tool = messages.SystemMessage(content="i"), messages.ToolMessage(content="o", tool_call_id="c")
    developer = messages.DeveloperMessage(content="d")
    turn: list[messages.Message] = [user, assistant]
    chat = [system, *turn, developer, *turn, *turn]
    assert [4, 6] == context_window._cuts(chat)
    assert [0, 3, 4, 5, 6, 7] == context_window._left(chat, 4)
    assert [0, 3, 6, 7] == context_window._left(chat, 6)
    chat = [*turn, *turn, tool, assistant, tool, assistant, tool]
    assert [2, 5, 7] == context_window._cuts(chat)
    assert [2, 7, 8] == context_window._left(chat, 7)
    assert [] == list(context_window._cuts([user, tool])) == list(context_window._cuts([system, assistant]))


def first_turn(prompt: str) -> int:
    """Return the number of the first turn in *prompt*."""
    return int(prompt.partition("<|im_start|>user\n<")[2].partition(">")[0])


async def test_the_fewest_turns_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a conversation becomes, one turn more would not fit; few prompts are counted to find that out."""
    folder = save(tmp_path)
    tokenizer = Tokenizer.load(folder)
    counted: list[int] = []
    count = agents.count_tokens

    async def counting(context: Any) -> int:
        counted.append(await count(context))
        return counted[-1]

    monkeypatch.setattr(agents, "count_tokens", counting)
    async with service(LIMIT, folder) as (proxy, triton):
        for turns in (26, 33, 132, 400):
            for instructions in (None, "Be brief. " * 40):
                counted.clear()
                items = conversation(turns)
                body = {"model": "m", "input": items, "instructions": instructions, "store": False}
                refused = await proxy.post("/v1/responses", body)
                assert (400, "context_length_exceeded") == (refused.status, refused.error["code"])
                assert 200 == (await proxy.post("/v1/responses", {**body, "truncation": "auto"})).status
                prompt = triton.asked[-1][1]["text_input"]
                assert len(counted) <= 3, counted
                assert tokenizer.count(prompt) < LIMIT
                assert (instructions is None) == ("Be brief." not in prompt)
                first = first_turn(prompt)
                assert 0 < first < turns
                body["input"] = items[2 * (first - 1) :]
                assert 400 == (await proxy.post("/v1/responses", body)).status
                body["input"] = items[2 * first :]
                assert 200 == (await proxy.post("/v1/responses", body)).status
                assert prompt == triton.asked[-1][1]["text_input"]


async def test_a_long_turn(tmp_path: Path) -> None:
    """An agent's turn keeps the user's message and the last calls with their results; what cannot fit is a 400."""
    calls: list[dict[str, Any]] = []
    for number in range(60):
        calls.append({"role": "assistant", "content": f"call {number}"})
        calls.append({"type": "function_call_output", "call_id": "c", "output": "result " * 8})
    async with service(LIMIT, save(tmp_path)) as (proxy, triton):
        items = [*conversation(3), *calls]
        body = {"model": "m", "input": items, "truncation": "auto", "store": False}
        assert 200 == (await proxy.post("/v1/responses", body)).status
        prompt = triton.asked[-1][1]["text_input"]
        assert 3 == first_turn(prompt)
        assert prompt.count("call ") == prompt.count("<tool_response>")
        assert "call 59" in prompt
        for items in ([{"role": "user", "content": "ab" * LIMIT}], [{"role": "user", "content": "x"}, calls[0]] * 2):
            body["input"] = [*items, {"role": "user", "content": "long " * LIMIT}]
            refused = await proxy.post("/v1/responses", body)
            assert (400, "context_length_exceeded") == (refused.status, refused.error["code"])


@pytest.mark.parametrize("known", [True, False], ids=["tokenizer", "no tokenizer"])
async def test_a_limit_that_the_backend_knows(tmp_path: Path, known: bool) -> None:
    """The backend is asked once more, with what fits what it said; also in the background."""
    async with service(None, save(tmp_path) if known else None) as (proxy, triton):
        triton.failure = "The decoder prompt (length 2000) is longer than the maximum model length of 1000."
        asked = {"model": "m", "input": conversation(40), "truncation": "auto"}
        for more in ({}, {"stream": True}, {"background": True, "stream": True}):
            triton.asked.clear()
            triton.failing = 1
            body = {**asked, **more}
            answer = await proxy.post("/v1/responses", body)
            assert 200 == answer.status
            assert b'"completed"' in answer.body
            whole, short = [len(sent["text_input"]) for _, sent in triton.asked]
            least, most = (950 / whole, 1000 / whole) if known else (0.4, 0.5)
            assert least < short / whole <= most
        # Once only.
        triton.failing = 2
        refused = await proxy.post("/v1/responses", asked)
        assert (400, "context_length_exceeded") == (refused.status, refused.error["code"])
