"""The operator's list of hosts from which images may be fetched."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from yarl import URL

from triton_openai.errors import ConfigurationError, InvalidRequest

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
