"""What SQLite and PostgreSQL have in common: the schema and the statements."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

from triton_openai.config.tree import ResponsesSettings
from triton_openai.errors import ConfigurationError
from triton_openai.storage.store import (
    BATCH,
    BATCH_SIZE,
    LARGEST,
    TOUCH_SECONDS,
    Chain,
    Change,
    Entry,
    EntryFull,
    Link,
    Page,
    Row,
    RowKey,
    Store,
    fitting,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
#: Yields a statement and its values, and is sent its rows. Values in a list are those of as many executions.
Steps: TypeAlias = Generator[tuple[Any, ...], Sequence[Sequence[Any]], _T]

# Each is a version of the schema; what is here is never changed, only added to. Statements have parameters `$1` and so
# on; EACH($1) are the texts of a JSON array, NUMBERS($1) the integers of one, and PAIRS($1) the arrays of a JSON array
# as columns `key` and `id`.
# CLOCK() is the Unix time of the database, which is the same for all that use it.
MIGRATIONS: Sequence[Sequence[str]] = (
    # No release has had the first three versions.
    *((), (), ()),
    (
        # `next` is the position of the next row.
        "CREATE TABLE triton_openai_entry (key TEXT PRIMARY KEY, owner TEXT NOT NULL, parent TEXT, version BIGINT NOT"
        " NULL, used DOUBLE PRECISION NOT NULL, holder TEXT NOT NULL, until DOUBLE PRECISION NOT NULL,"
        " size BIGINT NOT NULL, rows BIGINT NOT NULL, next BIGINT NOT NULL, head BYTEA NOT NULL)",
        # The sizes of owners come from an index alone.
        "CREATE INDEX triton_openai_entry_used ON triton_openai_entry (owner, used, size)",
        "CREATE INDEX triton_openai_entry_parent ON triton_openai_entry (parent)",
        "CREATE INDEX triton_openai_entry_key ON triton_openai_entry (owner, key)",
        "CREATE TABLE triton_openai_row (key TEXT NOT NULL, list TEXT NOT NULL, position BIGINT NOT NULL,"
        " id TEXT NOT NULL, data BYTEA NOT NULL, PRIMARY KEY (key, list, position))",
        "CREATE UNIQUE INDEX triton_openai_row_id ON triton_openai_row (key, id)",
    ),
)


@cache
def translated(text: str, dialect: tuple[tuple[str, str], ...]) -> str:
    """Return a statement in a *dialect*, which has patterns and their replacements."""
    for pattern, replacement in dialect:
        text = re.sub(pattern, replacement, text)
    return text


def missing(contents: str, migrations: Sequence[Sequence[str]], version: int) -> Sequence[tuple[int, Sequence[str]]]:
    """
    Return those of *migrations* that a schema of *version* lacks; *contents* is the name of what its store has.

    Raises :class:`ConfigurationError` for a newer version.
    """
    if version > len(migrations):
        raise ConfigurationError(
            f"The store of {contents} was made by a newer version of this service: its schema has version {version},"
            f" and this release supports {len(migrations)}. Use the newer release, or another database."
        )
    return list(enumerate(migrations, 1))[version:]


pending = partial(missing, "responses", MIGRATIONS)
#: The columns of each table that the statements use.
TABLES: Mapping[str, str] = {
    "triton_openai_entry": "key, owner, parent, version, used, holder, until, size, rows, next, head",
    "triton_openai_row": "key, list, position, id, data",
}


def damaged_error(what: str, reason: object) -> ConfigurationError:
    """Return the error for the database *what*, which this service cannot use for this *reason*."""
    return ConfigurationError(
        f"The database {what} is damaged, or is not one of this service: {reason}. Restore it from a backup, or name"
        " another one."
    )


class Database(Protocol):
    """Runs statements, in SQLite or PostgreSQL; see :class:`triton_openai.storage.sqlite.SqliteDatabase`."""

    async def run(self, steps: Steps[_T], *, timeout: float, write: bool = False) -> _T:
        """Return the result of *steps*, in a transaction if they *write*."""

    async def verify(self, tables: Mapping[str, str], *, timeout: float) -> None:
        """
        Check that the database has *tables* with these columns, and look for damage for a limited time.

        Raises :class:`ConfigurationError` if tables are missing, damaged, or of a newer release; any other exception
        if the database does not answer.
        """

    async def listen(self, channel: str, notify: Callable[[], None]) -> bool:
        """
        Call *notify* for each ``NOTIFY`` of *channel* from now on; return whether the database can do so.

        Further calls connect again if the connection was lost. Raises :class:`OSError`.
        """

    async def close(self) -> None:
        """Disconnect."""


def operation(**how: bool) -> Callable[[Callable[_P, Steps[_T]]], Callable[_P, Coroutine[Any, Any, _T]]]:
    """Make steps a method that passes them to the ``_run`` of its class, with the options *how*."""

    def decorate(steps: Callable[_P, Steps[_T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
        @wraps(steps)
        async def run(*args: _P.args, **options: _P.kwargs) -> _T:
            store: Any = args[0]
            result: _T = await store._run(steps(*args, **options), **how)
            return result

        return run

    return decorate


class SqlStore(Store):
    """Keeps entries in tables of *database*. An operation locks an entry before its rows."""

    def __init__(self, settings: ResponsesSettings, database: Database) -> None:
        super().__init__(settings)
        self._database = database

    async def _run(self, steps: Steps[_T], *, write: bool = False, inner: bool = False) -> _T:
        async with self._operation(inner=inner):
            return await self._database.run(steps, timeout=self.timeout, write=write)

    async def _disconnect(self) -> None:
        await self._database.close()

    async def verify(self) -> None:
        async with self._operation(inner=True):
            await self._database.verify(TABLES, timeout=self.timeout)

    def _before(self) -> float:
        return time.time() - self._settings.max_age_seconds

    @operation(write=True, inner=True)
    def _ping(self) -> Steps[None]:
        yield ("SELECT 1",)

    @operation()
    def get(self, key: str) -> Steps[Entry | None]:
        selected = yield (
            "SELECT used, owner, head, version, parent, until, size, rows FROM triton_openai_entry"
            " WHERE key = $1 AND used >= $2",
            *(key, self._before()),
        )
        if not selected:
            return None
        used, owner, head, *rest = selected[0]
        yield from _touch([key], used)
        return Entry(owner, bytes(head), *rest)

    @operation(write=True)
    def _change(self, key: str, change: Change) -> Steps[bool]:
        selected = yield (
            "SELECT owner, version, holder, until, size, rows, next, LENGTH(head) FROM triton_openai_entry"
            " WHERE key = $1 FOR UPDATE",
            key,
        )
        now = time.time()
        new = change.version == 0
        head = change.head
        rows = list[Row]()
        if selected:
            owner, version, holder, until, size, count, position, head_size = selected[0]
        else:
            owner = change.owner
            version = 0
            holder = ""
            until = 0.0
            size = 0
            count = 0
            position = 0
            head_size = 0
        if new is bool(selected) or change.owner not in (None, owner) or change.version not in (None, version):
            return False
        if change.lease is not None:
            wanted, seconds = change.lease
            if change.needs and holder != wanted and (change.needs == "own" or until > now):
                return False
            # One that is ended is over by any clock.
            if seconds:
                holder = wanted
                until = now + seconds
            else:
                holder = ""
                until = 0.0
        if change.rows:
            ids = json.dumps([row.id for row in change.rows])
            known = yield "SELECT id FROM triton_openai_row WHERE key = $1 AND id IN EACH($2)", key, ids
            there = {row_id for (row_id,) in known}
            rows = list({row.id: row for row in reversed(change.rows) if row.id not in there}.values())[::-1]
            size = size + sum(len(row.data) for row in rows)
            count = count + len(rows)
            if size > change.max_size or count > change.max_rows:
                raise EntryFull
        if head is not None:
            size = size + len(head) - head_size
            version = version + 1
        values = (key, version, now, holder, until, size, count, position + len(rows), head)
        if new:
            parent = change.parent
            if change.ancestors:
                line = json.dumps([parent, *change.ancestors])
                locked = yield "SELECT key FROM triton_openai_entry WHERE key IN EACH($1) ORDER BY key FOR UPDATE", line
                there = {key for (key,) in locked}
                parent = next((key for key in (parent, *change.ancestors) if key in there), parent)
            made = yield (
                "INSERT INTO triton_openai_entry (key, version, used, holder, until, size, rows, next, head, owner,"
                " parent) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT (key) DO NOTHING"
                " RETURNING key",
                *(*values, owner, parent),
            )
            if not made:
                return False
        else:
            yield (
                "UPDATE triton_openai_entry SET version = $2, used = $3, holder = $4, until = $5, size = $6, rows = $7,"
                " next = $8, head = COALESCE($9, head) WHERE key = $1",
                *values,
            )
        if rows:
            yield (
                "INSERT INTO triton_openai_row (key, list, position, id, data) VALUES ($1, $2, $3, $4, $5)",
                [(key, row.list, number, row.id, row.data) for number, row in enumerate(rows, position)],
            )
        return True

    @operation()
    def page(
        self, key: str, name: str, *, after: str | None = None, limit: int, max_size: int, reverse: bool = False
    ) -> Steps[Page | None]:
        first = -1
        last = LARGEST
        if after is not None:
            selected = yield (
                "SELECT position FROM triton_openai_row WHERE key = $1 AND list = $2 AND id = $3",
                *(key, name, after),
            )
            if not selected:
                return None
            if reverse:
                last = selected[0][0]
            else:
                first = selected[0][0]
        rows = (
            "FROM triton_openai_row WHERE key = $1 AND list = $2 AND position > $3 AND position < $4"
            f" ORDER BY position {_order(reverse)} LIMIT $5"
        )
        sizes = yield f"SELECT LENGTH(data) {rows}", *(key, name, first, last, limit + 1)
        count = min(len(sizes), limit, fitting((size for (size,) in sizes), max_size))
        shown = yield f"SELECT id, data {rows}", *(key, name, first, last, count)
        return Page([Row(name, row_id, bytes(data)) for row_id, data in shown], count < len(sizes))

    @operation()
    def _at(self, what: str, owner: str, row_keys: Collection[RowKey]) -> Steps[Mapping[RowKey, Any]]:
        if what == "sizes":
            column = "LENGTH(r.data)"
        else:
            column = "r.data"
        selected = yield (
            f"SELECT p.key, p.id, {column} FROM PAIRS($1) p CROSS JOIN triton_openai_row r CROSS JOIN"
            " triton_openai_entry e WHERE r.key = p.key AND r.id = p.id AND e.key = r.key AND e.owner = $2"
            " AND e.used >= $3",
            *(json.dumps(list(row_keys)), owner, self._before()),
        )
        return {RowKey(key, row_id): value for key, row_id, value in selected}

    @operation()
    def chain(
        self, key: str, owner: str, names: Sequence[str], *, max_links: int, max_rows: int = LARGEST,
        max_size: int = LARGEST,
    ) -> Steps[Chain]:  # fmt: skip
        # One statement, so that nobody deletes an entry between two. It has a line for each row, and for a link that
        # has none. The rows are counted only where the entries, which may have other lists, are not small enough.
        wanted = "r.key = l.key AND l.used IS NOT NULL AND r.list IN EACH($4)"
        selected = yield (
            "WITH RECURSIVE link (key, depth, parent, used, until, size, rows) AS (SELECT '', 0, CAST($1 AS TEXT),"
            " CAST(0 AS DOUBLE PRECISION), CAST(0 AS DOUBLE PRECISION), CAST(0 AS BIGINT), CAST(0 AS BIGINT)"
            " UNION ALL SELECT l.parent, l.depth + 1, e.parent, CASE WHEN e.used >= $5 THEN e.used END, e.until,"
            " e.size, e.rows FROM link l LEFT JOIN triton_openai_entry e ON e.key = l.parent AND e.owner = $2"
            " WHERE l.parent IS NOT NULL AND l.depth < $3),"
            " small AS (SELECT SUM(rows) <= $6 AND SUM(size) <= $7 AS known FROM link),"
            " total AS (SELECT COUNT(*) AS number, COALESCE(SUM(LENGTH(r.data)), 0) AS size FROM small s"
            f" CROSS JOIN link l CROSS JOIN triton_openai_row r WHERE NOT s.known AND {wanted})"
            " SELECT l.key, l.used, l.until, t.number, t.size, r.data FROM link l CROSS JOIN total t"
            f" LEFT JOIN triton_openai_row r ON {wanted} AND t.number <= $6 AND t.size <= $7"
            " WHERE l.depth > 0 ORDER BY l.depth DESC, r.list, r.position",
            *(key, owner, max_links, json.dumps(names), self._before(), max_rows, max_size),
        )
        links = dict.fromkeys(row[:3] for row in selected)
        yield from _touch([link for link, *_ in links], min(used or LARGEST for _, used, _ in links))
        *_, length, size, _ = selected[0]
        rows = [bytes(data) for *_, data in selected if data is not None]
        chain = [Link(link, used is not None, until or 0.0) for link, used, until in links][::-1]
        return Chain(chain, rows, length or len(rows), int(size) or sum(map(len, rows)))

    @operation()
    def entries(
        self, owner: str, prefix: str, *, after: str | None, limit: int, reverse: bool
    ) -> Steps[Sequence[tuple[str, bytes]]]:
        # No digit is greater than f.
        if reverse:
            first = prefix
            last = after or f"{prefix}g"
        else:
            first = after or prefix
            last = f"{prefix}g"
        selected = yield (
            "SELECT key, head FROM triton_openai_entry WHERE owner = $1 AND key > $2 AND key < $3 AND used >= $4"
            f" ORDER BY key {_order(reverse)} LIMIT $5",
            *(owner, first, last, self._before(), limit),
        )
        return [(key, bytes(head)) for key, head in selected]

    @operation(write=True)
    def delete(self, key: str, *, bridged: bool = False) -> Steps[bool]:
        if bridged:
            # Whoever makes one that goes on from it has the lock, or comes later and does not find it.
            yield "SELECT key FROM triton_openai_entry WHERE key = $1 FOR UPDATE", key
            yield (
                "UPDATE triton_openai_entry SET parent = (SELECT parent FROM triton_openai_entry WHERE key = $1)"
                " WHERE parent = $1",
                key,
            )
        return (yield from _delete([key]))

    @operation(write=True)
    def delete_row(self, key: str, row_id: str) -> Steps[bool]:
        yield "UPDATE triton_openai_entry SET used = $2 WHERE key = $1", key, time.time()
        gone = yield "DELETE FROM triton_openai_row WHERE key = $1 AND id = $2 RETURNING LENGTH(data)", key, row_id
        for (size,) in gone:
            yield "UPDATE triton_openai_entry SET size = size - $2, rows = rows - 1 WHERE key = $1", key, size
        return bool(gone)

    @operation(inner=True)
    def owners(self) -> Steps[Mapping[str, int]]:
        selected = yield ("SELECT owner, SUM(size) FROM triton_openai_entry GROUP BY owner",)
        return {owner: int(size) for owner, size in selected}

    @operation(write=True, inner=True)
    def _drop(self, owner: str, before: float, surplus: int) -> Steps[int]:
        selected = yield (
            f"SELECT key, used, size FROM triton_openai_entry WHERE owner = $1 ORDER BY used LIMIT {BATCH}",
            owner,
        )
        dropped = list[str]()
        total = 0
        for key, used, size in selected:
            if (used >= before and total >= surplus) or total > BATCH_SIZE:
                break
            dropped.append(key)
            total += size
        yield from _delete(dropped)
        return total


def _order(reverse: bool) -> str:
    if reverse:
        return "DESC"
    return "ASC"


def _touch(keys: Sequence[str], used: float) -> Steps[None]:
    """Mark *keys* as used now; the oldest of them was used at *used*."""
    now = time.time()
    if used < now - TOUCH_SECONDS:
        yield "UPDATE triton_openai_entry SET used = $2 WHERE key IN EACH($1)", json.dumps(keys), now


def _delete(keys: Sequence[str]) -> Steps[bool]:
    gone = yield "DELETE FROM triton_openai_entry WHERE key IN EACH($1) RETURNING key", json.dumps(keys)
    if gone:
        yield "DELETE FROM triton_openai_row WHERE key IN EACH($1)", json.dumps(keys)
    return bool(gone)
