"""
Protection of a service that asks for no API key from web pages in a browser that can reach it.

A page can reach a service on the reader's machine or network in two ways. With *DNS rebinding*, the name of the page's
own site resolves to this service: the browser takes both for one site, and the page reads every answer. The header
``Host`` shows it, because it has the name of that site. With *cross-site request forgery*, the page sends a request
that needs no preflight: it cannot read the answer, but the request has its effect. ``Sec-Fetch-Site`` and ``Origin``
show it. Scripts cannot change any of the three.

A request with a key needs neither check: no browser adds a key by itself, as it adds a cookie.

Sources: the Fetch standard ("Origin header"), W3C's Fetch Metadata, and RFC 6761, section 6.3 (``localhost``). The rule
for ``Host`` is that of Jupyter Server (``allow_remote_access``), Ollama and the Model Context Protocol's SDK, which
check it where the service listens on a loopback address.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from aiohttp import hdrs, web
from multidict import CIMultiDictProxy

from triton_openai.access.cors import Cors
from triton_openai.config.tree import ServerSettings
from triton_openai.errors import HostNotAllowed, OriginNotAllowed

# Methods that change nothing, and ask no model for anything.
_SAFE_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})
# A name or an address, in brackets where it has colons, and a port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s:/?#@\[\]]+))(?::[0-9]*)?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_SEC_FETCH_SITE = "Sec-Fetch-Site"
_FORWARDED_HOST = "X-Forwarded-Host"
# Longest part of a client's header in an error message.
_MAX_SHOWN = 200


class BrowserGuard:
    """Refuses what web pages of other sites send to a service without keys. *cors* allows some of them."""

    def __init__(self, settings: ServerSettings, cors: Cors) -> None:
        self._cors = cors
        self.replace(settings)

    def replace(self, settings: ServerSettings) -> None:
        """Take new *settings*."""
        names = {entry.lower().strip("[]") for entry in settings.allowed_hosts}
        self._any_host = "*" in names
        # Whoever lists hosts wants them checked at every address.
        self._every_address = bool(names)
        self._names = frozenset({*names, settings.host.lower()})

    def check(self, request: web.Request) -> None:
        """Raise :class:`HostNotAllowed` or :class:`OriginNotAllowed` for a *request* of another site's page."""
        if not self._any_host:
            self._check_host(request)
        # A page of another site may open a WebSocket without a preflight.
        if request.method not in _SAFE_METHODS or hdrs.UPGRADE in request.headers:
            headers = request.headers
            # Most clients are no browsers.
            if _SEC_FETCH_SITE in headers or hdrs.ORIGIN in headers:
                self._check_origin(headers, request)

    def _check_host(self, request: web.Request) -> None:
        # A client of HTTP/1.0 may send none. Every browser sends one.
        for host in request.headers.getall(hdrs.HOST, ()):
            name = _host_name(host)
            if _is_local(name) or self._lists(name):
                continue
            address = _local_address(request)
            if not self._every_address and not _is_local(address):
                # It came over the network, on which a service without keys answers everybody.
                continue
            if name == address:
                continue
            raise HostNotAllowed(
                f"The host '{host[:_MAX_SHOWN]}' is not answered, because this service asks for no API key. Use "
                "localhost, add the host to server.allowed_hosts (--allowed-host), or set up API keys."
            )

    def _lists(self, name: str) -> bool:
        """Return whether the settings have *name*, or a pattern for it."""
        if name in self._names:
            return True
        labels = name.split(".")
        parents = (".".join(labels[count:]) for count in range(1, len(labels)))
        return any(f"*.{parent}" in self._names for parent in parents)

    def _check_origin(self, headers: CIMultiDictProxy[str], request: web.Request) -> None:
        site = headers.get(_SEC_FETCH_SITE)
        origin = headers.get(hdrs.ORIGIN)
        if site in ("same-origin", "none"):
            # From the service's own page, whatever Host a proxy has made of its address; or from no page.
            return
        if site is None and (origin is None or _is_own(origin, request)):
            # No browser, or one that sends no Sec-Fetch-Site, as all do over plain HTTP to other machines.
            return
        if self._cors.allows(origin):
            return
        if origin is None:
            page = "other sites"
        else:
            page = f"the origin '{origin[:_MAX_SHOWN]}'"
        raise OriginNotAllowed(
            f"Web pages of {page} may not send this request (access.cors_allow_origin, --cors-allow-origin)."
        )


@lru_cache(64)
def _host_name(host: str) -> str:
    """Return the name or the address in a header ``Host``, without port and in lower case; empty if it has neither."""
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return ""
    return (match["address"] or match["name"]).removesuffix(".")


@lru_cache(64)
def _is_local(name: str) -> bool:
    """Return whether *name* is ``localhost``, a name below it, or a loopback address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _local_address(request: web.Request) -> str:
    """Return the address at which *request* arrived; ``localhost`` where it came by no network."""
    transport = request.transport
    if transport is None:
        address = None
    else:
        address = transport.get_extra_info("sockname")
    if not isinstance(address, tuple):
        return "localhost"
    return str(address[0]).lower()


def _is_own(origin: str, request: web.Request) -> bool:
    """
    Return whether *origin* is the address to which *request* was sent, in any scheme.

    A proxy in front may have changed ``Host``, and then says in ``X-Forwarded-Host`` what it was. A page of another
    site cannot send that header without a preflight.
    """
    scheme, _, authority = origin.lower().partition("://")
    forwarded = request.headers.get(_FORWARDED_HOST, "").partition(",")[0].strip()
    own = (request.headers.get(hdrs.HOST, ""), forwarded)
    port = _DEFAULT_PORTS.get(scheme, "")
    return authority != "" and any(authority.removesuffix(port) == host.lower().removesuffix(port) for host in own)


BROWSER_GUARD: web.AppKey[BrowserGuard] = web.AppKey("browser_guard", BrowserGuard)
