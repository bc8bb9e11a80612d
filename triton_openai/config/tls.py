"""Settings of encryption and of who is who: towards clients, and towards Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """HTTPS. All files are PEM, and are read again when they change."""

    certificate: Annotated[
        Path | None,
        Meta(
            description="Serve HTTPS with this certificate and the chain that follows it in the file.",
            extra={"name": "tls-certificate", "metavar": "FILE"},
        ),
    ] = None
    key: Annotated[
        Path | None,
        Meta(
            description="The certificate's private key, where it is not in the certificate's file.",
            extra={"name": "tls-key", "metavar": "FILE"},
        ),
    ] = None
    key_passphrase: Annotated[
        str | None,
        Meta(
            description="Passphrase of an encrypted key. Other users see flags: set it in the environment.",
            extra={"name": "tls-key-passphrase", "metavar": "TEXT"},
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
            description="Authorities that may have signed Triton's certificate, instead of the commonly trusted ones.",
            extra={"name": "triton-ca", "metavar": "FILE"},
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
            extra={"name": "triton-key-passphrase-file", "metavar": "FILE"},
        ),
    ] = None
    server_name: Annotated[
        str | None,
        Meta(
            description="Name that Triton's certificate must have, where it is not the one in the address.",
            extra={"name": "triton-server-name", "metavar": "NAME"},
        ),
    ] = None
    insecure_skip_verify: Annotated[
        bool,
        Meta(
            description="Accept any certificate over https://. Whoever can come between reads and changes everything.",
            extra={"name": "triton-insecure-skip-verify"},
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
            extra={"name": "triton-token-file", "metavar": "FILE"},
        ),
    ] = None
