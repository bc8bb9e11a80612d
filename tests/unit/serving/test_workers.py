"""The parent of several workers: whom it starts, replaces and ends, and when it gives up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from structlog.testing import capture_logs

from tests.clock import Clock, turns
from triton_openai.cli import worker_process as worker_command
from triton_openai.config.tree import (
    ApiSettings,
    DefaultParameters,
    LoraSettings,
    ModelSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.config.worker import Worker
from triton_openai.errors import ConfigurationError, ServiceError
from triton_openai.serving.workers import pool as pool_module
from triton_openai.serving.workers.channel import Channel, encode
from triton_openai.serving.workers.pool import Pool, Start, WorkerProcess

_RICH = Settings(
    triton=TritonSettings(url=("http://a:1", "grpc://b:2"), model_repository=(Path("/a"), Path("/b"))),
    models={
        "a": ModelSettings(
            aliases=("x", "y"),
            default_parameters=DefaultParameters(stop=("a", "b"), temperature=0),
            loras=("n", LoraSettings(name="m", task_id=2**63 - 1, path="p")),
            lora_dir=Path("/loras"),
        ),
        "b": ModelSettings(default_parameters=DefaultParameters(stop="a")),
    },
)
_NEW = Settings(api=ApiSettings(default_max_tokens=7))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE", 0.0)


class Member(WorkerProcess):
    """A worker of no process: it records what it is told, and ends when the test says so."""

    def __init__(self, index: int, pid: int, settings: Settings) -> None:
        self.index = index
        self.pid = pid
        self.settings = settings
        self.channel = self  # type: ignore[assignment]
        self.methods: dict[str, Callable[..., object]] = {}
        self.held = [settings]
        self.listening = asyncio.Event()
        self.heartbeats = 0
        self.signals: list[signal.Signals] = []
        self.refusal: str | None = None
        self.refuses: str | None = None
        self.told: list[tuple[object, ...]] = []
        self.banners: list[asyncio.Future[str | None]] = []
        self.obeys = True
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ended(self) -> int:
        return await self.status

    def notify(self, method: str, *arguments: object) -> None:
        self.told.append((method, *arguments))
        if self.obeys:
            self.end(0)

    def call(self, method: str, *arguments: object) -> asyncio.Future[str | None]:
        self.told.append((method, *arguments))
        self.banners.append(asyncio.get_running_loop().create_future())
        return self.banners[-1]

    async def apply_settings(self, settings: Settings, *, reload: bool) -> str | None:
        self.settings = settings
        if self.refuses is None:
            self.held.append(settings)
        return self.refuses

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if number == signal.SIGKILL:
            self.end(-9)

    def end(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)
            for banner in self.banners:
                if not banner.done():
                    banner.set_result(None)


class Factory:
    """Starts members, and remembers them and the ends that the pool was to clear up after."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.forgotten: list[int] = []
        self.listening: list[int] = []
        self.failures = 0
        #: Those who are started are there when it is set.
        self.hold = asyncio.Event()
        self.hold.set()
        self._pids = itertools.count(100)

    async def start(self, index: int, settings: Settings) -> Member:
        if self.failures:
            self.failures -= 1
            raise BlockingIOError("Resource temporarily unavailable")
        member = Member(index, next(self._pids), settings)
        self.members.append(member)
        await self.hold.wait()
        return member

    def pool(self, count: int, settings: Settings | None = None) -> Pool:
        shared = Mock(methods=Mock(return_value={}), release_worker=self.forgotten.append)
        shared.add = lambda index, _: self.listening.append(index)
        return Pool(settings or Settings(), count, self.start, shared)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what happens without any time passing."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


@contextlib.asynccontextmanager
async def running(factory: Factory, count: int = 2, settings: Settings | None = None):
    pool = factory.pool(count, settings)
    task = asyncio.create_task(pool.run())
    await until(lambda: len(factory.members) == count)
    for member in factory.members:
        member.listening.set()
    await until(lambda: len(factory.listening) == count)
    yield pool
    await pool.end(notice=False, hurried=asyncio.Event())
    await asyncio.wait_for(task, 120)


async def test_a_worker_that_ends_is_replaced() -> None:
    """A worker that ends is replaced by one with the same number, after what it left is cleared up."""
    factory = Factory()
    with capture_logs() as logs:
        async with running(factory):
            factory.members[1].end(-9)
            await until(lambda: len(factory.members) == 3)

    assert [0, 1, 1] == [member.index for member in factory.members]
    assert 1 == factory.forgotten[0]
    assert [(1, "killed by SIGKILL")] == [
        (entry["worker"], entry["how"]) for entry in logs if entry["event"] == "worker ended"
    ]


async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    """A process that cannot be started is tried again; the others serve meanwhile."""
    factory = Factory()
    async with running(factory):
        factory.failures = 3
        factory.members[0].end(1)
        await until(lambda: len(factory.members) == 3)

    assert 0 == factory.failures


async def test_a_first_start_that_is_refused_ends_it_all() -> None:
    """What a worker says is wrong with the settings is what the service says, once."""
    factory = Factory()
    pool = factory.pool(3)
    task = asyncio.create_task(pool.run())
    await until(lambda: len(factory.members) == 3)
    for member in factory.members:
        member.refusal = "There is no adapter called x."
        member.end(2)

    with pytest.raises(ConfigurationError, match="There is no adapter called x"):
        await asyncio.wait_for(task, 120)


async def test_a_first_start_that_fails_ends_it_all() -> None:
    """A worker that dies before any has listened would die again; those that still start are ended."""
    factory = Factory()
    pool = factory.pool(3)
    task = asyncio.create_task(pool.run())
    await until(lambda: len(factory.members) == 3)
    factory.members[1].end(1)

    with pytest.raises(ServiceError, match="exit status 1"):
        await asyncio.wait_for(task, 120)
    assert all(member.status.done() for member in factory.members)


async def test_a_banner_is_shown() -> None:
    """A worker that listens makes the banner; if it ends before, another one does."""
    factory = Factory()
    async with running(factory, 3) as pool:
        factory.members[2].end(-9)
        await until(lambda: len(factory.members) == 4)
        first, second, _, late = factory.members
        banner = asyncio.create_task(pool.banner(launched=True))
        await until(lambda: first.banners)
        late.listening.set()
        first.end(-9)
        await until(lambda: second.banners)
        second.banners[0].set_result("hello")

        assert "hello" == await banner
        assert ([("banner", True)], []) == (second.told, late.told)
        assert [0, 1, 2, 2] == factory.listening


async def test_new_settings_reach_everybody() -> None:
    """New settings reach every worker, also one that is started later."""
    factory = Factory()
    async with running(factory) as pool:
        await pool.apply_settings(_NEW, reload=True)
        factory.members[0].end(-9)
        await until(lambda: len(factory.members) == 3)

    assert [_NEW] * 3 == [member.held[-1] for member in factory.members]


async def test_settings_that_one_refuses_hold_nowhere() -> None:
    """Workers that took new settings get the old ones back if one refuses them, and so does one that starts later."""
    factory = Factory()
    async with running(factory, 3) as pool:
        factory.members[1].refuses = "There is no such template."
        with pytest.raises(ConfigurationError, match="There is no such template"):
            await pool.apply_settings(_NEW, reload=False)
        factory.members[0].end(-9)
        await until(lambda: len(factory.members) == 4)

    assert [Settings()] * 4 == [member.held[-1] for member in factory.members]


async def test_who_is_being_started_meanwhile_gets_new_settings_too() -> None:
    """The process starts with the old ones, and nobody knows it yet when the others are told."""
    factory = Factory()
    async with running(factory) as pool:
        goes_on = factory.hold = asyncio.Event()
        factory.members[0].end(-9)
        await until(lambda: len(factory.members) == 3)
        await pool.apply_settings(_NEW, reload=False)
        goes_on.set()
        await until(lambda: factory.members[2].held == [Settings(), _NEW])


async def test_who_keeps_other_settings_is_told_to_the_operator() -> None:
    """A worker that takes neither the new settings nor the old ones back."""
    factory = Factory()
    with capture_logs() as logs:
        async with running(factory) as pool:
            factory.members[1].refuses = "It did not answer."
            with pytest.raises(ConfigurationError, match="It did not answer"):
                await pool.apply_settings(_NEW, reload=False)

    assert [101] == [entry["pid"] for entry in logs if entry["log_level"] == "error" and "settings" in entry["event"]]
    assert [Settings(), _NEW, Settings()] == factory.members[0].held


class Conversation:
    """A worker as its parent sees it, and the worker's own end of the channel."""

    def __init__(self, worker: WorkerProcess, far: Channel) -> None:
        self.worker = worker
        self.far = far
        self.running = asyncio.create_task(far.run())


@contextlib.asynccontextmanager
async def conversation():
    ours, theirs = socket.socketpair()
    near, far = await Channel.open(ours), await Channel.open(theirs)
    process = Mock(pid=100, wait=AsyncMock(return_value=0))
    found = Conversation(WorkerProcess(process, near, Settings()), far)
    yield found
    found.running.cancel()
    await found.worker.ended()


async def test_silence_is_no_consent(clock: Clock) -> None:
    """New settings that a worker does not answer to are not in force, and its late answer is not one to the next."""
    asked: list[Settings] = []
    answered = asyncio.Event()

    async def apply_settings(settings: Settings, reload: bool) -> str | None:
        asked.append(settings)
        if settings == _NEW:
            await answered.wait()
            return None
        return "No such file."

    async with conversation() as one:
        one.far.methods["apply_settings"] = apply_settings
        asking = asyncio.create_task(one.worker.apply_settings(_NEW, reload=False))
        await until(lambda: asked)
        clock.advance(pool_module._APPLY_SECONDS)
        assert "did not answer" in (await asking or "")

        answered.set()
        assert "No such file." == await one.worker.apply_settings(_RICH, reload=False)
    assert [_NEW, _RICH] == asked


async def test_a_worker_that_ends_is_not_waited_for() -> None:
    """A worker that ends is not waited for: its successor gets the new settings."""
    async with conversation() as one:
        asking = asyncio.create_task(one.worker.apply_settings(_NEW, reload=False))
        await asyncio.sleep(0)
        one.running.cancel()
        async with asyncio.timeout(120):
            assert await asking is None
            assert await one.worker.apply_settings(_NEW, reload=False) is None


async def test_what_a_worker_says_of_itself() -> None:
    """A worker says that it listens, that it is alive, and why it ends."""
    async with conversation() as one:
        assert (False, 0) == (one.worker.listening.is_set(), one.worker.heartbeats)
        for said in (("heartbeat",), ("listening",), ("heartbeat",), ("refuse", "No such adapter.")):
            one.far.notify(*said)
        await until(lambda: one.worker.refusal)
        assert (True, 2, "No such adapter.") == (
            one.worker.listening.is_set(),
            one.worker.heartbeats,
            one.worker.refusal,
        )


@contextlib.asynccontextmanager
async def controlled(stop: Mock):
    """The parent's end of the channel of a worker that does what it is told."""
    ours, theirs = socket.socketpair()
    parent, channel = await Channel.open(ours), await Channel.open(theirs)
    listening = asyncio.Event()
    parent.methods |= {"listening": listening.set, "heartbeat": Mock()}
    start = Start(worker=Worker(), settings=Settings(), sockets=(), address="http://[::1]:9")
    tasks = [
        asyncio.create_task(parent.run()),
        asyncio.create_task(worker_command._controlled(start, Mock(), stop, channel)),
    ]
    await asyncio.wait_for(listening.wait(), 120)
    yield parent
    tasks[0].cancel()
    await asyncio.wait_for(tasks[1], 120)


async def test_settings_are_taken_over_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last hold in the end, however long the first take, and each answer says to what it is one."""
    taken: list[Settings] = []
    slow = asyncio.Event()

    async def apply_settings(app: object, settings: Settings, reload: bool) -> None:
        if settings == _NEW:
            await slow.wait()
            raise ConfigurationError("No such file.")
        if settings == Settings():
            raise KeyError("a bug")
        taken.append(settings)

    monkeypatch.setattr(worker_command, "apply_settings", apply_settings)
    async with controlled(Mock()) as parent:
        answers = [parent.call("apply_settings", settings, False) for settings in (_NEW, _RICH, Settings())]
        await turns(10)
        assert [] == taken
        slow.set()
        refused, accepted, failed = await asyncio.wait_for(asyncio.gather(*answers), 120)

    assert ("No such file.", None) == (refused, accepted)
    assert "failed to take" in failed
    assert [_RICH] == taken


async def test_a_worker_ends_when_it_is_told_or_alone() -> None:
    """A worker ends in order, at once, or because there is nobody who could tell it."""
    stop = Mock()
    async with controlled(stop) as parent:
        parent.notify("end", True)
        parent.notify("hurry")
        await until(lambda: stop.hurry.called)
    assert [True, False] == [call.kwargs["notice"] for call in stop.begin.call_args_list]


async def test_the_end_in_order() -> None:
    """Everybody is told, and nobody is replaced."""
    factory = Factory()
    async with running(factory) as pool:
        await pool.end(notice=True, hurried=asyncio.Event())

    assert [[("end", True)]] * 2 == [member.told[:1] for member in factory.members]
    assert 2 == len(factory.members)


async def test_a_hurry_is_passed_on() -> None:
    """Whoever insists does not wait for the time that requests were given."""
    factory, hurried = Factory(), asyncio.Event()
    async with running(factory) as pool:
        for member in factory.members:
            member.obeys = False
        ending = asyncio.create_task(pool.end(notice=False, hurried=hurried))
        await until(lambda: all(member.told for member in factory.members))
        assert not ending.done()
        for member in factory.members:
            member.obeys = True
        hurried.set()
        await asyncio.wait_for(ending, 120)

    assert [[("end", False), ("hurry",)]] * 2 == [member.told[:2] for member in factory.members]


async def test_who_does_not_end_is_killed(clock: Clock) -> None:
    """A worker that does not end is killed long after it should have ended."""
    factory = Factory()
    async with running(factory, settings=Settings(server=ServerSettings(shutdown_grace=30))) as pool:
        factory.members[0].obeys = False
        factory.hold.clear()
        factory.members[1].end(1)
        await until(lambda: len(factory.members) == 3)
        ending = asyncio.create_task(pool.end(notice=False, hurried=asyncio.Event()))
        await until(lambda: factory.members[0].told)
        await clock.elapse(30 + pool_module._END_SECONDS - 1)
        assert [("end", False)] == factory.members[0].told
        await clock.elapse(2)
        assert [] == factory.members[0].signals
        await clock.elapse(pool_module._END_SECONDS)
        await ending

        assert -9 == await factory.members[0].status
        # It was being started.
        factory.hold.set()
        assert -9 == await factory.members[2].status


async def test_who_hangs_is_killed_and_replaced(clock: Clock) -> None:
    """A worker that hangs is asked where, and killed; one that says something now and then is left alone."""
    factory = Factory()
    with capture_logs() as logs:
        async with running(factory, settings=Settings(server=ServerSettings(worker_timeout=60))):
            silent, alive = factory.members
            for number in range(pool_module._CHECKS):
                assert [] == silent.signals, number
                alive.heartbeats += 1
                await clock.elapse(60 / pool_module._CHECKS)
            await clock.elapse(pool_module._DUMP_SECONDS)
            await until(lambda: len(factory.members) == 3)

    assert (-9, [signal.SIGQUIT, signal.SIGKILL]) == (silent.status.result(), silent.signals)
    assert [] == alive.signals
    assert [0] == [entry["worker"] for entry in logs if entry["event"] == "worker hangs and is killed"]


async def test_who_does_not_listen_yet_is_not_watched(clock: Clock) -> None:
    """A start may take as long as its disk does."""
    factory = Factory()
    pool = factory.pool(1, Settings(server=ServerSettings(worker_timeout=60)))
    task = asyncio.create_task(pool.run())
    await until(lambda: factory.members)
    await clock.elapse(600, 100)
    assert [] == factory.members[0].signals
    await pool.end(notice=False, hurried=asyncio.Event())
    await asyncio.wait_for(task, 120)


async def test_calls_arrive_as_they_were_made() -> None:
    """Calls arrive whole, in whatever pieces they come."""
    sent = [
        _NEW,
        _RICH,
        Path("/run/x"),
        Start(worker=Worker(), settings=_RICH, sockets=(3,), address="x"),
        "\xe4" * 10**6,
    ]
    reader = asyncio.StreamReader()
    data = b"".join(encode(0, "take", (one,)) for one in sent)
    for start in range(0, len(data), 50_000):
        reader.feed_data(data[start : start + 50_000])
    reader.feed_eof()
    channel = Channel(reader, Mock())
    found: list[object] = []
    channel.methods["take"] = found.append
    await channel.run()

    assert sent == found
