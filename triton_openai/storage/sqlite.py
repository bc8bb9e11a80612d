"""Entries in SQLite: in a file, or in memory."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.sql import SqlStore, Steps, pending

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


class SqliteStore(SqlStore):
    """
    Keeps entries in a file, which several processes of one machine may share; without a *path*, in memory.

    With *or_memory*, a file that cannot be opened is replaced by memory.
    """

    dialect = (
        (
            r"PAIRS\((.*?)\)",
            r"(SELECT json_extract(value, '$[0]') AS key, json_extract(value, '$[1]') AS id FROM json_each(\1))",
        ),
        (r"EACH\((.*?)\)", r"(SELECT value FROM json_each(\1))"),
        # A transaction that writes has the whole file.
        (" FOR UPDATE$", ""),
        (r"\$(\d)", r"?\1"),
    )

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
            self._close()
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
        # Whoever waits for a lock gives up earlier.
        connection = sqlite3.connect(self._path or ":memory:", timeout=2 * self.timeout, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            for number, statements in pending(connection.execute("PRAGMA user_version").fetchone()[0]):
                for statement in statements:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _run(self, steps: Steps[_T], *, write: bool = False, inner: bool = False) -> _T:
        deadline = time.monotonic() + self.timeout
        async with self._operation(inner=inner):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._execute, steps, write, deadline)

    def _execute(self, steps: Steps[_T], write: bool, deadline: float) -> _T:
        _check(deadline)
        connection = self._connected()
        if write:
            connection.execute("BEGIN IMMEDIATE")
        rows: Any = None
        try:
            while True:
                text, *values = steps.send(rows)
                if values and isinstance(values[0], list):
                    connection.executemany(self._statement(text), values[0])
                    rows = ()
                else:
                    rows = connection.execute(self._statement(text), values).fetchall()
        except StopIteration as stop:
            # Whoever waited for it longer was told that it failed.
            _check(deadline)
            if write:
                connection.execute("COMMIT")
            result: _T = stop.value
            return result
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    async def _disconnect(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
