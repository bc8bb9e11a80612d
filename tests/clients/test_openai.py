"""The official client, sync and async, against the service as a process in front of a real Triton."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.conftest import SLASHED
from tests.clients.service import Service, steered
from tests.triton_fixture import TestTriton

GENERATING = (
    "ensemble",
    "ensemble_legacy",
    "ensemble_nonstreaming",
    "tensorrt_llm_bls",
    "tensorrt_llm_bls_delta",
    "vllm_model",
)
WORDS = "one two three four five"
PROMPT = steered(text=WORDS)


def user(content: str) -> list[ChatCompletionMessageParam]:
    """Return a chat of one message."""
    return [{"role": "user", "content": content}]


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    """The client as people make it: nothing is set but the address."""
    with OpenAI(base_url=service.base_url, api_key="none") as made:
        yield made


@pytest.fixture
async def async_client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    """The async client."""
    async with AsyncOpenAI(base_url=service.base_url, api_key="none") as made:
        yield made


@pytest.fixture
def tries() -> list[str]:
    """Every request that `counted` sends, so that a test can tell whether it tried again."""
    return []


@pytest.fixture
def counted(service: Service, tries: list[str]) -> Iterator[OpenAI]:
    """A client whose requests are counted, with its own rules for trying again."""
    connection = openai.DefaultHttpxClient(event_hooks={"request": [lambda request: tries.append(str(request.url))]})
    with OpenAI(base_url=service.base_url, api_key="none", http_client=connection) as made:
        yield made


@pytest.mark.parametrize("model", GENERATING)
def test_chat(client: OpenAI, model: str) -> None:
    """A chat is answered in full, with its usage and the reason for its end."""
    answer = client.chat.completions.create(model=model, messages=user(PROMPT))

    choice = answer.choices[0]
    assert ("chat.completion", model) == (answer.object, answer.model)
    assert ("assistant", WORDS, None) == (choice.message.role, choice.message.content, choice.message.refusal)
    assert "stop" == choice.finish_reason
    assert answer.usage is not None
    # vLLM counts the token that ends the answer too.
    assert (6 if model == "vllm_model" else 5) == answer.usage.completion_tokens
    assert answer.usage.prompt_tokens > 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id


@pytest.mark.parametrize("model", GENERATING)
def test_chat_stream(client: OpenAI, model: str) -> None:
    """A stream is the same answer in pieces: one id and time, the role first, then text, the reason, and the usage."""
    with client.chat.completions.create(
        model=model, messages=user(PROMPT), stream=True, stream_options={"include_usage": True}, max_tokens=4
    ) as stream:
        chunks = list(stream)

    *body, last, usage = chunks
    assert 1 == len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks})
    assert ("assistant", "") == (body[0].choices[0].delta.role, body[0].choices[0].delta.content)
    assert "one two three four" == "".join(chunk.choices[0].delta.content or "" for chunk in body)
    assert "length" == last.choices[0].finish_reason
    assert ([], 4) == (usage.choices, usage.usage.completion_tokens if usage.usage else None)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    if model != "ensemble_nonstreaming":
        assert len(body) > 2


def test_chat_stream_helper(client: OpenAI) -> None:
    """The helper that accumulates a stream ends with the same object that a plain call returns."""
    with client.chat.completions.stream(model="ensemble", messages=user(PROMPT)) as stream:
        events = list(stream)
        answer = stream.get_final_completion()

    assert (WORDS, "stop") == (answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert WORDS == "".join(event.delta for event in events if event.type == "content.delta")
    assert {"chunk", "content.delta", "content.done"} == {event.type for event in events}


def test_chat_with_what_agents_send(client: OpenAI) -> None:
    """Documented fields without influence on the answer, parts as content and several roles are all accepted."""
    answer = client.chat.completions.create(
        model="ensemble",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        ],
        max_completion_tokens=2,
        temperature=0.7,
        top_p=0.9,
        seed=7,
        stop=["none of this", "\n\n"],
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        user="somebody",
        metadata={"purpose": "test"},
        store=False,
        n=1,
        logprobs=False,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        service_tier="auto",
        extra_body={"top_k": 40, "min_tokens": 1, "repetition_penalty": 1.1, "unheard_of": True},
        extra_headers={"x-request-id": "my-own-id"},
    )

    assert ("one two", "length") == (answer.choices[0].message.content, answer.choices[0].finish_reason)
    assert "my-own-id" == answer._request_id


def test_stop(client: OpenAI) -> None:
    """A stop string ends the answer and is no part of it, whether or not it falls on the border of a token."""
    for stop in ("three", ["hree f"]):
        answer = client.chat.completions.create(model="ensemble", messages=user(PROMPT), stop=stop)
        assert "stop" == answer.choices[0].finish_reason
        assert WORDS.partition(stop if isinstance(stop, str) else stop[0])[0] == answer.choices[0].message.content


def test_completions(client: OpenAI) -> None:
    """Several prompts become as many choices, in the order of the prompts, and one usage."""
    prompts = [steered(text="a b c"), steered(text="d e f")]
    answer = client.completions.create(model="vllm_model", prompt=prompts, max_tokens=2)

    assert [(0, "a b", "length"), (1, "d e", "length")] == [
        (choice.index, choice.text, choice.finish_reason) for choice in answer.choices
    ]
    assert ("text_completion", 4) == (answer.object, answer.usage.completion_tokens if answer.usage else None)


def test_completions_stream(client: OpenAI) -> None:
    """A stream of several prompts carries the number of the choice in every chunk."""
    prompts = [steered(text="a b c"), steered(text="d e f")]
    texts, reasons = {0: "", 1: ""}, {}
    with client.completions.create(model="ensemble", prompt=prompts, stream=True) as stream:
        for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = str(choice.finish_reason)

    assert ({0: "a b c", 1: "d e f"}, {0: "stop", 1: "stop"}) == (texts, reasons)


@pytest.mark.parametrize("model", ["text_embedding", "vllm_embedding"])
def test_embeddings(client: OpenAI, model: str) -> None:
    """What the client asks for by default (base64) and plain numbers are the same vectors, in the inputs' order."""
    inputs = ["first", "second", "third"]
    default = client.embeddings.create(model=model, input=inputs)
    plain = client.embeddings.create(model=model, input=inputs, encoding_format="float")

    assert [0, 1, 2] == [item.index for item in default.data]
    assert [item.embedding for item in plain.data] == [item.embedding for item in default.data]
    assert 3 == len({tuple(item.embedding) for item in default.data})
    assert default.usage.prompt_tokens == default.usage.total_tokens > 0


def test_embeddings_as_text(service: Service, client: OpenAI) -> None:
    """Base64 is little-endian float32."""
    reply = service.post("/v1/embeddings", {"model": "text_embedding", "input": "hi", "encoding_format": "base64"})
    plain = client.embeddings.create(model="text_embedding", input="hi", encoding_format="float").data[0].embedding

    packed = base64.b64decode(reply.json["data"][0]["embedding"])
    assert pytest.approx(plain) == list(struct.unpack(f"<{len(packed) // 4}f", packed))


def test_models(triton: TestTriton, client: OpenAI) -> None:
    """Every served model is listed and can be fetched by its name, even one with a slash; helpers are not there."""
    listed = {model.id for model in client.models.list()}

    in_triton = {folder.name for folder in triton.repository.path.iterdir()}
    helpers = {f"{step}{suffix}" for step in ("preprocessing", "postprocessing") for suffix in ("", "_legacy")}
    engines = {"tensorrt_llm", "tensorrt_llm_legacy", "tensorrt_llm_nonstreaming"}
    undescribed = {"my_model"}
    assert in_triton - helpers - engines - undescribed | {SLASHED} == listed
    for name in ("vllm_model", SLASHED):
        model = client.models.retrieve(name)
        assert (name, "model", "triton") == (model.id, model.object, model.owned_by)
        assert 0 < model.created <= time.time()
    answer = client.chat.completions.create(model=SLASHED, messages=user(PROMPT))
    assert (SLASHED, WORDS) == (answer.model, answer.choices[0].message.content)


def test_what_clients_read_of_a_model(tooled: Service) -> None:
    """The context length has each name that clients look for, and the abilities have theirs."""
    model = tooled.send("GET", "/v1/models/tensorrt_llm_bls").json

    names = ("max_model_len", "context_length", "max_context_length", "max_output_tokens")
    assert [400] * 4 == [model[name] for name in names]
    assert {"input_modalities": ["text"], "output_modalities": ["text"]} == model["architecture"]
    assert ["tool_use", "reasoning"] == model["capabilities"]
    assert {"max_tokens", "temperature", "seed", "tools", "tool_choice"} <= set(model["supported_parameters"])
    assert "architecture" not in tooled.send("GET", "/v1/models/file_tts").json


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: OpenAI, stream: bool) -> None:
    """The client's types hold what there is, and its stream helpers put it together."""
    options: Any = {"model": "vllm_model", "messages": user(PROMPT), "logprobs": True, "top_logprobs": 2}
    if stream:
        with client.chat.completions.stream(**options) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**options).choices[0]

    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert WORDS == "".join(each.token for each in choice.logprobs.content).removesuffix("<|im_end|>")
    assert all(2 == len(each.top_logprobs) for each in choice.logprobs.content)


@pytest.mark.parametrize(
    "code, param, fields",
    [
        (
            "unsupported_parameter",
            "top_logprobs",
            {"model": "tensorrt_llm_bls", "logprobs": True, "top_logprobs": 2},
        ),
        ("unsupported_parameter", "tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("invalid_value", "temperature", {"temperature": 3}),
        ("invalid_type", "max_tokens", {"max_tokens": "many"}),
        ("context_length_exceeded", "messages", {"messages": user("word " * 3000)}),
        ("invalid_value", "messages[0].role", {"messages": [{"role": "nobody", "content": ""}]}),
        ("missing_required_parameter", "messages[0].role", {"messages": [{"content": ""}]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes(counted: OpenAI, tries: list[str], code: str, param: str, fields: Any, stream: bool) -> None:
    """A mistake is the exception that the client has for it, with code, param and request id; it is sent once."""
    request = {"model": "ensemble", "messages": user("Hello"), "stream": stream, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        cast(Any, counted.chat.completions.create)(**request)

    error = caught.value
    assert (code, param, "invalid_request_error") == (error.code, error.param, error.type)
    assert error.request_id
    assert 1 == len(tries)


def test_an_unknown_model(counted: OpenAI, tries: list[str]) -> None:
    """A model that nobody serves is the exception for what is not found."""
    with pytest.raises(openai.NotFoundError) as caught:
        counted.chat.completions.create(model="nobody", messages=user("Hello"))

    assert ("model_not_found", "model", 1) == (caught.value.code, caught.value.param, len(tries))


def test_an_unknown_endpoint(counted: OpenAI, tries: list[str]) -> None:
    """What is not served is a 404 with a code that says so."""
    with pytest.raises(openai.NotFoundError) as caught:
        counted.images.generate(prompt="hello")

    assert ("not_found", 1) == (caught.value.code, len(tries))


def test_a_failing_model_is_tried_again(counted: OpenAI, tries: list[str]) -> None:
    """A failure behind the service is a server error, which the client tries twice more."""
    with pytest.raises(openai.InternalServerError) as caught:
        counted.chat.completions.create(model="ensemble", messages=user(steered(fail_at=1)))

    assert (502, "upstream_error", 3) == (caught.value.status_code, caught.value.code, len(tries))


def test_an_error_in_a_stream(counted: OpenAI, tries: list[str]) -> None:
    """A failure after the first token is raised by the stream with its reason, once the text before it was read."""
    texts: list[str] = []
    stream = counted.chat.completions.create(
        model="vllm_model", messages=user(steered(text=WORDS, fail_at=2, error="out of luck", delay_ms=5)), stream=True
    )
    with pytest.raises(openai.APIError) as caught, stream:
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)

    assert not isinstance(caught.value, openai.APIStatusError)
    assert "out of luck" in caught.value.message
    assert "one two" == "".join(texts)
    assert 1 == len(tries)


def test_the_first_token_is_not_waited_for(counted: OpenAI, tries: list[str]) -> None:
    """A stream whose first token takes its time is waited for, and not asked for twice."""
    prompt = steered(text=WORDS, first_delay_ms=1500)
    with counted.chat.completions.create(
        model="vllm_model", messages=user(prompt), stream=True, timeout=openai.Timeout(120)
    ) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert (WORDS, 1) == (text, len(tries))


def test_a_client_that_waits_too_little(service: Service) -> None:
    """A client's own timeout is its own error, and the service goes on."""
    with OpenAI(base_url=service.base_url, api_key="none", max_retries=0, timeout=0.3) as impatient:
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(
                model="vllm_model", messages=user(steered(text=WORDS, first_delay_ms=60_000))
            )
        answer = impatient.with_options(timeout=120).chat.completions.create(model="vllm_model", messages=user(PROMPT))

    assert WORDS == answer.choices[0].message.content


async def test_async_chat(async_client: AsyncOpenAI) -> None:
    """The async client gets the same answers, whole and in pieces."""
    answer = await async_client.chat.completions.create(model="vllm_model", messages=user(PROMPT))
    assert WORDS == answer.choices[0].message.content

    async with async_client.chat.completions.stream(model="vllm_model", messages=user(PROMPT)) as stream:
        pieces = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert (WORDS, WORDS) == ("".join(pieces), final.choices[0].message.content)
    assert len(pieces) > 1


async def test_async_the_rest(async_client: AsyncOpenAI) -> None:
    """Completions, embeddings and models work there as well."""
    texts = ""
    async for chunk in await async_client.completions.create(model="ensemble", prompt=PROMPT, stream=True):
        texts += chunk.choices[0].text
    vectors = await async_client.embeddings.create(model="text_embedding", input=["a", "b"])
    names = [model.id async for model in async_client.models.list()]

    assert (WORDS, 2) == (texts, len(vectors.data))
    assert SLASHED in names
    assert SLASHED == (await async_client.models.retrieve(SLASHED)).id


async def test_async_errors(async_client: AsyncOpenAI) -> None:
    """Errors are the same exceptions there, before the stream and in it."""
    with pytest.raises(openai.NotFoundError):
        await async_client.chat.completions.create(model="nobody", messages=user("Hello"), stream=True)
    stream = await async_client.chat.completions.create(
        model="vllm_model", messages=user(steered(text=WORDS, fail_at=2, delay_ms=5)), stream=True
    )
    async with stream:
        with pytest.raises(openai.APIError, match="told to fail"):
            async for _ in stream:
                pass


def test_without_v1(service: Service) -> None:
    """A base URL without ``/v1`` works too."""
    with OpenAI(base_url=service.address, api_key="none") as client:
        answer = client.chat.completions.create(model="ensemble", messages=user(PROMPT))
        assert WORDS == answer.choices[0].message.content
        assert client.embeddings.create(model="text_embedding", input="a").data
        assert client.models.retrieve(SLASHED).id == SLASHED
