"""
The command of one worker process, started by :mod:`triton_openai.serving.workers.process` only.

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

import structlog
from aiohttp import web

from triton_openai.app import take_over
from triton_openai.cli.banner import render_banner
from triton_openai.cli.serve import Stop, banner_for, listening, run_loop, told_by_signals
from triton_openai.errors import ConfigurationError
from triton_openai.serving.workers.channel import (
    Alive,
    Answer,
    ChangeGates,
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
from triton_openai.serving.workers.shared import SharedClient
from triton_openai.telemetry.logging import configure_logging

log = structlog.get_logger(__name__)

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
    channel = await Channel.open(connection.dup())
    shared = SharedClient(channel.send)
    with told_by_signals(stop, insist=False):
        async with listening(order.settings, sockets, stop, order.worker, shared) as app:
            control = _Control(order, app, stop, channel, shared)
            controlling = asyncio.create_task(control.run())
            await stop.asked.wait()
    controlling.cancel()
    await asyncio.gather(controlling, return_exceptions=True)
    if control.orphaned and order.worker.directory is not None:
        # Nobody else is there to do it.
        shutil.rmtree(order.worker.directory, ignore_errors=True)
    return 0


class _Control:
    """Does what the parent says. *orphaned* is whether it has gone."""

    def __init__(
        self, order: HandOver, app: web.Application, stop: Stop, channel: Channel, shared: SharedClient
    ) -> None:
        self.orphaned = False
        self._order = order
        self._app = app
        self._stop = stop
        self._channel = channel
        self._shared = shared
        self._tasks: set[asyncio.Task[None]] = set()
        # Settings are taken over one after the other: the last that were sent hold in the end.
        self._taking_over = asyncio.Lock()

    async def run(self) -> None:
        """Obey until cancelled."""
        self._channel.send(Listening())
        self._begin(self._show_life())
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, Answer | ChangeGates):
                    self._shared.heard(message)
                elif isinstance(message, End):
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
            async with self._taking_over:
                await take_over(self._app, message.settings, message.renew)
        except ConfigurationError as error:
            self._channel.send(Refused(error.message, message.id))
        except Exception:
            log.exception("new settings could not be taken over")
            self._channel.send(Refused("A worker failed to take the settings over; its log says why.", message.id))
        else:
            self._channel.send(Taken(message.id))

    async def _greet(self, message: Greet) -> None:
        settings = self._order.settings
        banner = await banner_for(settings, self._app, self._order.address, launched=message.launched)
        self._channel.send(Greeting(render_banner(banner, settings.server.log_format)))


if __name__ == "__main__":
    sys.exit(main())
