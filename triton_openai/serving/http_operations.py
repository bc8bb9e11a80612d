"""
Operations over HTTP: a request becomes a call, and the reply of the operation becomes the response.

The routes of the application are made here from the table of operations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler

from triton_openai.access.keys import KEY, ROUTE_GROUPS, RouteGroup
from triton_openai.access.rate_limits import RESERVATION
from triton_openai.config.tree import Settings
from triton_openai.draining import Draining
from triton_openai.errors import ServiceError, UnsupportedMediaType
from triton_openai.operations import STREAMED, BodyKind, Call, LocalFile, Operation, RemoteFile, Whole
from triton_openai.serving.connections import WholeResponse
from triton_openai.serving.forms import HttpForm
from triton_openai.serving.http_output import HttpOutput
from triton_openai.serving.request_body import read_body
from triton_openai.serving.websocket import is_upgrade, serve_websocket
from triton_openai.telemetry.request_record import RECORD, RequestRecord


class HasSettings(Protocol):
    """A running service, whose settings may be replaced."""

    settings: Settings


#: Decodes the body of an operation. The record gets what is ignored of it.
Decode: TypeAlias = Callable[[bytes, Operation, RequestRecord, Settings], Awaitable[Any]]


class HttpOperations:
    """
    Runs operations of *service* for HTTP requests.

    *decode* decodes JSON. *comment* keeps the connection of a silent stream open, and *error_event* renders the last
    event of a stream that failed.
    """

    def __init__(
        self,
        service: HasSettings,
        *,
        decode: Decode,
        draining: Draining,
        comment: bytes,
        error_event: Callable[[ServiceError], bytes],
    ) -> None:
        self._service = service
        self._decode = decode
        self._draining = draining
        self._comment = comment
        self._error_event = error_event

    def add_routes(
        self, app: web.Application, operations: Iterable[Operation], prefixes: Callable[[Operation, str], Sequence[str]]
    ) -> None:
        """Add the routes of *operations* to *app*, each with its group; *prefixes* returns those of a path."""
        groups: dict[web.AbstractRoute, RouteGroup] = {}
        app[ROUTE_GROUPS] = groups
        for operation in operations:
            handler = self.handler(operation)
            for route in operation.routes:
                method, path = route.split()
                methods = [method]
                if method == "GET":
                    methods.append("HEAD")
                for prefix in prefixes(operation, path):
                    resource = app.router.add_resource(prefix + path)
                    for name in methods:
                        groups[resource.add_route(name, handler)] = operation.group

    def handler(self, operation: Operation) -> Handler:
        """Return the handler of aiohttp's requests for *operation*."""
        service = self._service
        run = operation.function
        check = operation.check
        open_session = operation.session
        kind = operation.body_kind

        async def handle(request: web.Request) -> web.StreamResponse:
            record = request[RECORD]
            key = request[KEY]
            settings = service.settings
            if check is not None:
                check(service, key)
            if open_session is not None and is_upgrade(request):
                return await serve_websocket(request, partial(open_session, service), draining=self._draining)
            body = None
            if kind is BodyKind.JSON or (kind is BodyKind.OPTIONAL_JSON and request.can_read_body):
                if request.headers.get("Content-Type") != "application/json":
                    _check_content_type(request)
                body = await self._decode(await read_body(request, settings.limits), operation, record, settings)
            elif kind is not BodyKind.NONE:
                body = await _other_body(request, operation, settings)
            output = HttpOutput(
                request,
                record,
                self._draining,
                heartbeat=settings.server.heartbeat_interval,
                comment=self._comment,
                error_event=self._error_event,
            )
            call = Call(
                operation,
                body,
                key,
                record,
                output,
                headers=request.headers,
                path=request.match_info,
                query=request.query,
                reservation=request.get(RESERVATION),
            )
            reply = await run(service, call)
            if reply is STREAMED:
                assert output.sent is not None, "the operation has sent its stream"
                return output.sent.response
            if isinstance(reply, Whole):
                headers = {"Content-Type": reply.media_type, **reply.headers}
                return WholeResponse(status=reply.status, body=reply.body, headers=headers)
            return await _send_file(request, reply)

        return handle


async def _other_body(request: web.Request, operation: Operation, settings: Settings) -> Any:
    """Return the body of *request*, which *operation* does not take as JSON, or which is not there."""
    if operation.body_kind is BodyKind.FORM:
        return HttpForm(request, settings.limits)
    if operation.body_kind is BodyKind.BYTES:
        return await read_body(request, settings.limits)
    # Nothing has come: the defaults hold.
    kind = operation.hidden_request or operation.request
    assert kind is not None, "an operation that reads JSON has a type"
    return kind()


def _check_content_type(request: web.Request) -> None:
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type and content_type != "application/json" and not content_type.endswith("+json"):
        raise UnsupportedMediaType(f"The body must be JSON (application/json), not '{content_type[:100]}'.")


async def _send_file(request: web.Request, file: LocalFile | RemoteFile) -> web.StreamResponse:
    """Send *file*, or the range of it that the client wants."""
    if isinstance(file, LocalFile):
        return web.FileResponse(file.path, headers={**file.headers, "Content-Type": file.media_type})
    tag = f'"{file.tag}"'
    headers = {**file.headers, "Content-Type": file.media_type, "ETag": tag, "Accept-Ranges": "bytes"}
    response = web.StreamResponse(headers=headers)
    if any(one.value in (file.tag, "*") for one in request.if_none_match or ()):
        response.set_status(304)
        await response.prepare(request)
        return response
    start = 0
    end = file.size
    if "Range" in request.headers and request.headers.get("If-Range", tag) == tag:
        try:
            start, end, _ = request.http_range.indices(file.size)
        except ValueError:
            # It is ignored: it is no range of bytes, or has several.
            pass
        else:
            if start < end:
                response.set_status(206)
                sent = f"{start}-{end - 1}"
            else:
                response.set_status(416)
                sent = "*"
            response.headers["Content-Range"] = f"bytes {sent}/{file.size}"
    response.content_length = max(0, end - start)
    if request.method == "HEAD" or start >= end:
        await response.prepare(request)
        return response
    # Before the head: what fails now is still an error that the client can read.
    piece = await file.read(start, end)
    await response.prepare(request)
    while piece:
        await response.write(piece)
        start += len(piece)
        piece = b""
        if start < end:
            piece = await file.read(start, end)
    return response
