"""A PostgreSQL database, which several machines may share, and entries in one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

import asyncpg

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.sql import SqlStore, Steps, damaged_error, pending, translated
from triton_openai.tasks import within

_T = TypeVar("_T")
# Connections of a process to one database.
_MAX_CONNECTIONS = 4
# After these seconds the server ends a transaction whose client is silent, such as a process that is frozen: others
# wait for the rows that it has locked.
_SILENT_SECONDS = 15
_DIALECT = (
    (r"CLOCK\(\)", "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"),
    (r"PAIRS\((.*?)\)", r"(SELECT value->>0 AS key, value->>1 AS id FROM json_array_elements(CAST(\1 AS json)))"),
    (r"EACH\((.*?)\)", r"(SELECT json_array_elements_text(CAST(\1 AS json)))"),
)


# How a pooler in transaction mode, such as PgBouncer, shows that it keeps neither settings nor prepared statements.
_POOLER_ERRORS = (
    asyncpg.ProtocolViolationError,
    asyncpg.DuplicatePreparedStatementError,
    asyncpg.InvalidSQLStatementNameError,
)
_DAMAGES = (
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedColumnError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.DataCorruptedError,
    asyncpg.IndexCorruptedError,
)


class _Pooled(Exception):
    """A pooler has dropped the settings of the session."""


class PostgresDatabase:
    """
    The database of *url*, which several machines may share. A pooler in transaction mode may stand between.

    *lacking* returns the migrations that a schema of some version lacks. The tables are in the *namespace*, which
    PostgreSQL calls a schema too; without one, in that of the user.
    """

    def __init__(
        self, url: str, lacking: Callable[[int], Sequence[tuple[int, Sequence[str]]]], *, namespace: str | None = None
    ) -> None:
        self._url = url
        self._lacking = lacking
        self._namespace = namespace
        self._connecting = asyncio.Lock()
        self._pool: Any = None
        # What each transaction has to set, where a pooler between keeps no settings of sessions; else empty.
        self._pooled_settings = ""

    async def _connect(self) -> Any:
        """Return a pool of connections to a database that has all tables."""
        options = {"idle_in_transaction_session_timeout": f"{_SILENT_SECONDS}s"}
        if self._namespace is not None:
            options["search_path"] = self._namespace
        try:
            return await self._open(server_settings=options)
        except (_Pooled, *_POOLER_ERRORS) as error:
            # The words of PgBouncer.
            refused = "unsupported startup parameter" in str(error)
            if isinstance(error, asyncpg.ProtocolViolationError) and not refused:
                raise
        # What a session has set, or prepared, is gone or another client's after the transaction.
        self._pooled_settings = ";".join(f"SET LOCAL {name} = '{value}'" for name, value in options.items())
        return await self._open(statement_cache_size=0)

    async def _open(self, **options: Any) -> Any:
        """Return a pool as :meth:`_connect` does. Raises :class:`_Pooled` if a pooler drops the settings."""
        pool = await asyncpg.create_pool(self._url, min_size=0, max_size=_MAX_CONNECTIONS, **options)
        try:
            async with pool.acquire() as connection, self._transaction(connection):
                setting = "SELECT current_setting('idle_in_transaction_session_timeout')"
                if await connection.fetchval(setting) != f"{_SILENT_SECONDS}s":
                    raise _Pooled
                # One process at a time.
                await connection.execute("SELECT pg_advisory_xact_lock(7461834517)")
                there = "SELECT $1::text IS NULL OR EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)"
                # Who may use one may not be allowed to make one.
                if not await connection.fetchval(there, self._namespace):
                    await connection.execute(f"CREATE SCHEMA {self._namespace}")
                await connection.execute("CREATE TABLE IF NOT EXISTS triton_openai_schema (version BIGINT NOT NULL)")
                version = await connection.fetchval("SELECT COALESCE(MAX(version), 0) FROM triton_openai_schema")
                for number, statements in self._lacking(version):
                    for statement in statements:
                        await connection.execute(statement)
                    await connection.execute("INSERT INTO triton_openai_schema VALUES ($1)", number)
        except BaseException:
            pool.terminate()
            raise
        return pool

    async def run(self, steps: Steps[_T], *, timeout: float, write: bool = False) -> _T:
        """
        Return the result of *steps*, in a transaction if they *write*.

        What has not ended after *timeout* seconds raises :class:`TimeoutError`, and whatever PostgreSQL refuses an
        :class:`OSError`.
        """
        try:
            async with within(timeout):
                async with self._connecting:
                    self._pool = self._pool or await self._connect()
                async with self._pool.acquire() as connection:
                    # A server that hangs does not answer to the end of the transaction either.
                    timer = asyncio.get_running_loop().call_later(timeout, connection.terminate)
                    try:
                        # Outside a transaction, a pooler may use another session for the next statement.
                        whole = self._transaction(connection) if write or self._pooled_settings else nullcontext()
                        async with whole:
                            return await _execute(connection, steps)
                    finally:
                        timer.cancel()
        except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            full = isinstance(error, asyncpg.DiskFullError)
            raise OSError(errno.ENOSPC if full else errno.EIO, f"{type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def _transaction(self, connection: Any) -> AsyncIterator[None]:
        async with connection.transaction():
            if self._pooled_settings:
                await connection.execute(self._pooled_settings)
            yield

    async def verify(self, tables: Mapping[str, str], *, timeout: float) -> None:
        """See :class:`triton_openai.storage.sql.Database`."""

        def look() -> Steps[None]:
            for table, columns in tables.items():
                yield (f"SELECT {columns} FROM {table} LIMIT 1",)

        try:
            await self.run(look(), timeout=timeout)
        except OSError as error:
            if isinstance(error.__cause__, _DAMAGES):
                # The address may have a password.
                raise damaged_error("in PostgreSQL", error.__cause__) from error
            raise

    async def close(self) -> None:
        """Close all connections, after what was asked for before."""
        if self._pool is not None:
            await self._pool.close()


async def _execute(connection: Any, steps: Steps[_T]) -> _T:
    rows: Any = None
    while True:
        try:
            text, *values = steps.send(rows)
        except StopIteration as stop:
            result: _T = stop.value
            return result
        if values and isinstance(values[0], list):
            await connection.executemany(translated(text, _DIALECT), values[0])
            rows = ()
        else:
            # It has no texts with such a character.
            clean = [one.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(one, str) else one for one in values]
            rows = await connection.fetch(translated(text, _DIALECT), *clean)


class PostgresStore(SqlStore):
    """Keeps entries in the database of *url*; see :class:`PostgresDatabase`."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        super().__init__(settings, PostgresDatabase(url, pending))
