"""The KServe frontends: servers beside the OpenAI one, through which clients speak Triton's own protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from triton_openai.access.guard import Guard
from triton_openai.config.tls import server_context
from triton_openai.config.tree import Settings
from triton_openai.errors import ConfigurationError
from triton_openai.serving.server import bound_sockets

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
    from triton_openai.triton.connection import ConnectionSettings
    from triton_openai.triton.grpc import GrpcClient
    from triton_openai.triton.relay.grpc import GrpcRelay, server_credentials
    from triton_openai.triton.relay.http import HttpRelay

    may_load = triton.model_control_mode == "explicit"
    connection = ConnectionSettings(access=settings.triton_access)
    context, credentials = server_context(settings.tls), server_credentials(settings.tls)
    over_http = HttpRelay(
        triton.http_url,
        connection,
        guard=guard,
        may_load=may_load,
        changed=changed,
        limits=settings.limits,
        tls=context,
    )
    over_grpc = GrpcRelay(GrpcClient(triton.grpc_url, connection), guard=guard, may_load=may_load, changed=changed)
    try:
        sockets = bound_sockets(
            server.host,
            server.kserve_http_port,
            advice="Choose another for Triton's HTTP protocol with --kserve-http-port.",
            reuse_port=reuse_port,
        )
        await over_http.start(sockets)
        await over_grpc.start(server.host, server.kserve_grpc_port, credentials=credentials, reuse_port=reuse_port)
    except ConfigurationError:
        await over_http.close(0)
        await over_grpc.close(0)
        raise
    return [over_http, over_grpc]


FRONTENDS: web.AppKey[list[Frontend]] = web.AppKey("frontends", list)
