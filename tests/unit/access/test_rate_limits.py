"""Rate limits: they hold in every minute, and what ends makes room. For several workers see serving/test_shared.py."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_openai.access.rate_limits import Account, RateLimit, RateLimits, Reservation


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> RateLimits:
    """Nothing counted yet."""
    return RateLimits(clock)


def admit(limits: RateLimits, name: str, limit: RateLimit) -> Reservation:
    """Ask for a request of the key *name*."""
    return Reservation(limits, name, limit, limits.decide(name, limit))


# Moves of the clock: bursts, rests, and what falls on the edges of ticks and minutes.
steps = st.lists(st.sampled_from([0.0, 0.001, 0.5, 0.749, 0.75, 1.0, 7.3, 29.9, 59.25, 60.0, 61.0]), max_size=120)


@settings(deadline=None)
@given(steps=steps, limit=st.integers(1, 7))
def test_never_more_than_the_limit_in_any_minute(steps: list[float], limit: int) -> None:
    """Wherever a minute begins; and who waits for as long as it is told to is let in, and not before."""
    clock = Clock()
    limits = RateLimits(clock)
    allowed = RateLimit(requests_per_minute=limit)
    admitted: list[float] = []
    for step in steps:
        clock.now += step
        decision = limits.decide("a", allowed)
        if decision.refusal is None:
            admitted.append(clock.now)
            left = limit - sum(time > clock.now - 60 for time in admitted)
            assert int(decision.headers["x-ratelimit-remaining-requests"]) <= left
        else:
            assert limit <= sum(time > clock.now - 61 for time in admitted)
            clock.now += decision.refusal.wait
            # The wait that a client is told is a minute at most, and a tick more can be left of it.
            if limits.decide("a", allowed).refusal is not None:
                assert 60 == decision.refusal.wait
                clock.now += 1
                assert limits.decide("a", allowed).refusal is None
            admitted.append(clock.now)

    for end in admitted:
        assert sum(end - 60 < time <= end for time in admitted) <= limit


def test_tokens_are_charged_when_they_are_known(limits: RateLimits, clock: Clock) -> None:
    """A request may go beyond the limit, and the next ones wait until the minute has room again."""
    limit = RateLimit(tokens_per_minute=100)
    first, second = admit(limits, "a", limit), admit(limits, "a", limit)
    assert "100" == second.headers["x-ratelimit-remaining-tokens"]
    first.close(70)
    clock.now += 10
    second.close(70)
    # Closing twice counts once.
    second.close(70)

    refused = admit(limits, "a", limit)
    assert refused.refusal is not None
    assert {"type": "tokens", "code": "rate_limit_exceeded", "param": None} == {
        name: value for name, value in refused.refusal.body().items() if name != "message"
    }
    assert "0" == refused.headers["x-ratelimit-remaining-tokens"]
    # The first 70 go a minute after they came, within a tick.
    assert {"Retry-After": "51"} == dict(refused.refusal.headers())
    assert "51s" == refused.headers["x-ratelimit-reset-tokens"]
    assert refused.refusal.message.endswith(
        "for 'a' on tokens per minute: limit 100, used 140. Please try again in 51s."
    )
    clock.now += 51
    again = admit(limits, "a", limit)
    assert again.refusal is None
    assert ("100", "30", "10s") == tuple(
        again.headers[f"x-ratelimit-{what}-tokens"] for what in ("limit", "remaining", "reset")
    )
    # A refusal costs nothing, and another key has its own account.
    assert admit(limits, "b", limit).headers["x-ratelimit-remaining-tokens"] == "100"


# Pauses, and the tokens of the request after each; without any it goes on.
_STEPS = st.lists(st.tuples(st.sampled_from([0.0, 1.5, 20.0, 31.0]), st.sampled_from([0, 40])), max_size=20)
_MOST = st.sampled_from([None, 2, 3])


@given(steps=_STEPS, requests=_MOST, tokens=st.sampled_from([None, 30, 100]), together=_MOST)
def test_a_refused_client_waits_for_every_limit(
    steps: list[tuple[float, int]], requests: int | None, tokens: int | None, together: int | None
) -> None:
    """Retry-After is never shorter than a time after which a limit is told to have room, whichever limit refused."""
    clock = Clock()
    limits = RateLimits(clock)
    limit = RateLimit(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=together)
    for pause, used in steps:
        clock.now += pause
        answer = admit(limits, "a", limit)
        if answer.refusal is not None:
            wait = int(answer.refusal.headers()["Retry-After"])
            resets = [value for name, value in answer.headers.items() if name.startswith("x-ratelimit-reset-")]
            assert all(seconds(reset) <= wait for reset in resets), (wait, answer.headers)
        elif used:
            answer.close(used)


def seconds(duration: str) -> int:
    """Return the seconds of an OpenAI's duration such as ``1m0s``."""
    minutes, _, rest = duration.rpartition("m")
    return int(minutes or 0) * 60 + int(rest.removesuffix("s"))


def test_concurrent_requests(limits: RateLimits) -> None:
    """As many as allowed run at the same time, and one that ends makes room."""
    limit = RateLimit(concurrent_requests=2)
    one, two = admit(limits, "a", limit), admit(limits, "a", limit)
    refused = admit(limits, "a", limit)

    assert (None, None) == (one.refusal, two.refusal)
    assert refused.refusal is not None
    assert ("1", "requests") == (refused.refusal.headers()["Retry-After"], refused.refusal.body()["type"])
    refused.close(0)
    assert admit(limits, "a", limit).refusal is not None
    one.close(0)
    assert admit(limits, "a", limit).refusal is None


def accounts() -> list[Account]:
    """Return the accounts that take memory."""
    return [one for one in gc.get_objects() if type(one) is Account]


def test_accounts_that_nobody_uses_any_more(limits: RateLimits, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounts that nobody uses any more take no memory, though there is no end of names; what counts stays."""
    limit, kept = RateLimit(requests_per_minute=1), RateLimit(concurrent_requests=1)
    # Those of other tests, which may be garbage that is not collected yet.
    others = accounts()
    running = admit(limits, "running", kept)
    for number in range(5000):
        clock.now += 1
        admit(limits, str(number), limit).close(0)

    assert 1001 > len(set(map(id, accounts())) - set(map(id, others)))
    assert admit(limits, "4999", limit).refusal is not None
    assert admit(limits, "running", kept).refusal is not None
    running.close(0)
    spent = RateLimit(tokens_per_minute=1)
    admit(limits, "spent", spent).close(5)
    looked_at: list[Account] = []
    idle = Account.idle

    def counted(account: Account, now: float) -> bool:
        looked_at.append(account)
        return idle(account, now)

    monkeypatch.setattr(Account, "idle", counted)
    for number in range(2100):
        admit(limits, f"new {number}", limit).close(0)
    assert admit(limits, "spent", spent).refusal is not None
    assert admit(limits, "new 0", limit).refusal is not None
    # Not all of them for each request
    assert 2000 < len(looked_at) < 10_000


def test_several_limits(limits: RateLimits) -> None:
    """One is told, and a wait that the official clients keep to: they wait for a minute at most."""
    limit = RateLimit(concurrent_requests=1, requests_per_minute=1, tokens_per_minute=1)
    first = admit(limits, "a", limit)
    busy = admit(limits, "a", limit).refusal
    first.close(1)
    used = admit(limits, "a", limit).refusal

    assert busy is not None
    assert used is not None
    assert "at the same time" in busy.message
    assert "requests per minute" in used.message
    assert "try again in 1m0s." in used.message
    assert "60" == used.headers()["Retry-After"]


def test_limits_that_are_not_there(limits: RateLimits) -> None:
    """Limits that are not there have no headers, and any one of them is one, but those of batches and of audio."""
    names = RateLimit.__struct_fields__
    limited = [RateLimit(**{name: 1}).limits_live_requests for name in names]
    assert [False, True, True, True, False, False] == [RateLimit().limits_live_requests, *limited]
    assert {} == limits.decide("a", RateLimit(concurrent_requests=1)).headers


def test_tokens_that_no_limit_counts_are_not_kept(limits: RateLimits, clock: Clock) -> None:
    """A key without a limit of tokens has no counts of them, however long it is used."""
    for _ in range(1000):
        admit(limits, "a", RateLimit(requests_per_minute=1000)).close(7)
        clock.now += 1
    assert 0 == len(limits._accounts["a"].tokens._ticks)
