"""Relays Triton's HTTP protocol: each request is checked, sent on with its headers, and answered piece by piece."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping

import aiohttp
import msgspec
import structlog
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from triton_openai.draining import Draining
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.triton.relay.rules import Rules
from triton_openai.triton.status import cut_off, unreachable

_log = structlog.get_logger(__name__)

# RFC 9110, 7.6.1: what concerns one connection only. An expectation is met here.
_HOP_BY_HOP = frozenset(
    name.lower()
    for name in (
        *(hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION, "Proxy-Connection"),
        *(hdrs.TE, hdrs.TRAILER, hdrs.TRANSFER_ENCODING, hdrs.UPGRADE, hdrs.HOST, hdrs.EXPECT),
    )
)
_NOT_ADDED = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)


class HttpRelay:
    """
    An HTTP server in front of the one of the Triton at *url*. *changed* is called when a client has changed which
    models are loaded.

    Bodies are neither decompressed nor held: a client that reads slowly slows down the reading from Triton, and one
    that leaves closes the connection to it, which cancels the work.
    """

    def __init__(
        self,
        url: str,
        rules: Rules,
        *,
        connect_timeout: float,
        changed: Callable[[], None],
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._base = url.rstrip("/")
        self._rules = rules
        self._changed = changed
        self._connect_timeout = connect_timeout
        self._ssl = ssl_context
        self._draining = Draining()
        #: Where it listens, once started.
        self.scheme = "http"
        self.port = 0
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, *, backlog: int = 128, reuse_port: bool = False) -> None:
        """Listen. Raises :class:`ConfigurationError`."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            auto_decompress=False,
            # Cookies are the clients', and no business of the relay.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, auto_decompress=False, shutdown_timeout=0.5
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=backlog, reuse_port=reuse_port).start()
        except OSError as error:
            await self.close(0)
            raise ConfigurationError(
                f"Cannot listen on {host} port {port} for Triton's HTTP protocol: {error.strerror or error}. "
                "Choose another with --kserve-http-port."
            ) from error
        self.port = self._runner.addresses[0][1]

    async def close(self, grace: float) -> None:
        """Take no new connections, give what runs *grace* seconds to finish, and close."""
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            await self._draining.drain(grace)
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        task = self._draining.enter()
        try:
            return await self._relay(request)
        except ServiceError as error:
            return _refusal(error)
        except asyncio.CancelledError:
            reason = self._draining.reason()
            if reason is None:
                raise
            return _refusal(reason)
        finally:
            self._draining.leave(task)

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        target = request.raw_path
        operation = self._rules.of_path(target)
        assert self._session is not None
        try:
            response = await self._session.request(
                request.method,
                URL(f"{self._base}{target}", encoded=True),
                headers=_end_to_end(request.headers),
                data=request.content if request.body_exists else None,
                skip_auto_headers=_NOT_ADDED,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise unreachable(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise cut_off() from error
        async with response:
            if operation.loads and response.status < 400:
                self._changed()
            return await self._answer(request, response)

    async def _answer(self, request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
        answer = web.StreamResponse(
            status=response.status, reason=response.reason, headers=_end_to_end(response.headers)
        )
        try:
            await answer.prepare(request)
            async for piece in response.content.iter_any():
                await answer.write(piece)
        except (aiohttp.ClientPayloadError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and self._draining.reason() is None:
                raise
            # An answer that is not complete must not look as if it were.
            _log.warning(
                "relayed answer was cut off", path=request.path, reason=str(error) or "the service is stopping"
            )
            if request.transport is not None:
                request.transport.abort()
            return answer
        await answer.write_eof()
        return answer


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get(hdrs.CONNECTION, "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in _HOP_BY_HOP and name.lower() not in named
    )


def _refusal(error: ServiceError) -> web.Response:
    # In the form of Triton's own errors, which its clients read.
    return web.Response(
        status=error.status,
        body=msgspec.json.encode({"error": error.message}),
        content_type="application/json",
        headers=error.headers(),
    )
