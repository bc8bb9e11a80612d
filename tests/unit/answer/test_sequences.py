"""Requests that are the parts of a sequence: their order, their Triton, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.cases import every_case
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.config.tree import EndpointSettings, TritonSettings
from triton_openai.errors import InvalidRequest, ServiceError, UpstreamError, UpstreamUnavailable
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallTracer
from triton_openai.triton.client import TritonClient
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.route import Route
from triton_openai.triton.routing import Target
from triton_openai.triton.sequence import LiveSequence
from triton_openai.triton.tensors import InferRequest, InferResponse, JsonResponse

FIRST, *REST = (InferRequest(model="m", id=str(number), inputs=()) for number in range(4))
SEQUENCE = InferRequest(model="m", id="0", inputs=(), following=tuple(REST))


class FakeTriton:
    """Answers each request when a test lets it, or fails."""

    def __init__(self, *, failing: str = "", error: ServiceError | None = None, held: str = "") -> None:
        self.got: list[str] = []
        self.holds, self.released = asyncio.Event(), asyncio.Event()
        self._failing, self._error, self._held = failing, error, held

    async def infer(self, request: InferRequest) -> InferResponse:
        """Note the request."""
        self.got.append(request.id)
        if request.id == self._held:
            self.holds.set()
            await self.released.wait()
        if request.id == self._failing and self._error is not None:
            raise self._error
        return JsonResponse({"id": request.id})

    async def close(self) -> None:
        """Do nothing."""


def upstream_to(*tritons: FakeTriton) -> UpstreamClient:
    """Return what sends requests to *tritons*, in this order."""
    endpoints = tuple(EndpointSettings(name=str(place), url=(f"http://t{place}",)) for place in range(len(tritons)))
    fleet = Fleet(
        TritonSettings(endpoints=endpoints),
        connect=lambda settings: cast(TritonClient, tritons[int(settings.name or "0")]),
    )
    for name, member in fleet.members.items():
        member.targets["m"] = Target(name, 1000.0 if name == "0" else 1.0)
    fleet.leasing.update(["m"])
    return UpstreamClient(Route(fleet.leasing, "m"), CallTracer(), Background())


async def test_parts_come_one_after_the_other() -> None:
    """A part is sent when the one before is answered, and each answer is heard."""
    triton = FakeTriton(held="2")
    heard: list[int] = []
    asking = asyncio.ensure_future(upstream_to(triton).ask(SEQUENCE, lambda responses: heard.append(len(responses))))
    await triton.holds.wait()
    assert (["0", "1", "2"], [1, 2]) == (triton.got, heard)
    triton.released.set()
    assert ["0", "1", "2", "3"] == [cast(Any, each).values["id"] for each in await asking]
    assert ["0", "1", "2", "3"] == triton.got


@every_case(
    "place, error, expected, got",
    [
        ("1", UpstreamError("failed"), UpstreamError, ["0", "1", "3"]),
        # Triton no longer knows the sequence: no fault of the client's.
        ("1", InvalidRequest("must specify the START flag"), UpstreamError, ["0", "1", "3"]),
        ("0", InvalidRequest("shape"), InvalidRequest, ["0", "3"]),
        ("3", UpstreamError("failed"), UpstreamError, ["0", "1", "2", "3"]),
    ],
)
async def test_a_part_that_fails(
    place: str, error: ServiceError, expected: type[ServiceError], got: Sequence[str]
) -> None:
    """The sequence is ended, unless its end is what failed."""
    triton = FakeTriton(failing=place, error=error)
    upstream = upstream_to(triton)
    with pytest.raises(expected):
        await upstream.ask(SEQUENCE)
    await upstream.background.close()
    assert got == triton.got


async def test_a_sequence_that_nobody_waits_for() -> None:
    """It is ended when the part that runs is answered, and not before; its end may end."""
    for held, got in (("1", ["0", "1", "3"]), ("3", ["0", "1", "2", "3"])):
        triton = FakeTriton(held=held)
        upstream = upstream_to(triton)
        asking = asyncio.ensure_future(upstream.ask(SEQUENCE))
        await triton.holds.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert triton.got[-1] == held
        triton.released.set()
        await upstream.background.close()
        assert got == triton.got


async def test_a_sequence_goes_on_at_no_other_triton() -> None:
    """Where a Triton is lost, another one gets the sequence from its beginning, and the first its end."""
    tritons = [FakeTriton(failing="2", error=UpstreamUnavailable("gone")), FakeTriton()]
    upstream = upstream_to(*tritons)
    heard: list[int] = []
    await upstream.ask(SEQUENCE, lambda responses: heard.append(len(responses)))
    await upstream.background.close()
    assert [["0", "1", "2", "3"], ["0", "1", "2", "3"]] == [triton.got for triton in tritons]
    assert [1, 2, 1, 2, 3, 4] == heard


def live(count: int, *, last: bool = True) -> LiveSequence:
    """Return a sequence with the first *count* parts, whose early end is called "end"."""
    sequence = LiveSequence(InferRequest(model="m", id="end", inputs=()))
    for number in range(count):
        part = InferRequest(model="m", id=str(number), inputs=())
        sequence.add(part, last=last and number == count - 1)
    return sequence


async def test_parts_that_are_made_meanwhile() -> None:
    """Each is sent when it is there, and what adds them can wait until they are answered."""
    triton = FakeTriton()
    sequence = live(1, last=False)
    asking = asyncio.ensure_future(upstream_to(triton).ask_live(sequence))
    await sequence.wait_until(0)
    assert ["0"] == triton.got
    sequence.add(FIRST)
    sequence.add(REST[0], last=True)
    assert 2 == sequence.unanswered
    assert 3 == len(await asking)
    assert ["0", "0", "1"] == triton.got


async def test_a_live_sequence_that_nobody_waits_for() -> None:
    """It is ended early, also while it waits for a part, and what adds parts does not wait for answers any more."""
    for held in ("", "1"):
        triton = FakeTriton(held=held)
        sequence = live(2, last=False)
        upstream = upstream_to(triton)
        asking = asyncio.ensure_future(upstream.ask_live(sequence))
        await (triton.holds.wait() if held else sequence.wait_until(0))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        sequence.close()
        await sequence.wait_until(0)
        triton.released.set()
        await upstream.background.close()
        assert ["0", "1", "end"] == triton.got


async def test_a_live_sequence_at_another_triton() -> None:
    """It begins again there as long as all of its parts are kept, and fails after that."""
    error = UpstreamUnavailable("gone")
    tritons = [FakeTriton(failing="2", error=error), FakeTriton()]
    await upstream_to(*tritons).ask_live(live(4))
    assert ["0", "1", "2", "3"] == tritons[1].got
    many = 100
    tritons = [FakeTriton(failing=str(many - 1), error=error), FakeTriton()]
    sequence = live(many)
    with pytest.raises(ServiceError):
        await upstream_to(*tritons).ask_live(sequence)
    assert not sequence.complete
    assert [] == tritons[1].got
