"""A PostgreSQL database, which several machines may share, and entries in one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import asyncpg

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.sql import SqlStore, Steps, pending, translated
from triton_openai.tasks import within

_T = TypeVar("_T")
# After these seconds the server ends a transaction whose client is silent, such as a process that is frozen: others
# wait for the rows that it has locked.
_SILENT_SECONDS = 15
_DIALECT = (
    (r"CLOCK\(\)", "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"),
    (r"PAIRS\((.*?)\)", r"(SELECT value->>0 AS key, value->>1 AS id FROM json_array_elements(CAST(\1 AS json)))"),
    (r"EACH\((.*?)\)", r"(SELECT json_array_elements_text(CAST(\1 AS json)))"),
)


class PostgresDatabase:
    """
    The database of *url*, which several machines may share.

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

    async def _connect(self, timeout: float) -> Any:
        options = {"idle_in_transaction_session_timeout": f"{_SILENT_SECONDS}s"}
        if self._namespace is not None:
            options["search_path"] = self._namespace
        pool = await asyncpg.create_pool(
            self._url, min_size=0, max_size=4, command_timeout=timeout, server_settings=options
        )
        try:
            async with pool.acquire() as connection, connection.transaction():
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
                    self._pool = self._pool or await self._connect(timeout)
                async with self._pool.acquire() as connection:
                    # A server that hangs does not answer to the end of the transaction either.
                    timer = asyncio.get_running_loop().call_later(timeout, connection.terminate)
                    try:
                        async with connection.transaction() if write else nullcontext():
                            return await _execute(connection, steps)
                    finally:
                        timer.cancel()
        except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            full = isinstance(error, asyncpg.DiskFullError)
            raise OSError(errno.ENOSPC if full else errno.EIO, f"{type(error).__name__}: {error}") from error

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
