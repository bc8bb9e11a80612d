"""
``python -m bench.batch_store``: what the tables of batches take in PostgreSQL, without any Triton.

Processes claim chunks of one batch of many lines, mark each line as running and store its result, as the service does.
Their number, the size of a chunk and that of the batch are options. The answers take no time, so the rates are the most
that the tables allow on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import asyncpg

from bench.figures import table, written
from triton_openai.storage import open_batch_store
from triton_openai.storage.batch_records import SUCCEEDED, Batch, BatchUsage, Done, Line
from triton_openai.storage.batch_store import BatchStore

_LEASE = 3600.0
_INSERTED = 1000
_BATCH = "batch_bench"
#: Lines that end together in a process, as many as have a result within 0.2 s.
_GROUP = 100


def _store(url: str) -> BatchStore:
    return open_batch_store(url)[0]


async def _make(url: str, lines: int) -> float:
    """Make a batch of *lines*; return the seconds that the lines took."""
    store = _store(url)
    now = time.time()
    batch = Batch(
        id=_BATCH, owner="me", kind="openai", endpoint="/x", input=_BATCH, created=now, window="24h", expires=now + 9e5
    )  # fmt: skip
    await store.batches.add(batch, max_open=9, max_total=10**9)
    leased = await store.leases.claim("bench", _LEASE, now=now)
    assert leased is not None
    began = time.perf_counter()
    for first in range(1, lines + 1, _INSERTED):
        chunk = [Line(number, 1000 * number, 1000, "m", 0) for number in range(first, first + _INSERTED)]
        await store.lines.add(leased, chunk)
    seconds = time.perf_counter() - began
    await store.lines.analyze()

    def begin(batch: Batch) -> None:
        batch.total = lines
        batch.set_status("in_progress")

    await store.batches.change_leased(leased, begin)
    await store.close()
    return seconds


async def _work(url: str, chunk: int) -> list[tuple[str, float]]:
    """Claim and finish lines until there are none; return each operation and its seconds."""
    store = _store(url)
    times: list[tuple[str, float]] = []
    offset = 0

    async def timed(name: str, work: Any) -> Any:
        began = time.perf_counter()
        result = await work
        times.append((name, time.perf_counter() - began))
        return result

    joined = await store.lines.join(_BATCH, f"{os.getpid()}", _LEASE, chunk)
    assert joined is not None
    _, part, lines = joined
    while lines:
        for first in range(0, len(lines), _GROUP):
            numbers = [line.number for line in lines[first : first + _GROUP]]
            await timed("mark", store.lines.mark_running(part, numbers))
            done = [
                Done(number, SUCCEEDED, offset + 500 * place, 500, BatchUsage()) for place, number in enumerate(numbers)
            ]
            offset += 500 * len(numbers)
            await timed("finish", store.lines.finish(part, done))
        lines = await timed("claim", store.lines.claim(part, chunk))
    await store.close()
    return times


def _run(url: str, chunk: int, answers: Any) -> None:
    answers.put(asyncio.run(_work(url, chunk)))


async def _watch(url: str, over: asyncio.Event) -> list[tuple[float, int, int]]:
    """Return the time, the lines with a result, and the connections, each second."""
    seen: list[tuple[float, int, int]] = []
    connection = await asyncpg.connect(url)
    while not over.is_set():
        detail = await connection.fetchval("SELECT detail FROM openai_batches.batch WHERE id = $1", _BATCH)
        count = await connection.fetchval(
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        import json

        seen.append((time.perf_counter(), json.loads(detail)["succeeded"], count))
        await asyncio.sleep(1)
    await connection.close()
    return seen


async def _sizes(url: str) -> dict[str, Any]:
    connection = await asyncpg.connect(url)
    row = await connection.fetchrow(
        "SELECT pg_table_size('openai_batches.line') AS bytes, pg_indexes_size('openai_batches.line') AS indexes,"
        " n_dead_tup AS dead, n_tup_hot_upd AS hot, n_tup_upd AS updates, autovacuum_count AS vacuums"
        " FROM pg_stat_user_tables WHERE schemaname = 'openai_batches' AND relname = 'line'"
    )
    await connection.close()
    return dict(row)


async def measure(url: str, lines: int, processes: int, chunk: int) -> str:
    """Return the table of a run."""
    inserted = await _make(url, lines)
    before = await _sizes(url)
    context = get_context("spawn")
    answers = context.Queue()
    over = asyncio.Event()
    watching = asyncio.create_task(_watch(url, over))
    began = time.perf_counter()
    workers = [context.Process(target=_run, args=(url, chunk, answers)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    times: list[tuple[str, float]] = []
    for _ in workers:
        times += await asyncio.to_thread(answers.get)
    seconds = time.perf_counter() - began
    over.set()
    seen = await watching
    after = await _sizes(url)
    store = _store(url)
    began = time.perf_counter()
    last = 0
    counted = 0
    batch = await store.batches.find(_BATCH, "me", "openai")
    assert batch is not None
    while rows := await store.lines.results(batch, last, 1000):
        counted += len(rows)
        last = rows[-1].number
    merged = time.perf_counter() - began
    assert counted == lines == batch.succeeded, (counted, batch.succeeded)
    await store.close()
    rates = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairwise(seen)]
    steady = sorted(rates[len(rates) // 10 : -1] or rates)
    cells = [
        ["lines", f"{lines:,} in {processes} processes, chunks of {chunk}"],
        ["lines/s inserted at validation", written(lines / inserted, 0)],
        ["lines/s claimed, marked, finished", written(lines / seconds, 0)],
        ["the same in the slowest and fastest second", f"{steady[0]:.0f} to {steady[-1]:.0f}"],
        ["claims/s", written(sum(name == "claim" for name, _ in times) / seconds, 1)],
        *([f"ms for a {name}: median, 99 in 100", _spread(times, name)] for name in ("claim", "mark", "finish")),
        ["connections at most", str(max(count for _, _, count in seen))],
        ["MB of rows, before and after", f"{before['bytes'] / 1e6:.0f}, {after['bytes'] / 1e6:.0f}"],
        ["MB of indexes, before and after", f"{before['indexes'] / 1e6:.0f}, {after['indexes'] / 1e6:.0f}"],
        ["row updates for a line", written(after["updates"] / lines, 2)],
        ["of which in their page (HOT)", f"{after['hot'] / max(1, after['updates']):.0%}"],
        ["runs of autovacuum, dead rows at the end", f"{after['vacuums']}, {after['dead']:,}"],
        ["lines/s read for the merge", written(lines / merged, 0)],
    ]
    return table(["PostgreSQL alone", ""], cells)


def _spread(times: Sequence[tuple[str, float]], name: str) -> str:
    ordered = sorted(seconds * 1e3 for kind, seconds in times if kind == name)
    if not ordered:
        return "-"
    return f"{ordered[len(ordered) // 2]:.1f}, {ordered[len(ordered) * 99 // 100]:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.batch_store", description="The tables of a large batch.")
    parser.add_argument("--url", help="an empty database; by default one of a PostgreSQL that is started for it")
    parser.add_argument("--lines", type=int, default=1_000_000, help="lines of the batch, a multiple of 1,000")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=256, help="lines that a process claims at once")
    options = parser.parse_args(arguments)
    if options.url:
        print(asyncio.run(measure(options.url, options.lines, options.processes, options.chunk)))
        return
    # Only a machine for tests has these.
    from tests.programs import found
    from tests.store_fixture import running_postgresql

    with running_postgresql(found("PostgreSQL")) as server:
        print(asyncio.run(measure(server.url(), options.lines, options.processes, options.chunk)))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
