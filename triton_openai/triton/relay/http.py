"""Relays Triton's HTTP protocol: each request is checked, sent on with its headers, and answered piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import structlog
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from triton_openai.errors import MethodNotAllowed, PayloadTooLarge, ServiceError, printable
from triton_openai.models.draining import Draining
from triton_openai.serving.connections import HttpServer
from triton_openai.serving.request_body import ask_for_body
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.relay.operation import Door, Operation, Visit
from triton_openai.triton.relay.rules import Rules
from triton_openai.triton.status import cut_off, unreachable

_log = structlog.get_logger(__name__)

# RFC 9110, 7.6.1: what concerns one connection only.
_HOP_BY_HOP = frozenset(
    name.lower()
    for name in (
        *(hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION, "Proxy-Connection"),
        *(hdrs.TE, hdrs.TRAILER, hdrs.TRANSFER_ENCODING, hdrs.UPGRADE, hdrs.HOST),
    )
)
# Longest body of a load or unload that is read here.
_LOADING_BYTES = 65_536
# Instead of the versions that aiohttp would tell.
_SERVER = "triton-openai"
#: Starts an application and listens for it.
Serve = Callable[[web.Application], Awaitable[HttpServer]]
_NOT_ADDED = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)


class HttpRelay:
    """
    An HTTP server in front of the one of the Triton at *url*. *changed* is called when a client has changed which
    models are loaded, and *door* decides who is let in.

    Bodies are neither decompressed nor held: a client that reads slowly slows down the reading from Triton, and one
    that leaves closes the connection to it, which cancels the work.
    """

    def __init__(
        self,
        url: str,
        rules: Rules,
        connection: ConnectionSettings,
        *,
        door: Door,
        changed: Callable[[], None],
    ) -> None:
        self._base = url.rstrip("/")
        self._rules = rules
        self._door = door
        self._changed = changed
        self._connection = connection
        self._ssl = connection.ssl_context() if url.startswith("https:") else None
        self._draining = Draining()
        #: Where it listens, for who has started it.
        self.scheme = "http"
        self.port = 0
        self._session: aiohttp.ClientSession | None = None
        self._server: HttpServer | None = None

    async def start(self, serve: Serve) -> None:
        """Relay whatever comes to where *serve* listens."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connection.connect_timeout),
            auto_decompress=False,
            # Cookies are the clients', and no business of the relay.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        app = web.Application(client_max_size=_LOADING_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._server = await serve(app)
        self.port = self._server.port

    async def close(self, grace: float, hurried: asyncio.Event | None = None) -> None:
        """Take no new connections, give what runs *grace* seconds to finish, or until *hurried*, and close."""
        if self._server is not None:
            await self._server.stop_listening()
            self._server.close_idle()
            await self._draining.drain(grace, hurried)
            await self._server.close()
        if self._session is not None:
            await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = request.raw_path
        visit = self._door.visit("http", request.method, target.partition("?")[0], request.headers)
        task = self._draining.enter()
        status: str | None = None
        try:
            answer = await self._relay(request, visit)
            status = str(answer.status)
        except ServiceError as error:
            answer = _refusal(error, visit)
            status = str(answer.status)
        except asyncio.CancelledError:
            reason = self._draining.reason()
            if reason is None:
                raise
            answer = _refusal(reason, visit)
            status = str(answer.status)
        finally:
            self._draining.leave(task)
            visit.end(status)
        return answer

    def _headers(self, given: Mapping[str, str], visit: Visit) -> CIMultiDict[str]:
        """Return the client's headers, without those that are not for Triton, and what the service is let in with."""
        headers = CIMultiDict(
            (name, value) for name, value in _end_to_end(given).items() if name.lower() not in visit.withheld
        )
        headers.update(visit.passed_on)
        headers.update(self._connection.headers())
        return headers

    async def _relay(self, request: web.Request, visit: Visit) -> web.StreamResponse:
        target = request.raw_path
        operation, names = self._rules.of_path(target)
        await visit.enter(operation)
        operation = self._rules.check(operation, f"endpoint {target.partition('?')[0]}", names)
        if request.method == hdrs.METH_HEAD:
            # Triton's own answer to it has a body, which would be taken for what follows it.
            raise MethodNotAllowed("Triton's endpoints do not take HEAD.")
        if visit.names_models:
            visit.use(names)
        headers = self._headers(request.headers, visit)
        data = await self._body(request, operation, headers)
        assert self._session is not None
        try:
            response = await self._session.request(
                request.method,
                URL(f"{self._base}{target}", encoded=True),
                headers=headers,
                data=data,
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
            return await self._answer(request, response, visit)

    async def _body(self, request: web.Request, operation: Operation, headers: CIMultiDict[str]) -> Any:
        """Return what is sent on as the body, and fit *headers* to it."""
        if not request.body_exists:
            return None
        ask_for_body(request)
        if not operation.loads or self._rules.overrides:
            return request.content
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise PayloadTooLarge("The body of a load or unload is too large for what it may say.") from error
        for name in (hdrs.CONTENT_LENGTH, hdrs.CONTENT_ENCODING):
            headers.popall(name, None)
        return self._rules.loading_body(body)

    async def _answer(self, request: web.Request, response: aiohttp.ClientResponse, visit: Visit) -> web.StreamResponse:
        headers = _end_to_end(response.headers)
        headers.update(visit.told)
        headers.setdefault(hdrs.SERVER, _SERVER)
        answer = web.StreamResponse(status=response.status, reason=response.reason, headers=headers)
        if visit.last or not request.content.is_eof():
            answer.force_close()
        try:
            await answer.prepare(request)
            async for piece in response.content.iter_any():
                await answer.write(piece)
        except (aiohttp.ClientPayloadError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and self._draining.reason() is None:
                raise
            # An answer that is not complete must not look as if it were.
            visit.failed(cut_off())
            _log.warning(
                "relayed answer was cut off",
                path=printable(request.path, 200),
                reason=str(error) or "the service is stopping",
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


def _refusal(error: ServiceError, visit: Visit) -> web.Response:
    visit.failed(error)
    refusal = web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers={hdrs.SERVER: _SERVER, **visit.told, **error.headers()},
    )
    if visit.last:
        refusal.force_close()
    return refusal


def error_body(error: ServiceError) -> bytes:
    """Return *error* in the form of Triton's own errors, which its clients read."""
    return msgspec.json.encode({"error": error.message})
