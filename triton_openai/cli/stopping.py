"""How a process of the service runs, and how it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from triton_openai.telemetry.logging import get_logger

log = get_logger(__name__)


class Stop:
    """
    Whether the service has been *asked* to end, and whether whoever asked is in a hurry (*hurried*).

    *notice* is whether load balancers get time to notice: a person at a terminal has none to wait for.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.notice = False

    def ask(self, why: str, *, notice: bool) -> None:
        """Begin the end, unless it has begun."""
        if not self.asked.is_set():
            log.info("stopping", why=why)
            self.notice = notice
            self.asked.set()

    def hurry(self) -> None:
        """Cut waiting short."""
        self.asked.set()
        self.hurried.set()


@contextlib.contextmanager
def told_by_signals(stop: Stop, *, insist: bool = True) -> Iterator[None]:
    """
    Let SIGTERM and SIGINT begin the end; a second one hurries it, a third one breaks it off.

    A worker lets nobody *insist*: service managers send their signals to every process, and what its parent passes on
    would be the second.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def tell(number: signal.Signals) -> None:
        if not stop.asked.is_set():
            stop.ask(number.name, notice=number == signal.SIGTERM)
        elif insist and not stop.hurried.is_set():
            stop.hurry()
        elif insist and main is not None:
            main.cancel()

    with contextlib.ExitStack() as handled:
        for number in (signal.SIGTERM, signal.SIGINT):
            handled.enter_context(handled_signal(loop, number, lambda number=number: tell(number)))  # type: ignore[misc]
        yield


@contextlib.contextmanager
def handled_signal(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, handle: Callable[[], None]
) -> Iterator[None]:
    """Call *handle* in *loop* whenever signal *number* comes."""
    loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run *main* on uvloop where that is installed, otherwise on asyncio's own loop."""
    try:
        import uvloop  # there is none for some platforms
    except ImportError:
        run: Callable[[Coroutine[Any, Any, int]], int] = asyncio.run
    else:
        run = uvloop.run
    try:
        return run(main)
    except asyncio.CancelledError:
        # A third signal: whoever sent it did not want to wait for anything.
        return 130
