"""
Shares of what all keys have together, such as the queue: no key can use it up alone.

A key that has something may take more only while it leaves as much free as it has. So one key gets a half at most, and
of three keys that want all, each gets a quarter; a key that has nothing always finds room. A service that asks for no
keys, or has a single one, has nobody to share with.
"""

from __future__ import annotations

from contextvars import ContextVar

#: The name of the key of the current request; ``None`` where there is nobody to share with.
SHARING_KEY: ContextVar[str | None] = ContextVar("sharing_key", default=None)


def may_take(amount: float, *, own: float, free: float) -> bool:
    """Return whether the key of the current request may take *amount* of what is *free*, where it has its *own*."""
    if amount > free:
        return False
    return SHARING_KEY.get() is None or not own or own + amount <= free
