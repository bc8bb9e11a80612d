"""Who is let in, asked over real sockets in every way that leads to a handler, and with OpenAI's own client."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog
from msgspec.structs import replace

from tests.clients.service import serving as running
from tests.clients.service import until
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.extended import sample
from tests.proxy_fixture import Proxy, serving
from tests.triton_fixture import TestTriton
from tests.unit.prompts.test_template_support import save
from triton_openai.access.authorizer import AUTHORIZER
from triton_openai.access.keys import ROUTE_GROUPS
from triton_openai.access.rate_limits import RateLimit
from triton_openai.app import create_app
from triton_openai.cli import main
from triton_openai.config.tree import (
    AccessSettings,
    GatewaySettings,
    LimitSettings,
    ModelDefaults,
    ModelSettings,
    RestrictedApi,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.errors import InvalidRequest
from triton_openai.triton.client import Receiver, ResponseStream
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.tensors import InferRequest

KEYS = """
keys:
  - {name: all, key: sk-all}
  - {name: one model, key: sk-one, models: [m, "acme/*"]}
  - {name: few, key: sk-few, requests_per_minute: 2, tokens_per_minute: 1000}
  - {name: thousand, key: sk-thousand, tokens_per_minute: 1000}
  - {name: tokens, key: sk-tokens, tokens_per_minute: 5}
  - {name: alone, key: sk-alone, concurrent_requests: 1}
"""
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a", "max_tokens": 5}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "Post")


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A file of keys."""
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    return file


@pytest.fixture
def managing(tmp_path: Path) -> Path:
    """A file of keys of which one may not manage models."""
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: user, key: sk-user, manage: false}, {name: admin, key: sk-admin}]")
    return file


@asynccontextmanager
async def service(access: AccessSettings, *, control: Any = "none", **parts: Any) -> AsyncIterator[Proxy]:
    """Run the service before a Triton with the models ``m`` and ``other``, which answer with two tokens that count."""
    outputs = ("text_output BYTES -1", "num_input_tokens UINT32 1", "num_output_tokens UINT32 1")
    inputs = (
        *("text_input BYTES 1", "sampling_parameters? BYTES 1", "stream? BOOL 1"),
        *("return_num_input_tokens? BOOL 1", "return_num_output_tokens? BOOL 1", "exclude_input_in_output? BOOL 1"),
    )
    async with FakeTriton(config_of("m", inputs, outputs), config_of("other", inputs, outputs)) as triton:
        triton.responses = [
            {"text_output": text, "num_input_tokens": 4, "num_output_tokens": 1} for text in ("one", " two")
        ]
        connection = TritonSettings(url=(triton.url,), model_control_mode=control)
        settings = Settings(triton=connection, access=access, **parts)
        async with serving(settings) as proxy:
            await proxy.ready()
            yield proxy


async def raw(proxy: Proxy, method: str, target: str, *headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send one request exactly as it is written, and return status, headers and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.client.port)
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", "Content-Length: 2", *headers]
    lines.append("Content-Type: application/json")
    writer.write("\r\n".join([*lines, "", "{}"]).encode())
    answer = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, v in (f.split(": ", 1) for f in fields)}, body


def is_refused(status: int, body: bytes) -> bool:
    """Say whether no handler has seen a request: not let in, not there, or not even HTTP (which is plain text here)."""
    return status in (401, 404, 405) or (status == 400 and not body.startswith(b"{"))


def paths() -> dict[str, tuple[str, set[str]]]:
    """Return every path that is served, with its group and methods; several groups of a path would be a mistake."""
    app = create_app(Settings(server=ServerSettings(page=False)))
    found: dict[str, tuple[str, set[str]]] = {}
    for route, group in app[ROUTE_GROUPS].items():
        assert route.resource is not None
        of, methods = found.setdefault(route.resource.canonical.replace("{model}", "m"), (group, set()))
        assert of == group
        methods.add(route.method)
    return found


def tricks(path: str) -> Iterator[str]:
    """Yield *path* in spellings that some server or other takes for it."""
    yield path
    yield f"/{path}"
    yield f"{path}/"
    yield f"{path}//"
    yield path.replace("/", "//")
    yield path.replace("/", "/./")
    yield f"/x/..{path}"
    yield f"/%2e%2e{path}"
    yield f"/health/live/..{path}"
    yield f"/health/live/%2e%2e/%2e%2e{path}"
    yield "/" + path[1:].replace("/", "%2f")
    yield "/" + path[1:].replace("/", "%2F")
    yield "/" + path[1:].replace("/", "%5c")
    yield path.upper()
    yield path.title()
    yield f"/%{ord(path[1]):02x}{path[2:]}"
    yield f"{path[:-1]}%{ord(path[-1]):02X}"
    yield f"{path}?x=/health/live"
    yield f"{path}#/health/live"
    yield f"{path};x=1"
    yield f"{path}%00"
    yield f"{path}%20"
    yield "/" + path[1:].replace("/", "%252f")
    yield f"/%252e%252e{path}"
    yield "/" + path[1:].replace("/", "%c0%af")
    yield path.replace("/", "/;a=b/")
    yield path.replace("/", "/%2e/")
    yield path.replace("/", "\\")
    yield f"{path}/."
    yield f"{path}/x/.."
    yield f"{path}%3f"
    yield f"{path}%0d%0aapi-key:%20sk-all"
    yield f"//health/live@x{path}"
    yield f"HTTPS://X{path}"
    yield f"http://x//{path[1:]}/"
    yield f"http://x{path}"
    yield f"http://x/health/live/..{path}"


@cache
def spelled() -> frozenset[str]:
    """Return a path of each handler, with the prefixes that it has by turns: in `/v1`, in none, and as Azure has it."""
    app = create_app(Settings(server=ServerSettings(page=False)))
    found: dict[Any, list[str]] = {}
    for route in app[ROUTE_GROUPS]:
        assert route.resource is not None
        found.setdefault(route.handler, []).append(route.resource.canonical.replace("{model}", "m"))
    chosen = [paths[number % len(paths)] for number, paths in enumerate(found.values())]
    # What refuses a request is the same for all handlers.
    return frozenset(sample(chosen, few=15))


def tried(path: str, methods: set[str]) -> Iterator[tuple[str, str]]:
    """Yield *path* with every method, and its spellings with those that it has if it stands for its handler."""
    yield from ((path, method) for method in METHODS)
    if path in spelled():
        yield from itertools.product(tricks(path), sorted(methods - {"HEAD"}))


@pytest.fixture
def _few_lines() -> None:
    """Log no line for each request: the lines of thousands take as long as all the rest."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


@pytest.mark.sampled
@pytest.mark.usefixtures("_few_lines")
async def test_no_way_around_a_key(keys_file: Path) -> None:
    """Without a key nothing but health is answered, whatever the path looks like, and by whatever method."""
    async with service(AccessSettings(api_keys_file=keys_file)) as proxy:
        for path, (group, methods) in paths().items():
            for target, method in tried(path, methods):
                status, headers, body = await raw(proxy, method, target)
                if group == "health" and status == 200:
                    assert b"status" in body or method == "HEAD"
                    continue
                assert is_refused(status, body), (method, target, status)
                assert group == "health" or status in (400, 401)
                if status == 401:
                    assert "Bearer" == headers["www-authenticate"]
                    if method != "HEAD":
                        # Anthropic's form has no codes.
                        error = json.loads(body)["error"]
                        assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
                assert b'"data"' not in body


GROUPS = ("inference", "embedding", "model-repository", "metrics", "health", "info")


@pytest.mark.sampled
@pytest.mark.parametrize("closed", [set(GROUPS) - {"health"}, {"health"}], ids=["all but health", "health"])
@pytest.mark.usefixtures("_few_lines")
async def test_no_way_around_a_restriction(closed: set[Any]) -> None:
    """A restricted group is closed in every spelling, also in those that begin or end with what is open."""
    restricted = RestrictedApi(apis=tuple(closed), header="admin-key", value="secret")
    async with service(AccessSettings(openai_restricted_api=(restricted,))) as proxy:
        for path, (group, methods) in paths().items():
            for target, method in tried(path, methods) if group in closed else ():
                status, _, body = await raw(proxy, method, target)
                assert is_refused(status, body), (method, target, status)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.usefixtures("_few_lines")
async def test_a_restricted_group(group: Any) -> None:
    """
    A restricted group is closed on every alias of a path, to all that is not its header, and the other groups are
    open, but for batches whose lines need the restricted one.
    """
    restricted = RestrictedApi(apis=(group,), header="admin-key", value="secret")
    async with service(AccessSettings(openai_restricted_api=(restricted,))) as proxy:
        closed = {group, "embedding"} if group == "inference" else {group}
        for path, (of, methods) in paths().items():
            for method in methods:
                makes_lines = method == "POST" and path.endswith("/messages/batches")
                needs = {of, "inference"} if makes_lines else {of}
                refused = 401 == (await raw(proxy, method, path))[0]
                assert refused == bool(needs & closed), (method, path)
            method = sorted(methods)[-1]
            is_closed = of in closed or (group == "inference" and path.endswith("/messages/batches"))
            wrong = (
                *(("admin-key: x", "admin-key: secret"), ("admin-key: secret", "admin-key: x")),
                *(("admin-key: Secret",), ("admin-key: secre",), ("admin-key:",), ("admin_key: secret",)),
            )
            for headers in wrong if is_closed and path in spelled() else wrong[:1]:
                assert (401 == (await raw(proxy, method, path, *headers))[0]) == is_closed
            assert 401 != (await raw(proxy, method, path, "Admin-Key: secret"))[0]


async def test_embeddings_may_have_a_header_of_their_own() -> None:
    """Where embeddings have a header of their own, only that opens them."""
    both = tuple(RestrictedApi(apis=(api,), header=f"key-{api}", value="x") for api in ("inference", "embedding"))
    async with service(AccessSettings(openai_restricted_api=both)) as proxy:
        assert 401 == (await raw(proxy, "POST", "/v1/embeddings", "key-inference: x"))[0]
        assert 400 == (await raw(proxy, "POST", "/v1/embeddings", "key-embedding: x"))[0]
        assert 401 == (await raw(proxy, "POST", "/v1/completions", "key-embedding: x"))[0]


async def test_a_restriction_and_a_key(keys_file: Path) -> None:
    """Both have to be shown where both are asked for; health is closed only where it is restricted."""
    restricted = (RestrictedApi(apis=("model-repository", "health"), header="authorization", value="Bearer admin"),)
    async with service(AccessSettings(api_keys_file=keys_file, openai_restricted_api=restricted)) as proxy:
        for headers, status in (
            ((), 401),
            (("Authorization: Bearer admin",), 401),
            (("Authorization: Bearer sk-all",), 401),
            (("Authorization: Bearer admin", "x-api-key: sk-all"), 200),
        ):
            assert status == (await raw(proxy, "GET", "/v1/models", *headers))[0]
        assert 401 == (await raw(proxy, "GET", "/health/live"))[0]
        assert 200 == (await raw(proxy, "GET", "/health/live", "Authorization: Bearer admin"))[0]


def client_of(proxy: Proxy, key: str, **options: Any) -> openai.AsyncOpenAI:
    """Return OpenAI's client."""
    return openai.AsyncOpenAI(base_url=str(proxy.client.make_url("/v1")), api_key=key, max_retries=0, **options)


async def test_keys_with_the_official_client(keys_file: Path) -> None:
    """A wrong key is its error for that; a key for some models has no others."""
    async with service(AccessSettings(api_key=("sk-plain",), api_keys_file=keys_file)) as proxy:
        async with client_of(proxy, "sk-wrong") as client:
            with pytest.raises(openai.AuthenticationError) as wrong:
                await client.completions.create(**COMPLETION)
        async with client_of(proxy, "sk-plain") as client:
            assert "one two" == (await client.completions.create(**{**COMPLETION, "model": "other"})).choices[0].text
        async with client_of(proxy, "sk-one") as client:
            assert "one two" == (await client.completions.create(**COMPLETION)).choices[0].text
            assert ["m"] == [model.id async for model in client.models.list()]
            errors = []
            for name in ("other", "nobody", "acme/x"):
                with pytest.raises(openai.NotFoundError) as unknown:
                    await client.models.retrieve(name)
                errors.append(unknown.value.code)
                with pytest.raises(openai.NotFoundError) as unknown:
                    await client.completions.create(**{**COMPLETION, "model": name})
                errors.append(unknown.value.code)

    assert "invalid_api_key" == wrong.value.code
    assert "sk-wrong" not in wrong.value.message
    assert ["model_not_found"] * 6 == errors


async def test_listing_models(keys_file: Path) -> None:
    """A key has only its own."""
    async with service(AccessSettings(api_keys_file=keys_file)) as proxy:
        _, _, body = await raw(proxy, "GET", "/v1/models", "api-key: sk-one")
        assert ["m"] == [model["id"] for model in json.loads(body)["data"]]


async def test_metrics_are_about_all_models(keys_file: Path) -> None:
    """
    A key of certain models gets no metrics: they name the models that are not there for it, and tell their traffic.
    """
    async with service(AccessSettings(api_keys_file=keys_file)) as proxy:
        for method in ("GET", "HEAD"):
            assert 403 == (await raw(proxy, method, "/metrics", "api-key: sk-one"))[0]
            assert 200 == (await raw(proxy, method, "/metrics", "api-key: sk-all"))[0]
        _, _, body = await raw(proxy, "GET", "/metrics", "api-key: sk-one")
        assert "key_not_sufficient" == json.loads(body)["error"]["code"]
        _, _, body = await raw(proxy, "GET", "/openapi.json", "api-key: sk-one")
        assert "403" in json.loads(body)["paths"]["/metrics"]["get"]["responses"]


async def test_keys_that_may_not_manage(managing: Path) -> None:
    """Keys that may not manage use and list models, and cannot load or unload them; others can, as without keys."""
    async with service(AccessSettings(api_keys_file=managing), control="explicit") as proxy:
        for call in ("load", "unload"):
            for prefix in ("/v1", ""):
                path = f"{prefix}/models/nobody/{call}"
                user = await proxy.post(path, b"", **{"api-key": "sk-user"})
                assert (403, "management_disabled") == (user.status, user.error["code"])
                assert "'user'" in user.error["message"]
                assert 403 != (await proxy.post(path, b"", **{"api-key": "sk-admin"})).status
        assert 200 == (await raw(proxy, "GET", "/v1/models", "api-key: sk-user"))[0]
        assert 200 == (await proxy.post("/v1/completions", COMPLETION, **{"api-key": "sk-user"})).status


async def test_keys_for_some_models_unload_no_others(tmp_path: Path) -> None:
    """The models of an ensemble go with it only for a key that opens all models."""
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: some, key: sk-some, models: [m]}, {name: all, key: sk-all}]")
    async with service(AccessSettings(api_keys_file=file), control="explicit") as proxy:
        statuses = {}
        for key in ("sk-some", "sk-all"):
            body = {"unload_dependents": True}
            answer = await proxy.post("/v1/models/m/unload", body, **{"api-key": key})
            statuses[key] = answer.status, answer.error["code"]
        assert (403, "key_not_sufficient") == statuses["sk-some"]
        assert 403 != statuses["sk-all"][0]


async def test_limits_with_the_official_client(keys_file: Path) -> None:
    """Answers say what is left, streams too; a refusal says when to come again."""
    async with service(AccessSettings(api_keys_file=keys_file)) as proxy, client_of(proxy, "sk-few") as client:
        whole = await client.completions.with_raw_response.create(**COMPLETION)
        stream = await client.completions.with_raw_response.create(**COMPLETION, stream=True)
        assert "one two" == "".join([chunk.choices[0].text async for chunk in stream.parse() if chunk.choices])
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**COMPLETION)
        # Looking at the models is no request that counts.
        await client.models.list()

    names = [
        f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
    ]
    limit, left, reset, tokens, tokens_left, tokens_reset = (whole.headers[name] for name in names)
    assert ("2", "1", "1000", "1000", "0s") == (limit, left, tokens, tokens_left, tokens_reset)
    assert "1m0s" == reset
    # A prompt of four tokens and two of the answer.
    assert ("0", "994") == (stream.headers[names[1]], stream.headers[names[4]])
    error, headers = caught.value, caught.value.response.headers
    assert ("rate_limit_exceeded", "requests") == (error.code, error.type)
    assert 0 < int(headers["retry-after"]) <= 60
    assert "0" == headers["x-ratelimit-remaining-requests"]


async def test_tokens_run_out(keys_file: Path) -> None:
    """The request that goes beyond the limit is answered, and the next one refused; another key is not concerned."""
    async with service(AccessSettings(api_keys_file=keys_file)) as proxy:
        key = {"api-key": "sk-tokens"}
        first = await proxy.post("/v1/completions", COMPLETION, **key)
        second = await proxy.post("/v1/chat/completions", {"model": "m"}, **key)
        other = await proxy.post("/v1/completions", COMPLETION, **{"api-key": "sk-all"})

    assert [200, 429, 200] == [first.status, second.status, other.status]
    assert ("tokens", "rate_limit_exceeded") == (second.error["type"], second.error["code"])
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_tokens_of_an_answer_that_is_left(keys_file: Path) -> None:
    """What the backend had counted when the client left is charged all the same."""
    async with service(AccessSettings(api_keys_file=keys_file)) as proxy:
        client, key = proxy.client, {"api-key": "sk-few"}
        async with client.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=key) as response:
            await response.content.readany()
            response.close()
        assert client.app is not None
        limits, limit = client.app[AUTHORIZER].limits, RateLimit(tokens_per_minute=1000, concurrent_requests=1)
        while (decision := await limits.admit("few", limit)).refusal is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    # Four of the prompt, and the token that had come at least.
    assert int(decision.headers["x-ratelimit-remaining-tokens"]) <= 995


async def charged(proxy: Proxy) -> int:
    """Return how many tokens are counted for the key that may use 1000 in a minute."""
    assert proxy.client.app is not None
    limits = proxy.client.app[AUTHORIZER].limits
    decision = await limits.admit("thousand", RateLimit(tokens_per_minute=1000))
    limits.leave("thousand", 0)
    return 1000 - int(decision.headers["x-ratelimit-remaining-tokens"])


async def test_tokens_that_nobody_counts(keys_file: Path) -> None:
    """Without a count and a tokenizer an estimate is charged, which no answer shows; nothing for what was refused."""
    key = {"api-key": "sk-thousand"}
    inputs = ("text_input BYTES 1", "sampling_parameters? BYTES 1", "stream? BOOL 1", "exclude_input_in_output? BOOL 1")
    async with FakeTriton(config_of("m", inputs)) as triton:
        triton.responses = [{"text_output": text} for text in (" one", " two")]
        settings = Settings(triton=TritonSettings(url=(triton.url,)), access=AccessSettings(api_keys_file=keys_file))
        async with serving(settings) as proxy:
            await proxy.ready()
            body = {"model": "m", "prompt": "a prompt of 20 bytes", "max_tokens": 5}
            whole = await proxy.post("/v1/completions", body, **key)
            assert (200, False) == (whole.status, "usage" in whole.json)
            # Five for the prompt, and two for the eight bytes of the answer.
            assert 7 == await charged(proxy)
            assert 404 == (await proxy.post("/v1/completions", {**body, "model": "nobody"}, **key)).status
            assert 400 == (await proxy.post("/v1/completions", {**body, "n": -1}, **key)).status
            triton.responses = []
            assert 500 <= (await proxy.post("/v1/completions", body, **key)).status
            assert 7 == await charged(proxy)


async def test_tokens_that_are_only_counted(keys_file: Path, tmp_path: Path) -> None:
    """To count the tokens of a request is no inference: nothing is charged for it."""
    async with FakeTriton(config_of("m")) as triton:
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            access=AccessSettings(api_keys_file=keys_file),
            defaults=ModelDefaults(chat_template="chatml"),
            models={"m": ModelSettings(tokenizer=save(tmp_path))},
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            for path, said in (
                ("/v1/responses/input_tokens", {"input": "Hello"}),
                ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hello"}]}),
            ):
                counted = await proxy.post(path, {"model": "m", **said}, **{"api-key": "sk-thousand"})
                assert counted.json["input_tokens"] > 0
            assert 0 == await charged(proxy)


async def test_one_at_a_time(keys_file: Path) -> None:
    """A request is one for as long as it streams, and no longer when its client leaves."""
    async with service(AccessSettings(api_keys_file=keys_file)) as proxy:
        headers = {"api-key": "sk-alone", "Content-Type": "application/json"}
        # A body that does not come: its request runs.
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.client.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        writer.write(f"{head}api-key: {headers['api-key']}\r\n\r\n".encode())
        await writer.drain()
        status = 200
        while status == 200:
            status = (await proxy.post("/v1/completions", COMPLETION, **headers)).status
        assert 429 == status
        writer.close()
        while status == 429:
            status = (await proxy.post("/v1/completions", COMPLETION, **headers)).status
        assert 200 == status
        del reader


async def test_the_log(keys_file: Path) -> None:
    """The log has the name of the key, and nowhere a key."""
    with structlog.testing.capture_logs() as captured:
        async with service(AccessSettings(api_keys_file=keys_file)) as proxy:
            for key in ("sk-all", "sk-wrong"):
                await proxy.post("/v1/completions", COMPLETION, Authorization=f"Bearer {key}")

    good, bad = [line for line in captured if line["event"] == "request"]
    assert ("all", "info") == (good["key"], good["log_level"])
    assert ("invalid_api_key", "info") == (bad["error"], bad["log_level"])
    assert "key" not in bad
    assert not re.search("sk-|Bearer", str(captured))


# A gateway in front

TENANT, OBJECTIVE, SESSION = "x-llm-d-inference-fairness-id", "x-gateway-inference-objective", "x-session-token"
GATEWAY = GatewaySettings(objectives={"urgent": 1, "batch": 2, "beyond": 3}, requests_per_minute=1)


async def test_tenants_of_a_gateway(keys_file: Path) -> None:
    """Each has limits of its own: those of its key, or else the gateway's. Whoever names none has those of the key."""
    trusting = AccessSettings(trust_gateway=True, gateway=GATEWAY)
    asked: list[tuple[AccessSettings, str | None, list[tuple[str, int]]]] = [
        (trusting, None, [("a", 200), ("a", 429), ("b", 200), ("", 200), ("", 200), ("\tä", 400), ("x" * 129, 400)]),
        (AccessSettings(gateway=GATEWAY), None, [("a", 200), ("a", 200)]),
        (replace(trusting, api_keys_file=keys_file), "sk-few", [("a", 200), ("a", 200), ("a", 429), ("b", 200)]),
        (replace(trusting, api_keys_file=keys_file), "sk-one", [("a", 200), ("a", 429)]),
        (replace(trusting, api_keys_file=keys_file), "sk-wrong", [("a", 401)]),
    ]
    with structlog.testing.capture_logs() as captured:
        for access, key, tenants in asked:
            async with service(access) as proxy:
                for tenant, status in tenants:
                    headers = {TENANT: tenant} if key is None else {TENANT: tenant, "api-key": key}
                    answer = await proxy.post("/v1/completions", COMPLETION, **headers)
                    assert status == answer.status, (key, tenant, answer.body)
        secret = "sk-" + "a" * 30
        async with service(trusting) as proxy:
            older = TENANT.replace("llm-d", "gateway")
            for tenant, status in ((secret, 200), (secret, 429), (f"{secret}b", 200)):
                assert status == (await proxy.post("/v1/completions", COMPLETION, **{older: tenant})).status

    logged = [line.get("key") for line in captured if line["event"] == "request"]
    assert ["a", "a", "b"] == logged[:3]
    assert {"few/a", "few/b", "one model/a"} <= set(logged)
    assert secret not in str(captured)


class _Recorder(Endpoint):
    """Remembers the priorities of requests, and sends none."""

    seen: list[int]

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        self.seen.append(request.priority)
        raise InvalidRequest("No.")


async def test_objectives_of_a_gateway() -> None:
    """
    Objectives of a gateway come before what clients ask for; a queue without that level, and an unknown objective,
    leave it.
    """
    config = config_of("m", dynamic_batching={"priority_levels": 2})
    cases = [("urgent", 0, 1), ("batch", 1, 2), ("beyond", 1, 1), ("other", 2, 2), ("", 0, 0)]
    async with FakeTriton(config) as triton:
        for trusted in (True, False):
            access = AccessSettings(trust_gateway=trusted, gateway=GATEWAY)
            recorder = _Recorder((triton.url,))
            recorder.seen = []
            settings = Settings(triton=TritonSettings(url=(triton.url,)), access=access)
            async with serving(settings, client=recorder) as proxy:
                await proxy.ready()
                for objective, asked, _ in cases:
                    body = {**COMPLETION, "priority": asked}
                    assert 400 == (await proxy.post("/v1/completions", body, **{OBJECTIVE: objective})).status
            assert [sent if trusted else asked for _, asked, sent in cases] == recorder.seen


async def test_the_session_of_a_gateway() -> None:
    """The token of a gateway's session comes back with any answer, and scripts of pages may read it."""
    for trusted in (True, False):
        access = AccessSettings(trust_gateway=trusted, cors_allow_origin=("*",))
        async with service(access) as proxy:
            for body in (COMPLETION, {**COMPLETION, "stream": True}, {}):
                answer = await proxy.post("/v1/completions", body, **{SESSION: "bGxtL3BvZC0w", "Origin": ORIGIN})
                assert ("bGxtL3BvZC0w" if trusted else None) == answer.headers.get(SESSION)
                assert SESSION in answer.headers["Access-Control-Expose-Headers"]
            _, headers, _ = await raw(proxy, "POST", "/v1/completions", f"{SESSION}: ä")
            assert SESSION not in headers


def test_as_a_process(triton: TestTriton, keys_file: Path, tmp_path: Path) -> None:
    """What an operator starts has its keys, its restrictions and its patience, and takes new keys as it runs."""
    arguments = (
        *("--triton-url", triton.http_url, "--tokenizer", str(triton.tokenizer)),
        *("--api-key", "cli:sk-cli", "--api-keys-file", str(keys_file), "--log-level", "debug"),
        *("--openai-restricted-api", "model-repository,health", "admin-key", "open sesame"),
    )
    ask = {"model": "ensemble", "prompt": "a", "max_tokens": 2}
    with running(tmp_path, *arguments, settings={"limits": {"header_timeout": 2}}) as service:
        for key, status in (("sk-cli", 200), ("sk-all", 200), ("sk-few", 200), ("sk-one", 404), ("sk-new", 401)):
            reply = service.post("/v1/completions", ask, Authorization=f"Bearer {key}")
            assert status == reply.status
        assert 401 == service.status("/health/ready")
        assert 200 == service.send("GET", "/health/ready", headers={"admin-key": "open sesame"}).status
        keys_file.write_text("keys: [{name: new, key: sk-new}]")
        until(lambda: service.post("/v1/completions", ask, Authorization="Bearer sk-new").status == 200)
        assert 401 == service.post("/v1/completions", ask, Authorization="Bearer sk-all").status
        with socket.create_connection((service.host, service.port), timeout=120) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost")
            # Closed without an answer: the request is not whole.
            assert b"" == slow.recv(100)
        log = service.log.read_text()
        assert [] == service.complaints()

    assert '"key":"cli"' in log
    assert not re.search("sk-(cli|all|few|one|new)|sesame", log)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--api-keys-file", "/nowhere/keys.yaml"), "/nowhere/keys.yaml cannot be read"),
        (("--openai-restricted-api", "inference k v"), "expected 3 arguments"),
        (("--openai-restricted-api", "embeddings", "k", "v"), "is not accepted"),
        (("--api-key", "a:sk-1", "--api-key", "b:sk-1"), "'a' and 'b' are the same key"),
        (("--cors-allow-origin", "https://*.example"), "is not accepted"),
        (("--cors-allow-origin", "https://chat.example/"), "is not accepted"),
    ],
)
def test_mistakes_of_the_operator(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator's mistake ends the start with one sentence."""
    assert 2 == main(["serve", "--port", "0", *arguments])
    printed = capsys.readouterr().err
    assert message in printed
    assert "sk-1" not in printed


# CORS

ORIGIN = "https://chat.example"
PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x-stainless-os")


async def test_preflights(keys_file: Path) -> None:
    """A browser's question needs no key; pages of other origins are told no."""
    access = AccessSettings(api_keys_file=keys_file, cors_allow_origin=(ORIGIN,))
    async with service(access) as proxy:
        status, headers, body = await raw(proxy, "OPTIONS", "/v1/chat/completions", f"Origin: {ORIGIN}", *PREFLIGHT)
        assert (204, b"") == (status, body)
        assert ORIGIN == headers["access-control-allow-origin"]
        assert "authorization,x-stainless-os" == headers["access-control-allow-headers"]
        assert "GET, HEAD, POST, DELETE" == headers["access-control-allow-methods"]
        assert "Origin" in headers["vary"]
        assert "access-control-allow-credentials" not in headers
        for origin in (
            "https://evil.example",
            f"{ORIGIN}.evil.example",
            f"{ORIGIN}:8443",
            "null",
            "http://chat.example",
        ):
            status, headers, body = await raw(proxy, "OPTIONS", "/v1/models", f"Origin: {origin}", *PREFLIGHT)
            assert (403, "origin_not_allowed") == (status, json.loads(body)["error"]["code"])
            assert "access-control-allow-origin" not in headers
        # An OPTIONS that is no preflight is a request like any other.
        assert 401 == (await raw(proxy, "OPTIONS", "/v1/models", f"Origin: {ORIGIN}"))[0]


async def test_answers_to_pages(keys_file: Path) -> None:
    """Answers, errors and streams may be read, with the headers that matter; and are marked for caches."""
    access = AccessSettings(api_keys_file=keys_file, cors_allow_origin=(ORIGIN, "null"))
    async with service(access) as proxy:
        page = {"Origin": ORIGIN, "api-key": "sk-few"}
        answers = [
            await proxy.post("/v1/completions", COMPLETION, **page),
            await proxy.post("/v1/completions", {**COMPLETION, "stream": True}, **page),
            await proxy.post("/v1/completions", COMPLETION, **page),
            await proxy.post("/v1/completions", COMPLETION, Origin=ORIGIN),
            await proxy.post("/nothing", b"", Origin=ORIGIN),
        ]
        other = await proxy.post("/v1/completions", COMPLETION, **{"Origin": "https://x", "api-key": "sk-all"})
        no_page = await proxy.get("/health")
        _, preflight, _ = await raw(proxy, "OPTIONS", "/v1/models", f"Origin: {ORIGIN}", *PREFLIGHT)

    assert [200, 200, 429, 401, 401] == [answer.status for answer in answers]
    for answer in answers:
        assert ORIGIN == answer.headers["Access-Control-Allow-Origin"]
        exposed = answer.headers["Access-Control-Expose-Headers"]
        assert all(
            name in exposed for name in ("x-request-id", "retry-after", "x-max-tokens", "x-ratelimit-remaining-tokens")
        )
    for answer in (*answers, other, no_page):
        assert "Origin" == answer.headers["Vary"]
    assert not [name for name in (*other.headers, *no_page.headers) if name.startswith("Access-Control")]
    assert "GET, HEAD, POST, DELETE" == preflight["access-control-allow-methods"]


async def test_all_pages_and_none() -> None:
    """``*`` has to be said, and without any origin there is nothing about it in an answer."""
    async with service(AccessSettings(cors_allow_origin=("*",))) as proxy:
        answer = await proxy.post("/v1/completions", COMPLETION, Origin="https://anything.example")
        assert "*" == answer.headers["Access-Control-Allow-Origin"]
        assert "Vary" not in answer.headers
    async with service(AccessSettings()) as proxy:
        async with proxy.client.get("/v1/models", headers={"Origin": ORIGIN}) as response:
            assert 200 == response.status
        assert not {"Vary", "Access-Control-Allow-Origin"} & set(response.headers)
        assert 405 == (await raw(proxy, "OPTIONS", "/v1/models", f"Origin: {ORIGIN}", *PREFLIGHT))[0]


async def test_limits_of_bodies() -> None:
    """Limits of bodies hold for requests, and are those of the settings."""
    limits = LimitSettings(max_text_size=200_000)
    async with service(AccessSettings(), limits=limits) as proxy:
        message = {"role": "user", "content": "a"}
        for fields, status, code in (
            ({"messages": [message], "metadata": json.loads("[" * 100 + "]" * 100)}, 400, "invalid_json"),
            ({"messages": [{**message, "content": "a" * 200_001}]}, 413, "string_above_max_length"),
        ):
            refused = await proxy.post("/v1/chat/completions", {"model": "m", **fields})
            assert (status, code) == (refused.status, refused.error["code"])
