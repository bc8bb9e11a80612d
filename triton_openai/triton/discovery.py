"""The list of Tritons: those in the settings, those in a file that may change, and the addresses of names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from urllib.parse import urlsplit

import msgspec
import structlog

from triton_openai.config.addresses import endpoints
from triton_openai.config.files import LOOK_SECONDS, FileWatch
from triton_openai.config.tree import EndpointSettings, TritonAccess, TritonSettings
from triton_openai.errors import ConfigurationError

_log = structlog.get_logger(__name__)

#: Returns the addresses of a host. Raises ``OSError``.
Lookup = Callable[[str], Awaitable[Collection[str]]]


async def lookup(host: str) -> Collection[str]:
    """
    Return the addresses of *host* that the system returns, of its preferred family alone. Raises ``OSError``.

    A name with IPv4 and IPv6 addresses would name each Triton twice.
    """
    entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    preferred = entries[0][0]
    return {str(address[0]) for family, *_, address in entries if family == preferred}


class Discovery:
    """Calls *apply* with the list of Tritons whenever it has changed."""

    def __init__(
        self,
        triton: TritonSettings,
        access: TritonAccess,
        apply: Callable[[Sequence[EndpointSettings]], Awaitable[None]],
        *,
        lookup: Lookup = lookup,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """*on_failure* is called for each name that cannot be looked up."""
        self._triton = triton
        self._access = access
        self._apply = apply
        self._lookup = lookup
        self._on_failure = on_failure
        self._watch = FileWatch([triton.endpoints_file], problem="the file of endpoints is not used, the old ones stay")
        #: The endpoints in the settings and the file; raises :class:`ConfigurationError`.
        self.listed: Sequence[EndpointSettings] = endpoints(triton)
        self._addresses: dict[str, frozenset[str]] = {}
        self._failing: set[str] = set()
        self._applied: Sequence[EndpointSettings] | None = None

    async def replace(self, triton: TritonSettings, listed: Sequence[EndpointSettings]) -> None:
        """Use other settings, which list the endpoints *listed*."""
        self._triton = triton
        self.listed = listed
        await self.look()

    async def run(self) -> None:
        """Look for changes until cancelled."""
        loop = asyncio.get_running_loop()
        next_lookup = loop.time() + self._triton.dns_interval
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await self._watch.due_in_thread(settled=True):
                with self._watch.reading():
                    self._watch.check("file of endpoints")
                    self.listed = await asyncio.to_thread(endpoints, self._triton)
                    next_lookup = 0.0
                    _log.info("endpoints are read again", endpoints=[each.name for each in self.listed])
            if loop.time() < next_lookup:
                continue
            next_lookup = loop.time() + self._triton.dns_interval
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - the next change must still be noticed
                unforeseen = not isinstance(error, ConfigurationError)
                _log.error("endpoints cannot be used", reason=str(error), exc_info=unforeseen)

    async def look(self) -> None:
        """Look up the names, and apply a list that has changed."""
        listed: list[EndpointSettings] = []
        for endpoints_of_name in await asyncio.gather(*map(self._expanded, self.listed)):
            listed += endpoints_of_name
        if listed != self._applied:
            await self._apply(listed)
            self._applied = listed

    async def _expanded(self, endpoint: EndpointSettings) -> Sequence[EndpointSettings]:
        """Return an endpoint for each address of a name. If a lookup fails, or finds none, the old addresses stay."""
        if not endpoint.dns:
            return [endpoint]
        host = urlsplit(endpoint.url[0]).hostname or ""
        try:
            addresses = frozenset(await self._lookup(host))
            reason = "it has no addresses"
        except (OSError, UnicodeError) as error:
            # UnicodeError: a part of the name is empty or too long.
            addresses = frozenset()
            reason = getattr(error, "strerror", None) or str(error)
        if addresses:
            self._addresses[host] = addresses
            self._failing.discard(host)
        else:
            self._on_failure()
            if host not in self._failing:
                self._failing.add(host)
                _log.warning(
                    "the name of an endpoint cannot be looked up: its old addresses stay", host=host, reason=reason
                )
        access = endpoint.access or self._access
        if access.server_name is None:
            # A certificate is for the name, not for an address.
            access = msgspec.structs.replace(access, server_name=host)
        return [
            msgspec.structs.replace(
                endpoint,
                name=f"{endpoint.name}/{address}",
                url=tuple(_at(url, address) for url in endpoint.url),
                access=access,
                dns=False,
            )
            for address in sorted(self._addresses.get(host, ()))
        ]


def _at(url: str, address: str) -> str:
    """Return *url* with *address* in place of its host."""
    parts = urlsplit(url)
    if ":" in address:
        host = f"[{address}]"
    else:
        host = address
    if parts.port is not None:
        host = f"{host}:{parts.port}"
    return parts._replace(netloc=host).geturl()
