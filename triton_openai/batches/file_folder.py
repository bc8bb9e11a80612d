"""
Files in a folder: written as they arrive, and in the tables once they are on the disk.

The files of the folder are named by the ids that this service made. What clients call them is data. Beside them are
the inputs of Anthropic's batches (``ID.requests``), the parts of results (``ID-GENERATION.part``), what is being
written (``ID.new``), a lock of each process that runs batches (``HOLDER.lock``), and with PostgreSQL a file by which
services know that they have the same folder (``shared-ID``).
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from triton_openai.config.files import state_folder
from triton_openai.config.tree import BatchesSettings, FilesSettings
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.storage import open_batch_store
from triton_openai.storage.batch_store import OPEN, Batch, StoredFile, failed_write
from triton_openai.telemetry.gauges import BatchState

_log = structlog.get_logger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
# Bytes that are written at once.
_PIECE = 256 * 1024
#: Seconds after which an upload that has not ended never will.
UPLOAD_SECONDS = 86_400.0
#: Seconds for which an upload counts against the limit of its key, and after which that is renewed. Of an upload whose
#: process was killed, the bytes are given back after the first.
UPLOAD_LEASE_SECONDS = 180.0
UPLOAD_RENEWAL_SECONDS = 45.0
# Longest time that a scrape waits for the tables.
_STATE_SECONDS = 2.0
_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "9p", "lustre"}
)


class Files:
    """
    Files in a folder, and the tables about them. Nothing is made before the first file is.

    All processes that share the tables share the folder. Raises :class:`ConfigurationError` if they cannot.
    """

    #: Seconds between the times when results that are here become safe from the loss of this machine; 0 if they are.
    checkpoint = 0.0
    #: Reads a file that is not in the folder; see :meth:`BucketFiles.read`. None: they all are.
    read_remote: Callable[[str, int, int], Awaitable[bytes]] | None = None

    def __init__(self, settings: FilesSettings, batches: BatchesSettings) -> None:
        self.settings = settings
        kind, _, given = settings.store.partition(":")
        if given and kind == "dir":
            self.folder = Path(given)
        else:
            self.folder = state_folder() / "files"
        self.store, self._path = open_batch_store(batches.store)
        self._place: str | None = None
        if self._path is None and settings.store == "dir":
            raise ConfigurationError(
                "--files-store: batches in PostgreSQL need files that all replicas see: s3://BUCKET, or dir:PATH with a"
                " folder that they share."
            )

    @property
    def exist(self) -> bool:
        """Whether a file has ever been made, as far as is known."""
        return self._path is None or self._path.exists()

    def unusable(self) -> str | None:
        """Return why nothing can be kept here; ``None`` if it can."""
        for path in (self.folder, *([] if self._path is None else [self._path.parent])):
            there = next(one for one in (path, *path.absolute().parents) if one.exists())
            if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
                return f"{path} cannot be written to"
        if self._path is None:
            kind = ""
        else:
            kind = file_system(self._path)
        if kind in _SHARED:
            return f"{self._path} is on {kind}, where SQLite loses data"
        return None

    async def check(self) -> None:
        """
        Make sure that the files are where those of the other services on the same PostgreSQL are.

        Raises :class:`ConfigurationError` if they are not, as when a shared folder is not mounted, and
        :class:`ServiceError` if PostgreSQL or the place does not answer.
        """
        if self._path is not None:
            return
        if self._place is None and (found := await self.store.place()) is None:
            # Its file first: whoever finds the name finds the file, too.
            new = f"shared-{os.urandom(16).hex()}"
            await (await self._writing(new)).end()
            found = await self.store.place(new)
        self._place = self._place or found
        assert self._place is not None
        if not await self.has(self._place):
            raise ConfigurationError(
                "--files-store: this is not the place where other services that share the database keep their files:"
                f" '{self._place}' is not there."
            )

    async def has(self, name: str) -> bool:
        """Return whether the file *name* is there. Raises :class:`ServiceError`."""
        return await on_disk((self.folder / name).exists)

    async def write(self, name: str) -> Writing:
        """Begin to write the file *name*. Raises :class:`ServiceError` if the disk cannot."""
        await self.check()
        return await self._writing(name)

    async def _writing(self, name: str) -> Writing:
        return Writing(self, name, await opened(on_disk(self._create, f"{name}.new")))

    async def publish(self, name: str, descriptor: int) -> None:
        """Let the file *name*, all of which was written to *descriptor*, have its name once it is on the disk."""

        def publish() -> None:
            os.fsync(descriptor)
            (self.folder / f"{name}.new").rename(self.folder / name)
            sync_folder(self.folder)

        await on_disk(publish)

    def _create(self, name: str) -> int:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self.folder / name, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)

    async def unlink(self, *names: str) -> None:
        """Delete the files *names*, those that are there."""
        await on_disk(self._unlink, names)

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    async def delete(self, file: StoredFile) -> bool:
        """Delete *file*, unless an open batch reads it; return whether it was deleted."""
        if not await self.store.hide_file(file.id):
            return False
        await self.unlink(file.id)
        await self.store.drop([file.id])
        return True

    async def sweep(self) -> None:
        """Delete what has expired, and what nobody needs any more."""
        now = time.time()
        gone = await self.store.expired(uploads_before=now - UPLOAD_SECONDS)
        # The tables have them until they are gone.
        await self.unlink(*gone)
        await on_disk(self._unlink, [f"{one}.new" for one in gone])
        await self.store.drop(gone, batches_before=now - self.settings.max_age * 86_400)
        left = await on_disk(self._left, now - UPLOAD_SECONDS)
        batches = await self.store.open_batches()
        await on_disk(self._unlink, [one for one in left if one.partition(".")[0].partition("-")[0] not in batches])
        if gone:
            _log.info("files have expired", number=len(gone))

    async def state(self) -> BatchState | None:
        """Return what the tables say of files and batches; ``None`` if they cannot be read soon."""
        batches: Sequence[tuple[Batch, bool]] = ()
        size = 0.0
        now = time.time()
        try:
            async with asyncio.timeout(_STATE_SECONDS):
                if self.exist:
                    batches, size = await self.store.figures()
        except (ServiceError, TimeoutError):
            return None
        counts = Counter(batch.status for batch, _ in batches)
        needed = left = 0.0
        for batch, _ in sorted(batches, key=lambda found: found[0].expires):
            left += batch.total - batch.succeeded - batch.failed
            needed = max(needed, left / max(1.0, batch.expires - now))
        return BatchState(
            statuses={status: counts[status] for status in OPEN},
            lag=max((now - batch.created for batch, waits in batches if waits), default=0.0),
            needed=needed,
            files_bytes=size,
        )

    # What batches read and write

    async def open_input(self, batch: Batch) -> int:
        """Return a descriptor of the requests of *batch*. Raises :class:`OSError`."""
        return await self._open(self.folder / (f"{batch.id}.requests" if batch.input == batch.id else batch.input))

    async def _open(self, path: Path) -> int:
        try:
            return await opened(asyncio.to_thread(os.open, path, os.O_RDONLY))
        except FileNotFoundError:
            # It is there again when the folder is.
            await self.check()
            raise

    def make_part(self, batch: Batch) -> int:
        """Return a descriptor of an empty file for the results of *batch*. Raises :class:`OSError`."""
        descriptor = os.open(self._part(batch, batch.generation), os.O_CREAT | os.O_WRONLY, 0o600)
        sync_folder(self.folder)
        return descriptor

    def _part(self, batch: Batch, generation: int) -> Path:
        return self.folder / f"{batch.id}-{generation}.part"

    async def keep_part(self, batch: Batch, descriptor: int, start: int, end: int) -> None:
        """Let the bytes from *start* to *end* of a part survive the loss of this machine."""

    async def open_part(self, batch: Batch, generation: int) -> int:
        """Return a descriptor of the results of *generation*. Raises :class:`OSError`."""
        return await self._open(self._part(batch, generation))

    async def clear(self, batch: Batch) -> None:
        """Delete what belongs to a *batch* that has ended, and is no file."""
        parts = [self._part(batch, generation).name for generation in range(1, batch.generation + 1)]
        await on_disk(self._unlink, [*parts, f"{batch.id}.requests"])

    # Locks

    def hold(self, holder: str) -> int:
        """
        Let others see that *holder* lives, as long as this process has the descriptor that is returned.

        Raises ``OSError`` if the disk cannot.
        """
        descriptor = self._create(f"{holder}.lock")
        try:
            os.write(descriptor, _machine())
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def has_died(self, holder: str, *, anywhere: bool = False) -> bool:
        """
        Return whether the process of *holder* has ended, as far as is known. One that is frozen has not.

        Of those on other machines nothing is known, since many file systems that are shared do not share locks. With
        *anywhere*, their locks are believed, to delete them: the death of a process without one is noticed later.
        """
        path = self.folder / f"{holder}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            if not (anywhere or self._path is not None or os.read(descriptor, 100) == _machine()):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    async def forget(self, holder: str) -> None:
        """Delete the lock of *holder*, who has no leases any more. Raises :class:`ServiceError` if the disk cannot."""
        await on_disk(self._unlink, [f"{holder}.lock"])

    def _left(self, before: float) -> Sequence[str]:
        """Return incomplete files that were last changed before *before*, and locks of processes that have died."""
        if not self.folder.exists():
            return ()
        suffixes = (".new", ".part", ".requests", ".lock")
        left = [one.name for one in os.scandir(self.folder) if one.name.endswith(suffixes) and _modified(one) < before]
        return [one for one in left if not one.endswith(".lock") or self.has_died(one[: -len(".lock")], anywhere=True)]


def _machine() -> bytes:
    """Return what only processes of this machine have in common, until it is started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return os.uname().nodename.encode()


def _modified(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return math.inf


class Writing:
    """A file *name* that is being written; it is there as a whole after :meth:`end`, or not at all."""

    def __init__(self, files: Files, name: str, descriptor: int) -> None:
        self._files = files
        self._name = name
        self._descriptor = descriptor
        self._pieces: list[bytes] = []
        self._waiting = 0
        #: The bytes that were written.
        self.size = 0

    async def add(self, data: bytes) -> None:
        """Write *data* next. Raises :class:`ServiceError` if the disk cannot."""
        if self._waiting + len(data) >= _PIECE:
            await on_disk(self.put, data)
        else:
            self.put(data)

    def put(self, data: bytes) -> None:
        """Write *data* next, in a thread that may block. Raises :class:`OSError`."""
        self._pieces.append(data)
        self.size += len(data)
        self._waiting += len(data)
        if self._waiting >= _PIECE:
            self._write()

    def _write(self) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting = 0
        write_at(self._descriptor, data, None)

    async def end(self) -> None:
        """Write the rest, and let the file have its name once all of it is kept."""
        await on_disk(self._write)
        await self._files.publish(self._name, self._descriptor)
        self.close()

    def close(self) -> None:
        """Delete what has not ended."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            (self._files.folder / f"{self._name}.new").unlink(missing_ok=True)


def write_at(descriptor: int, data: bytes, place: int | None) -> None:
    """Write all of *data*, at *place* or behind what was written before."""
    view = memoryview(data)
    while view:
        if place is None:
            count = os.write(descriptor, view)
        else:
            count = os.pwrite(descriptor, view, place)
        view = view[count:]
        if place is None:
            place = None
        else:
            place = place + count


def sync_folder(folder: Path) -> None:
    """Let the names in *folder* survive a failure of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def on_disk(work: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
    """
    Return what *work* returns, in a thread. Raises :class:`ServiceError` if the disk cannot.

    Whoever is cancelled goes on when the thread has ended, so that nobody closes a file under it.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
    except OSError as error:
        raise failed_write(error) from error


async def opened(opening: Awaitable[int]) -> int:
    """Return the descriptor that *opening* returns. For whoever is cancelled meanwhile, it is closed."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close)
        raise


def _close(task: asyncio.Future[int]) -> None:
    if not task.cancelled() and task.exception() is None:
        os.close(task.result())


def file_system(path: Path) -> str:
    """Return the type of the file system that *path* is on, an empty text where it is not known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found: Sequence[str] = max(
        (line.split() for line in lines if path.absolute().is_relative_to(line.split()[4])),
        key=lambda fields: len(fields[4]),
        default=(),
    )
    if found:
        return found[found.index("-") + 1]
    return ""
