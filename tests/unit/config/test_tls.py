"""TLS towards clients: which files make a context, and which context a handshake gets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.tls_fixture import Authority
from triton_openai.config import files as watched_files
from triton_openai.config.files import FromFiles
from triton_openai.config.tls import server_context
from triton_openai.config.tree import TlsSettings
from triton_openai.errors import ConfigurationError


@pytest.fixture
def returns_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed files are noticed at once."""
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.0)


@pytest.fixture
def authority(tmp_path: Path, returns_whole: None) -> Authority:
    """An authority; changed files are noticed at once."""
    return Authority(tmp_path)


@asynccontextmanager
async def echoing(settings: TlsSettings) -> AsyncIterator[int]:
    """Serve lines back with the context of *settings*; yields the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line)
        except (ssl.SSLError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context(settings))
    async with server:
        yield server.sockets[0].getsockname()[1]


class Client:
    """A connection to the echo."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, context: ssl.SSLContext) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=context))

    async def echo(self) -> bytes:
        """Send a line and return what comes back."""
        self.writer.write(b"line\n")
        return await asyncio.wait_for(self.reader.readline(), 120)

    @property
    def serial(self) -> str:
        """The serial number of the server's certificate."""
        return str(self.writer.get_extra_info("peercert")["serialNumber"])

    @property
    def version(self) -> str:
        return str(self.writer.get_extra_info("ssl_object").version())

    async def close(self) -> None:
        """Close it, and wait until that is done."""
        self.writer.close()
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await self.writer.wait_closed()


async def served(port: int, context: ssl.SSLContext) -> bool:
    """Return whether a client is served; since TLS 1.3 it learns of a refusal only when it reads."""
    try:
        connection = await Client.connect(port, context)
    except (ssl.SSLError, ConnectionError):
        return False
    try:
        return await connection.echo() != b""
    except (ssl.SSLError, ConnectionError):
        return False
    finally:
        await connection.close()


async def test_plain_without_a_certificate() -> None:
    """Nothing set is plain HTTP; a part without the whole is a mistake."""
    assert server_context(TlsSettings()) is None
    file = Path("/nowhere")
    for part in (TlsSettings(key=file), TlsSettings(client_ca=file)):
        with pytest.raises(ConfigurationError, match="needs --tls-certificate"):
            server_context(part)


@pytest.mark.parametrize("version,served", [("TLSv1_3", True), ("TLSv1_2", True), ("TLSv1_1", False)])
async def test_versions(authority: Authority, version: str, served: bool) -> None:
    """TLS 1.2 and 1.3 are spoken, nothing older."""
    client = authority.client()
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLS") if not served else contextlib.nullcontext():
        client.minimum_version = client.maximum_version = ssl.TLSVersion[version]
    async with echoing(TlsSettings(certificate=authority.issue("a"))) as port:
        if served:
            connection = await Client.connect(port, client)
            assert version == connection.version.replace(".", "_")
            await connection.close()
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await Client.connect(port, client)


async def test_old_ciphers_are_not_spoken(authority: Authority) -> None:
    """No cipher without forward secrecy and authenticated encryption."""
    client = authority.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("ECDHE-ECDSA-AES128-SHA256:ECDHE-RSA-AES128-SHA256:AES128-GCM-SHA256:AES128-SHA")
    async with echoing(TlsSettings(certificate=authority.issue("a"))) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await Client.connect(port, client)


async def test_client_certificates(authority: Authority, tmp_path: Path) -> None:
    """With --tls-client-ca, clients of that authority are served and nobody else."""
    settings = TlsSettings(certificate=authority.issue("a"), client_ca=authority.file)
    stranger = Authority(tmp_path, "stranger")
    async with echoing(settings) as port:
        connection = await Client.connect(port, authority.client(authority.issue("client", "client@test.example")))
        assert b"line\n" == await connection.echo()
        await connection.close()
        for identity in (None, stranger.issue("client"), authority.issue("old", expired=True)):
            assert not await served(port, authority.client(identity))


async def test_renewed_certificates(authority: Authority) -> None:
    """New handshakes see the new certificate, while a connection that was there goes on with the old one."""
    file = authority.issue("a")
    async with echoing(TlsSettings(certificate=file)) as port:
        old = await Client.connect(port, authority.client())
        authority.renew(file)
        new = await Client.connect(port, authority.client())
        assert old.serial != new.serial
        assert (b"line\n", b"line\n") == (await old.echo(), await new.echo())
        await old.close()
        await new.close()


async def test_a_bad_file_changes_nothing(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is none, or a certificate whose key has not come yet, leaves what there was; the log says why."""
    certificate, key = authority.issue("cert"), authority.issue("key")
    leaf = trustme.CA().issue_cert("127.0.0.1")
    pair = authority.issue("pair")
    key.write_bytes(pair.read_bytes())
    certificate.write_bytes(pair.read_bytes())
    async with echoing(TlsSettings(certificate=certificate, key=key)) as port:
        first = await Client.connect(port, authority.client())
        for contents in (b"no certificate\n", leaf.cert_chain_pems[0].bytes(), None):
            certificate.unlink() if contents is None else certificate.write_bytes(contents)
            again = await Client.connect(port, authority.client())
            assert first.serial == again.serial
            await again.close()
        authority.renew(pair)
        key.write_bytes(pair.read_bytes())
        certificate.write_bytes(pair.read_bytes())
        last = await Client.connect(port, authority.client())
        assert first.serial != last.serial
        await first.close()
        await last.close()
    said = capsys.readouterr().out
    assert 3 == said.count("changed files not used")
    assert "does not belong to the certificate" in said


def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, returns_whole: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it changes when descriptors are free again, or its rights have been mended; it is told once."""
    file = tmp_path / "token"
    file.write_text("old")
    fails: list[Exception] = []

    def read() -> str:
        if fails:
            raise fails.pop()
        return file.read_text()

    found = FromFiles(read, (file,), what="the token")
    file.write_text("another")
    fails += [ConfigurationError("No."), ConfigurationError("No."), OSError(24, "Too many open files")]

    assert ["old", "old", "old", "another"] == [found.current() for _ in range(4)]
    assert 2 == capsys.readouterr().out.count("changed files not used")


def test_a_pipe_is_not_waited_for(tmp_path: Path, returns_whole: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The event loop would stand still until somebody writes into it."""
    file = tmp_path / "token"
    file.write_text("old")
    found = FromFiles(file.read_text, (file,), what="the token")
    file.unlink()
    os.mkfifo(file)
    # Whoever waits for it gets this; nobody reads it in time.
    writing = os.open(file, os.O_RDWR)
    os.write(writing, b"new")

    assert ["old", "old"] == [found.current() for _ in range(2)]
    os.close(writing)
    assert 1 == capsys.readouterr().out.count("is a pipe")


async def test_clients_of_a_withdrawn_authority(authority: Authority, tmp_path: Path) -> None:
    """Authorities can be replaced too: the one before is trusted no longer."""
    stranger = Authority(tmp_path, "stranger")
    accepted = tmp_path / "accepted.pem"
    accepted.write_bytes(stranger.file.read_bytes())
    identity = stranger.issue("client")
    async with echoing(TlsSettings(certificate=authority.issue("a"), client_ca=accepted)) as port:
        connection = await Client.connect(port, authority.client(identity))
        assert b"line\n" == await connection.echo()
        accepted.write_bytes(authority.file.read_bytes())
        assert not await served(port, authority.client(identity))
        assert b"line\n" == await connection.echo()
        await connection.close()


def test_encrypted_keys(authority: Authority, tmp_path: Path) -> None:
    """The service does not take them, and nobody is asked for a passphrase."""
    leaf = authority.issue("a")
    key = tmp_path / "key.pem"
    key.write_bytes(
        load_pem_private_key(leaf.read_bytes(), None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open sesame")
        )
    )
    with pytest.raises(ConfigurationError, match="is encrypted; give one without a passphrase"):
        server_context(TlsSettings(certificate=leaf, key=key))


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    """Each mistake is told with the file and the flag."""
    good = authority.issue("a")
    other = authority.issue("b")
    nothing = tmp_path / "nothing"
    nothing.write_text("nothing")
    for settings, message in (
        (
            TlsSettings(certificate=tmp_path / "absent"),
            "by --tls-certificate cannot be read: No such file",
        ),
        (TlsSettings(certificate=good, key=tmp_path / "absent"), "absent given by --tls-key cannot be read"),
        (TlsSettings(certificate=nothing), "must hold a certificate and its private key"),
        (TlsSettings(certificate=authority.file), "must hold a certificate and its private key"),
        (TlsSettings(certificate=good, key=nothing), "nothing its private key"),
        (TlsSettings(certificate=good, key=other), "does not belong to the certificate"),
        (TlsSettings(certificate=good, client_ca=nothing), "given by --tls-client-ca holds no certificate"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            server_context(settings)
