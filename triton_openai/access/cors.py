"""
CORS: which web pages' scripts may send requests, and which headers of an answer they may read.

Source: the Fetch standard's CORS protocol. Preflights are answered before the check of API keys, because browsers send
no keys with them. Only browsers follow these rules.
"""

from __future__ import annotations

import re

from aiohttp import hdrs, web

from triton_openai.config.tree import AccessSettings
from triton_openai.errors import OriginNotAllowed

#: What scripts may read beside the few headers that they always may.
EXPOSED = (
    "x-request-id",
    "openai-processing-ms",
    "retry-after",
    "x-max-tokens",
    "x-should-retry",
    "x-session-token",
    "x-triton-openai-ignored",
    "x-triton-openai-repaired",
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens", "audio-seconds")
    ),
)
# The port of an origin, which has none where it is the default one.
_PORT = re.compile(r"(:[0-9]+)?\Z")
# Seconds for which a browser may remember the answer to a preflight.
_MAX_AGE = 600


class Cors:
    """The origins whose pages may send requests."""

    def __init__(self, settings: AccessSettings) -> None:
        self.replace(settings)

    def replace(self, settings: AccessSettings) -> None:
        """Take new *settings*."""
        self._origins = frozenset(settings.cors_allow_origin)
        self._anybody = "*" in self._origins
        #: Whether pages of any other origin may send requests.
        self.enabled = bool(self._origins)

    def allows(self, origin: str | None) -> bool:
        """Return whether pages of *origin* may send requests; ``None``: the request does not name it."""
        if self._anybody:
            return True
        if origin is None:
            return False
        return origin in self._origins or _PORT.sub(":*", origin, count=1) in self._origins

    def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers with which the browser lets the page read *response*, if the page may."""
        origin = request.headers.get(hdrs.ORIGIN)
        headers = response.headers
        if not self._anybody:
            # Also without an origin: a cache must not give this answer to a page of another one.
            if hdrs.VARY in headers:
                headers[hdrs.VARY] = f"{headers[hdrs.VARY]}, Origin"
            else:
                headers[hdrs.VARY] = "Origin"
        if origin is not None and self.allows(origin):
            if self._anybody:
                headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"
            else:
                headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join(EXPOSED)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a preflight, ``None`` for other requests. Raises :class:`OriginNotAllowed`."""
        if request.method != hdrs.METH_OPTIONS:
            return None
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers:
            return None
        if not self.allows(origin):
            raise OriginNotAllowed("Web pages of this origin may not call this service (--cors-allow-origin).")
        # What is asked for, because * is no answer for the header Authorization.
        allowed = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, HEAD, POST, DELETE",
            hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE),
            hdrs.VARY: "Access-Control-Request-Headers",
        }
        if allowed:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = allowed
        return web.Response(status=204, headers=headers)


CORS: web.AppKey[Cors] = web.AppKey("cors", Cors)
