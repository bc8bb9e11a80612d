"""
The one middleware: what every request goes through before and after its handler.

It gives the request its id and its record, answers browsers' preflights, authenticates the client and counts it against
its limits, and turns errors into the body that its API has for them. After the first byte of an answer, handlers end
their streams with an error event themselves. An unforeseen error is logged with its traceback; no client sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from triton_openai.access.authorizer import AUTHORIZER
from triton_openai.access.browsers import BROWSER_GUARD
from triton_openai.access.cors import CORS
from triton_openai.access.keys import COUNTED, KEY, NO_KEY, ROUTE_GROUPS, ApiKey
from triton_openai.access.rate_limits import RESERVATION, Reservation, tokens_charged
from triton_openai.draining import DRAINING
from triton_openai.errors import EndpointNotFound, InvalidRequest, MethodNotAllowed, ServiceError
from triton_openai.serving.client_address import CLIENT_ADDRESSES
from triton_openai.telemetry.exposition import EXPOSITION
from triton_openai.telemetry.logging import LOG_FIELDS, warn
from triton_openai.telemetry.request_record import OBSERVERS, RECORD, RequestRecord, request_id

_log = structlog.get_logger(__name__)

#: Returns the status and the body of an error, ``None`` where they are those of OpenAI's API.
ERROR_BODY: web.AppKey[Callable[[web.Request, ServiceError], tuple[int, bytes] | None]] = web.AppKey("error_body")


def add_middleware(app: web.Application, *, reports_load: bool) -> None:
    """Add the middleware to *app*, which has everything that it works with. *reports_load*: answers may report load."""
    app.middlewares.append(_middleware(app))
    app.on_response_prepare.append(_headers(app))
    if reports_load:
        app.on_response_prepare.append(_report_load)


class Observed:
    """Counts the current task as a running request, of which *record* tells, for the block."""

    __slots__ = ("_draining", "_observers", "_record", "_task")

    def __init__(self, app: web.Application, record: RequestRecord) -> None:
        self._draining, self._observers, self._record = app[DRAINING], app[OBSERVERS], record

    def __enter__(self) -> None:
        self._task = self._draining.enter(self._record)
        self._observers.started(self._record)

    def __exit__(self, *_: object) -> None:
        self._draining.leave(self._task)
        self._record.ended = time.monotonic()
        self._observers.ended(self._record)
        self._record.release()


def _middleware(app: web.Application) -> Middleware:
    draining, authorizer, cors, groups = app[DRAINING], app[AUTHORIZER], app[CORS], app[ROUTE_GROUPS]
    addresses = app[CLIENT_ADDRESSES]
    guard = app[BROWSER_GUARD]

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = RequestRecord(
            request_id=request_id(request.headers),
            method=request.method,
            path=request.path,
            request=request,
            client=addresses.address_of(request),
        )
        with Observed(app, record):
            # The task of a request, and with it the context, is its own.
            LOG_FIELDS.set(record.log_fields)
            key: ApiKey | None = None
            reservation: Reservation | None = None
            served = cut_short = False
            response: web.StreamResponse | None = None
            try:
                draining.check()
                # None when there is no such path or method.
                group = groups.get(request.match_info.route)
                # Load balancers ask for the health by names of their own.
                if group != "health" and authorizer.is_open(group):
                    guard.check(request)
                response = cors.preflight(request)
                if response is None:
                    key = authorizer.authenticate(request.headers, group)
                    request[KEY] = key or NO_KEY
                    authorizer.share(key)
                    if key is not None:
                        record.key = key.name
                        record.key_digest = key.digest
                        if key.limit.any and group in COUNTED and request.method == "POST":
                            reservation = request[RESERVATION] = await authorizer.admit(key)
                            record.headers = reservation.headers
                            if reservation.refusal is not None:
                                raise reservation.refusal
                    response = await handler(request)
                    served = True
            except (asyncio.CancelledError, ConnectionError) as error:
                cut_short = True
                reason = draining.reason() if isinstance(error, asyncio.CancelledError) else None
                if reason is None:
                    # The client has left: no response is needed.
                    record.client_left = True
                    raise
                response = _error_response(request, reason)
            except Exception as error:  # noqa: BLE001 - the last resort: logged, and nothing of it reaches the client
                response = _error_response(request, *_reported(request, error))
            finally:
                # A handler that goes on after its answer takes it.
                if reservation is not None and key is not None and request.pop(RESERVATION, None) is not None:
                    cut_short |= record.client_left
                    counts = key.limit.tokens_per_minute is not None
                    reservation.close(tokens_charged(record, served=served, cut_short=cut_short) if counts else 0)
            record.status = response.status
        return response

    return handle


def _reported(request: web.Request, error: Exception) -> tuple[ServiceError, Mapping[str, str]]:
    """Return *error* as the client sees it, and headers for the response."""
    record, method = request[RECORD], request.method
    match error:
        case ServiceError():
            return error, {}
        case web.HTTPNotFound():
            # The route that raised it keeps it, and so its traceback would keep the request.
            error.__traceback__ = None
            return EndpointNotFound(f"There is no endpoint {method} {record.path}."), {}
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowed(f"{record.path} does not take {method}, only {allowed}."), {"Allow": allowed}
        case web.HTTPException():
            return InvalidRequest(error.reason), {}
        case _:
            _log.exception("request failed", request_id=record.request_id, path=record.path)
            return ServiceError(), {}


def _error_response(
    request: web.Request, error: ServiceError, headers: Mapping[str, str] = MappingProxyType({})
) -> web.Response:
    record = request[RECORD]
    record.error = error
    if error.status >= 500 or error.detail:
        fields = {"request_id": record.request_id, "path": record.path}
        warn(_log, "request refused", error, **fields, status=error.status, code=error.code)
    render = request.app.get(ERROR_BODY)
    status, body = (render and render(request, error)) or (error.status, error.envelope())
    headers = {**error.headers(), **headers}
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _headers(app: web.Application) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    draining, authorizer, cors = app[DRAINING], app[AUTHORIZER], app[CORS]

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        """
        Add the headers of every answer, streams and errors included; none has a version.

        While the service is ending, every connection closes after its answer, so that no client sends to a closed one.
        """
        record, headers = request[RECORD], response.headers
        headers["Server"] = "triton-openai"
        headers["x-request-id"] = record.request_id
        headers["openai-processing-ms"] = str(round((time.monotonic() - record.began) * 1000))
        if draining.begun:
            response.force_close()
            headers["Connection"] = "close"
        if record.headers:
            headers.update(record.headers)
        if authorizer.gateway is not None:
            # With it, the gateway finds the session's pod again.
            token = request.headers.get("x-session-token", "")
            if token and token.isascii() and token.isprintable():
                headers["x-session-token"] = token
        cors.add_headers(request, response)

    return add


async def _report_load(request: web.Request, response: web.StreamResponse) -> None:
    """Report the load of the request's model, where the gateway asks for it: ORCA, as vLLM's server does."""
    form, model = request.headers.get("endpoint-load-metrics-format", "").upper(), request[RECORD].model
    if model is None or form not in ("TEXT", "JSON"):
        return
    load = await request.app[EXPOSITION].load(model)
    if form == "JSON":
        report = msgspec.json.encode({"named_metrics": load}).decode()
    else:
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
    if load:
        response.headers["endpoint-load-metrics"] = f"{form} {report}"
