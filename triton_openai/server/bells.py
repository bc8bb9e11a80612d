"""How the workers of one service wake each other up: a named pipe for each of them, in which a byte means "look"."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

_PIECE = 4096


class Bells:
    """
    The bells of all workers, as number *index* hears its own; *directory* is the service's own.

    Several rings may be heard as one, and nobody waits for one to be heard. Raises ``OSError``.
    """

    def __init__(self, directory: Path, index: int) -> None:
        self._directory = directory / "bells"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._opened: dict[int, int] = {}
        self._index = index
        self._open(index)

    def ring(self, index: int) -> None:
        """Wake worker *index* up; one that is not there, or has not heard many rings before, is not."""
        with contextlib.suppress(OSError):
            os.write(self._open(index), b"!")

    def listen(self, heard: Callable[[], None]) -> None:
        """Call *heard* from now on, in the running loop, when somebody has rung."""
        own = self._open(self._index)

        def hear() -> None:
            with contextlib.suppress(BlockingIOError):
                while len(os.read(own, _PIECE)) == _PIECE:
                    pass
            heard()

        asyncio.get_running_loop().add_reader(own, hear)

    def close(self) -> None:
        """Hear nothing more."""
        asyncio.get_running_loop().remove_reader(self._opened[self._index])
        for handle in self._opened.values():
            os.close(handle)
        self._opened.clear()

    def _open(self, index: int) -> int:
        handle = self._opened.get(index)
        if handle is None:
            path = self._directory / str(index)
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            # For both directions, because that needs nobody at the other end.
            handle = self._opened[index] = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return handle
