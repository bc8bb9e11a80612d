"""How long work on the backend lives: it ends when nobody wants it any more. Shown by the stand-ins' own record."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from tests.cases import every_case
from tests.conformance.calls import (
    ANSWERS_AT_ONCE,
    BLS,
    ENGINES,
    MODELS,
    PATHS,
    ask,
    end_of,
    id_of,
    in_session_loop,
    inner_id,
    inputs_of,
    new_limit,
    recorded,
    request,
    steered,
)
from tests.proxy_fixture import TRANSPORTS, proxy_settings, serving
from tests.reading import Reading
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.tensors import InferRequest, Tensor

pytestmark = in_session_loop

# Much longer than any test waits: work that is not stopped does not end by itself.
ENDLESS: dict[str, Any] = {"text": "word ", "repeat": 5000, "delay_ms": 20}
# How each backend says that it was told to end.
ENDED_AS = {model: "stopped" if model.startswith("ensemble") else "cancelled" for model in MODELS if model not in BLS}
# A limit that nobody else asks for marks the engine's request behind a BLS, whose id is its own.
_limits = itertools.count(3000)
# The same, of answers that come whole over HTTP too.
_short_limits = itertools.count(700)


async def first_event(response):
    """Return the first event with text in it."""
    async for line in response.content:
        if line.startswith(b"data: ") and (b'"content":"w' in line or b'"text":"w' in line):
            return json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended before any text")


@every_case("endpoint", PATHS)
@pytest.mark.parametrize("model", [model for model in ENDED_AS if model != "ensemble_nonstreaming"])
async def test_a_client_that_leaves_a_stream(proxy, triton, model, endpoint):
    """The backend stops as soon as the client is gone: an ensemble's engine by its stop request, vLLM by cancelling."""
    body = request(endpoint, model, steered(**ENDLESS), max_tokens=4000, stream=True)
    async with proxy.client.post(PATHS[endpoint], json=body) as response:
        event = await first_event(response)
        response.close()

    how, tokens = await end_of(triton, ENGINES[model], event["id"])
    assert ENDED_AS[model] == how
    assert tokens < 4000


@pytest.mark.parametrize("model", ENDED_AS)
async def test_a_client_that_leaves_before_the_answer(proxy, triton, model):
    """A client that waits for a whole answer and leaves stops the backend as well."""
    limit = new_limit(triton, _limits)
    asking = asyncio.create_task(
        proxy.post(PATHS["completions"], request("completions", model, steered(**ENDLESS), max_tokens=limit))
    )
    request_id = await inner_id(triton, limit, ENGINES[model])
    asking.cancel()

    how, tokens = await end_of(triton, ENGINES[model], request_id)
    assert ENDED_AS[model] == how
    assert tokens < 4000
    if model == "vllm_model":
        # Whole it could not be cancelled over HTTP.
        streamed = bool((await inputs_of(triton, model, request_id))["stream"]["value"][0])
        assert (proxy.transport == "http") == streamed


async def test_a_client_that_leaves_a_short_whole_answer(proxy, triton):
    """vLLM's answer is asked for whole. Over gRPC it ends with its client; over HTTP Triton does not pass that on."""
    if proxy.transport == "grpc":
        # It takes more than a minute, and so does not end before it is stopped.
        prompt = steered(text="word ", repeat=900, delay_ms=100)
    else:
        prompt = steered(text="word ", repeat=900, first_delay_ms=300)
    limit = new_limit(triton, _short_limits)
    asking = asyncio.create_task(proxy.post(PATHS["chat"], request("chat", "vllm_model", prompt, max_tokens=limit)))
    request_id = await inner_id(triton, limit, "vllm_model")
    asking.cancel()

    assert not (await inputs_of(triton, "vllm_model", request_id))["stream"]["value"][0]
    how, tokens = await end_of(triton, "vllm_model", request_id)
    if proxy.transport == "grpc":
        assert "cancelled" == how
        assert tokens < limit
    else:
        assert ("finished", limit) == (how, tokens)


async def test_a_limit_between_two_tokens_of_a_whole_answer(proxy, triton):
    """A client may limit the silence of an answer that it wants whole: the backend is asked for a stream then."""
    body = request("chat", "vllm_model", steered(text="one", hang_at=1), max_tokens=9)
    answer = await proxy.post(PATHS["chat"], body, **{"x-idle-timeout": "0.2"})

    assert 504 == answer.status
    assert "upstream_silent" == answer.error["code"]


@pytest.mark.parametrize("model", BLS)
async def test_a_bls_model_works_on(proxy, triton, model):
    """Nothing can stop a BLS model: its engine's request runs to its end after the client has gone."""
    for stream in (True, False):
        limit = new_limit(triton, _limits)
        body = request("chat", model, steered(text="w ", repeat=15, delay_ms=10), max_tokens=limit, stream=stream)
        if stream:
            async with proxy.client.post(PATHS["chat"], json=body) as response:
                await first_event(response)
                response.close()
            request_id = await inner_id(triton, limit)
        else:
            asking = asyncio.create_task(proxy.post(PATHS["chat"], body))
            request_id = await inner_id(triton, limit)
            asking.cancel()

        how, _ = await end_of(triton, "tensorrt_llm", request_id)
        assert "finished" == how


@every_case("streamed", [False, True])
@pytest.mark.parametrize("model", [model for model in ENDED_AS if model != "ensemble_nonstreaming"])
async def test_a_stop_string_stops_the_backend(proxy, triton, model, streamed):
    """As soon as a stop string has come the work ends, although the engine itself would not have seen it."""
    if model in ANSWERS_AT_ONCE and not streamed:
        # The string is found in the whole answer.
        answer = await ask(proxy, "chat", model, steered(text="one two three", eos=False), max_tokens=40, stop="o thr")
        assert "one tw" == answer.json["choices"][0]["message"]["content"]
        assert ("finished", 40) == await end_of(triton, ENGINES[model], id_of(answer))
        return
    prompt = steered(text="one two three", eos=False, delay_ms=10)
    answer = await ask(proxy, "chat", model, prompt, max_tokens=4000, stop="o thr", stream=streamed)

    assert 200 == answer.status
    how, tokens = await end_of(triton, ENGINES[model], id_of(answer))
    # vLLM matches stop strings itself, and has finished.
    assert ("finished" if model == "vllm_model" else ENDED_AS[model]) == how
    assert tokens < 4000


async def test_several_prompts_stop_together(proxy, triton):
    """A client that leaves stops every prompt's work, not only that of the one it was reading."""
    body = {"model": "ensemble", "prompt": [steered(**ENDLESS)] * 3, "max_tokens": 4000, "stream": True}
    async with proxy.client.post(PATHS["completions"], json=body) as response:
        event = await first_event(response)
        ids = [f"{event['id']}-{number}" for number in range(3)]
        for each in ids:
            await recorded(triton, id=each, model="tensorrt_llm", event="request")
        response.close()

    assert ["stopped"] * 3 == [(await end_of(triton, "tensorrt_llm", each))[0] for each in ids]


async def test_one_failed_prompt_stops_the_others(proxy, triton):
    """When one prompt fails, the others are not left running for nobody."""
    mark = uuid.uuid4().hex
    prompts = [steered(mark, **ENDLESS), steered(text="one", fail_at=0, first_delay_ms=500, error="out of luck")]
    answer = await proxy.post(PATHS["completions"], {"model": "ensemble", "prompt": prompts, "max_tokens": 4000})

    assert 502 == answer.status
    request_id = await preprocessed(triton, mark)
    assert "stopped" == (await end_of(triton, "tensorrt_llm", request_id))[0]


async def preprocessed(triton, mark: str) -> str:
    """Wait until an ensemble has begun on the prompt with *mark*, and return the request's id."""

    def ids(events) -> list[str]:
        return [event["id"] for event in events if mark in event["inputs"]["QUERY"]["value"][0]]

    events = await recorded(triton, lambda found: bool(ids(found)), model="preprocessing", event="request")
    return ids(events)[0]


async def release(triton, limit: int) -> None:
    """Let go of a silent engine behind a BLS model, which nobody else can reach, so that the instance serves again."""
    client = Endpoint([triton.grpc_url])
    values = {"input_ids": 0, "input_lengths": 0, "request_output_len": 0}
    inputs = [Tensor(name, "INT32", (1, 1), (value,)) for name, value in values.items()]
    order = InferRequest(
        model="tensorrt_llm",
        id=await inner_id(triton, limit),
        inputs=(*inputs, Tensor("stop", "BOOL", (1, 1), (True,))),
        stream=True,
    )
    stream = Reading(client, order)
    while await stream.read():
        pass
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def impatient(request, triton):
    """The service over each transport in turn, which does not wait for long when a stream has begun."""
    settings = proxy_settings(triton, request.param, idle_timeout=0.3)
    async with serving(settings, transport=request.param) as proxy:
        yield proxy


@pytest.mark.parametrize("model", [model for model in MODELS if model != "ensemble_nonstreaming"])
async def test_a_backend_that_falls_silent(impatient, triton, model):
    """A stream that gets no further token is ended with an error event after the configured silence."""
    limit = new_limit(triton, _limits)
    prompt = steered(text="w w w", hang_at=2)
    answer = await ask(impatient, "chat", model, prompt, max_tokens=limit, stream=True)
    if model in BLS:
        await release(triton, limit)
    elif model != "vllm_model":
        chunk = json.loads(answer.events[0])
        assert ENDED_AS[model] == (await end_of(triton, ENGINES[model], chunk["id"]))[0]

    assert 200 == answer.status
    *chunks, last = answer.events
    # What comes together may be one chunk.
    assert '"content":"w' in "".join(chunks)
    error = json.loads(last)["error"]
    assert ("upstream_silent", "server_error") == (error["code"], error["type"])
    assert "The model sent no further token for 0.3 seconds." == error["message"]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def hasty(request, triton):
    """
    The service over each transport in turn, which does not wait for long for a first token; and one that does not wait
    for long for a whole answer either.
    """
    settings = partial(proxy_settings, triton, request.param, first_token_timeout=0.3)
    async with serving(settings()) as for_first, serving(settings(request_timeout=0.5)) as for_all:
        yield {False: for_first, True: for_all}


@every_case("streamed", [False, True])
@pytest.mark.parametrize("model", [model for model in ENDED_AS if model != "ensemble_legacy"])
async def test_a_backend_that_never_begins(hasty, model, streamed):
    """
    Without a first token in time the answer is a 504, streamed or not, and the work is stopped. An answer that comes at
    once has no first token: the time for the whole holds.
    """
    returns_whole = model in (*ANSWERS_AT_ONCE, "vllm_model") and not streamed
    prompt = steered(text="w w w", hang_at=0)
    answer = await ask(hasty[returns_whole], "completions", model, prompt, max_tokens=9, stream=streamed)

    assert (504, "upstream_timeout" if returns_whole else "upstream_silent") == (answer.status, answer.error["code"])
    if not returns_whole:
        assert answer.error["message"].startswith("The model sent no answer for 0.3 seconds.")


async def test_a_bls_error_after_the_first_token_ends_by_the_silence(triton):
    """Such an error reaches nobody (the real model loses it): it is the idle timeout that ends the stream."""
    settings = proxy_settings(triton, "http", idle_timeout=0.5)
    async with serving(settings) as proxy:
        prompt = steered(text="one two three", fail_at=1, delay_ms=5)
        answer = await ask(proxy, "chat", "tensorrt_llm_bls", prompt, max_tokens=9, stream=True)

    assert "upstream_silent" == json.loads(answer.events[-1])["error"]["code"]


async def test_a_whole_answer_has_a_time_limit(triton, clock):
    """A request that does not stream is given up after the configured time, and its work is stopped."""
    mark = uuid.uuid4().hex
    settings = proxy_settings(triton, "http", request_timeout=60)
    async with serving(settings) as proxy:
        asking = asyncio.create_task(ask(proxy, "completions", "ensemble", steered(mark, **ENDLESS), max_tokens=4000))
        request_id = await preprocessed(triton, mark)
        await recorded(triton, id=request_id, model="tensorrt_llm", event="request")
        clock.advance(60)
        clock.run()
        answer = await asking
        how, _ = await end_of(triton, "tensorrt_llm", request_id)

    assert (504, "upstream_timeout") == (answer.status, answer.error["code"])
    assert "stopped" == how
