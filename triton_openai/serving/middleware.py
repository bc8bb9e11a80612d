"""
The one middleware: what every request goes through before and after its handler.

It gives the request its id and its record, answers browsers' preflights, authenticates the client and counts it against
its limits, and turns errors into the body that its API has for them. After the first byte of an answer, the error is
the last event of its stream. An unforeseen error is logged with its traceback; no client sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from triton_openai.access.authorizer import AUTHORIZER
from triton_openai.access.browsers import BROWSER_GUARD
from triton_openai.access.cors import CORS
from triton_openai.access.keys import INFERENCE_GROUPS, KEY, ROUTE_GROUPS
from triton_openai.access.rate_limits import RESERVATION
from triton_openai.draining import DRAINING
from triton_openai.errors import EndpointNotFound, InvalidRequest, MethodNotAllowed, ServiceError
from triton_openai.serving.client_address import CLIENT_ADDRESSES
from triton_openai.serving.execution import Executor
from triton_openai.telemetry.exposition import EXPOSITION
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.request_record import RECORD, RequestRecord, request_id

_log = structlog.get_logger(__name__)

#: Returns the status and the body of an error for a request, by its path, headers and record; ``None`` where they are
#: those of OpenAI's API.
ErrorBody: TypeAlias = Callable[[str, Mapping[str, str], RequestRecord, ServiceError], tuple[int, bytes] | None]
ERROR_BODY: web.AppKey[ErrorBody] = web.AppKey("error_body")
EXECUTOR: web.AppKey[Executor] = web.AppKey("executor", Executor)


def add_middleware(app: web.Application, *, reports_load: bool) -> None:
    """Add the middleware to *app*, which has everything that it works with. *reports_load*: answers may report load."""
    app.middlewares.append(_middleware(app))
    app.on_response_prepare.append(_headers(app))
    if reports_load:
        app.on_response_prepare.append(_report_load)


def _middleware(app: web.Application) -> Middleware:
    executor = app[EXECUTOR]
    authorizer = app[AUTHORIZER]
    cors = app[CORS]
    groups = app[ROUTE_GROUPS]
    addresses = app[CLIENT_ADDRESSES]
    guard = app[BROWSER_GUARD]
    draining = executor.draining

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = RequestRecord(
            request_id=request_id(request.headers),
            method=request.method,
            path=request.path,
            request=request,
            client=addresses.address_of(request),
        )
        request[RECORD] = record

        async def work() -> web.StreamResponse:
            draining.check()
            # None when there is no such path or method.
            group = groups.get(request.match_info.route)
            # Load balancers ask for the health by names of their own.
            if group != "health" and authorizer.is_open(group):
                guard.check(request)
            response: web.StreamResponse | None = None
            if cors.enabled:
                response = cors.preflight(request)
            if response is None:
                counted = group in INFERENCE_GROUPS and request.method == "POST"
                authorized = await authorizer.authorize(request.headers, group, record, counted=counted)
                request[KEY] = authorized.key
                if authorized.reservation is not None:
                    request[RESERVATION] = authorized.reservation
                try:
                    response = await handler(request)
                except web.HTTPException as error:
                    raise _service_error(request, error) from None
            record.status = response.status
            return response

        async def failed(error: ServiceError) -> web.StreamResponse:
            response = _error_response(request, error)
            record.status = response.status
            return response

        return await executor.run(record, work, failed=failed, reservation=partial(request.get, RESERVATION))

    return handle


def _service_error(request: web.Request, error: web.HTTPException) -> ServiceError:
    """Return what clients get in place of an *error* of aiohttp's."""
    # The route that raised it keeps it, and so its traceback would keep the request.
    error.__traceback__ = None
    path = request[RECORD].path
    if isinstance(error, web.HTTPNotFound):
        return EndpointNotFound(f"There is no endpoint {request.method} {path}.")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"{path} does not take {request.method}, only {allowed}.", allowed=allowed)
    return InvalidRequest(error.reason)


def _error_response(request: web.Request, error: ServiceError) -> web.Response:
    record = request[RECORD]
    if error.status >= 500 or error.detail or error.warns:
        fields = {"request_id": record.request_id, "path": record.path}
        warn(_log, "request refused", error, **fields, status=error.status, code=error.code)
    render = request.app.get(ERROR_BODY)
    rendered = None
    if render is not None:
        rendered = render(request.path, request.headers, record, error)
    status, body = rendered or (error.status, error.envelope())
    return web.Response(status=status, body=body, content_type="application/json", headers=error.headers())


def _headers(app: web.Application) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    draining = app[DRAINING]
    authorizer = app[AUTHORIZER]
    cors = app[CORS]

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        """
        Add the headers of every answer, streams and errors included; none has a version.

        While the service stops, every connection closes after its answer, so that no client sends to a closed one.
        """
        record = request[RECORD]
        headers = response.headers
        headers["Server"] = "triton-openai"
        headers.update(record.answer_headers())
        if draining.begun:
            response.force_close()
            headers["Connection"] = "close"
        if authorizer.gateway is not None:
            # With it, the gateway finds the session's pod again.
            token = request.headers.get("x-session-token", "")
            if token and token.isascii() and token.isprintable():
                headers["x-session-token"] = token
        if cors.enabled:
            cors.add_headers(request, response)

    return add


async def _report_load(request: web.Request, response: web.StreamResponse) -> None:
    """Report the load of the request's model, where the gateway asks for it: ORCA, as vLLM's server does."""
    form = request.headers.get("endpoint-load-metrics-format", "").upper()
    model = request[RECORD].model
    if model is None or form not in ("TEXT", "JSON"):
        return
    load = await request.app[EXPOSITION].load(model)
    if form == "JSON":
        report = msgspec.json.encode({"named_metrics": load}).decode()
    else:
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
    if load:
        response.headers["endpoint-load-metrics"] = f"{form} {report}"
