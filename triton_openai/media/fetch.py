"""
Fetches images from the hosts that the operator allows.

A URL in a request makes this service connect to where a stranger says, from inside the operator's network (server-side
request forgery). So: only listed hosts, only public addresses, every redirect checked like the first URL, no cookies,
no credentials, no proxy from the environment, no content encoding that could swell, and limits on size, time and
number.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from triton_openai import __version__
from triton_openai.errors import InvalidRequest
from triton_openai.generation import Image
from triton_openai.media.allowed_hosts import (
    AddressPolicy,
    AddressRefusedError,
    AllowedHosts,
    CheckedResolver,
    SystemResolver,
    is_public,
    parse_address,
    parse_url,
    refused,
)
from triton_openai.media.files import HEAD, from_bytes, media_type_of, too_large, unknown_format

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 3
_PIECE = 64 * 1024
# What a server may call an image that it does not know better.
_UNSPECIFIC = frozenset({"", "application/octet-stream", "binary/octet-stream"})
_HEADERS = {
    "User-Agent": f"triton-openai/{__version__}",
    "Accept": "image/*",
    "Accept-Encoding": "identity",
}


class ImageFetcher:
    """
    Fetches images, at most *concurrency* at a time; each within *timeout* seconds, waiting for its turn included, and
    of at most *largest* bytes. Closed by :meth:`close`.

    *allows* says which addresses may be connected to, *resolver* finds them (by default the system's).
    """

    def __init__(
        self,
        hosts: AllowedHosts,
        *,
        largest: int,
        timeout: float,
        concurrency: int,
        allows: AddressPolicy = is_public,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self._hosts = hosts
        self._largest = largest
        self._timeout = timeout
        self._allows = allows
        self._resolver = resolver
        self._places = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None

    def check(self, url: str) -> URL:
        """Return *url* parsed. Raises :class:`InvalidRequest` when it may not be fetched; nothing is connected."""
        parsed = parse_url(url)
        self._hosts.check(parsed)
        host = parsed.raw_host or ""
        if ":" in host or host.replace(".", "").isdigit():
            # An address needs no resolver, so nobody else checks it; and there are more ways to write one than the
            # usual (one number, octal parts), in which the system would still connect to it.
            address = parse_address(host)
            if address is None or not self._allows(address):
                raise _not_public()
        return parsed

    async def fetch(self, url: str) -> Image:
        """Return the image at *url*. Raises :class:`InvalidRequest` with the reason."""
        first = self.check(url)
        try:
            async with asyncio.timeout(self._timeout), self._places:
                data = await self._follow(first)
        except TimeoutError as error:
            raise refused(f"The image could not be fetched within {self._timeout:g} seconds.") from error
        return await from_bytes(data)

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    async def _follow(self, url: URL) -> bytes:
        try:
            for _ in range(_MAX_REDIRECTS + 1):
                async with self._client().get(url, allow_redirects=False, headers=_HEADERS) as response:
                    if response.status not in _REDIRECTS:
                        return await self._read(response)
                    url = self._next(url, response.headers.get("Location", ""))
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, AddressRefusedError):
                raise _not_public() from error
            raise _unreachable(url) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _unreachable(url) from error
        raise refused(f"The image's URL redirects more than {_MAX_REDIRECTS} times.")

    def _next(self, url: URL, location: str) -> URL:
        """Return where a redirect leads, if it may be followed."""
        try:
            target = url.join(URL(location))
        except ValueError as error:
            raise refused("The image's URL redirects to what is not a URL.") from error
        if url.scheme == "https" and target.scheme == "http":
            raise refused("The image's URL redirects from https to http.")
        return self.check(str(target))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise refused(f"The image could not be fetched: its host answered with status {response.status}.")
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind not in _UNSPECIFIC and not kind.startswith("image/"):
            raise refused(f"The image's URL leads to '{kind[:100]}', which is not an image.")
        if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            # It was asked for without. Images are compressed already, so only a trick gains by it.
            raise refused("The image could not be fetched: its host sent it with a content encoding.")
        if (response.content_length or 0) > self._largest:
            raise too_large(self._largest)
        data = bytearray()
        async for piece in response.content.iter_chunked(_PIECE):
            data += piece
            if len(data) > self._largest:
                raise too_large(self._largest)
            if len(data) - len(piece) < HEAD <= len(data) and media_type_of(bytes(data[:HEAD])) is None:
                raise unknown_format()
        return bytes(data)

    def _client(self) -> aiohttp.ClientSession:
        # Made on first use: a session belongs to the running loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=CheckedResolver(self._resolver or SystemResolver(), self._allows),
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
    return refused("The image's host has no public address.")


def _unreachable(url: URL) -> InvalidRequest:
    return refused(f"The image could not be fetched: its host '{(url.raw_host or '')[:200]}' cannot be reached.")
