"""Texts in pieces that a model can speak, and their answers, which wait for a client that reads slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.unit.triton.test_catalog import FakeClient
from triton_openai.adapters._common.base import Synthesis
from triton_openai.answer.speech import _length, _PieceCall, longest_piece, pieces
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.config.tree import TritonSettings
from triton_openai.errors import InvalidRequest, ServiceError, UpstreamError, UpstreamTimeout, UpstreamUnavailable
from triton_openai.jobs import Voice
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallOutcome, CallTracer, Destination, Request
from triton_openai.triton.client import Receiver, TritonClient
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.route import Route
from triton_openai.triton.status import cut_off_error
from triton_openai.triton.tensors import InferRequest, JsonResponse

SENTENCES = [
    "Dr. Smith met Mr. J. Doe at 3.5 p.m. in Rome.",
    '"Really?" he asked.',
    "Yes!",
    "He did... It ended there.",
]


@every_case(
    "text, longest, streams, expected",
    [
        (" ".join(SENTENCES), 1000, True, [" ".join(SENTENCES)]),
        (" ".join(SENTENCES), 1000, False, [SENTENCES[0], " ".join(SENTENCES[1:])]),
        (" ".join(SENTENCES), 50, True, [SENTENCES[0], " ".join(SENTENCES[1:])]),
        ("One. Two. Three. Four is longer than that. Five.", 1000, False,
         ["One. Two. Three.", "Four is longer than that. Five."]),
        ("\u4f60\u597d\u3002\u4eca\u5929\u5f88\u597d\uff01\u8d70\u3002", 13, True,
         ["\u4f60\u597d\u3002", "\u4eca\u5929\u5f88\u597d\uff01", "\u8d70\u3002"]),
        ("A title\nand a line", 12, True, ["A title", "and a line"]),
        ("one, two; three: four five", 11, True, ["one, two;", "three:", "four five"]),
        ("x" * 20, 12, True, ["x" * 12, "x" * 8]),
        ("At 3 p.m.   we left. Then", 21, True, ["At 3 p.m.   we left.", "Then"]),
        ("At 3 p.m.  we go", 15, True, ["At 3 p.m.  we", "go"]),
        (" \n\t ", 100, False, []),
        # A short first sentence waits for the next one, or for its first clauses, if these are not long.
        ("Hello. How are you today? I am well.", 1000, False, ["Hello. How are you today?", "I am well."]),
        ("Hello. The quick brown fox jumps over the lazy dog, and then over all of the others. End.", 1000, False,
         ["Hello. The quick brown fox jumps over the lazy dog,", "and then over all of the others. End."]),
        (f"Hello. {'The quick brown fox ' * 4}jumps. End.", 1000, False,
         ["Hello.", f"{'The quick brown fox ' * 4}jumps.", "End."]),
        ("Hello. How are you today?", 24, False, ["Hello.", "How are you today?"]),
        ("Hello. How are you today?", 1000, True, ["Hello. How are you today?"]),
        ("Hello.", 1000, False, ["Hello."]),
    ],
)  # fmt: skip
def test_pieces(text: str, longest: int, streams: bool, expected: Sequence[str]) -> None:
    """Sentences stay whole where they can; else a clause, a word, or the longest that can be spoken ends a piece."""
    assert expected == pieces(text, longest, streams=streams)


@given(st.text(st.sampled_from("ab .,!?\n;\u4f60\u3002A\"'"), max_size=200), st.integers(3, 80), st.booleans())
def test_nothing_is_left_out(text: str, longest: int, streams: bool) -> None:
    """Whatever the text, its pieces have all of it and are no longer than the limit."""
    found = pieces(text, longest, streams=streams)

    assert "".join(text.split()) == "".join("".join(found).split())
    assert all(piece.strip() == piece and 0 < _length(piece) <= longest for piece in found)


def test_longest_piece() -> None:
    """The recording shows how fast a voice speaks, and counts where the longest output includes it."""
    voice = Voice(name="ada", text="\u4f60\u597d" + "a" * 34, seconds=4.0)
    assert 300 == longest_piece(Synthesis(rate=24_000, max_seconds=20), None)
    assert 200 == longest_piece(Synthesis(rate=24_000, max_seconds=20), voice)
    assert 160 == longest_piece(Synthesis(rate=24_000, max_seconds=20, with_reference=True), voice)


class FakeStream:
    """Notes what happens to the stream of a request."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def stream(self, request: InferRequest, receiver: Receiver) -> FakeStream:
        """Return itself as the stream."""
        return self

    def pause(self) -> None:
        """Note it."""
        self.calls.append("pause")

    def resume(self) -> None:
        """Note it."""
        self.calls.append("resume")

    def close(self, *, silent: bool = False) -> None:
        """Note it."""
        self.calls.append("close silently" if silent else "close")


def answers_of(stream: FakeStream, ended: Callable[[], None] = lambda: None) -> _PieceCall:
    """Return the answers to a request that *stream* takes."""
    fleet = Fleet(TritonSettings(), connect=lambda _: cast(TritonClient, stream))
    upstream = UpstreamClient(Route(fleet.leasing, "tts"), CallTracer(), Background())
    return _PieceCall(upstream, InferRequest(model="tts", id="1", inputs=(), stream=True), ended)


async def test_a_slow_client_pauses_the_model() -> None:
    """A few parts wait; with more, the model pauses until all of them were taken."""
    stream = FakeStream()
    answers = answers_of(stream)
    given: list[Any] = [JsonResponse({"audio": [number]}) for number in range(6)]
    answers.receive(given[:4])
    assert [] == stream.calls
    answers.receive(given[4:])
    answers.receive(given[:1])
    assert ["pause"] == stream.calls
    assert [*given, given[0]] == [await answers.next(1) for _ in range(7)]
    waiting = asyncio.ensure_future(answers.next(1))
    await asyncio.sleep(0)
    assert ["pause", "resume"] == stream.calls
    answers.end(None)
    assert await waiting is None
    answers.close()


@every_case(
    "parts, error, expected, message",
    [
        (0, None, UpstreamError, "ended without an answer"),
        (1, InvalidRequest("A bad text."), UpstreamError, "A bad text"),
        (0, InvalidRequest("A bad text."), InvalidRequest, "A bad text"),
        (1, UpstreamError("Gone."), UpstreamError, "Gone"),
    ],
)
async def test_ends(parts: int, error: ServiceError | None, expected: type[ServiceError], message: str) -> None:
    """What came before an error is spoken first; a model that has begun had accepted the text."""
    ended: list[bool] = []
    answers = answers_of(FakeStream(), lambda: ended.append(True))
    given: list[Any] = [JsonResponse({})] * parts
    if given:
        answers.receive(given)
    answers.end(error)
    assert given == [await answers.next(1) for _ in given]
    with pytest.raises(expected, match=message):
        await answers.next(1)
    assert [] == ended
    answers.close()


class Watched(CallTracer):
    """Keeps the outcomes of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[CallOutcome] = []

    def begin(self, request: Request, outcome: CallOutcome, to: Destination, *, lora: str | None = None) -> Request:
        """Keep the outcome."""
        self.outcomes.append(outcome)
        return request


async def test_a_request_that_cannot_be_sent() -> None:
    """Nothing stays of it: the call has ended with the error."""

    class Broken(FakeStream):
        def stream(self, request: InferRequest, receiver: Receiver) -> FakeStream:
            raise UpstreamError("Not now.")

    watched = Watched()
    fleet = Fleet(TritonSettings(), connect=lambda _: cast(TritonClient, Broken()))
    upstream = UpstreamClient(Route(fleet.leasing, "tts"), watched, Background())
    with pytest.raises(UpstreamError) as caught:
        _PieceCall(upstream, InferRequest(model="tts", id="1", inputs=(), stream=True), lambda: None)
    (outcome,) = watched.outcomes
    assert outcome.error is caught.value
    assert outcome.ended is not None


async def test_silence() -> None:
    """A model that falls silent is not waited for any longer, and its connection is not used again."""
    stream = FakeStream()
    answers = answers_of(stream)
    with pytest.raises(UpstreamTimeout, match="no audio"):
        await answers.next(0.001)
    assert "close silently" in stream.calls
    answers.close()


class Speaker(FakeClient):
    """A Triton that notes who waits for its answers."""

    def __init__(self) -> None:
        super().__init__("tts")
        self.receivers: list[Receiver] = []

    def stream(self, request: InferRequest, receiver: Receiver) -> Any:
        """Note the receiver."""
        self.receivers.append(receiver)
        return FakeStream()


async def test_a_text_goes_to_another_triton_before_its_first_part() -> None:
    """It is not lost with its Triton; what has begun is."""
    tritons = {name: Speaker() for name in "abc"}
    settings = TritonSettings(endpoints=tuple(f"{name}=http://{name}:8000" for name in tritons))
    fleet = Fleet(settings, connect=lambda each: cast(TritonClient, tritons[each.name or ""]))
    await fleet.refresh()
    upstream = UpstreamClient(Route(fleet.leasing, "tts"), CallTracer(), Background())
    answers = _PieceCall(upstream, InferRequest(model="tts", id="1", inputs=(), stream=True), lambda: None)
    (first,) = (one for one in tritons.values() if one.receivers)
    first.receivers[0].end(UpstreamUnavailable("refused"))
    (second,) = (one for one in tritons.values() if one.receivers and one is not first)
    second.error = UpstreamTimeout("frozen")
    await fleet.refresh()
    (third,) = (one for one in tritons.values() if one.receivers and one not in (first, second))
    part: Any = JsonResponse({})
    third.receivers[0].receive([part])
    assert part is await answers.next(1)
    third.receivers[0].end(cut_off_error("reset"))
    with pytest.raises(UpstreamError, match="lost"):
        await answers.next(1)
    assert not any(member.leases for member in fleet.members.values())
    answers.close()
    await fleet.close()
