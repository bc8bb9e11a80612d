"""The connection to a Triton: timeouts, certificates, and the headers of every request."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from triton_openai.config.files import FromFiles, read_file, read_secret
from triton_openai.config.tls import ReloadingContext, load_authorities, load_identity
from triton_openai.config.tree import TritonAccess
from triton_openai.errors import ConfigurationError

_log = structlog.get_logger(__name__)

Header = tuple[str, str]
#: What a gRPC channel is made with: the authorities, its key and its certificate, all PEM.
GrpcFiles = tuple[bytes | None, bytes | None, bytes | None]

#: The access to a Triton that needs no credentials.
OPEN_ACCESS = TritonAccess()

# RFC 9110, 5.6.2. Values are printable ASCII, as gRPC's metadata requires.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[ -~]+")
# Headers that the transports set; "grpc-…" and ":…" belong to gRPC.
_RESERVED = frozenset(
    {"connection", "content-length", "content-type", "expect", "host", "inference-header-content-length", "te",
     "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class ConnectionSettings:
    """
    The connection settings of both transports.

    *connect_timeout* and *control_timeout* (for all calls but inference and loading) are in seconds. Raises
    :class:`ConfigurationError` for unusable files and headers. No message has the values of headers and tokens.
    """

    def __init__(
        self,
        *,
        connect_timeout: float = 5.0,
        control_timeout: float = 10.0,
        access: TritonAccess = OPEN_ACCESS,
    ) -> None:
        self.connect_timeout = connect_timeout
        self.control_timeout = control_timeout
        self.access = access
        if access.key is not None and access.certificate is None:
            raise ConfigurationError("--triton-key needs --triton-certificate.")
        self._fixed = tuple(_parse(text, number) for number, text in enumerate(access.headers, 1))
        self._token: FromFiles[tuple[Header, ...]] | None = None
        #: Whether the headers follow from a file, and may change.
        self.headers_change = access.token_file is not None
        path = access.token_file
        if path is not None:
            token_file = path
            if any(name == "authorization" for name, _ in self._fixed):
                raise ConfigurationError("Use either --triton-token-file or --triton-header Authorization, not both.")
            self._token = FromFiles(
                lambda: (*self._fixed, ("authorization", f"Bearer {_token(token_file)}")),
                (token_file,),
                what="the token for Triton",
            )

    def headers(self) -> tuple[Header, ...]:
        """
        Return the headers of every request, names in lower case.

        Returns the same object until they change, so that callers can cache what they derive from it.
        """
        if self._token is not None:
            return self._token.current()
        return self._fixed

    @property
    def _tls_files(self) -> tuple[Path | None, ...]:
        return self.access.ca, self.access.certificate, self.access.key

    def _read_context(self, protocols: Sequence[str] = ()) -> ssl.SSLContext:
        access = self.access
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if access.ca is not None:
            load_authorities(context, access.ca, "--triton-ca")
        else:
            context.load_default_certs()
        if access.certificate is not None:
            load_identity(context, access.certificate, access.key, prefix="--triton")
        if protocols:
            context.set_alpn_protocols(protocols)
        return context

    def ssl_context(self, *protocols: str) -> ReloadingContext:
        """Return a context for connections that speak *protocols* (ALPN). Raises :class:`ConfigurationError`."""
        read = partial(self._read_context, protocols)
        what = "certificates for Triton"
        return ReloadingContext.of(ssl.PROTOCOL_TLS_CLIENT, read, self._tls_files, what=what)

    def grpc_files(self) -> FromFiles[GrpcFiles]:
        """Return the files for channels of ``grpcs://``. Raises :class:`ConfigurationError`."""

        def read() -> GrpcFiles:
            # gRPC would report wrong files only as a failed connection.
            self._read_context()
            roots = _read(self.access.ca, "--triton-ca")
            certificate = _read(self.access.certificate, "--triton-certificate")
            key = _read(self.access.key, "--triton-key")
            return roots, key or certificate, certificate

        return FromFiles(read, self._tls_files, what="certificates for Triton over gRPC")

    def check(self, urls: Sequence[str]) -> None:
        """Warn if the token is sent to one of *urls* without encryption."""
        for url in urls:
            parts = urlsplit(url)
            if self._token is not None and parts.scheme in ("http", "grpc") and parts.hostname not in _LOCAL:
                _log.warning("the token for Triton is sent without encryption", triton=url)


def _parse(text: str, number: int) -> Header:
    name, colon, value = text.partition(":")
    name = name.strip()
    value = value.strip()
    which = f"--triton-header number {number}"
    if not colon or not _NAME.fullmatch(name):
        raise ConfigurationError(f"{which} is not accepted: write NAME:VALUE.")
    lowered = name.lower()
    if lowered in _RESERVED or lowered.startswith("grpc-"):
        raise ConfigurationError(f"{which} is not accepted: '{name}' is set by the connection itself.")
    if lowered.endswith("-bin"):
        raise ConfigurationError(f"{which} is not accepted: '{name}' would be binary over gRPC.")
    if not _VALUE.fullmatch(value):
        raise ConfigurationError(
            f"{which} is not accepted: the value of '{name}' must be printable ASCII, and not empty."
        )
    return lowered, value


def _read(path: Path | None, option: str) -> bytes | None:
    if path is None:
        return None
    return read_file(path, option)


def _token(path: Path) -> str:
    token = read_secret(path, "--triton-token-file")
    if not _VALUE.fullmatch(token):
        raise ConfigurationError(f"The token in {path} given by --triton-token-file must be printable ASCII.")
    return token


# Half a minute: 15 seconds of silence and 3 probes, 5 seconds apart; and the same time until sent data has to be
# acknowledged. Some systems lack some of them.
_TCP_OPTIONS = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


def detect_dead_peer(transport: asyncio.BaseTransport) -> None:
    """Make *transport* fail within half a minute after its peer disappears, if the system supports that."""
    # uvloop's object is not a socket, but has its methods.
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return
    # The connection works without these options.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
