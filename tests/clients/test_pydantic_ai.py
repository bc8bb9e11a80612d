"""Pydantic AI against the service as a process in front of a real Triton."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.service import Service, steered

if TYPE_CHECKING:
    import pydantic_ai.models.openai
    from pydantic_ai.models import Model
    from pydantic_ai.providers.openai import OpenAIProvider

WORDS = "one two three"


class City(BaseModel):
    """What is to be extracted."""

    name: str
    inhabitants: int | None = None


BONN = City(name="Bonn", inhabitants=330_000)
# A tool that has to be called is a list of calls under guided decoding.
MODES: dict[str, tuple[str, dict[str, Any], str]] = {
    "tools": ("ToolOutput", {"name": "city"}, f'[{{"name": "city", "parameters": {BONN.model_dump_json()}}}]'),
    "schema": ("NativeOutput", {}, BONN.model_dump_json()),
    "prompted": ("PromptedOutput", {}, BONN.model_dump_json()),
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import it where these tests run: each of pytest's processes collects this file, and it takes half a second."""
    globals()["pydantic_ai"] = importlib.import_module("pydantic_ai")
    for part in ("models", "providers"):
        importlib.import_module(f"pydantic_ai.{part}.openai")


@pytest.fixture
def provider(tooled: Service, async_connection: httpx2.AsyncClient) -> OpenAIProvider:
    """The server."""
    client = AsyncOpenAI(base_url=tooled.base_url, api_key="none", max_retries=0, http_client=async_connection)
    return pydantic_ai.providers.openai.OpenAIProvider(openai_client=client)


@pytest.fixture(
    params=[("OpenAIChatModel", "ensemble"), ("OpenAIChatModel", "vllm_model"), ("OpenAIResponsesModel", "vllm_model")],
    ids="-".join,
)
def model(request: pytest.FixtureRequest, provider: OpenAIProvider) -> Model:
    """A chat model over each API."""
    kind, name = request.param
    made: Model = getattr(pydantic_ai.models.openai, kind)(name, provider=provider)
    return made


async def test_text(model: Model) -> None:
    """A run gives the text and the usage."""
    result = await pydantic_ai.Agent(model).run(steered(text=WORDS))

    assert WORDS == result.output
    # vLLM counts the token that ends the answer too.
    assert result.usage.output_tokens in (3, 4)
    assert result.usage.input_tokens > 10


async def test_streamed_text(model: Model) -> None:
    """A stream comes in pieces, and its usage at the end."""
    async with pydantic_ai.Agent(model).run_stream(steered(text=WORDS)) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]

    assert WORDS == "".join(pieces)
    assert len(pieces) > 1
    assert run.usage.output_tokens in (3, 4)


@pytest.mark.parametrize("mode", MODES)
async def test_extraction(model: Model, mode: str) -> None:
    """The object comes by a tool call, under its schema, or because the prompt asks for it."""
    kind, options, answer = MODES[mode]
    output = getattr(pydantic_ai, kind)(City, **options)
    result = await pydantic_ai.Agent(model, output_type=output).run(steered(text=answer))

    assert BONN == result.output


@pytest.mark.parametrize("mode", MODES)
async def test_extraction_while_streaming(model: Model, mode: str) -> None:
    """Parts of the object are there before the whole, and the last one is the whole."""
    kind, options, answer = MODES[mode]
    output = getattr(pydantic_ai, kind)(City, **options)
    async with pydantic_ai.Agent(model, output_type=output).run_stream(steered(text=answer)) as run:
        parts = [part async for part in run.stream_output(debounce_by=None)]

    assert BONN == parts[-1]
    assert City(name="Bonn") in parts or len(parts) > 1
    assert run.usage.output_tokens > 3


async def test_a_tool_is_called_and_answered(model: Model) -> None:
    """A function is called with the model's arguments, and its result goes back to the model."""
    called: list[str] = []
    agent = pydantic_ai.Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather."""
        called.append(city)
        # It stands last in the next prompt, and tells the stand-in what to say.
        return steered(text="Take a coat.")

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    result = await agent.run(steered(text=call))

    assert (["Bonn"], "Take a coat.") == (called, result.output)
    assert 2 == result.usage.requests


async def test_what_cannot_be_done(provider: OpenAIProvider) -> None:
    """A model without guided decoding refuses a schema, and the client says so."""
    model = pydantic_ai.models.openai.OpenAIChatModel("ensemble_legacy", provider=provider)
    with pytest.raises(pydantic_ai.ModelHTTPError) as caught:
        await pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(City)).run("Hello")

    assert 400 == caught.value.status_code
    assert "response_format" in str(caught.value.body)
