"""Tool calls and reasoning in chats, over the models that generate and both transports."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cases import every_case
from tests.conformance.calls import id_of, in_session_loop, inputs_of, steered
from tests.extended import sample
from tests.proxy_fixture import changed, proxy_settings, serving
from triton_openai import offload
from triton_openai.parsers.answer_parser import AnswerParser

pytestmark = in_session_loop
TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
MODELS = (
    "ensemble", "ensemble_nonstreaming", "tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_llmapi", "vllm_model",
)  # fmt: skip


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["http", "grpc"])
async def tooled(request, triton):
    """The service with a chat template that takes tools and shows how the model writes its calls."""
    settings = changed(proxy_settings(triton, request.param), defaults={"chat_template": str(TEMPLATE)})
    async with serving(settings, transport=request.param) as proxy:
        await proxy.ready()
        yield proxy


async def chat(proxy, model, text=None, **fields):
    """Ask *model*, which answers *text*."""
    content = "Hello" if text is None else steered(text=text)
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 300, **fields}
    return await proxy.post("/v1/chat/completions", body)


def merged(answer):
    """Return message and finish reason of the first choice, put together from a stream's chunks."""
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    finish = None
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message[key] or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert ["index", "id", "type", "function"] == list(call)
                    message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, finish


async def message_of(proxy, model, stream, text=None, **fields):
    """Return message and finish reason, streamed or not, with what is absent as ``None`` or empty."""
    answer = await chat(proxy, model, text, stream=stream, **fields)
    assert 200 == answer.status, answer.body
    if stream:
        return merged(answer)
    (choice,) = answer.json["choices"]
    message = choice["message"]
    keys: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    return {key: message.get(key, default) for key, default in keys.items()}, choice["finish_reason"]


@every_case("stream", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_a_call(tooled, model, stream):
    """Thinking, text and a call come apart, and the reason for the end is the call."""
    message, finish = await message_of(tooled, model, stream, f"<think>hm</think>Sure. {CALL}", tools=[WEATHER])
    (call,) = message["tool_calls"]

    assert "tool_calls" == finish
    assert ("Sure.", "hm") == (message["content"], message["reasoning_content"])
    assert ("function", "get_weather") == (call["type"], call["function"]["name"])
    assert {"city": "Bonn"} == json.loads(call["function"]["arguments"])
    assert call["id"].startswith("call_")


@every_case("stream", [False, True])
async def test_several_calls(tooled, stream):
    """Calls are numbered and have ids of their own; with one at a time the first is kept."""
    both, _ = await message_of(tooled, "vllm_model", stream, CALL + "\n" + CALL, tools=[WEATHER])
    single, _ = await message_of(
        tooled, "vllm_model", stream, CALL + "\n" + CALL, tools=[WEATHER], parallel_tool_calls=False
    )

    assert 2 == len({call["id"] for call in both["tool_calls"]})
    assert 1 == len(single["tool_calls"])


@every_case("stream", [False, True])
async def test_a_malformed_call_is_text(tooled, stream):
    """What is no call comes out as the model wrote it."""
    text = '<tool_call>\n{"nome": 5}\n</tool_call>'
    message, finish = await message_of(tooled, "vllm_model", stream, text, tools=[WEATHER])

    assert (text, [], "stop") == (message["content"], message["tool_calls"], finish)


@every_case("stream", [False, True])
async def test_a_call_cut_by_the_length(tooled, stream):
    """A call that the limit cut ends with length, so that the client sees it is not whole."""
    answer = await chat(tooled, "vllm_model", CALL, tools=[WEATHER], max_tokens=14, stream=stream)
    reasons = [
        choice["finish_reason"] for chunk in (answer.chunks if stream else [answer.json]) for choice in chunk["choices"]
    ]

    assert "length" == reasons[-1]


@every_case("stream", [False, True])
async def test_a_call_cut_by_a_stop_string(tooled, stream):
    """A stop string in the middle of a call leaves arguments that are no JSON: the end is a stop, and no call."""
    message, finish = await message_of(tooled, "vllm_model", stream, CALL, tools=[WEATHER], stop=["nn"])
    whole, behind = await message_of(tooled, "vllm_model", stream, CALL + " And so on", tools=[WEATHER], stop=[" so"])

    assert ("stop", '{"city": "Bo') == (finish, message["tool_calls"][0]["function"]["arguments"])
    assert ("tool_calls", '{"city": "Bonn"}') == (behind, whole["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("size", [10, 500])
async def test_a_long_answer_is_read_in_a_thread(tooled, monkeypatch, size):
    """Whole answers are parsed where they do not hold the event loop up."""
    threads: list[int] = []
    flush = AnswerParser.flush

    def recording(parser, **ended):
        threads.append(threading.get_ident())
        return flush(parser, **ended)

    monkeypatch.setattr(AnswerParser, "flush", recording)
    monkeypatch.setattr(offload, "CHARACTER", offload.INLINE / 250)
    text = "x" * size + CALL
    message, finish = await message_of(tooled, "vllm_model", False, text, tools=[WEATHER], max_tokens=1000)

    assert ("tool_calls", size) == (finish, len(message["content"]))
    assert (threads == [threading.get_ident()]) is (size < 250)


@every_case("choice", ["none", None])
async def test_without_tools_the_text_stays(tooled, choice):
    """With tool_choice none, or without tools, nothing is parsed and the template gets no tools."""
    fields = {"tools": [WEATHER], "tool_choice": choice} if choice else {}
    message, finish = await message_of(tooled, "vllm_model", False, CALL, **fields)

    assert (CALL, [], "stop") == (message["content"], message["tool_calls"], finish)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "vllm_model"])
async def test_a_required_call_is_enforced(tooled, triton, model):
    """The backend is held to a list of calls of the given tools, and the answer is read as such."""
    text = '[{"name": "get_weather", "parameters": {"city": "Bonn"}}]'
    answer = await chat(tooled, model, text, tools=[WEATHER, TIME], tool_choice="required")
    (choice,) = answer.json["choices"]
    engine = {"ensemble": "tensorrt_llm"}.get(model, model)
    inputs = await inputs_of(triton, engine, id_of(answer))
    if model != "vllm_model":
        schema = json.loads(inputs["guided_decoding_guide"]["value"][0])
    else:
        sampling = json.loads(inputs["sampling_parameters"]["value"][0])
        schema = json.loads(sampling["structured_outputs"])["json"]

    assert ["get_weather", "get_time"] == [
        variant["properties"]["name"]["enum"][0] for variant in schema["items"]["anyOf"]
    ]
    (call,) = choice["message"]["tool_calls"]
    assert (None, "tool_calls") == (choice["message"]["content"], choice["finish_reason"])
    assert {"city": "Bonn"} == json.loads(call["function"]["arguments"])


@every_case("stream", [False, True])
async def test_a_named_call_is_its_arguments(tooled, stream):
    """The backend is held to the tool's parameters; the end is a stop, as OpenAI has it."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    message, finish = await message_of(
        tooled, "vllm_model", stream, '{"city": "Bonn"}', tools=[WEATHER, TIME], tool_choice=named
    )
    (call,) = message["tool_calls"]

    assert ("stop", "get_weather", '{"city": "Bonn"}') == (
        finish,
        call["function"]["name"],
        call["function"]["arguments"],
    )


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm", "vllm_model"])
async def test_a_forced_call_wins_over_a_format(tooled, triton, model):
    """Agents with an output type send both: the model is held to the call, and without one to the format."""
    other = {"type": "object", "properties": {"mood": {"type": "string"}}}
    arguments, thread = '{"city": "Bonn"}', [{"role": "user", "content": steered(text='{"city": "Bonn"}')}]
    schema = {"type": "json_schema", "name": "mood", "schema": other}
    named = {"type": "function", "name": "get_weather"}
    function = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    response_format = {"type": "json_schema", "json_schema": {"name": "mood", "schema": other}}
    forced = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    called = await chat(tooled, model, arguments, **forced, response_format=response_format)
    auto = await chat(tooled, model, '{"mood": "good"}', tools=[WEATHER], response_format=response_format)
    responses = await tooled.post(
        "/v1/responses",
        {"model": model, "input": thread, "tools": [function], "tool_choice": named, "text": {"format": schema}},
    )
    any_tool = {"tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}}
    message = await tooled.post(
        "/v1/messages",
        {"model": model, "max_tokens": 300, "messages": thread, **any_tool, "output_config": {"format": schema}},
    )

    assert arguments == called.json["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == responses.json["output"][0]["arguments"]
    assert {"city": "Bonn"} == message.json["content"][0]["input"]
    asked = [(each, PARAMETERS) for each in (called, responses, message)]
    for answer, expected in [*asked, (auto, other)]:
        inputs = await inputs_of(triton, {"ensemble": "tensorrt_llm"}.get(model, model), id_of(answer))
        if model != "vllm_model":
            held = json.loads(inputs["guided_decoding_guide"]["value"][0])
        else:
            held = json.loads(json.loads(inputs["sampling_parameters"]["value"][0])["structured_outputs"])["json"]
        assert expected == held


async def test_the_older_form(tooled):
    """A client that speaks of functions gets its call in their form."""
    answer = await chat(tooled, "vllm_model", CALL, functions=[WEATHER["function"]])
    (choice,) = answer.json["choices"]

    assert "function_call" == choice["finish_reason"]
    assert {"name": "get_weather", "arguments": '{"city": "Bonn"}'} == choice["message"]["function_call"]
    assert "tool_calls" not in choice["message"]


@every_case(
    "fields, param",
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "guided_json": {}},
            "tool_choice",
        ),
    ],
)
async def test_wrong_tools_are_refused(tooled, fields, param):
    """Each mistake is refused by the name of its field."""
    answer = await chat(tooled, "vllm_model", **fields)

    assert (400, param) == (answer.status, answer.error["param"])


@pytest.mark.parametrize("model", ["ensemble_legacy", "tensorrt_llm_llmapi"])
async def test_forcing_needs_guided_decoding(tooled, model):
    """A model without guided decoding does not pretend to be held to a call."""
    answer = await chat(tooled, model, tools=[WEATHER], tool_choice="required")

    assert (400, "tool_choice") == (answer.status, answer.error["param"])


async def test_tools_need_a_template_that_takes_them(proxy):
    """Without such a template, or without a known format, tools are refused."""
    answer = await chat(proxy, "vllm_model", tools=[WEATHER])

    assert (400, "tools") == (answer.status, answer.error["param"])


async def test_reasoning_under_its_other_name(triton):
    """The operator chooses the name of the field, or both."""
    settings = changed(
        proxy_settings(triton, "http"),
        defaults={"chat_template": str(TEMPLATE)},
        api={"reasoning_field": "both"},
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        answer = await chat(proxy, "vllm_model", "<think>hm</think>yes")
        message = answer.json["choices"][0]["message"]

    assert ("yes", "hm", "hm") == (message["content"], message["reasoning"], message["reasoning_content"])


@every_case("stream", [False, True])
async def test_reasoning_left_out(tooled, stream):
    """A client that does not want the thinking gets the rest, and its count."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    said = "<think>one two three</think>yes"
    answer = await chat(tooled, "vllm_model", said, include_reasoning=False, stream=stream, **options)
    usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]
    texts = (
        [choice["delta"] for chunk in answer.chunks for choice in chunk["choices"]]
        if stream
        else [answer.json["choices"][0]["message"]]
    )

    assert "yes" == "".join(text.get("content") or "" for text in texts)
    assert not any(name.startswith("reasoning") for text in texts for name in text)
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert all(texts[:-1])


@every_case("stream", [False, True])
async def test_reasoning_is_counted(tooled, stream):
    """The tokens of the thinking are told, streamed or not, and are the same."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await chat(tooled, "vllm_model", "<think>one two three</think>yes", stream=stream, **options)
    usage = answer.chunks[-1]["usage"] if stream else answer.json["usage"]

    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


FORCED: dict[str, tuple[Any, str]] = {
    "required": (
        "required",
        '[{"name": "get_weather", "parameters": {"city": 1}}, {"name": "get_time", "parameters": {}}]',
    ),
    "named": ({"type": "function", "function": {"name": "get_weather"}}, '{"city": "Bonn"}'),
}


@pytest.mark.sampled
@every_case("mode", FORCED)
async def test_a_forced_answer_cut_at_every_token(tooled, mode):
    """
    A forced answer that is cut, in all APIs, has no text, calls that begin those of the whole, and word of the cut.
    """
    if tooled.transport != "http":
        pytest.skip("what is cut is read alike")
    choice, text = FORCED[mode]
    prompt = steered(text=text)
    answers: list[tuple[Any, bool]] = []
    for limit in sample(range(1, 200), few=50):
        answers.append(await everywhere(tooled, choice, prompt, limit))
        if not answers[-1][1]:
            break
    assert not answers[-1][1], "the answer is longer than all limits"
    *cut, (whole, _) = answers
    assert ["get_weather", "get_time"][: len(whole)] == [name for name, _ in whole]
    seen = 0
    for calls, _ in cut:
        assert seen <= len(calls) <= len(whole)
        seen = len(calls)
        assert calls[:-1] == whole[: len(calls)][:-1]
        for (name, arguments), (full_name, full) in zip(calls[-1:], whole[len(calls) - 1 :], strict=False):
            assert name == full_name
            assert full.startswith(arguments)


async def everywhere(proxy: Any, choice: Any, prompt: str, limit: int) -> tuple[list[tuple[str, str]], bool]:
    """Ask in all APIs, streamed or not; return the calls, alike in all of them, and whether they were cut."""
    found = []
    for stream in (False, True):
        message, finish = await message_of(
            proxy, "vllm_model", stream, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=limit,
            messages=[{"role": "user", "content": prompt}],
        )  # fmt: skip
        assert not message["content"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        found.append((calls, finish == "length"))
        found.append(await by_responses(proxy, choice, prompt, limit, stream))
        found.append(await by_messages(proxy, choice, prompt, limit, stream, calls))
    assert all(one == found[0] for one in found), found
    return found[0]


async def by_responses(proxy: Any, choice: Any, prompt: str, limit: int, stream: bool) -> tuple[Any, bool]:
    """Return calls, and whether the response is incomplete."""
    tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    chosen = choice if isinstance(choice, str) else {"type": "function", **choice["function"]}
    fields = {"tools": tools, "tool_choice": chosen, "max_output_tokens": limit, "stream": stream, "store": False}
    answer = await proxy.post("/v1/responses", {"model": "vllm_model", "input": prompt, **fields})
    response = json.loads(answer.body.rpartition(b"data: ")[2])["response"] if stream else answer.json
    items = response["output"]
    assert {"function_call"} >= {item["type"] for item in items}
    assert {"completed"} >= {item["status"] for item in items[:-1]}
    for item in items:
        if item["status"] == "completed":
            json.loads(item["arguments"])
    return [(item["name"], item["arguments"]) for item in items], response["status"] == "incomplete"


async def by_messages(
    proxy: Any, choice: Any, prompt: str, limit: int, stream: bool, calls: list[tuple[str, str]]
) -> tuple[Any, bool]:
    """Return *calls* if the message has those, and whether it ends at the limit."""
    functions: list[Any] = [tool["function"] for tool in (WEATHER, TIME)]
    tools = [
        {"name": function["name"], "input_schema": function.get("parameters", {"type": "object"})}
        for function in functions
    ]
    chosen = {"type": "any"} if isinstance(choice, str) else {"type": "tool", **choice["function"]}
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "vllm_model", "max_tokens": limit, "messages": messages, "tools": tools, "tool_choice": chosen}
    answer = await proxy.post("/v1/messages", {**body, "stream": stream})
    if not stream:
        message = answer.json
        assert [name for name, _ in calls] == [block["name"] for block in message["content"]]
        assert all(block["type"] == "tool_use" for block in message["content"])
        return calls, message["stop_reason"] == "max_tokens"
    names, texts, reason = [], [], None
    for block in answer.body.decode().split("\n\n")[:-1]:
        event = json.loads(block.partition("data: ")[2])
        if event["type"] == "content_block_start":
            assert "tool_use" == event["content_block"]["type"]
            names.append(event["content_block"]["name"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            texts[-1] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return list(zip(names, texts, strict=True)), reason == "max_tokens"
