"""The KServe frontends: servers beside the OpenAI one, through which clients speak Triton's own protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from triton_openai.config import Settings
from triton_openai.config.tls import server_context
from triton_openai.errors import ConfigurationError
from triton_openai.serving.connections import HttpServer
from triton_openai.serving.sockets import bound_sockets
from triton_openai.triton.relay.operation import Door


class Frontend(Protocol):
    """One such server, while it runs."""

    scheme: str
    port: int

    async def close(self, grace: float, hurried: asyncio.Event | None = None) -> None:
        """Take nothing new, give what runs *grace* seconds to finish, or until *hurried*, and close."""
        ...


async def start_frontends(
    settings: Settings, *, door: Door, changed: Callable[[], None], reuse_port: bool = False
) -> list[Frontend]:
    """
    Start the frontends that are configured, and return them: the one over HTTP and the one over gRPC.

    *door* decides who is let in; *changed* is called when a client has loaded or unloaded a model. With *reuse_port*
    other processes may listen on the same ports. Raises :class:`ConfigurationError`.
    """
    server, triton = settings.server, settings.triton
    if not server.enable_kserve_frontends:
        return []
    if triton.http_url is None or triton.grpc_url is None:
        missing = "an http(s)://" if triton.http_url is None else "a grpc(s)://"
        raise ConfigurationError(
            f"--enable-kserve-frontends needs both of Triton's addresses, and --triton-url has not {missing} one."
        )
    # Imported here: grpc costs a tenth of a second and threads.
    from triton_openai.triton.connection import ConnectionSettings
    from triton_openai.triton.grpc import GrpcClient
    from triton_openai.triton.relay.grpc import GrpcRelay, server_credentials
    from triton_openai.triton.relay.http import HttpRelay, error_body
    from triton_openai.triton.relay.rules import Rules

    allowed = {*server.kserve_allow, *(["model-repository"] if triton.model_control_mode == "explicit" else ())}
    rules = Rules(allowed)
    connection = ConnectionSettings(connect_timeout=triton.connect_timeout, access=settings.triton_access)
    context, credentials = server_context(settings.tls), server_credentials(settings.tls)

    async def serve(app: web.Application) -> HttpServer:
        http = HttpServer(app, settings.limits, body=error_body, tls=context)
        await http.start()
        for one in bound_sockets(
            server.host,
            server.kserve_http_port,
            backlog=server.backlog,
            advice="Choose another for Triton's HTTP protocol with --kserve-http-port.",
            reuse_port=reuse_port,
        ):
            await http.listen(one, server.backlog)
        return http

    started: list[Frontend] = []
    try:
        over_http = HttpRelay(triton.http_url, rules, connection, door=door, changed=changed)
        started.append(over_http)
        await over_http.start(serve)
        if context is not None:
            over_http.scheme = "https"
        client = GrpcClient(triton.grpc_url, connection)
        over_grpc = GrpcRelay(client, rules, door=door, changed=changed)
        started.append(over_grpc)
        await over_grpc.start(server.host, server.kserve_grpc_port, credentials=credentials, reuse_port=reuse_port)
    except ConfigurationError:
        for frontend in started:
            await frontend.close(0)
        raise
    return started


FRONTENDS: web.AppKey[list[Frontend]] = web.AppKey("frontends", list)
