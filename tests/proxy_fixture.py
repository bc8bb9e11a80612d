"""The service itself, run by aiohttp's test server in front of the session's Triton, over HTTP or over gRPC."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import ClientPayloadError, ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from tests import described
from tests.standins.repository import WITHOUT_TOKENIZER
from tests.triton_fixture import TestTriton
from triton_openai import app as service_app
from triton_openai.app import SERVICE, create_app
from triton_openai.config.tree import ModelSettings, Settings, TritonSettings
from triton_openai.draining import DRAINING
from triton_openai.models.lookup import Models
from triton_openai.serving import http_output
from triton_openai.telemetry.process import LOOP_LAG, LoopLag
from triton_openai.triton.client import TritonClient

TRANSPORTS = ("http", "grpc")
_VOLATILE = re.compile(
    rb'("id":)"(?:chat)?cmpl-[0-9a-f]{32}"|("created":)\d+|("system_fingerprint":)"triton-[\d.]+-[0-9a-f]{8}"'
)


@dataclass(frozen=True)
class Answer:
    """One answer of the service, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body."""
        body = self.json
        assert ["error"] == list(body)
        return dict(body["error"])

    @property
    def events(self) -> list[str]:
        """The data of every server-sent event; comments are left out, and anything else is an error."""
        blocks = self.body.decode().split("\n\n")
        assert "" == blocks.pop(), "the body ends in the middle of an event"
        events = [block for block in blocks if not block.startswith(":")]
        # The one event with a name is the last one of a stream that failed.
        events = [event.removeprefix("event: error\n") for event in events]
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [event.removeprefix("data: ") for event in events]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The JSON objects of a stream that ended well."""
        *chunks, end = self.events
        assert "[DONE]" == end
        return [json.loads(chunk) for chunk in chunks]

    @property
    def normalised(self) -> bytes:
        """The body with what differs from call to call (id and time), and the fingerprint, replaced."""
        return _VOLATILE.sub(lambda found: found[found.lastindex or 0] + b'"*"', self.body)


async def read(response: ClientResponse) -> tuple[bytes, bool]:
    """Return the body, and whether it was broken off."""
    body = bytearray()
    try:
        async for piece in response.content.iter_any():
            body += piece
    except ClientPayloadError:
        return bytes(body), True
    return bytes(body), False


@pytest.fixture(scope="session", autouse=True)
def _quick_ends() -> Iterator[None]:
    """Let broken streams end soon: the tests' clients read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_output, "CLOSE_SECONDS", 0.05)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_starts() -> Iterator[None]:
    """Let services take no request before they have seen Triton's models, also on a machine that stands still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_app, "_FIRST_LOOK_SECONDS", 30)
        yield


_RUNNING: set[Proxy] = set()


class Proxy:
    """
    The service over one transport, and a client for it.

    Every answer is held against the service's description of itself.
    """

    def __init__(self, client: TestClient[Any, Any], models: Models, transport: str = "") -> None:
        self.client = client
        self.models = models
        self.transport = transport

    async def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> Answer:
        """Send *body* to *path* and read the whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        # aiohttp warns of large bodies as bytes: those it sends in one piece.
        async with self.client.post(path, data=io.BytesIO(data), headers=headers) as response:
            return await self._answer("POST", path, response)

    async def get(self, path: str) -> Answer:
        """Fetch *path*."""
        async with self.client.get(path) as response:
            return await self._answer("GET", path, response)

    @staticmethod
    async def _answer(method: str, path: str, response: ClientResponse) -> Answer:
        body, broken = await read(response)
        answer = Answer(response.status, response.headers.copy(), body)
        assert broken == (b'event: error\ndata: {"error":' in body), "broken for no reason, or not broken"
        described.check(method, path, answer.status, answer.headers, answer.body)
        return answer

    async def ready(self) -> None:
        """Wait until the models have been looked up for the first time."""
        await asyncio.wait_for(self.models.fleet.first.wait(), 120)

    async def finds_triton(self) -> bool:
        """Return whether Triton can be reached now."""
        await self.models.fleet.refresh()
        return self.models.fleet.snapshot.reachable


def proxy_settings(triton: TestTriton, transport: str, **overrides: Any) -> Settings:
    """
    Return settings for the session's Triton over one *transport*, or over both (``"both"``).

    Models that name no tokenizer are given one, the engine behind the ensembles is served by its own name too, and
    models of text answer themselves, so that they are what is tested. *overrides* are fields of the Triton part.
    """
    urls = {"http": (triton.http_url,), "grpc": (triton.grpc_url,), "both": (triton.http_url, triton.grpc_url)}
    tokenizer = ModelSettings(tokenizer=str(triton.tokenizer))
    return Settings(
        triton=TritonSettings(url=urls[transport], **{"prefer_token_level": "never", **overrides}),
        models={
            **dict.fromkeys(WITHOUT_TOKENIZER, tokenizer),
            "tensorrt_llm": ModelSettings(adapter="trtllm"),
        },
    )


@asynccontextmanager
async def serving(
    settings: Settings, *, transport: str = "", client: TritonClient | None = None
) -> AsyncIterator[Proxy]:
    """
    Run the service with *settings* on a free port; *client* replaces its connection to Triton.

    It is never too late to take a request: the session's event loop stands still between two tests, and on a busy
    machine long enough to look overloaded.
    """
    app = create_app(settings, client=client)
    app[LOOP_LAG] = LoopLag(app[LOOP_LAG]._report)
    server = TestServer(app)
    # As the service's own server does it.
    await server.start_server(auto_decompress=False)
    async with TestClient(server) as test_client:
        proxy = Proxy(test_client, app[SERVICE].models, transport)
        _RUNNING.add(proxy)
        try:
            yield proxy
        finally:
            _RUNNING.remove(proxy)
            # As at the end of the process: what still runs in the background ends while there are stores.
            await app[DRAINING].drain(0)


@pytest_asyncio.fixture(loop_scope="session")
async def triton_found_again() -> None:
    """Wait until every running service has found its Triton, after that was started again."""

    async def find() -> None:
        while not all([await proxy.finds_triton() for proxy in _RUNNING]):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)

    await asyncio.wait_for(find(), 120)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def proxies(triton: TestTriton) -> AsyncIterator[dict[str, Proxy]]:
    """One running service per transport, shared by the whole run: for tests that run in the session's loop."""
    async with (
        serving(proxy_settings(triton, "http"), transport="http") as over_http,
        serving(proxy_settings(triton, "grpc"), transport="grpc") as over_grpc,
    ):
        await over_http.ready()
        await over_grpc.ready()
        yield {"http": over_http, "grpc": over_grpc}


@pytest.fixture(params=TRANSPORTS)
def proxy(request: pytest.FixtureRequest, proxies: dict[str, Proxy]) -> Proxy:
    """The service over each transport in turn."""
    return proxies[request.param]


def changed(settings: Settings, **parts: Mapping[str, Any]) -> Settings:
    """Return *settings* with fields of its parts replaced: ``changed(settings, api={"strict_parameters": True})``."""
    return msgspec.structs.replace(
        settings,
        **{part: msgspec.structs.replace(getattr(settings, part), **fields) for part, fields in parts.items()},
    )
