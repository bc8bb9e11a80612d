"""TLS of the gRPC relay: that of the service, made of the same files, and made again when they change."""

from __future__ import annotations

import grpc

from triton_openai.config.tls import TlsSettings
from triton_openai.errors import ConfigurationError
from triton_openai.tls import server_context
from triton_openai.watched_files import FromFiles, read_file


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials | None:
    """
    Return what to listen with; ``None`` without TLS.

    New connections get the newest certificate. Raises :class:`ConfigurationError`, also for a key with a passphrase,
    which gRPC does not take.
    """
    certificate, key, client_ca = settings.certificate, settings.key, settings.client_ca
    if certificate is None:
        return None
    if settings.key_passphrase is not None or settings.key_passphrase_file is not None:
        raise ConfigurationError(
            "--enable-kserve-frontends needs a key without a passphrase in --tls-key: gRPC takes no other."
        )

    def read() -> grpc.ServerCertificateConfiguration:
        # gRPC would report files that do not fit only as connections that fail.
        server_context(settings)
        chain = read_file(certificate, "--tls-certificate")
        pair = (chain if key is None else read_file(key, "--tls-key"), chain)
        roots = None if client_ca is None else read_file(client_ca, "--tls-client-ca")
        return grpc.ssl_server_certificate_configuration([pair], roots)

    files = FromFiles(read, (certificate, key, client_ca), what="the certificate of the gRPC relay")
    return grpc.dynamic_ssl_server_credentials(files.current(), files.current, client_ca is not None)
