"""
The door before the relays of Triton's own protocol: restricted APIs, API keys and their limits, as before the service's
own API, and a line in the log and a count for each request.

Triton's protocol has no tokens, so a key with a limit on them gets no inference here. Nothing says when a request of a
gRPC stream has been answered to its end, so each counts as running until its stream has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, Literal

import structlog
from aiohttp import web
from multidict import CIMultiDictProxy

from triton_openai.access.keys import KEY, KEY_HEADERS, ApiKey, Keys, identify
from triton_openai.access.rate_limits import LimitStore, RateLimits, Ticket, tokens_charged
from triton_openai.access.restrictions import COUNTED, Restrictions, group_of
from triton_openai.config import AccessSettings
from triton_openai.errors import (
    InvalidApiKey,
    KeyNotSufficient,
    ModelNotFound,
    RateLimited,
    ServiceError,
    UpstreamUnavailable,
    printable,
)
from triton_openai.models.draining import Draining
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.metrics import RELAYED, RELAYING, Metrics
from triton_openai.telemetry.observation import OBSERVATION, request_id
from triton_openai.triton.relay.operation import Operation

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_TICKET: web.RequestKey[Ticket] = web.RequestKey("ticket", Ticket)


class Guard:
    """
    Who is let in. *limits* counts the requests of keys.

    Raises :class:`ConfigurationError` for keys that cannot be used.
    """

    def __init__(self, settings: AccessSettings, *, limits: LimitStore | None = None) -> None:
        self.keys = Keys(settings)
        self.restrictions = Restrictions(settings.openai_restricted_api)
        self.limits: LimitStore = limits or RateLimits()

    def prepare(self, settings: AccessSettings) -> Callable[[], None]:
        """Return what puts new *settings* of keys and restrictions in force. Raises :class:`ConfigurationError`."""
        take_keys = self.keys.prepare(settings)

        def take() -> None:
            take_keys()
            self.restrictions.replace(settings.openai_restricted_api)

        return take

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Watch the file of keys while *app* runs."""
        watching = asyncio.create_task(self.keys.watch())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)


@web.middleware
async def let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request through to its handler, or raise :class:`ServiceError`."""
    guard, group = request.app[GUARD], group_of(request)
    if group is not None:
        guard.restrictions.check(group, request.headers)
    ring = guard.keys.ring
    if ring is None or group == "health":
        return await handler(request)
    # A path that is not there needs a key as well: whoever has none learns nothing.
    key = identify(request.headers, ring)
    observation = request[OBSERVATION]
    request[KEY] = key
    observation.key = key.name
    if not key.limit.any or group not in COUNTED:
        return await handler(request)
    decision = await guard.limits.admit(key.name, key.limit)
    ticket = request[_TICKET] = Ticket(guard.limits, key.name, decision)
    if ticket.refusal is not None:
        raise ticket.refusal
    served = cut_short = False
    try:
        response = await handler(request)
        served = True
        return response
    except (asyncio.CancelledError, ConnectionError):
        cut_short = True
        raise
    finally:
        cut_short |= observation.client_left
        counts = key.limit.tokens_per_minute is not None
        ticket.close(tokens_charged(observation, served=served, cut_short=cut_short) if counts else 0)


async def add_limit_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say in every answer, streams and errors included, what the key may still use."""
    ticket = request.get(_TICKET)
    if ticket is not None:
        response.headers.update(ticket.headers)


_log = structlog.get_logger("triton_openai.access")
_TRACE_CONTEXT = frozenset({"traceparent", "tracestate"})
_OTHER = "other"


class RelayDoor:
    """Receives who comes to a relay. *continue_traces* is whether clients may say whose trace a request belongs to."""

    def __init__(
        self, guard: Guard, draining: Draining, *, metrics: Metrics | None = None, continue_traces: bool = True
    ) -> None:
        self.guard = guard
        self.draining = draining
        self.metrics = metrics
        self._hidden = frozenset() if continue_traces else _TRACE_CONTEXT

    def visit(
        self, protocol: Literal["http", "grpc"], method: str, path: str, headers: CIMultiDictProxy[str]
    ) -> RelayVisit:
        """Begin a visit."""
        return RelayVisit(self, protocol, method, path, headers, withheld=self._hidden)


class RelayVisit:
    """One request or call through a relay."""

    def __init__(
        self,
        door: RelayDoor,
        protocol: str,
        method: str,
        path: str,
        headers: CIMultiDictProxy[str],
        *,
        withheld: Collection[str],
    ) -> None:
        self._door = door
        self._guard = door.guard
        # The request
        self._protocol = protocol
        self._headers = headers
        self._began = time.monotonic()
        self._operation: Operation | None = None
        self._key: ApiKey | None = None
        self._tickets: list[Ticket] = []
        self._error: ServiceError | None = None
        name = request_id(headers)
        self._fields: dict[str, Any] = {"request_id": name, "protocol": protocol, "path": printable(path, 200)}
        if method:
            self._fields["method"] = printable(method, 32)
        # For the relay
        self.passed_on: Mapping[str, str] = {"x-request-id": name}
        self.told: dict[str, str] = {"x-request-id": name}
        self.withheld: Collection[str] = withheld
        self.names_models = False
        self.counted = False

    @property
    def last(self) -> bool:
        """Whether the service is ending, so that a client should not send its next request over this connection."""
        return self._door.draining.begun

    async def enter(self, operation: Operation | None) -> None:
        """Let the client in for *operation*. Raises :class:`ServiceError`."""
        self._operation = operation
        self._count_running(1)
        restrictions, ring = self._guard.restrictions, self._guard.keys.ring
        self.withheld = {*self.withheld, *restrictions.header_names, *(KEY_HEADERS if ring is not None else ())}
        for group in operation.guards if operation is not None else ():
            restrictions.check(group, self._headers)
        if operation is not None and operation.readiness and self._door.draining.begun:
            raise UpstreamUnavailable("The service is stopping.", code="service_stopping", retry_after=1)
        if ring is None or (operation is not None and operation.group == "health" and operation.about == "nothing"):
            return
        # What is not there needs a key as well: whoever has none learns nothing.
        self._key = key = identify(self._headers, ring)
        self._fields["key"] = key.name
        if operation is None:
            return
        if operation.manages:
            key.check_may_manage()
        self.names_models = key.models is not None and operation.about == "model"
        if operation.about == "everything":
            key.check_opens_everything()
        if operation.group == "inference":
            self.counted = key.limit.any
            await self.count()

    def use(self, names: Collection[str]) -> None:
        """Let it use a model that may be meant by any of *names*. Raises :class:`ServiceError`."""
        for name in names:
            if not name:
                raise KeyNotSufficient("This is about all models, and the key opens certain models.")
            if self._key is not None and not self._key.allows(name):
                raise ModelNotFound(name, hidden=True)

    async def count(self) -> None:
        """Let a further request in. Raises :class:`ServiceError`."""
        key, limits = self._key, self._guard.limits
        if key is None or not key.limit.any:
            return
        if key.limit.tokens_per_minute is not None:
            raise KeyNotSufficient(
                f"The key '{key.name}' has a limit on tokens, which Triton's own protocol does not count."
            )
        ticket = Ticket(limits, key.name, await limits.admit(key.name, key.limit))
        self.told |= ticket.headers
        if ticket.refusal is not None:
            raise ticket.refusal
        self._tickets.append(ticket)

    def failed(self, error: ServiceError) -> None:
        """Learn what the client is told instead of Triton's answer."""
        self._error = error

    def end(self, status: str | None) -> None:
        """Count the request out, and write its line."""
        for ticket in self._tickets:
            ticket.close(0)
        self._count_running(-1)
        operation, error = self._operation, self._error
        group = _OTHER if operation is None else operation.group
        if self._door.metrics is not None:
            self._door.metrics.child(RELAYED, self._protocol, group, status or "cancelled").inc()
        fields = {
            **self._fields,
            "operation": group,
            "status": status,
            "seconds": round(time.monotonic() - self._began, 4),
        }
        if error is not None:
            fields["error"] = error.code
        if status is None:
            fields["client_left"] = True
        told = operation is not None and (operation.manages or operation.group == "inference")
        refused = isinstance(error, InvalidApiKey | RateLimited)
        (_log.info if told or refused else _log.debug)("relayed", **fields)
        if error is not None and (error.status >= 500 or error.detail):
            warn(_log, "request refused", error, **fields)

    def _count_running(self, change: int) -> None:
        if self._door.metrics is not None:
            self._door.metrics.child(RELAYING, self._protocol).inc(change)


RELAY_DOOR: web.AppKey[RelayDoor] = web.AppKey("relay_door", RelayDoor)
