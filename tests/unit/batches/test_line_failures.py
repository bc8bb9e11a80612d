"""
Lines that fail: which errors end a line, models that are away, and lines that end a process or a Triton.

The host of these tests has a Triton that poison lines end: what runs then loses its connection.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.cases import every_case
from tests.extended import sample
from tests.store_fixture import Place
from tests.unit.batches.test_batch_runner import NAMES, Host, Process, counted, process, request
from triton_openai import errors
from triton_openai.access.rate_limits import RateLimit, Reservation
from triton_openai.batches import timing
from triton_openai.batches.away_models import Pause
from triton_openai.batches.host import Outcome
from triton_openai.batches.results import never_ran, rendered
from triton_openai.storage.batch_records import Batch, next_group
from triton_openai.triton.status import foreign_error


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait for long."""
    for name in ("GROUP", "FAILURE_PAUSE", "RETRY", "MAX_RETRY", "FIRST_PAUSE", "MAX_PAUSE"):
        monkeypatch.setattr(timing, name, 0.002)
    # Each look at the tables takes half a millisecond, and few tests wait for one.
    for name in ("POLL", "NOTIFIED_POLL", "WATCH", "SLOTS"):
        monkeypatch.setattr(timing, name, 0.01)


# Of the service's state, of Triton's, or of the stores'.
PASSING: dict[str, Callable[[], errors.ServiceError]] = {
    "a model that is away": lambda: errors.ModelNotFound("m"),
    "a model that is not ready": lambda: errors.UpstreamUnavailable("no"),
    "a model that is unloaded": lambda: errors.ModelUnloading("m"),
    "a service that stops": lambda: errors.UpstreamUnavailable("no", code="service_stopping"),
    "Triton's queue": lambda: errors.Overloaded("no"),
    "limits of the key": lambda: errors.RateLimited("no", kind="tokens", wait=0.001),
    "limits of the service": lambda: errors.ServiceOverloaded("no"),
    "a store": lambda: errors.StoreUnavailable("no"),
    "a full disk": lambda: errors.StorageFull("no"),
    "a conversation in use": lambda: errors.ConversationBusy("no"),
    "a key that is being removed": lambda: errors.InvalidApiKey("no"),
    "a proxy that fails": lambda: foreign_error("500", "<html>"),
    "a proxy that cannot connect": lambda: foreign_error("502", "<html>"),
    "a proxy without a Triton": lambda: foreign_error("503", "<html>"),
    "a proxy with an error of its own": lambda: foreign_error("520", "<html>"),
    "a proxy without this address": lambda: foreign_error("404", "<html>"),
}
# Of the line.
ENDING: dict[str, Callable[[], errors.ServiceError]] = {
    "a wrong parameter": lambda: errors.InvalidRequest("no"),
    "a prompt that is too long": lambda: errors.ContextLengthExceeded("no"),
    "a large body": lambda: errors.PayloadTooLarge("no"),
    "a wrong type": lambda: errors.UnsupportedMediaType("no"),
    "a response that does not exist": lambda: errors.ObjectNotFound("no"),
    "a right that the key lacks": lambda: errors.KeyNotSufficient("no"),
    "a model that the key may not use": lambda: errors.ModelNotFound("m", hidden=True),
    "a backend that refuses": lambda: errors.RequestRefused("no"),
}
# Of the line or of the model.
DOUBTFUL: dict[str, Callable[[], errors.ServiceError]] = {
    "a model that fails": lambda: errors.UpstreamError("no"),
    "a proxy that waits too long": lambda: foreign_error("504", "<html>"),
    "a model that is slow": lambda: errors.UpstreamTimeout("no"),
    "a mistake of the service": errors.ServiceError,
    "an adapter that is not loaded": lambda: errors.LoraNotLoaded("no"),
    "a setting": lambda: errors.ConfigurationError("no"),
    "something that Triton cannot do": lambda: errors.NotImplementedUpstream("no"),
}


async def _fails(place: Path, make: Callable[[], errors.ServiceError], times: int) -> tuple[Any, int]:
    """Return the status of a line that fails so many *times*, and how often it was asked."""
    async with process(place) as one:
        one.host.answers = {"id-1": [make() for _ in range(times)]}
        done = await one.ended(await one.batch(NAMES[:3]))
        found = one.results(done)
        assert [[200], [200]] == [found["id-0"], found["id-2"]]
        return found["id-1"][0], one.host.calls["id-1"]


@every_case("name", PASSING)
async def test_errors_that_say_nothing_of_a_line(name: str, tmp_path: Path) -> None:
    """What is wrong with the service, Triton or a store never ends a line, however often the line meets it."""
    # More often than any other error.
    assert (200, 6) == await _fails(tmp_path / name, PASSING[name], 5)


@every_case("name", ENDING)
async def test_errors_of_a_line(name: str, tmp_path: Path) -> None:
    """What is wrong with a line ends it at once."""
    assert (ENDING[name]().status, 1) == await _fails(tmp_path / name, ENDING[name], 9)


@every_case("name", DOUBTFUL)
async def test_errors_of_a_line_or_its_model(name: str, tmp_path: Path) -> None:
    """What may be a matter of the model is tried three times more, where the model answers a small request."""
    assert (DOUBTFUL[name]().status, 4) == await _fails(tmp_path / name, DOUBTFUL[name], 9)


@every_case("name", DOUBTFUL)
async def test_a_model_that_fails_for_all(name: str, tmp_path: Path) -> None:
    """While the model answers no small request either, no attempt of a line counts, and the line waits."""
    async with process(tmp_path / name) as one:
        one.host.answers = {"id-0": [DOUBTFUL[name]() for _ in range(9)]}
        one.host.silent.add("m")
        batch = await one.batch(NAMES[:1])
        await one.until(batch, lambda _: len(one.host.probes) > 3)
        assert 1 == one.host.calls["id-0"]
        one.host.answers.clear()
        one.host.silent.clear()
        assert 1 == (await one.ended(batch)).succeeded


@every_case("status", ["500", "502", "503", "504"])
async def test_the_page_of_a_proxy_is_no_death(status: str, tmp_path: Path) -> None:
    """What a proxy says while Triton restarts quarantines no line: the lines wait, and none has a death."""
    async with process(tmp_path / status) as one:
        one.host.answers = {name: [foreign_error(status, "<html>")] for name in NAMES}
        one.host.silent.add("m")
        with structlog.testing.capture_logs() as logs:
            batch = await one.batch(NAMES)
            await one.until(batch, lambda _: len(one.host.probes) > 3)
            await counted(one, quarantined=0)
            one.host.silent.clear()
            assert 20 == (await one.ended(batch)).succeeded
        assert "Triton ended while a line ran" not in [log["event"] for log in logs]


async def test_a_model_that_is_away_for_a_moment(tmp_path: Path) -> None:
    """A 404 of a model that the list still has pauses its lines; the list is read until the model answers."""
    async with process(tmp_path) as one:
        host = one.host
        host.answers = {name: [errors.ModelNotFound("m")] * 3 for name in NAMES}
        host.silent.add("m")
        with structlog.testing.capture_logs() as logs:
            batch = await one.batch(NAMES)
            await counted(one, models_away=1)
            await one.until(batch, lambda _: len(host.probes) > 4)
            # None begins while it is away.
            assert host.calls.total() <= 4
            host.silent.clear()
            done = await one.ended(batch)
        assert 20 == done.succeeded
        assert {name: [200] for name in NAMES} == one.results(done)
        assert "model away, lines wait" in [log["event"] for log in logs]
        assert "model back, lines resume" in [log["event"] for log in logs]
        await counted(one, models_away=0)


async def test_a_line_that_meets_no_model_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model is away for one line alone, that line waits longer and longer, and the others do not wait with it."""
    # Long enough that the others run in between, however busy the machine is.
    monkeypatch.setattr(timing, "MAX_RETRY", 0.2)
    async with process(tmp_path) as one:
        host = one.host
        host.answers = {"id-0": [errors.UpstreamUnavailable("no")] * 10**6}
        batch = await one.batch(NAMES)
        await one.until(batch, lambda found: found.succeeded == 19)
        waits = one.runner._batches[batch.id].attempts[1].waits
        assert waits == host.calls["id-0"] or waits + 1 == host.calls["id-0"]
        host.answers.clear()
        assert 20 == (await one.ended(batch)).succeeded


async def test_other_models_go_on(tmp_path: Path) -> None:
    """More lines than may wait for an attempt wait for a model that is away, and lines for others go on."""
    async with process(tmp_path) as one:
        host = one.host
        host.max_running = 80
        away, there = [f"away-{number}" for number in range(40)], NAMES
        host.answers = {name: [errors.UpstreamUnavailable("no")] for name in away}
        host.silent.add("n")
        content = b"".join([request(name, "n") for name in away] + [request(name, "m") for name in there])
        batch = await one.batch(content)
        await one.until(batch, lambda found: found.succeeded == len(there))
        host.silent.clear()
        assert 60 == (await one.ended(batch)).succeeded


async def test_a_model_that_never_comes_back(tmp_path: Path) -> None:
    """Lines for a model that is gone wait until their batch expires."""
    async with process(tmp_path) as one:
        one.host.busy = True
        batch = await one.batch(NAMES[:2], hours=0.5 / 3600)
        await one.until(batch, lambda found: found.status != "validating")
        del one.host.served["m"]
        one.host.busy = False
        done = await one.ended(batch)
        assert {name: ["batch_expired"] for name in NAMES[:2]} == one.results(done)


async def pause(one: Process, model: str, *batches: Batch) -> None:
    """
    Pause *model* when it is known that lines of *batches* wait for it.

    The pause of a model that no line asks ends at once, and the model is asked for those batches alone that are known.
    """
    away = one.runner._away
    for batch in batches:
        await one.until(batch, lambda found: found.id in [known.id for known in away._batches.get(model, ())])
    away.pause(model, "no")


async def test_lines_behind_those_of_a_model_that_is_away(tmp_path: Path) -> None:
    """Lines for models that are there run however many lines of one that is away are before them."""
    async with process(tmp_path) as one:
        host = one.host
        host.busy = True
        away = [request(f"away-{number}", "n") for number in range(300)]
        batch = await one.batch(b"".join([*away, *map(request, NAMES[:5])]))
        host.silent.add("n")
        await pause(one, "n", batch)
        # No line was chosen before the pause.
        await one.until(batch, lambda _: one.runner._batches[batch.id].starting is None)
        host.busy = False
        await one.until(batch, lambda found: found.succeeded == 5)
        # Another process may run those when the model is back.
        assert one.runner._batches[batch.id].window < 50
        host.silent.clear()
        assert 305 == (await one.ended(batch)).succeeded


# Of the key of a batch.
MAY_NOT_ASK: dict[str, Callable[[], errors.ServiceError]] = {
    "a model that the key may not use": lambda: errors.ModelNotFound("m", hidden=True),
    "a key that was removed": lambda: errors.InvalidApiKey("no"),
    "a key that lacks a right": lambda: errors.KeyNotSufficient("no"),
    "an API that was restricted": lambda: errors.ApiRestricted("no"),
}


class Locked(Host):
    """A host that refuses what lines of *owner* ask, by its key."""

    def __init__(self, owner: str, make: Callable[[], errors.ServiceError]) -> None:
        super().__init__()
        self.owner = owner
        self.make = make
        self.gone = True
        #: How often each owner asked the model.
        self.asked: Counter[str] = Counter()

    async def probe(self, batch: Batch, model: str) -> None:
        self.asked[batch.owner] += 1
        if batch.owner == self.owner:
            raise self.make()
        if self.gone:
            raise errors.UpstreamUnavailable("no")

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        self.calls[custom_id] += 1
        if batch.owner == self.owner:
            return self.refusal(batch, errors.ModelNotFound("m", hidden=True))
        if self.gone:
            return self.refusal(batch, errors.UpstreamUnavailable("no"))
        return Outcome(200, b"{}")


@every_case("name, owner", [(name, owner) for name in MAY_NOT_ASK for owner in ("me", "you")])
async def test_keys_that_may_not_ask_a_model(name: str, owner: str, tmp_path: Path) -> None:
    """Whether a model is back does not depend on a key that may not ask it, whichever batch comes first."""
    host = Locked(owner, MAY_NOT_ASK[name])
    other = "you" if owner == "me" else "me"
    async with process(tmp_path / f"{name}-{owner}", host) as one:
        host.busy = True
        batches = {who: await one.batch(NAMES[:5], owner=who, name=f"batch_{who}") for who in ("me", "you")}
        await pause(one, "m", *batches.values())
        host.busy = False
        # It stays away for both while it is away.
        await one.until(batches[other], lambda _: host.asked[other] > 3)
        assert not host.calls
        host.gone = False
        assert 5 == (await one.ended(batches[other])).succeeded
        assert 5 == (await one.ended(batches[owner])).failed


async def test_no_key_may_ask_a_model(tmp_path: Path) -> None:
    """Where no key may use a model that is there, its lines do not wait: each fails by itself."""
    host = Locked("me", MAY_NOT_ASK["a model that the key may not use"])
    async with process(tmp_path, host) as one:
        host.busy = True
        batch = await one.batch(NAMES[:5])
        await pause(one, "m", batch)
        host.busy = False
        assert 5 == (await one.ended(batch)).failed


async def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is looked for after one second, then after two, four and so on, half a minute at most."""
    monkeypatch.undo()
    now, looks = 1000.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pause = Pause()
    while now < 1095.0:
        now += 1.0
        if pause.due:
            looks.append(now - 1000.0)
            pause.begin_check()
            pause.extend()
    assert [1, 3, 7, 15, 31, 61, 91] == looks


class Triton:
    """A Triton that *poison* lines end, and how often they did; it is away until it was probed so often."""

    def __init__(self, *poison: str, probes: int = 2) -> None:
        self.poison = set(poison)
        self.deaths: list[set[str]] = []
        self.died = asyncio.Event()
        self._probes = probes
        self.away = 0


class Fragile(Host):
    """Answers lines by a *triton*, which somebody else kills at some of its requests."""

    def __init__(self, triton: Triton, *, killed_at: Sequence[int] = ()) -> None:
        super().__init__()
        self.triton = triton
        self.killed_at = list(killed_at)
        #: Lines that it is killed with when they run alone for the first time.
        self.met_once: set[str] = set()
        #: How many lines begin before the first one is answered.
        self.together = 0
        self.max_running = 8

    def capacity(self, target: str) -> float:
        return self.max_running

    async def probe(self, batch: Batch, model: str) -> None:
        if self.triton.away:
            self.triton.away -= 1
            raise errors.UpstreamUnavailable("no")

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        triton = self.triton
        self.calls[custom_id] += 1
        if triton.away:
            return self.refusal(batch, errors.UpstreamUnavailable("no"))
        died = triton.died
        self.running.add(custom_id)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                if died.is_set():
                    return self.refusal(batch, errors.UpstreamLost("no"))
            while self.calls.total() < self.together:  # noqa: ASYNC110 - all of them begin soon
                await asyncio.sleep(0)
            killed = bool(self.killed_at) and self.calls.total() >= self.killed_at[0]
            if killed:
                del self.killed_at[0]
            if self.running == {custom_id} and custom_id in self.met_once:
                self.met_once.discard(custom_id)
                killed = True
            if killed or custom_id in triton.poison:
                self.kill()
                return self.refusal(batch, errors.UpstreamLost("no"))
        finally:
            self.running.discard(custom_id)
        return Outcome(200, b'{"a":1}')

    def kill(self) -> None:
        """End the Triton."""
        self.triton.deaths.append(set(self.running))
        self.triton.died.set()
        self.triton.died = asyncio.Event()
        self.triton.away = self.triton._probes


POISON = ((), (0,), (23,), (3, 4), (0, 7, 15, 23), tuple(range(5)))


@pytest.mark.sampled
@every_case("poison, running", sample([(poison, running) for poison in POISON for running in (1, 12)], few=4))
async def test_lines_that_end_their_triton(poison: tuple[int, ...], running: int, tmp_path: Path) -> None:
    """However many there are and run at a time, only they fail, each after three deaths, two of which it died alone."""
    names = [f"id-{number}" for number in range(24)]
    triton = Triton(*(names[number] for number in poison))
    host = Fragile(triton)
    host.max_running = running
    async with process(tmp_path / f"{running}-{len(poison)}-{sum(poison)}", host) as one:
        done = await one.ended(await one.batch(names))
        assert {name: [502] if name in triton.poison else [200] for name in names} == one.results(done)
    alone = Counter(name for died in triton.deaths if len(died) == 1 for name in died)
    assert all(alone[name] >= 2 for name in triton.poison)
    assert len(triton.deaths) <= 3 * len(poison)


async def test_large_groups_are_divided(tmp_path: Path) -> None:
    """Of many lines that ran together, an eighth runs again at a time: a poison line costs one more death for that."""
    names = [f"id-{number}" for number in range(128)]
    triton = Triton("id-0")
    host = Fragile(triton)
    host.max_running = 256
    host.together = 20
    async with process(tmp_path, host) as one:
        done = await one.ended(await one.batch(names))
        assert {name: [502] if name == "id-0" else [200] for name in names} == one.results(done)
    sizes = [len(died) for died in triton.deaths]
    assert sizes[0] > 16
    assert len(sizes) <= 5
    assert [1, 1] == sizes[-2:]


def test_groups() -> None:
    """A group is an eighth of the one before, and one line in the end."""
    assert [1, 1, 1, 2, 32] == [next_group(size) for size in (0, 1, 15, 16, 256)]


async def test_a_triton_that_others_end(tmp_path: Path) -> None:
    """No line pays for a Triton that is killed while lines run, also while one runs alone."""
    host = Fragile(Triton(), killed_at=range(5, 105, 10))
    async with process(tmp_path, host) as one:
        done = await one.ended(await one.batch([f"id-{number}" for number in range(40)]))
    assert 40 == done.succeeded
    assert len(host.triton.deaths) >= 5
    assert 1 in map(len, host.triton.deaths)


async def test_lines_that_turn_out_to_be_innocent(tmp_path: Path) -> None:
    """A line that is answered after a death while it ran alone gives the others one more."""
    poison = [f"id-{number}" for number in range(3)]
    host = Fragile(Triton(*poison))
    host.met_once = {"id-3"}
    async with process(tmp_path, host) as one:
        done = await one.ended(await one.batch([f"id-{number}" for number in range(8)]))
        assert {f"id-{number}": [502 if number < 3 else 200] for number in range(8)} == one.results(done)
    alone = Counter(name for died in host.triton.deaths if len(died) == 1 for name in died)
    assert {3} == {alone[name] for name in poison}


async def test_a_service_that_is_killed_again_and_again(place: Place) -> None:
    """Sixteen lines outlive eight kills, each of which comes while lines run, whether others have ended or not."""
    names = NAMES[:16]
    batch: Batch | None = None
    for _ in range(8):
        one = Process(place)
        one.host.may_answer.clear()
        one.start()
        batch = batch or await one.batch(names)
        await one.until(batch, partial(_runs, one.host))
        await one.die()
    assert batch is not None
    async with process(place) as last:
        done = await last.ended(batch)
        assert {name: [200] for name in names} == last.results(done)


def _runs(host: Host, _: Batch) -> bool:
    return bool(host.running)


class Deadly(Host):
    """A host whose process has to be killed when the line *poison* runs."""

    def __init__(self, *poison: str) -> None:
        super().__init__()
        self.poison = poison
        self.fatal = asyncio.Event()

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        if custom_id in self.poison:
            self.running.add(custom_id)
            self.fatal.set()
            await asyncio.Event().wait()
        return await super().answer(batch, custom_id, body, reservation)


async def test_lines_that_end_the_process(place: Place) -> None:
    """A line that ends its process does so four times, three of which alone, and takes no other line along."""
    poison = ("id-0", "id-9")
    deaths = 0
    host = Deadly(*poison)
    one = Process(place, host)
    one.start()
    batch = await one.batch(NAMES)
    while True:
        fatal = asyncio.create_task(host.fatal.wait())
        ended = asyncio.create_task(one.ended(batch))
        await asyncio.wait([fatal, ended], return_when=asyncio.FIRST_COMPLETED)
        died = not ended.done()
        fatal.cancel()
        ended.cancel()
        await asyncio.gather(fatal, ended, return_exceptions=True)
        if not died:
            break
        deaths += 1
        await one.die()
        host = Deadly(*poison)
        one = Process(place, host)
        one.start()
    done = await one.seen(batch)
    found = one.results(done)
    assert {name: [500] if name in poison else [200] for name in NAMES} == found
    assert deaths <= 8
    await one.stop()


async def test_quarantine_outlives_the_process(place: Place) -> None:
    """What ran when Triton ended runs alone in the next process, too, with the deaths that it has."""
    triton = Triton("id-3", probes=10**6)
    one = Process(place, Fragile(triton))
    one.start()
    batch = await one.batch(NAMES)
    await one.until(batch, lambda _: triton.deaths)
    (died,) = triton.deaths
    await counted(one, quarantined=len(died))
    await one.stop()
    again = Triton("id-3")
    async with process(place, Fragile(again)) as other:
        done = await other.ended(batch)
        assert {name: [502] if name == "id-3" else [200] for name in NAMES} == other.results(done)
    assert [{"id-3"}] * 2 == again.deaths


class Counting(Host):
    """Answers lines of which *alone* are quarantined, and counts how many of those run at a time over all hosts."""

    def __init__(self, alone: set[str], running: set[str]) -> None:
        super().__init__()
        self.alone = alone
        self.running = running
        self.most_alone = 0

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        self.running.add(custom_id)
        self.most_alone = max(self.most_alone, len(self.running & self.alone))
        await asyncio.sleep(0.005)
        self.running.discard(custom_id)
        return Outcome(200, b"{}")


async def test_one_process_at_a_time_runs_quarantined_lines(place: Place) -> None:
    """Lines of two processes that run alone never run at the same time: both could ask the same Triton."""
    first = Process(place)
    first.host.may_answer.clear()
    first.start()
    batches = []
    for model in "mn":
        content = b"".join([request(f"{model}-{line}", model) for line in range(6)])
        batches.append(await first.batch(content, name=f"batch_{model}"))
    await first.until(batches[0], lambda _: len(first.host.running) == 4)
    alone = set(first.host.running)
    await first.die()
    hosts = [Counting(alone, running) for running in [set[str]()] for _ in range(2)]
    async with process(place, hosts[0]), process(place, hosts[1]) as other:
        for batch in batches:
            assert 6 == (await other.ended(batch)).succeeded
    assert 1 == max(host.most_alone for host in hosts)


async def test_lines_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines whose input cannot be read for a while, or whose limits cannot be asked, wait, and count nowhere."""
    async with process(tmp_path) as one:
        host, runner = one.host, one.runner
        host.limit = RateLimit(concurrent_requests=20)
        read = os.pread
        admit: Callable[[str], Awaitable[Reservation | None]] = host.admit
        failures: list[Exception] = [OSError(errno.EIO, "no"), OSError(errno.ESTALE, "no"), RuntimeError("no")] * 2
        refusals = [RuntimeError("no"), ValueError("no")]

        def failing_read(descriptor: int, length: int, start: int) -> bytes:
            if failures and not host.busy:
                raise failures.pop(0)
            return read(descriptor, length, start)

        async def failing_admit(owner: str) -> Reservation | None:
            if refusals:
                raise refusals.pop(0)
            return await admit(owner)

        monkeypatch.setattr(os, "pread", failing_read)
        monkeypatch.setattr(host, "admit", failing_admit)
        stopped = list[int]()
        mark = one.files.store.lines.mark_stopped

        async def noted(batch: Batch, lines: Sequence[int]) -> None:
            stopped.extend(lines)
            await mark(batch, lines)

        monkeypatch.setattr(one.files.store.lines, "mark_stopped", noted)
        done = await one.ended(await one.batch(NAMES))
        assert {name: [200] for name in NAMES} == one.results(done)
        assert [] == failures + refusals
        assert stopped
        assert 0 == runner._limits.running
        # All that was reserved is free again.
        free = [await admit("me") for _ in range(20)]
        assert [None] * 20 == [one.refusal for one in free if one is not None]


def _fail(_: threading.Event) -> None:
    raise OSError(errno.EIO, "no")


def _hang(over: threading.Event) -> None:
    over.wait(600)


FAULTS: dict[str, Callable[[threading.Event], None]] = {
    "an input with a bad sector": _fail,
    "an input whose disk hangs": _hang,
}


@every_case("name", FAULTS)
async def test_an_input_that_cannot_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other batches do not wait for it: not a whole pause of the runner, and not until the read has ended."""
    monkeypatch.setattr(timing, "FAILURE_PAUSE", 60.0)
    monkeypatch.setattr(timing, "SLOW_READ", 0.05)
    over = threading.Event()
    read = os.pread
    async with process(tmp_path / name) as one:
        one.host.busy = True
        bad = await one.batch(NAMES, name="batch_bad")
        good = await one.batch(NAMES, name="batch_good", owner="you")
        for batch in (bad, good):
            await one.until(batch, lambda found: found.id in one.runner._batches)
            await one.until(batch, lambda found: one.runner._batches[found.id].input >= 0)
        unreadable = os.fstat(one.runner._batches[bad.id].input).st_ino

        def faulty_read(descriptor: int, length: int, start: int) -> bytes:
            if os.fstat(descriptor).st_ino == unreadable and not over.is_set():
                FAULTS[name](over)
            return read(descriptor, length, start)

        monkeypatch.setattr(os, "pread", faulty_read)
        one.host.busy = False
        try:
            assert 20 == (await one.ended(good)).succeeded
            assert 0 == (await one.seen(bad)).succeeded
        finally:
            over.set()
        assert 20 == (await one.ended(bad)).succeeded


async def test_a_batch_that_is_cancelled_while_its_input_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its lines starts any more, and each has one result."""
    reading = threading.Event()
    over = threading.Event()
    read = os.pread

    def slow_read(descriptor: int, length: int, start: int) -> bytes:
        reading.set()
        over.wait()
        return read(descriptor, length, start)

    async with process(tmp_path) as one:
        one.host.busy = True
        batch = await one.batch(NAMES)
        await one.until(batch, lambda found: found.id in one.runner._batches)
        await one.until(batch, lambda found: one.runner._batches[found.id].input >= 0)
        monkeypatch.setattr(os, "pread", slow_read)
        one.host.busy = False
        try:
            await one.until(batch, lambda _: reading.is_set())
            await one.files.store.batches.change(batch.id, lambda found: found.set_status("cancelling"))
            one.runner.wake()
            await one.until(batch, lambda _: one.runner._batches[batch.id].batch.status == "cancelling")
        finally:
            over.set()
        assert {name: ["batch_cancelled"] for name in NAMES} == one.results(await one.ended(batch))


async def test_one_line_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector below one line holds none of the other lines of its batch."""
    read = os.pread
    bad = True

    def faulty_read(descriptor: int, length: int, start: int) -> bytes:
        content = read(descriptor, length, start)
        if bad and content.startswith(b'{"custom_id": "id-3"'):
            raise OSError(errno.EIO, "no")
        return content

    monkeypatch.setattr(os, "pread", faulty_read)
    async with process(tmp_path) as one:
        batch = await one.batch(NAMES)
        await one.until(batch, lambda found: found.succeeded == 19)
        bad = False
        assert 20 == (await one.ended(batch)).succeeded


async def test_a_line_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line whose input is cut off is tried four times, and ends with an error that names the line."""
    reads = list[int]()
    read = os.pread

    def short_read(descriptor: int, length: int, start: int) -> bytes:
        content = read(descriptor, length, start)
        if not content.startswith(b'{"custom_id": "id-0"'):
            return content
        reads.append(start)
        return content[: length // 2]

    async with process(tmp_path) as one:
        one.host.busy = True
        batch = await one.batch(NAMES[:3])
        await one.until(batch, lambda found: found.status == "in_progress")
        monkeypatch.setattr(os, "pread", short_read)
        one.host.busy = False
        with structlog.testing.capture_logs() as logs:
            done = await one.ended(batch)
        assert (2, 1) == (done.succeeded, done.failed)
        assert {"": [500], "id-1": [200], "id-2": [200]} == one.results(done)
        assert b"line 1 of the input" in one.content(done.errors)
    assert 4 == len(reads)
    assert [1] * 4 == [log["line"] for log in logs if log["event"] == "line failed"]


async def test_normal_lines_go_on_while_another_process_has_the_quarantine(place: Place) -> None:
    """A process with quarantined lines runs its other ones while another process runs such lines."""
    first = Process(place)
    first.host.may_answer.clear()
    first.start()
    batch = await first.batch(NAMES)
    await first.until(batch, lambda _: len(first.host.running) == 4)
    alone = set(first.host.running)
    await first.die()
    async with process(place) as second:
        store = second.files.store
        assert await store.leases.enter_quarantine("other", 600.0)
        await second.until(batch, lambda found: found.succeeded == 16)
        assert not alone & second.host.calls.keys()
        await store.leases.leave_quarantine("other")
        assert 20 == (await second.ended(batch)).succeeded


BREAKS = "a\u0085b\u2028c\u2029d\u2030 \\\u2028"


def test_lines_that_clients_split() -> None:
    """Files have no character at which a client might break a line; what they say is the same."""
    texts = {"a": BREAKS, BREAKS: 1}
    body = json.dumps(texts, ensure_ascii=False).encode()
    for kind in ("openai", "anthropic"):
        batch = Batch(
            id="b", owner="", kind=kind, endpoint="/x", input="i", created=0, window="24h", expires=1,
            outcome="expired",
        )  # fmt: skip
        lines = [rendered(batch, 1, BREAKS, Outcome(200, body)), never_ran(batch, 1, BREAKS)]
        lines.append(rendered(batch, 1, BREAKS, Outcome(400, body, error=errors.InvalidRequest("no"))))
        assert 3 == len(b"".join(lines).decode().splitlines())
        found = [json.loads(line) for line in lines]
        assert {BREAKS} == {one["custom_id"] for one in found}
        answers = [one["response"]["body"] if kind == "openai" else one["result"]["message"] for one in found[:1]]
        assert [texts] == answers


async def test_models_without_a_template(tmp_path: Path) -> None:
    """A batch of chats for a model without a template fails; not one whose lines bring theirs."""
    async with process(tmp_path) as one:
        one.host.untemplated.add("m")
        done = await one.ended(await one.batch(NAMES[:3]))
        assert ("failed", "configuration_error", 1) == (done.status, done.problems[0].code, done.problems[0].line)
        body = {"model": "m", "messages": [], "chat_template": "{{ messages }}"}
        good = await one.ended(await one.batch(request("a", body=body), name="batch_2"))
        assert "completed" == good.status
        mixed = request("a", body=body) + request("b", body={**body, "chat_template": None})
        bad = await one.ended(await one.batch(mixed, name="batch_3"))
        assert [("configuration_error", 2)] == [(fault.code, fault.line) for fault in bad.problems]
