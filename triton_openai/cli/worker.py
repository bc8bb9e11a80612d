"""
The command of one worker process, started by :mod:`triton_openai.workers.process` only.

Its one argument is the number of the socket over which its parent talks to it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import shutil
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from triton_openai.app import take_over
from triton_openai.cli.banner import render_banner
from triton_openai.cli.serve import banner_for, listening
from triton_openai.cli.stopping import Stop, run_loop, told_by_signals
from triton_openai.errors import ConfigurationError
from triton_openai.telemetry.logging import configure_logging, get_logger
from triton_openai.workers.messages import (
    Alive,
    Channel,
    End,
    Greet,
    Greeting,
    HandOver,
    Hurry,
    Listening,
    NewSettings,
    Refused,
    Taken,
    encode,
    receive_first,
)

log = get_logger(__name__)

# How often the parent hears that the event loop turns.
_ALIVE_SECONDS = 0.5


def main() -> int:
    """Serve until the parent says that it is enough, or is gone; return the exit status."""
    # New settings come from the parent, whoever else of the group is told of them too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Where it hangs, for the parent to ask before it makes an end of it; and for operators.
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    try:
        order = receive_first(connection)
    except EOFError:
        return 1
    configure_logging(order.settings.server, worker=order.worker.index)
    sockets = [socket.socket(fileno=number) for number in order.sockets]
    try:
        return run_loop(_serve(order, sockets, connection))
    except ConfigurationError as error:
        # The parent says it, once and not for every worker.
        connection.setblocking(True)
        connection.sendall(encode(Refused(error.message)))
        return 2


async def _serve(order: HandOver, sockets: list[socket.socket], connection: socket.socket) -> int:
    stop = Stop()
    with told_by_signals(stop, insist=False):
        async with listening(order.settings, sockets, stop, order.worker) as app:
            ears = _Ears(order, app, stop, await Channel.open(connection.dup()))
            hearing = asyncio.create_task(ears.listen())
            await stop.asked.wait()
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)
    if ears.orphaned and order.worker.directory is not None:
        # Nobody else is there to do it.
        shutil.rmtree(order.worker.directory, ignore_errors=True)
    return 0


class _Ears:
    """Does what the parent says. *orphaned* is whether it has gone."""

    def __init__(self, order: HandOver, app: web.Application, stop: Stop, channel: Channel) -> None:
        self.orphaned = False
        self._order = order
        self._app = app
        self._stop = stop
        self._channel = channel
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Obey until cancelled."""
        self._channel.send(Listening())
        self._begin(self._show_life())
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, End):
                    self._stop.ask("the parent process says so", notice=message.notice)
                elif isinstance(message, Hurry):
                    self._stop.hurry()
                elif isinstance(message, NewSettings):
                    self._begin(self._take_over(message))
                elif isinstance(message, Greet):
                    self._begin(self._greet(message))
            self.orphaned = True
            self._stop.ask("the parent process is gone", notice=False)
        finally:
            for task in self._tasks:
                task.cancel()
            self._channel.close()

    async def _show_life(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_SECONDS)
            self._channel.send(Alive())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        # What takes long must not hold up an order to end.
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_over(self, message: NewSettings) -> None:
        try:
            await take_over(self._app, message.settings, message.renew)
        except ConfigurationError as error:
            self._channel.send(Refused(error.message))
        except Exception:
            log.exception("new settings could not be taken over")
            self._channel.send(Refused("A worker failed to take the settings over; its log says why."))
        else:
            self._channel.send(Taken())

    async def _greet(self, message: Greet) -> None:
        settings = self._order.settings
        banner = await banner_for(settings, self._app, self._order.address, launched=message.launched)
        self._channel.send(Greeting(render_banner(banner, settings.server.log_format)))


if __name__ == "__main__":
    sys.exit(main())
