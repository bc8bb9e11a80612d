"""Tools, reasoning and structured output through the official client and LangChain."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageCustomToolCall
from pydantic import SecretStr

from tests.clients.service import Service, steered
from tests.clients.weather import CALL, SCHEMA, City, get_weather

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Tell the weather.", "parameters": SCHEMA},
    }
]


@pytest.fixture
def chat(tooled: Service, connection: httpx2.Client) -> ChatOpenAI:
    """LangChain's chat model."""
    return ChatOpenAI(
        model="vllm_model",
        base_url=tooled.base_url,
        api_key=SecretStr("none"),
        max_retries=0,
        http_client=connection,
    )


def user(text: str) -> list[Any]:
    """Return the messages of a chat that is answered *text*."""
    return [{"role": "user", "content": steered(text=text)}]


@pytest.mark.parametrize("model", ["vllm_model", "ensemble"])
def test_a_call(client: OpenAI, model: str) -> None:
    """A call is parsed, and the text before it stays."""
    answer = client.chat.completions.create(model=model, messages=user("Sure. " + CALL), tools=TOOLS)
    (choice,) = answer.choices
    calls: list[Any] = list(choice.message.tool_calls or ())
    (call,) = calls

    assert ("tool_calls", "Sure.") == (choice.finish_reason, choice.message.content)
    assert call.type == "function"
    assert ("get_weather", {"city": "Bonn"}) == (call.function.name, json.loads(call.function.arguments))


@pytest.mark.parametrize("model", ["vllm_model", "ensemble"])
def test_a_streamed_call(client: OpenAI, model: str) -> None:
    """The client's own helper puts the pieces together."""
    with client.chat.completions.stream(model=model, messages=user(CALL), tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    calls: list[Any] = list(choice.message.tool_calls or ())
    (call,) = calls

    assert "tool_calls.function.arguments.delta" in kinds
    assert ("tool_calls", "get_weather") == (choice.finish_reason, call.function.name)
    assert {"city": "Bonn"} == json.loads(call.function.arguments)


def test_custom_tools(client: OpenAI) -> None:
    """Calls of custom tools are text, whole and streamed, and go back to the model with what they gave."""
    code = 'print("é")\nprint(2)'
    arguments = json.dumps({"input": code})
    written = f'Running.<tool_call>{{"name": "run", "arguments": {arguments}}}</tool_call>'
    tools: Any = [{"type": "custom", "custom": {"name": "run", "description": "Runs Python."}}, *TOOLS]
    messages: Any = [{"role": "user", "content": steered(text=written)}]
    whole = client.chat.completions.create(model="vllm_model", messages=messages, tools=tools, max_tokens=200)
    call = (whole.choices[0].message.tool_calls or [])[0]
    assert ("tool_calls", "custom") == (whole.choices[0].finish_reason, call.type)
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert ("run", code) == (call.custom.name, call.custom.input)

    deltas: list[Any] = []
    for chunk in client.chat.completions.create(
        model="vllm_model", messages=messages, tools=tools, max_tokens=200, stream=True
    ):
        deltas += [delta.model_dump(exclude_unset=True) for delta in chunk.choices[0].delta.tool_calls or ()]
    assert ["custom"] == [delta["type"] for delta in deltas if "id" in delta]
    assert "run" == "".join(delta["custom"].get("name", "") for delta in deltas)
    assert code == "".join(delta["custom"]["input"] for delta in deltas)

    answered: Any = [
        *messages,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "é\n2"},
        {"role": "user", "content": steered(text="Done.")},
    ]
    again = client.chat.completions.create(model="vllm_model", messages=answered, tools=tools, max_tokens=200)
    assert "Done." == again.choices[0].message.content


def test_a_parsed_answer(client: OpenAI) -> None:
    """The client sends its model's schema, and reads the answer as that model."""
    answer = client.chat.completions.parse(model="vllm_model", messages=user('{"name": "Bonn"}'), response_format=City)

    assert City(name="Bonn") == answer.choices[0].message.parsed


def test_bound_tools(chat: ChatOpenAI) -> None:
    """LangChain's bound tools are called, streamed or not."""
    bound = chat.bind_tools([get_weather])
    answer: Any = bound.invoke(steered(text=CALL))
    pieces: list[Any] = list(bound.stream(steered(text=CALL)))
    total: Any = pieces[0]
    for piece in pieces[1:]:
        total = total + piece

    expected = [("get_weather", {"city": "Bonn"})]
    assert expected == [(call["name"], call["args"]) for call in answer.tool_calls]
    assert expected == [(call["name"], call["args"]) for call in total.tool_calls]


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    """LangChain's structured output is held to the schema, or to JSON."""
    structured = chat.with_structured_output(City, method=method)

    assert City(name="Bonn") == structured.invoke(steered(text='{"name": "Bonn"}'))


def test_structured_output_by_a_call(chat: ChatOpenAI) -> None:
    """The method with a forced call works too."""
    structured = chat.with_structured_output(City, method="function_calling")

    assert City(name="Bonn") == structured.invoke(steered(text='{"name": "Bonn"}'))


async def test_async(tooled: Service, async_connection: httpx2.AsyncClient) -> None:
    """LangChain's async methods give the same: calls whole and streamed, and objects."""
    chat = ChatOpenAI(
        model="vllm_model", base_url=tooled.base_url, api_key=SecretStr("none"), http_async_client=async_connection
    )
    bound = chat.bind_tools([get_weather])
    answer = await bound.ainvoke(steered(text=CALL))
    pieces: list[Any] = [piece async for piece in bound.astream(steered(text=CALL))]
    city = await chat.with_structured_output(City).ainvoke(steered(text='{"name": "Bonn"}'))
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece

    assert [("get_weather", {"city": "Bonn"})] * 2 == [
        (call["name"], call["args"]) for call in (*answer.tool_calls, *total.tool_calls)
    ]
    assert City(name="Bonn") == city


# LangChain's own: it dumps the official client's parsed chunk.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_structured_output_while_streaming(chat: ChatOpenAI) -> None:
    """Parts of the object come before the whole, and with the raw message there is its usage."""
    parts = list(chat.with_structured_output(City, method="json_schema").stream(steered(text='{"name": "Bonn"}')))
    whole: Any = chat.with_structured_output(City, include_raw=True).invoke(steered(text='{"name": "Bonn"}'))

    assert City(name="Bonn") == parts[-1]
    assert (City(name="Bonn"), None) == (whole["parsed"], whole["parsing_error"])
    assert whole["raw"].usage_metadata["output_tokens"] > 1


def test_a_tool_answered(chat: ChatOpenAI) -> None:
    """The result of a call goes back in LangChain's own messages."""
    bound = chat.bind_tools([get_weather], tool_choice="auto", parallel_tool_calls=False)
    asked = HumanMessage(steered(text=CALL))
    call: Any = bound.invoke([asked])
    result = ToolMessage("rain", tool_call_id=call.tool_calls[0]["id"])
    answer = bound.invoke([asked, call, result, HumanMessage(steered(text="Take a coat."))])

    assert ("Take a coat.", []) == (answer.content, getattr(answer, "tool_calls", None))


def test_log_probabilities_and_several_answers(chat: ChatOpenAI) -> None:
    """Log probabilities, and several answers, stand where LangChain has them."""
    answer = chat.bind(logprobs=True, top_logprobs=1).invoke(steered(text="one two"))
    several = ChatOpenAI(model=chat.model_name, base_url=chat.openai_api_base, api_key=SecretStr("none"), n=3).generate(
        [[HumanMessage(steered(text="one two"))]]
    )

    tokens = answer.response_metadata["logprobs"]["content"]
    assert "one two" == "".join(token["token"] for token in tokens).removesuffix("<|im_end|>")
    assert ["one two"] * 3 == [generation.text for generation in several.generations[0]]


def test_reasoning(client: OpenAI) -> None:
    """The client passes on the field that it does not know."""
    answer = client.chat.completions.create(model="vllm_model", messages=user("<think>hm</think>yes"))
    message = answer.choices[0].message

    assert ("yes", "hm") == (message.content, getattr(message, "reasoning_content", None))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stored_call(client: OpenAI, stream: bool) -> None:
    """What is kept of a chat is what the client got, with the ids of its calls; it is found, described and deleted."""
    before = [each.id for each in client.chat.completions.list()]
    options: Any = {"model": "vllm_model", "messages": user("Sure. " + CALL), "tools": TOOLS, "store": True,
                    "metadata": {"topic": "weather"}, "logprobs": True, "top_logprobs": 1}  # fmt: skip
    if stream:
        with client.chat.completions.stream(**options) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**options)
    kept: Any = client.chat.completions.retrieve(answer.id)
    (choice,), (got,) = kept.choices, answer.choices
    assert got.message.tool_calls[0].id == choice.message.tool_calls[0].id
    assert (got.finish_reason, got.message.content) == (choice.finish_reason, choice.message.content)
    assert got.logprobs.content == choice.logprobs.content
    assert "get_weather" == choice.message.tool_calls[0].function.name
    assert {"city": "Bonn"} == json.loads(choice.message.tool_calls[0].function.arguments)
    assert kept.usage.completion_tokens > 0
    found = [each.id for each in client.chat.completions.list(metadata={"topic": "weather"}, model="vllm_model")]
    assert answer.id in found
    assert {*found} == {each.id for each in client.chat.completions.list(limit=1)} - {*before}
    (message,) = client.chat.completions.messages.list(answer.id)
    assert options["messages"][0]["content"] == message.content
    changed = client.chat.completions.update(answer.id, metadata={"topic": "none"})
    assert {"topic": "none"} == getattr(changed, "metadata", None)
    assert client.chat.completions.delete(answer.id).deleted
    with pytest.raises(NotFoundError):
        client.chat.completions.retrieve(answer.id)
