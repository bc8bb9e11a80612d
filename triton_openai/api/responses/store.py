"""
Where responses and conversations are kept: in memory, SQLite, PostgreSQL or Redis.

A store keeps bytes by key, each with a version, so that a writer can tell whether somebody else has written meanwhile.
What has not been used for longer than the configured age is dropped, and beyond the configured size what was used
longest ago. In Redis, the size is that of the server (``maxmemory``).
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from triton_openai.config.files import state_folder
from triton_openai.config.tree import ResponsesSettings
from triton_openai.errors import ConfigurationError, ServiceError, StoreUnavailable

_log = structlog.get_logger(__name__)
# Longest time for one operation.
_TIMEOUT = 5.0
# Old and surplus values are dropped this often, and whenever this part of the size was written since.
_SWEEP_SECONDS = 300.0
_SWEEP_PART = 16
# A value that is read becomes a used one at most this often.
_TOUCH_SECONDS = 3600.0


@asynccontextmanager
async def _guarded() -> AsyncIterator[None]:
    """Raise :class:`StoreUnavailable` for whatever a driver raises, and for what takes too long."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            yield
    except ServiceError:
        raise
    except Exception as error:
        raise StoreUnavailable(
            "The store of responses cannot be used at the moment.",
            detail=f"{type(error).__name__}: {error}",
            retry_after=2,
        ) from error


class Store(ABC):
    """Keeps values. Every method raises :class:`StoreUnavailable` when it cannot."""

    @abstractmethod
    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Return the value of *key* and its version, or ``None``."""

    @abstractmethod
    async def put(self, key: str, value: bytes, version: int) -> bool:
        """Keep *value* as the next version, if that of *key* has *version*, 0 for none; return whether it has."""

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """Drop *key*; return whether there was one."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""


# Each entry is a version of the schema; what is here is never changed, only added to.
_MIGRATIONS: Sequence[Sequence[str]] = (
    (
        "CREATE TABLE triton_openai_state (key TEXT PRIMARY KEY, version BIGINT NOT NULL,"
        " used DOUBLE PRECISION NOT NULL, value BYTEA NOT NULL)",
        "CREATE INDEX triton_openai_state_used ON triton_openai_state (used)",
    ),
)
_SWEEP = (
    "DELETE FROM triton_openai_state WHERE used < $1 OR key IN (SELECT key FROM (SELECT key, SUM(LENGTH(value)) OVER"
    " (ORDER BY used DESC, key) AS total FROM triton_openai_state) AS ranked WHERE total > $2)"
)


class SqlStore(Store):
    """What SQLite and PostgreSQL have in common: the statements."""

    def __init__(self, settings: ResponsesSettings) -> None:
        self._settings = settings
        self._swept = 0.0
        self._written = 0

    @abstractmethod
    async def _execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        """Return the rows of a statement, whose parameters are ``$1`` and so on."""

    async def get(self, key: str) -> tuple[bytes, int] | None:
        now = time.time()
        rows = await self._execute(
            "SELECT value, version, used FROM triton_openai_state WHERE key = $1 AND used >= $2",
            *(key, now - self._settings.max_age_seconds),
        )
        if not rows:
            return None
        value, version, used = rows[0]
        if used < now - _TOUCH_SECONDS:
            await self._execute("UPDATE triton_openai_state SET used = $2 WHERE key = $1", key, now)
        return bytes(value), version

    async def put(self, key: str, value: bytes, version: int) -> bool:
        now, most = time.time(), self._settings.max_size
        self._written += len(value)
        if now - self._swept > _SWEEP_SECONDS or self._written > most / _SWEEP_PART:
            self._swept, self._written = now, len(value)
            await self._execute(_SWEEP, now - self._settings.max_age_seconds, most)
        if version:
            rows = await self._execute(
                "UPDATE triton_openai_state SET version = version + 1, used = $2, value = $3"
                " WHERE key = $1 AND version = $4 RETURNING version",
                *(key, now, value, version),
            )
        else:
            rows = await self._execute(
                "INSERT INTO triton_openai_state (key, version, used, value) VALUES ($1, 1, $2, $3)"
                " ON CONFLICT (key) DO NOTHING RETURNING version",
                *(key, now, value),
            )
        return bool(rows)

    async def delete(self, key: str) -> bool:
        return bool(await self._execute("DELETE FROM triton_openai_state WHERE key = $1 RETURNING version", key))


def _pending(version: int) -> Sequence[tuple[int, Sequence[str]]]:
    """Return the migrations that a schema of *version* lacks. Raises :class:`ConfigurationError` for a newer one."""
    if version > len(_MIGRATIONS):
        raise ConfigurationError("The store of responses was made by a newer version of this service.")
    return list(enumerate(_MIGRATIONS, 1))[version:]


class SqliteStore(SqlStore):
    """
    Keeps values in a file, which several processes of one machine may share; without a *path*, in memory.

    With *or_memory*, a file that cannot be opened is replaced by memory.
    """

    def __init__(self, path: Path | None, settings: ResponsesSettings, *, or_memory: bool = False) -> None:
        super().__init__(settings)
        self._path = path
        self._or_memory = or_memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses-store")
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None

    def _connected(self) -> sqlite3.Connection:
        # What is written to a file that was deleted is lost, and no other process sees it.
        if self._connection is None or self._opened != self._file():
            self._disconnect()
            try:
                self._connection = self._connect()
            except (OSError, sqlite3.Error) as error:
                if not self._or_memory:
                    raise
                _log.warning("responses are kept in memory only: the state folder cannot be used", reason=str(error))
                self._path = None
                self._connection = self._connect()
            self._opened = self._file()
        return self._connection

    def _file(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _connect(self) -> sqlite3.Connection:
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # For nobody else to read: it holds prompts and answers.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(self._path or ":memory:", timeout=_TIMEOUT, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            for number, statements in _pending(connection.execute("PRAGMA user_version").fetchone()[0]):
                for statement in statements:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @_guarded()
    async def _execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        # To SQLite, $1 is a parameter with the name 1.
        named = {str(number): value for number, value in enumerate(values, 1)}
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self._connected().execute(statement, named).fetchall()
        )

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)


class PostgresStore(SqlStore):
    """Keeps values in PostgreSQL, which several machines may share."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        super().__init__(settings)
        self._asyncpg = _driver("asyncpg", "postgresql")
        self._url = url
        self._connecting = asyncio.Lock()
        self._pool: Any = None

    async def _connect(self) -> Any:
        pool = await self._asyncpg.create_pool(self._url, min_size=0, max_size=4, command_timeout=_TIMEOUT)
        try:
            async with pool.acquire() as connection, connection.transaction():
                # One process at a time.
                await connection.execute("SELECT pg_advisory_xact_lock(7461834517)")
                await connection.execute("CREATE TABLE IF NOT EXISTS triton_openai_schema (version BIGINT NOT NULL)")
                version = await connection.fetchval("SELECT COALESCE(MAX(version), 0) FROM triton_openai_schema")
                for number, statements in _pending(version):
                    for statement in statements:
                        await connection.execute(statement)
                    await connection.execute("INSERT INTO triton_openai_schema VALUES ($1)", number)
        except BaseException:
            pool.terminate()
            raise
        return pool

    @_guarded()
    async def _execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        async with self._connecting:
            self._pool = self._pool or await self._connect()
        rows: Sequence[Sequence[Any]] = await self._pool.fetch(statement, *values)
        return rows

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


_PUT = """
local version = redis.call('HGET', KEYS[1], 'version') or '0'
if version ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', version + 1, 'value', ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""


class RedisStore(Store):
    """Keeps values in Redis, which several machines may share."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        redis, retry = _driver("redis.asyncio", "redis"), _driver("redis.asyncio.retry", "redis").Retry
        # Once more, for a connection that the server has closed. By default it tries for a minute.
        again = retry(_driver("redis.backoff", "redis").NoBackoff(), 1)
        self._client = redis.from_url(url, retry=again)
        self._put = self._client.register_script(_PUT)
        self._age = int(settings.max_age_seconds)

    @_guarded()
    async def get(self, key: str) -> tuple[bytes, int] | None:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hmget(_redis_key(key), "value", "version").expire(_redis_key(key), self._age)
            (value, version), _ = await pipe.execute()
        return None if value is None else (value, int(version))

    @_guarded()
    async def put(self, key: str, value: bytes, version: int) -> bool:
        return bool(await self._put(keys=[_redis_key(key)], args=[version, value, self._age]))

    @_guarded()
    async def delete(self, key: str) -> bool:
        return bool(await self._client.delete(_redis_key(key)))

    async def close(self) -> None:
        await self._client.aclose()


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


def _redis_key(key: str) -> str:
    return f"triton-openai:{key}"


def _driver(module: str, extra: str) -> Any:
    """Import a driver, which only few services need. Raises :class:`ConfigurationError`."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"--responses-store needs the extra [{extra}]: pip install 'triton-openai[{extra}]'."
        ) from error
