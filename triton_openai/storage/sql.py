"""What SQLite and PostgreSQL have in common: the schema and the statements."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Coroutine, Generator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import structlog

from triton_openai.errors import ConfigurationError
from triton_openai.storage.store import (
    BATCH,
    TOUCH_SECONDS,
    Entry,
    EntryFull,
    Link,
    Page,
    Place,
    Row,
    Store,
    oldest,
    within,
)

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")
_P = ParamSpec("_P")
#: Yields a statement and its values, and is sent its rows. Values in a list are those of as many executions.
Steps: TypeAlias = Generator[tuple[Any, ...], Sequence[Sequence[Any]], _T]

# Each is a version of the schema; what is here is never changed, only added to. Statements have parameters `$1` and so
# on; EACH($1) are the texts of a JSON array, and PAIRS($1) the arrays of a JSON array as columns `key` and `id`.
MIGRATIONS: Sequence[Sequence[str]] = (
    (),
    (
        # The first version kept values that nobody can read any more.
        "DROP TABLE IF EXISTS triton_openai_state",
        # `next` is the position of the next row.
        "CREATE TABLE triton_openai_entry (key TEXT PRIMARY KEY, owner TEXT NOT NULL, parent TEXT, version BIGINT NOT"
        " NULL, used DOUBLE PRECISION NOT NULL, holder TEXT NOT NULL, until DOUBLE PRECISION NOT NULL,"
        " size BIGINT NOT NULL, rows BIGINT NOT NULL, next BIGINT NOT NULL, head BYTEA NOT NULL)",
        "CREATE INDEX triton_openai_entry_used ON triton_openai_entry (owner, used)",
        "CREATE TABLE triton_openai_row (key TEXT NOT NULL, list TEXT NOT NULL, position BIGINT NOT NULL,"
        " id TEXT NOT NULL, data BYTEA NOT NULL, PRIMARY KEY (key, list, position))",
        "CREATE UNIQUE INDEX triton_openai_row_id ON triton_openai_row (key, id)",
        "CREATE TABLE triton_openai_owner (owner TEXT PRIMARY KEY, size BIGINT NOT NULL)",
    ),
)
_LAST = 2**62


def pending(version: int) -> Sequence[tuple[int, Sequence[str]]]:
    """Return the migrations that a schema of *version* lacks. Raises :class:`ConfigurationError` for a newer one."""
    if version == 1:
        _log.warning("the responses that an earlier version of this service stored are dropped")
    if version > len(MIGRATIONS):
        raise ConfigurationError("The store of responses was made by a newer version of this service.")
    return list(enumerate(MIGRATIONS, 1))[version:]


def _operation(
    *, write: bool = False, inner: bool = False
) -> Callable[[Callable[Concatenate[Any, _P], Steps[_T]]], Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]]:
    """Make steps a method that runs them, in a transaction if they *write*; *inner* is as in the base class."""

    def decorate(
        steps: Callable[Concatenate[Any, _P], Steps[_T]],
    ) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
        async def run(self: Any, /, *args: _P.args, **options: _P.kwargs) -> _T:
            done: _T = await self._run(steps(self, *args, **options), write=write, inner=inner)
            return done

        return run

    return decorate


class SqlStore(Store):
    """Keeps entries in tables. An operation locks entries first, and owners last."""

    @abstractmethod
    async def _run(self, steps: Steps[_T], *, write: bool, inner: bool) -> _T:
        """Return the result of *steps*."""

    def _before(self) -> float:
        return time.time() - self._settings.max_age_seconds

    @_operation(write=True, inner=True)
    def _ping(self) -> Steps[None]:
        yield ("SELECT 1",)

    @_operation()
    def get(self, key: str) -> Steps[Entry | None]:
        found = yield (
            "SELECT used, owner, head, version, parent, until, size, rows FROM triton_openai_entry"
            " WHERE key = $1 AND used >= $2",
            *(key, self._before()),
        )
        if not found:
            return None
        used, owner, head, *rest = found[0]
        yield from _touch([key], used)
        return Entry(owner, bytes(head), *rest)

    @_operation(write=True)
    def put(
        self, key: str, owner: str, head: bytes, version: int, *, rows: Sequence[Row] = (), parent: str | None = None,
        lease: tuple[str, float] | None = None,
    ) -> Steps[bool]:  # fmt: skip
        self._charge(owner, rows, len(head))
        now, grown = time.time(), len(head)
        holder, until = (None, None) if lease is None else (lease[0], _end(lease[1]))
        if version:
            old = yield (
                "SELECT LENGTH(head) FROM triton_openai_entry WHERE key = $1 AND owner = $2 AND version = $3",
                *(key, owner, version),
            )
            grown -= old[0][0] if old else 0
            done = yield (
                "UPDATE triton_openai_entry SET version = version + 1, used = $4, holder = COALESCE($5, holder),"
                " until = COALESCE($6, until), head = $7, size = size + $8"
                " WHERE key = $1 AND owner = $2 AND version = $3 RETURNING key",
                *(key, owner, version, now, holder, until, head, grown),
            )
        else:
            done = yield (
                "INSERT INTO triton_openai_entry (key, owner, parent, version, used, holder, until, size, rows, next,"
                " head) VALUES ($1, $2, $3, 1, $4, $5, $6, $8, 0, 0, $7) ON CONFLICT (key) DO NOTHING RETURNING key",
                *(key, owner, parent, now, holder or "", until or 0.0, head, grown),
            )
        return bool(done) and (yield from _append(key, owner, rows, _LAST, _LAST, grown))

    @_operation(write=True)
    def append(
        self, key: str, owner: str, rows: Sequence[Row], *, most_rows: int | None = None, most_size: int | None = None,
        lease: tuple[str, float] | None = None,
    ) -> Steps[bool]:  # fmt: skip
        self._charge(owner, rows)
        if lease is not None:
            held = yield (
                "UPDATE triton_openai_entry SET until = $3 WHERE key = $1 AND holder = $2 RETURNING key",
                *(key, lease[0], _end(lease[1])),
            )
            if not held:
                return False
        return (yield from _append(key, owner, rows, most_rows or _LAST, most_size or _LAST))

    @_operation(write=True)
    def claim(self, key: str, holder: str, seconds: float, *, renew: bool = False) -> Steps[bool]:
        now = time.time()
        done = yield (
            "UPDATE triton_openai_entry SET used = $3, holder = $5, until = $4"
            f" WHERE key = $1 AND (holder = $2{'' if renew else ' OR until <= $3'}) RETURNING key",
            *(key, holder, now, _end(seconds), holder if seconds else ""),
        )
        return bool(done)

    @_operation()
    def page(
        self, key: str, name: str, *, after: str | None = None, limit: int, most_size: int, reverse: bool = False
    ) -> Steps[Page | None]:
        first, last = -1, _LAST
        if after is not None:
            found = yield (
                "SELECT position FROM triton_openai_row WHERE key = $1 AND list = $2 AND id = $3",
                *(key, name, after),
            )
            if not found:
                return None
            first, last = (first, found[0][0]) if reverse else (found[0][0], last)
        rows = (
            "FROM triton_openai_row WHERE key = $1 AND list = $2 AND position > $3 AND position < $4"
            f" ORDER BY position {'DESC' if reverse else 'ASC'} LIMIT $5"
        )
        sizes = yield f"SELECT LENGTH(data) {rows}", *(key, name, first, last, limit + 1)
        count = within([size for (size,) in sizes], limit, most_size)
        shown = yield f"SELECT id, data {rows}", *(key, name, first, last, count)
        return Page([Row(name, row_id, bytes(data)) for row_id, data in shown], count < len(sizes))

    @_operation()
    def sizes(self, owner: str, places: Collection[Place]) -> Steps[Mapping[Place, int]]:
        found = yield _rows_at("LENGTH(r.data)", owner, places, self._before())
        return {Place(key, row_id): int(size) for key, row_id, size in found}

    @_operation()
    def fetch(self, owner: str, places: Collection[Place]) -> Steps[Mapping[Place, bytes]]:
        found = yield _rows_at("r.data", owner, places, self._before())
        return {Place(key, row_id): bytes(data) for key, row_id, data in found}

    @_operation()
    def chain(self, key: str, owner: str, names: Sequence[str], *, most: int) -> Steps[Sequence[Link]]:
        found = yield (
            "WITH RECURSIVE chain (key, depth) AS (SELECT CAST($1 AS TEXT), 1 UNION ALL SELECT e.parent, c.depth + 1"
            " FROM chain c CROSS JOIN triton_openai_entry e"
            " WHERE e.key = c.key AND e.owner = $2 AND e.parent IS NOT NULL AND c.depth < $3)"
            " SELECT c.key, e.used, e.until, COUNT(r.data), COALESCE(SUM(LENGTH(r.data)), 0) FROM chain c"
            " LEFT JOIN triton_openai_entry e ON e.key = c.key AND e.owner = $2 AND e.used >= $5"
            " LEFT JOIN triton_openai_row r ON r.key = e.key AND r.list IN EACH($4)"
            " GROUP BY c.depth, c.key, e.used, e.until ORDER BY c.depth",
            *(key, owner, most, json.dumps(names), self._before()),
        )
        yield from _touch([link for link, *_ in found], min(used or _LAST for _, used, *_ in found))
        return [Link(link, used is not None, until or 0.0, rows, int(size)) for link, used, until, rows, size in found]

    @_operation()
    def read(self, keys: Sequence[str], names: Sequence[str]) -> Steps[Sequence[bytes]]:
        found = yield (
            "SELECT key, data FROM triton_openai_row WHERE key IN EACH($1) AND list IN EACH($2)"
            " ORDER BY list, position",
            *(json.dumps(keys), json.dumps(names)),
        )
        by_key: dict[str, list[bytes]] = {key: [] for key in keys}
        for key, data in found:
            by_key[key].append(bytes(data))
        return [data for rows in by_key.values() for data in rows]

    @_operation(write=True)
    def delete(self, key: str) -> Steps[bool]:
        return (yield from _delete([key]))

    @_operation(write=True)
    def delete_row(self, key: str, row_id: str) -> Steps[bool]:
        owners = yield "UPDATE triton_openai_entry SET used = $2 WHERE key = $1 RETURNING owner", key, time.time()
        gone = yield ("DELETE FROM triton_openai_row WHERE key = $1 AND id = $2 RETURNING LENGTH(data)", *(key, row_id))
        if not gone:
            return False
        size = gone[0][0]
        yield "UPDATE triton_openai_entry SET size = size - $2, rows = rows - 1 WHERE key = $1", key, size
        yield _grow(owners[0][0], -size)
        return True

    @_operation(write=True, inner=True)
    def owners(self) -> Steps[Mapping[str, int]]:
        yield ("DELETE FROM triton_openai_owner WHERE size <= 0",)
        found = yield ("SELECT owner, size FROM triton_openai_owner",)
        return {owner: int(size) for owner, size in found}

    @_operation(write=True, inner=True)
    def _drop(self, owner: str, before: float, surplus: int) -> Steps[int]:
        found = yield (
            f"SELECT key, used, size FROM triton_openai_entry WHERE owner = $1 ORDER BY used LIMIT {BATCH}",
            owner,
        )
        dropped = oldest([(key, used, size) for key, used, size in found], before, surplus)
        yield from _delete([key for key, _ in dropped])
        return sum(size for _, size in dropped)


def _end(seconds: float) -> float:
    """Return when a lease of *seconds* ends; one that is ended is over by any clock."""
    return time.time() + seconds if seconds else 0.0


def _touch(keys: Sequence[str], used: float) -> Steps[None]:
    """Let *keys*, the oldest of which was used at *used*, be used now."""
    now = time.time()
    if used < now - TOUCH_SECONDS:
        yield "UPDATE triton_openai_entry SET used = $2 WHERE key IN EACH($1)", json.dumps(keys), now


def _append(key: str, owner: str, rows: Sequence[Row], most_rows: int, most_size: int, grown: int = 0) -> Steps[bool]:
    """Add *rows* to an entry that grows by *grown* besides."""
    found = yield (
        "UPDATE triton_openai_entry SET used = $3 WHERE key = $1 AND owner = $2 RETURNING size, rows, next",
        *(key, owner, time.time()),
    )
    if not found:
        return False
    size, count, position = found[0]
    there = yield (
        "SELECT id FROM triton_openai_row WHERE key = $1 AND id IN EACH($2)",
        *(key, json.dumps([row.id for row in rows])),
    )
    known = {row_id for (row_id,) in there}
    new = list({row.id: row for row in reversed(rows) if row.id not in known}.values())[::-1]
    added = sum(len(row.data) for row in new)
    if size + added > most_size or count + len(new) > most_rows:
        raise EntryFull
    if new:
        values = [(key, row.list, position + number, row.id, row.data) for number, row in enumerate(new)]
        yield "INSERT INTO triton_openai_row (key, list, position, id, data) VALUES ($1, $2, $3, $4, $5)", values
        yield (
            "UPDATE triton_openai_entry SET size = size + $2, rows = rows + $3, next = next + $3 WHERE key = $1",
            *(key, added, len(new)),
        )
    yield _grow(owner, grown + added)
    return True


def _grow(owner: str, size: int) -> tuple[Any, ...]:
    return (
        "INSERT INTO triton_openai_owner (owner, size) VALUES ($1, $2)"
        " ON CONFLICT (owner) DO UPDATE SET size = triton_openai_owner.size + excluded.size",
        *(owner, size),
    )


def _rows_at(column: str, owner: str, places: Collection[Place], before: float) -> tuple[Any, ...]:
    return (
        f"SELECT p.key, p.id, {column} FROM PAIRS($1) p CROSS JOIN triton_openai_row r CROSS JOIN triton_openai_entry e"
        " WHERE r.key = p.key AND r.id = p.id AND e.key = r.key AND e.owner = $2 AND e.used >= $3",
        *(json.dumps(list(places)), owner, before),
    )


def _delete(keys: Sequence[str]) -> Steps[bool]:
    """Drop entries, which have one owner."""
    gone = yield "DELETE FROM triton_openai_entry WHERE key IN EACH($1) RETURNING owner, size", json.dumps(keys)
    if gone:
        yield "DELETE FROM triton_openai_row WHERE key IN EACH($1)", json.dumps(keys)
        yield _grow(gone[0][0], -sum(size for _, size in gone))
    return bool(gone)
