"""Entries in PostgreSQL."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any, TypeVar

import asyncpg

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.sql import SqlStore, Steps, pending, translated

_T = TypeVar("_T")
_DIALECT = (
    (r"PAIRS\((.*?)\)", r"(SELECT value->>0 AS key, value->>1 AS id FROM json_array_elements(CAST(\1 AS json)))"),
    (r"EACH\((.*?)\)", r"(SELECT json_array_elements_text(CAST(\1 AS json)))"),
)


class PostgresStore(SqlStore):
    """Keeps entries in PostgreSQL, which several machines may share."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        super().__init__(settings)
        self._url = url
        self._connecting = asyncio.Lock()
        self._pool: Any = None

    async def _connect(self) -> Any:
        pool = await asyncpg.create_pool(self._url, min_size=0, max_size=4, command_timeout=self.timeout)
        try:
            async with pool.acquire() as connection, connection.transaction():
                # One process at a time.
                await connection.execute("SELECT pg_advisory_xact_lock(7461834517)")
                await connection.execute("CREATE TABLE IF NOT EXISTS triton_openai_schema (version BIGINT NOT NULL)")
                version = await connection.fetchval("SELECT COALESCE(MAX(version), 0) FROM triton_openai_schema")
                for number, statements in pending(version):
                    for statement in statements:
                        await connection.execute(statement)
                    await connection.execute("INSERT INTO triton_openai_schema VALUES ($1)", number)
        except BaseException:
            pool.terminate()
            raise
        return pool

    async def _run(self, steps: Steps[_T], *, write: bool = False, inner: bool = False) -> _T:
        async with self._operation(inner=inner):
            async with self._connecting:
                self._pool = self._pool or await self._connect()
            async with self._pool.acquire() as connection:
                # A server that hangs does not answer to the end of the transaction either.
                timer = asyncio.get_running_loop().call_later(self.timeout, connection.terminate)
                try:
                    async with connection.transaction() if write else nullcontext():
                        return await self._execute(connection, steps)
                finally:
                    timer.cancel()

    async def _execute(self, connection: Any, steps: Steps[_T]) -> _T:
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
                rows = await connection.fetch(translated(text, _DIALECT), *values)

    async def _disconnect(self) -> None:
        if self._pool is not None:
            await self._pool.close()
