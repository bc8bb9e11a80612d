"""
Fair shares of a resource that all keys use, such as the queue: no key can use it up alone.

A key that uses some of it may take more only if at least as much stays free as it already uses. So one key gets at most
a half, and three keys with unlimited demand get a quarter each; a key that uses nothing always gets some. A service
without keys, or with a single one, does not limit shares.
"""

from __future__ import annotations

from contextvars import ContextVar

#: The name of the key of the current request; ``None`` if shares are not limited.
SHARING_KEY: ContextVar[str | None] = ContextVar("sharing_key", default=None)


def may_take(amount: float, *, own: float, free: float) -> bool:
    """Return whether the key of the current request may take *amount* of what is *free*, where it has its *own*."""
    if amount > free:
        return False
    return SHARING_KEY.get() is None or not own or own + amount <= free
