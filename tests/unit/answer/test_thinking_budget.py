"""An answer whose thinking has a budget, in front of an engine whose moments the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.clock import Clock
from tests.unit.answer.test_run import TOKENIZER, Backend, Deltas, Engine, Listed, several
from triton_openai.answer.budgeted_run import BudgetedRun
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.thinking_budget import ThinkingBudget, ThinkingStage
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.config.tree import TritonSettings
from triton_openai.errors import UpstreamError, UpstreamUnavailable
from triton_openai.generation import Delta, FinishReason, Generation, Sampling
from triton_openai.parsers.reasoning import Think
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallTracer
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.route import Route
from triton_openai.triton.tensors import InferRequest

ENDING = Think.ending(calls=False)
ENDING_IDS = tuple(TOKENIZER.encode(ENDING))


class Recording(Backend):
    """A backend that keeps the generations that it was asked for."""

    def __init__(self, *answers: Sequence[Delta]) -> None:
        super().__init__(Deltas())
        self.asked: list[Generation] = []
        self._answers = iter(answers)

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        self.asked.append(generation)
        return super().encode(generation)

    def decoder(self, generation: Generation) -> Any:
        return Deltas(*next(self._answers))


class Thinking:
    """A run with a budget of thinking; the engine's answers are *answers*, each in these deltas."""

    def __init__(
        self,
        tokens: int,
        *answers: Sequence[Delta],
        prompt: str = "Hello",
        tokenizer: Tokenizer | None = TOKENIZER,
        limits: TimeLimits = TimeLimits(first_token=600, idle=60, total=None),  # noqa: B008 - immutable
        fleet: Fleet | None = None,
        **sampling: Any,
    ) -> None:
        sampling = {"max_tokens": 500, **sampling}
        self.engine = Engine()
        self.background = Background()
        self.backend = Recording(*answers)
        self.deltas: list[Delta] = []
        self.ends = 0
        fleet = fleet or Fleet(TritonSettings(), connect=lambda _: self.engine)  # type: ignore[arg-type, return-value]
        budget = ThinkingBudget(
            tokens=tokens,
            meter=partial(Think.meter, calls=("<tool_call>",)),
            ending=ENDING,
            ending_ids=ENDING_IDS if tokenizer is not None else (),
        )
        self.run = BudgetedRun(
            Generation(id="1", prompt=prompt, sampling=Sampling(**sampling)),
            budget=budget,
            adapter=self.backend,
            upstream=UpstreamClient(Route(fleet.leasing, "m"), CallTracer(), self.background),
            time_limits=limits,
            token_limit=TokenLimit(tokens=sampling["max_tokens"]),
            tokenizer=tokenizer,
        )
        self.run.start(0, lambda _, deltas: self.deltas.extend(deltas), self._end)

    def _end(self, _: int) -> None:
        self.ends += 1

    def bring(self, count: int, *, end: bool = False) -> None:
        """Let responses arrive, each alone, as long as the request is the same."""
        receiver = self.engine
        asked = len(self.backend.asked)
        for _ in range(count):
            if self.run.over or len(self.backend.asked) > asked:
                return
            receiver.bring("")
        if end and not self.run.over and len(self.backend.asked) == asked:
            receiver.receiver.end(None)

    @property
    def text(self) -> str:
        return "".join([delta.text for delta in self.deltas])

    async def close(self) -> None:
        self.run.close()
        await self.background.close()


def pieces_of(text: str, sizes: Sequence[int]) -> list[Delta]:
    """Return deltas of *text* whose numbers of tokens are *sizes*, in turns."""
    ids = TOKENIZER.encode(text)
    deltas: list[Delta] = []
    at = 0
    while at < len(ids):
        size = sizes[len(deltas) % len(sizes)]
        own = ids[at : at + size]
        deltas.append(Delta(TOKENIZER.decode(own, skip_special_tokens=False), tokens=len(own)))
        at += size
    return deltas


@given(st.integers(0, 45), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_a_budget_however_the_text_is_cut(tokens: int, sizes: list[int], opened: bool, last: bool) -> None:
    """The thinking ends after the same token, whatever tokens come together; the second request goes on from there."""
    thought = "First we look at it, and then we look again, and again, and so on until we are tired of that."
    text = f"{'' if opened else '<think>'}{thought}</think>Yes."
    prompt = "Hello<think>" if opened else "Hello"

    async def show(own: Sequence[int]) -> Thinking:
        deltas = pieces_of(text, own)
        if last:
            deltas[-1].finish_reason = FinishReason.STOP
        answer = Thinking(tokens, deltas, [Delta("Yes.", tokens=2, finish_reason=FinishReason.STOP)], prompt=prompt)
        answer.bring(len(deltas), end=True)
        if len(answer.backend.asked) > 1:
            answer.bring(1, end=True)
        await answer.run.finalize()
        await answer.close()
        return answer

    single = asyncio.run(show([1]))
    cut = asyncio.run(show(sizes))
    inner = "" if opened else "<think>"
    ids = TOKENIZER.encode(thought)
    if tokens >= len(ids) + 4:
        assert (text, 1) == (single.text, len(single.backend.asked))
    if tokens < len(ids):
        expected = inner + TOKENIZER.decode(ids[:tokens]) + ENDING + "Yes."
        assert expected == single.text == cut.text
        for answer in (single, cut):
            last_asked = answer.backend.asked[-1]
            assert prompt + expected.removesuffix("Yes.") == last_asked.prompt
            usage = answer.run.progress.usage
            assert usage is not None
            before = len(TOKENIZER.encode(inner)) + tokens + len(ENDING_IDS)
            assert before + 2 == usage.completion_tokens
            assert 500 - before == last_asked.sampling.max_tokens
            assert (FinishReason.STOP, 1) == (answer.run.progress.finish_reason, answer.ends)


async def test_the_engine_is_stopped_and_asked_once_more() -> None:
    """The first stream is closed in the turn of the token that spends the budget, and the second has another id."""
    answer = Thinking(2, pieces_of("<think>one two three four", [1]), [Delta("Yes.", tokens=1)])
    answer.bring(99)
    assert ([False], 2) == (answer.engine.closed, len(answer.backend.asked))
    assert ["1", "1-answer"] == [generation.id for generation in answer.backend.asked]
    assert not answer.run.over
    answer.run.pause()
    assert answer.engine.paused
    answer.run.resume()
    answer.engine.bring("")
    answer.engine.receiver.end(None)
    assert (1, None) == (answer.ends, answer.run.failure)
    assert answer.text.endswith(ENDING + "Yes.")
    await answer.close()
    assert not answer.run.progress.cancelled


@every_case("error", [UpstreamError("x"), UpstreamUnavailable("x")])
async def test_a_second_request_that_fails(error: Exception) -> None:
    """It ends the answer, once, with its error."""
    answer = Thinking(2, pieces_of("<think>one two three four", [1]), [])
    answer.bring(99)
    answer.engine.receiver.end(error)
    assert (1, error) == (answer.ends, answer.run.failure)
    await answer.close()


async def test_a_second_request_that_cannot_be_sent() -> None:
    """Neither does what the adapter refuses leave the client waiting."""
    answer = Thinking(2, pieces_of("<think>one two three four", [1]), [])
    answer.backend.refusal = UpstreamError("no")
    answer.bring(99)
    assert (1, answer.backend.refusal) == (answer.ends, answer.run.failure)
    await answer.close()


async def test_closed_between_the_two() -> None:
    """A client that leaves ends the second request."""
    answer = Thinking(2, pieces_of("<think>one two three four", [1]), [Delta("Yes.", tokens=1)])
    answer.bring(99)
    answer.run.close()
    assert [False, False] == answer.engine.closed
    assert answer.run.progress.cancelled
    await answer.close()


async def test_a_call_in_the_thinking_is_not_cut() -> None:
    """What opens a call ends the thinking."""
    answer = Thinking(3, pieces_of("<think>one <tool_call>two three four five six seven", [1]))
    answer.bring(99, end=True)
    assert 1 == len(answer.backend.asked)
    await answer.close()


@every_case("prompt, requests", [("Hello<think>", 1), ("Hello", 2)])
async def test_no_thinking_at_all(prompt: str, requests: int) -> None:
    """A budget of nothing ends thinking that the prompt opened before anything is asked."""
    answer = Thinking(0, pieces_of("<think>one two", [1]), [Delta("Yes.", tokens=1)], prompt=prompt)
    answer.bring(99, end=False)
    assert requests == len(answer.backend.asked)
    assert answer.backend.asked[-1].prompt.endswith(ENDING)
    await answer.close()


async def test_silence_after_the_thinking(clock: Clock) -> None:
    """The second request has the time of a first token until its own first token, and then that between tokens."""
    answer = Thinking(2, pieces_of("<think>one two three four", [1]), [Delta("a", tokens=1), Delta("b", tokens=1)])
    answer.bring(99)
    clock.advance(550)
    assert 50 == answer.run.check(clock())
    answer.engine.bring("")
    clock.advance(50)
    assert 10 == answer.run.check(clock())
    assert not answer.run.over
    await answer.close()


async def test_a_backend_that_counts_nothing() -> None:
    """Without counts and without a tokenizer, each response is a token."""
    deltas = [Delta(text) for text in ("<think>", "a", " b", " c", " d")]
    answer = Thinking(2, deltas, [Delta("Yes.")], tokenizer=None)
    answer.bring(9)
    assert "<think>a b" + ENDING == answer.text
    assert 500 - 3 == answer.backend.asked[-1].sampling.max_tokens
    await answer.close()


async def test_an_answer_after_no_thinking_at_all() -> None:
    """Where the prompt opened thinking that has no tokens, the whole answer is that of the only request."""
    said = pieces_of("Yes, of course it is.", [1])
    said[0].prompt_tokens = 50
    said[-1].finish_reason = FinishReason.STOP
    answer = Thinking(0, [], said, prompt="Hello<think>")
    answer.bring(len(said), end=True)
    await answer.run.finalize()
    progress = answer.run.progress
    await answer.close()

    assert ENDING + "Yes, of course it is." == answer.text
    assert FinishReason.STOP == progress.finish_reason
    assert progress.usage is not None
    assert len(said) + len(ENDING_IDS) == progress.usage.completion_tokens
    # The end of the thinking is in the prompt that the backend counted.
    assert 50 - len(ENDING_IDS) == progress.usage.prompt_tokens
    # Nothing arrived with the end of the thinking.
    assert len(said) == len(progress.arrivals)


async def test_no_thinking_and_no_room() -> None:
    """Where not even the end of the thinking has room, nothing is asked."""
    answer = Thinking(0, pieces_of("one two", [1]), prompt="Hello<think>", max_tokens=len(ENDING_IDS))
    assert (1, []) == (answer.ends, answer.backend.asked)
    await answer.run.finalize()
    assert FinishReason.LENGTH == answer.run.progress.finish_reason
    await answer.close()


async def test_an_answer_that_comes_whole_and_counts_nothing() -> None:
    """What is kept of it counts to the limit, and not as one token."""
    answer = Thinking(20, [Delta("<think>" + "one two " * 60, finish_reason=FinishReason.LENGTH)], [Delta("Yes.")])
    answer.bring(1)
    kept = answer.text.removesuffix(ENDING)
    expected = 500 - len(ENDING_IDS) - len(TOKENIZER.encode(kept))

    assert abs(answer.backend.asked[-1].sampling.max_tokens - expected) <= 1
    await answer.close()


async def test_a_second_request_without_an_answer() -> None:
    """It is an error, as for the first."""
    answer = Thinking(2, pieces_of("<think>one two three four", [1]), [])
    answer.bring(99)
    answer.engine.receiver.end(None)
    assert isinstance(answer.run.failure, UpstreamError)
    assert "without an answer" in answer.run.failure.message
    await answer.close()


async def test_a_second_request_that_another_triton_gets() -> None:
    """Until its first response it is sent elsewhere, as the first request is, and never after that."""
    engines = [Listed(), Listed()]
    fleet = await several(*engines)
    deltas = pieces_of("<think>one two three four", [1])
    answer = Thinking(2, deltas, [], [Delta("Yes.", tokens=1)], fleet=fleet)
    first, other = sorted(engines, key=lambda engine: engine.receiver is None)
    while len(answer.backend.asked) < 2:
        first.bring("")
    asked = first
    if other.receiver is not None:
        asked, other = other, first
    asked.receiver.end(UpstreamUnavailable("x"))
    assert ["1", "1-answer", "1-answer"] == [generation.id for generation in answer.backend.asked]
    other.bring("")
    assert answer.text.endswith(ENDING + "Yes.")
    other.receiver.end(UpstreamUnavailable("y"))
    assert (1, 3) == (answer.ends, len(answer.backend.asked))
    assert "y" == getattr(answer.run.failure, "message", None)
    assert not [member.leases for member in fleet.members.values() if member.leases]
    await answer.close()


class Counting:
    """A tokenizer that records the length of the longest text that it gets."""

    def __init__(self) -> None:
        self.longest = 0

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode(self, text: str) -> Sequence[int]:
        self.longest = max(self.longest, len(text))
        return TOKENIZER.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


@every_case("tokens", [None, 30_000])
def test_a_long_answer_that_comes_whole(tokens: int | None) -> None:
    """The event loop tokenizes a part of it, or nothing: of a large budget its share of the text is enough."""
    for budget in (100, 20_000):
        counting = Counting()
        own = ThinkingBudget(tokens=budget, meter=partial(Think.meter, calls=()), ending=ENDING)
        stage = ThinkingStage(own, "Hello<think>", counting)  # type: ignore[arg-type]
        delta = Delta("one two three " * 9000, tokens=tokens)
        stage.feed(delta)
        assert stage.spent
        assert counting.longest < 40_000
        assert budget * 3 < len(delta.text) < budget * 7
