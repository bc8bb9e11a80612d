"""
What the processes of one service agree on when models are loaded and unloaded: locks and marks in a folder of theirs.

Each process holds a shared lock for every model on which something runs there, and who unloads the model waits for the
exclusive one. The kernel gives locks back when their owner dies, and a mark counts only while its owner lives.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Collection
from pathlib import Path


class SharedGates:
    """The part of one process; *directory* is the service's own. Every call is a few system calls that do not wait."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "models"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._version = self._directory / "version"
        self._version.touch(mode=0o600)
        self._names: dict[str, str] = {}
        self._claims: dict[str, int] = {}
        self._held: dict[str, int] = {}

    def hold(self, model: str) -> bool:
        """Say that something runs on *model* here; return whether that may be."""
        handle = self._open(model, "running")
        if not _locked(handle, fcntl.LOCK_SH):
            # Somebody is just looking whether a gate that it has closed is idle.
            os.close(handle)
            return False
        self._held[model] = handle
        return True

    def release(self, model: str) -> None:
        """Say that nothing runs on *model* here any more."""
        os.close(self._held.pop(model))

    def is_idle(self, model: str) -> bool:
        """Return whether nothing runs on *model* in any process."""
        return self._is_free(model, "running")

    def claim(self, model: str) -> bool:
        """Try to be the only one to load or unload *model*; return whether that is so now."""
        handle = self._open(model, "claim")
        if not _locked(handle, fcntl.LOCK_EX):
            os.close(handle)
            return False
        # What an owner left that has died.
        self.open([model])
        self._claims[model] = handle
        return True

    def disclaim(self, model: str) -> None:
        """Give the claim back."""
        os.close(self._claims.pop(model))

    def close(self, models: Collection[str]) -> None:
        """Let no process take new requests for *models*, which are claimed."""
        for model in models:
            os.close(self._open(model, "closed"))

    def end(self, models: Collection[str]) -> None:
        """Have every process end what runs on *models*, which are claimed."""
        for model in models:
            os.close(self._open(model, "ending"))

    def open(self, models: Collection[str]) -> None:
        """Take the marks of *models* away."""
        for model in models:
            for mark in ("closed", "ending"):
                self._path(model, mark).unlink(missing_ok=True)

    def is_closed(self, model: str) -> bool:
        """Return whether *model* takes no new requests."""
        return self._is_marked(model, "closed")

    def is_ending(self, model: str) -> bool:
        """Return whether what runs on *model* shall end."""
        return self._is_marked(model, "ending")

    @property
    def version(self) -> int:
        """A number that differs after :meth:`changed` was called, in whichever process."""
        return self._version.stat().st_size

    def changed(self) -> None:
        """Say that Triton has other models than before."""
        handle = os.open(self._version, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(handle, b"+")
        finally:
            os.close(handle)

    def _is_marked(self, model: str, mark: str) -> bool:
        # Seldom there, so seldom more than one call.
        return self._path(model, mark).exists() and (model in self._claims or not self._is_free(model, "claim"))

    def _is_free(self, model: str, kind: str) -> bool:
        handle = self._open(model, kind)
        try:
            return _locked(handle, fcntl.LOCK_SH if kind == "claim" else fcntl.LOCK_EX)
        finally:
            os.close(handle)

    def _path(self, model: str, kind: str) -> Path:
        name = self._names.get(model)
        if name is None:
            # A folder's name may be as long as a file's can be.
            name = self._names[model] = hashlib.sha256(model.encode(errors="surrogateescape")).hexdigest()[:32]
        return self._directory / f"{name}.{kind}"

    def _open(self, model: str, kind: str) -> int:
        return os.open(self._path(model, kind), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
