"""What ``truncation: "auto"`` leaves of a conversation that is too long."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from tests.unit.prompts.test_template_support import save
from triton_openai.api import conversation as chats
from triton_openai.api.conversation import PreparedChat
from triton_openai.api.responses import context_window
from triton_openai.config.tree import ModelDefaults, ModelSettings, ResponsesSettings, Settings, TritonSettings
from triton_openai.prompts import messages
from triton_openai.prompts.tokenizer import Tokenizer

LIMIT = 2048


@asynccontextmanager
async def service(
    limit: int | None, tokenizer: str | None, template: str = "chatml"
) -> AsyncIterator[tuple[Proxy, FakeTriton]]:
    """Run a service with a model that says a word."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": text} for text in ("a", "")]
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            defaults=ModelDefaults(chat_template=template),
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
    items = [system, *turn, developer, *turn, *turn]
    assert [4, 6] == context_window._cuts(items)
    assert [0, 3, 4, 5, 6, 7] == context_window._left(items, 4)
    assert [0, 3, 6, 7] == context_window._left(items, 6)
    items = [*turn, *turn, tool, assistant, tool, assistant, tool]
    assert [2, 5, 7] == context_window._cuts(items)
    assert [2, 7, 8] == context_window._left(items, 7)
    assert [] == list(context_window._cuts([user, tool])) == list(context_window._cuts([system, assistant]))


def first_turn(prompt: str) -> int:
    """Return the number of the first turn in *prompt*."""
    return int(prompt.partition("<|im_start|>user\n<")[2].partition(">")[0])


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the responses for which a prompt is made, one for each prompt."""
    made: list[str] = []
    prepared = chats.prepare_chat

    async def counted(context: Any, answer_id: str, **options: Any) -> PreparedChat:
        made.append(answer_id)
        return await prepared(context, answer_id, **options)

    monkeypatch.setattr(chats, "prepare_chat", counted)
    return made


async def test_the_oldest_turns_are_left_out(tmp_path: Path, prompts: list[str]) -> None:
    """However long a conversation is, most of the context is used, and few prompts are made."""
    folder = save(tmp_path)
    tokenizer = Tokenizer.load(folder)
    async with service(LIMIT, folder) as (proxy, triton):
        for turns in (26, 33, 132, 400):
            for instructions in (None, "Be brief. " * 40):
                items = conversation(turns)
                body = {"model": "m", "input": items, "instructions": instructions, "store": False}
                refused = await proxy.post("/v1/responses", body)
                assert (400, "context_length_exceeded") == (refused.status, refused.error["code"])
                prompts.clear()
                assert 200 == (await proxy.post("/v1/responses", {**body, "truncation": "auto"})).status
                prompt = triton.asked[-1][1]["text_input"]
                assert len(prompts) <= 3, prompts
                assert 0.9 * LIMIT < tokenizer.count(prompt) < LIMIT
                assert (instructions is None) == ("Be brief." not in prompt)
                first = first_turn(prompt)
                assert 0 < first < turns
                body["input"] = items[2 * first :]
                assert 200 == (await proxy.post("/v1/responses", body)).status
                assert prompt == triton.asked[-1][1]["text_input"]


# Templates whose part of a prompt the first estimate gets wrong, with the least part of the context that is used.
TEMPLATES = {
    "much once": ("x" * 1500 + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}", 0.7),
    "nearly all once": (
        "x" * 1900 + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}",
        0.9,
    ),
    "much around each": (
        "{% for m in messages %}{{ '-' * 200 }}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}",
        0.7,
    ),
    "a part of each": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:5] }}{% endfor %}", 0.0),
    "much once, and a part of each": (
        "x" * 1000 + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:5] }}{% endfor %}",
        0.0,
    ),
    "much of the first": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '-' * 500 * loop.first }}{% endfor %}",
        0.7,
    ),
}


@every_case("name, used", [(name, used) for name, (_, used) in TEMPLATES.items()])
async def test_estimates_that_are_wrong(name: str, used: float, prompts: list[str], tmp_path: Path) -> None:
    """Few prompts are made until one fits, and it uses much of the context."""
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES[name][0])
    folder = save(tmp_path / "tokenizer")
    tokenizer = Tokenizer.load(folder)
    async with service(LIMIT, folder, str(file)) as (proxy, triton):
        for turns in (132, 400):
            prompts.clear()
            body = {"model": "m", "input": conversation(turns), "truncation": "auto", "store": False}
            assert 200 == (await proxy.post("/v1/responses", body)).status
            prompt = triton.asked[-1][1]["text_input"]
            assert len(prompts) <= 5, prompts
            assert used * LIMIT <= tokenizer.count(prompt) < LIMIT


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
        triton.failure = "The decoder prompt (length 3745) is longer than the maximum model length of 1000."
        asked = {"model": "m", "input": conversation(40), "truncation": "auto"}
        for more in ({}, {"stream": True}, {"background": True, "stream": True}):
            triton.asked.clear()
            triton.failing = 1
            body = {**asked, **more}
            answer = await proxy.post("/v1/responses", body)
            assert 200 == answer.status
            assert b'"completed"' in answer.body
            whole, short = [len(sent["text_input"]) for _, sent in triton.asked]
            least, most = (900 / whole, 1000 / whole) if known else (0.2, 0.27)
            assert least < short / whole <= most
        # Once only.
        triton.failing = 2
        refused = await proxy.post("/v1/responses", asked)
        assert (400, "context_length_exceeded") == (refused.status, refused.error["code"])
