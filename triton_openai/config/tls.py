"""TLS contexts made of files that change: new handshakes use the newest ones, connections that exist go on."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triton_openai.config.files import FromFiles, read_file
from triton_openai.config.tree import TlsSettings
from triton_openai.errors import ConfigurationError

# For TLS 1.2, whose defaults include weaker ones; those of TLS 1.3 are all good. These have forward secrecy and
# authenticated encryption (Mozilla's "intermediate" list without its finite-field groups).
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
#: With TLS 1.3 a server refuses a client's certificate after the client has finished the handshake. Its alert is lost
#: if the connection is reset before the client reads it.
PERHAPS_REFUSED = "TLS: closed without an answer; perhaps this service's certificate was not accepted"


class ReloadingContext(ssl.SSLContext):
    """
    A context that makes every handshake by the newest context of *read*, made again when one of *paths* has changed.

    A context that is in use cannot be changed safely: a certificate and its key are two calls, and an authority, once
    added, stays. Works with asyncio's and uvloop's transports, which come through :meth:`wrap_bio`.
    """

    #: Returns the newest context; the same object until a file changes.
    current: Callable[[], ssl.SSLContext]

    @classmethod
    def of(
        cls, protocol: int, read: Callable[[], ssl.SSLContext], paths: Sequence[Path | None], *, what: str
    ) -> ReloadingContext:
        """Return a context for *protocol*. Raises :class:`ConfigurationError`, as *read* does."""
        context = cls(protocol)
        context.current = FromFiles(read, paths, what=what).current
        return context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a handshake."""
        return self.current().wrap_bio(*arguments, **options)


def server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the context to serve with; ``None`` for plain HTTP. Raises :class:`ConfigurationError`."""
    certificate = settings.certificate
    if certificate is None:
        for name in ("key", "client_ca"):
            if getattr(settings, name) is not None:
                raise ConfigurationError(f"--tls-{name.replace('_', '-')} needs --tls-certificate.")
        return None

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        # With renegotiation, a client can waste CPU time of the server.
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        load_identity(context, certificate, settings.key, prefix="--tls")
        if settings.client_ca is not None:
            load_authorities(context, settings.client_ca, "--tls-client-ca")
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    paths = (certificate, settings.key, settings.client_ca)
    return ReloadingContext.of(ssl.PROTOCOL_TLS_SERVER, read, paths, what="the certificate of this service")


def load_identity(context: ssl.SSLContext, certificate: Path, key: Path | None, *, prefix: str) -> None:
    """Give *context* a certificate and its key; *prefix* begins their flags. Raises :class:`ConfigurationError`."""
    read_file(certificate, f"{prefix}-certificate")
    if key is not None:
        read_file(key, f"{prefix}-key")
    named = key or certificate

    def refuse() -> str:
        # Without this callback OpenSSL would ask at the terminal.
        raise ConfigurationError(f"The key in {named} is encrypted; give one without a passphrase.")

    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"The private key {named} does not belong to the certificate {certificate}."
        elif key is None:
            problem = (
                f"The file {named} must hold a certificate and its private key (PEM), or {prefix}-key name the key."
            )
        else:
            # The other reasons ("PEM lib", "no start line") do not say which of the two files is wrong.
            problem = f"{certificate} must be a certificate and {key} its private key, both PEM ({error.reason})."
        raise ConfigurationError(problem) from error


def load_authorities(context: ssl.SSLContext, path: Path, origin: str) -> None:
    """Add the authorities in *path* to those that *context* trusts. Raises :class:`ConfigurationError`."""
    read_file(path, origin)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigurationError(f"The file {path} given by {origin} holds no certificate (PEM).") from error


def failure_reason(error: BaseException) -> str:
    """Return why a connection failed, for the log; for a certificate that is not accepted, why not."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the certificate was not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}"
    # asyncio replaces the system's words, and lists an error for each address of a name.
    if isinstance(error, OSError) and (number := re.search(r"\[Errno (\d+)\]", str(error))):
        return os.strerror(int(number[1]))
    if isinstance(error, TimeoutError):
        return "Connection timed out"
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
