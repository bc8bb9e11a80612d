"""The addresses of a name, as of a headless service, come and go: a real DNS server, and the system's resolver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.clients.service import Service, serving, until
from tests.fleet.conftest import One, port_of
from tests.programs import found, needs

_CLONE_NEWNS = 0x0002_0000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000


class Names:
    """A DNS server that knows what *addresses* say."""

    def __init__(self, folder: Path) -> None:
        self._hosts = folder / "hosts"
        # Resolvers ask at port 53 alone; the address is its own.
        self._address = f"127.{random.randrange(64, 128)}.{random.randrange(256)}.{random.randrange(1, 255)}"
        self.resolv_conf = folder / "resolv.conf"
        self.resolv_conf.write_text(f"nameserver {self._address}\noptions attempts:1 timeout:5\n")
        self._process: subprocess.Popen[bytes] | None = None

    def set(self, **addresses: list[str]) -> None:
        """Answer with *addresses* from now on."""
        self._hosts.write_text("".join(f"{one} {name}.test\n" for name, every in addresses.items() for one in every))
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def start(self) -> None:
        """Answer."""
        flags = f"--listen-address={self._address} --addn-hosts={self._hosts} --user=root --group= --pid-file="
        flags += " --conf-file=/dev/null --keep-in-foreground --bind-interfaces --no-resolv --no-hosts"
        self._process = subprocess.Popen([found("dnsmasq"), *flags.split()], stderr=subprocess.PIPE)

    def stop(self) -> None:
        """Answer nobody."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextlib.contextmanager
def names_in(folder: Path) -> Iterator[Names]:
    """Run a DNS server."""
    names = Names(folder)
    try:
        yield names
    finally:
        names.stop()


def _resolve_with(resolv_conf: Path) -> None:
    """Give this process another ``/etc/resolv.conf``."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(_CLONE_NEWNS),
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(os.fsencode(resolv_conf), b"/etc/resolv.conf", None, _MS_BIND, None),
    ]
    assert not any(done), os.strerror(ctypes.get_errno())


def _may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def _endpoints(service: Service) -> dict[str, str]:
    return {line["name"]: line["state"] for line in service.send("GET", "/status").json["endpoints"]}


@needs("dnsmasq")
@pytest.mark.skipif(not _may_mount(), reason="This process may not give another one a resolver of its own.")
def test_the_addresses_of_a_name_come_and_go(three: dict[str, One], tmp_path: Path) -> None:
    """Each address is a Triton, once it is there and until it is gone; while no server answers, all of them stay."""
    http, grpc = port_of(three["a"].server.http_url), port_of(three["a"].server.grpc_url)
    flags = ["--endpoint", f"pool=dns+http://pool.test:{http}+grpc://pool.test:{grpc}"]
    # A Triton with addresses of both families is one.
    flags += ["--endpoint", f"both=dns+http://both.test:{http}"]
    flags += ["--tokenizer", str(three["a"].repository.tokenizer)]
    settings = {"triton": {"dns_interval": 0.1, "refresh_interval": 0.2}}
    with names_in(tmp_path) as names:
        names.set(pool=["127.0.0.1", "127.0.0.2"], both=["127.0.0.3", "::1"])
        names.start()
        with serving(tmp_path, *flags, settings=settings, first=partial(_resolve_with, names.resolv_conf)) as service:

            def ready(*numbers: int) -> bool:
                found = {name: state for name, state in _endpoints(service).items() if name.startswith("pool/")}
                return found == {f"pool/127.0.0.{number}": "ready" for number in numbers}

            def answers() -> bool:
                return service.post("/v1/embeddings", {"model": "text_embedding", "input": "a"}).status == 200

            def kept(before: int) -> bool:
                lines = service.log_lines()[before:]
                return any("its old addresses stay" in line and '"pool.test"' in line for line in lines)

            until(lambda: ready(1, 2))
            # Names are looked up one by one, and one that was not found is looked up again.
            until(lambda: 1 == sum(name.startswith("both/") for name in _endpoints(service)))
            names.set(pool=["127.0.0.2", "127.0.0.3"], both=["127.0.0.3", "::1"])
            until(lambda: ready(2, 3))
            assert answers()
            before = len(service.log_lines())
            names.stop()
            until(lambda: kept(before))
            assert ready(2, 3)
            assert answers()
            names.set(pool=["127.0.0.1"])
            names.start()
            until(lambda: ready(1))
            assert answers()
            # A name without addresses is no order to take all Tritons away.
            before = len(service.log_lines())
            names.set()
            until(lambda: kept(before))
            assert ready(1)
            assert answers()
