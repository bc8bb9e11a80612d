"""
Files in a folder: written as they arrive, and in the tables once they are on the disk.

The names of the files are ids that this service made; the clients' names are data. The folder also has the inputs of
Anthropic's batches (``ID.requests``), the results of parts of batches (``ID-PART.part``), incomplete files
(``ID.new``), the parts of uploads (``ID.PART.upload``), a lock of each process that runs batches (``HOLDER.lock``), and
the file by which processes announce changes (``poller.lock``).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from triton_openai.batches.changes import Changes
from triton_openai.batches.process_locks import ProcessLocks, names_before
from triton_openai.config.files import state_folder
from triton_openai.config.tree import BatchesSettings, FilesSettings
from triton_openai.errors import ConfigurationError
from triton_openai.storage import open_batch_store
from triton_openai.storage.batch_records import Batch, Line, Part, StoredFile
from triton_openai.storage.batch_tables import failed_write

_log = structlog.get_logger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")
# Bytes that are written at once.
_PIECE = 256 * 1024
#: Seconds after which an upload that has not ended is deleted.
UPLOAD_SECONDS = 86_400.0
#: Seconds for which an upload counts against the limit of its key, and after which that is renewed. The bytes of an
#: upload whose process was killed are free after the first.
UPLOAD_LEASE_SECONDS = 180.0
UPLOAD_RENEWAL_SECONDS = 45.0
# File systems of several machines.
_SHARED = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "9p", "lustre"}
)


class Files:
    """
    Files in a folder, and the tables about them. Nothing is created before the first file is.

    The folder belongs to one machine, and so does the database: replicas have a bucket and PostgreSQL in their place.
    It has more than 20 methods because each is what a folder and a bucket do differently, or what several need.
    Raises :class:`ConfigurationError` for a folder with PostgreSQL.
    """

    #: Seconds after which results become safe from the loss of this machine; 0 if they are safe, or never will be.
    checkpoint = 0.0
    #: Whether the files are elsewhere, and only :meth:`read_piece` reads them.
    remote = False

    def __init__(self, settings: FilesSettings, batches: BatchesSettings) -> None:
        self.settings = settings
        kind, _, path = settings.store.partition(":")
        if path and kind == "dir":
            self.folder = Path(path)
        else:
            self.folder = state_folder() / "files"
        self.store, self._path = open_batch_store(batches.store)
        #: The locks of the processes of this machine that run batches.
        self.locks = ProcessLocks(self.folder)
        self.changes = Changes(self.folder)
        if self._path is None and kind == "dir":
            raise ConfigurationError(
                "--files-store: batches in PostgreSQL need files in a bucket, which all replicas see: s3://BUCKET. A"
                " folder that replicas share is not supported any more; a folder belongs to one machine, with batches"
                " in SQLite (--batches-store sqlite)."
            )

    @property
    def shared(self) -> bool:
        """Whether processes of other machines may use the same tables."""
        return self._path is None

    @property
    def exist(self) -> bool:
        """Whether a file may have been created before."""
        return self._path is None or self._path.exists()

    def unusable(self) -> str | None:
        """Return the reason why nothing can be stored here; ``None`` if it can."""
        paths = [self.folder]
        if self._path is not None:
            paths.append(self._path.parent)
        for path in paths:
            existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
            if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
                return f"{path} cannot be written to"
        if self._path is not None:
            kind = file_system(self._path)
            if kind in _SHARED:
                return f"{self._path} is on {kind}, where SQLite loses data"
        return None

    async def verify(self) -> None:
        """
        Check that this release can use the tables, and that these are the files that belong to them.

        Raises :class:`ConfigurationError` if not, and :class:`ServiceError` if that cannot be found out.
        """
        await self.store.verify()
        await self.check()

    async def check(self) -> None:
        """
        Check that these are the files of the other services on the same tables.

        Raises :class:`ConfigurationError` if they are not, and :class:`ServiceError` if that cannot be found out.
        """

    async def has(self, name: str) -> bool:
        """Return whether the file *name* exists. Raises :class:`ServiceError`."""
        return await on_disk((self.folder / name).exists)

    async def write(self, name: str) -> Writing:
        """Begin to write the file *name*. Raises :class:`ServiceError` if the disk cannot."""
        await self.check()
        return await self.begin_writing(name)

    async def begin_writing(self, name: str) -> Writing:
        """Begin as :meth:`write` does, without a check."""
        return Writing(self, name, await opened(on_disk(self._create, f"{name}.new")))

    async def publish(self, name: str, descriptor: int) -> None:
        """Give the file *name*, all of which was written to *descriptor*, its name once it is on the disk."""

        def publish() -> None:
            os.fsync(descriptor)
            (self.folder / f"{name}.new").rename(self.folder / name)
            sync_folder(self.folder)

        await on_disk(publish)

    def _create(self, name: str) -> int:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self.folder / name, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)

    async def unlink(self, *names: str) -> None:
        """Delete the files *names* that exist."""
        await on_disk(self._unlink, names)

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    async def rename(self, name: str, new_name: str) -> None:
        """Give the file *name* another name, and replace the file that has it. Raises :class:`ServiceError`."""

        def rename() -> None:
            (self.folder / name).rename(self.folder / new_name)
            sync_folder(self.folder)

        await on_disk(rename)

    async def read_piece(self, name: str, start: int, end: int) -> bytes:
        """
        Return the first bytes of the file *name* from *start* to *end*: as many as are read at once.

        Raises :class:`ServiceError`, and :class:`FileNotFoundError` for a missing file if they are remote.
        """
        return await on_disk(_read_piece, self.folder / name, start, min(end, start + _PIECE))

    async def part_sizes(self, file_id: str) -> Mapping[str, int]:
        """Return the bytes of each file that belongs to the upload of a file, by its name."""
        return await on_disk(_sizes, self.folder, f"{file_id}.")

    async def _parts_of(self, file_ids: Collection[str]) -> Sequence[str]:
        """Return the names of what belongs to the uploads of these files."""
        names = await on_disk(_sizes, self.folder, "")
        return [name for name in names if _owner_of_part(name) in file_ids]

    async def delete(self, file: StoredFile) -> bool:
        """Delete *file*, unless an open batch reads it; return whether it was deleted."""
        if not await self.store.files.expire(file.id):
            return False
        await self.unlink(file.id)
        await self.store.files.delete([file.id])
        return True

    async def sweep(self) -> None:
        """Delete files that have expired, and what nobody needs any more."""
        now = time.time()
        expired = await self.store.files.expired_ids(uploads_before=now - UPLOAD_SECONDS)
        # The table has them until they are deleted.
        await self.unlink(*expired)
        await on_disk(self._unlink, [f"{file_id}.new" for file_id in expired])
        if expired:
            await self.unlink(*await self._parts_of(set(expired)))
        await self.store.files.delete(expired)
        await self.store.batches.delete_ended(now - self.settings.max_age * 86_400)
        before = now - UPLOAD_SECONDS
        await on_disk(self._unlink, await on_disk(self.locks.stale_before, before))
        incomplete = await on_disk(names_before, self.folder, (".new", ".part", ".requests", ".upload"), before)
        batches = await self.store.batches.open_ids()
        await on_disk(self._unlink, [name for name in incomplete if _owner_of(name) not in batches])
        for batch_id in await self.store.lines.ended_batches():
            # Their process has ended before it had deleted them.
            await self.store.lines.delete(batch_id)
        await self.store.slots.delete_expired()
        if expired:
            _log.info("files expired", number=len(expired))

    # What batches read and write

    async def open_input(self, batch: Batch) -> int:
        """Return a descriptor of the requests of *batch*. Raises :class:`OSError`."""
        return await self._open(self.folder / input_name(batch))

    async def _open(self, path: Path) -> int:
        return await opened(asyncio.to_thread(os.open, path, os.O_RDONLY))

    async def open_lines(self, batch: Batch) -> int:
        """Return a descriptor for the requests of *batch* that :meth:`load` loads. Raises :class:`OSError`."""
        return await self.open_input(batch)

    async def load(self, batch: Batch, descriptor: int, lines: Sequence[Line]) -> None:
        """Load *lines* into the file of *descriptor*, from :meth:`open_lines`. Raises :class:`ServiceError`."""

    def make_part(self, part: Part) -> int:
        """Return a descriptor of an empty file for the results of *part*. Raises :class:`OSError`."""
        descriptor = os.open(self._part(part), os.O_CREAT | os.O_WRONLY, 0o600)
        sync_folder(self.folder)
        return descriptor

    def _part(self, part: Part) -> Path:
        return self.folder / f"{part.batch}-{part.number}.part"

    async def save_part(self, part: Part, descriptor: int, start: int, end: int) -> None:
        """Make the bytes from *start* to *end* of a part survive the loss of this machine, where that is possible."""

    async def open_part(self, part: Part) -> int:
        """Return a descriptor of the results of *part*. Raises :class:`OSError`."""
        return await self._open(self._part(part))

    async def clear(self, batch: Batch) -> None:
        """Delete what belongs to a *batch* that has ended, and is no file."""
        parts = [self._part(Part(batch.id, number)).name for number in range(1, batch.parts + 1)]
        await on_disk(self._unlink, [*parts, f"{batch.id}.requests"])


def input_name(batch: Batch) -> str:
    """Return the name of the file with the requests of *batch*."""
    if batch.input == batch.id:
        return f"{batch.id}.requests"
    return batch.input


def _owner_of_part(name: str) -> str:
    """Return the id of the file whose upload has the part *name*."""
    file_id, _, _ = name.partition(".")
    return file_id


def _owner_of(name: str) -> str:
    """Return the id of the batch or file that the incomplete file *name* belongs to."""
    stem, _, _ = name.partition(".")
    batch_id, _, _ = stem.partition("-")
    return batch_id


class Writing:
    """A file *name* that is being written. It exists as a whole after :meth:`end`, and not before."""

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
        offset = self.size - self._waiting
        self._pieces.clear()
        self._waiting = 0
        write_at(self._descriptor, data, offset)

    async def end(self) -> None:
        """Write the rest, and give the file its name once all of it is on the disk."""
        await on_disk(self._write)
        await self._files.publish(self._name, self._descriptor)
        self.close()

    def close(self) -> None:
        """Delete the file if it is not complete."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            (self._files.folder / f"{self._name}.new").unlink(missing_ok=True)


def _read_piece(path: Path, start: int, end: int) -> bytes:
    """Return the bytes of a file from *start* to *end*. Runs in a thread."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _sizes(folder: Path, prefix: str) -> dict[str, int]:
    """Return the bytes of the parts of an upload, whose names begin with *prefix*. Runs in a thread."""
    sizes: dict[str, int] = {}
    if not folder.exists():
        return sizes
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.name.endswith(".upload"):
                # Another process may delete it meanwhile.
                with suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of *data* at *offset*."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count


def sync_folder(folder: Path) -> None:
    """Make the names in *folder* survive a failure of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def on_disk(work: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
    """
    Call *work* in a thread, and return its result. Raises :class:`ServiceError` for its :class:`OSError`.

    A caller that is cancelled continues when the thread has ended, so that it closes no file that the thread uses.
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
    """Return the descriptor that *opening* returns. If the caller is cancelled meanwhile, it is closed."""
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
    """Return the type of the file system of *path*; an empty text if it is not known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mounts = [line.split() for line in lines]
    above = [fields for fields in mounts if path.absolute().is_relative_to(fields[4])]
    if not above:
        return ""
    fields = max(above, key=lambda fields: len(fields[4]))
    return fields[fields.index("-") + 1]
