"""A SQLite database on a thread of its own, and entries in one: in a file, or in memory."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from errno import EISDIR
from pathlib import Path
from typing import Any, Literal, TypeVar

import structlog

from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.sql import SqlStore, Steps, damaged_error, pending, translated
from triton_openai.tasks import within

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
# Longest time for which the start looks for damage: a file of gigabytes takes longer.
_VERIFY_SECONDS = 1.0
# SQLite asks after so many steps of its machine, about a millisecond, whether a statement is to go on.
_STEPS = 100_000
_DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_DIALECT = (
    (
        r"PAIRS\((.*?)\)",
        r"(SELECT json_extract(value, '$[0]') AS key, json_extract(value, '$[1]') AS id FROM json_each(\1))",
    ),
    (r"EACH\((.*?)\)", r"(SELECT value FROM json_each(\1))"),
    (r"IN NUMBERS\((.*?)\)", r"IN (SELECT value FROM json_each(\1))"),
    # A transaction that writes has the whole file.
    (r" FOR UPDATE( OF \w+)?( SKIP LOCKED)?$", ""),
    # Processes of one machine notify each other by a file. An analysis would read the whole file.
    (r"^(NOTIFY|ANALYZE) .*", "SELECT 1"),
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

    def _connected(self, deadline: float) -> sqlite3.Connection:
        # What is written to a file that was deleted is lost, and no other process sees it.
        if self._connection is None or self._opened != self._file():
            self._close()
            try:
                self._connection = self._connect(deadline)
            except (OSError, sqlite3.Error) as error:
                if _shows_damage(error):
                    raise damaged_error(f"in {self._path}", error) from error
                if not self._or_memory:
                    raise
                _log.warning("responses are kept in memory only: the state folder cannot be used", reason=str(error))
                self._path = None
                self._connection = self._connect(deadline)
            self._opened = self._file()
        return self._connection

    def _file(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _connect(self, deadline: float) -> sqlite3.Connection:
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.is_dir():
                raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(self._path))
            # For nobody else to read: it holds prompts and answers. A file that is there is not opened, because closing
            # it drops the locks of this process's other connections (sqlite.org/howtocorrupt.html, section 2.2).
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        patience = max(0.0, deadline - time.monotonic())
        connection = sqlite3.connect(self._path or ":memory:", timeout=patience, isolation_level=None)
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
        async with within(timeout):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._execute, steps, write, deadline)

    async def verify(self, tables: Mapping[str, str], *, timeout: float) -> None:
        """See :class:`triton_openai.storage.sql.Database`. A file that is not there yet is not made."""
        deadline = time.monotonic() + timeout
        async with within(timeout):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._verify, tables, deadline)

    def _verify(self, tables: Mapping[str, str], deadline: float) -> None:
        if self._file() is None:
            return
        connection = self._connected(deadline)
        if self._path is None:
            # It could not be opened, and memory takes its place.
            return
        try:
            for table, columns in tables.items():
                connection.execute(f"SELECT {columns} FROM {table} LIMIT 1").fetchall()
            problem = _first_damage(connection)
        except sqlite3.Error as error:
            if not (_shows_damage(error) or str(error).startswith("no such ")):
                raise
            problem = str(error)
        if problem is not None:
            self._close()
            raise damaged_error(f"in {self._path}", problem)

    def _execute(self, steps: Steps[_T], write: bool, deadline: float) -> _T:
        _check(deadline)
        connection = self._connected(deadline)
        # Another process may have the file; nobody waits for it longer than for the operation.
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * max(0.0, deadline - time.monotonic()))}")
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

    async def listen(self, channel: str, notify: Callable[[], None]) -> bool:
        """See :class:`triton_openai.storage.sql.Database`. SQLite cannot notify processes."""
        return False

    async def close(self) -> None:
        """Close the file, after all that was asked for before."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)


class SqliteStore(SqlStore):
    """Keeps entries in the database of *path*; see :class:`SqliteDatabase`."""

    def __init__(self, path: Path | None, settings: ResponsesSettings, *, or_memory: bool = False) -> None:
        super().__init__(settings, SqliteDatabase(path, pending, or_memory=or_memory))


def _shows_damage(error: Exception) -> bool:
    """Return whether *error* says that a file is no database, or no longer a sound one."""
    # The lower byte is the kind, the upper ones are details of it.
    return isinstance(error, sqlite3.DatabaseError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGES


def _first_damage(connection: sqlite3.Connection) -> str | None:
    """Return the first damage of the file that is found in time, if there is any."""
    end = time.monotonic() + _VERIFY_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
    try:
        ((result,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_INTERRUPT:
            raise
        return None
    finally:
        connection.set_progress_handler(None, 0)
    if result == "ok":
        return None
    return str(result).strip().splitlines()[-1]


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
