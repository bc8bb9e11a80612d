"""Access control: restricted APIs, API keys and their limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Literal

import msgspec
import structlog
from aiohttp import web
from multidict import CIMultiDictProxy

from triton_openai.access.keys import ApiKey, Keys, Restrictions, RouteGroup, identify, sha256
from triton_openai.access.rate_limits import LimitStore, RateLimit, RateLimits, Reservation
from triton_openai.config.files import LOOK_SECONDS
from triton_openai.config.tree import AccessSettings
from triton_openai.errors import InvalidRequest, holds_key
from triton_openai.tasks import cancel

_log = structlog.get_logger("triton_openai.access")
# What gateways' headers begin with: llm-d's, and those of the Gateway API inference extension before it.
_PREFIXES = ("x-llm-d-inference-", "x-gateway-inference-")
_TENANT = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")


def gateway_header(headers: Mapping[str, str], what: Literal["objective", "fairness-id"]) -> str:
    """Return what a trusted gateway's headers say, an empty text if nothing."""
    return next((headers[name] for prefix in _PREFIXES if (name := prefix + what) in headers), "")


class Authorizer:
    """
    Authenticates clients. *limits* counts the requests of keys.

    Raises :class:`ConfigurationError` for keys that cannot be used.
    """

    def __init__(self, settings: AccessSettings, *, limits: LimitStore | None = None) -> None:
        self.limits: LimitStore = limits or RateLimits()
        self._take(settings, Keys(settings))

    def _take(self, settings: AccessSettings, keys: Keys) -> None:
        self.keys = keys
        self.restrictions = Restrictions(settings.openai_restricted_api)
        #: ``None`` where the gateway is not trusted.
        self.gateway = settings.gateway if settings.trust_gateway else None

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
        if group is not None:
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
        if key.limit != RateLimit():
            return key
        limit = RateLimit(**{name: getattr(gateway, name) for name in RateLimit.__struct_fields__})
        return msgspec.structs.replace(key, limit=limit)

    def named(self, name: str) -> ApiKey | None:
        """Return the key called *name*, or that of a tenant of the gateway; ``None`` if it is not there any more."""
        ring, gateway = self.keys.ring, self.gateway
        if ring is None:
            return ApiKey(name=name) if gateway is not None or not name else None
        # No key has a slash in its name.
        base, slash, _ = name.partition("/")
        if slash and gateway is None:
            return None
        found = next((key for key in ring.values() if key.name == base), None)
        return None if found is None else msgspec.structs.replace(found, name=name)

    async def admit(self, key: ApiKey) -> Reservation:
        """Count a request of *key* as running; the reservation's ``refusal`` is set if the key's limits forbid it."""
        return Reservation(self.limits, key.name, await self.limits.admit(key.name, key.limit))

    def prepare(self, settings: AccessSettings) -> Callable[[], None]:
        """Return what puts new *settings* of keys and restrictions in force. Raises :class:`ConfigurationError`."""
        return partial(self._take, settings, Keys(settings, again=True))

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Watch the file of keys while *app* runs."""
        watching = asyncio.create_task(self.watch())
        yield
        await cancel(watching)
        await self.limits.close()

    async def watch(self) -> None:
        """Read the file of keys again after each change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.keys.look()


AUTHORIZER: web.AppKey[Authorizer] = web.AppKey("authorizer", Authorizer)
