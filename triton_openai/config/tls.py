"""
Encryption and credentials: towards clients, and towards Triton.

The settings, and the TLS contexts made of their files, which change: new handshakes use the newest files, connections
that exist go on.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from triton_openai.config.files import FromFiles, read_file, read_secret
from triton_openai.errors import ConfigurationError

# For TLS 1.2, whose defaults hold more than these; TLS 1.3 has only good ones. All have forward secrecy and
# authenticated encryption (Mozilla's "intermediate" list without its finite-field groups).
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """HTTPS. All files are PEM, and are read again when they change."""

    certificate: Annotated[
        Path | None,
        Meta(
            description="Serve HTTPS with this certificate and the chain that follows it in the file.",
            extra={"common": True, "name": "tls-certificate", "metavar": "FILE"},
        ),
    ] = None
    key: Annotated[
        Path | None,
        Meta(
            description="The private key, where it is not in the certificate's file.",
            extra={"common": True, "name": "tls-key", "metavar": "FILE"},
        ),
    ] = None
    key_passphrase_file: Annotated[
        Path | None,
        Meta(
            description="File whose first line is the passphrase of an encrypted key.",
            extra={"name": "tls-key-passphrase-file", "metavar": "FILE"},
        ),
    ] = None
    client_ca: Annotated[
        Path | None,
        Meta(
            description="Accept only clients that have a certificate from one of these authorities.",
            extra={"name": "tls-client-ca", "metavar": "FILE"},
        ),
    ] = None


class TritonAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Triton behind https:// or grpcs://, or behind something that asks for credentials. Files are read again when
    they change."""

    ca: Annotated[
        Path | None,
        Meta(
            description="Authorities that sign Triton's certificate; without it the commonly trusted ones.",
            extra={"common": True, "name": "triton-ca", "metavar": "FILE"},
        ),
    ] = None
    certificate: Annotated[
        Path | None,
        Meta(
            description="Certificate to show to Triton, with its chain.",
            extra={"name": "triton-certificate", "metavar": "FILE"},
        ),
    ] = None
    key: Annotated[
        Path | None,
        Meta(
            description="Private key of that certificate, where it is not in the same file.",
            extra={"name": "triton-key", "metavar": "FILE"},
        ),
    ] = None
    key_passphrase_file: Annotated[
        Path | None,
        Meta(
            description="File whose first line is the passphrase of that key; only for https://.",
            extra={"file_only": True, "name": "triton-key-passphrase-file"},
        ),
    ] = None
    server_name: Annotated[
        str | None,
        Meta(
            description="Name that Triton's certificate must have, where it is not the one in the address.",
            extra={"file_only": True, "name": "triton-server-name"},
        ),
    ] = None
    insecure_skip_verify: Annotated[
        bool,
        Meta(
            description="Accept any certificate over https://. Whoever can come between reads and changes everything.",
            extra={"file_only": True, "name": "triton-insecure-skip-verify"},
        ),
    ] = False
    headers: Annotated[
        tuple[str, ...],
        Meta(
            description="Header to send to Triton with everything (over gRPC as metadata), NAME:VALUE. May be given "
            "several times; in the environment one per line.",
            extra={"name": "triton-header", "metavar": "NAME:VALUE", "verbatim": True},
        ),
    ] = ()
    token_file: Annotated[
        Path | None,
        Meta(
            description="File with a token, sent to Triton as `Authorization: Bearer`.",
            extra={"common": True, "name": "triton-token-file", "metavar": "FILE"},
        ),
    ] = None


class ReloadingContext(ssl.SSLContext):
    """
    A context that hands every handshake to the newest one of *read*, made again when one of *paths* has changed.

    A context that is in use cannot be changed safely: a certificate and its key are two calls, and an authority, once
    added, stays. Works with asyncio's and uvloop's transports, which come through :meth:`wrap_bio`.
    """

    _contexts: FromFiles[ssl.SSLContext]

    @classmethod
    def of(
        cls, protocol: int, read: Callable[[], ssl.SSLContext], paths: Sequence[Path | None], *, what: str
    ) -> ReloadingContext:
        """Return a context for *protocol*. Raises :class:`ConfigurationError`, as *read* does."""
        context = cls(protocol)
        context._contexts = FromFiles(read, paths, what=what)
        return context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Begin a handshake."""
        return self._contexts.current().wrap_bio(*arguments, **options)


def server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the context to serve with; ``None`` for plain HTTP. Raises :class:`ConfigurationError`."""
    certificate = settings.certificate
    if certificate is None:
        for name in ("key", "key_passphrase_file", "client_ca"):
            if getattr(settings, name) is not None:
                raise ConfigurationError(f"--tls-{name.replace('_', '-')} means nothing without --tls-certificate.")
        return None

    def read() -> ssl.SSLContext:
        file = settings.key_passphrase_file
        passphrase = None if file is None else read_secret(file, "--tls-key-passphrase-file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(_CIPHERS)
        # Renegotiation is a way to make a server work for nothing.
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        load_identity(context, certificate, settings.key, passphrase, prefix="--tls")
        if settings.client_ca is not None:
            load_authorities(context, settings.client_ca, "--tls-client-ca")
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    paths = (certificate, settings.key, settings.key_passphrase_file, settings.client_ca)
    return ReloadingContext.of(ssl.PROTOCOL_TLS_SERVER, read, paths, what="the certificate of this service")


def load_identity(
    context: ssl.SSLContext, certificate: Path, key: Path | None, passphrase: str | None, *, prefix: str
) -> None:
    """
    Give *context* a certificate and its key; *prefix* is how the flags begin that name them.

    Raises :class:`ConfigurationError`, with what is wrong with which file.
    """
    read_file(certificate, f"{prefix}-certificate")
    if key is not None:
        read_file(key, f"{prefix}-key")

    asked = False

    def ask() -> str:
        nonlocal asked
        asked = True
        # Without this the library would ask whoever sits at the terminal.
        if passphrase is None:
            raise ConfigurationError(f"The key in {key or certificate} is encrypted: {prefix}-key-passphrase-file.")
        return passphrase

    try:
        context.load_cert_chain(certificate, key, password=ask)
    except ssl.SSLError as error:
        raise ConfigurationError(_identity_problem(error, certificate, key, prefix, decrypted=asked)) from error


def load_authorities(context: ssl.SSLContext, path: Path, origin: str) -> None:
    """Let *context* trust the authorities in *path*. Raises :class:`ConfigurationError`."""
    read_file(path, origin)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigurationError(f"The file {path} given by {origin} holds no certificate (PEM).") from error


def _identity_problem(error: ssl.SSLError, certificate: Path, key: Path | None, prefix: str, *, decrypted: bool) -> str:
    reason = error.reason or ""
    if reason == "KEY_VALUES_MISMATCH":
        return f"The private key {key or certificate} does not belong to the certificate {certificate}."
    if decrypted:
        return f"The private key {key or certificate} cannot be decrypted with this passphrase."
    if key is None:
        return (
            f"The file {certificate} must hold a certificate and its private key (PEM), or {prefix}-key name the key."
        )
    # What else there is ("PEM lib", "no start line") does not say which of the two files it means.
    return f"{certificate} must be a certificate and {key} its private key, both PEM ({reason or 'not readable'})."


#: Since TLS 1.3 a server refuses a client's certificate when the handshake is over for the client; its word about that
#: is lost where the connection is reset before it was read.
PERHAPS_REFUSED = "TLS: closed without an answer; perhaps this service's certificate was not accepted"


def words(error: BaseException) -> str:
    """Return what went wrong in a handshake, for the log: what was wrong with the certificate, where it was that."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the certificate was not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return f"{type(error).__name__}: {error}"
