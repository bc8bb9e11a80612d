"""The servers of stores: PostgreSQL, Redis, S3, a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.ports import free_port, free_ports
from tests.programs import found
from tests.stopped import stop_process

# What a server, or a program that starts it, may take.
_SECONDS = 120


class Server:
    """
    The server of a store, which *start* and *stop* start and stop on its port.

    Each *url* is that of an empty database. *main* returns the id of its main process, which starts all others.
    """

    def __init__(
        self,
        url: Callable[[], str],
        start: Callable[[], None],
        stop: Callable[[], None],
        main: Callable[[], int],
    ) -> None:
        self.url, self.start, self.stop = url, start, stop
        self._main = main
        self._stopped: list[int] = []

    def freeze(self) -> None:
        """
        Stop all processes of the server: connections stay open and nothing answers. The end of the test continues them.

        The main process stops first: from then on, none of the others is started, and the id of none is given to
        another process.
        """
        main = self._main()
        self._stopped = [main]
        _FROZEN.append(self)
        stop_process(main)
        for child in map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split()):
            self._stopped.append(child)
            stop_process(child)

    def thaw(self) -> None:
        """Continue all processes, the main process last. Nothing happens if the server is not frozen."""
        for process in reversed(self._stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        if self._stopped:
            self._stopped = []
            _FROZEN.remove(self)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the server for the block."""
        try:
            self.freeze()
            yield
        finally:
            self.thaw()


_FROZEN: list[Server] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Continue what a test has left frozen, before fixtures and its event loop wait for the end of connections."""
    while _FROZEN:
        _FROZEN[0].thaw()


def _run(command: Sequence[str], **options: Any) -> None:
    """Run a program of a server. Raises an error that has the program's output if it fails, or takes too long."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
        **options,
    )
    assert 0 == done.returncode, f"{command[0]} failed: {done.stdout}"


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A PostgreSQL of its own."""
    pytest.importorskip("asyncpg")
    with running_postgresql(found("PostgreSQL")) as server:
        yield server


@contextlib.contextmanager
def running_postgresql(control_program: str) -> Iterator[Server]:
    """Run a PostgreSQL with the programs beside `pg_ctl`, whose path is *control_program*."""
    # Its other programs are beside it; a link to it may stand elsewhere.
    programs = Path(control_program).resolve().parent
    port, numbers = free_port(), count()
    # It does not run as root, who alone can enter pytest's own folders.
    user: dict[str, Any] = {"user": "nobody"} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, "nobody")
        data = f"{folder}/data"
        _run([f"{programs}/initdb", "-D", data, "-U", "t", "-A", "trust", "-N"], **user)
        options = f"-p {port} -h 127.0.0.1 -k {folder} -c fsync=off"

        def control(*what: str) -> None:
            _run([f"{programs}/pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", *what], **user)

        def url() -> str:
            name = f"test{next(numbers)}"
            command = [f"{programs}/createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "t", "-S", "file_copy", name]
            _run(command, **user)
            return f"postgresql://t@127.0.0.1:{port}/{name}"

        def main() -> int:
            return int(Path(data, "postmaster.pid").read_text().split()[0])

        start = partial(control, "-o", options, "start")
        start()
        stop = partial(control, "-m", "immediate", "stop")
        server = Server(url, start, stop, main)
        try:
            yield server
        finally:
            server.thaw()
            stop()


@pytest.fixture(scope="session", params=["refuses", "ignores"])
def pgbouncer(request: pytest.FixtureRequest, postgresql: Server) -> Iterator[Callable[[], str]]:
    """
    What makes addresses of empty databases behind a PgBouncer in transaction mode.

    It refuses or ignores what a client sets when it connects. More clients than it has connections share these.
    """
    program, port = found("PgBouncer"), free_port()
    direct = urlsplit(postgresql.url())
    ignored = "ignore_startup_parameters = idle_in_transaction_session_timeout, search_path"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "users").write_text('"t" ""\n')
        Path(folder, "ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={direct.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {folder}/users\n"
            f"pool_mode = transaction\ndefault_pool_size = 2\n"
            f"{ignored if request.param == 'ignores' else ''}\n"
        )
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = {"user": "nobody"}
            shutil.chown(folder, "nobody")
        process = subprocess.Popen([program, f"{folder}/ini"], stderr=subprocess.DEVNULL, **user)
        try:
            _until_open(port, process)
            yield lambda: f"postgresql://t@127.0.0.1:{port}{urlsplit(postgresql.url()).path}"
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis of its own."""
    pytest.importorskip("redis")
    found("Redis")
    port, numbers = free_port(), count()
    # It writes nothing there.
    folder = str(tmp_path_factory.mktemp("redis"))
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen([*command, "--databases", "1000"], stdout=subprocess.DEVNULL))
        _until_open(port, running[-1])

    def stop() -> None:
        running[-1].kill()
        running.pop().wait()

    def main() -> int:
        return running[-1].pid

    start()
    try:
        yield Server(lambda: f"redis://127.0.0.1:{port}/{next(numbers)}", start, stop, main)
    finally:
        stop()


class Bucket(NamedTuple):
    """An empty bucket: its address, and the variables of who uses it."""

    url: str
    environ: Mapping[str, str]


@pytest.fixture(scope="session")
def s3() -> Iterator[Callable[[], Bucket]]:
    """What makes buckets of an S3 server of its own."""
    pytest.importorskip("obstore")
    with running_s3(found("SeaweedFS")) as make_bucket:
        yield make_bucket


@contextlib.contextmanager
def running_s3(program: str) -> Iterator[Callable[[], Bucket]]:
    """Run the S3 server *program*; yield what makes buckets of it."""
    numbers = count()
    environ = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    kinds = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Path(folder, "log").open("w") as log:
        command = [program, "server", "-s3", "-s3.iam=false", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        # What nobody asks has fixed ports, of which a second server would die.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        # A bucket has a few volumes of its own.
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=16", "-volume.max=1000"]
        # Without it, nothing is written while less than a hundredth of the disk is free.
        command += ["-volume.minFreeSpace=10MiB"]

        def start() -> tuple[int, subprocess.Popen[bytes]]:
            names = (*kinds, "s3.port", "s3.port.grpc")
            ports = dict(zip(names, free_ports(len(names)), strict=True))
            options = [f"-{kind}={port}" for kind, port in ports.items()]
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log, env={**os.environ, **environ})
            return ports["s3.port"], process

        # Another program may have taken one of so many ports meanwhile.
        port, process = start()
        for _ in range(4):
            if _opens(port, process):
                break
            port, process = start()
        try:
            _until_open(port, process)
            environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"

            def bucket() -> Bucket:
                name = f"test-{next(numbers)}"
                _wait_for_bucket(name, environ)
                return Bucket(f"s3://{name}/some/prefix", environ)

            yield bucket
        finally:
            process.kill()
            process.wait()


def _wait_for_bucket(name: str, environ: Mapping[str, str]) -> None:
    """
    Wait until an object can be put into the bucket *name*, read and deleted.

    The server listens before its parts have found each other, and makes a bucket with its first object.
    """
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        name,
        endpoint=environ["AWS_ENDPOINT_URL"],
        access_key_id=environ["AWS_ACCESS_KEY_ID"],
        secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
        region=environ["AWS_REGION"],
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            obstore.put(store, "probe", b"probe")
            read = bytes(obstore.get(store, "probe").bytes())
            obstore.delete(store, "probe")
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            assert read == b"probe"
            return


@pytest.fixture
def bucket(s3: Callable[[], Bucket], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, which this process may use."""
    made = s3()
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    return made


def _until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    assert _opens(port, process), f"nothing listens at port {port}; exit status of the server: {process.poll()}"


def _opens(port: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until *process* listens at *port*, and return whether it does: it may have ended, or take too long."""
    deadline = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            time.sleep(0.005)
            continue
        return True
    return False


@pytest.fixture
def file(tmp_path: Path) -> Server:
    """A file; when it is stopped, a folder stands in its place."""
    path = tmp_path / "state" / "file"

    def stop() -> None:
        path.unlink()
        path.mkdir()

    def main() -> int:
        raise NotImplementedError

    return Server(lambda: f"sqlite:{path}", path.rmdir, stop, main)


@pytest.fixture(params=["memory", "file", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The address of an empty store of each kind."""
    if request.param == "memory":
        return "memory"
    server: Server = request.getfixturevalue(request.param)
    return server.url()


class Place(NamedTuple):
    """Where files and batches are kept, and a folder for the machines that share them."""

    folder: Path
    files: str
    batches: str


def local(folder: Path) -> Place:
    """Return a place on one machine."""
    return Place(folder, f"dir:{folder / 'files'}", f"sqlite:{folder / 'db'}")


@pytest.fixture(params=["one machine", "several machines"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A folder and SQLite, and a bucket and PostgreSQL."""
    return local(tmp_path) if request.param == "one machine" else request.getfixturevalue("shared")


@pytest.fixture
def shared(postgresql: Server, bucket: Bucket, tmp_path: Path) -> Place:
    """A bucket and PostgreSQL."""
    return Place(tmp_path, bucket.url, postgresql.url())
