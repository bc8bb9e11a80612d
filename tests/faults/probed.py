"""
On SIGUSR1 a process of the service writes into a file how it is inside.

What is counted is found by its class among all that is alive: what leaks is what nobody refers to by name any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The numbers of records of requests that only the collector has found, of each look.
COLLECTED: list[int] = []


def state(*, strict: bool) -> dict[str, Any]:
    """Return the tasks by their names, and the numbers of requests, streams, connections, records and descriptors."""
    from aiohttp import TCPConnector

    from triton_openai.answer.run import Run
    from triton_openai.serving.admission import Admission
    from triton_openai.serving.connections import Connection
    from triton_openai.telemetry.request_record import RequestRecord
    from triton_openai.triton.http_stream import ConnectionPool, HttpCall, HttpStream

    kinds: tuple[type, ...] = (Admission, Connection, ConnectionPool, HttpCall, HttpStream, TCPConnector)
    if "triton_openai.triton.grpc" in sys.modules:
        from triton_openai.triton.grpc import GrpcStream

        kinds += (GrpcStream,)

    def count(objects: list[Any]) -> int:
        types = Counter(map(type, objects))
        return types[RequestRecord] + types[Run]

    if strict:
        # What only the collector of cycles finds stays for a long time. So it counts, also in later looks, and from
        # the first one on nobody else calls the collector.
        gc.disable()
    else:
        # The service freezes what lives at its start, and the collector does not list what is frozen.
        gc.unfreeze()
    freed = count(gc.get_objects())
    # A call that failed is in a circle with its traceback, and a connection with it: that is seldom, and no leak.
    gc.collect()
    objects = gc.get_objects()
    records = count(objects)
    if not strict:
        # As the service has it: the next collection would walk through all of it, in the middle of a request.
        gc.freeze()
    COLLECTED.append(freed - records if strict else 0)
    alive: dict[str, list[Any]] = {kind.__name__: [] for kind in kinds}
    for each in [each for each in objects if type(each) in kinds]:
        alive[type(each).__name__].append(each)
    streams = [*alive["HttpStream"], *alive.get("GrpcStream", ())]
    idle = [connection for pool in alive["ConnectionPool"] for _, connection in pool._idle if connection.usable]
    calls = [call for call in alive["HttpCall"] if not call._ended.done()]
    # The connections to PostgreSQL, if responses are stored there.
    pools: Any = sys.modules.get("asyncpg.pool")
    holders = [] if pools is None else [each for each in objects if type(each) is pools.PoolConnectionHolder]
    connected = [holder for holder in holders if holder._con is not None]
    in_use = [holder for holder in connected if holder._in_use is not None]
    kept = [connection for pool in alive["TCPConnector"] for group in pool._conns.values() for connection in group]
    tasks = [str(getattr(task.get_coro(), "__qualname__", "")) for task in asyncio.all_tasks()]
    return {
        # A wait for an event belongs to the task that waits, which is one of them too.
        "tasks": sorted(name for name in tasks if name != "Event.wait"),
        "running": sum(sum(map(len, each.running.values())) + len(each.queue) for each in alive["Admission"]),
        "streams": sum(each._receiver is not None for each in streams),
        "used": sum(len(each._acquired) for each in alive["TCPConnector"]) + len(calls) + len(in_use),
        "idle": len(idle) + len(kept) + len(connected) - len(in_use),
        "records": records + sum(COLLECTED),
        # Looked at in the same moment as the connections.
        "descriptors": _descriptors(),
        # Those of clients, when they have ended.
        "ended": sum(each.transport is None for each in alive["Connection"]),
    }


def _descriptors() -> list[str]:
    """Return what the descriptors lead to, without the one that lists them, and without the numbers of sockets."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(each.readlink()).partition(":[")[0])
    return found


def watch(file: Path, *, strict: bool) -> None:
    """Write into *file* when asked; if *strict*, what only the collector of cycles finds counts as left behind."""
    libc = ctypes.CDLL(None)

    def tell() -> None:
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(state(strict=strict)))
        # What is free goes back to the system, so that the process's size is what it holds.
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        draft.rename(file)

    if strict:
        # What is imported before the service is made stays out of each look, and the service freezes nothing more.
        gc.freeze()
        gc.freeze = lambda: None

    def tell_between_callbacks(*_: object) -> None:
        # The handler of a signal runs anywhere, also while one of the counted objects is being made.
        asyncio.get_running_loop().call_soon_threadsafe(tell, context=contextvars.Context())

    signal.signal(signal.SIGUSR1, tell_between_callbacks)


def time_turns(file: Path, longest: float) -> None:
    """
    Run the service on asyncio's loop, and append to *file* each turn of it that takes longer than *longest*.

    A line has the times at which the turn began and ended, the CPU time of the main thread and the collector's part of
    it, all in seconds, the callback that took most of it, and the ids of requests in the callback's context.
    """
    import uvloop

    turn, run = asyncio.BaseEventLoop._run_once, asyncio.Handle._run  # type: ignore[attr-defined]
    slowest: tuple[float, Mapping[Any, Any]] = (0.0, {})
    collecting = collected = 0.0

    def collects(phase: str, _: object) -> None:
        nonlocal collecting, collected
        if phase == "start":
            collecting = time.thread_time()
        else:
            collected += time.thread_time() - collecting

    def timed(handle: asyncio.Handle) -> None:
        nonlocal slowest
        began = time.thread_time()
        run(handle)
        took = time.thread_time() - began
        if took > slowest[0]:
            slowest = took, handle._context  # type: ignore[attr-defined]

    def timed_turn(loop: asyncio.AbstractEventLoop) -> None:
        nonlocal slowest, collected
        slowest, collected = (0.0, {}), 0.0
        first, began = time.monotonic(), time.thread_time()
        turn(loop)
        took = time.thread_time() - began
        if took > longest:
            with file.open("a") as lines:
                part, context = slowest
                # What a task does is to be found by the request of its context.
                known = {key.name: found for key, found in context.items()}
                what = f"{part:.3f} s of one, {collected:.3f} s of the collector: {known!r:.300}"
                lines.write(f"{first} {time.monotonic()} {took} {collected} {what}\n")

    gc.callbacks.append(collects)
    asyncio.BaseEventLoop._run_once = timed_turn  # type: ignore[attr-defined]
    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
    uvloop.run = asyncio.run  # type: ignore[assignment]
