"""
Middlewares: the request id, its record, and the last line of the error policy.

Before the first byte of an answer an error is a JSON body with its own status; after it, the handlers themselves end
their streams with an error event. What no rule knows is logged with its traceback and answered with a sentence that
gives nothing away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from triton_openai.errors import EndpointNotFound, InvalidRequest, MethodNotAllowed, PayloadTooLarge, ServiceError
from triton_openai.models.draining import DRAINING
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.observation import OBSERVATION, OBSERVERS, REQUEST_ID, UPSTREAM, Observation, request_id

_log = structlog.get_logger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id and its record, and tell the observers of its beginning and its end."""
    name = request_id(request.headers)
    request[REQUEST_ID] = name
    observation = request[OBSERVATION] = Observation(
        request_id=name, method=request.method, path=request.path, request=request
    )
    observers = request.app[OBSERVERS]
    draining = request.app[DRAINING]
    task = draining.enter()
    observers.started(observation)
    # In every line that is written on behalf of this request, by work that outlives it too.
    bound = structlog.contextvars.bind_contextvars(**observation.log_fields)
    upstream = UPSTREAM.set(observation.upstream)
    try:
        response = await handler(request)
        observation.status = response.status
    except (asyncio.CancelledError, ConnectionError):
        observation.client_left = True
        raise
    finally:
        draining.leave(task)
        observation.ended = time.monotonic()
        observers.ended(observation)
        observation.release()
        UPSTREAM.reset(upstream)
        structlog.contextvars.reset_contextvars(**bound)
    return response


@web.middleware
async def envelope_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into OpenAI's envelope."""
    try:
        return await handler(request)
    except ServiceError as error:
        return _answer(request, error)
    except web.HTTPNotFound as error:
        # The route that raised it keeps it, and so its traceback would keep the request.
        error.__traceback__ = None
        return _answer(request, EndpointNotFound(f"There is no endpoint {request.method} {request.path[:200]}."))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        refusal = MethodNotAllowed(f"{request.path[:200]} does not take {request.method}, only {allowed}.")
        return _answer(request, refusal, {"Allow": allowed})
    except web.HTTPRequestEntityTooLarge:
        return _answer(
            request, PayloadTooLarge(f"The request's body is larger than the limit of {request.client_max_size} bytes.")
        )
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _answer(request, InvalidRequest(error.reason))
    except asyncio.CancelledError:
        reason = request.app[DRAINING].reason()
        if reason is None:
            raise
        return _answer(request, reason)
    except ConnectionError:
        # The client left while it was being answered: there is nobody to tell.
        raise
    except Exception:  # noqa: BLE001 - the last resort: logged, and nothing of it reaches the client
        _log.exception("request failed", request_id=request[REQUEST_ID], path=request[OBSERVATION].path)
        return _answer(request, ServiceError("The service failed to answer the request."))


def _answer(request: web.Request, error: ServiceError, headers: dict[str, str] | None = None) -> web.Response:
    request[OBSERVATION].error = error
    if error.status >= 500 or error.detail:
        fields = {"request_id": request[REQUEST_ID], "path": request[OBSERVATION].path}
        warn(_log, "request refused", error, **fields, status=error.status, code=error.code)
    return web.Response(
        status=error.status,
        body=error.envelope(),
        content_type="application/json",
        headers={**error.headers(), **(headers or {})},
    )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """
    Put the request's id into the headers of every answer, streams and errors included, and no versions of anything.

    While the service is ending, every connection closes after its answer, so that no client sends to one that is gone.
    """
    response.headers["Server"] = "triton-openai"
    if request.app[DRAINING].begun:
        response.force_close()
        response.headers["Connection"] = "close"
    name = request.get(REQUEST_ID)
    if name is not None:
        response.headers["x-request-id"] = name
