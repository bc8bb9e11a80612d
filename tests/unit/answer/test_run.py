"""One run of a generation, in front of a Triton whose moments the test chooses."""

from __future__ import annotations

import asyncio
import threading
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.clock import Clock
from tests.unit.triton.test_catalog import FakeClient
from triton_openai import offload
from triton_openai.adapters._common.base import Adapter, Capabilities, Decoder
from triton_openai.adapters._common.decoding import CumulativeText, TextDecoder
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.run import Run
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.config.tree import FailoverSettings, TritonSettings
from triton_openai.errors import InvalidRequest, ServiceError, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from triton_openai.generation import AnswerState, Delta, FinishReason, Generation, Logits, Sampling, Usage, total_usage
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallTracer
from triton_openai.triton.client import Receiver
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.route import Route
from triton_openai.triton.status import cut_off_error
from triton_openai.triton.tensors import InferRequest, JsonResponse, ModelConfig

TOKENIZER = Tokenizer.load(str(Path(__file__).parents[3] / "triton_openai" / "demo" / "tokenizer"))
BROKEN = "\ufffd"


class Engine:
    """A client and its only stream, which brings what the test says, when the test says so."""

    def __init__(self) -> None:
        self.receiver: Any = None
        self.paused = False
        self.closed: list[bool] = []
        self.orders: list[Any] = []

    def stream(self, request: Any, receiver: Receiver) -> Engine:
        self.receiver = receiver
        return self

    def bring(self, *texts: str) -> None:
        """Let responses arrive together."""
        self.receiver.receive([JsonResponse({"text_output": text}) for text in texts])

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self, *, silent: bool = False) -> None:
        self.closed.append(silent)

    async def infer(self, request: Any) -> Any:
        self.orders.append(request)


class Backend(Adapter):
    """The adapter of a backend that tells neither counts nor reasons, unless the *decoder* makes them up."""

    name = "test"

    def __init__(self, decoder: Decoder, *, returns_whole: bool = False, cause: str | None = None, **able: Any) -> None:
        super().__init__(ModelConfig(name="m", decoupled=not returns_whole), {})
        self.capabilities = Capabilities(streaming=True, **able)
        self.refusal: Exception | None = None
        self._decoder, self._cause = decoder, cause

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        if self.refusal is not None:
            raise self.refusal
        return [InferRequest(model="m", id=generation.id, inputs=(), outputs=(), stream=True)]

    def decoder(self, generation: Generation) -> Decoder:
        return self._decoder

    def no_answer_cause(self, generation: Generation) -> str | None:
        return self._cause

    def cancel(self, generation: Generation) -> InferRequest:
        return InferRequest(model="m", id=generation.id, inputs=(), outputs=())


class Deltas:
    """A decoder that returns *deltas* in order, and raises those that are errors."""

    def __init__(self, *deltas: Delta | Exception) -> None:
        self._deltas: Iterable[Delta | Exception] = iter(deltas)

    def feed(self, response: Any) -> Delta:
        delta = next(iter(self._deltas))
        if isinstance(delta, Exception):
            raise delta
        return delta

    def flush(self) -> str:
        return ""


class Answer:
    """A run in front of an engine, and what it has pushed."""

    def __init__(
        self,
        *,
        decoder: Decoder | None = None,
        tokenizer: Tokenizer | None = None,
        limits: TimeLimits = TimeLimits(first_token=60, idle=60, total=60),  # noqa: B008 - immutable
        sampling: Sampling = Sampling(max_tokens=9),  # noqa: B008 - immutable
        context: int | None = None,
        generation: Mapping[str, Any] = MappingProxyType({}),
        fleet: Fleet | None = None,
        **backend: Any,
    ) -> None:
        self.engine = Engine()
        self.background = Background()
        self.deltas: list[Delta] = []
        self.told = 0
        self.over = asyncio.Event()
        self.backend = Backend(decoder or TextDecoder(), **backend)
        fleet = fleet or Fleet(TritonSettings(), connect=lambda _: self.engine)  # type: ignore[arg-type, return-value]
        self.run = Run(
            Generation(id="1", prompt="Hello", sampling=sampling, **generation),
            adapter=self.backend,
            upstream=UpstreamClient(Route(fleet.leasing, "m"), CallTracer(), self.background),
            time_limits=limits,
            token_limit=TokenLimit(tokens=sampling.max_tokens, context=context),
            tokenizer=tokenizer,
        )
        self.run.start(0, lambda _, deltas: self.deltas.extend(deltas), self.tell)

    def tell(self, _: int) -> None:
        self.told += 1
        self.over.set()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


@pytest.fixture(autouse=True)
def _stop_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_openai.answer.upstream_call._STOP_DELAYS", (0.0, 0.0, 0.0))


async def test_each_token_is_passed_on_at_once() -> None:
    """
    A token is passed on in the call that brings it, without a turn of the event loop; what comes together goes
    together.
    """
    answer = Answer()
    answer.engine.bring("one")
    assert "one" == answer.text
    pushed = len(answer.deltas)
    answer.engine.bring(" two", " three")

    assert ("one two three", 2) == (answer.text, len(answer.deltas) - pushed)
    assert not answer.run.over
    answer.engine.receiver.end(None)
    assert (True, None, 1) == (answer.run.over, answer.run.failure, answer.told)
    answer.run.close()
    await answer.background.close()
    assert (1, [], False) == (answer.told, answer.engine.orders, answer.run.progress.cancelled)


async def test_closed_in_the_middle() -> None:
    """The stream is closed, the engine is told to stop, and nothing is pushed any more."""
    answer = Answer()
    answer.engine.bring("one")
    answer.run.close()
    answer.run.close()
    answer.engine.bring(" two")
    answer.engine.receiver.end(UpstreamError("late"))
    await answer.background.close()

    assert ("one", True, [False]) == (answer.text, answer.run.progress.cancelled, answer.engine.closed)
    assert 1 == len(answer.engine.orders)


async def test_closed_before_the_first_answer() -> None:
    """The engine may get a stop request before the request itself, so there are three, though none is answered."""
    answer = Answer()
    infer = answer.engine.infer

    async def refuse(request: Any) -> Any:
        await infer(request)
        raise UpstreamError("no")

    answer.engine.infer = refuse  # type: ignore[method-assign]
    answer.run.close()
    await answer.background.close()

    assert 3 == len(answer.engine.orders)


async def test_a_request_that_reached_no_model() -> None:
    """There is nothing to stop, unless the answer had begun."""
    for texts, orders in (((), 0), (("one",), 1)):
        answer = Answer()
        if texts:
            answer.engine.bring(*texts)
        answer.engine.receiver.end(UpstreamUnavailable("x"))
        answer.run.close()
        await answer.background.close()

        assert orders == len(answer.engine.orders)
        assert UpstreamUnavailable is type(answer.run.failure)


async def test_a_connection_that_is_lost_before_the_first_answer() -> None:
    """The engine may work on, so it is told to stop."""
    answer = Answer()
    answer.engine.receiver.end(cut_off_error("reset"))
    answer.run.close()
    await answer.background.close()

    assert 3 == len(answer.engine.orders)


class Listed(Engine, FakeClient):  # type: ignore[misc]
    """An engine of a Triton that lists its model."""

    def __init__(self) -> None:
        Engine.__init__(self)
        FakeClient.__init__(self, "m")


async def several(*engines: Listed, **failover: Any) -> Fleet:
    """Return a fleet of *engines* that has looked at their models."""
    tritons = {f"t{place}": engine for place, engine in enumerate(engines)}
    endpoints = tuple([f"{name}=http://{name}:8000" for name in tritons])
    settings = TritonSettings(endpoints=endpoints, failover=FailoverSettings(**failover))
    fleet = Fleet(settings, connect=lambda each: tritons[each.name or ""])  # type: ignore[arg-type, return-value]
    await fleet.refresh()
    return fleet


def running(fleet: Fleet) -> list[int]:
    return sorted(member.targets["m"].running for member in fleet.members.values())


async def test_a_run_that_begins_again() -> None:
    """The first engine is told to stop, a pause holds for the second one, and every lease ends."""
    engines = [Listed(), Listed()]
    fleet = await several(*engines)
    answer = Answer(fleet=fleet)
    first, second = sorted(engines, key=lambda engine: engine.receiver is None)
    assert running(fleet) == [0, 1]
    answer.run.pause()
    first.receiver.end(cut_off_error("reset"))
    assert (False, True, [0, 1]) == (answer.run.over, second.paused, running(fleet))
    answer.run.resume()
    assert not second.paused
    second.bring("one")
    second.receiver.end(None)
    await answer.background.close()

    assert ("one", None, [0, 0]) == (answer.text, answer.run.failure, running(fleet))
    assert (3, 0) == (len(first.orders), len(second.orders))
    answer.run.close()
    assert answer.run.progress.sent is not None
    reference = weakref.ref(answer.run)
    del answer
    first.receiver = second.receiver = None
    assert reference() is None


@every_case("attempts", [1, 2])
async def test_a_triton_that_stops_answering(attempts: int) -> None:
    """What has no token goes on elsewhere, and waits where it may not; no lease is left."""
    engines = [Listed(), Listed()]
    fleet = await several(*engines, attempts=attempts)
    answer = Answer(fleet=fleet)
    first, second = sorted(engines, key=lambda engine: engine.receiver is None)
    first.error = UpstreamTimeout("frozen")
    await fleet.refresh()
    assert (attempts == 2) == (second.receiver is not None)
    assert not answer.run.over
    answer.run.close()
    await answer.background.close()
    assert not [member.leases for member in fleet.members.values() if member.leases]


async def test_a_triton_that_stops_answering_while_logits_are_read() -> None:
    """The answer that begins again is not paused for ever."""
    held = threading.Event()
    others = asyncio.gather(*(offload.run(held.wait, cost=offload.INLINE + 1) for _ in range(8)))
    engines = [Listed(), Listed()]
    fleet = await several(*engines)
    answer = Answer(fleet=fleet, decoder=Scored(WIDE), tokens=True, sampling=Sampling(max_tokens=9, logprobs=1))
    first, second = sorted(engines, key=lambda engine: engine.receiver is None)
    first.bring("1")
    await asyncio.sleep(0)
    first.error = UpstreamTimeout("frozen")
    await fleet.refresh()
    held.set()
    await others
    assert second.receiver is not None
    second.bring("2")
    second.receiver.end(None)
    await asyncio.wait_for(answer.over.wait(), 120)
    assert not second.paused
    assert [2] == [entry.id for delta in answer.deltas for entry in delta.logprobs]
    answer.run.close()


@given(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=6),
    st.text("ab", min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_a_stop_string_however_the_text_is_cut(texts: list[str], stop: str, together: int) -> None:
    """The text ends before it, the backend is stopped at once, and what comes after is not shown."""

    async def show() -> Answer:
        answer = Answer(sampling=Sampling(max_tokens=99, stop=(stop,)))
        for place in range(0, len(texts), together):
            answer.engine.bring(*texts[place : place + together])
        answer.engine.receiver.end(None)
        answer.run.close()
        await answer.background.close()
        return answer

    answer = asyncio.run(show())
    before, found, _ = "".join(texts).partition(stop)

    assert before == answer.text
    progress = answer.run.progress
    assert (stop if found else None) == progress.stop_reason
    assert bool(found) == bool(answer.engine.orders)
    assert 1 == answer.told


@every_case("steps", [0, 1])
async def test_what_goes_wrong_on_the_way(steps: int) -> None:
    """
    A run fails of what goes wrong; a refusal in the middle is not the request's fault; no answer at all is a
    failure.
    """
    for error, expected in (
        (UpstreamError("x"), UpstreamError),
        (InvalidRequest("x"), UpstreamError if steps else InvalidRequest),
        (ValueError("x"), ValueError),
        (None, type(None) if steps else UpstreamError),
    ):
        answer = Answer()
        if steps:
            answer.engine.bring("one")
        answer.engine.receiver.end(error)
        assert expected is type(answer.run.failure)
        assert 1 == answer.told
        known = answer.run.failure if isinstance(answer.run.failure, ServiceError) else None
        assert known is answer.run.progress.error
        answer.run.close()
        await answer.background.close()


async def test_a_decoder_that_fails() -> None:
    """A decoder that fails ends the run and stops the backend, in the same turn."""
    answer = Answer(decoder=Deltas(UpstreamError("no")))
    answer.engine.bring("one")

    assert UpstreamError is type(answer.run.failure)
    assert answer.engine.closed
    answer.engine.bring("two")
    assert (1, "") == (answer.told, answer.text)
    await answer.background.close()


async def test_a_stream_that_falls_silent_ends_with_an_error(clock: Clock) -> None:
    """
    A stream that falls silent ends with an error, whether nothing came or nothing more; a slow client does not end
    it.
    """
    for texts, first in (((), 60), (("one",), 600)):
        answer = Answer(limits=TimeLimits(first_token=first, idle=60, total=None))
        if texts:
            clock.advance(500)
            assert 60 == answer.run.check(clock())
            answer.engine.bring(*texts)
            answer.run.pause()
            assert answer.engine.paused
            clock.advance(1000)
            assert 0 < answer.run.check(clock())
            assert not answer.run.over
            answer.run.resume()
        clock.advance(50)
        assert 10 == answer.run.check(clock())
        assert not answer.run.over
        clock.advance(11)
        answer.run.check(clock())
        assert isinstance(answer.run.failure, UpstreamTimeout)
        assert "upstream_silent" == answer.run.failure.code
        assert [True] == answer.engine.closed[:1]
        await answer.background.close()


async def test_silence_is_told_with_a_likely_cause(clock: Clock) -> None:
    """The adapter's guess is told where nothing has come at all."""
    for texts, told in (
        ((), "sent no answer for 60 seconds. It is too long."),
        (("one",), "sent no further token for 60 seconds."),
    ):
        answer = Answer(limits=TimeLimits(first_token=60, idle=60, total=None), cause="It is too long.")
        answer.engine.bring(*texts)
        clock.advance(61)
        answer.run.check(clock())
        assert str(answer.run.failure).endswith(told)
        await answer.background.close()


@every_case("stop, shown", [("three", 3), ("thr", 3), ("e t", 2), ("o ", 3), ("five", 5)])
@every_case("texts", [["one", " two", " three four", " five"], ["one two three four five"]])
async def test_text_behind_a_stop_string_is_not_counted(texts: list[str], stop: str, shown: int) -> None:
    """Text behind a stop string is not counted, but for the rest of the token in which it ends."""
    answer = Answer(tokenizer=TOKENIZER, sampling=Sampling(max_tokens=50, stop=(stop,)))
    answer.engine.bring(*texts)
    await answer.run.finalize()
    usage = answer.run.progress.usage
    assert usage is not None
    words = ["one", " two", " three", " four", " five"]
    assert sum(map(TOKENIZER.count, words[:shown])) == usage.completion_tokens
    await answer.background.close()


async def test_pauses_are_counted() -> None:
    """Who holds the backend back does not know of others who do."""
    answer = Answer()
    answer.run.pause()
    answer.run.pause()
    answer.run.resume()
    paused = [answer.engine.paused]
    answer.run.resume()
    assert [True, False] == [*paused, answer.engine.paused]
    answer.run.close()
    await answer.background.close()


class Scored:
    """A decoder whose deltas have logits: a row in which the token stands out, for a vocabulary of *width*."""

    def __init__(self, width: int) -> None:
        self.width = width

    def feed(self, response: Any) -> Delta:
        number = int(response.texts("text_output")[0])
        row = array("f", [0.0]) * self.width
        row[number] = 9.0
        logits = Logits(data=row.tobytes(), datatype="FP32", width=self.width)
        return Delta(token_ids=(number,), tokens=1, logits=logits)

    def flush(self) -> str:
        return ""


# Of so many logits, one row is read in a thread.
WIDE = int(offload.INLINE / offload.BYTE) + 1


@every_case("width", [10, WIDE])
async def test_log_probabilities_from_logits(width: int) -> None:
    """
    Log probabilities from logits come in order and before the end, also from a thread; the backend waits meanwhile.
    """
    answer = Answer(decoder=Scored(width), tokens=True, sampling=Sampling(max_tokens=9, logprobs=1), tokenizer=None)
    answer.engine.bring("1", "2", "3")
    answer.engine.bring("4")
    answer.engine.receiver.end(None)
    await asyncio.wait_for(answer.over.wait(), 120)

    assert [1, 2, 3, 4] == [entry.id for delta in answer.deltas for entry in delta.logprobs]
    assert all(entry.rank == 1 for delta in answer.deltas for entry in delta.logprobs)
    assert not answer.engine.paused
    answer.run.close()


async def test_left_while_logits_are_read() -> None:
    """Nothing is pushed any more, and no task is left behind."""
    before = asyncio.all_tasks()
    held = threading.Event()
    others = asyncio.gather(*(offload.run(held.wait, cost=offload.INLINE + 1) for _ in range(8)))
    answer = Answer(decoder=Scored(WIDE), tokens=True, sampling=Sampling(max_tokens=9, logprobs=1))
    answer.engine.bring("1", "2")
    await asyncio.sleep(0)
    answer.run.close()
    held.set()
    await others
    await answer.background.close()
    await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)

    assert not answer.deltas


async def answered(*texts: str, limit: int, tokenizer: Tokenizer | None = TOKENIZER, **decoding: Any) -> AnswerState:
    """Return how an answer of *texts* ended, one response each, whose backend tells neither counts nor reasons."""
    answer = Answer(decoder=TextDecoder(**decoding), tokenizer=tokenizer, sampling=Sampling(max_tokens=limit))
    for text in texts:
        answer.engine.bring(text)
    answer.engine.receiver.end(None)
    await answer.run.finalize()
    answer.run.close()
    return answer.run.progress


@every_case(
    "texts, limit, reason, tokens",
    [
        # Streams: as many responses as the answer may have tokens.
        (["one", " two"], 2, "length", 2),
        (["one", "", " two"], 3, "length", 3),
        (["a", BROKEN, BROKEN], 3, "length", 3),
        # Fewer: a last one without text is the end of the sequence.
        (["one", ""], 2, "stop", 1),
        (["one", " two", ""], 4, "stop", 2),
        (["one", "", " two", ""], 9, "stop", 3),
        (["one", " two"], 9, "stop", 2),
        ([""], 9, "stop", 0),
        # Several tokens in a response: what the text tells.
        (["one two", " three"], 3, "length", 3),
        (["one two", " three", ""], 9, "stop", 3),
        # Text of which tokenizing makes more tokens than there can have been.
        (["x" * 40], 5, "length", 5),
        # Half a character of a stream is at most what was counted.
        (["a", BROKEN], 4, "stop", 2),
        # Whole answers: only what is there tells it.
        (["one two three"], 3, "length", 3),
        (["one two"], 3, "stop", 2),
        ([f"a{BROKEN}"], 4, "length", 4),
        ([f"a{BROKEN}"], 9, "stop", 2),
        (["one"], 1, "length", 1),
    ],
)
async def test_how_an_answer_ended_that_nobody_counted(texts: list[str], limit: int, reason: str, tokens: int) -> None:
    """The responses count it, and else its text; never more tokens than it could have had."""
    run = await answered(*texts, limit=limit)

    assert (reason, tokens) == (run.finish_reason, run.usage and run.usage.completion_tokens)


@every_case(
    "texts, limit, reason",
    [
        (["one", " two", " three", ""], 9, "stop"),
        (["one", " two"], 2, "length"),
        # Not surely the end of the sequence: the limit can have been reached.
        (["one", ""], 2, "length"),
        ([""], 9, "stop"),
        # A whole answer of fewer bytes than tokens it may have has not reached them; of more, it may have.
        (["one two"], 9, "stop"),
        (["one two three"], 9, None),
        (["one two", " three"], 9, "stop"),
        (["日本語"], 9, None),
        (["\ud800"], 9, "stop"),
    ],
)
async def test_how_an_answer_ended_without_a_tokenizer(texts: list[str], limit: int, reason: str | None) -> None:
    """A stream always tells; there is no usage."""
    run = await answered(*texts, limit=limit, tokenizer=None)

    assert (reason, None) == (run.finish_reason, run.usage)


async def test_half_a_character_that_is_held_back_counts() -> None:
    """Text that repeats from its start shows an incomplete character only when nothing follows."""
    run = await answered("a", f"a{BROKEN}", f"a{BROKEN}", limit=3, stage=CumulativeText())

    assert ("length", 3, f"a{BROKEN}") == (run.finish_reason, run.usage and run.usage.completion_tokens, run.text)


@given(st.lists(st.sampled_from(["", "a", " two", BROKEN, "日本"]), min_size=1, max_size=8), st.integers(1, 9))
def test_counts_are_never_beyond_the_limit(texts: list[str], limit: int) -> None:
    """Whatever the text is: neither is an answer at its limit told to have ended by itself."""
    run = asyncio.run(answered(*texts, limit=limit))

    assert run.usage is not None
    assert run.usage.completion_tokens <= limit
    assert (run.finish_reason == "length") == (run.usage.completion_tokens == limit)


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@every_case(
    "first, last, generation, room, expected",
    [
        # (reason, prompt, completion, cached)
        ({}, {"tokens": 8}, {}, None, (LENGTH, 5, 9, None)),
        ({}, {"tokens": 7}, {}, None, (STOP, 5, 8, None)),
        ({}, {"tokens": 8, "finish_reason": STOP}, {}, None, (STOP, 5, 9, None)),
        ({}, {"tokens": 2}, {}, 8, (LENGTH, 5, 3, None)),
        ({}, {"tokens": 8}, {}, 100, (LENGTH, 5, 9, None)),
        ({"cached_tokens": 16}, {"tokens": 7}, {}, None, (STOP, 5, 8, 5)),
        ({"cached_tokens": 4}, {"tokens": 7}, {"prompt_ids": (1, 2)}, None, (STOP, 5, 8, 4)),
        ({"prompt_tokens": None}, {"tokens": 7}, {"prompt_ids": (1, 2), "prompt_tokens": 6}, None, (STOP, 2, 8, None)),
        ({"prompt_tokens": None}, {"tokens": 7}, {"prompt_tokens": 6}, None, (STOP, 6, 8, None)),
        # A step that is not counted leaves all to the text.
        ({"tokens": None}, {"tokens": 7, "finish_reason": STOP}, {}, 7, (STOP, 5, 2, None)),
    ],
)
async def test_what_the_backend_counts(
    first: dict[str, Any], last: dict[str, Any], generation: dict[str, Any], room: int | None, expected: Any
) -> None:
    """What the backend counts stands, and the reason follows from it; the prompt's tokens may be known before."""
    deltas = [Delta(**{"text": "one", "tokens": 1, "prompt_tokens": 5, **first}), Delta(**{"text": " two", **last})]
    answer = Answer(decoder=Deltas(*deltas), tokenizer=TOKENIZER, generation=generation, context=room)
    answer.engine.bring("", "")
    answer.engine.receiver.end(None)
    await answer.run.finalize()
    progress, usage = answer.run.progress, answer.run.progress.usage

    assert usage is not None
    assert expected == (progress.finish_reason, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    assert usage is progress.usage_so_far
    answer.run.close()
    assert not progress.cancelled


@every_case("reason, ids, expected", [(STOP, (8, 7), 7), (STOP, (7, 8), None), (LENGTH, (7,), None), (STOP, (), None)])
def test_the_stop_token(reason: FinishReason, ids: tuple[int, ...], expected: int | None) -> None:
    """The stop token is the last one, of those that were asked for; what later steps leave out stays known."""
    progress = AnswerState(Generation(id="1", prompt="Hello", sampling=Sampling(max_tokens=9, stop_token_ids=(7,))))
    progress.now = 2.5
    progress.add(Delta(text="one", tokens=2, prompt_tokens=5, cumulative_logprob=-1.5))
    assert Usage(prompt_tokens=5, completion_tokens=2) == progress.usage_so_far
    progress.add(Delta(token_ids=ids, finish_reason=reason))
    progress.add(Delta(tokens=1))

    assert (reason, expected, -1.5) == (progress.finish_reason, progress.stop_reason, progress.cumulative_logprob)
    assert (["one"], [2.5]) == (progress.pieces, list(progress.arrivals))
    # A step that is not counted
    assert progress.tokens is None


@every_case(
    "generation, prompt", [({}, 2), ({"prompt_tokens": 6}, 6), ({"prompt_tokens": 6, "prompt_ids": (1, 2, 3)}, 3)]
)
def test_estimates(generation: dict[str, Any], prompt: int) -> None:
    """What is known counts, and texts for the rest."""
    progress = AnswerState(Generation(id="1", prompt="Hello", sampling=Sampling(max_tokens=9), **generation))
    assert progress.usage_so_far is None
    progress.add(Delta(text="one two three", tokens=3))
    assert Usage(prompt_tokens=prompt, completion_tokens=3) == progress.usage_estimate
    progress.add(Delta(text="four"))
    assert Usage(prompt_tokens=prompt, completion_tokens=5) == progress.usage_estimate


async def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A run knows when what came, and how long the silence may be: from the last response, or from the end of a pause.
    """
    now = 100.0
    for module in ("run", "upstream_call"):
        monkeypatch.setattr(f"triton_openai.answer.{module}.monotonic", lambda: now)
    answer = Answer(limits=TimeLimits(first_token=10, idle=5, total=60))
    run, progress = answer.run, answer.run.progress
    checks = [run.check(now)]
    for now in (109.0, 112.0):  # noqa: B007 - the run reads it
        answer.engine.bring("one")
    checks += [run.check(113)]
    run.pause()
    checks += [run.check(200)]
    now = 200.0
    run.resume()
    checks += [run.check(203)]
    assert ([5, 4, 5, 2], False) == (checks, run.over)
    now = 205.0
    checks = [run.check(205), run.check(300)]

    assert ([5, 5], 1, UpstreamTimeout) == (checks, answer.told, type(run.failure))
    assert (100, 109, 205) == (progress.sent, progress.first, progress.ended)
    await answer.background.close()


@every_case("returns_whole, total, over", [(True, 60, False), (False, 60, True), (True, None, True)])
async def test_silence_before_an_answer_that_comes_as_a_whole(
    returns_whole: bool, total: float | None, over: bool, clock: Clock
) -> None:
    """Silence before an answer that comes as a whole is no fault if the whole answer has a limit."""
    answer = Answer(returns_whole=returns_whole, limits=TimeLimits(first_token=10, idle=5, total=total))
    clock.advance(11)
    answer.run.check(clock())

    assert over is answer.run.over
    answer.run.close()
    await answer.background.close()


async def test_no_tokens() -> None:
    """Nothing is sent for them."""
    answer = Answer(sampling=Sampling(max_tokens=0))

    assert (None, True, 1) == (answer.engine.receiver, answer.run.over, answer.told)


async def test_what_cannot_be_sent() -> None:
    """The record has the error."""
    answer = Answer()
    answer.backend.refusal = refused = InvalidRequest("x")
    with pytest.raises(InvalidRequest):
        answer.run.start(0, lambda *_: None, answer.tell)

    assert refused is answer.run.progress.error


@every_case("wanted, shown", [(True, 2), (False, 1)])
async def test_ids_without_text(wanted: bool, shown: int) -> None:
    """Ids without text are shown where they are wanted."""
    deltas = [Delta(token_ids=(1,), tokens=1), Delta(text="one", token_ids=(2,), tokens=1)]
    answer = Answer(decoder=Deltas(*deltas), generation={"token_ids": wanted})
    answer.engine.bring("", "")

    assert shown == len(answer.deltas)
    answer.run.close()
    await answer.background.close()


def test_the_usage_of_several_answers() -> None:
    """A prompt counts once for its answers; what one of them does not tell is not known."""
    cached, silent = (Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=tokens) for tokens in (4, None))
    assert Usage(prompt_tokens=10, completion_tokens=8, cached_tokens=8) == total_usage([cached] * 4, n=2)
    assert Usage(prompt_tokens=10, completion_tokens=4) == total_usage([cached, silent])
    assert None is total_usage([cached, None])
