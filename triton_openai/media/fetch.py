"""
Fetches images from the hosts that the operator allows.

A URL in a request makes this service connect to an address that a stranger chose, from inside the operator's network
(server-side request forgery). So: only listed hosts, only public addresses, every redirect checked like the first URL,
no cookies, no credentials, no proxy from the environment, no content encoding that could swell, limits on size, time
and number.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, TypeAlias

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from triton_openai import __version__
from triton_openai.errors import ConfigurationError, InvalidRequest

IPAddress: TypeAlias = IPv4Address | IPv6Address
#: Says whether a connection to an address is allowed.
AddressPolicy: TypeAlias = Callable[[IPAddress], bool]

# What is of use within a network only.
_PRIVATE = [
    ip_network(text) for text in
    ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")
]  # fmt: skip
# What is no host's address anywhere, or leads back into the machine's own link: cloud metadata is at 169.254.169.254.
# Of IPv6: what is not global unicast, and within that protocol assignments with Teredo, documentation, 6to4 (which
# hides an IPv4 address).
_NEVER = [
    ip_network(text) for text in (
        "0.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15",
        "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
        "::/3", "4000::/2", "8000::/1", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
]  # fmt: skip
# An IPv4 address as seen from a network that has IPv6 only (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: IPAddress) -> bool:
    """Return whether *address* is one of the public internet. IPv4 addresses mapped into IPv6 are not."""
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return not any(address in network for network in (*_PRIVATE, *_NEVER))


def is_public_or_private(address: IPAddress) -> bool:
    """Return whether *address* is public, or of this machine or a private network. Link-local ones are not."""
    return is_public(address) or any(address in network for network in _PRIVATE)


def parse_address(text: str) -> IPAddress | None:
    """Return the address that *text* is the usual form of; ``None`` for names, and for numbers in other forms."""
    try:
        return ip_address(text)
    except ValueError:
        return None


class AddressRefusedError(OSError):
    """A host's address is one that the policy does not allow."""


class CheckedResolver(AbstractResolver):
    """
    Resolves hosts by the system, and fails unless *allows* returns true for every address.

    *lookup* is called as :func:`socket.getaddrinfo`, in threads of its own. It can block for many seconds, and in the
    event loop's default threads it would delay tokenizing and rendering.
    """

    def __init__(self, allows: AddressPolicy, lookup: Callable[..., Sequence[Any]] = socket.getaddrinfo) -> None:
        self._allows = allows
        self._lookup = lookup
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="image-hosts")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of *host*. Raises ``OSError``."""
        answers = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._lookup(host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
        )
        results = []
        for kind, _, protocol, _, (text, *_) in answers:
            # A link-local IPv6 address may come with its zone.
            address = parse_address(str(text).partition("%")[0])
            if address is None or not self._allows(address):
                raise AddressRefusedError(f"an address of {host} is not allowed")
            # It is an address already: nothing is to be resolved a second time.
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            results.append(ResolveResult(hostname=host, host=text, port=port, family=kind, proto=protocol, flags=flags))
        return results

    async def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# What web servers take in a request's first line. Also keeps large texts from the parser.
_MAX_URL_CHARS = 8_000
_DEFAULT_PORTS = {"http": 80, "https": 443}
_INSTEAD = "send the image itself, as a data URL (data:image/png;base64,...)."


class AllowedHosts:
    """
    Hosts as the operator lists them: ``example.com``, ``*.example.com`` (every host below it, and not itself), each
    also with a port, without which only http's and https's own ports are meant.

    Raises :class:`ConfigurationError` for what is none of these.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = set(map(_entry, entries))

    def check(self, url: URL) -> None:
        """Raise :class:`InvalidRequest` unless *url* may be fetched, by its form and its host."""
        if url.scheme not in _DEFAULT_PORTS:
            raise _refused("An image's URL must begin with https://, http:// or data:image/.")
        if url.raw_user is not None or url.raw_password is not None:
            raise _refused("An image's URL must not contain a user name or a password.")
        if not url.raw_host:
            raise _refused("The image's URL names no host.")
        if not self._covers(url):
            if self._entries:
                source = f" from '{url.raw_host[:200]}'"
            else:
                source = ""
            raise _refused(f"This service does not fetch images{source}: {_INSTEAD}")

    def _covers(self, url: URL) -> bool:
        host = url.raw_host or ""
        default = url.port == _DEFAULT_PORTS[url.scheme]
        first, *labels = host.split(".")
        names = {host, *("*." + ".".join(labels[number:]) for number in range(len(labels)) if first)}
        if default:
            ports = {url.port, None}
        else:
            ports = {url.port}
        return any((name, port) in self._entries for name in names for port in ports)


def _refused(message: str) -> InvalidRequest:
    """Return the error for a URL that is not followed, or does not lead to an image."""
    return InvalidRequest(message, code="invalid_image_url")


def parse_url(text: str) -> URL:
    """Return *text* as a URL, parsed once and by the library that also sends the request. Raises InvalidRequest."""
    if len(text) > _MAX_URL_CHARS:
        raise _refused("The image's URL is too long.")
    try:
        url = URL(text)
        # Read lazily, and wrong ports are found only then.
        _ = (url.port, url.raw_host)
    except (ValueError, TypeError) as error:
        raise _refused("The image's URL is not valid.") from error
    return url


def _entry(text: str) -> tuple[str, int | None]:
    """Return the host of an entry, with its star, and its port."""
    if text.startswith("*."):
        star = "*."
        host_port = text[2:]
    else:
        star = ""
        host_port = text
    try:
        url = URL(f"http://{host_port}")
        host = url.raw_host
        port = url.explicit_port
    except ValueError:
        host = None
        port = None
    if not host or host_port.endswith(":") or any(character in host_port for character in "*/@?#\\ "):
        raise ConfigurationError(
            f"'{text}' is not a host for --allowed-media-domain: give example.com, *.example.com or either with :PORT."
        )
    return f"{star}{host}", port


_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 3
_HEADERS = {"User-Agent": f"triton-openai/{__version__}", "Accept": "image/*", "Accept-Encoding": "identity"}


def too_large(limit: int) -> InvalidRequest:
    """Return the error for a file of more than *limit* bytes."""
    return InvalidRequest(f"The image is larger than the limit of {limit} bytes.", code="image_too_large")


@dataclass(kw_only=True)
class Fetcher:
    """Fetches files. Closed by :meth:`close`."""

    hosts: AllowedHosts
    #: Most bytes of a file.
    max_size: int
    #: Seconds for a file, waiting for its turn included.
    timeout: float = 10.0
    #: Most files at a time.
    concurrency: int = 32
    #: Says which addresses may be connected to.
    allows: AddressPolicy = is_public
    #: Finds the addresses, see :class:`CheckedResolver`.
    lookup: Callable[..., Sequence[Any]] = socket.getaddrinfo

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)
        self._session: aiohttp.ClientSession | None = None

    def check(self, url: str) -> URL:
        """Return *url* parsed. Raises :class:`InvalidRequest` when it may not be fetched; nothing is connected."""
        parsed = parse_url(url)
        self.hosts.check(parsed)
        host = parsed.raw_host or ""
        if ":" in host or host.replace(".", "").isdigit():
            # An address needs no resolver, so it is checked here; and there are more ways to write one than the
            # usual (one number, octal parts), in which the system would still connect to it.
            address = parse_address(host)
            if address is None or not self.allows(address):
                raise _not_public()
        return parsed

    async def fetch(self, url: str, on_bytes: Callable[[int], object] = lambda _: None) -> bytes:
        """
        Return the file at *url*. Raises :class:`InvalidRequest` with the reason.

        *on_bytes* is called with the number of bytes of each piece that arrives; what it raises ends the fetch.
        """
        first = self.check(url)
        try:
            async with asyncio.timeout(self.timeout), self._slots:
                return await self._follow(first, on_bytes)
        except TimeoutError as error:
            raise _refused(f"The image could not be fetched within {self.timeout:g} seconds.") from error

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _follow(self, url: URL, on_bytes: Callable[[int], object]) -> bytes:
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                async with self._client().get(url, allow_redirects=False, headers=_HEADERS) as response:
                    if response.status not in _REDIRECTS:
                        return await self._read(response, on_bytes)
                    url = self._next(url, response.headers.get("Location", ""))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, AddressRefusedError):
                raise _not_public() from error
            raise _refused(
                f"The image could not be fetched: its host '{(url.raw_host or '')[:200]}' cannot be reached."
            ) from error
        raise _refused(f"The image's URL redirects more than {_MAX_REDIRECTS} times.")

    def _next(self, url: URL, location: str) -> URL:
        """Return where a redirect leads, if it may be followed."""
        target = url.join(URL(location))
        if url.scheme == "https" and target.scheme == "http":
            raise _refused("The image's URL redirects from https to http.")
        return self.check(str(target))

    async def _read(self, response: aiohttp.ClientResponse, on_bytes: Callable[[int], object]) -> bytes:
        if response.status != 200:
            raise _refused(f"The image could not be fetched: its host answered with status {response.status}.")
        kind = response.content_type
        if not kind.startswith("image/") and not kind.endswith("/octet-stream"):
            raise _refused(f"The image's URL leads to '{kind[:100]}', which is not an image.")
        data = bytearray()
        async for piece in response.content.iter_chunked(64 * 1024):
            data += piece
            on_bytes(len(piece))
            if len(data) > self.max_size:
                raise too_large(self.max_size)
        return bytes(data)

    def _client(self) -> aiohttp.ClientSession:
        # Made on first use: a session belongs to the running loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=CheckedResolver(self.allows, self.lookup),
                    # Neither an answer nor a connection outlives the fetch that it was checked for.
                    use_dns_cache=False,
                    force_close=True,
                    limit=0,
                ),
                # The whole fetch has its limit, redirects and waiting included.
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def _not_public() -> InvalidRequest:
    return _refused("The image's host has no public address.")
