"""A PostgreSQL database, which several machines may share, and entries in one."""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.sql import SqlStore, Steps, damaged_error, pending, translated
from triton_openai.tasks import cancel, within

_T = TypeVar("_T")
# Connections of a process to one database.
_MAX_CONNECTIONS = 4
# Seconds for opening a connection, and between two checks whether the server still answers during a migration.
_CONNECT_SECONDS = 10.0
_CHECK_SECONDS = 10.0
# Seconds for the answer of the connection for notifications, and for all that belongs to it.
_PING_SECONDS = 5.0
_LISTEN_SECONDS = 20.0
# Seconds that a migration, and the operations that run, may take to end when the service stops.
_CLOSE_SECONDS = 5.0
# After these seconds the server ends a transaction whose client is silent, such as a process that is frozen: others
# wait for the rows that it has locked.
_SILENT_SECONDS = 15
_DIALECT = (
    (r"CLOCK\(\)", "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"),
    (r"PAIRS\((.*?)\)", r"(SELECT value->>0 AS key, value->>1 AS id FROM json_array_elements(CAST(\1 AS json)))"),
    (r"EACH\((.*?)\)", r"(SELECT json_array_elements_text(CAST(\1 AS json)))"),
    # An array: for a subquery, PostgreSQL may read the whole table.
    (r"IN NUMBERS\((.*?)\)", r"= ANY(ARRAY(SELECT CAST(json_array_elements_text(CAST(\1 AS json)) AS INTEGER)))"),
)


# How a pooler in transaction mode, such as PgBouncer, shows that it keeps neither settings nor prepared statements.
_POOLER_ERRORS = (
    asyncpg.ProtocolViolationError,
    asyncpg.DuplicatePreparedStatementError,
    asyncpg.InvalidSQLStatementNameError,
)
# All errors of the driver beside those of the operating system.
_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
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
    PostgreSQL calls a schema too; without one, in that of the user. Connections that are not used are closed after
    *idle_seconds*.
    """

    def __init__(
        self,
        url: str,
        lacking: Callable[[int], Sequence[tuple[int, Sequence[str]]]],
        *,
        namespace: str | None = None,
        idle_seconds: float = 300.0,
    ) -> None:
        self._url = url
        self._lacking = lacking
        self._namespace = namespace
        self._idle_seconds = idle_seconds
        self._listening: Any = None
        self._connecting: asyncio.Task[Any] | None = None
        # The pool, also before its database has all tables.
        self._opened: Any = None
        # What each transaction has to set, where a pooler between keeps no settings of sessions; else empty.
        self._pooled_settings = ""

    async def _pool(self) -> Any:
        """
        Return a pool of connections to a database that has all tables.

        A migration may take much longer than an operation. So it belongs to no operation: it continues when an
        operation stops waiting for it, and the next operation waits for the same migration.
        """
        task = self._connecting
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            # In an empty context: it is not part of the request that happens to be the first one.
            task = contextvars.Context().run(asyncio.create_task, self._connect())
            task.add_done_callback(_retrieve_exception)
            self._connecting = task
        return await asyncio.shield(task)

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
        pool = await asyncpg.create_pool(
            self._url,
            min_size=0,
            max_size=_MAX_CONNECTIONS,
            timeout=_CONNECT_SECONDS,
            max_inactive_connection_lifetime=self._idle_seconds,
            **options,
        )
        self._opened = pool
        try:
            async with pool.acquire() as connection:
                checking = asyncio.create_task(self._terminate_if_silent(connection))
                try:
                    async with self._transaction(connection):
                        await self._migrate(connection)
                finally:
                    await cancel(checking)
        except BaseException:
            pool.terminate()
            raise
        return pool

    async def _migrate(self, connection: Any) -> None:
        """Create the tables and migrate them. Raises :class:`_Pooled` if a pooler drops the settings."""
        setting = "SELECT current_setting('idle_in_transaction_session_timeout')"
        if await connection.fetchval(setting) != f"{_SILENT_SECONDS}s":
            raise _Pooled
        # One process at a time.
        await connection.execute("SELECT pg_advisory_xact_lock(7461834517)")
        exists = "SELECT $1::text IS NULL OR EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)"
        # A user may have the right to use a schema, and not the right to create one.
        if not await connection.fetchval(exists, self._namespace):
            await connection.execute(f"CREATE SCHEMA {self._namespace}")
        await connection.execute("CREATE TABLE IF NOT EXISTS triton_openai_schema (version BIGINT NOT NULL)")
        version = await connection.fetchval("SELECT COALESCE(MAX(version), 0) FROM triton_openai_schema")
        for number, statements in self._lacking(version):
            for statement in statements:
                await connection.execute(statement)
            await connection.execute("INSERT INTO triton_openai_schema VALUES ($1)", number)

    async def _terminate_if_silent(self, connection: Any) -> None:
        """Terminate *connection*, which has no time limit, once the server accepts no other connection in time."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            try:
                other = await asyncpg.connect(self._url, timeout=_CONNECT_SECONDS)
            except asyncpg.PostgresError:
                # It refused the connection, so it is not silent.
                continue
            except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError):
                connection.terminate()
                return
            other.terminate()

    async def run(self, steps: Steps[_T], *, timeout: float, write: bool = False) -> _T:
        """
        Return the result of *steps*, in a transaction if they *write*.

        Raises :class:`TimeoutError` after *timeout* seconds, and an :class:`OSError` for an error of PostgreSQL.
        """
        try:
            async with within(timeout):
                pool = await self._pool()
                async with pool.acquire() as connection:
                    # A server that hangs does not answer to the end of the transaction either.
                    timer = asyncio.get_running_loop().call_later(timeout, connection.terminate)
                    try:
                        return await self._execute(connection, steps, write)
                    finally:
                        timer.cancel()
        except _ERRORS as error:
            code = errno.EIO
            if isinstance(error, asyncpg.DiskFullError):
                code = errno.ENOSPC
            raise OSError(code, f"{type(error).__name__}: {error}") from error

    async def _execute(self, connection: Any, steps: Steps[_T], write: bool) -> _T:
        # Outside a transaction, a pooler may use another session for the next statement.
        if not (write or self._pooled_settings):
            return await _execute(connection, steps)
        async with self._transaction(connection):
            return await _execute(connection, steps)

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

    async def listen(self, channel: str, notify: Callable[[], None]) -> bool:
        """See :class:`triton_openai.storage.sql.Database`. A pooler in transaction mode passes no notifications on."""
        try:
            async with within(_LISTEN_SECONDS):
                # It shows whether there is a pooler.
                await self._pool()
                if self._pooled_settings:
                    return False
                if await self._listens():
                    return True
                self._listening = await self._listener(channel, notify)
        except TimeoutError as error:
            raise OSError(errno.ETIMEDOUT, "PostgreSQL does not answer") from error
        except _ERRORS as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
        # What happened before the connection was there is unknown.
        notify()
        return True

    async def _listens(self) -> bool:
        """Return whether the connection for notifications answers: without an answer, it is dead, and is closed."""
        connection = self._listening
        if connection is None or connection.is_closed():
            return False
        try:
            # A network that has forgotten the connection reports nothing.
            await connection.execute("SELECT 1", timeout=_PING_SECONDS)
        except (OSError, TimeoutError, *_ERRORS):
            connection.terminate()
            return False
        return True

    async def _listener(self, channel: str, notify: Callable[[], None]) -> Any:
        """Return a connection that calls *notify* for each notification."""

        def call(*_: object) -> None:
            notify()

        connection = await asyncpg.connect(self._url, timeout=_CONNECT_SECONDS)
        try:
            await connection.add_listener(channel, call)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def close(self) -> None:
        """
        Close all connections after the operations that were started before.

        A server that hangs does not answer to the end of a connection either, so each wait has a limit.
        """
        if self._listening is not None:
            self._listening.terminate()
            self._listening = None
        task = self._connecting
        if task is None:
            return
        if not task.done():
            task.cancel()
            _, running = await asyncio.wait([task], timeout=_CLOSE_SECONDS)
            if running:
                self._opened.terminate()
                await asyncio.wait([task], timeout=_CLOSE_SECONDS)
        elif not task.cancelled() and task.exception() is None:
            # The pool terminates its connections when the time is over.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await task.result().close()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a *task* for which no operation may wait any more: asyncio would log it."""
    if not task.cancelled():
        task.exception()


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
            rows = await connection.fetch(translated(text, _DIALECT), *map(_storable, values))


def _storable(value: Any) -> Any:
    """Return *value* without the null character, which PostgreSQL's texts cannot have."""
    if isinstance(value, str):
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return value


class PostgresStore(SqlStore):
    """Keeps entries in the database of *url*; see :class:`PostgresDatabase`."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        super().__init__(settings, PostgresDatabase(url, pending))
