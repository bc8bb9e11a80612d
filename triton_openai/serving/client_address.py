"""
The address of a client, behind proxies that the operator trusts.

Sources of the headers: RFC 7239 for ``Forwarded``; ``X-Forwarded-For`` is a list of addresses to which each proxy adds
that of its own client.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

from aiohttp import web

from triton_openai.errors import ConfigurationError

_Address: TypeAlias = IPv4Address | IPv6Address
# Proxies in a row that are looked at, the nearest first.
_MAX_HOPS = 32
# Characters of a header that are looked at: it takes 2 ms to read so many.
_MAX_LENGTH = 2048
# The pairs of an element of Forwarded: a name, and a token or a text in quotes. A comma ends an element.
_PAIR = re.compile(r'\s*([!#$%&\'*+.^_`|~\w-]+)=("(?:[^"\\]|\\.)*"|[^",;\s]*)\s*([;,]|$)', re.ASCII)
_WITH_PORT = re.compile(r"\[([^\]]*)\](?::\d+)?|([^:\[\]]+):\d+")


class ClientAddresses:
    """Finds the addresses of clients. *proxies* are the networks that may name the address of their client."""

    def __init__(self, proxies: Sequence[str]) -> None:
        """Raises :class:`ConfigurationError` for what is no network."""
        try:
            self._trusted: Sequence[IPv4Network | IPv6Network] = [ip_network(proxy) for proxy in proxies]
        except ValueError as error:
            raise ConfigurationError(f"server.trusted_proxies: {error}.") from error

    def address_of(self, request: web.BaseRequest) -> str | None:
        """
        Return the address of the client of *request*, ``None`` if there is none, as for Unix sockets.

        It is the last one on the way that no trusted proxy has. Nothing that an untrusted host sends is believed: a
        proxy maintains one of the headers, and a client may send the other one, so both together count only if they
        agree.
        """
        peer = request.remote
        if peer is None:
            address = None
        else:
            address = _parsed(peer)
        if address is None:
            return peer
        if not self._trusted or not self._trusts(address):
            return str(address)
        forwarded = request.headers.getall("Forwarded", [])
        for_ = request.headers.getall("X-Forwarded-For", [])
        found = set[str]()
        if for_:
            hops = [hop.strip() for hop in reversed(_end_of(for_).split(","))]
            found.add(self._nearest(address, hops))
        if forwarded:
            found.add(self._nearest(address, list(reversed(list(_forwarded_for(_end_of(forwarded)))))))
        if len(found) == 1:
            return found.pop()
        return str(address)

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._trusted)

    def _nearest(self, peer: _Address, hops: Sequence[str]) -> str:
        """Return the first of *hops*, from the nearest on, that is no trusted proxy, or the last that is known."""
        address = peer
        for hop in hops[:_MAX_HOPS]:
            further = _parsed(hop)
            if further is None:
                break
            address = further
            if not self._trusts(address):
                break
        return str(address)


def _end_of(headers: Sequence[str]) -> str:
    """Return the end of *headers* of one name, joined, from an element on: the nearest proxies write there."""
    joined = ",".join(headers)
    if len(joined) <= _MAX_LENGTH:
        return joined
    return joined[-_MAX_LENGTH:].partition(",")[2]


@lru_cache(1024)
def _parsed(text: str) -> _Address | None:
    """Return the address in *text*, which may have a port; ``None`` if there is none."""
    with_port = _WITH_PORT.fullmatch(text)
    if with_port is not None:
        text = with_port[1] or with_port[2] or ""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = None
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
    return mapped or address


def _forwarded_for(header: str) -> Iterator[str]:
    """Yield what each element of a ``Forwarded`` header names as its client, an empty text if nothing."""
    place = 0
    client = ""
    while place < len(header):
        pair = _PAIR.match(header, place)
        if pair is None:
            # What cannot be read hides what stands before it.
            yield ""
            place = header.find(",", place) + 1 or len(header)
            client = ""
            continue
        name, value, end = pair.groups()
        if name.lower() == "for":
            client = re.sub(r"\\(.)", r"\1", value.strip('"'))
        place = pair.end()
        if end != ";":
            yield client
            client = ""
    if client:
        yield client


CLIENT_ADDRESSES: web.AppKey[ClientAddresses] = web.AppKey("client_addresses", ClientAddresses)
