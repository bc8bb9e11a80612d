"""Failover is the same for each kind of call: generations, speech, whole answers and sequences."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from tests.cases import every_case
from tests.clock import Clock
from tests.unit.triton.test_catalog import FakeClient
from triton_openai.adapters._common.base import Adapter, Capabilities
from triton_openai.adapters._common.decoding import TextDecoder
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.run import Run
from triton_openai.answer.run_group import collect
from triton_openai.answer.speech import _PieceCall
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.config.tree import FailoverSettings, TritonSettings
from triton_openai.errors import InvalidRequest, Overloaded, ServiceError, UpstreamError, UpstreamUnavailable
from triton_openai.generation import Generation, Sampling
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallTracer
from triton_openai.triton.client import Receiver, TritonClient
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.route import Route
from triton_openai.triton.status import cut_off_error
from triton_openai.triton.tensors import InferRequest, JsonResponse, ModelConfig

REQUEST = InferRequest(model="m", id="1", inputs=())
SECONDS = 5.0


class Stream:
    """A stream that only notes its end."""

    def __init__(self) -> None:
        self.closed: list[bool] = []

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def close(self, *, silent: bool = False) -> None:
        """Note it."""
        self.closed.append(silent)


class Triton(FakeClient):
    """A Triton that fails as the test says, after it has sent *parts* of an answer, or answers."""

    def __init__(self) -> None:
        super().__init__("m")
        self.failure: ServiceError | None = None
        #: Whether it never answers.
        self.silent = False
        self.parts = 0
        self.requests = 0
        self.streams: list[Stream] = []

    def stream(self, request: InferRequest, receiver: Receiver) -> Stream:
        """Answer in the next turn of the event loop."""
        self.requests += 1
        self.streams.append(Stream())
        if not self.silent:
            asyncio.get_running_loop().call_soon(self._answer, receiver)
        return self.streams[-1]

    def _answer(self, receiver: Receiver) -> None:
        if self.failure is None or self.parts:
            receiver.receive([JsonResponse({"text_output": "a"})])
        receiver.end(self.failure)

    async def infer(self, request: InferRequest) -> Any:
        """Answer at once."""
        self.requests += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        return JsonResponse({"text_output": "a"})


class Backend(Adapter):
    """The adapter of the model."""

    name = "test"

    def __init__(self) -> None:
        super().__init__(ModelConfig(name="m", decoupled=True), {})
        self.capabilities = Capabilities(streaming=True)

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        """Return a request for a stream."""
        return [InferRequest(model="m", id=generation.id, inputs=(), outputs=(), stream=True)]

    def decoder(self, generation: Generation) -> TextDecoder:
        """Return one of texts."""
        return TextDecoder()


async def generate(upstream: UpstreamClient) -> None:
    """Return when the generation has ended."""
    limits = TimeLimits(first_token=SECONDS, idle=SECONDS, total=None)
    run = Run(
        Generation(id="1", prompt="Hello", sampling=Sampling(max_tokens=1)),
        adapter=Backend(),
        upstream=upstream,
        time_limits=limits,
        token_limit=TokenLimit(tokens=1),
    )
    await collect([run], timeout=None)


async def speak(upstream: UpstreamClient) -> None:
    """Return when all audio has come."""
    call = _PieceCall(upstream, InferRequest(model="m", id="1", inputs=(), stream=True), lambda: None)
    try:
        while await call.next(SECONDS) is not None:
            pass
    finally:
        call.close()


async def ask(upstream: UpstreamClient) -> None:
    """Return when the answer has come."""
    await upstream.ask(REQUEST)


async def ask_stream(upstream: UpstreamClient) -> None:
    """Return when all responses of a stream have come."""
    await upstream.ask(InferRequest(model="m", id="1", inputs=(), stream=True))


async def ask_sequence(upstream: UpstreamClient) -> None:
    """Return when all parts of a sequence are answered."""
    await upstream.ask(InferRequest(model="m", id="1", inputs=(), following=(REQUEST,)))


Kind = Callable[[UpstreamClient], Awaitable[None]]
KINDS: Sequence[Kind] = (generate, speak, ask, ask_stream, ask_sequence)


async def of(*tritons: Triton, **failover: Any) -> tuple[Fleet, UpstreamClient]:
    """Return a fleet of *tritons* and a client of it."""
    names = {f"t{number}": triton for number, triton in enumerate(tritons)}
    settings = TritonSettings(
        endpoints=tuple(f"{name}=http://{name}:8000" for name in names), failover=FailoverSettings(**failover)
    )
    fleet = Fleet(settings, connect=lambda endpoint: cast(TritonClient, names[endpoint.name or ""]))
    await fleet.refresh()
    return fleet, UpstreamClient(Route(fleet.leasing, "m"), CallTracer(), Background())


async def sent(tritons: Sequence[Triton]) -> None:
    """Wait until a request has been sent."""
    while not any(triton.requests for triton in tritons):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)


def unused(fleet: Fleet) -> bool:
    """Return whether no lease is left."""
    return not any(member.leases for member in fleet.members.values())


@every_case("kind", KINDS)
@pytest.mark.parametrize("failure", [UpstreamUnavailable("refused"), Overloaded("full"), cut_off_error("reset")])
async def test_a_request_that_failed_before_its_answer_goes_to_another_triton(
    kind: Kind, failure: ServiceError
) -> None:
    """Each kind of call is sent to both Tritons, and releases both."""
    tritons = [Triton(), Triton()]
    for triton in tritons:
        triton.failure = failure
    fleet, upstream = await of(*tritons, attempts=2)
    with pytest.raises(type(failure)):
        await kind(upstream)
    # A sequence also gets its end.
    assert all(triton.requests for triton in tritons)
    assert unused(fleet)
    tritons[0].failure = tritons[1].failure = None
    await kind(UpstreamClient(Route(fleet.leasing, "m"), CallTracer(), Background()))
    assert unused(fleet)
    await fleet.close()


@every_case("kind", KINDS)
async def test_a_refused_request_goes_nowhere_else(kind: Kind) -> None:
    """The same request would be refused again."""
    tritons = [Triton(), Triton()]
    for triton in tritons:
        triton.failure = InvalidRequest("wrong")
    fleet, upstream = await of(*tritons)
    with pytest.raises(InvalidRequest):
        await kind(upstream)
    assert 1 == sum(triton.requests for triton in tritons)
    assert unused(fleet)
    await fleet.close()


@every_case("kind", [generate, speak, ask_stream])
async def test_a_refusal_after_the_beginning_is_a_failure_of_the_model(kind: Kind) -> None:
    """The model had accepted the request, so the client is not to blame."""
    triton = Triton()
    triton.failure = InvalidRequest("wrong")
    triton.parts = 1
    fleet, upstream = await of(triton)
    with pytest.raises(UpstreamError, match="The model failed: wrong"):
        await kind(upstream)
    assert unused(fleet)
    await fleet.close()


@every_case("kind", KINDS)
async def test_a_lost_request_that_no_other_triton_takes_ends_at_once(kind: Kind) -> None:
    """The second Triton cannot be leased at the last moment: the call ends without the wait for its time limit."""
    tritons = [Triton(), Triton()]
    for triton in tritons:
        triton.silent = True
    fleet, upstream = await of(*tritons)
    asking = asyncio.ensure_future(kind(upstream))
    await sent(tritons)
    lease = upstream.route.lease

    def fail(*args: Any, **options: Any) -> Any:
        raise UpstreamUnavailable("No Triton takes requests.")

    upstream.route.lease = fail  # type: ignore[method-assign]
    for member in fleet.members.values():
        member.report_lost(final=False)
    with pytest.raises(UpstreamError, match="lost"):
        await asyncio.wait_for(asking, 120)
    upstream.route.lease = lease  # type: ignore[method-assign]
    assert unused(fleet)
    await fleet.close()


@every_case("kind", [speak, ask, ask_stream, ask_sequence])
async def test_a_failed_call_is_freed_at_once(kind: Kind) -> None:
    """Its error refers to the frames of the call; the call must not refer to the error for ever."""
    triton = Triton()
    fleet, upstream = await of(triton)
    gc.collect()
    gc.disable()
    try:
        triton.failure = UpstreamError("failed")
        failure = weakref.ref(triton.failure)
        with contextlib.suppress(UpstreamError):
            await kind(upstream)
        triton.failure = None
        await upstream.background.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert failure() is None
    finally:
        gc.enable()
    await fleet.close()


@every_case("kind", [generate, speak])
async def test_a_silent_triton_is_left_where_the_settings_say_so(kind: Kind, clock: Clock) -> None:
    """With ``failover.on_timeout``, generations and speech go to another Triton before their first part."""
    tritons = [Triton(), Triton()]
    fleet, upstream = await of(*tritons, on_timeout=True)
    for triton in tritons:
        triton.silent = True
    first = asyncio.ensure_future(kind(upstream))
    await sent(tritons)
    for triton in tritons:
        triton.silent = triton.requests > 0
    clock.advance(SECONDS)
    await asyncio.wait_for(first, 120)
    assert [1, 1] == [triton.requests for triton in tritons]
    assert unused(fleet)
    await fleet.close()
