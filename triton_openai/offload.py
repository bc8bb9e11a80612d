"""
Keeps the event loop free: decides by what work is likely to take where it is done, and decodes numbers in JSON quickly.

Short work is done at once: a thread costs about 70 µs of latency, more under load. Longer work is done in a few threads
of its own, so that it never waits for the files and names that asyncio's threads read. Long work has a thread for
itself: the other threads stay free for work that is shorter, and there is only one text at a time whose tokens need
hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from threading import Lock
from typing import Any, TypeVar, TypeVarTuple

import msgspec

from triton_openai.errors import ServiceOverloaded
from triton_openai.shares import SHARING_KEY, may_take

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

#: Microseconds: what takes more is done in a thread, and what takes more than LONG in the thread for long work.
INLINE = 1_000
LONG = 200_000
# Microseconds of work that runs or waits in a lane before more of it is refused.
_MAX_WORK = 10_000_000
_SHORT_THREADS = 4
# Work that takes more has used memory that is worth giving back.
_FRUGAL = 20_000

#: About what work takes, in microseconds, at 2.5 GHz. For each byte that is only copied.
COPY = 0.001
#: For each byte or number of JSON, of a tensor, or of what a template writes.
BYTE = 0.016
#: For each character or token that a tokenizer or a parser reads or writes.
CHARACTER = 0.4
#: For each object, however short: a message, a field, a tool, a text, a log probability.
ITEM = 5.0


async def run(function: Callable[[*_Args], _T], *arguments: *_Args, cost: float, refusable: bool = False) -> _T:
    """
    Call *function*, which takes about *cost* microseconds, here or in a thread, where it ends even if it is cancelled.

    With *refusable*, raises :class:`ServiceOverloaded` if too much work like it waits already.
    """
    if cost <= INLINE:
        return function(*arguments)
    future = lane(cost > LONG).submit(partial(copy_context().run, function, *arguments), cost, refusable)
    return await asyncio.wrap_future(future)


class Lane:
    """Threads for work of one kind: *long* work is done one by one, and its memory goes back to the system."""

    def __init__(self, *, long: bool) -> None:
        if long:
            self._threads = ThreadPoolExecutor(1, "long-work")
        else:
            self._threads = ThreadPoolExecutor(_SHORT_THREADS, "work")
        # Microseconds of work that runs or waits, by key.
        self._costs: defaultdict[str | None, float] = defaultdict(float)
        self._lock = Lock()

    def submit(self, function: Callable[[], _T], cost: float, refusable: bool) -> Future[_T]:
        """Return the future of a call. Raises :class:`ServiceOverloaded`."""
        key = SHARING_KEY.get()
        with self._lock:
            total = sum(self._costs.values())
            # The first piece of work is done however long it takes.
            if total > INLINE:
                free = _MAX_WORK - total
            else:
                free = math.inf
            if refusable and not may_take(cost, own=self._costs.get(key, 0.0), free=free):
                raise ServiceOverloaded(
                    "Too many texts wait to be tokenized.", retry_after=math.ceil(total / 1_000_000)
                )
            self._costs[key] += cost
        if cost > _FRUGAL:
            future = self._threads.submit(_frugal, function)
        else:
            future = self._threads.submit(function)
        future.add_done_callback(lambda _: self._done(key, cost))
        return future

    def _done(self, key: str | None, cost: float) -> None:
        with self._lock:
            self._costs[key] -= cost
            # What is left of a sum of fractions is no work.
            if self._costs[key] < 1:
                del self._costs[key]


@cache
def lane(long: bool) -> Lane:
    """Return the threads for *long* work, or for the rest."""
    return Lane(long=long)


def _frugal(function: Callable[[], _T]) -> _T:
    """Call *function*, and give back the memory that it has used: the C library would keep it for this thread."""
    try:
        return function()
    finally:
        # Of glibc only; takes 30 ms for half a gigabyte, and does not hold the interpreter lock.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def rendering_cost(*values: Any, collect: type | None = None, into: list[Any] | None = None) -> float:
    """
    Return about how many microseconds a template takes for *values*: lists, dicts, structs and strings.

    Counting stops beyond INLINE, so it stays cheap. The structs of the type *collect* among them are added to *into*.
    """
    cost = 0.0
    pending: list[Any] = list(values)
    while pending and cost <= INLINE:
        item = pending.pop()
        kind = type(item)
        if kind is str:
            cost += BYTE * len(item)
            continue
        if kind is dict:
            item = item.values()
        elif kind is not list and kind is not tuple:
            if not isinstance(item, msgspec.Struct):
                continue
            if kind is collect and into is not None:
                into.append(item)
            item = list(filter(None, msgspec.structs.astuple(item)))
        cost += ITEM * len(item)
        pending.extend(item)
    return cost


def json_cost(size: int) -> float:
    """Return about how many microseconds it takes to read *size* bytes of a request, whose limits keep that short."""
    return min(BYTE * size, LONG)


def logprobs_cost(count: int, alternatives: int | None) -> float:
    """Return about how many microseconds *count* log probabilities take, with so many *alternatives* each."""
    return ITEM * count * (1 + (alternatives or 0))


@cache
def json_decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    """
    Return the decoder of *kind* for JSON from untrusted sources.

    If *kind* does not fix a number's type, msgspec takes 6 to 20 µs for a number such as 1e308, and Python under 1 µs.
    """
    return msgspec.json.Decoder(kind, float_hook=_number)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("Number out of range")
    return value
