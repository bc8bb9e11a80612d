"""All workers of a service, seen from their parent: each that ends is replaced by one with the same number."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from triton_openai.config import Settings
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.models.draining import first_of
from triton_openai.serving.workers.channel import End, Greet, Greeting, Hurry, Listening, Message
from triton_openai.tritonserver.backoff import Pauses

log = structlog.get_logger(__name__)

# Looks in a row without a sign of life that make a worker one that hangs. They are counted instead of the time, which
# also goes on while this process gets no turn, or the whole machine stands still.
_LOOKS = 8
# What a worker has to write down where it is before it is killed.
_LAST_WORDS_SECONDS = 0.5


class Watched(Protocol):
    """What is watched; ``signs`` counts what it has said."""

    pid: int
    listening: bool
    signs: int

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """End it at once."""


async def watch(worker: Watched, index: int, timeout: Callable[[], float]) -> None:
    """
    Kill *worker* when it has said nothing for *timeout* seconds, once it has begun to listen; else watch for ever.

    A worker that is busy speaks late, but speaks: only one that is stopped, or stuck in a call that does not return,
    is silent. It is told to write down where that is (SIGQUIT) before it is killed.
    """
    signs, silent = worker.signs, 0
    while silent < _LOOKS:
        await asyncio.sleep(timeout() / _LOOKS)
        silent = silent + 1 if worker.listening and worker.signs == signs else 0
        signs = worker.signs
    log.error("worker hangs and is killed", worker=index, pid=worker.pid, silent_for=timeout())
    worker.signal(signal.SIGQUIT)
    await asyncio.sleep(_LAST_WORDS_SECONDS)
    worker.kill()


# What a worker needs to end beyond the time that its requests are given.
_END_SECONDS = 10.0


class Member(Protocol):
    """What the pool needs of a worker; see :class:`triton_openai.serving.workers.process.WorkerProcess`."""

    pid: int
    settings: Settings
    listening: bool
    signs: int
    refusal: str | None

    async def ended(self) -> int:
        """Wait for its end and return its exit status."""

    def send(self, message: Message) -> None:
        """Tell it something."""

    async def take_over(self, settings: Settings, *, renew: bool) -> str | None:
        """Give it new settings; return why it does not take them."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """End it at once."""


class Pool:
    """
    Keeps *count* workers running while :meth:`run` runs.

    *start* starts the worker with a number, and *forget* is told the number of one that has ended.
    A worker that ends is replaced after a pause, which grows for one that keeps ending. One that hangs is ended.
    """

    def __init__(
        self,
        settings: Settings,
        count: int,
        start: Callable[[int, Settings], Awaitable[Member]],
        *,
        forget: Callable[[int], None],
        first_pause: float = 0.1,
        longest_pause: float = 30.0,
        stable_after: float = 30.0,
    ) -> None:
        self.settings = settings
        #: What is served, in the words of the first worker that can tell after :meth:`greet`.
        self.greeting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._start = start
        self._forget = forget
        self._members: dict[int, Member] = {}
        self._pauses = [
            Pauses(first=first_pause, longest=longest_pause, stable_after=stable_after) for _ in range(count)
        ]
        self._keepers: list[asyncio.Task[None]] = []
        self._greet: Greet | None = None
        self._ever_listened = False
        self._ending = asyncio.Event()
        self._killed = False
        self._all_ended = asyncio.Event()

    async def run(self) -> None:
        """
        Start the workers, and replace those that end; return when :meth:`end` has ended them all.

        Raises :class:`ConfigurationError` for what a worker refuses, and :class:`ServiceError` for one that ends before
        any has ever listened: that would not get better.
        """
        self._keepers = [asyncio.create_task(self._keep(index)) for index in range(len(self._pauses))]
        try:
            await asyncio.gather(*self._keepers)
        finally:
            self._kill()
            await asyncio.gather(*self._keepers, return_exceptions=True)
            self._all_ended.set()

    def heard(self, member: Member, message: Listening | Greeting) -> None:
        """Take note of what *member* says of itself."""
        if isinstance(message, Greeting):
            if not self.greeting.done():
                self.greeting.set_result(message.text)
            return
        self._ever_listened = True
        log.info("worker listens", pid=member.pid)
        if self._greet is not None and not self.greeting.done():
            member.send(self._greet)

    def greet(self, *, launched: bool) -> None:
        """Have a worker say what is served: whichever can first."""
        self._greet = Greet(launched=launched)
        for member in self._members.values():
            if member.listening:
                member.send(self._greet)

    async def take_over(self, settings: Settings, renew: bool) -> None:
        """
        Give all workers new *settings*, see :data:`triton_openai.config.reload.TakeOver`.

        Raises :class:`ConfigurationError` where one refuses them or does not answer; then all have those from before.
        """
        members = list(self._members.values())
        answers = await asyncio.gather(*(member.take_over(settings, renew=renew) for member in members))
        reason = next((answer for answer in answers if answer is not None), None)
        if reason is None:
            self.settings = settings
        # Those that were started meanwhile; and if one refused, all: who did not answer may still take the new ones.
        await asyncio.gather(*(self._align(member) for member in list(self._members.values())))
        if reason is not None:
            raise ConfigurationError(reason)

    async def _align(self, member: Member) -> None:
        """Give *member* the settings of the service if it has been given others."""
        if member.settings is self.settings:
            return
        reason = await member.take_over(self.settings, renew=False)
        if reason is not None:
            log.error("worker does not use the settings of the others", pid=member.pid, reason=reason)

    async def end(self, *, notice: bool, hurried: asyncio.Event) -> None:
        """
        End all workers in order, with *notice* to load balancers first; at once when *hurried*.

        What has not ended long after it should have is killed.
        """
        self._ending.set()
        try:
            server = self.settings.server
            self._send(End(notice=notice))
            seconds = (server.shutdown_delay if notice else 0) + server.shutdown_grace + _END_SECONDS
            await first_of([self._all_ended, hurried], timeout=seconds)
            if not self._all_ended.is_set():
                self._send(Hurry())
                await first_of([self._all_ended], timeout=_END_SECONDS)
        finally:
            for index, member in self._members.items():
                log.warning("worker is killed, it did not end in time", worker=index, pid=member.pid)
            self._kill()

    def _send(self, message: Message) -> None:
        for member in self._members.values():
            member.send(message)

    def _kill(self) -> None:
        """End what is left, and what is being started."""
        self._ending.set()
        self._killed = True
        for member in self._members.values():
            member.kill()

    async def _keep(self, index: int) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                member = await self._start(index, self.settings)
            except OSError as error:
                log.error("worker cannot be started", worker=index, reason=str(error))  # noqa: TRY400
                pause = self._pauses[index].after(0)
            else:
                await self._attend(index, member)
                pause = self._pauses[index].after(time.monotonic() - began)
            if not self._ending.is_set():
                await first_of([self._ending], timeout=pause)

    async def _attend(self, index: int, member: Member) -> None:
        """Be there for *member* until it has ended."""
        self._members[index] = member
        log.info("worker started", worker=index, pid=member.pid)
        if self._killed:
            member.kill()
        elif self._ending.is_set():
            member.send(End(notice=False))
        watching = asyncio.create_task(watch(member, index, lambda: self.settings.server.worker_timeout))
        # The settings of the service may have changed while the process was started.
        aligning = asyncio.create_task(self._align(member))
        try:
            status = await member.ended()
        except asyncio.CancelledError:
            member.kill()
            raise
        finally:
            watching.cancel()
            aligning.cancel()
            del self._members[index]
            self._forget(index)
        if self._ending.is_set():
            return
        if not self._ever_listened:
            if member.refusal is not None:
                raise ConfigurationError(member.refusal)
            raise ServiceError(f"A worker process ended while it started ({_how(status)}).")
        log.error("worker ended", worker=index, pid=member.pid, how=_how(status), reason=member.refusal)


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
