"""
Requests that are wrong, in every way that could be thought of or generated.

Each is refused with OpenAI's envelope and a status below 500, and the service goes on as if nothing had been. It runs
as a process of its own: what it would print in distress is read in the end.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import every_case
from tests.clients.service import Reply, Service, serving
from tests.extended import examples
from tests.triton_fixture import TestTriton

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RERANK, SCORE = "/v1/rerank", "/v1/score"
POSTS = (CHAT, COMPLETIONS, EMBEDDINGS, RERANK, SCORE)
#: Every path, with the methods that it takes.
PATHS = {
    CHAT: "GET, HEAD, POST",
    COMPLETIONS: "POST",
    EMBEDDINGS: "POST",
    RERANK: "POST",
    SCORE: "POST",
    "/rerank": "POST",
    "/v2/rerank": "POST",
    "/score": "POST",
    "/chat/completions": "GET, HEAD, POST",
    "/completions": "POST",
    "/embeddings": "POST",
    "/v1/models": "GET, HEAD, POST",
    "/models": "GET, HEAD, POST",
    "/v1/models/ensemble": "GET, HEAD",
    "/models/ensemble": "GET, HEAD",
    "/health": "GET, HEAD",
    "/health/live": "GET, HEAD",
    "/health/ready": "GET, HEAD",
    "/v1/health": "GET, HEAD",
    "/health_check": "GET, HEAD",
}
MODELS = (
    "ensemble",
    "ensemble_legacy",
    "ensemble_nonstreaming",
    "tensorrt_llm_bls",
    "tensorrt_llm_bls_delta",
    "vllm_model",
)
#: Fields that clients send.
FIELDS = (
    *("model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_tokens", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop", "stream", "n"),
    *("stream_options", "user", "metadata", "store", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("functions", "function_call", "response_format", "echo", "suffix", "best_of", "encoding_format", "dimensions"),
    *("modalities", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "ignore_eos"),
    *("chat_template_kwargs", "guided_json", "stop_token_ids", "bad_words", "query", "documents", "top_n", "queries"),
    *("return_documents", "text_1", "text_2", "data_1", "items", "truncate_prompt_tokens", "use_activation"),
)
MEBIBYTE = 1024 * 1024
MESSAGES = [{"role": "user", "content": "Hello"}]
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"model": "ensemble", "messages": MESSAGES},
    COMPLETIONS: {"model": "ensemble", "prompt": "Hello"},
    EMBEDDINGS: {"model": "text_embedding", "input": "Hello"},
    RERANK: {"model": "text_rerank", "query": "Hello", "documents": ["a", "b"]},
    SCORE: {"model": "text_rerank", "text_1": "Hello", "text_2": ["a", "b"]},
}


def assert_serves(service: Service) -> None:
    """Assert that the service still does its work."""
    assert 200 == service.status("/health/ready")
    for path, body in VALID.items():
        assert 200 == service.post(path, body).status


@pytest.fixture(scope="module", params=["http", "grpc"])
def service(
    request: pytest.FixtureRequest, triton: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The service over each transport in turn."""
    url = triton.http_url if request.param == "http" else triton.grpc_url
    arguments = ("--triton-url", url, "--tokenizer", str(triton.tokenizer), "--default-max-tokens", "4")
    with serving(tmp_path_factory.mktemp("service"), *arguments) as running:
        yield running
        assert_serves(running)
        assert [] == running.complaints()


@pytest.fixture(scope="module")
def strict(triton: TestTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service with ``api.strict_parameters`` and a small limit of the body."""
    arguments = ("--triton-url", triton.http_url, "--max-body-size", "65536")
    settings = {"api": {"strict_parameters": True}}
    with serving(tmp_path_factory.mktemp("strict"), *arguments, settings=settings) as running:
        yield running
        assert [] == running.complaints()


def refused(reply: Reply, status: int = 400, code: str | None = None, param: str | None = None) -> str:
    """Assert that *reply* is a refusal of this kind, and return its message."""
    assert status == reply.status, reply.body
    assert "application/json" == reply.headers["Content-Type"]
    assert reply.headers["x-request-id"]
    error = reply.error
    assert "invalid_request_error" == error["type"]
    assert (code, param) == (error["code"], error["param"]), error
    assert "Traceback" not in error["message"]
    return str(error["message"])


# Bodies that are no JSON object


@every_case("path", POSTS)
@every_case(
    "body",
    [
        b"",
        b"   \n",
        b"{",
        b'{"model": "ensemble"',
        b"{'model': 'ensemble'}",
        b'{"model": "ensemble",}',
        b"not json",
        b"\xff\xfe\x00\x01",
        b'{"model": "\xff\xfe"}',
        b'\xef\xbb\xbf{"model": "ensemble"}',
        '{"model": "ensemble"}'.encode("utf-16"),
        b'{"model": "\x00"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00\\ud800"}',
        b'{"model": "ensemble", "temperature": NaN}',
        b'{"model": "ensemble", "temperature": -Infinity}',
        b'{"model": "ensemble", "temperature": 01}',
        b"[" * 40_000,
        b'{"model": "ensemble", "user": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"model": "ensemble", "user": ' + b'{"a":' * 40_000 + b"1" + b"}" * 40_000 + b"}",
    ],
)
def test_not_json(service: Service, path: str, body: bytes) -> None:
    """What is not JSON, or deeper than a parser can go, is said to be so."""
    assert "JSON" in refused(service.post(path, body), 400, "invalid_json")


@every_case("path", POSTS)
@every_case("body", [b"null", b"true", b"17", b'"text"', b"[]", b"[" * 50])
def test_not_an_object(service: Service, path: str, body: bytes) -> None:
    """JSON that is no object is not taken apart."""
    assert "expected an object" in refused(service.post(path, body), 400, "invalid_type")


def test_bytes_after_a_deep_value_that_nobody_reads(service: Service) -> None:
    """Depth in a field that is ignored does no harm, up to the limit; beyond it nothing is made of it."""
    for depth, status in ((99, 200), (100, 400), (500, 400)):
        body = b'{"model": "ensemble", "unheard_of": %b, "prompt": "Hello"}' % (b"[" * depth + b"]" * depth)
        assert status == service.post(COMPLETIONS, body).status


@every_case("path", POSTS)
def test_something_after_the_object(service: Service, path: str) -> None:
    """A good request with something behind it is no JSON text either."""
    refused(service.post(path, json.dumps(VALID[path]).encode() + b" {}"), 400, "invalid_json")


def test_duplicate_keys(service: Service) -> None:
    """The last of two equal keys counts, as in every JSON parser."""
    body = b'{"model": "nobody", "model": "ensemble", "prompt": "a", "prompt": "b", "max_tokens": 9, "max_tokens": 2}'

    assert 200 == service.post(COMPLETIONS, body).status


# Fields


@every_case(
    "path, fields, code, param",
    [
        (CHAT, {"model": ...}, "missing_required_parameter", "model"),
        (CHAT, {"messages": ...}, "missing_required_parameter", "messages"),
        (COMPLETIONS, {"prompt": ...}, "missing_required_parameter", "prompt"),
        (EMBEDDINGS, {"input": ...}, "missing_required_parameter", "input"),
        (EMBEDDINGS, {"model": ...}, "missing_required_parameter", "model"),
        # Types
        (CHAT, {"model": None}, "invalid_type", "model"),
        (CHAT, {"model": 1}, "invalid_type", "model"),
        (CHAT, {"model": ""}, "missing_required_parameter", "model"),
        (CHAT, {"messages": None}, "invalid_type", "messages"),
        (CHAT, {"messages": "Hello"}, "invalid_type", "messages"),
        (CHAT, {"messages": {}}, "invalid_type", "messages"),
        (CHAT, {"messages": [None]}, "invalid_type", "messages[0]"),
        (CHAT, {"messages": ["Hello"]}, "invalid_type", "messages[0]"),
        (CHAT, {"messages": [*MESSAGES, [[]]]}, "invalid_type", "messages[1]"),
        (CHAT, {"messages": [{}]}, "missing_required_parameter", "messages[0].role"),
        (CHAT, {"messages": [{"role": "king", "content": ""}]}, "invalid_value", "messages[0].role"),
        (CHAT, {"messages": [{"role": None, "content": ""}]}, "invalid_type", "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "invalid_type", "messages[0].content[0]"),
        (CHAT, {"max_tokens": "5"}, "invalid_type", "max_tokens"),
        (CHAT, {"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        (CHAT, {"max_tokens": True}, "invalid_type", "max_tokens"),
        (CHAT, {"temperature": "hot"}, "invalid_type", "temperature"),
        (CHAT, {"stream": "yes"}, "invalid_type", "stream"),
        (CHAT, {"stream": 1}, "invalid_type", "stream"),
        (CHAT, {"stop": 5}, "invalid_type", "stop"),
        (CHAT, {"stop": [None]}, "invalid_type", "stop[0]"),
        (CHAT, {"stream": True, "stream_options": []}, "invalid_type", "stream_options"),
        (CHAT, {"stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage"),
        (COMPLETIONS, {"prompt": None}, "missing_required_parameter", "prompt"),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": "AAAA"}, "unsupported_parameter", "prompt_embeds"),
        (COMPLETIONS, {"prompt": {}}, "invalid_type", "prompt"),
        (COMPLETIONS, {"prompt": [None]}, "invalid_type", "prompt[0]"),
        (EMBEDDINGS, {"input": None}, "invalid_type", "input"),
        (EMBEDDINGS, {"add_special_tokens": False}, "unsupported_parameter", "add_special_tokens"),
        (EMBEDDINGS, {"input": {"text": "a"}}, "invalid_type", "input"),
        (EMBEDDINGS, {"input": [None]}, "invalid_type", "input[0]"),
        (EMBEDDINGS, {"input": [True]}, "invalid_type", "input[0]"),
        (EMBEDDINGS, {"input": ["a", [1]]}, "invalid_type", "input"),
        # Ranges, as OpenAI documents them and as the model's inputs hold them
        (CHAT, {"max_tokens": 0}, "invalid_value", "max_tokens"),
        (CHAT, {"max_tokens": -(10**30)}, "invalid_value", "max_tokens"),
        (CHAT, {"max_tokens": 2**31}, "integer_above_max_value", "max_tokens"),
        (CHAT, {"max_tokens": 10**39}, "integer_above_max_value", "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
        (CHAT, {"temperature": 2.1}, "invalid_value", "temperature"),
        (CHAT, {"temperature": -0.1}, "invalid_value", "temperature"),
        (CHAT, {"top_p": 1.1}, "invalid_value", "top_p"),
        (CHAT, {"top_p": 10**39}, "invalid_value", "top_p"),
        (CHAT, {"top_k": -2}, "invalid_value", "top_k"),
        (CHAT, {"top_k": 2**40}, "integer_above_max_value", "top_k"),
        (CHAT, {"seed": 2**64}, "integer_above_max_value", "seed"),
        (CHAT, {"frequency_penalty": 2.5}, "invalid_value", "frequency_penalty"),
        (CHAT, {"presence_penalty": -2.5}, "invalid_value", "presence_penalty"),
        (CHAT, {"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
        (CHAT, {"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
        (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, "array_above_max_length", "stop"),
        (CHAT, {"stop": ""}, "invalid_value", "stop"),
        (CHAT, {"stop": ["a", ""]}, "invalid_value", "stop"),
        (CHAT, {"n": 0}, "invalid_value", "n"),
        (CHAT, {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 2049}, "array_above_max_length", "prompt"),
        (COMPLETIONS, {"logprobs": 21}, "invalid_value", "logprobs"),
        (EMBEDDINGS, {"input": ""}, "invalid_value", "input"),
        (EMBEDDINGS, {"input": []}, "invalid_value", "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "invalid_value", "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "array_above_max_length", "input"),
        (EMBEDDINGS, {"dimensions": 0}, "invalid_value", "dimensions"),
        (EMBEDDINGS, {"encoding_format": "hex"}, "invalid_value", "encoding_format"),
        # What the model cannot do
        (CHAT, {"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, "unsupported_parameter", "top_logprobs"),
        (CHAT, {"logit_bias": {"999999": 5}}, "invalid_value", "logit_bias"),
        (CHAT, {"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
        (CHAT, {"response_format": {"type": "poem"}}, "invalid_value", "response_format.type"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        (COMPLETIONS, {"suffix": "end"}, "unsupported_parameter", "suffix"),
        (COMPLETIONS, {"logprobs": 1}, "unsupported_parameter", "logprobs"),
        (COMPLETIONS, {"return_token_ids": True}, "unsupported_parameter", "return_token_ids"),
        (COMPLETIONS, {"return_token_ids": 5}, "invalid_type", "return_token_ids"),
        (COMPLETIONS, {"prompt_logprobs": -2}, "invalid_value", "prompt_logprobs"),
        (COMPLETIONS, {"stop_token_ids": [10**9]}, "invalid_value", "stop_token_ids[0]"),
        (COMPLETIONS, {"prompt": [1, -2]}, "invalid_value", "prompt"),
        (COMPLETIONS, {"prompt": [[1, 10**8]]}, "invalid_value", "prompt"),
        (EMBEDDINGS, {"input": [[1], []]}, "invalid_value", "input"),
        (EMBEDDINGS, {"dimensions": 3}, "unsupported_parameter", "dimensions"),
        (CHAT, {"model": "text_embedding"}, "invalid_request", "model"),
        (COMPLETIONS, {"model": "text_embedding"}, "invalid_request", "model"),
        (EMBEDDINGS, {"model": "ensemble"}, "invalid_request", "model"),
    ],
)  # fmt: skip
def test_fields(service: Service, path: str, fields: dict[str, Any], code: str, param: str) -> None:
    """What is wrong with a field is said with its name."""
    body = {name: value for name, value in {**VALID[path], **fields}.items() if value is not ...}

    refused(service.post(path, body), 400, code, param)


def test_empty_messages(service: Service) -> None:
    """A chat needs at least one message, and a user's message needs a content."""
    assert "at least one" in refused(
        service.post(CHAT, {"model": "ensemble", "messages": []}), 400, "invalid_request", "messages"
    )
    reply = service.post(CHAT, {"model": "ensemble", "messages": [{"role": "user", "content": None}]})
    assert 400 == reply.status
    assert str(reply.error["param"]).startswith("messages")


@every_case("model", MODELS)
def test_empty_texts(service: Service, model: str) -> None:
    """Empty texts are texts: whether they make sense is the model's affair."""
    for path, fields in ((CHAT, {"messages": [{"role": "user", "content": ""}]}), (COMPLETIONS, {"prompt": ""})):
        assert 200 == service.post(path, {"model": model, **fields}).status


@every_case("path", POSTS)
@every_case("model", ["nobody", "a/b", "../ensemble", "ensemble\r\nX: y", "é" * 300, "x" * 100_000, "\0"])
def test_unknown_models(service: Service, path: str, model: str) -> None:
    """A model that is not there is a 404 that names it, whatever its name looks like."""
    message = refused(service.post(path, {**VALID[path], "model": model}), 404, "model_not_found", "model")

    assert len(message.partition(" Available: ")[0]) < 300


@every_case("path", POSTS)
def test_null_everywhere(service: Service, path: str) -> None:
    """Every field but the required ones may be null, as some clients send them."""
    body = {**dict.fromkeys(FIELDS), **VALID[path]}

    assert 200 == service.post(path, body).status


@every_case("path", [CHAT, COMPLETIONS])
@every_case("model", MODELS)
def test_prompts_beyond_the_context(service: Service, path: str, model: str) -> None:
    """A prompt that the model has no room for is OpenAI's error for it, with the numbers, streamed or not."""
    text = "word " * 2500
    fields = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    for stream in (False, True):
        reply = service.post(path, {"model": model, **fields, "stream": stream})
        param = "messages" if path == CHAT else "prompt"
        assert "2048 tokens" in refused(reply, 400, "context_length_exceeded", param)


def test_inputs_beyond_the_context(service: Service) -> None:
    """Inputs to embed that exceed the context are refused, with the context's length."""
    body = {"model": "vllm_embedding", "input": ["short", "word " * 2500]}

    assert "2048 tokens" in refused(service.post(EMBEDDINGS, body), 400, "context_length_exceeded", "input")


# Sizes


@every_case("model", ["ensemble", "vllm_model"])
def test_three_megabytes(service: Service, model: str) -> None:
    """A text of three megabytes is within the limits, and refused because the model has no room for it."""
    # What the models' own tokenizer gets through fastest.
    text = "<|im_start|>" * (3 * MEBIBYTE // 12)
    reply = service.send("POST", COMPLETIONS, {"model": model, "prompt": text}, timeout=100)

    refused(reply, 400, "context_length_exceeded", "prompt")


def test_three_megabytes_of_nonsense(service: Service) -> None:
    """Three megabytes in a field that nobody reads do no harm, and so do three that are no JSON."""
    text = "y" * (3 * MEBIBYTE)

    assert 200 == service.post(COMPLETIONS, {**VALID[COMPLETIONS], "unheard_of": text}).status
    refused(service.post(COMPLETIONS, text.encode()), 400, "invalid_json")
    refused(service.post(COMPLETIONS, b"[" * (3 * MEBIBYTE)), 413, "request_too_large")


@every_case("path", POSTS)
def test_bodies_over_the_limit(strict: Service, path: str) -> None:
    """A body over the limit is a 413 with the number, whether its length is announced or not."""
    announced = strict.post(path, b"x" * 70_000)
    # Without a Content-Length it shows only while it is read.
    chunked = strict.send("POST", path, cast(Any, None), {"Content-Type": "application/json"})
    connection = strict.connect()
    try:
        connection.request(
            "POST", path, iter([b"x" * 30_000] * 3), {"Content-Type": "application/json"}, encode_chunked=True
        )
        response = connection.getresponse()
        streamed = Reply(response.status, dict(response.headers.items()), response.read())
    finally:
        connection.close()
    zipped = strict.post(path, gzip.compress(b"x" * 10 * MEBIBYTE), **{"Content-Encoding": "gzip"})

    refused(chunked, 400, "invalid_json")
    for reply in (announced, streamed, zipped):
        assert "65536" in refused(reply, 413, "request_too_large")


def test_compressed_bodies(service: Service) -> None:
    """A body in gzip works; one that only claims to be compressed is refused."""
    body = json.dumps(VALID[COMPLETIONS]).encode()

    assert 200 == service.post(COMPLETIONS, gzip.compress(body), **{"Content-Encoding": "gzip"}).status
    refused(service.post(COMPLETIONS, body, **{"Content-Encoding": "gzip"}), 400, "invalid_encoding")


# Paths, methods, headers


@every_case("path, allowed", PATHS.items())
@every_case("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_methods(service: Service, path: str, allowed: str, method: str) -> None:
    """A method that a path does not take is a 405 that lists those it does."""
    reply = service.send(method, path)
    if method in allowed.split(", "):
        assert 405 != reply.status
        return

    assert allowed == reply.headers["Allow"]
    if method == "HEAD":
        assert (405, b"") == (reply.status, reply.body)
    else:
        refused(reply, 405, "method_not_allowed")


@every_case(
    "path",
    ["/nothing", "/v1", "/v1/", "/v2/models", "/v1/chat", "/v1/models/", "//v1/models", "/v1/completions/", "/%00"],
)
@every_case("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_unknown_paths(service: Service, path: str, method: str) -> None:
    """A path that is not there is a 404 in the envelope."""
    refused(service.send(method, path), 404, "not_found")


@every_case("name", ["nobody", "a/b", "..", "../../etc/passwd", "%ff", "%00", "é", "x" * 5000])
def test_unknown_models_by_path(service: Service, name: str) -> None:
    """A model that is not there is the same error when it is asked for by its path."""
    refused(service.send("GET", f"/v1/models/{quote(name, safe='%/')}"), 404, "model_not_found", "model")


@every_case("path", POSTS)
@every_case(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "nonsense", "*/*"],
)
def test_wrong_content_types(service: Service, path: str, content_type: str) -> None:
    """A body of another kind is a 415 that names what is needed."""
    reply = service.post(path, VALID[path], **{"Content-Type": content_type})

    assert "application/json" in refused(reply, 415, "unsupported_media_type")


@every_case("path", POSTS)
@every_case("content_type", ["", "application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.acme+json"])
def test_good_content_types(service: Service, path: str, content_type: str) -> None:
    """JSON in any spelling is taken, and a body that does not say what it is as well."""
    assert 200 == service.post(path, VALID[path], **{"Content-Type": content_type}).status


def test_request_ids(service: Service) -> None:
    """A client's request id comes back if it can stand in a header and a log, else there is a fresh one."""
    assert (
        "mine-1.2:3_4"
        == service.send("GET", "/health", headers={"x-request-id": "mine-1.2:3_4"}).headers["x-request-id"]
    )
    for given_id in ("with space", "x" * 129, "caf\xe9", '"'):
        answered = service.send("GET", "/health", headers={"x-request-id": given_id}).headers["x-request-id"]
        assert 32 == len(answered)


@every_case(
    "request_bytes",
    [
        # The client says more than it sends, and leaves.
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 99\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{\"m",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le",
        b"GET /v1/mod",
        b"",
    ],
)  # fmt: skip
def test_half_a_request(service: Service, request_bytes: bytes) -> None:
    """A client that leaves in the middle of its request leaves nothing behind."""
    with socket.create_connection((service.host, service.port), timeout=120) as connection:
        connection.sendall(request_bytes)

    assert 200 == service.status("/health/ready")


def test_http_1_0(service: Service) -> None:
    """
    A client of HTTP/1.0 gets whole answers and streams that end with the connection, also if it asks to keep that open.

    So does one that names a version which is not spoken here.
    """
    slow = '<<steer {"text": "one two three", "delay_ms": 20}>>'
    kinds = ((False, "1.0", ""), (True, "1.0", ""), (True, "1.0", "keep-alive"), (True, "2.0", ""))
    for stream, version, keep in kinds:
        body = json.dumps({**VALID[COMPLETIONS], "prompt": slow, "stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/{version}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head += f"Connection: {keep}\r\n\r\n" if keep else "\r\n"
        with socket.create_connection((service.host, service.port), timeout=120) as connection:
            connection.sendall(head.encode() + body)
            answer = b"".join(iter(partial(connection.recv, 65536), b""))
        status, _, text = answer.partition(b"\r\n")
        assert b"HTTP/1.0 200 OK" == status, version
        assert b"chunked" not in text.lower()
        if stream:
            assert answer.endswith(b"data: [DONE]\n\n"), (version, keep)


# The strict mode


@every_case("path", POSTS)
def test_strict_parameters(strict: Service, service: Service, path: str) -> None:
    """Unknown fields are ignored, or refused by name where the operator wants it; documented ones are known."""
    body = {**VALID[path], "unheard_of": {"a": 1}}

    assert 200 == service.post(path, body).status
    refused(strict.post(path, body), 400, "unknown_parameter", "unheard_of")
    assert 200 == strict.post(path, {**VALID[path], "user": "somebody"}).status
    for name in ("", "x" * 10_000, "é\n"):
        assert 400 == strict.post(path, {**VALID[path], name: 1}).status


# Anything at all: see also what `make hostile` sends to every endpoint


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=60))
def test_any_model_name_in_the_path(service: Service, name: str) -> None:
    """Any name in a path is a model or an unknown one."""
    reply = service.send("GET", f"/v1/models/{quote(name, safe='')}")

    assert reply.status in (200, 404)
    if reply.status == 404:
        assert reply.error["code"] in ("model_not_found", "not_found")
