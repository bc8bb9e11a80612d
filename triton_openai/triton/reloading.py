"""
Which models are being loaded again because their process has died. All processes of a machine and user see it.

Meanwhile Triton says that it has no such model, and clients do not try again after that.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triton_openai.errors import ModelNotFound, ServiceError, UpstreamUnavailable

# Seconds after which a client may try again.
_RETRY_SECONDS = 2.0


# Linux's ``struct flock``: type, whence, start, length (0: the whole file) and process (0: the lock is a descriptor's).
_FLOCK = struct.Struct("hhqqi4x")
_WRITE_LOCK = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@contextmanager
def reload_lock(model: str) -> Iterator[bool]:
    """
    Lock the Triton model *model* while it is loaded again. Yields false if another process of this machine has done so.

    Raises ``OSError`` if the file of the lock cannot be opened, or is not this user's.
    """
    descriptor = _open_lock(model, os.O_RDWR | os.O_CREAT)
    try:
        try:
            # A lock of the descriptor, not of the process: it also excludes other calls in this process.
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WRITE_LOCK)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _is_locked(model: str) -> bool:
    """Return whether *model* is locked. Takes no lock itself: that could keep the model from being loaded again."""
    try:
        descriptor = _open_lock(model, os.O_RDONLY)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WRITE_LOCK)
    finally:
        os.close(descriptor)
    kind, *_ = _FLOCK.unpack(answer)
    return bool(kind != fcntl.F_UNLCK)


def _open_lock(model: str, flags: int) -> int:
    """
    Return the descriptor of the lock of *model*.

    Other users can write to the folder, too. So a pipe that they put there is not waited for, and a file of theirs is
    no lock. Raises ``OSError``.
    """
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"triton-openai-{os.getuid()}-{digest}.lock"
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EPERM, "it is not a file of this user", str(path))
    return descriptor


def reloading_error(model: str, name: str) -> UpstreamUnavailable | None:
    """Return the error for a request to *model*, called *name*, ``None`` unless the model is being loaded again."""
    if not _is_locked(model):
        return None
    return UpstreamUnavailable(
        f"The process of the model '{name}' has died, and the model is being loaded again.",
        param="model",
        retry_after=_RETRY_SECONDS,
    )


def unknown_model_error(model: str, *, detail: str | None = None) -> ServiceError:
    """Return the error for a request to a *model* that Triton does not have, *detail* is what it says."""
    return reloading_error(model, model) or ModelNotFound(model, detail=detail)
