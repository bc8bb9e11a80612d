"""What history templates and suffixes make of a request, as the models get it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.cases import every_case
from tests.conformance.calls import MODELS, id_of, in_session_loop, inputs_of, prompt_input, steered
from tests.proxy_fixture import TRANSPORTS, Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.prompts.tokenizer import Tokenizer

pytestmark = [in_session_loop, pytest.mark.face]

HISTORY = "{% for item in items %}{{ item.identity }}: {{ item.content }}\n{% endfor %}ASSISTANT:"
FORM = "<PRE>{prefix}<SUF>{suffix}<MID>"
COMPLETIONS = "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def proxy(request: pytest.FixtureRequest, triton: TestTriton) -> AsyncIterator[Proxy]:
    """A service with a history template and a form for all models."""
    settings = changed(
        proxy_settings(triton, request.param), defaults={"history_template": HISTORY, "fim_template": FORM}
    )
    async with serving(settings, transport=request.param) as running:
        await running.ready()
        yield running


async def prompt_at(triton: TestTriton, model: str, request_id: str) -> str:
    """Return the text that *model* got, or the first model behind it."""
    name = {"ensemble_legacy": "preprocessing_legacy"}.get(model, model)
    name = "preprocessing" if model.startswith("ensemble") and name == model else name
    inputs = await inputs_of(triton, name, request_id)
    ids = None
    if "input_ids" in inputs:
        ids = inputs["input_ids"]["value"]
    elif "request" in inputs:
        # It puts a special token in front of every text, as vLLM does.
        ids = json.loads(inputs["request"]["value"][0])["ids"][1:]
    if ids is not None:
        tokenizer = Tokenizer.load(str(triton.tokenizer))
        return tokenizer.decode(ids, skip_special_tokens=False)
    return str(inputs[prompt_input(inputs)]["value"][0])


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_a_history_template(proxy: Proxy, triton: TestTriton, model: str, stream: bool) -> None:
    """The model gets what the template makes of the messages."""
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": steered("Hi", text="yes")}]},
    ]
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": stream}
    answer = await proxy.post("/v1/chat/completions", body)

    assert 200 == answer.status, answer.body
    expected = f"System: be kind\nUser: {steered('Hi', text='yes')}\nASSISTANT:"
    assert expected == await prompt_at(triton, model, id_of(answer))


async def test_what_a_history_template_refuses(proxy: Proxy) -> None:
    """What it has no place for is refused by name."""
    message = {"role": "user", "content": "Hi"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    for fields, param in (
        ({"tools": [tool]}, "tools"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": [message, {"role": "assistant", "tool_calls": [call]}]}, "messages[1].tool_calls"),
    ):
        answer = await proxy.post("/v1/chat/completions", {"model": "ensemble", "messages": [message], **fields})
        assert (400, "unsupported_parameter", param) == (answer.status, answer.error["code"], answer.error["param"])


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_a_suffix(proxy: Proxy, triton: TestTriton, model: str, stream: bool) -> None:
    """The model gets prompt and suffix in its form, and only what stands between them comes back."""
    prompt = steered("def f():", text="    pass")
    body = {"model": model, "prompt": prompt, "suffix": "\nf()\n", "stream": stream}
    answer = await proxy.post(COMPLETIONS, body)

    assert 200 == answer.status, answer.body
    assert f"<PRE>{prompt}<SUF>\nf()\n<MID>" == await prompt_at(triton, model, id_of(answer))
    if not stream:
        assert "    pass" == answer.json["choices"][0]["text"]


async def test_suffixes_with_several_prompts(proxy: Proxy) -> None:
    """Every prompt gets the suffix."""
    prompts = [steered("a", text="one"), steered("b", text="two")]
    answer = await proxy.post(COMPLETIONS, {"model": "ensemble", "prompt": prompts, "suffix": "x"})

    assert ["one", "two"] == [choice["text"] for choice in answer.json["choices"]]


@every_case(
    "fields, param", [({"echo": True}, "echo"), ({"prompt": [1, 2]}, "suffix"), ({"prompt": [[1], [2]]}, "suffix")]
)
async def test_what_does_not_go_with_a_suffix(proxy: Proxy, fields: dict[str, Any], param: str) -> None:
    """An echo, and token ids, are refused by name; an empty suffix is none."""
    body = {"model": "ensemble", "prompt": "a", "suffix": "x", **fields}
    answer = await proxy.post(COMPLETIONS, body)
    without = await proxy.post(COMPLETIONS, {**body, "suffix": ""})

    assert (400, "unsupported_parameter", param) == (answer.status, answer.error["code"], answer.error["param"])
    assert 200 == without.status, without.body


async def test_a_model_without_a_form(proxies: dict[str, Proxy]) -> None:
    """A model that nobody says it of does not fill in the middle, and the error names the flag."""
    answer = await proxies["http"].post(COMPLETIONS, {"model": "ensemble", "prompt": "a", "suffix": "x"})

    assert (400, "unsupported_parameter", "suffix") == (answer.status, answer.error["code"], answer.error["param"])
    assert "fim_template" in answer.error["message"]


async def test_a_form_that_cannot_be_followed(triton: TestTriton) -> None:
    """A form whose tokens the tokenizer lacks says which."""
    async with serving(changed(proxy_settings(triton, "http"), defaults={"fim_template": "codestral"})) as running:
        answer = await running.post(COMPLETIONS, {"model": "ensemble", "prompt": "a", "suffix": "x"})

    assert (501, "configuration_error") == (answer.status, answer.error["code"])
    assert "[SUFFIX]" in answer.error["message"]
