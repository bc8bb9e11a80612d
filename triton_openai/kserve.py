"""The KServe frontends: servers beside the OpenAI one, through which clients speak Triton's own protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from triton_openai.config import Settings
from triton_openai.errors import ConfigurationError


class Frontend(Protocol):
    """One such server, while it runs."""

    scheme: str
    port: int

    async def close(self, grace: float) -> None:
        """Take nothing new, give what runs *grace* seconds to finish, and close."""
        ...


async def start_frontends(
    settings: Settings, *, changed: Callable[[], None], reuse_port: bool = False
) -> list[Frontend]:
    """
    Start the frontends that are configured, and return them: the one over HTTP and the one over gRPC.

    *changed* is called when a client has loaded or unloaded a model. With *reuse_port* other processes may listen on
    the same ports. Raises :class:`ConfigurationError`.
    """
    server, triton = settings.server, settings.triton
    if not server.enable_kserve_frontends:
        return []
    access = settings.access
    if access.api_key or access.api_keys_file is not None or access.openai_restricted_api:
        raise ConfigurationError(
            "--enable-kserve-frontends cannot be used together with API keys or restricted APIs: Triton's own protocol "
            "has neither, so it would be a way around them."
        )
    if triton.http_url is None or triton.grpc_url is None:
        missing = "an http(s)://" if triton.http_url is None else "a grpc(s)://"
        raise ConfigurationError(
            f"--enable-kserve-frontends needs both of Triton's addresses, and --triton-url has not {missing} one."
        )
    # Imported here: grpc costs a tenth of a second and threads.
    from triton_openai.triton.grpc import GrpcClient
    from triton_openai.triton.relay.grpc import GrpcRelay
    from triton_openai.triton.relay.http import HttpRelay
    from triton_openai.triton.relay.rules import Rules

    allowed = {*server.kserve_allow, *(["model-repository"] if triton.model_control_mode == "explicit" else ())}
    rules = Rules(allowed)
    started: list[Frontend] = []
    try:
        over_http = HttpRelay(triton.http_url, rules, connect_timeout=triton.connect_timeout, changed=changed)
        await over_http.start(server.host, server.kserve_http_port, backlog=server.backlog, reuse_port=reuse_port)
        started.append(over_http)
        client = GrpcClient(triton.grpc_url, connect_timeout=triton.connect_timeout)
        over_grpc = GrpcRelay(client, rules, changed=changed)
        await over_grpc.start(server.host, server.kserve_grpc_port, reuse_port=reuse_port)
        started.append(over_grpc)
    except ConfigurationError:
        for frontend in started:
            await frontend.close(0)
        raise
    return started


FRONTENDS: web.AppKey[list[Frontend]] = web.AppKey("frontends", list)
