"""Clients of a backend that tells neither counts nor reasons (vLLM's before 24.12), without a tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import SecretStr

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.config.tree import ModelDefaults, Settings, TritonSettings

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
INPUTS = ("text_input BYTES 1", "sampling_parameters? BYTES 1", "stream? BOOL 1", "exclude_input_in_output? BOOL 1")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    """Return a Triton with such a model."""
    async with FakeTriton(config_of("m", INPUTS)) as made:
        yield made


@pytest.fixture
async def address(triton: FakeTriton) -> AsyncIterator[str]:
    """Return the address of a service in front of it."""
    settings = Settings(
        triton=TritonSettings(url=(triton.url,)),
        defaults=ModelDefaults(chat_template=str(TEMPLATE), tool_call_parser="hermes"),
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        yield str(proxy.client.make_url("/v1"))


@pytest.mark.parametrize(
    "answer, limit, reason",
    [
        (["one", " two", ""], 9, "stop"),
        (["one", " two"], 2, "length"),
        ([CALL[:30], CALL[30:], ""], 9, "tool_calls"),
        ([CALL[:30], CALL[30:50]], 2, "length"),
    ],
)
async def test_helpers_for_streams(
    triton: FakeTriton, address: str, answer: list[str], limit: int, reason: str
) -> None:
    """The helpers of the official client and LangChain's messages have a reason at the end of every stream."""
    triton.responses = [{"text_output": text} for text in answer]
    async with (
        AsyncOpenAI(base_url=address, api_key="none") as client,
        client.chat.completions.stream(
            model="m", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS, max_tokens=limit
        ) as stream,
    ):
        events = [event.type async for event in stream]
        whole = await stream.get_final_completion() if reason != "length" else None
    chat = ChatOpenAI(model="m", base_url=address, api_key=SecretStr("none"), max_completion_tokens=limit)
    pieces = [piece async for piece in chat.bind_tools(TOOLS).astream("Hi")]

    assert "chunk" in events
    if whole is not None:
        # The reason is one of those that the client's own type has.
        assert reason == type(whole).model_validate(whole.model_dump()).choices[0].finish_reason
    (told,) = [
        piece.response_metadata["finish_reason"] for piece in pieces if piece.response_metadata.get("finish_reason")
    ]
    assert reason == told
