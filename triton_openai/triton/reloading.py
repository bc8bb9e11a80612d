"""
Which models are being loaded again because their process has died. All processes of a machine and user see it.

Meanwhile Triton says that it has no such model, and clients do not try again after that.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

from triton_openai.errors import ModelNotFound, ServiceError, UpstreamUnavailable

# Seconds after which a client may try again.
_RETRY_SECONDS = 2.0


def lock_of(model: str) -> Path:
    """Return the file that is locked while the Triton model *model* is loaded again."""
    digest = hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"triton-openai-{os.getuid()}-{digest}.lock"


def reloading_error(model: str, name: str) -> UpstreamUnavailable | None:
    """Return the error for a request to *model*, called *name*, ``None`` unless the model is being loaded again."""
    try:
        descriptor = os.open(lock_of(model), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Shared: two processes that look at the same time do not hinder each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return UpstreamUnavailable(
            f"The process of the model '{name}' has died, and the model is being loaded again.",
            param="model",
            retry_after=_RETRY_SECONDS,
        )
    finally:
        os.close(descriptor)
    return None


def unknown_model_error(model: str, *, detail: str | None = None) -> ServiceError:
    """Return the error for a request to a *model* that Triton does not have, *detail* is what it says."""
    return reloading_error(model, model) or ModelNotFound(model, detail=detail)
