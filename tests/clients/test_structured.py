"""The official client's own helpers for tools, structured output, log probabilities and several answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.clients.service import Service, steered

#: One of each adapter that can hold a model to a schema.
GUIDED = ("ensemble", "tensorrt_llm_bls", "vllm_model")
WORDS = "one two three"


class City(BaseModel):
    """What the answer has to be, and what the tool takes."""

    name: str
    inhabitants: int = 0


BONN = City(name="Bonn", inhabitants=330_000)
CALL = f'<tool_call>\n{{"name": "City", "arguments": {BONN.model_dump_json()}}}\n</tool_call>'


def user(text: str) -> list[Any]:
    """Return the messages of a chat that is answered *text*."""
    return [{"role": "user", "content": steered(text=text)}]


@pytest.fixture
def client(tooled: Service) -> Iterator[OpenAI]:
    """The client."""
    with OpenAI(base_url=tooled.base_url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(tooled: Service) -> AsyncIterator[AsyncOpenAI]:
    """The async client."""
    async with AsyncOpenAI(base_url=tooled.base_url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("model", GUIDED)
def test_parse(client: OpenAI, model: str) -> None:
    """A pydantic model goes out as a strict schema, and the answer comes back as that model."""
    answer = client.chat.completions.parse(model=model, messages=user(BONN.model_dump_json()), response_format=City)

    assert BONN == answer.choices[0].message.parsed
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 1


@pytest.mark.parametrize("model", GUIDED)
def test_parsed_while_streaming(client: OpenAI, model: str) -> None:
    """The stream helper has the object in parts on the way, and whole at the end."""
    with client.chat.completions.stream(
        model=model,
        messages=user(BONN.model_dump_json()),
        response_format=City,
        stream_options={"include_usage": True},
    ) as stream:
        partly: list[Any] = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    assert {"name": "Bonn"} in partly
    assert BONN == final.choices[0].message.parsed
    assert final.usage is not None


@pytest.mark.parametrize("model", GUIDED)
@pytest.mark.parametrize("stream", [False, True])
def test_function_tools(client: OpenAI, model: str, stream: bool) -> None:
    """Arguments of a tool made of a pydantic model come back as that model."""
    request: dict[str, Any] = {"model": model, "messages": user(CALL), "tools": [pydantic_function_tool(City)]}
    if stream:
        with client.chat.completions.stream(**request) as events:
            names = [event.name for event in events if event.type == "tool_calls.function.arguments.done"]
            answer = events.get_final_completion()
        assert ["City"] == names
    else:
        answer = client.chat.completions.parse(**request)
    (call,) = list(answer.choices[0].message.tool_calls or [])

    assert "tool_calls" == answer.choices[0].finish_reason
    assert BONN == call.function.parsed_arguments


def test_the_conversation_goes_on(client: OpenAI) -> None:
    """The client's own message objects and the tool's result are taken back."""
    messages = user(CALL)
    tools: list[Any] = [pydantic_function_tool(City)]
    first = client.chat.completions.create(model="vllm_model", messages=messages, tools=tools)
    message: Any = first.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains."}
    second = client.chat.completions.create(
        model="vllm_model", messages=[*messages, message, result, *user("Take a coat.")], tools=tools
    )

    assert ("Take a coat.", "stop") == (second.choices[0].message.content, second.choices[0].finish_reason)


@pytest.mark.parametrize("model", ["vllm_model", "tensorrt_llm"])
def test_log_probabilities(client: OpenAI, model: str) -> None:
    """Each token has its own, in whole answers and in the stream helper's events."""
    request: dict[str, Any] = {"model": model, "messages": user(WORDS), "logprobs": True}
    whole = client.chat.completions.create(**request).choices[0].logprobs
    with client.chat.completions.stream(**request) as stream:
        events = [event for event in stream if event.type == "logprobs.content.delta"]
        final = stream.get_final_completion().choices[0].logprobs
    assert whole is not None
    assert final is not None
    assert whole.content is not None

    assert WORDS == "".join(token.token for token in whole.content).removesuffix("<|im_end|>")
    assert whole.content == final.content
    assert whole.content == [token for event in events for token in event.content]
    assert all(token.logprob < 0 for token in whole.content)


@pytest.mark.parametrize("model", [*GUIDED, "tensorrt_llm", "tensorrt_llm_llmapi"])
def test_several_answers(client: OpenAI, model: str) -> None:
    """Choices of a whole answer and of a stream are those that were asked for, each from beginning to end."""
    whole = client.chat.completions.create(model=model, messages=user(WORDS), n=3)
    with client.chat.completions.stream(model=model, messages=user(WORDS), n=3) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()

    for answer in (whole, final):
        assert [0, 1, 2] == [choice.index for choice in answer.choices]
        assert [WORDS] * 3 == [choice.message.content for choice in answer.choices]
        assert ["stop"] * 3 == [choice.finish_reason for choice in answer.choices]


async def test_async(async_client: AsyncOpenAI) -> None:
    """The async client's helpers give the same."""
    parsed = await async_client.chat.completions.parse(
        model="vllm_model", messages=user(BONN.model_dump_json()), response_format=City
    )
    async with async_client.chat.completions.stream(
        model="vllm_model", messages=user(CALL), tools=[pydantic_function_tool(City)]
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (call,) = list(final.choices[0].message.tool_calls or [])

    assert BONN == parsed.choices[0].message.parsed
    assert BONN == call.function.parsed_arguments
    assert BONN.model_dump() == json.loads(call.function.arguments)
