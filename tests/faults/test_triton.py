"""A Triton that is down, dies, freezes, or comes back. Waiting is always for something to happen."""

from __future__ import annotations

import contextlib
import itertools
import json
import urllib.request
from pathlib import Path

import pytest

from tests.clients.service import Service, serving, steered, until
from tests.faults.surroundings import (
    COMPLETIONS,
    ENGINES,
    IMPATIENT,
    TRANSPORTS,
    WORDS,
    Own,
    Stream,
    Watched,
    asking,
    assert_works,
    body,
    failure,
)
from tests.triton_fixture import frozen

# A Triton that is not there


def test_killed_at_work(own: Own, both: dict[str, Watched]) -> None:
    """
    Streams end with an error event, and a request that waits for its whole answer gets an error.

    The service is not ready, and is again when Triton is back.
    """
    with contextlib.ExitStack() as opened:
        streams = []
        answers = []
        for service, model in itertools.product(both.values(), ENGINES):
            endless = steered(text=WORDS, eos=False, delay_ms=50)
            streams.append(opened.enter_context(Stream(service, model, endless, max_tokens=2000)))
            assert streams[-1].chunk()["choices"][0]["text"]
            mark = f"killed at once {model} {service.port}"
            waiting = body(model, steered(mark, text=WORDS, first_delay_ms=60_000))
            answers.append(opened.enter_context(asking(service, COMPLETIONS, waiting)))
            own.begun("preprocessing" if model == "ensemble" else model, mark)
        own.server.kill()
        ends = [stream.rest()[-1] for stream in streams]
        replies = [answer.result(120) for answer in answers]

    # gRPC does not always tell a connection that broke from one that could not be made.
    for error in map(failure, ends):
        assert "server_error" == error["type"]
        assert error["code"] in ("upstream_disconnected", "upstream_unavailable")
    # Over a connection that was in use before it is tried once more, and then there is nobody to connect to.
    for reply in replies:
        assert (reply.status, reply.error["code"]) in ((502, "upstream_disconnected"), (503, "upstream_unavailable"))
    for service in both.values():
        until(lambda: service.status("/health/ready") == 503)  # noqa: B023
        for model in ENGINES:
            refusal = service.post(COMPLETIONS, body(model, "Hello"))
            assert (503, "upstream_unavailable") == (refusal.status, refusal.error["code"])
            assert refusal.headers["Retry-After"]
        assert 200 == service.status("/health/live")

    own.server.start()
    for service in both.values():
        assert_works(service)


def test_restarted(own: Own, both: dict[str, Watched], tmp_path: Path) -> None:
    """
    A restart between two requests is not noticed by whoever sends the second.

    A service that starts meanwhile, without a Triton, says what is missing, and serves as soon as there is one.
    """
    for service in both.values():
        assert_works(service)
    own.server.stop(timeout=0.1)
    with contextlib.ExitStack() as opened:
        started: list[Service] = []
        for transport in TRANSPORTS:
            folder = tmp_path / transport
            folder.mkdir()
            arguments = ("--triton-url", own.url(transport), "--tokenizer", str(own.repository.tokenizer))
            settings = {"triton": {"refresh_interval": 0.2}}
            started.append(opened.enter_context(serving(folder, *arguments, settings=settings)))
        for new in started:
            assert not new.banner["triton_answers"]
            assert 200 == new.status("/health/live")
            assert 503 == new.status("/health/ready")
            assert 503 == new.status("/health")
            assert [] == new.send("GET", "/v1/models").json["data"]
            for stream in (False, True):
                reply = new.post(COMPLETIONS, body("ensemble", "Hello", stream=stream))
                assert (503, "upstream_unavailable") == (reply.status, reply.error["code"])
                assert 1 <= int(reply.headers["Retry-After"]) <= 120

        own.server.start()
        for each in (*both.values(), *started):
            assert_works(each)
            models = each.send("GET", "/v1/models").json["data"]
            assert {"ensemble", "vllm_model", "text_embedding"} == {model["id"] for model in models}


# A Triton that freezes


def test_frozen_in_a_stream(own: Own, both: dict[str, Watched]) -> None:
    """A stream that falls silent is ended with an error event after the idle timeout; until then there are comments."""
    # On a busy machine, two seconds may pass before it is frozen.
    silence = {"x-idle-timeout": "5"}
    with contextlib.ExitStack() as opened:
        streams = []
        for service, model in itertools.product(both.values(), ENGINES):
            endless = steered(text=WORDS, eos=False, delay_ms=50)
            streams.append(opened.enter_context(Stream(service, model, endless, headers=silence, max_tokens=2000)))
        for stream in streams:
            stream.chunk()
        with frozen(own.server):
            told = [list(iter(stream.event, "")) for stream in streams]

    for events in told:
        assert ": keep-alive" in events
        assert "upstream_silent" == failure(events[-1])["code"]
    for service in both.values():
        assert_works(service)


def test_frozen_before_the_answer(own: Own, both: dict[str, Watched]) -> None:
    """
    Requests that a frozen Triton never answers end with a 504, or an error event once the stream is open.

    Over gRPC, where a connection is one when the server has greeted, further ones find that nobody can be reached.
    """
    vector = {"model": "text_embedding", "input": "a"}
    with frozen(own.server), contextlib.ExitStack() as opened:
        answers, streams = [], []
        for service in both.values():
            answers.append(opened.enter_context(asking(service, COMPLETIONS, body("ensemble", "Hello"), IMPATIENT)))
            answers.append(opened.enter_context(asking(service, "/v1/embeddings", vector, IMPATIENT)))
            streams.append(opened.enter_context(Stream(service, "vllm_model", "Hello", headers=IMPATIENT)))
        events = [stream.rest() for stream in streams]
        replies = [answer.result(120) for answer in answers]
        late = both["grpc"].post("/v1/embeddings", vector)
        alive = [service.status("/health/live") for service in both.values()]

    assert (503, "upstream_unavailable") == (late.status, late.error["code"])
    assert [200, 200] == alive
    assert [(504, "upstream_timeout")] * 4 == [(reply.status, reply.error["code"]) for reply in replies]
    assert [["upstream_silent"]] * 2 == [[failure(event)["code"] for event in each] for each in events]
    for service in both.values():
        assert_works(service)


def test_a_silent_model(both: dict[str, Watched]) -> None:
    """A model that falls silent in a Triton that is well is the same to a client."""
    # On a busy machine, two seconds may pass between its two words.
    silence = {"x-idle-timeout": "5"}
    prompt = steered(text=WORDS, hang_at=2)
    with contextlib.ExitStack() as opened:
        streams = [
            opened.enter_context(Stream(service, "ensemble", prompt, headers=silence)) for service in both.values()
        ]
        told = [stream.rest() for stream in streams]

    for events in told:
        assert "upstream_silent" == failure(events[-1])["code"]
        assert "one two" == "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_an_answer_that_takes_too_long(both: dict[str, Watched]) -> None:
    """A request that does not stream has a limit of its own, however lively its tokens."""
    endless = body("vllm_model", steered(text=WORDS, eos=False, delay_ms=100), max_tokens=500)
    limit = {"x-request-timeout": IMPATIENT["x-request-timeout"]}
    with contextlib.ExitStack() as opened:
        answers = [opened.enter_context(asking(service, COMPLETIONS, endless, limit)) for service in both.values()]
        replies = [answer.result(120) for answer in answers]

    assert [(504, "upstream_timeout")] * 2 == [(reply.status, reply.error["code"]) for reply in replies]


# A model that goes


@pytest.mark.parametrize("model", ENGINES)
def test_unloaded_in_a_stream(own: Own, both: dict[str, Watched], model: str) -> None:
    """What runs is finished by Triton and told to its end; who comes then is refused until the model is back."""
    with contextlib.ExitStack() as opened:
        prompt = steered(text=WORDS, delay_ms=200)
        streams = [opened.enter_context(Stream(service, model, prompt)) for service in both.values()]
        firsts = [stream.chunk() for stream in streams]
        repository(own, model, "unload")
        for service in both.values():
            until(lambda: service.post(COMPLETIONS, body(model, "Hello")).status != 200)  # noqa: B023
        refusals = [service.post(COMPLETIONS, body(model, "Hello")) for service in both.values()]
        told = [stream.rest() for stream in streams]

    try:
        for first, (*chunks, done) in zip(firsts, told, strict=True):
            assert "[DONE]" == done
            text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
            assert WORDS == first["choices"][0]["text"] + text
        for reply in refusals:
            assert (reply.status, reply.error["code"]) in ((503, "upstream_unavailable"), (404, "model_not_found"))
    finally:
        repository(own, model, "load")
    for service in both.values():
        until(lambda: service.post(COMPLETIONS, body(model, "Hello")).status == 200)  # noqa: B023
        assert_works(service)


def repository(own: Own, model: str, verb: str) -> None:
    """Have Triton itself load or unload *model*."""
    url = f"{own.server.http_url}/v2/repository/models/{model}/{verb}"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"), timeout=120) as response:
        assert 200 == response.status
