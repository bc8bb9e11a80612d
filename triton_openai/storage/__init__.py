"""
Storage: entries with rows, in memory, SQLite or PostgreSQL; files and batches in SQLite or PostgreSQL.

All SQL is here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from triton_openai.config.files import state_folder
from triton_openai.config.tree import ResponsesSettings
from triton_openai.errors import ConfigurationError, install_advice
from triton_openai.storage.batch_schema import lacking
from triton_openai.storage.batch_store import BatchStore
from triton_openai.storage.sqlite import SqliteDatabase, SqliteStore
from triton_openai.storage.store import Store

#: The stores by the schemes of their URLs, PostgreSQL as well as those of other packages.
ENTRY_POINT_GROUP = "triton_openai.stores"
# After which the connections of batches that no operation uses are closed: many processes may wait for work.
_IDLE_SECONDS = 2.0
#: The schemes of the store in Redis, which earlier releases had.
_REDIS = frozenset(("redis", "rediss", "unix"))


def open_store(settings: ResponsesSettings) -> Store | None:
    """Return the store of *settings*, not yet connected; ``None`` for none. Raises :class:`ConfigurationError`."""
    kind, _, rest = settings.store.partition(":")
    if kind == "none":
        return None
    if kind == "memory":
        return SqliteStore(None, settings)
    if kind == "sqlite":
        return SqliteStore(Path(rest or state_folder() / "responses.sqlite"), settings, or_memory=not rest)
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if kind in _REDIS and kind not in points:
        raise ConfigurationError(
            f"--responses-store: '{kind}' is not supported any more: responses are no longer kept in Redis. "
            "Use sqlite:PATH for one machine, or postgresql://... for several replicas."
        )
    if kind not in points:
        known = ", ".join(("none", "memory", "sqlite", *sorted(points)))
        raise ConfigurationError(f"--responses-store: there is no store '{kind}'. Known stores: {known}.")
    try:
        loaded: Any = points[kind].load()
    except (ImportError, AttributeError) as error:
        # A driver, which only few services need. The extras are called as the modules here.
        package, _, extra = points[kind].module.rpartition(".")
        if package == __name__:
            advice = f" It needs the extra '{extra}': {install_advice(extra)}."
        else:
            advice = ""
        raise ConfigurationError(f"--responses-store: '{kind}' cannot be loaded: {error}.{advice}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Store)):
        raise ConfigurationError(f"--responses-store: {points[kind].value} is no subclass of {Store.__module__}.Store.")
    make: Callable[[str, ResponsesSettings], Store] = loaded
    return make(settings.store, settings)


def open_batch_store(url: str) -> tuple[BatchStore, Path | None]:
    """Return the store of batches at *url*, and its file if it is one. Raises :class:`ConfigurationError`."""
    kind, _, rest = url.partition(":")
    if kind == "sqlite":
        path = Path(rest or state_folder() / "batches.sqlite")
        return BatchStore(SqliteDatabase(path, lacking, synchronous="FULL")), path
    try:
        from triton_openai.storage.postgresql import PostgresDatabase
    except ImportError as error:
        advice = f"It needs the extra 'postgresql': {install_advice('postgresql')}."
        raise ConfigurationError(f"--batches-store: PostgreSQL cannot be used: {error}. {advice}") from error
    database = PostgresDatabase(url, lacking, namespace="openai_batches", idle_seconds=_IDLE_SECONDS)
    return BatchStore(database), None
