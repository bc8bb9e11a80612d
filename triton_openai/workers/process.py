"""One worker, seen from its parent: a fresh process with its listening sockets, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from subprocess import DEVNULL
from typing import Any

from triton_openai.config import Settings
from triton_openai.worker import Worker
from triton_openai.workers.messages import Channel, Greeting, HandOver, Listening, Message, NewSettings, Refused, Taken

# A worker may have to fetch a tokenizer before it can say whether it takes new settings.
_TAKE_OVER_SECONDS = 300.0


class WorkerProcess:
    """
    A running worker. *settings* are those that it was given last, *listening* whether it has accepted connections,
    *signs* how often it has said anything.

    *refusal* is why it could not begin, where it said so. *heard* is called for what it says of itself.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: Channel,
        settings: Settings,
        heard: Callable[[WorkerProcess, Listening | Greeting], None],
    ) -> None:
        self.pid = process.pid
        self.settings = settings
        self.listening = False
        self.signs = 0
        self.refusal: str | None = None
        self._process = process
        self._channel = channel
        self._heard = heard
        self._answer: asyncio.Future[str | None] | None = None
        self._conversation = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        worker: Worker,
        settings: Settings,
        *,
        sockets: Sequence[socket.socket],
        address: str,
        environment: Mapping[str, str],
        heard: Callable[[WorkerProcess, Listening | Greeting], None],
    ) -> WorkerProcess:
        """
        Start *worker* on the listening *sockets*. Raises :class:`OSError` where there can be no further process.

        It is a new interpreter and no fork of this one, whose threads and libraries would not survive that. It has a
        session of its own: a Ctrl-C in a terminal is for the parent, which passes it on.
        """
        ours, theirs = socket.socketpair()
        numbers = tuple(one.fileno() for one in sockets)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "triton_openai.cli.worker", str(theirs.fileno())),
                    env=_environment(environment),
                    stdin=DEVNULL,
                    pass_fds=(theirs.fileno(), *numbers),
                    start_new_session=True,
                )
            channel = await Channel.open(ours)
        except BaseException:
            ours.close()
            raise
        channel.send(HandOver(worker=worker, settings=settings, sockets=numbers, address=address))
        return cls(process, channel, settings, heard)

    async def ended(self) -> int:
        """Wait until the process has ended and return its exit status (-n: killed by signal n)."""
        status = await self._process.wait()
        # What it said last may still be on its way.
        await self._conversation
        return status

    def send(self, message: Message) -> None:
        """Tell it something."""
        self._channel.send(message)

    async def take_over(self, settings: Settings, *, renew: bool) -> str | None:
        """Give it new *settings*; return why it does not take them, None when it has, or has ended meanwhile."""
        self.settings = settings
        self._answer = asyncio.get_running_loop().create_future()
        self.send(NewSettings(settings=settings, renew=renew))
        if self._conversation.done():
            return None
        ends: set[asyncio.Future[Any]] = {self._answer, self._conversation}
        await asyncio.wait(ends, timeout=_TAKE_OVER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        return self._answer.result() if self._answer.done() else None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _listen(self) -> None:
        while (message := await self._channel.receive()) is not None:
            self.signs += 1
            if isinstance(message, Listening):
                self.listening = True
            if isinstance(message, Refused) and not self.listening:
                self.refusal = message.reason
            elif isinstance(message, Taken | Refused):
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(message.reason if isinstance(message, Refused) else None)
            elif isinstance(message, Listening | Greeting):
                self._heard(self, message)
        self._channel.close()


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return *given*; where this process does not import from its working directory, its workers must not either."""
    if "" in sys.path or os.getcwd() in sys.path:  # noqa: PTH109 - compared as text
        return dict(given)
    return {**given, "PYTHONSAFEPATH": "1"}
