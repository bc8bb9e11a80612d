"""An OpenAI-compatible service, as the commands ask it that are clients: its URL, its key and its models."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from triton_openai import __version__
from triton_openai.cli.parser import CommandParser
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.load.events import MAX_LINE_BYTES, Piece, error_of_body, read_event

DEFAULT_URL = "http://localhost:9000/v1"
#: The variables of OpenAI's own client libraries.
URL_VARIABLE = "OPENAI_BASE_URL"
KEY_VARIABLE = "OPENAI_API_KEY"
_LIST_SECONDS = 30.0
_CONNECT_SECONDS = 10.0
_MAX_NAMES = 20


class _Architecture(msgspec.Struct):
    output_modalities: Sequence[str] = ()


class _Model(msgspec.Struct):
    id: str
    architecture: _Architecture | None = None


class _Models(msgspec.Struct):
    data: Sequence[_Model]


class Endpoint(msgspec.Struct, frozen=True):
    """An address below which the paths of the API are, such as ``http://localhost:9000/v1``."""

    url: str
    #: Sent as a bearer token.
    key: str | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of every request."""
        headers = {"User-Agent": f"triton-openai/{__version__}"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers

    def session(self) -> aiohttp.ClientSession:
        """Return a session for requests of this endpoint; answers may take as long as they need."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        return aiohttp.ClientSession(headers=self.headers, timeout=timeout, proxy=_proxy_for(self.url))

    def post(
        self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return the request of *path* with *body* as JSON."""
        return session.post(f"{self.url}/{path}", json=body)

    async def model(self, session: aiohttp.ClientSession, wanted: str | None) -> str:
        """
        Return the name of the model to ask: the one *wanted*, or the first that the service lists and that writes text.

        Raises :class:`ServiceError`.
        """
        if wanted is not None:
            return wanted
        names = await self._models(session)
        if not names:
            raise ServiceError(f"{self.url} lists no model that generates text. Name one with --model.")
        return names[0]

    async def _models(self, session: aiohttp.ClientSession) -> list[str]:
        timeout = aiohttp.ClientTimeout(total=_LIST_SECONDS, sock_connect=_CONNECT_SECONDS)
        try:
            async with session.get(f"{self.url}/models", timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self.unreachable_error(error) from error
        if response.status != 200:
            raise self.refusal_error(response.status, body)
        try:
            listed = msgspec.json.decode(body, type=_Models).data
        except msgspec.MsgspecError as error:
            raise ServiceError(f"{self.url}/models is no list of models: {error}. Name one with --model.") from error
        # Only some services say what a model writes.
        if any(model.architecture is not None for model in listed):
            listed = [model for model in listed if model.architecture is not None]
        return [model.id for model in listed[:_MAX_NAMES]]

    def unreachable_error(self, error: BaseException) -> ServiceError:
        """Return the error for a request that got no answer because of *error*."""
        advice = "Is a service running there? Name another with --url."
        return ServiceError(f"{self.url} cannot be asked: {connection_reason(error)}. {advice}")

    def refusal_error(self, status: int, body: bytes) -> ServiceError:
        """Return the error for an answer with *status* and *body*."""
        message = error_of_body(body).rstrip(".") or "no reason"
        advice = ""
        if status == 401:
            advice = f" Set {KEY_VARIABLE} to a key of this service."
        return ServiceError(f"{self.url} answers with HTTP {status}: {message}.{advice}")


async def pieces_of(content: aiohttp.StreamReader) -> AsyncIterator[Piece]:
    """Yield what the events of an answer have, as they arrive. Raises :class:`ValueError` for one that is an error."""
    pending = b""
    async for data in content.iter_any():
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            piece = read_event(line)
            if piece is not None:
                yield piece
        if len(pending) > MAX_LINE_BYTES:
            raise ValueError(f"an event has more than {MAX_LINE_BYTES} bytes.")


def connection_reason(error: BaseException) -> str:
    """Return why a request got no answer, in words for people and without a final period."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted ({error.certificate_error})"
    if isinstance(error, aiohttp.ClientConnectorError):
        if error.errno is not None and error.errno > 0:
            # The event loop's own words repeat the address.
            return os.strerror(error.errno)
        return error.strerror or str(error.os_error)
    return str(error) or type(error).__name__


def add_options(parser: CommandParser) -> None:
    """Add the options that name a service and a model to *parser*."""
    parser.add_argument(
        "--url", metavar="URL", help=f"The service. (default: {URL_VARIABLE} of the environment, or {DEFAULT_URL})"
    )
    parser.add_argument("--model", metavar="NAME", help="The model. (default: the first that generates text)")
    parser.epilog = f"The key of the service is read from {KEY_VARIABLE} in the environment."


def endpoint_of(url: str | None, environ: Mapping[str, str] = os.environ) -> Endpoint:
    """
    Return the service at *url*, or at the URL of *environ*, with the key of *environ*.

    A URL without a scheme is one of HTTP, and one without a path is that of a service whose API is below ``/v1``.
    Raises :class:`ConfigurationError`.
    """
    written = url or environ.get(URL_VARIABLE) or DEFAULT_URL
    origin = "--url"
    if not url:
        origin = URL_VARIABLE
    full = written
    if "://" not in full:
        full = f"http://{full}"
    wrong = ConfigurationError(f"{origin}: {written!r} is not accepted: expected a URL such as {DEFAULT_URL}.")
    try:
        parts = urlsplit(full)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise wrong
    if parts.username is not None:
        raise ConfigurationError(f"{origin} has a user name in it: set {KEY_VARIABLE} to the key instead.")
    path = parts.path.rstrip("/")
    if not path:
        path = "/v1"
    # As people copy it.
    path = path.removesuffix("/chat/completions")
    key = environ.get(KEY_VARIABLE, "").strip() or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigurationError(f"{KEY_VARIABLE} has characters that no key has.")
    return Endpoint(f"{parts.scheme}://{parts.netloc}{path}", key)


def _proxy_for(url: str) -> str | None:
    """Return the proxy of the environment for *url*; there is none for this machine itself."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "::1") or host.startswith("127.") or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)
