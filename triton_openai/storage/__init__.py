"""Storage: entries with rows, in memory, SQLite, PostgreSQL or Redis. All SQL is here."""

from __future__ import annotations

from pathlib import Path

from triton_openai.config.files import state_folder
from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.postgresql import PostgresStore
from triton_openai.storage.redis import RedisStore
from triton_openai.storage.sqlite import SqliteStore
from triton_openai.storage.store import Store


def open_store(settings: ResponsesSettings) -> Store | None:
    """Return the store of *settings*, not yet connected; ``None`` for none. Raises :class:`ConfigurationError`."""
    kind, _, rest = settings.store.partition(":")
    if kind == "none":
        return None
    if kind == "memory":
        return SqliteStore(None, settings)
    if kind == "sqlite":
        return SqliteStore(Path(rest or state_folder() / "responses.sqlite"), settings, or_memory=not rest)
    if kind in ("redis", "rediss", "unix"):
        return RedisStore(settings.store, settings)
    return PostgresStore(settings.store, settings)
