"""
A resolver with threads of its own.

The system's resolver blocks, for many seconds where a name server is silent. In the event loop's own threads, names
that a client made up below an allowed domain would hold up what else is done there (tokenizing, rendering).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from triton_openai.errors import ConfigurationError, InvalidRequest

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


# What web servers take in a request's first line. Also keeps large texts from the parser.
_LONGEST_URL = 8_000
_DEFAULT_PORTS = {"http": 80, "https": 443}


class _Entry(msgspec.Struct, frozen=True):
    host: str
    port: int | None
    any_below: bool

    def covers(self, url: URL) -> bool:
        host = url.raw_host or ""
        # A suffix begins with its dot, so that "evilexample.com" does not end with it.
        named = host.endswith(self.host) and host != self.host if self.any_below else host == self.host
        return named and url.port == (_DEFAULT_PORTS[url.scheme] if self.port is None else self.port)


class AllowedHosts:
    """
    Hosts as the operator lists them: ``example.com``, ``*.example.com`` (every host below it, and not itself), each
    also with a port, without which only http's and https's own ports are meant.

    Raises :class:`ConfigurationError` for what is none of these.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = tuple(map(_entry, entries))

    def __bool__(self) -> bool:
        """Return whether any host is allowed at all."""
        return bool(self._entries)

    def check(self, url: URL) -> None:
        """Raise :class:`InvalidRequest` unless *url* may be fetched, by its form and its host."""
        if url.scheme not in _DEFAULT_PORTS:
            raise refused("An image's URL must begin with https://, http:// or data:image/.")
        if url.raw_user is not None or url.raw_password is not None:
            raise refused("An image's URL must not contain a user name or a password.")
        if not url.raw_host:
            raise refused("The image's URL names no host.")
        if not self._entries:
            raise refused(
                "This service does not fetch images: send the image itself, as a data URL (data:image/png;base64,...)."
            )
        if not any(entry.covers(url) for entry in self._entries):
            raise refused(
                f"This service does not fetch images from '{url.raw_host[:200]}': send the image itself, as a data URL "
                "(data:image/png;base64,...)."
            )


def refused(message: str) -> InvalidRequest:
    """Return the error for a URL that is not followed, or does not lead to an image."""
    return InvalidRequest(message, code="invalid_image_url")


def parse_url(text: str) -> URL:
    """Return *text* as a URL, parsed once and by the library that also sends the request. Raises InvalidRequest."""
    if len(text) > _LONGEST_URL:
        raise refused("The image's URL is too long.")
    try:
        url = URL(text)
        # Read lazily, and wrong ports are found only then.
        _ = (url.port, url.raw_host)
    except (ValueError, TypeError) as error:
        raise refused("The image's URL is not valid.") from error
    return url


def _entry(text: str) -> _Entry:
    wrong = ConfigurationError(
        f"'{text}' is not a host for --allowed-media-domain: give example.com, *.example.com or either with :PORT."
    )
    any_below = text.startswith("*.")
    rest = text[2:] if any_below else text
    if not rest or "*" in rest or any(character in rest for character in "/@?#\\ ") or rest.endswith(":"):
        raise wrong
    try:
        url = URL(f"http://{rest}")
        host, port = url.raw_host, url.explicit_port
    except ValueError as error:
        raise wrong from error
    if not host:
        raise wrong
    return _Entry(host=f".{host}" if any_below else host, port=port, any_below=any_below)


_THREADS = 8


class SystemResolver(AbstractResolver):
    """Asks the system. What it could not answer in time is left to end in its thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="image-hosts")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of *host*. Raises ``OSError``."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=protocol,
                # It is an address already: nothing is to be resolved a second time.
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
