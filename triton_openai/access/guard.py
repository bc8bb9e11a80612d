"""
Access control for the service's own API and for the relays of Triton's protocol: restricted APIs, API keys, limits.

Each request through a relay is logged and counted. Triton's protocol has no tokens, so a key with a limit on tokens
gets no inference through a relay. A gRPC stream does not show which of its requests are complete, so each of them
counts as running until the stream ends.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
import structlog
from aiohttp import web
from multidict import CIMultiDictProxy

from triton_openai.access.keys import KEY_HEADERS, ApiKey, Keys, Restrictions, RouteGroup, identify, sha256
from triton_openai.access.rate_limits import LimitStore, RateLimit, RateLimits, Ticket
from triton_openai.config.files import LOOK_SECONDS
from triton_openai.config.tree import AccessSettings
from triton_openai.errors import (
    InvalidApiKey,
    InvalidRequest,
    KeyNotSufficient,
    ModelNotFound,
    RateLimited,
    ServiceError,
    UpstreamUnavailable,
    holds_key,
    printable,
)
from triton_openai.models.draining import Draining
from triton_openai.tasks import cancel
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.metrics import RELAYED, RELAYING, Metrics
from triton_openai.telemetry.observation import request_id
from triton_openai.triton.relay.rules import Operation

_log = structlog.get_logger("triton_openai.access")
# What gateways' headers begin with: llm-d's, and those of the Gateway API inference extension before it.
_PREFIXES = ("x-llm-d-inference-", "x-gateway-inference-")
_TENANT = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")


def gateway_header(headers: Mapping[str, str], what: Literal["objective", "fairness-id"]) -> str:
    """Return what a trusted gateway's headers say, an empty text if nothing."""
    return next((headers[name] for prefix in _PREFIXES if (name := prefix + what) in headers), "")


class Guard:
    """
    Authenticates clients. *limits* counts the requests of keys; *metrics* counts the requests through relays.

    Raises :class:`ConfigurationError` for keys that cannot be used.
    """

    def __init__(
        self, settings: AccessSettings, draining: Draining, *, metrics: Metrics, limits: LimitStore | None = None
    ) -> None:
        self.draining = draining
        self.metrics = metrics
        self.limits: LimitStore = limits or RateLimits()
        self._take(settings, Keys(settings))

    def _take(self, settings: AccessSettings, keys: Keys) -> None:
        self.keys = keys
        self.restrictions = Restrictions(settings.openai_restricted_api)
        #: ``None`` where the gateway is not trusted.
        self.gateway = settings.gateway if settings.trust_gateway else None

    def authenticate(self, headers: CIMultiDictProxy[str], group: RouteGroup | None) -> ApiKey | None:
        """
        Return the key of a request for *group* (``None``: no such path); ``None`` where no key is asked for.

        Raises :class:`ApiRestricted` and :class:`InvalidApiKey`.
        """
        if group == "page":
            return None
        if group is not None:
            self.restrictions.check(group, headers)
        if group == "health" or (self.keys.ring is None and self.gateway is None):
            return None
        # An unknown path needs a key too, so that clients without a key cannot find out which paths exist.
        return self.identify(headers)

    def identify(self, headers: CIMultiDictProxy[str]) -> ApiKey | None:
        """
        Return the key of a request, ``None`` where none is asked for. Each tenant of a trusted gateway has its own.

        Raises :class:`InvalidApiKey`, and :class:`InvalidRequest` for a name of a tenant that cannot be logged.
        """
        ring, gateway = self.keys.ring, self.gateway
        key = None if ring is None else identify(headers, ring)
        tenant = "" if gateway is None else gateway_header(headers, "fairness-id")
        if gateway is None or not tenant:
            return key
        if not _TENANT.fullmatch(tenant):
            raise InvalidRequest("The gateway's fairness id must have 1 to 128 printable ASCII characters.")
        if holds_key(tenant):
            tenant = sha256(tenant).hex()[:16]
        key = ApiKey(name=tenant) if key is None else msgspec.structs.replace(key, name=f"{key.name}/{tenant}")
        if key.limit.any:
            return key
        limit = RateLimit(**{name: getattr(gateway, name) for name in RateLimit.__struct_fields__})
        return msgspec.structs.replace(key, limit=limit)

    async def admit(self, key: ApiKey) -> Ticket:
        """Count a request of *key* as running; the ticket's ``refusal`` is set if the key's limits forbid it."""
        return Ticket(self.limits, key.name, await self.limits.admit(key.name, key.limit))

    def prepare(self, settings: AccessSettings) -> Callable[[], None]:
        """Return what puts new *settings* of keys and restrictions in force. Raises :class:`ConfigurationError`."""
        return partial(self._take, settings, Keys(settings, again=True))

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Watch the file of keys while *app* runs."""
        watching = asyncio.create_task(self.watch())
        yield
        await cancel(watching)

    async def watch(self) -> None:
        """Read the file of keys again after each change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.keys.look()


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)


class RelayedRequest:
    """
    One request or call through a relay, from its head to its end; *path* is as the client sent it, without its query.

    After :meth:`authorize` the relay reads these attributes: ``upstream_headers`` are added to the request to Triton,
    ``answer_headers`` to the answer. ``hidden`` are the names, in lower case, of the headers with which the client
    authorized itself; they are not sent to Triton. If ``names_models`` is true, the relay calls :meth:`check_models`
    before a request reaches a model; if ``counted`` is true, it calls :meth:`count` for each request of a stream after
    the first. The relay sets ``error`` to the error that the client gets instead of Triton's answer.
    """

    def __init__(
        self,
        guard: Guard,
        protocol: Literal["http", "grpc"],
        path: str,
        headers: CIMultiDictProxy[str],
        *,
        method: str | None = None,
    ) -> None:
        self._guard = guard
        self._protocol = protocol
        self._headers = headers
        self._began = time.monotonic()
        self._operation: Operation | None = None
        self._key: ApiKey | None = None
        self._tickets: list[Ticket] = []
        name = request_id(headers)
        self._fields: dict[str, Any] = {"request_id": name, "protocol": protocol, "path": printable(path, 200)}
        if method is not None:
            self._fields["method"] = printable(method, 32)
        self.upstream_headers: Mapping[str, str] = {"x-request-id": name}
        self.answer_headers: dict[str, str] = {"x-request-id": name}
        self.hidden: Collection[str] = ()
        self.names_models = False
        self.counted = False
        self.error: ServiceError | None = None
        self._running = guard.metrics.child(RELAYING, protocol)
        self._running.inc(1)

    @property
    def closing(self) -> bool:
        """Whether the service is ending, so that a client should not send its next request over this connection."""
        return self._guard.draining.begun

    async def authorize(self, operation: Operation | None) -> None:
        """Check that the client may do *operation*, ``None`` for an unknown one. Raises :class:`ServiceError`."""
        self._operation = operation
        restrictions = self._guard.restrictions
        self.hidden = {*restrictions.header_names, *(KEY_HEADERS if self._guard.keys.ring is not None else ())}
        for group in operation.guards if operation is not None else ():
            restrictions.check(group, self._headers)
        if operation is not None and operation.readiness and self._guard.draining.begun:
            raise UpstreamUnavailable("The service is stopping.", code="service_stopping", retry_after=1)
        if operation is not None and operation.group == "health" and operation.about == "nothing":
            return
        # An unknown operation needs a key too, see `Guard.authenticate`.
        self._key = key = self._guard.identify(self._headers)
        if key is None:
            return
        self._fields["key"] = key.name
        if operation is None:
            return
        if operation.loads:
            key.check_may_manage()
        self.names_models = key.models is not None and operation.about == "model"
        if operation.about == "everything":
            key.check_opens_everything()
        if operation.group == "inference":
            self.counted = key.limit.any
            await self.count()

    def check_models(self, names: Collection[str]) -> None:
        """Check that the client may use the models *names*. Raises :class:`ServiceError`."""
        for name in names:
            if not name:
                raise KeyNotSufficient("This request concerns all models, and the key is limited to certain models.")
            if self._key is not None and not self._key.allows(name):
                raise ModelNotFound(name, hidden=True)

    async def count(self) -> None:
        """Count one more request as running. Raises :class:`ServiceError`."""
        key = self._key
        if key is None or not key.limit.any:
            return
        if key.limit.tokens_per_minute is not None:
            raise KeyNotSufficient(
                f"The key '{key.name}' has a limit on tokens, which Triton's own protocol does not count."
            )
        ticket = await self._guard.admit(key)
        self.answer_headers |= ticket.headers
        if ticket.refusal is not None:
            raise ticket.refusal
        self._tickets.append(ticket)

    def end(self, status: str | None) -> None:
        """Count the request as ended, and log it; *status* is ``None`` if the client disconnected."""
        for ticket in self._tickets:
            ticket.close(0)
        self._running.inc(-1)
        operation, error = self._operation, self.error
        group = "other" if operation is None else operation.group
        self._guard.metrics.child(RELAYED, self._protocol, group, status or "cancelled").inc(1)
        seconds = round(time.monotonic() - self._began, 4)
        fields = {**self._fields, "operation": group, "status": status, "seconds": seconds}
        if error is not None:
            fields["error"] = error.code
        if status is None:
            fields["client_left"] = True
        important = operation is not None and (operation.loads or operation.group == "inference")
        refused = isinstance(error, InvalidApiKey | RateLimited)
        (_log.info if important or refused else _log.debug)("relayed", **fields)
        if error is not None and (error.status >= 500 or error.detail):
            warn(_log, "request refused", error, **fields)
