"""
The parts of a file that is uploaded in parts, beside the other files: in the folder or in the bucket.

Part *P* of the file *F* is the file ``F.P.upload``. What was said about the file and has no column in the tables is in
the name of an empty one. The sweeper deletes them with the file that was never completed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence

from triton_openai.batches.file_folder import Files, Writing, on_disk
from triton_openai.errors import StoreUnavailable

_SUFFIX = ".upload"
_SECONDS = "seconds_"
_JOINED = "joined_"


class UploadParts:
    """The parts of the file *file_id*. Methods raise :class:`ServiceError` if the disk or the bucket fails."""

    def __init__(self, files: Files, file_id: str) -> None:
        self._files = files
        self._file_id = file_id
        # Of this request alone: another one may join the same parts at the same time.
        self._joined = f"{_JOINED}{os.urandom(16).hex()}"

    def _name(self, part_id: str) -> str:
        return f"{self._file_id}.{part_id}{_SUFFIX}"

    async def _all(self) -> Mapping[str, int]:
        """Return the bytes of all parts, and of what else belongs to the upload."""
        sizes = await self._files.part_sizes(self._file_id)
        prefix = f"{self._file_id}."
        return {name.removeprefix(prefix).removesuffix(_SUFFIX): size for name, size in sizes.items()}

    async def sizes(self) -> Mapping[str, int]:
        """Return the bytes of each part."""
        return {name: size for name, size in (await self._all()).items() if name.startswith("part_")}

    async def write(self, part_id: str) -> Writing:
        """Begin to write a part."""
        return await self._files.write(self._name(part_id))

    async def delete(self, part_id: str) -> None:
        """Delete a part."""
        await self._files.unlink(self._name(part_id))

    async def set_seconds(self, seconds: int) -> None:
        """Note for how long the complete file is kept."""
        writing = await self.write(f"{_SECONDS}{seconds}")
        await writing.end()

    async def seconds(self) -> int | None:
        """Return what :meth:`set_seconds` noted."""
        for name in await self._all():
            if name.startswith(_SECONDS):
                return int(name.removeprefix(_SECONDS))
        return None

    async def join(self, parts: Sequence[tuple[str, int]], wanted: str | None) -> str | None:
        """
        Make the file of *parts*, each with its id and its bytes, if its MD5 digest is the *wanted* one, if any.

        The file is there as a whole or not at all, and doing it again makes the same file. Returns the digest, in
        hexadecimal digits, if it is another one; then there is no file.
        """
        # Clients compare it; nothing relies on it.
        digest = hashlib.md5(usedforsecurity=False)
        writing = await self.write(self._joined)
        try:
            for part_id, size in parts:
                start = 0
                while start < size:
                    piece = await self._files.read_piece(self._name(part_id), start, size)
                    await on_disk(digest.update, piece)
                    await writing.add(piece)
                    start += len(piece)
            if wanted and wanted.lower() != digest.hexdigest():
                return digest.hexdigest()
            await writing.end()
            await self._files.rename(self._name(self._joined), self._file_id)
        except FileNotFoundError as error:
            # In a bucket. Another request has joined the parts, or the upload was cancelled.
            raise StoreUnavailable("A part of the upload is not there any more.", retry_after=1) from error
        finally:
            writing.close()
        return None

    async def clear(self) -> None:
        """Delete all parts, and what else belongs to the upload."""
        await self._files.unlink(*map(self._name, await self._all()))
