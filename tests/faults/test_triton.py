"""A Triton that is down, dies, freezes, or comes back. Waiting is always for something to happen."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from pathlib import Path

import pytest

from tests.clients.service import steered, until
from tests.faults.surroundings import (
    COMPLETIONS,
    ENGINES,
    IMPATIENT,
    WORDS,
    Own,
    Stream,
    Watched,
    asking,
    assert_works,
    body,
    failure,
    watched,
)
from tests.triton_fixture import frozen
from triton_openai.tritonserver.embedded import EmbeddedTriton

# A Triton that is not there


def test_down_at_start(faulty_triton: Own, tmp_path: Path) -> None:
    """The service starts without a Triton, says what is missing, and serves as soon as there is one."""
    repository = faulty_triton.repository
    server = EmbeddedTriton(model_repository=repository.path, backends=repository.backends, environment=os.environ)
    with contextlib.ExitStack() as opened:
        services = []
        for transport, url in (("http", server.http_url), ("grpc", server.grpc_url)):
            folder = tmp_path / transport
            folder.mkdir()
            arguments = ["--triton-url", url]
            services.append(opened.enter_context(watched(folder, *arguments, "--tokenizer", str(repository.tokenizer))))
        for service in services:
            assert not service.banner["triton_answers"]
            assert 200 == service.status("/health/live")
            assert 503 == service.status("/health/ready")
            assert 503 == service.status("/health")
            assert [] == service.send("GET", "/v1/models").json["data"]
            for stream in (False, True):
                reply = service.post(COMPLETIONS, body("ensemble", "Hello", stream=stream))
                assert (503, "upstream_unavailable") == (reply.status, reply.error["code"])
                assert 1 <= int(reply.headers["Retry-After"]) <= 120

        opened.callback(server.stop, timeout=1.0)
        server.start()
        for service in services:
            assert_works(service)
            assert {"ensemble", "vllm_model", "text_embedding"} == {
                model["id"] for model in service.send("GET", "/v1/models").json["data"]
            }


def test_killed_at_work(own: Own, service: Watched) -> None:
    """
    Streams end with an error event, and a request that waits for its whole answer gets an error.

    The service is not ready, and is again when Triton is back.
    """
    with contextlib.ExitStack() as opened:
        streams = {}
        answers = []
        for model in ENGINES:
            endless = steered(text=WORDS, eos=False, delay_ms=50)
            streams[model] = opened.enter_context(Stream(service, model, endless, max_tokens=2000))
            assert streams[model].chunk()["choices"][0]["text"]
            mark = f"killed at once {model} {service.port}"
            waiting = body(model, steered(mark, text=WORDS, first_delay_ms=60_000))
            answers.append(opened.enter_context(asking(service, COMPLETIONS, waiting)))
            own.begun("preprocessing" if model == "ensemble" else model, mark)
        own.server.kill()
        ends = [stream.rest()[-1] for stream in streams.values()]
        replies = [answer.result(30) for answer in answers]

    # gRPC does not always tell a connection that broke from one that could not be made.
    for error in map(failure, ends):
        assert "server_error" == error["type"]
        assert error["code"] in ("upstream_disconnected", "upstream_unavailable")
    # Over a connection that was in use before it is tried once more, and then there is nobody to connect to.
    for reply in replies:
        assert (reply.status, reply.error["code"]) in ((502, "upstream_disconnected"), (503, "upstream_unavailable"))
    until(lambda: service.status("/health/ready") == 503)
    for model in ENGINES:
        refusal = service.post(COMPLETIONS, body(model, "Hello"))
        assert (503, "upstream_unavailable") == (refusal.status, refusal.error["code"])
        assert refusal.headers["Retry-After"]
    assert 200 == service.status("/health/live")

    own.server.start()
    assert_works(service)


def test_restarted_behind_idle_connections(own: Own, service: Watched) -> None:
    """A restart between two requests is not noticed by whoever sends the second."""
    assert_works(service)
    own.server.stop()
    own.server.start()
    assert_works(service)


# A Triton that freezes


def test_frozen_in_a_stream(own: Own, service: Watched) -> None:
    """A stream that falls silent is ended with an error event after the idle timeout; until then there are comments."""
    silence = {"x-idle-timeout": IMPATIENT["x-idle-timeout"]}
    with contextlib.ExitStack() as opened:
        streams = []
        for model in ENGINES:
            endless = steered(text=WORDS, eos=False, delay_ms=50)
            streams.append(opened.enter_context(Stream(service, model, endless, headers=silence, max_tokens=2000)))
        for stream in streams:
            stream.chunk()
        with frozen(own.server):
            told = [list(iter(stream.event, "")) for stream in streams]

    for events in told:
        assert ": keep-alive" in events
        assert "upstream_silent" == failure(events[-1])["code"]
    assert_works(service)


def test_frozen_before_the_answer(own: Own, service: Watched, module_service_transport: str) -> None:
    """
    Requests that a frozen Triton never answers end with a 504, or an error event once the stream is open.

    Over gRPC, where a connection is one when the server has greeted, further ones find that nobody can be reached.
    """
    with frozen(own.server):
        with (
            asking(service, COMPLETIONS, body("ensemble", "Hello"), IMPATIENT) as answer,
            asking(service, "/v1/embeddings", {"model": "text_embedding", "input": "a"}, IMPATIENT) as embedding,
            Stream(service, "vllm_model", "Hello", headers=IMPATIENT) as stream,
        ):
            events = stream.rest()
            whole, vector = answer.result(30), embedding.result(30)
        if module_service_transport == "grpc":
            late = service.post("/v1/embeddings", {"model": "text_embedding", "input": "a"})
            assert (503, "upstream_unavailable") == (late.status, late.error["code"])
        assert 200 == service.status("/health/live")

    assert (504, "upstream_timeout") == (whole.status, whole.error["code"])
    assert (504, "upstream_timeout") == (vector.status, vector.error["code"])
    assert ["upstream_silent"] == [failure(event)["code"] for event in events]
    assert_works(service)


def test_a_silent_model(service: Watched) -> None:
    """A model that falls silent in a Triton that is well is the same to a client."""
    silence = {"x-idle-timeout": IMPATIENT["x-idle-timeout"]}
    with Stream(service, "ensemble", steered(text=WORDS, hang_at=2), headers=silence) as stream:
        events = stream.rest()

    assert "upstream_silent" == failure(events[-1])["code"]
    assert "one two" == "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_an_answer_that_takes_too_long(service: Watched) -> None:
    """A request that does not stream has a limit of its own, however lively its tokens."""
    endless = body("vllm_model", steered(text=WORDS, eos=False, delay_ms=100), max_tokens=500)
    reply = service.post(COMPLETIONS, endless, **{"x-request-timeout": IMPATIENT["x-request-timeout"]})

    assert (504, "upstream_timeout") == (reply.status, reply.error["code"])


# A model that goes


@pytest.mark.parametrize("model", ENGINES)
def test_unloaded_in_a_stream(own: Own, service: Watched, model: str) -> None:
    """What runs is finished by Triton and told to its end; who comes then is refused until the model is back."""
    with Stream(service, model, steered(text=WORDS, delay_ms=200)) as stream:
        first = stream.chunk()
        repository(own, model, "unload")
        until(lambda: service.post(COMPLETIONS, body(model, "Hello")).status != 200)
        refusal = service.post(COMPLETIONS, body(model, "Hello"))
        *chunks, done = stream.rest()

    try:
        assert "[DONE]" == done
        text = "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
        assert WORDS == first["choices"][0]["text"] + text
        assert (refusal.status, refusal.error["code"]) in ((503, "upstream_unavailable"), (404, "model_not_found"))
    finally:
        repository(own, model, "load")
    until(lambda: service.post(COMPLETIONS, body(model, "Hello")).status == 200)
    assert_works(service)


def repository(own: Own, model: str, verb: str) -> None:
    """Have Triton itself load or unload *model*."""
    url = f"{own.server.http_url}/v2/repository/models/{model}/{verb}"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"), timeout=60) as response:
        assert 200 == response.status
