"""One worker, seen from its parent: a fresh process with its listening sockets, and what it says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from subprocess import DEVNULL
from typing import Any

from triton_openai.config import Settings
from triton_openai.config.worker import Worker
from triton_openai.serving.workers.channel import (
    Channel,
    FromWorker,
    HandOver,
    Listening,
    Message,
    NewSettings,
    Refused,
    Taken,
)

# A worker may have to fetch a tokenizer before it can say whether it takes new settings.
_TAKE_OVER_SECONDS = 300.0


class WorkerProcess:
    """
    A running worker. *settings* are those that it was given last, *listening* whether it has accepted connections,
    *signs* how often it has said anything.

    *refusal* is why it could not begin, where it said so. *heard* is called for whatever else it says.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: Channel,
        settings: Settings,
        heard: Callable[[WorkerProcess, FromWorker], None],
    ) -> None:
        self.pid = process.pid
        self.settings = settings
        self.listening = False
        self.signs = 0
        self.refusal: str | None = None
        self._process = process
        self._channel = channel
        self._heard = heard
        self._orders = itertools.count(1)
        self._answers: dict[int, asyncio.Future[str | None]] = {}
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
        heard: Callable[[WorkerProcess, FromWorker], None],
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
        """
        Give it new *settings*. Return why it does not use them: it refuses, or does not answer in time.

        None means that it uses them, or has ended: then its successor gets the settings of the service.
        """
        self.settings = settings
        number = next(self._orders)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.send(NewSettings(id=number, settings=settings, renew=renew))
        ends: set[asyncio.Future[Any]] = {answer, self._conversation}
        try:
            await asyncio.wait(ends, timeout=_TAKE_OVER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # An answer that comes later is to nobody's question.
            del self._answers[number]
        if answer.done():
            return answer.result()
        if self._conversation.done():
            return None
        return f"The worker with process id {self.pid} did not answer within {_TAKE_OVER_SECONDS:g} seconds."

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
            if isinstance(message, Refused) and message.id is None:
                self.refusal = message.reason
            elif isinstance(message, Taken | Refused):
                answer = self._answers.get(message.id or 0)
                if answer is not None and not answer.done():
                    answer.set_result(message.reason if isinstance(message, Refused) else None)
            elif isinstance(message, FromWorker):
                self._heard(self, message)
        self._channel.close()


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return *given*; where this process does not import from its working directory, its workers must not either."""
    if "" in sys.path or os.getcwd() in sys.path:  # noqa: PTH109 - compared as text
        return dict(given)
    return {**given, "PYTHONSAFEPATH": "1"}
