"""The KServe frontends: servers beside the OpenAI one, through which clients speak Triton's own protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from triton_openai.access.guard import Guard
from triton_openai.config.tree import Settings
from triton_openai.errors import ConfigurationError

if TYPE_CHECKING:
    from triton_openai.triton.relay.grpc import GrpcRelay
    from triton_openai.triton.relay.http import HttpRelay

    Frontend = HttpRelay | GrpcRelay


async def start_frontends(
    settings: Settings, *, guard: Guard, changed: Callable[[], None], reuse_port: bool = False
) -> list[Frontend]:
    """
    Start the frontends that are configured, and return them: the one over HTTP and the one over gRPC.

    *guard* authorizes clients; *changed* is called when one has loaded or unloaded a model. With *reuse_port* other
    processes may listen on the same ports. Raises :class:`ConfigurationError`.
    """
    server, triton = settings.server, settings.triton
    if not server.enable_kserve_frontends:
        return []
    if triton.http_url is None or triton.grpc_url is None:
        raise ConfigurationError(
            "--enable-kserve-frontends needs both of Triton's addresses in --triton-url, http(s):// and grpc(s)://."
        )
    # Imported here: grpc costs a tenth of a second and threads.
    from triton_openai.triton.relay.grpc import GrpcRelay
    from triton_openai.triton.relay.http import HttpRelay

    frontends: list[Frontend] = [
        HttpRelay(triton.http_url, settings, guard, changed),
        GrpcRelay(triton.grpc_url, settings, guard, changed),
    ]
    try:
        for frontend in frontends:
            await frontend.start(reuse_port=reuse_port)
    except ConfigurationError:
        for frontend in frontends:
            await frontend.close(0)
        raise
    return frontends


FRONTENDS: web.AppKey[list[Frontend]] = web.AppKey("frontends", list)
