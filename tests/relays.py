"""Both relays of Triton's own protocol, in front of a Triton or of something that plays one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from tests.proxy_fixture import changed
from triton_openai.access.guard import Guard
from triton_openai.config.tree import ServerSettings, Settings, TritonSettings
from triton_openai.config.worker import Worker
from triton_openai.models.draining import Draining
from triton_openai.telemetry.metrics import Metrics
from triton_openai.triton.relay.frontends import start_frontends

SERVER = ServerSettings(enable_kserve_frontends=True, kserve_http_port=0, kserve_grpc_port=0)


@dataclass(frozen=True)
class Relays:
    """Both frontends, while they run."""

    http: str
    grpc: str
    guard: Guard
    changes: list[None]
    frontends: Sequence[Any]


def relay_guard(settings: Settings) -> Guard:
    """Return the guard that *settings* ask for."""
    return Guard(settings.access, Draining(), metrics=Metrics(Worker()))


@asynccontextmanager
async def relayed(http_url: str, grpc_url: str, **fields: Any) -> AsyncIterator[Relays]:
    """Run both frontends; *fields* are those of parts of the settings."""
    settings = changed(Settings(server=SERVER, triton=TritonSettings(url=(http_url, grpc_url))), **fields)
    guard = relay_guard(settings)
    changes: list[None] = []
    frontends = await start_frontends(settings, guard=guard, changed=lambda: changes.append(None))
    try:
        http, over_grpc = (f"127.0.0.1:{frontend.port}" for frontend in frontends)
        yield Relays(http, over_grpc, guard, changes, frontends)
    finally:
        for frontend in frontends:
            await frontend.close(1.0)


class Upstream(grpc.GenericRpcHandler):
    """A gRPC server that does what a test wants of any method."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Answer any method."""

        async def handle(_: Any, context: Any) -> None:
            await self._answer(context)

        return grpc.stream_stream_rpc_method_handler(handle)
