"""The relays of Triton's own protocol keep to API keys, restricted APIs and TLS, as the service's own API does."""

from __future__ import annotations

import asyncio
import gzip
import json
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from tritonclient.grpc import service_pb2
from yarl import URL

from tests.relays import Relays, Upstream, relayed
from tests.tls_fixture import Authority
from triton_openai.config import files as watched_files
from triton_openai.config.tree import GatewaySettings, RestrictedApi, TlsSettings
from triton_openai.triton.relay.rules import operation_of_path

SERVICE = "/inference.GRPCInferenceService/"
ALICE, BOB = {"Authorization": "Bearer sk-alice"}, {"x-api-key": "sk-bob"}
KEYS = """
keys:
  - {name: alice, key: sk-alice}
  - {name: user, key: sk-user, manage: false}
  - {name: bob, key: sk-bob, models: [small, "team *", "*-small"]}
  - {name: twice, key: sk-twice, requests_per_minute: 2}
  - {name: single, key: sk-single, concurrent_requests: 1}
  - {name: tokens, key: sk-tokens, tokens_per_minute: 1000}
"""


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for *condition*; the deadline only ends a test that has failed already."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - what happens elsewhere sets no event here
            await asyncio.sleep(0.01)


class Triton:
    """Plays a Triton that answers whatever it is asked, and remembers it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        self.calls: list[tuple[str, dict[str, Any], list[bytes]]] = []
        #: Of the last call, with what is there more than once.
        self.metadata: list[Any] = []
        #: Answers are held back while it is cleared.
        self.answers = asyncio.Event()
        self.answers.set()

    async def http(self, request: web.Request) -> web.Response:
        """Answer a request."""
        self.requests.append((request.raw_path, request.headers.copy(), await request.read()))
        await self.answers.wait()
        return web.json_response({})

    async def grpc(self, context: Any) -> None:
        """Answer every message with one."""
        messages: list[bytes] = []
        self.metadata = [tuple(pair) for pair in context.invocation_metadata()]
        self.calls.append(("", dict(self.metadata), messages))
        while (message := await context.read()) is not grpc.aio.EOF:
            messages.append(message)
            await self.answers.wait()
            await context.write(b"")


@asynccontextmanager
async def guarded(**fields: Any) -> AsyncIterator[tuple[Relays, Triton]]:
    """Run the relays in front of such a Triton."""
    triton = Triton()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", triton.http)
    server = grpc.aio.server(handlers=(Upstream(triton.grpc),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with (
            TestServer(app, auto_decompress=False) as over_http,
            relayed(str(over_http.make_url("")), f"grpc://127.0.0.1:{port}", **fields) as relays,
        ):
            yield relays, triton
    finally:
        await server.stop(0)


@asynccontextmanager
async def with_keys(folder: Path, **fields: Any) -> AsyncIterator[tuple[Relays, Triton]]:
    """Run them with :data:`KEYS`."""
    file = folder / "keys.yaml"
    file.write_text(KEYS)
    async with guarded(access={"api_keys_file": file}, **fields) as (relays, triton):
        yield relays, triton


async def ask(
    relays: Relays, path: str, headers: Mapping[str, str] | None = None, *, method: str = "POST", data: Any = None
) -> tuple[int, Any, Mapping[str, str]]:
    """Return status, error and headers of a request's answer."""
    url = URL(f"http://{relays.http}{path}", encoded=True)
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers, data=data) as response,
    ):
        body = await response.read()
        return response.status, json.loads(body).get("error") if body else None, response.headers.copy()


async def call(
    relays: Relays, method: str, *messages: Any, headers: Mapping[str, str] | None = None
) -> tuple[grpc.StatusCode, str]:
    """Return status and details of a call that sends *messages*, each after the answer to the one before.

    A write of grpc.aio that meets the call's end replaces its status by INTERNAL; the client with threads keeps it.
    """
    metadata = tuple((name.lower(), value) for name, value in (headers or {}).items())
    answered: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def requests() -> Iterator[bytes]:
        for message in messages:
            yield message.SerializeToString()
            if not answered.get():
                break

    def ask() -> tuple[grpc.StatusCode, str]:
        with grpc.insecure_channel(relays.grpc) as channel:
            multicallable: Any = channel.stream_stream(SERVICE + method)
            made = multicallable(requests(), metadata=metadata)
            try:
                for _ in made:
                    answered.put(True)
            except grpc.RpcError:
                pass
            answered.put(False)
            return made.code(), made.details()

    return await asyncio.to_thread(ask)


def infer(model: str) -> Any:
    """Return a request to *model*."""
    return service_pb2.ModelInferRequest(model_name=model)


async def test_what_the_service_says_itself(tmp_path: Path) -> None:
    """Its request id and what opens Triton stand alone, whatever the client says there."""
    said = {"x-request-id": "a b", "authorization": "Bearer mine", "x-other": "1"}
    token = tmp_path / "token"
    token.write_text("secret")
    async with guarded(triton_access={"token_file": token}) as (relays, triton):
        assert grpc.StatusCode.OK == (await call(relays, "ModelInfer", infer("m"), headers=said))[0]
        assert 200 == (await ask(relays, "/v2/models/m/infer", said))[0]
        (_, headers, _) = triton.requests[-1]
        for found in (triton.metadata, list(headers.items())):
            values = [value for name, value in found if name.lower() == "authorization"]
            assert ["Bearer secret"] == values
            assert 1 == sum(name.lower() == "x-request-id" for name, _ in found)
            assert 1 == sum(name.lower() == "x-other" for name, _ in found)


# Keys


async def test_a_key_is_needed_over_http(tmp_path: Path) -> None:
    """Everything but the server's health needs one, in any of the three headers, and Triton never sees it."""
    async with with_keys(tmp_path) as (relays, triton):
        for path in ("/v2/models/small/infer", "/v2", "/v2/models/small/ready", "/v2/logging", "/nothing"):
            status, error, headers = await ask(relays, path)
            assert (401, "Bearer") == (status, headers["WWW-Authenticate"]), path
            assert error.startswith("You didn't provide an API key")
        assert 401 == (await ask(relays, "/v2", {"api-key": "sk-mallory"}))[0]
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert 200 == (await ask(relays, path, method="GET"))[0]
        triton.requests.clear()
        for headers in (ALICE, {"api-key": "sk-alice"}, {"x-api-key": "sk-alice"}):
            assert 200 == (await ask(relays, "/v2/models/any/infer", {**headers, "X-Mine": "1"}))[0]

    assert 3 == len(triton.requests)
    for _, seen, _ in triton.requests:
        assert "sk-alice" not in str(seen)
        assert "1" == seen["X-Mine"]


async def test_a_key_is_needed_over_grpc(tmp_path: Path) -> None:
    """The same in metadata, and the statuses are gRPC's."""
    async with with_keys(tmp_path) as (relays, triton):
        for method in ("ModelInfer", "ModelStreamInfer", "ServerMetadata", "LogSettings", "Nothing"):
            status, details = await call(relays, method, infer("small"))
            assert grpc.StatusCode.UNAUTHENTICATED == status, method
            assert "API key" in details
        wrong = {"Authorization": "Bearer sk-mallory"}
        assert grpc.StatusCode.UNAUTHENTICATED == (await call(relays, "ModelInfer", headers=wrong))[0]
        assert [] == triton.calls
        assert grpc.StatusCode.OK == (await call(relays, "ServerLive"))[0]
        triton.calls.clear()
        assert grpc.StatusCode.OK == (await call(relays, "ModelInfer", infer("any"), headers=ALICE))[0]

    assert "sk-alice" not in str(triton.calls[0][1])


async def test_the_models_of_a_key_over_http(tmp_path: Path) -> None:
    """Others are not there for it, however their names are written, and nothing tells of all models."""
    async with with_keys(tmp_path, triton={"model_control_mode": "explicit"}) as (relays, triton):
        for path in ("small/infer", "small/versions/1/generate", "team%20a/infer", "small", "small/stats"):
            status, error, _ = await ask(relays, f"/v2/models/{path}", BOB)
            # What a name is before it is decoded has to be open, too: Triton's releases differ.
            assert (404 if "%" in path else 200) == status, (path, error)
        triton.requests.clear()
        for path in ("large/infer", "%6Carge/infer", "sma%6Cl/infer", "large/config", "large/ready", "large", "stats"):
            assert 200 != (await ask(relays, f"/v2/models/{path}", BOB))[0], path
        # Other paths, to who decodes before it looks.
        for path in ("large%2Finfer%3F-small/infer", "large%2F..%2Fa-small/infer", "large%2523-small/infer"):
            assert 200 != (await ask(relays, f"/v2/models/{path}", BOB))[0], path
        assert 404 == (await ask(relays, "/v2/repository/models/large/load", BOB))[0]
        status, error, _ = await ask(relays, "/v2/repository/index", BOB)
        assert (403, True) == (status, "the key is limited to certain models" in error)
        assert [] == triton.requests
        assert 200 == (await ask(relays, "/v2/repository/models/small/load", BOB))[0]
        assert 200 == (await ask(relays, "/v2/repository/index", ALICE))[0]


async def test_a_name_that_is_encoded_again(tmp_path: Path) -> None:
    """It is not relayed: how often Triton decodes it differs between its releases."""
    async with with_keys(tmp_path) as (relays, triton):
        for times, expected in ((0, 200), (1, 404), (7_000, 404)):
            path = f"/v2/models/%{'25' * times}61/infer"
            assert expected == (await ask(relays, path, ALICE))[0]
            assert 404 == (await ask(relays, path, BOB))[0]
        assert 1 == len(triton.requests)
    assert (None, ()) == operation_of_path(f"/v2/models/%{'25' * 10_000}/infer")


async def test_the_models_of_a_key_over_grpc(tmp_path: Path) -> None:
    """Every message of a stream is looked at, and one for another model ends it."""
    async with with_keys(tmp_path) as (relays, triton):
        ok, absent = grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND
        assert ok == (await call(relays, "ModelInfer", infer("small"), headers=BOB))[0]
        assert ok == (await call(relays, "ModelStreamInfer", infer("small"), infer("team a"), headers=BOB))[0]
        triton.calls.clear()
        status, details = await call(relays, "ModelInfer", infer("large"), headers=BOB)
        assert (absent, "The model 'large' does not exist, or this key may not use it.") == (status, details)
        for kind in ("ModelMetadata", "ModelConfig", "ModelReady", "ModelStatistics"):
            message = getattr(service_pb2, f"{kind}Request")
            assert absent == (await call(relays, kind, message(name="large"), headers=BOB))[0], kind
            assert ok == (await call(relays, kind, message(name="small"), headers=BOB))[0], kind
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert denied == (await call(relays, "ModelStatistics", service_pb2.ModelStatisticsRequest(), headers=BOB))[0]
        assert denied == (await call(relays, "RepositoryIndex", headers=BOB))[0]
        triton.calls.clear()
        assert absent == (await call(relays, "ModelStreamInfer", infer("small"), infer("large"), headers=BOB))[0]

    assert [[infer("small").SerializeToString()]] == [messages for _, _, messages in triton.calls]


async def test_a_message_that_cannot_be_read(tmp_path: Path) -> None:
    """It is refused where its model matters, and nothing of it reaches Triton."""
    async with with_keys(tmp_path) as (relays, triton), grpc.aio.insecure_channel(relays.grpc) as channel:
        made: Any = channel.unary_unary(SERVICE + "ModelInfer")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made(b"\x0a\xff", metadata=(("x-api-key", "sk-bob"),))
        # The last name is the one that counts.
        two = infer("large").SerializeToString() + infer("small").SerializeToString()
        await made(two, metadata=(("x-api-key", "sk-bob"),))
        with pytest.raises(grpc.aio.AioRpcError):
            await made(
                infer("small").SerializeToString() + infer("large").SerializeToString(),
                metadata=(("x-api-key", "sk-bob"),),
            )

    assert grpc.StatusCode.INVALID_ARGUMENT == caught.value.code()
    assert 1 == len(triton.calls)


async def test_requests_in_a_minute(tmp_path: Path) -> None:
    """They are counted together over both protocols, a stream's each; what is no inference is free."""
    key = {"api-key": "sk-twice"}
    async with with_keys(tmp_path) as (relays, triton):
        assert 200 == (await ask(relays, "/v2", key))[0]
        status, _, headers = await ask(relays, "/v2/models/m/infer", key)
        assert (200, "1") == (status, headers["x-ratelimit-remaining-requests"])
        ended, details = await call(relays, "ModelStreamInfer", infer("m"), infer("m"), headers=key)
        assert (grpc.StatusCode.RESOURCE_EXHAUSTED, True) == (ended, "requests per minute: limit 2" in details)
        status, error, headers = await ask(relays, "/v2/models/m/infer", key)
        assert (429, True) == (status, "requests per minute" in error)
        assert int(headers["Retry-After"]) >= 1

    assert [1] == [len(messages) for _, _, messages in triton.calls]


async def test_tenants_of_a_gateway() -> None:
    """They are counted one by one here too."""
    gateway = GatewaySettings(requests_per_minute=1)
    async with guarded(access={"trust_gateway": True, "gateway": gateway}) as (relays, _):
        statuses = [
            (await ask(relays, "/v2/models/m/infer", {"x-gateway-inference-fairness-id": tenant}))[0]
            for tenant in ("a", "b", "a", "ä")
        ]

    assert [200, 200, 429, 400] == statuses


async def test_requests_at_the_same_time(tmp_path: Path) -> None:
    """One that runs keeps another away, over either protocol; the requests of a stream run until it ends."""
    key = {"api-key": "sk-single"}
    async with with_keys(tmp_path) as (relays, triton):
        triton.answers.clear()
        running = asyncio.create_task(ask(relays, "/v2/models/m/infer", key))
        await until(lambda: came(triton))
        assert 429 == (await ask(relays, "/v2/models/m/infer", key))[0]
        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert exhausted == (await call(relays, "ModelInfer", infer("m"), headers=key))[0]
        triton.answers.set()
        assert 200 == (await running)[0]
        assert exhausted == (await call(relays, "ModelStreamInfer", infer("m"), infer("m"), headers=key))[0]
        assert grpc.StatusCode.OK == (await call(relays, "ModelStreamInfer", infer("m"), headers=key))[0]


async def came(triton: Triton) -> bool:
    """Return whether a request has come to Triton."""
    return bool(triton.requests)


async def test_a_limit_that_cannot_be_kept(tmp_path: Path) -> None:
    """Nobody counts tokens here: a key that is limited in them gets no inference, and the sentence says why."""
    key = {"api-key": "sk-tokens"}
    async with with_keys(tmp_path) as (relays, triton):
        status, error, _ = await ask(relays, "/v2/models/m/generate_stream", key)
        assert (403, True) == (status, "limit on tokens" in error)
        assert grpc.StatusCode.PERMISSION_DENIED == (await call(relays, "ModelInfer", infer("m"), headers=key))[0]
        assert not triton.requests
        assert not triton.calls
        assert 200 == (await ask(relays, "/v2/models/m", key))[0]


# Restricted APIs


@pytest.mark.parametrize(
    "api, path, method, rpc",
    [
        ("inference", "/v2/models/m/generate", "POST", "ModelStreamInfer"),
        ("embedding", "/v2/models/m/infer", "POST", "ModelInfer"),
        ("model-repository", "/v2/repository/index", "POST", "RepositoryIndex"),
        ("model-repository", "/v2/models/m/config", "GET", "ModelConfig"),
        ("metrics", "/v2/models/m/stats", "GET", "ModelStatistics"),
        ("health", "/v2/health/live", "GET", "ServerLive"),
        ("info", "/v2", "GET", "ServerMetadata"),
    ],
)
async def test_restricted_apis(api: Any, path: str, method: str, rpc: str) -> None:
    """The group's header opens it, nothing else does, and Triton does not see it."""
    entry = RestrictedApi(apis=(api,), header="Admin-Key", value="secret")
    async with guarded(access={"openai_restricted_api": (entry,)}) as (relays, triton):
        for headers in ({}, {"admin-key": "guess"}):
            status, error, _ = await ask(relays, path, headers, method=method)
            assert (401, True) == (status, error.startswith("This API is restricted"))
            assert grpc.StatusCode.UNAUTHENTICATED == (await call(relays, rpc, headers=headers))[0]
        assert not triton.requests
        assert not triton.calls
        right = {"admin-key": "secret"}
        assert 200 == (await ask(relays, path, right, method=method))[0]
        assert grpc.StatusCode.OK == (await call(relays, rpc, headers=right))[0]
        other = "/v2/health/live" if api != "health" else "/v2"
        assert 200 == (await ask(relays, other, method="GET"))[0]

    assert "secret" not in str([triton.requests, triton.calls])


# What manages the server


async def test_a_key_that_is_not_for_managing(tmp_path: Path) -> None:
    """It infers, and loads nothing; another key does."""
    explicit = {"model_control_mode": "explicit"}
    async with with_keys(tmp_path, triton=explicit) as (relays, triton):
        user = {"api-key": "sk-user"}
        assert 200 == (await ask(relays, "/v2/models/small/infer", user))[0]
        triton.requests.clear()
        for path in ("/v2/repository/models/small/load", "/v2/repository/models/small/unload"):
            status, error, _ = await ask(relays, path, user)
            assert (403, "The key 'user' may not load and unload models.") == (status, error), path
        load = service_pb2.RepositoryModelLoadRequest(model_name="small")
        denied = await call(relays, "RepositoryModelLoad", load, headers=user)
        assert grpc.StatusCode.PERMISSION_DENIED == denied[0]
        assert not triton.requests
        assert not triton.calls
        assert 200 == (await ask(relays, "/v2/repository/models/small/load", ALICE))[0]


@pytest.mark.parametrize(
    "body",
    [
        {"parameters": {"config": "{}"}},
        {"parameters": {"file:1/model.py": "aW1wb3J0IG9z"}},
        {"parameters": {"unload_dependents": True, "file:../../x": ""}},
    ],
)
async def test_a_load_brings_no_programs(body: Any) -> None:
    """A model's files and configuration are programs, and do not pass."""
    mode = {"model_control_mode": "explicit"}
    path, data = "/v2/repository/models/m/load", json.dumps(body).encode()
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")
    for name in body["parameters"]:
        message.parameters[name].string_param = "x"
    async with guarded(triton=mode) as (relays, triton):
        status, error, _ = await ask(relays, path, data=data)
        assert (403, True) == (status, "which are programs that Triton runs" in error)
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert denied == (await call(relays, "RepositoryModelLoad", message))[0]
        assert not triton.requests
        assert not triton.calls


async def test_bodies_of_loads() -> None:
    """What is harmless passes, written anew; what cannot be read does not."""
    path = "/v2/repository/models/m/unload"
    async with guarded(triton={"model_control_mode": "explicit"}) as (relays, triton):
        for data, passes in (
            (b"", b""),
            (b"{}", b'{"parameters":{}}'),
            (b'{"parameters": {"config": "{}"}, "parameters": {"unload_dependents": true}}', None),
            (b' {"parameters": {"unload_dependents": true}}', b'{"parameters":{"unload_dependents":true}}'),
            (b'{"parameters": []}', None),
            (b'{"other": 1}', None),
            (b"[" * 10_000, None),
            (gzip.compress(b"{}"), None),
            (b'"' + bytes(100_000), None),
        ):
            triton.requests.clear()
            status, error, _ = await ask(relays, path, data=data)
            if passes is None and b"unload_dependents" not in data:
                assert (400 if len(data) < 65536 else 413, True) == (status, bool(error)), data[:50]
                assert [] == triton.requests
            else:
                # Of two values the last one counts, for whoever reads what was written anew.
                assert passes in (None, triton.requests[0][2])
                assert b"config" not in triton.requests[0][2]


# The end of the service, and who looks on


async def test_readiness_while_the_service_ends() -> None:
    """Load balancers that ask here learn of the end as those that ask the service; it goes on serving."""
    async with guarded() as (relays, _):
        relays.guard.draining.begun = True
        for path in ("/v2/health/ready", "/v2/models/m/ready"):
            assert (503, "The service is stopping.") == (await ask(relays, path, method="GET"))[:2]
        assert grpc.StatusCode.UNAVAILABLE == (await call(relays, "ServerReady"))[0]
        assert 200 == (await ask(relays, "/v2/health/live", method="GET"))[0]
        status, _, headers = await ask(relays, "/v2/models/m/infer")
        assert (200, "close") == (status, headers["Connection"])


async def test_a_hurried_end() -> None:
    """Who is in a hurry does not wait for what runs in the relays either."""
    async with guarded() as (relays, triton):
        triton.answers.clear()
        asking = asyncio.create_task(ask(relays, "/v2/models/m/infer"))
        calling = asyncio.create_task(call(relays, "ModelInfer", infer("m")))
        await until(lambda: came(triton))
        await until(lambda: called(triton))
        hurried = asyncio.Event()
        closing = asyncio.gather(*(one.close(3600, hurried) for one in relays.frontends))
        await asyncio.sleep(0)
        assert not closing.done()
        hurried.set()
        await asyncio.wait_for(closing, 20)
        assert 503 == (await asyncio.wait_for(asking, 20))[0]
        assert grpc.StatusCode.OK != (await asyncio.wait_for(calling, 20))[0]
        triton.answers.set()


async def test_log_lines_and_counts(tmp_path: Path) -> None:
    """One line for each request or call, with its key and its id, which Triton gets as well; and a count."""
    async with with_keys(tmp_path) as (relays, triton):
        with capture_logs() as lines:
            _, _, told = await ask(relays, "/v2/models/m/infer?secret=1", {**ALICE, "x-request-id": "mine"})
            await call(relays, "ModelInfer", infer("m"), headers={**ALICE, "x-request-id": "mine-too"})
            await ask(relays, "/v2/models/m/infer")
        registry = CollectorRegistry()
        registry.register(relays.guard.metrics)

    assert "mine" == told["x-request-id"] == triton.requests[0][1]["x-request-id"]
    assert "mine-too" == triton.calls[0][1]["x-request-id"]
    first, second, third = (line for line in lines if line["event"] == "relayed")
    assert ("mine", "http", "alice", "200", "inference", "/v2/models/m/infer") == tuple(
        first[name] for name in ("request_id", "protocol", "key", "status", "operation", "path")
    )
    assert ("mine-too", "grpc", "OK") == tuple(second[name] for name in ("request_id", "protocol", "status"))
    assert ("info", "401", "invalid_api_key") == tuple(third[name] for name in ("log_level", "status", "error"))
    counted = {"protocol": "grpc", "group": "inference", "status": "OK"}
    assert 1 == registry.get_sample_value("triton_openai_relayed_requests_total", counted)
    for protocol in ("http", "grpc"):
        assert 0 == registry.get_sample_value("triton_openai_relayed_requests_running", {"protocol": protocol})


async def test_a_client_that_leaves() -> None:
    """It is counted as such, and gives its place back."""
    async with guarded() as (relays, triton):
        triton.answers.clear()
        registry = CollectorRegistry()
        registry.register(relays.guard.metrics)

        async def seen(protocol: str) -> bool:
            labels = {"protocol": protocol, "group": "inference", "status": "cancelled"}
            return 1 == registry.get_sample_value("triton_openai_relayed_requests_total", labels)

        asking = asyncio.create_task(ask(relays, "/v2/models/m/infer"))
        await until(lambda: came(triton))
        asking.cancel()
        await until(lambda: seen("http"))
        async with grpc.aio.insecure_channel(relays.grpc) as channel:
            made: Any = channel.stream_stream(SERVICE + "ModelStreamInfer")()
            await made.write(infer("m").SerializeToString())
            await until(lambda: called(triton))
            made.cancel()
            await until(lambda: seen("grpc"))


async def called(triton: Triton) -> bool:
    """Return whether a call has come to Triton."""
    return bool(triton.calls)


async def test_slow_heads_and_bad_ones() -> None:
    """Who dribbles is cut off, and what is no HTTP is told so in the form of Triton's errors."""
    async with guarded(limits={"header_timeout": 0.2}) as (relays, _):
        answers = []
        for sent in (b"GET /v2 HTTP/1.1\r\nHost", b"no http\r\n\r\n"):
            reader, writer = await asyncio.open_connection(*relays.http.split(":"))
            writer.write(sent)
            answers.append(await asyncio.wait_for(reader.read(), 20))
            writer.close()

    slow, bad = answers
    assert b"" == slow
    head, _, body = bad.partition(b"\r\n\r\n")
    assert b"400" == head.split()[1]
    assert isinstance(json.loads(body)["error"], str)


async def test_expectations(tmp_path: Path) -> None:
    """A body is asked for when the client is let in, and what nobody knows is ignored; no answer tells versions."""
    path = "/v2/models/m/infer"
    async with with_keys(tmp_path) as (relays, triton):

        async def check(target: str, key: str, status: bytes, expected: str) -> None:
            reader, writer = await asyncio.open_connection(*relays.http.split(":"))
            head = f"POST {target} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nExpect: {expected}\r\n"
            writer.write(f"{head}Content-Length: 2\r\n\r\n".encode())
            if status == b"200":
                if expected == "100-continue":
                    assert b"100" == (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).split()[1]
                writer.write(b"{}")
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            else:
                # Nothing of the body has come, and so the connection ends, a second later.
                answer = await asyncio.wait_for(reader.read(), 20)
                assert b"connection: close" in answer.lower()
                assert b"aiohttp" not in answer
            writer.close()
            assert (status, 1) == (answer.split()[1], answer.count(b"HTTP/1."))
            assert b"text/plain" not in answer

        asked = ((path, "sk-alice", b"200"), (path, "sk-none", b"401"), ("/no", "sk-alice", b"404"))
        await asyncio.gather(*(check(*each, expected) for each in asked for expected in ("100-continue", "a miracle")))
        assert [b"{}", b"{}"] == [body for *_, body in triton.requests]


async def test_transfer_codings() -> None:
    """One that nobody undoes does not reach Triton, to which bodies are sent without."""
    async with guarded() as (relays, triton):
        reader, writer = await asyncio.open_connection(*relays.http.split(":"))
        writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 415 ")
        assert b"Transfer-Encoding" in answer
        assert [] == triton.requests


# TLS


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """An authority; changed files are noticed at once."""
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.0)
    return Authority(tmp_path)


async def test_tls(authority: Authority) -> None:
    """The service's own, over both protocols, also with clients' certificates; a renewed one is used at once."""
    file, client = authority.issue("service"), authority.issue("client")
    tls = msgspec.structs.asdict(TlsSettings(certificate=file, client_ca=authority.file))
    async with guarded(tls=tls) as (relays, _):

        async def over_http(identity: Path | None) -> int:
            connector = aiohttp.TCPConnector(ssl=authority.client(identity))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get(f"https://{relays.http}/v2") as response,
            ):
                return response.status

        roots, pem = authority.file.read_bytes(), client.read_bytes()

        async def over_grpc(identity: bytes | None) -> None:
            credentials = grpc.ssl_channel_credentials(roots, identity, identity)
            async with grpc.aio.secure_channel(relays.grpc, credentials) as channel:
                method: Any = channel.unary_unary(SERVICE + "ModelInfer")
                await method(infer("m").SerializeToString(), timeout=20)

        assert 200 == await over_http(client)
        await over_grpc(pem)
        with pytest.raises(aiohttp.ClientError):
            await over_http(None)
        with pytest.raises(grpc.aio.AioRpcError):
            await over_grpc(None)
        authority.renew(file, "elsewhere")
        with pytest.raises(aiohttp.ClientError):
            await over_http(client)
        with pytest.raises(grpc.aio.AioRpcError):
            await over_grpc(pem)
        authority.renew(file)
        assert 200 == await over_http(client)
        await over_grpc(pem)
