"""
Rate limits of API keys: requests and tokens per minute, and concurrent requests.

:class:`RateLimits` counts in the memory of one process. In a service of several workers their parent counts for all of
them, see :mod:`triton_openai.serving.workers.shared`. A request is charged the tokens that were counted, or an estimate
if the backend does not count: otherwise the limit would never apply. The estimate is not shown anywhere.

The tokens of a request are known at its end. Until then it counts as many as the requests of the key used on average
in the last minute in which some ended, and one token if none has ended yet. So the limit of tokens is exact in this
sense: a burst admits as many requests as if each had come after the end of the one before, if they use as many tokens
as the average.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Annotated, Protocol

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.errors import RateLimited
from triton_openai.generation import tokens_in_bytes
from triton_openai.telemetry.request_record import RequestRecord

#: Seconds in which limits "per minute" are counted.
WINDOW = 60
# With this number of accounts, the idle ones are dropped: a gateway may name any number of tenants.
_MANY = 1000
# A minute that begins within a tick ends within the one that is 60 later.
_TICKS = WINDOW + 1


_Limit = Annotated[int, Meta(ge=1, le=2**53)]


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may use; ``None``: unlimited."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent_requests: _Limit | None = None
    #: Tokens of batches, which do not count for the others.
    batch_tokens_per_minute: _Limit | None = None
    #: Seconds of audio of transcriptions, translations and speech.
    audio_seconds_per_minute: _Limit | None = None

    @property
    def limits_live_requests(self) -> bool:
        """Whether a limit counts every live request; those of batches and of audio do not."""
        return any((self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests))


class Refusal(msgspec.Struct, frozen=True):
    """The arguments of :class:`RateLimited` for a request that is refused."""

    message: str
    kind: str
    #: In seconds.
    wait: float


class Decision(msgspec.Struct, frozen=True):
    """Whether a request is admitted."""

    #: OpenAI's headers with what the key has left.
    headers: dict[str, str]
    #: ``None`` if it is admitted.
    refusal: Refusal | None = None


class LimitStore(Protocol):
    """Where requests of keys are counted."""

    async def admit(self, name: str, limit: RateLimit) -> Decision:
        """Admit and count a request of the key *name*, if *limit* allows it. Raises :class:`ServiceError`."""
        ...

    def leave(self, name: str, tokens: int) -> None:
        """Record the end of an admitted request, and the *tokens* that it used. Does not block."""
        ...

    async def close(self) -> None:
        """Close what is open, when the service ends."""


class Minute:
    """Counts of the last minute, in whole seconds of a clock."""

    def __init__(self, ticks: Iterable[tuple[int, int]] = ()) -> None:
        self._ticks = deque(ticks)

    def add(self, now: float, number: int) -> None:
        """Count *number*."""
        tick = int(now)
        if self._ticks and self._ticks[-1][0] == tick:
            number += self._ticks.pop()[1]
        self._ticks.append((tick, number))

    def used(self, now: float) -> int:
        """Return what was counted in the last minute."""
        while self._ticks and self._ticks[0][0] < int(now) - WINDOW:
            self._ticks.popleft()
        return sum([count for _, count in self._ticks])

    def seconds_until_below(self, limit: int, now: float) -> float:
        """
        Return the seconds until there are fewer than *limit*.

        A minute at most, though a tick may last longer: the official clients retry at once if the wait is longer.
        """
        used = self.used(now)
        wait = 0.0
        for tick, count in self._ticks:
            if used < limit:
                break
            used -= count
            wait = tick + _TICKS - now
        return min(wait, WINDOW)


class Account(msgspec.Struct):
    """The counts of one key."""

    running: int = 0
    requests: Minute = msgspec.field(default_factory=Minute)
    tokens: Minute = msgspec.field(default_factory=Minute)
    #: Requests that have ended and used tokens.
    ended: Minute = msgspec.field(default_factory=Minute)
    #: The tokens that a running request is expected to use.
    expected: int = 1

    def end(self, now: float, tokens: int) -> None:
        """Record the end of a request that has used *tokens*."""
        self.running -= 1
        if tokens:
            self.tokens.add(now, tokens)
            self.ended.add(now, 1)
            self.expected = math.ceil(self.tokens.used(now) / self.ended.used(now))

    def idle(self, now: float) -> bool:
        """Return whether the account counts nothing."""
        return not (self.running or self.requests.used(now) or self.tokens.used(now))


def _minutes(limit: RateLimit, account: Account) -> Iterator[tuple[str, int, Minute]]:
    """Yield the limits per minute: what they limit, how much of it, and what was used."""
    if limit.requests_per_minute is not None:
        yield "requests", limit.requests_per_minute, account.requests
    if limit.tokens_per_minute is not None:
        yield "tokens", limit.tokens_per_minute, account.tokens


def refusal_of(name: str, limit: RateLimit, now: float, account: Account) -> Refusal | None:
    """Return the reason why *limit* forbids another request of the key *name*; ``None`` if it allows one."""
    spent = []
    # At least a second: the tokens of running requests are known when those have ended.
    wait = 1.0
    for kind, maximum, minute in _minutes(limit, account):
        used = minute.used(now)
        if kind == "tokens":
            # Those of running requests count as far as they are expected.
            used += account.running * account.expected
        if used >= maximum:
            spent.append((kind, maximum, used))
            # Until every limit allows it.
            wait = max(wait, minute.seconds_until_below(maximum, now))
    max_running = limit.concurrent_requests
    if max_running is not None and account.running >= max_running:
        text = f"'{name}' may have {max_running} requests at the same time."
        return Refusal(text, kind="requests", wait=wait)
    if not spent:
        return None
    kind, maximum, used = spent[0]
    text = f"Rate limit reached for '{name}' on {kind} per minute: limit {maximum}, used {used}."
    return Refusal(f"{text} Please try again in {_duration(wait)}.", kind=kind, wait=wait)


def headers_of(limit: RateLimit, now: float, account: Account, refusal: Refusal | None = None) -> dict[str, str]:
    """Return OpenAI's headers with what is left, for the answer to a request or for its *refusal*."""
    headers = {}
    for kind, maximum, minute in _minutes(limit, account):
        left = max(0, maximum - minute.used(now))
        if refusal is not None and refusal.kind == kind == "tokens":
            left = max(0, left - account.running * account.expected)
        headers[f"x-ratelimit-limit-{kind}"] = str(maximum)
        headers[f"x-ratelimit-remaining-{kind}"] = str(left)
        # Until something is left, or if something is, until nothing is used; never longer than Retry-After.
        target = 1
        if refusal is not None or not left:
            target = maximum
        headers[f"x-ratelimit-reset-{kind}"] = _duration(minute.seconds_until_below(target, now))
    return headers


class RateLimits:
    """Counts the requests of all keys. *clock* returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._max_accounts = _MANY

    async def admit(self, name: str, limit: RateLimit) -> Decision:
        return self.decide(name, limit)

    async def close(self) -> None:
        pass

    def decide(self, name: str, limit: RateLimit) -> Decision:
        """Admit and count a request of the key *name*, if *limit* allows it; the decision has OpenAI's headers."""
        now = self._clock()
        if len(self._accounts) >= self._max_accounts:
            self._accounts = {key: account for key, account in self._accounts.items() if not account.idle(now)}
            self._max_accounts = max(_MANY, 2 * len(self._accounts))
        account = self._accounts.setdefault(name, Account())
        refusal = refusal_of(name, limit, now, account)
        if refusal is None:
            account.running += 1
            if limit.requests_per_minute is not None:
                account.requests.add(now, 1)
        return Decision(headers_of(limit, now, account, refusal), refusal)

    def leave(self, name: str, tokens: int) -> None:
        self._accounts[name].end(self._clock(), tokens)


class Reservation:
    """One request that was admitted by *store*, or refused; ``headers`` say what is left."""

    def __init__(self, store: LimitStore, name: str, limit: RateLimit, decision: Decision) -> None:
        self._counts_tokens = limit.tokens_per_minute is not None
        self._store = store
        self._name = name
        self._open = decision.refusal is None
        self.headers: Mapping[str, str] = decision.headers
        refusal = decision.refusal
        if refusal is None:
            self.refusal = None
        else:
            self.refusal = RateLimited(refusal.message, kind=refusal.kind, wait=refusal.wait)

    def take(self) -> Reservation:
        """Return a copy that replaces this reservation, whose :meth:`close` has no effect any more."""
        taken = copy(self)
        self._open = False
        return taken

    def close(self, tokens: int) -> None:
        """Record the end of the request, and the *tokens* that it used; further calls have no effect."""
        if self._open:
            self._open = False
            if not self._counts_tokens:
                tokens = 0
            self._store.leave(self._name, tokens)


#: The reservation of a request, which is closed at its end.
RESERVATION: web.RequestKey[Reservation] = web.RequestKey("reservation", Reservation)


def _duration(seconds: float) -> str:
    """Return *seconds*, rounded up, as OpenAI writes them: ``1s``, ``6m0s``."""
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes:
        return f"{minutes}m{rest}s"
    return f"{rest}s"


def tokens_charged(record: RequestRecord, *, served: bool, cut_short: bool) -> int:
    """
    Return the tokens that a request has used: none where the backend refused it, or never got it.

    *served* is whether it was answered without an error, *cut_short* whether its client left before the end.
    """
    if record.input_tokens is not None:
        return record.input_tokens
    total = 0
    for number, answer in enumerate(record.answers):
        usage = answer.usage_so_far
        if usage is None and answer.sent is not None and (answer.first is not None or cut_short):
            usage = answer.usage_estimate
        if usage is not None:
            total += usage.completion_tokens
            # The choices of a prompt share it.
            if number % record.n == 0:
                total += usage.prompt_tokens
    if record.operation is not None and not record.answers and served and record.body_size is not None:
        # Nearly all bytes of a request for vectors or scores are input.
        return tokens_in_bytes(record.body_size)
    return total
