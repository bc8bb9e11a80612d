"""
The command of one worker process, started by :mod:`triton_openai.serving.workers.pool` only.

Its one argument is the file descriptor of the socket to its parent. It reads a
:class:`~triton_openai.serving.workers.pool.Start` from its standard input.
"""

from __future__ import annotations

import asyncio
import faulthandler
import pickle
import shutil
import signal
import socket
import sys

import structlog
from aiohttp import web

from triton_openai.app import apply_settings
from triton_openai.cli.banner import banner_of, render_banner
from triton_openai.cli.serve import Stop, listening, run_loop, stopped_by_signals
from triton_openai.cli.terminal import shows_colours
from triton_openai.config.tree import Settings
from triton_openai.errors import ConfigurationError
from triton_openai.serving.workers.channel import Channel, encode
from triton_openai.serving.workers.pool import Start
from triton_openai.serving.workers.shared import SharedClient
from triton_openai.tasks import cancel
from triton_openai.telemetry.logging import configure_logging, log_native_output
from triton_openai.telemetry.streams import original_descriptor

log = structlog.get_logger(__name__)

# Interval of the heartbeats, which come from the event loop.
_HEARTBEAT_SECONDS = 0.5


def main() -> int:
    """Serve until the parent asks for the end, or is gone; return the exit status."""
    # New settings come from the parent, also if the signal goes to the whole process group.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Prints the stacks of all threads: the parent asks a process that hangs before it kills it.
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    try:
        start: Start = pickle.load(sys.stdin.buffer)
    except EOFError:
        return 1
    configure_logging(start.settings.server, worker=start.worker.index, colours=shows_colours(sys.stderr))
    log_native_output()
    # Where the log goes: what is written to descriptor 2 is read by a thread, which a process that hangs does not run.
    faulthandler.register(signal.SIGQUIT, file=original_descriptor("stderr") or sys.stderr, all_threads=True)
    sockets = [socket.socket(fileno=number) for number in start.sockets]
    try:
        return run_loop(_serve(start, sockets, connection))
    except ConfigurationError as error:
        # The parent reports it, once for all workers.
        connection.setblocking(True)
        connection.sendall(encode(0, "refuse", (error.message,)))
        return 2


async def _serve(start: Start, sockets: list[socket.socket], connection: socket.socket) -> int:
    stop = Stop()
    channel = await Channel.open(connection.dup())
    with stopped_by_signals(stop, insist=False):
        async with listening(start.settings, sockets, stop, start.worker, SharedClient(channel)) as app:
            control = asyncio.create_task(_controlled(start, app, stop, channel))
            await stop.asked.wait()
    orphaned = control.done()
    await cancel(control)
    if orphaned and start.worker.directory is not None:
        # The parent, which would do it, is gone.
        shutil.rmtree(start.worker.directory, ignore_errors=True)
    return 0


async def _controlled(start: Start, app: web.Application, stop: Stop, channel: Channel) -> None:
    """Handle the messages of the parent until it has gone."""
    # One after the other, so that the last settings win.
    taking_over = asyncio.Lock()

    async def take(settings: Settings, reload: bool) -> str | None:
        try:
            async with taking_over:
                await apply_settings(app, settings, reload)
        except ConfigurationError as error:
            return error.message
        except Exception:
            log.exception("new settings could not be taken over")
            return "A worker failed to take the settings over; its log says why."
        return None

    async def make_banner(launched: bool) -> str:
        banner = await banner_of(start.settings, app, start.address, launched=launched)
        return render_banner(banner, start.settings.server.log_format)

    async def send_heartbeats() -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            channel.notify("heartbeat")

    def end(notice: bool) -> None:
        stop.begin("the parent process asks for it", notice=notice)

    channel.methods |= {"apply_settings": take, "banner": make_banner, "end": end, "hurry": stop.hurry}
    channel.notify("listening")
    heartbeats = asyncio.create_task(send_heartbeats())
    try:
        await channel.run()
    finally:
        heartbeats.cancel()
    stop.begin("the parent process is gone", notice=False)


if __name__ == "__main__":
    sys.exit(main())
