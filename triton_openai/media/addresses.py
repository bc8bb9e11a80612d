"""
Which network addresses images may be fetched from, and a resolver that gives out no others.

The connection goes to the very address that was checked: a name that answers differently the next time it is asked (DNS
rebinding) is asked only once.

Source of the facts: IANA's registries of special-purpose IPv4 and IPv6 addresses. Python's ``is_global`` is not used:
what it says has changed from release to release.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

IPAddress: TypeAlias = IPv4Address | IPv6Address
#: Says whether a connection to an address is allowed.
AddressPolicy: TypeAlias = Callable[[IPAddress], bool]

# What is of use within a network only.
_PRIVATE_V4 = tuple(map(IPv4Network, ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_PRIVATE_V6 = tuple(map(IPv6Network, ("::1/128", "fc00::/7")))
# What is no host's address anywhere, or leads back into the machine's own link: cloud metadata is at 169.254.169.254.
_NEVER_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "169.254.0.0/16",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
        ),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
# Within it: protocol assignments with Teredo, documentation, 6to4 (which hides an IPv4 address).
_NEVER_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
# An IPv4 address as seen from a network that has IPv6 only (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: IPAddress) -> bool:
    """Return whether *address* is one of the public internet. IPv4 addresses mapped into IPv6 are not."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in (*_PRIVATE_V4, *_NEVER_V4))
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _GLOBAL_V6 and not any(address in network for network in _NEVER_V6)


def is_public_or_private(address: IPAddress) -> bool:
    """Return whether *address* is public, or of this machine or a private network. Link-local ones are not."""
    networks = _PRIVATE_V4 if isinstance(address, IPv4Address) else _PRIVATE_V6
    return is_public(address) or any(address in network for network in networks)


def parse_address(text: str) -> IPAddress | None:
    """Return the address that *text* is the usual form of; ``None`` for names, and for numbers in other forms."""
    try:
        return ip_address(text)
    except ValueError:
        return None


class AddressRefusedError(OSError):
    """A host's address is one that the policy does not allow."""


class CheckedResolver(AbstractResolver):
    """Asks another resolver, and fails unless *allows* says yes to every address of the answer."""

    def __init__(self, inner: AbstractResolver, allows: AddressPolicy) -> None:
        self._inner = inner
        self._allows = allows

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of *host*. Raises ``OSError``."""
        found = await self._inner.resolve(host, port, family)
        for entry in found:
            # A link-local IPv6 address may come with its zone.
            address = parse_address(entry["host"].partition("%")[0])
            if address is None or not self._allows(address):
                raise AddressRefusedError(f"an address of {host} is not allowed")
        return found

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._inner.close()
