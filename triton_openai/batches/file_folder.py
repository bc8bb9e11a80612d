"""
Files in a folder: written as they arrive, and in the tables once they are on the disk.

The files of the folder are named by the ids that this service made. What clients call them is data. Beside them are
the inputs of Anthropic's batches (``ID.requests``), the parts of results (``ID-GENERATION.part``), and what is being
written (``ID.new``), and a lock of each process that runs batches (``HOLDER.lock``).
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from triton_openai.config.files import state_folder
from triton_openai.config.tree import BatchesSettings, FilesSettings
from triton_openai.storage.batch_store import BatchStore, StoredFile, failed_write, lacking
from triton_openai.storage.sqlite import SqliteDatabase

_log = structlog.get_logger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
# Bytes that are written at once.
_PIECE = 256 * 1024
# Seconds after which an upload that has not ended never will.
_UPLOAD_SECONDS = 86_400.0
_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "9p", "lustre"}
)


class Files:
    """Files and the tables about them. Nothing is made before the first file is."""

    def __init__(self, settings: FilesSettings, batches: BatchesSettings) -> None:
        self.settings = settings
        given, database = settings.store.partition(":")[2], batches.store.partition(":")[2]
        self.folder = Path(given) if given else state_folder() / "files"
        self._path = Path(database) if database else state_folder() / "batches.sqlite"
        self.store = BatchStore(SqliteDatabase(self._path, lacking, synchronous="FULL"))

    @property
    def exist(self) -> bool:
        """Whether a file has ever been made."""
        return self._path.exists()

    def unusable(self) -> str | None:
        """Return why nothing can be kept here; ``None`` if it can."""
        for path in (self.folder, self._path.parent):
            there = next(one for one in (path, *path.absolute().parents) if one.exists())
            if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
                return f"{path} cannot be written to"
        kind = _file_system(self._path)
        return f"{self._path} is on {kind}, where SQLite loses data" if kind in _SHARED else None

    async def write(self, file_id: str) -> Writing:
        """Begin to write the file of *file_id*. Raises :class:`ServiceError` if the disk cannot."""

        def begin() -> int:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(self.folder / f"{file_id}.new", os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)

        return Writing(self.folder, file_id, await on_disk(begin))

    async def unlink(self, *names: str) -> None:
        """Delete what the folder has of *names*."""

        def unlink() -> None:
            for name in names:
                (self.folder / name).unlink(missing_ok=True)

        await on_disk(unlink)

    async def delete(self, file: StoredFile) -> bool:
        """Delete *file*, unless an open batch reads it; return whether it was deleted."""
        if not await self.store.drop_file(file.id):
            return False
        await self.unlink(file.id)
        return True

    async def sweep(self) -> None:
        """Delete what has expired, and what nobody needs any more."""
        now = time.time()
        oldest = now - self.settings.max_age * 86_400
        gone = await self.store.drop_expired(uploads_before=now - _UPLOAD_SECONDS, batches_before=oldest)
        left = await on_disk(self._left, now - _UPLOAD_SECONDS)
        batches = await self.store.open_batches()
        await self.unlink(*gone, *(name for name in left if name.partition(".")[0].partition("-")[0] not in batches))
        if gone:
            _log.info("files and batches have expired", number=len(gone))

    def hold(self, holder: str) -> int:
        """
        Let others see that *holder* lives, as long as this process has the descriptor that is returned.

        Raises ``OSError`` if the disk cannot.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.folder / f"{holder}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def has_died(self, holder: str) -> bool:
        """Return whether the process of *holder* has ended, as far as is known. One that is frozen has not."""
        path = self.folder / f"{holder}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        path.unlink(missing_ok=True)
        return True

    def _left(self, before: float) -> Sequence[str]:
        """Return incomplete files that were last changed before *before*, and locks of processes that have died."""
        if not self.folder.exists():
            return ()
        suffixes = (".new", ".part", ".requests", ".lock")
        left = [one.name for one in os.scandir(self.folder) if one.name.endswith(suffixes) and _modified(one) < before]
        return [name for name in left if not name.endswith(".lock") or self.has_died(name.removesuffix(".lock"))]


def _modified(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except FileNotFoundError:
        return math.inf


class Writing:
    """A file that is being written; it is there as a whole after :meth:`end`, or not at all."""

    def __init__(self, folder: Path, name: str, descriptor: int) -> None:
        self._new, self._path = folder / f"{name}.new", folder / name
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
        """Write the rest, and let the file have its name once all of it is on the disk."""

        def end() -> None:
            self._write()
            os.fsync(self._descriptor)
            self._new.rename(self._path)
            sync_folder(self._path.parent)

        await on_disk(end)
        self.close()

    def close(self) -> None:
        """Delete what has not ended."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._new.unlink(missing_ok=True)


def write_at(descriptor: int, data: bytes, place: int | None) -> None:
    """Write all of *data*, at *place* or behind what was written before."""
    view = memoryview(data)
    while view:
        count = os.write(descriptor, view) if place is None else os.pwrite(descriptor, view, place)
        view, place = view[count:], None if place is None else place + count


def sync_folder(folder: Path) -> None:
    """Let the names in *folder* survive a failure of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def on_disk(work: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
    """Return what *work* returns, in a thread. Raises :class:`ServiceError` if the disk cannot."""
    try:
        return await asyncio.to_thread(work, *args, **options)
    except OSError as error:
        raise failed_write(error) from error


def _file_system(path: Path) -> str:
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
    return found[found.index("-") + 1] if found else ""
