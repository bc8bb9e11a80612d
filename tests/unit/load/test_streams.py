"""The load generator against servers that behave in several ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases import every_case
from tests.chat_server import HELLO
from tests.clock import Clock
from triton_openai.load import streams
from triton_openai.load.events import EventReader
from triton_openai.load.streams import Target, run_streams
from triton_openai.load.tally import Outcome, Plan, Tally

_ANSWER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%s\r\n" % (len(part), part) for part in HELLO
)
_END = b"0\r\n\r\n"
_BUSY = b"HTTP/1.1 429 Busy\r\nContent-Length: 4\r\n\r\nbusy"

#: Answers the request with this number; returns the bytes and whether to close the connection.
Behaviour = Callable[[int], tuple[bytes, bool]]


def measured(behaviour: Behaviour, plan: Plan, **target: Any) -> tuple[Outcome, int]:
    """Return what the generator measures of a server with *behaviour*, and how many requests that got."""
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                requests += 1
                answer, closes = behaviour(requests)
                writer.write(answer)
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> Outcome:
        outcome = Outcome()
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            where = Target(
                host="127.0.0.1",
                port=server.sockets[0].getsockname()[1],
                request=lambda: b"POST / HTTP/1.1\r\n\r\n",
                reader=EventReader,
                **target,
            )
            await run_streams(where, plan, Tally(plan, outcome))
        return outcome

    return asyncio.run(run()), requests


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PAUSE_SECONDS", 0.0)


def test_answers_on_one_connection() -> None:
    """Each answer counts once, with the time of its first token and of its end."""
    outcome, requests = measured(lambda _: (_ANSWER + _END, False), Plan(streams=2, answers=6))

    assert (6, 12, [], 6) == (outcome.answers, outcome.tokens, outcome.errors, requests)
    assert (6, 6) == (len(outcome.first), len(outcome.whole))
    assert all(0 < first <= whole for first, whole in zip(outcome.first, outcome.whole, strict=True))


def test_a_server_that_closes_after_each_answer() -> None:
    """A connection that ends with its answer is no failure, where that is allowed."""
    plan = Plan(streams=2, answers=6, max_errors=100)
    outcome, requests = measured(lambda _: (_ANSWER + _END, True), plan, reconnects=True)
    assert (6, [], 6) == (outcome.answers, outcome.errors, requests)

    outcome, _ = measured(lambda _: (_ANSWER + _END, True), Plan(streams=1, answers=6))
    assert (1, 1) == (outcome.answers, len(outcome.errors))


@every_case(
    "answer, closes, error",
    [
        (b"", True, "connection lost: the server closed it"),
        (_ANSWER, True, "connection lost"),
        (_BUSY, False, "refused: HTTP 429: busy"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", False, "an answer without a token"),
        (_ANSWER, False, "no complete answer within 60 s"),
    ],
)
def test_requests_that_fail(answer: bytes, closes: bool, error: str, clock: Clock) -> None:
    """A request that fails is counted, and the measurement goes on with the next one, up to the number asked for."""
    plan = Plan(streams=1, answers=3, max_errors=100)

    def behaviour(_: int) -> tuple[bytes, bool]:
        if "within" in error:
            # The request has come, and its time is over.
            clock.advance(61)
        return answer, closes

    outcome, requests = measured(behaviour, plan, reconnects=True, timeout=60.0)

    assert (0, 3, 3) == (outcome.answers, len(outcome.errors), requests)
    assert all(error in one for one in outcome.errors)


def test_some_requests_fail() -> None:
    """The answers that come are measured."""
    plan = Plan(streams=1, answers=4, max_errors=100)
    outcome, _ = measured(lambda number: ((_ANSWER + _END, False), (_BUSY, False))[number % 2], plan)

    assert (2, 2, 4) == (outcome.answers, len(outcome.errors), outcome.tokens)


def test_the_first_failure_ends_it() -> None:
    """Without an allowance, one failure is the end."""
    outcome, requests = measured(lambda _: (_BUSY, False), Plan(streams=1, answers=4))

    assert (1, 1) == (len(outcome.errors), requests)


def test_no_server() -> None:
    """Nobody listens: each request fails, and the measurement ends."""
    plan = Plan(streams=1, answers=2, max_errors=100)
    outcome = Outcome()
    target = Target(host="127.0.0.1", port=1, request=lambda: b"", reader=EventReader)
    asyncio.run(run_streams(target, plan, Tally(plan, outcome)))

    assert 2 == len(outcome.errors)
    assert all("no connection" in error for error in outcome.errors)


def test_a_window_of_time() -> None:
    """A window opens after the first token of every stream; what came before does not count."""
    plan = Plan(streams=2, seconds=0.05, settled=True, limit=120)
    outcome, requests = measured(lambda _: (_ANSWER + _END, False), plan)

    assert outcome.answers < requests
    assert abs(outcome.tokens - 2 * outcome.answers) <= 4
