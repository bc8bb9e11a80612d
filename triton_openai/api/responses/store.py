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
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from triton_openai.config import ResponsesSettings
from triton_openai.config.files import state_folder
from triton_openai.errors import ConfigurationError, ServiceError, StoreUnavailable

_log = structlog.get_logger(__name__)
# Longest time for one operation.
_TIMEOUT = 5.0
# How often old and surplus values are dropped.
_SWEEP_SECONDS = 300.0
# A value that is read becomes a used one at most this often.
_TOUCH_SECONDS = 3600.0


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

    async def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Disconnect."""


class MemoryStore(Store):
    """Keeps values in this process, to its end."""

    def __init__(self, settings: ResponsesSettings) -> None:
        self._values: OrderedDict[str, tuple[bytes, int, float]] = OrderedDict()
        self._size = 0
        self._settings = settings

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """See :class:`Store`."""
        found = self._values.get(key)
        if found is None or found[2] < time.time() - self._settings.max_age_seconds:
            return None
        self._values[key] = (found[0], found[1], time.time())
        self._values.move_to_end(key)
        return found[:2]

    async def put(self, key: str, value: bytes, version: int) -> bool:
        """See :class:`Store`."""
        before = self._values.get(key, (b"", 0, 0.0))
        if before[1] != version:
            return False
        self._values[key] = (value, version + 1, time.time())
        self._values.move_to_end(key)
        self._size += len(value) - len(before[0])
        oldest = time.time() - self._settings.max_age_seconds
        while self._size > self._settings.max_size or next(iter(self._values.values()))[2] < oldest:
            _, (dropped, _, _) = self._values.popitem(last=False)
            self._size -= len(dropped)
            if not self._values:
                break
        return True

    async def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        found = self._values.pop(key, None)
        self._size -= 0 if found is None else len(found[0])
        return found is not None


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
        self._connecting = asyncio.Lock()
        self._connected = False
        self._swept = 0.0

    @abstractmethod
    async def _connect(self) -> None:
        """Connect, and bring the schema up to date."""

    @abstractmethod
    async def _execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        """Return the rows of a statement, whose parameters are ``$1`` and so on."""

    async def _run(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        try:
            async with asyncio.timeout(_TIMEOUT):
                if not self._connected:
                    async with self._connecting:
                        if not self._connected:
                            await self._connect()
                            self._connected = True
                return await self._execute(statement, *values)
        except ServiceError:
            raise
        except Exception as error:
            raise _unavailable(error) from error

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """See :class:`Store`."""
        now = time.time()
        rows = await self._run(
            "SELECT value, version, used FROM triton_openai_state WHERE key = $1 AND used >= $2",
            key,
            now - self._settings.max_age_seconds,
        )
        if not rows:
            return None
        value, version, used = rows[0]
        if used < now - _TOUCH_SECONDS:
            await self._run("UPDATE triton_openai_state SET used = $2 WHERE key = $1", key, now)
        return bytes(value), version

    async def put(self, key: str, value: bytes, version: int) -> bool:
        """See :class:`Store`."""
        now = time.time()
        if now - self._swept > _SWEEP_SECONDS:
            self._swept = now
            await self._run(_SWEEP, now - self._settings.max_age_seconds, self._settings.max_size)
        if version:
            rows = await self._run(
                "UPDATE triton_openai_state SET version = version + 1, used = $2, value = $3"
                " WHERE key = $1 AND version = $4 RETURNING version",
                *(key, now, value, version),
            )
        else:
            rows = await self._run(
                "INSERT INTO triton_openai_state (key, version, used, value) VALUES ($1, 1, $2, $3)"
                " ON CONFLICT (key) DO NOTHING RETURNING version",
                *(key, now, value),
            )
        return bool(rows)

    async def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        return bool(await self._run("DELETE FROM triton_openai_state WHERE key = $1 RETURNING version", key))


def _pending(version: int) -> Sequence[tuple[int, Sequence[str]]]:
    """Return the migrations that a schema of *version* lacks. Raises :class:`ConfigurationError` for a newer one."""
    if version > len(_MIGRATIONS):
        raise ConfigurationError("The store of responses was made by a newer version of this service.")
    return list(enumerate(_MIGRATIONS, 1))[version:]


class SqliteStore(SqlStore):
    """Keeps values in a file, which several processes of one machine may share."""

    def __init__(self, path: Path, settings: ResponsesSettings) -> None:
        super().__init__(settings)
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses-store")
        self._connection: sqlite3.Connection | None = None

    async def _connect(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open)

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # For nobody else to read: it holds prompts and answers.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(self._path, timeout=_TIMEOUT, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        for number, statements in _pending(connection.execute("PRAGMA user_version").fetchone()[0]):
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("COMMIT")
        self._connection = connection

    async def _execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        connection = self._connection
        assert connection is not None
        # To SQLite, $1 is a parameter with the name 1.
        named = {str(number): value for number, value in enumerate(values, 1)}
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: connection.execute(statement, named).fetchall()
        )

    async def close(self) -> None:
        """See :class:`Store`."""
        if self._connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)


class PostgresStore(SqlStore):
    """Keeps values in PostgreSQL, which several machines may share."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        super().__init__(settings)
        self._asyncpg = _driver("asyncpg", "postgresql")
        self._url = url
        self._pool: Any = None

    async def _connect(self) -> None:
        pool = await self._asyncpg.create_pool(self._url, min_size=1, max_size=4, command_timeout=_TIMEOUT)
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
        self._pool = pool

    async def _execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        rows: Sequence[Sequence[Any]] = await self._pool.fetch(statement, *values)
        return rows

    async def close(self) -> None:
        """See :class:`Store`."""
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
        redis = _driver("redis.asyncio", "redis")
        self._client = redis.from_url(url, socket_timeout=_TIMEOUT, socket_connect_timeout=_TIMEOUT)
        self._put = self._client.register_script(_PUT)
        self._age = int(settings.max_age_seconds)

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """See :class:`Store`."""
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.hmget(_redis_key(key), "value", "version").expire(_redis_key(key), self._age)
                (value, version), _ = await pipe.execute()
        except Exception as error:
            raise _unavailable(error) from error
        return None if value is None else (value, int(version))

    async def put(self, key: str, value: bytes, version: int) -> bool:
        """See :class:`Store`."""
        try:
            return bool(await self._put(keys=[_redis_key(key)], args=[version, value, self._age]))
        except Exception as error:
            raise _unavailable(error) from error

    async def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        try:
            return bool(await self._client.delete(_redis_key(key)))
        except Exception as error:
            raise _unavailable(error) from error

    async def close(self) -> None:
        """See :class:`Store`."""
        await self._client.aclose()


class DefaultStore(Store):
    """SQLite in the state folder; where nothing can be written there, memory."""

    def __init__(self, settings: ResponsesSettings) -> None:
        self._store: Store = SqliteStore(state_folder() / "responses.sqlite", settings)
        self._memory = MemoryStore(settings)
        self._checked = False

    async def _checked_store(self) -> Store:
        if not self._checked:
            try:
                await self._store.get("")
            except StoreUnavailable as error:
                _log.warning("responses are kept in memory only: the state folder cannot be used", reason=error.reason)
                self._store = self._memory
            self._checked = True
        return self._store

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """See :class:`Store`."""
        return await (await self._checked_store()).get(key)

    async def put(self, key: str, value: bytes, version: int) -> bool:
        """See :class:`Store`."""
        return await (await self._checked_store()).put(key, value, version)

    async def delete(self, key: str) -> bool:
        """See :class:`Store`."""
        return await (await self._checked_store()).delete(key)

    async def close(self) -> None:
        """See :class:`Store`."""
        await self._store.close()


def open_store(settings: ResponsesSettings) -> Store | None:
    """Return the store of *settings*, not yet connected; ``None`` for none. Raises :class:`ConfigurationError`."""
    kind, _, rest = settings.store.partition(":")
    if settings.store == "none":
        return None
    if settings.store == "memory":
        return MemoryStore(settings)
    if kind == "sqlite":
        return SqliteStore(Path(rest), settings) if rest else DefaultStore(settings)
    if kind in ("redis", "rediss", "unix"):
        return RedisStore(settings.store, settings)
    return PostgresStore(settings.store, settings)


def _redis_key(key: str) -> str:
    return f"triton-openai:{key}"


def _unavailable(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(
        "The store of responses cannot be used at the moment.",
        detail=f"{type(error).__name__}: {error}",
        retry_after=2,
    )


def _driver(module: str, extra: str) -> Any:
    """Import a driver, which only few services need. Raises :class:`ConfigurationError`."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"--responses-store needs the extra [{extra}]: pip install 'triton-openai[{extra}]'."
        ) from error
