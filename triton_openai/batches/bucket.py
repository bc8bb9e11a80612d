"""
Files in a bucket of S3, or of a compatible server. Incomplete files are in the folder.

A file is the object ``files/ID``. What belongs to a batch that has not ended is below ``batches/ID/``: ``requests`` if
they are no file, and results as ``PART-OFFSET``. The parts of an
upload are there, too, under the id of its file. No object is ever changed, so a reader never sees a part of a write.
Services check by the object ``files/shared-ID``, whose name is in PostgreSQL, that they have the same bucket.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import BufferedReader, FileIO
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from triton_openai import errors
from triton_openai.batches.file_folder import UPLOAD_SECONDS, Files, input_name, on_disk, opened, write_at
from triton_openai.config.tree import BatchesSettings, FilesSettings
from triton_openai.errors import ConfigurationError
from triton_openai.storage.batch_records import Batch, Line, Part

# Bytes that are fetched at once, and those of a part of an upload, of which some are sent at the same time.
_PIECE = 4 * 1024 * 1024
_PART = 8 * 1024 * 1024
_AT_ONCE = 2
# Bytes between two lines that are fetched with them: a request costs more.
_MAX_GAP = 256 * 1024
_RETRIES = 3
_RETRY_TIME = timedelta(seconds=30)


class BucketFiles(Files):
    """
    Files in the bucket that the settings name, and the tables about them. Its methods are those of :class:`Files`.

    Endpoint, region and credentials come from the environment variables that all tools for S3 use.
    """

    remote = True

    def __init__(self, settings: FilesSettings, batches: BatchesSettings) -> None:
        super().__init__(settings, batches)
        bucket, _, prefix = settings.store.removeprefix("s3://").partition("/")
        self.bucket = S3Store(
            bucket,
            prefix=prefix or None,
            # A server on the same network may have no certificate; its address says so.
            client_options={"allow_http": True},
            retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIME},
        )
        self.checkpoint = batches.checkpoint
        self._bucket_id: str | None = None

    async def check(self) -> None:
        if not self.shared:
            return
        if self._bucket_id is None:
            self._bucket_id = await self.store.files.bucket_id()
        if self._bucket_id is None:
            # Its object first: a service that reads the name finds the object, too.
            new = f"shared-{os.urandom(16).hex()}"
            writing = await self.begin_writing(new)
            await writing.end()
            self._bucket_id = await self.store.files.bucket_id(new)
        assert self._bucket_id is not None
        if not await self.has(self._bucket_id):
            raise ConfigurationError(
                "--files-store: this is not the bucket of the other services on the same database:"
                f" '{self._bucket_id}' is not there."
            )

    async def has(self, name: str) -> bool:
        try:
            await self._size(file_key(name))
        except FileNotFoundError:
            return False
        return True

    async def _size(self, key: str) -> int:
        with _reported():
            return (await obstore.head_async(self.bucket, key))["size"]

    async def publish(self, name: str, descriptor: int) -> None:
        await self.upload(file_key(name), descriptor)

    async def upload(self, key: str, descriptor: int, start: int = 0) -> None:
        """Create the object *key* from the bytes of a file from *start* on. Raises :class:`StoreUnavailable`."""
        # A descriptor of its own, which is closed with the reader: a thread may still read after the caller was
        # cancelled and has closed the other one.
        own = os.dup(descriptor)
        content = BufferedReader(FileIO(own, closefd=False))
        weakref.finalize(content, os.close, own)
        content.seek(start)
        with _reported():
            await obstore.put_async(self.bucket, key, content, chunk_size=_PART, max_concurrency=_AT_ONCE)

    async def read_piece(self, name: str, start: int, end: int) -> bytes:
        return await self._fetch(file_key(name), start, end)

    async def _fetch(self, key: str, start: int, end: int) -> bytes:
        with _reported():
            return bytes(await obstore.get_range_async(self.bucket, key, start=start, end=min(end, start + _PIECE)))

    async def rename(self, name: str, new_name: str) -> None:
        with _reported():
            await obstore.rename_async(self.bucket, file_key(name), file_key(new_name))

    async def part_sizes(self, file_id: str) -> Mapping[str, int]:
        # The keys of names with a point begin with `batches`; see `file_key`.
        prefix = f"batches/{file_id}/"
        objects = await self._objects(f"batches/{file_id}")
        return {f"{file_id}.{meta['path'].removeprefix(prefix)}": meta["size"] for meta in objects}

    async def _parts_of(self, file_ids: Collection[str]) -> Sequence[str]:
        paths = [meta["path"].split("/") for meta in await self._objects("batches")]
        return [f"{path[1]}.{path[2]}" for path in paths if path[1] in file_ids]

    async def unlink(self, *names: str) -> None:
        await self._delete([file_key(name) for name in names])

    async def _delete(self, keys: Sequence[str]) -> None:
        if keys:
            with _reported():
                await obstore.delete_async(self.bucket, keys)

    async def _objects(self, prefix: str) -> Sequence[obstore.ObjectMeta]:
        with _reported():
            objects: list[obstore.ObjectMeta] = []
            async for page in obstore.list(self.bucket, prefix):
                objects.extend(page)
            return objects

    async def sweep(self) -> None:
        await super().sweep()
        before = datetime.fromtimestamp(time.time() - UPLOAD_SECONDS, UTC)
        objects = await self._objects("batches")
        old = [meta["path"] for meta in objects if meta["last_modified"] < before]
        batches = await self.store.batches.open_ids()
        await self._delete([path for path in old if path.split("/")[1] not in batches])

    # What batches read and write: files without names, which end with the process

    def _scratch(self) -> int:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(dir=self.folder, suffix=".new")
        Path(path).unlink()
        return descriptor

    async def open_input(self, batch: Batch) -> int:
        key = file_key(input_name(batch))
        return await self._copied([(key, await self._size(key), 0)])

    async def _copied(self, objects: Iterable[tuple[str, int, int]]) -> int:
        """Return the descriptor of a file with *objects*: the key and the size of each, and its offset in the file."""
        descriptor = await opened(on_disk(self._scratch))
        try:
            for key, size, offset in objects:
                start = 0
                while start < size:
                    piece = await self._fetch(key, start, size)
                    await on_disk(write_at, descriptor, piece, offset + start)
                    start += len(piece)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    async def open_lines(self, batch: Batch) -> int:
        # An input that is gone ends the batch, not only the lines that are read first.
        await self._size(file_key(input_name(batch)))
        return await opened(on_disk(self._scratch))

    async def load(self, batch: Batch, descriptor: int, lines: Sequence[Line]) -> None:
        key = file_key(input_name(batch))
        for start, end in _ranges(lines):
            offset = start
            while offset < end:
                piece = await self._fetch(key, offset, end)
                await on_disk(write_at, descriptor, piece, offset)
                offset += len(piece)

    def make_part(self, part: Part) -> int:
        return self._scratch()

    async def save_part(self, part: Part, descriptor: int, start: int, end: int) -> None:
        await self.upload(f"batches/{part.batch}/{part.number}-{start}", descriptor, start)

    async def open_part(self, part: Part) -> int:
        prefix = f"batches/{part.batch}/{part.number}-"
        pieces: list[tuple[str, int, int]] = []
        for meta in await self._objects(f"batches/{part.batch}"):
            path = meta["path"]
            if path.startswith(prefix):
                pieces.append((path, meta["size"], int(path.removeprefix(prefix))))
        return await self._copied(pieces)

    async def clear(self, batch: Batch) -> None:
        objects = await self._objects(f"batches/{batch.id}")
        await self._delete([meta["path"] for meta in objects])


def _ranges(lines: Sequence[Line]) -> Sequence[tuple[int, int]]:
    """Return the ranges of bytes with *lines*. Ranges that are close to each other are one."""
    ranges: list[tuple[int, int]] = []
    for line in sorted(lines, key=lambda line: line.offset):
        start = line.offset
        end = start + line.length
        if ranges and start - ranges[-1][1] <= _MAX_GAP:
            start, last_end = ranges.pop()
            end = max(end, last_end)
        ranges.append((start, end))
    return ranges


def file_key(name: str) -> str:
    """Return the key of the file *name*, or of the requests of a batch."""
    batch, _, suffix = name.partition(".")
    if suffix:
        return f"batches/{batch}/{suffix}"
    return f"files/{name}"


@contextmanager
def _reported() -> Iterator[None]:
    """Raise :class:`StoreUnavailable` for an error of S3, and :class:`FileNotFoundError` for a missing object."""
    try:
        yield
    except (OSError, BaseError) as error:
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
            raise
        # The first line: the rest are the library's own structures.
        detail = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise errors.StoreUnavailable("Files cannot be used at the moment.", detail=detail, retry_after=2) from error
