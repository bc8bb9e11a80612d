"""Room for connections: each takes a descriptor, and each stream two."""

from __future__ import annotations

import resource

# Enough for every stream that one process can carry. Not more: some programs walk over all that there might be.
_ENOUGH = 65_536


def raise_limit() -> None:
    """
    Raise this process's limit of open files, which is 1024 on most systems, to as many as it may have.

    The lower one is kept by systems for programs that wait with ``select``, which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
