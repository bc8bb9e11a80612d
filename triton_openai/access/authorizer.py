"""Access control: restricted APIs, API keys and their limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import structlog
from aiohttp import web
from msgspec.structs import replace
from multidict import CIMultiDictProxy

from triton_openai.access.keys import NO_KEY, ApiKey, Keys, Restrictions, RouteGroup, identify, sha256
from triton_openai.access.rate_limits import LimitStore, RateLimit, RateLimits, Reservation
from triton_openai.config.files import LOOK_SECONDS
from triton_openai.config.tree import AccessSettings, GatewaySettings
from triton_openai.draining import Draining
from triton_openai.errors import InvalidRequest, holds_key
from triton_openai.shares import SHARING_KEY
from triton_openai.tasks import cancel
from triton_openai.telemetry.request_record import RequestRecord

_log = structlog.get_logger("triton_openai.access")
# The prefixes of gateways' headers: llm-d's, and those of the Gateway API inference extension before it.
_PREFIXES = ("x-llm-d-inference-", "x-gateway-inference-")
_TENANT = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")


def gateway_header(headers: Mapping[str, str], what: Literal["objective", "fairness-id"]) -> str:
    """Return the value of a trusted gateway's header; an empty text if there is none."""
    for prefix in _PREFIXES:
        if prefix + what in headers:
            return headers[prefix + what]
    return ""


class AuthorizedCall(NamedTuple):
    """A call that may run, with its key."""

    #: ``NO_KEY`` where no key is asked for.
    key: ApiKey
    #: What the call uses of the key's limits; ``None`` where none of them holds.
    reservation: Reservation | None


class Authorizer:
    """
    Authenticates clients. *limits* counts the requests of keys, and *draining* ends those of keys that are removed.
    One of the workers *warns* about files that others can read.

    Raises :class:`ConfigurationError` for keys that cannot be used.
    """

    def __init__(
        self,
        settings: AccessSettings,
        *,
        limits: LimitStore | None = None,
        draining: Draining | None = None,
        warns: bool = True,
    ) -> None:
        self.limits: LimitStore = limits or RateLimits()
        self._draining = draining or Draining()
        self._may_warn = warns
        self._warns = False
        self._take(settings, Keys(settings))

    def _take(self, settings: AccessSettings, keys: Keys) -> None:
        self.keys = keys
        self.restrictions = Restrictions(settings.openai_restricted_api)
        #: ``None`` if the gateway is not trusted.
        self.gateway: GatewaySettings | None = None
        if settings.trust_gateway:
            self.gateway = settings.gateway
        self._keys_changed()

    def is_open(self, group: RouteGroup | None) -> bool:
        """Return whether *group* (``None``: no such path) asks for neither a key nor the header of a restriction."""
        return self.keys.ring is None and group not in self.restrictions.groups

    def authenticate(self, headers: CIMultiDictProxy[str], group: RouteGroup | None) -> ApiKey | None:
        """
        Return the key of a request for *group* (``None``: no such path); ``None`` where no key is asked for.

        Raises :class:`ApiRestricted` and :class:`InvalidApiKey`.
        """
        if group == "page":
            return None
        if group is not None and group in self.restrictions.groups:
            self.restrictions.check(group, headers)
        if group == "health" or (self.keys.ring is None and self.gateway is None):
            return None
        # An unknown path needs a key too, so that clients without a key cannot find out which paths exist.
        key = self.identify(headers)
        if key is not None and group == "batch":
            key.check_may_batch()
        return key

    def identify(self, headers: CIMultiDictProxy[str]) -> ApiKey | None:
        """
        Return the key of a request, ``None`` where none is asked for. Each tenant of a trusted gateway has its own.

        Raises :class:`InvalidApiKey`, and :class:`InvalidRequest` for a name of a tenant that cannot be logged.
        """
        key = None
        if self.keys.ring is not None:
            key = identify(headers, self.keys.ring)
        gateway = self.gateway
        if gateway is None:
            return key
        tenant = gateway_header(headers, "fairness-id")
        if not tenant:
            return key
        if not _TENANT.fullmatch(tenant):
            raise InvalidRequest("The gateway's fairness id must have 1 to 128 printable ASCII characters.")
        if holds_key(tenant):
            tenant = sha256(tenant).hex()[:16]
        return _of_tenant(key, tenant, gateway)

    def key_named(self, name: str) -> ApiKey | None:
        """
        Return the key called *name*, or that of a tenant of the gateway; ``None`` if it is not there any more.

        It has the rights and limits that a request has with it.
        """
        ring = self.keys.ring
        gateway = self.gateway
        if ring is None:
            if not name:
                return NO_KEY
            if gateway is None:
                return None
            return _of_tenant(None, name, gateway)
        # No key has a slash in its name.
        base, slash, tenant = name.partition("/")
        keys = [key for key in ring.values() if key.name == base]
        if not keys:
            return None
        # The file's entry, which is the one with limits, comes after the keys of the settings.
        key = keys[-1]
        if not slash:
            return key
        if gateway is None:
            return None
        return _of_tenant(key, tenant, gateway)

    def set_sharing_key(self, key: ApiKey | None) -> None:
        """Count the current request for *key* where keys share something; see :mod:`triton_openai.shares`."""
        name = None
        if key is not None and self.several_keys:
            name = key.name
        SHARING_KEY.set(name)

    async def authorize(
        self, headers: CIMultiDictProxy[str], group: RouteGroup | None, record: RequestRecord, *, counted: bool
    ) -> AuthorizedCall:
        """
        Return the key of a call for *group* and what it uses of the key's limits, if it is *counted*.

        *record* gets the key and the headers of its limits. From now on, what keys share is shared by that key. Raises
        :class:`RateLimited`, and as :meth:`authenticate`.
        """
        key = self.authenticate(headers, group)
        self.set_sharing_key(key)
        if key is None:
            return AuthorizedCall(NO_KEY, None)
        record.key = key.name
        record.key_digest = key.digest
        if not counted or not key.limit.limits_live_requests:
            return AuthorizedCall(key, None)
        reservation = await self.admit(key)
        record.headers = {**record.headers, **reservation.headers}
        if reservation.refusal is not None:
            raise reservation.refusal
        return AuthorizedCall(key, reservation)

    async def admit(self, key: ApiKey) -> Reservation:
        """Count a request of *key* as running; the reservation's ``refusal`` is set if the key's limits forbid it."""
        return Reservation(self.limits, key.name, key.limit, await self.limits.admit(key.name, key.limit))

    def prepare(self, settings: AccessSettings) -> Callable[[], None]:
        """Return what puts new *settings* of keys and restrictions in force. Raises :class:`ConfigurationError`."""
        return partial(self._take, settings, Keys(settings, again=True))

    def _keys_changed(self) -> None:
        names = {key.name for key in (self.keys.ring or {}).values()}
        #: Whether there are several keys or tenants, which share what they have together.
        self.several_keys = len(names) > 1 or self.gateway is not None
        if self._warns:
            self.keys.warn_if_readable_by_all()
        if self.keys.ring is not None:
            self._draining.end_removed_keys(self.keys.ring)

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Watch the file of keys while *app* runs."""
        self._warns = self._may_warn
        if self._warns:
            self.keys.warn_if_readable_by_all()
        watching = asyncio.create_task(self.watch())
        yield
        await cancel(watching)
        await self.limits.close()

    async def watch(self) -> None:
        """Read the file of keys again after each change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await self.keys.reload():
                self._keys_changed()


def _of_tenant(key: ApiKey | None, tenant: str, gateway: GatewaySettings) -> ApiKey:
    """Return the key of a *tenant* that *gateway* names, which sends *key* if the service asks for keys."""
    if key is None:
        key = ApiKey(name=tenant)
    else:
        key = replace(key, name=f"{key.name}/{tenant}")
    if key.limit != RateLimit():
        return key
    limit = RateLimit(**{name: getattr(gateway, name) for name in RateLimit.__struct_fields__})
    return replace(key, limit=limit)


AUTHORIZER: web.AppKey[Authorizer] = web.AppKey("authorizer", Authorizer)
