"""Relays Triton's HTTP protocol: checks each request, sends it on, and streams the answer back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

import aiohttp
import msgspec
import structlog
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from triton_openai.access.guard import Guard, RelayedRequest
from triton_openai.config.tls import server_context
from triton_openai.config.tree import Settings
from triton_openai.errors import MethodNotAllowed, PayloadTooLarge, ServiceError, printable
from triton_openai.models.draining import Draining
from triton_openai.serving.request_body import ask_for_body
from triton_openai.serving.server import HttpServer, bound_sockets
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.relay.rules import Operation, check_operation, checked_load_body, operation_of_path
from triton_openai.triton.status import cut_off, unreachable

_log = structlog.get_logger(__name__)

# Headers of one connection only (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host",
))  # fmt: skip
# Longest body of a load or unload that is read here.
_LOADING_BYTES = 65_536
# aiohttp's own value has versions in it.
_SERVER = "triton-openai"
_NOT_ADDED = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)


class HttpRelay:
    """
    An HTTP server in front of the Triton at *url*. *guard* authorizes clients. *changed* is called after they loaded or
    unloaded a model.

    Bodies are neither decompressed nor buffered. A client that reads slowly slows down the reading from Triton. If it
    disconnects, the relay closes the connection to Triton, which cancels the work.
    """

    def __init__(self, url: str, settings: Settings, guard: Guard, changed: Callable[[], None]) -> None:
        self._base, self._settings = url, settings.server
        self._connection = ConnectionSettings(access=settings.triton_access)
        self._guard, self._changed = guard, changed
        self._may_load = settings.triton.model_control_mode == "explicit"
        self._draining = Draining()
        tls = server_context(settings.tls)
        #: The scheme and the port of its address, once started.
        self.scheme = "http" if tls is None else "https"
        self.port = 0
        app = web.Application(client_max_size=_LOADING_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.cleanup_ctx.append(self._connect)
        self._server = HttpServer(app, settings.limits, body=error_body, tls=tls)

    async def start(self, *, reuse_port: bool) -> None:
        """Listen. Raises :class:`ConfigurationError`."""
        host, port = self._settings.host, self._settings.kserve_http_port
        advice = "Choose another for Triton's HTTP protocol with --kserve-http-port."
        sockets = bound_sockets(host, port, advice=advice, reuse_port=reuse_port)
        self.port = sockets[0].getsockname()[1]
        await self._server.start()
        for one in sockets:
            await self._server.listen(one)

    async def close(self, grace: float, hurried: asyncio.Event | None = None) -> None:
        """Accept no new connections, give running requests *grace* seconds, or until *hurried*, and close."""
        await self._server.stop_listening()
        self._server.close_idle()
        await self._draining.drain(grace, hurried)
        await self._server.close()

    async def _connect(self, app: web.Application) -> AsyncIterator[None]:
        tls = self._connection.ssl_context() if self._base.startswith("https:") else True
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connection.connect_timeout),
            auto_decompress=False,
            # Cookies belong to the clients.
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as self._session:
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        relayed = RelayedRequest(self._guard, "http", path, request.headers, method=request.method)
        task = self._draining.enter()
        answer: web.StreamResponse | None = None
        try:
            answer = await self._relay(request, path, relayed)
        except ServiceError as error:
            answer = _refusal(error, relayed)
        except asyncio.CancelledError:
            reason = self._draining.reason()
            if reason is None:
                raise
            answer = _refusal(reason, relayed)
        finally:
            self._draining.leave(task)
            relayed.end(None if answer is None else str(answer.status))
        return answer

    async def _relay(self, request: web.Request, path: str, relayed: RelayedRequest) -> web.StreamResponse:
        operation, names = operation_of_path(path)
        await relayed.authorize(operation)
        operation = check_operation(operation, f"endpoint {path}", names, may_load=self._may_load)
        if request.method == hdrs.METH_HEAD:
            # Triton would send a body, which would be read as the next answer.
            raise MethodNotAllowed("Triton's endpoints do not take HEAD.")
        if relayed.names_models:
            relayed.check_models(names)
        headers = _end_to_end(request.headers, relayed.hidden)
        headers.update(relayed.upstream_headers)
        headers.update(self._connection.headers())
        url, data = URL(f"{self._base}{request.raw_path}", encoded=True), await self._body(request, operation, headers)
        fixed: dict[str, Any] = {"skip_auto_headers": _NOT_ADDED, "allow_redirects": False}
        try:
            response = await self._session.request(request.method, url, headers=headers, data=data, **fixed)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise unreachable(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise cut_off() from error
        async with response:
            if operation.loads and response.status < 400:
                self._changed()
            return await self._answer(request, response, relayed)

    async def _body(self, request: web.Request, operation: Operation, headers: CIMultiDict[str]) -> Any:
        """Return the body to send on, and adapt *headers* to it."""
        if not request.body_exists:
            return None
        ask_for_body(request)
        if not operation.loads:
            return request.content
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise PayloadTooLarge("The body of a load or unload is too large.") from error
        for name in (hdrs.CONTENT_LENGTH, hdrs.CONTENT_ENCODING):
            headers.popall(name, None)
        return checked_load_body(body)

    async def _answer(
        self, request: web.Request, response: aiohttp.ClientResponse, relayed: RelayedRequest
    ) -> web.StreamResponse:
        headers = _end_to_end(response.headers)
        headers.update(relayed.answer_headers)
        headers.setdefault(hdrs.SERVER, _SERVER)
        answer = web.StreamResponse(status=response.status, reason=response.reason, headers=headers)
        if relayed.closing or not request.content.is_eof():
            answer.force_close()
        try:
            await answer.prepare(request)
            async for piece in response.content.iter_any():
                await answer.write(piece)
        except (aiohttp.ClientPayloadError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and self._draining.reason() is None:
                raise
            # An incomplete answer must not look complete.
            relayed.error = cut_off()
            reason = str(error) or "the service is stopping"
            _log.warning("relayed answer was cut off", path=printable(request.path, 200), reason=reason)
            if request.transport is not None:
                request.transport.abort()
            return answer
        await answer.write_eof()
        return answer


def _end_to_end(headers: Mapping[str, str], hidden: Collection[str] = ()) -> CIMultiDict[str]:
    """Return *headers* without those of one connection and those that are *hidden*."""
    named = {name.strip().lower() for name in headers.get(hdrs.CONNECTION, "").split(",")}
    left_out = {*_HOP_BY_HOP, *named, *hidden}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


def _refusal(error: ServiceError, relayed: RelayedRequest) -> web.Response:
    relayed.error = error
    refusal = web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers={hdrs.SERVER: _SERVER, **relayed.answer_headers, **error.headers()},
    )
    if relayed.closing:
        refusal.force_close()
    return refusal


def error_body(error: ServiceError) -> bytes:
    """Return *error* in the form of Triton's own errors, which its clients read."""
    return msgspec.json.encode({"error": error.message})
