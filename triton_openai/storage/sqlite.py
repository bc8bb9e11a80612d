"""A SQLite database on a thread of its own, and entries in one: in a file, or in memory."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.sql import SqlStore, Steps, pending, translated

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
# Whoever waits for a lock gives up earlier.
_LOCK_SECONDS = 10.0
_DIALECT = (
    (
        r"PAIRS\((.*?)\)",
        r"(SELECT json_extract(value, '$[0]') AS key, json_extract(value, '$[1]') AS id FROM json_each(\1))",
    ),
    (r"EACH\((.*?)\)", r"(SELECT value FROM json_each(\1))"),
    # A transaction that writes has the whole file.
    (r" FOR UPDATE( OF \w+ SKIP LOCKED)?$", ""),
    (r"^LOCK TABLE .*", "SELECT 1"),
    (r"\$(\d)", r"?\1"),
)


class SqliteDatabase:
    """
    A file, which several processes of one machine may share; without a *path*, memory.

    *lacking* returns the migrations that a schema of some version lacks. *synchronous* is SQLite's: FULL keeps what was
    written when the machine fails. With *or_memory*, a file that cannot be opened is replaced by memory.
    """

    def __init__(
        self,
        path: Path | None,
        lacking: Callable[[int], Sequence[tuple[int, Sequence[str]]]],
        *,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
        or_memory: bool = False,
    ) -> None:
        self._path = path
        self._lacking = lacking
        self._synchronous = synchronous
        self._or_memory = or_memory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
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
        connection = sqlite3.connect(self._path or ":memory:", timeout=_LOCK_SECONDS, isolation_level=None)
        try:
            connection.create_function("CLOCK", 0, lambda: time.time())  # noqa: PLW0108 - a test may replace it
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("BEGIN IMMEDIATE")
            for number, statements in self._lacking(connection.execute("PRAGMA user_version").fetchone()[0]):
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

    async def run(self, steps: Steps[_T], *, timeout: float, write: bool = False) -> _T:
        """
        Return the result of *steps*, in a transaction if they *write*.

        What has not ended after *timeout* seconds writes nothing and raises :class:`TimeoutError`.
        """
        deadline = time.monotonic() + timeout
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
                    connection.executemany(translated(text, _DIALECT), values[0])
                    rows = ()
                else:
                    rows = connection.execute(translated(text, _DIALECT), values).fetchall()
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

    async def close(self) -> None:
        """Close the file, after all that was asked for before."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)


class SqliteStore(SqlStore):
    """Keeps entries in the database of *path*; see :class:`SqliteDatabase`."""

    def __init__(self, path: Path | None, settings: ResponsesSettings, *, or_memory: bool = False) -> None:
        super().__init__(settings, SqliteDatabase(path, pending, or_memory=or_memory))


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
