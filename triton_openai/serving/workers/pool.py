"""The workers of a service, seen from their parent: each that ends is replaced by one with the same number."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from subprocess import PIPE

import msgspec
import structlog

from triton_openai.config.tree import Settings
from triton_openai.config.worker import Worker
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.serving.workers.channel import Channel
from triton_openai.serving.workers.shared import SharedState
from triton_openai.tasks import Backoff, wait_any
from triton_openai.telemetry.streams import original_descriptor

log = structlog.get_logger(__name__)

#: Before a worker that ended is replaced for the first time.
FIRST_PAUSE = 0.1
# Checks in a row without a heartbeat after which a worker counts as hanging. Checks are counted, not seconds, because
# time also passes while this process, or the whole machine, is suspended.
_CHECKS = 8
# Time that a worker has to print its stacks before it is killed.
_DUMP_SECONDS = 0.5
# Time that a worker has to end after that of its requests.
_END_SECONDS = 10.0
# A worker may have to fetch a tokenizer before it can say whether it takes new settings.
_APPLY_SECONDS = 300.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reads from its standard input, with the descriptors and the address of the listening sockets."""

    worker: Worker
    settings: Settings
    sockets: tuple[int, ...]
    address: str


class WorkerProcess:
    """A running worker at the other end of *channel*."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, settings: Settings) -> None:
        self.pid = process.pid
        #: The last that it was sent.
        self.settings = settings
        self.channel = channel
        #: Set when it accepts connections.
        self.listening = asyncio.Event()
        self.heartbeats = 0
        #: Its own reason why it could not start, if it sent one.
        self.refusal: str | None = None
        self._process = process
        channel.methods |= {"listening": self.listening.set, "heartbeat": self._heartbeat, "refuse": self._refuse}
        self._running = asyncio.create_task(channel.run())

    @classmethod
    async def start(
        cls,
        worker: Worker,
        settings: Settings,
        *,
        sockets: Sequence[socket.socket],
        address: str,
        environment: Mapping[str, str],
    ) -> WorkerProcess:
        """
        Start *worker* on the listening *sockets*. Raises :class:`OSError` where there can be no further process.

        It is a new interpreter and no fork of this one, whose threads and libraries would not survive that. It has a
        session of its own: a Ctrl-C in a terminal is for the parent, which passes it on.
        """
        ours, theirs = socket.socketpair()
        numbers = tuple(one.fileno() for one in sockets)
        if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - compared as text
            # This process does not import from its working directory.
            environment = {**environment, "PYTHONSAFEPATH": "1"}
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "triton_openai.cli.worker_process", str(theirs.fileno())),
                    env=environment,
                    stdin=PIPE,
                    stdout=original_descriptor("stdout"),
                    stderr=original_descriptor("stderr"),
                    pass_fds=(theirs.fileno(), *numbers),
                    start_new_session=True,
                )
                channel = await Channel.open(ours)
            except BaseException:
                ours.close()
                raise
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(Start(worker=worker, settings=settings, sockets=numbers, address=address)))
        process.stdin.close()
        return cls(process, channel, settings)

    async def ended(self) -> int:
        """Wait until the process has ended and return its exit status (-n: killed by signal n)."""
        status = await self._process.wait()
        # Its last messages may still be on their way.
        await self._running
        return status

    async def apply_settings(self, settings: Settings, *, reload: bool) -> str | None:
        """
        Give it new *settings*. Return why it does not use them: it refuses, or does not answer in time.

        None means that it uses them, or has ended: then its successor gets the settings of the service.
        """
        self.settings = settings
        try:
            async with asyncio.timeout(_APPLY_SECONDS):
                refusal: str | None = await self.channel.call("apply_settings", settings, reload)
        except TimeoutError:
            return f"The worker with process id {self.pid} did not answer within {_APPLY_SECONDS:g} seconds."
        return refusal

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def watch(self, index: int, timeout: Callable[[], float]) -> None:
        """
        Kill it when it has sent no heartbeat for *timeout* seconds; else watch for ever.

        A busy worker sends late heartbeats. Only one that is stopped, or stuck in a call that does not return, sends
        none. It prints its stacks (SIGQUIT) before it is killed.
        """
        seen = self.heartbeats
        silent = 0
        while silent < _CHECKS:
            await asyncio.sleep(timeout() / _CHECKS)
            if self.heartbeats == seen:
                silent = silent + 1
            else:
                silent = 0
            seen = self.heartbeats
        log.error("worker hangs and is killed", worker=index, pid=self.pid, silent_for=timeout())
        self.signal(signal.SIGQUIT)
        await asyncio.sleep(_DUMP_SECONDS)
        self.signal(signal.SIGKILL)

    def _heartbeat(self) -> None:
        self.heartbeats += 1

    def _refuse(self, reason: str) -> None:
        self.refusal = reason


class Pool:
    """
    Keeps *count* workers running while :meth:`run` runs.

    *start* starts the worker with a number. *share* is the state that workers share from when they accept connections
    until they end. A worker that ends is replaced after a pause, which grows for one that keeps ending. One that hangs
    is ended.
    """

    def __init__(
        self,
        settings: Settings,
        count: int,
        start: Callable[[int, Settings], Awaitable[WorkerProcess]],
        share: SharedState,
    ) -> None:
        self.settings = settings
        self._start = start
        self._share = share
        self._members: dict[int, WorkerProcess] = {}
        self._backoffs = [Backoff(first=FIRST_PAUSE, max_pause=30.0, stable_after=30.0) for _ in range(count)]
        # Set once a worker has accepted connections.
        self._ever_listened = asyncio.Event()
        self._ending = asyncio.Event()
        self._killed = False
        self._all_ended = asyncio.Event()

    async def run(self) -> None:
        """
        Start the workers, and replace those that end; return when :meth:`end` has ended them all.

        Raises :class:`ConfigurationError` for settings that a worker refuses, and :class:`ServiceError` if one ends
        before any has ever listened: the next one would end too.
        """
        runners = [asyncio.create_task(self._run_worker(index)) for index in range(len(self._backoffs))]
        try:
            await asyncio.gather(*runners)
        finally:
            self._kill()
            await asyncio.gather(*runners, return_exceptions=True)
            self._all_ended.set()

    async def banner(self, *, launched: bool) -> str:
        """Return the banner of a worker, of another one if that ends; *launched* is whether Triton was started here."""
        await self._ever_listened.wait()
        while True:
            for member in [each for each in self._members.values() if each.listening.is_set()]:
                if (text := await member.channel.call("banner", launched)) is not None:
                    return str(text)
            await asyncio.sleep(FIRST_PAUSE)

    async def apply_settings(self, settings: Settings, reload: bool) -> None:
        """
        Give all workers new *settings*, see :data:`triton_openai.config.reload.ApplySettings`.

        Raises :class:`ConfigurationError` where one refuses them or does not answer; then all have those from before.
        """
        members = list(self._members.values())
        answers = await asyncio.gather(*(member.apply_settings(settings, reload=reload) for member in members))
        reason = next((answer for answer in answers if answer is not None), None)
        if reason is None:
            self.settings = settings
        # Workers that started meanwhile; if one refused, all: one that did not answer may still use the new settings.
        await asyncio.gather(*(self._update(member) for member in list(self._members.values())))
        if reason is not None:
            raise ConfigurationError(reason)

    async def _update(self, member: WorkerProcess) -> None:
        """Give *member* the settings of the service if it has been given others."""
        if member.settings is self.settings:
            return
        reason = await member.apply_settings(self.settings, reload=False)
        if reason is not None:
            log.error("worker does not use the settings of the others", pid=member.pid, reason=reason)

    async def end(self, *, notice: bool, hurried: asyncio.Event) -> None:
        """
        End all workers in order, with *notice* to load balancers first; at once when *hurried*.

        Workers that do not end in time are killed.
        """
        self._ending.set()
        try:
            server = self.settings.server
            self._notify("end", notice)
            seconds = (server.shutdown_delay if notice else 0) + server.shutdown_grace + _END_SECONDS
            await wait_any(self._all_ended, hurried, timeout=seconds)
            if not self._all_ended.is_set():
                self._notify("hurry")
                await wait_any(self._all_ended, timeout=_END_SECONDS)
        finally:
            for index, member in self._members.items():
                log.warning("worker is killed, it did not end in time", worker=index, pid=member.pid)
            self._kill()

    def _notify(self, method: str, *arguments: bool) -> None:
        for member in self._members.values():
            member.channel.notify(method, *arguments)

    def _kill(self) -> None:
        """Kill all workers, also those that are being started."""
        self._ending.set()
        self._killed = True
        for member in self._members.values():
            member.signal(signal.SIGKILL)

    async def _run_worker(self, index: int) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                member = await self._start(index, self.settings)
                member.channel.methods |= self._share.methods(index, member.channel)
            except OSError as error:
                log.error("worker cannot be started", worker=index, reason=str(error))  # noqa: TRY400
                pause = self._backoffs[index].after(0)
            else:
                await self._supervise(index, member)
                pause = self._backoffs[index].after(time.monotonic() - began)
            if not self._ending.is_set():
                await wait_any(self._ending, timeout=pause)

    async def _supervise(self, index: int, member: WorkerProcess) -> None:
        """Supervise *member* until it has ended."""
        self._members[index] = member
        log.info("worker started", worker=index, pid=member.pid)
        if self._killed:
            member.signal(signal.SIGKILL)
        elif self._ending.is_set():
            member.channel.notify("end", False)
        # The settings of the service may have changed while the process was started.
        tasks = [asyncio.create_task(work) for work in (self._update(member), self._watch_worker(index, member))]
        try:
            status = await member.ended()
        except asyncio.CancelledError:
            member.signal(signal.SIGKILL)
            raise
        finally:
            for task in tasks:
                task.cancel()
            del self._members[index]
            self._share.release_worker(index)
        if self._ending.is_set():
            return
        if not self._ever_listened.is_set():
            if member.refusal is not None:
                raise ConfigurationError(member.refusal)
            raise ServiceError(f"A worker process ended while it started ({_how(status)}).")
        log.error("worker ended", worker=index, pid=member.pid, how=_how(status), reason=member.refusal)

    async def _watch_worker(self, index: int, member: WorkerProcess) -> None:
        await member.listening.wait()
        self._ever_listened.set()
        log.info("worker listens", pid=member.pid)
        self._share.add(index, member.channel)
        await member.watch(index, lambda: self.settings.server.worker_timeout)


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
