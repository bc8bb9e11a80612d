"""
What a key may use: requests and tokens in a minute, and requests at the same time.

A request is counted when it comes. Its tokens are counted when it has ended, from its usage: so a request is refused
when the tokens of the last minute have reached the limit, and one that was let in may go beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from triton_openai.errors import RateLimited
from triton_openai.server.shared_counts import WINDOW, Account, Counts, Window
from triton_openai.telemetry.logging import get_logger
from triton_openai.worker import Worker

_log = get_logger(__name__)
_FILE = "rate-limits"


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may use; ``None`` is as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests) != (None, None, None)


class Ticket:
    """One request that was let in, or refused with *refusal*; ``headers`` say what is left."""

    def __init__(self, account: Account, headers: Mapping[str, str], refusal: RateLimited | None = None) -> None:
        self._account = account
        self._open = refusal is None
        self.headers = headers
        self.refusal = refusal

    def close(self, tokens: int) -> None:
        """Count the request out, and the *tokens* that it used in."""
        if self._open:
            self._open = False
            with self._account.held():
                self._account.leave()
                if tokens:
                    self._account.add_tokens(tokens)


class RateLimits:
    """Lets requests in and refuses them."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._own: Counts | None = None

    def admit(self, name: str, limit: RateLimit) -> Ticket:
        """Let a request of the key *name* in, or not; who closes the ticket says what it used."""
        account = self._account(name)
        with account.held():
            requests = account.requests() if limit.requests_per_minute is not None else None
            tokens = account.tokens() if limit.tokens_per_minute is not None else None
            refusal = _refusal(name, limit, requests, tokens, account)
            headers = _headers(limit, requests, tokens, admitted=refusal is None)
            if refusal is None:
                account.enter()
                if requests is not None:
                    account.add_request()
        return Ticket(account, headers, refusal)

    def close(self) -> None:
        """Let go of what is shared with the other workers."""
        self._counts.close()

    def _account(self, name: str) -> Account:
        try:
            return (self._own or self._counts).account(name)
        except OverflowError as error:
            _log.warning("rate limits are counted by each worker on its own from now on", reason=str(error))
            self._own = Counts()
            return self._own.account(name)


def open_limits(worker: Worker) -> RateLimits:
    """Return the limits of all workers of *worker*'s service. Raises :class:`ConfigurationError`."""
    file: Path | None = None if worker.directory is None else worker.directory / _FILE
    return RateLimits(Counts(file, index=worker.index, workers=worker.count))


def _refusal(
    name: str, limit: RateLimit, requests: Window | None, tokens: Window | None, account: Account
) -> RateLimited | None:
    most = limit.concurrent_requests
    if most is not None and account.running >= most:
        return RateLimited(f"The key '{name}' may have {most} requests at the same time.", kind="requests", wait=1)
    for kind, window, most in (
        ("requests", requests, limit.requests_per_minute),
        ("tokens", tokens, limit.tokens_per_minute),
    ):
        if window is not None and most is not None and window.used >= most:
            wait = window.below_in(most)
            return RateLimited(
                f"Rate limit reached for the key '{name}' on {kind} per minute: limit {most}, used {window.used}. "
                f"Please try again in {_duration(wait)}.",
                kind=kind,
                # The official clients wait for a minute at most, and else try again at once.
                wait=min(wait, WINDOW),
            )
    return None


def _headers(limit: RateLimit, requests: Window | None, tokens: Window | None, *, admitted: bool) -> dict[str, str]:
    """Return OpenAI's headers for the limits that there are."""
    headers: dict[str, str] = {}
    for kind, window, most in (
        ("requests", requests, limit.requests_per_minute),
        ("tokens", tokens, limit.tokens_per_minute),
    ):
        if window is not None and most is not None:
            now = 1 if admitted and kind == "requests" else 0
            headers[f"x-ratelimit-limit-{kind}"] = str(most)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, most - window.used - now))
            # Whole ticks: what is counted now goes when its tick does.
            headers[f"x-ratelimit-reset-{kind}"] = _duration(window.full_in if now else window.empty_in)
    return headers


def _duration(seconds: float) -> str:
    """Return *seconds*, rounded up, as OpenAI writes them: ``1s``, ``6m0s``."""
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
