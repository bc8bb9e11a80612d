"""
Rate limits that several services share, in Redis.

The admissions of one turn of the event loop go to Redis together, in one round trip, and those of a key in one script.
So they are exact for all services, also in a burst, and no admission waits for a connection. The clock is the server's.
A running request is a lease that its process renews, so those of a process that was killed vanish. Without Redis each
service counts for itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec
import structlog

from triton_openai.access.rate_limits import (
    WINDOW,
    Account,
    Decision,
    LimitStore,
    Minute,
    RateLimit,
    headers_of,
    refusal_of,
)
from triton_openai.errors import ConfigurationError, ServiceOverloaded, install_advice
from triton_openai.tasks import answered_within, cancel

_log = structlog.get_logger(__name__)

# Longest wait for an answer of Redis, and the pause after one that did not come. To count alone costs exactness, to
# wait costs this once.
_PATIENCE = 0.5
# The same for the first answer, before which modules are imported and a connection is opened.
_FIRST_PATIENCE = 2.0
_PAUSE = 1.0
# A lease ends after so many seconds unless it is renewed, which happens three times in between.
_LEASE = 60
_RENEWAL = 20.0
# Leases in one command, and admissions in one round trip: their answers are read in one turn of the event loop.
_MAX_LEASES = 1000
_MAX_ADMISSIONS = 200
# Seconds for which the expected tokens of a key are kept after its last request.
_MEMORY = 3600
# Returns the ticks of a minute and their sum. A tick counts as long as Minute.used counts it; older ones are deleted.
_TIME = f"""
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local tick = math.floor(now)
local function minute(key)
  local counts, used, old = redis.call('HGETALL', key), 0, {{}}
  local kept = {{}}
  for i = 1, #counts, 2 do
    if tonumber(counts[i]) < tick - {WINDOW} then old[#old + 1] = counts[i]
    else
      used = used + counts[i + 1]
      kept[#kept + 1], kept[#kept + 2] = counts[i], counts[i + 1]
    end
  end
  if #old > 0 then redis.call('HDEL', key, unpack(old)) end
  return kept, used
end
local function add(key, number)
  redis.call('HINCRBY', key, tick, number)
  redis.call('EXPIRE', key, {WINDOW + 2})
end
"""
# Admits as many of the requests as the limits allow; they come with their leases. Returns how many, the time, and what
# there was before: the running requests, the ticks of requests and tokens, and the tokens that a running request is
# expected to use. A script that has begun to write, as this one does by removing what is old, is not stopped by a limit
# of memory.
_ADMIT = f"""{_TIME}
local requests, tokens, running = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local count = redis.call('ZCARD', KEYS[3])
local asked_ticks, asked = minute(KEYS[1])
local used_ticks, used = minute(KEYS[2])
local expected = tonumber(redis.call('GET', KEYS[4]) or 1)
local admitted = 0
for i = 4, #ARGV do
  if (running >= 0 and count + admitted >= running) or (requests >= 0 and asked + admitted >= requests)
    or (tokens >= 0 and used + (count + admitted) * expected >= tokens) then break end
  redis.call('ZADD', KEYS[3], now + {_LEASE}, ARGV[i])
  admitted = admitted + 1
end
if admitted > 0 then
  redis.call('EXPIRE', KEYS[3], {_LEASE + 1})
  if requests >= 0 then add(KEYS[1], admitted) end
end
return {{admitted, tostring(now), count, asked_ticks, used_ticks, expected}}
"""
# Counts requests out: their leases come after the tokens that they have used, and the number of those that used some.
_LEAVE = f"""{_TIME}
for i = 3, #ARGV do redis.call('ZREM', KEYS[2], ARGV[i]) end
if tonumber(ARGV[1]) > 0 then
  add(KEYS[1], ARGV[1])
  add(KEYS[3], ARGV[2])
  local _, used = minute(KEYS[1])
  local _, ended = minute(KEYS[3])
  redis.call('SET', KEYS[4], string.format('%.0f', math.ceil(used / ended)), 'EX', {_MEMORY})
end
"""
_RENEW = f"""{_TIME}
for _, lease in ipairs(ARGV) do redis.call('ZADD', KEYS[1], now + {_LEASE}, lease) end
redis.call('EXPIRE', KEYS[1], {_LEASE + 1})
"""
#: A script, its keys and its arguments.
_Command: TypeAlias = tuple[str, Sequence[str], Sequence[Any]]


class _Admission(msgspec.Struct, eq=False):
    """A request that waits for its admission; ``None`` as its decision if Redis does not answer."""

    name: str
    limit: RateLimit
    lease: str
    decision: asyncio.Future[Decision | None]


class _Ended(msgspec.Struct):
    """Requests of a key that have ended, and that Redis has not counted out yet."""

    leases: list[str] = []
    tokens: int = 0
    #: How many of them used tokens.
    charged: int = 0


class RedisLimits:
    """
    Counts in the Redis at *url*, and by *local* while that does not answer; with *closed* nothing is admitted then.

    See :class:`triton_openai.access.rate_limits.LimitStore`. *answers* is called with whether Redis answers when that
    changes, *patience* is how many seconds it may be silent. Raises :class:`ConfigurationError` without the extra
    [redis].
    """

    def __init__(
        self,
        url: str,
        local: LimitStore,
        *,
        closed: bool = False,
        answers: Callable[[bool], None] = lambda _: None,
        patience: float = _PATIENCE,
    ) -> None:
        try:
            # Imported here: it belongs to an extra.
            from redis import asyncio as redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as error:
            raise ConfigurationError(
                f"access.limits_store needs the extra 'redis': {install_advice('redis')}."
            ) from error
        self._local = local
        self._closed = closed
        self._answers = answers
        self._patience = patience
        # Whether Redis has answered, or has not in time.
        self._answered_before = False
        # A script that is sent again would count again. Silence is judged here, not by the driver.
        self._client = redis.Redis.from_url(
            url, retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=None
        )
        self._failures: tuple[type[Exception], ...] = (redis.RedisError, OSError, TimeoutError)
        # By key: the leases of this process. Which of them a request has does not matter.
        self._leases: dict[str, list[str]] = {}
        # What the next round trip sends.
        self._waiting: list[_Admission] = []
        self._ended: dict[str, _Ended] = {}
        self._renewal_is_due = False
        self._away = False
        self._sending: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None

    async def admit(self, name: str, limit: RateLimit) -> Decision:
        """Admit a request. Raises :class:`ServiceOverloaded` where Redis is away and the service is *closed*."""
        decision = None
        if not self._away:
            admission = _Admission(name, limit, secrets.token_hex(8), asyncio.get_running_loop().create_future())
            self._waiting.append(admission)
            self._send_soon()
            try:
                decision = await admission.decision
            except asyncio.CancelledError:
                # Its client has left. A later answer has no effect on a cancelled future.
                if not admission.decision.cancelled():
                    self._give_back(name, admission.decision.result())
                raise
        if decision is not None:
            return decision
        if self._closed:
            raise ServiceOverloaded("The rate limits cannot be checked now.", retry_after=1)
        return await self._local.admit(name, limit)

    def leave(self, name: str, tokens: int) -> None:
        leases = self._leases.get(name)
        if not leases:
            self._local.leave(name, tokens)
            return
        ended = self._ended.setdefault(name, _Ended())
        ended.leases.append(leases.pop())
        if not leases:
            del self._leases[name]
        if self._away:
            # Its tokens would count for the minute in which Redis is back.
            return
        if tokens:
            ended.tokens += tokens
            ended.charged += 1
        self._send_soon()

    async def close(self) -> None:
        """Record the ends of requests that Redis does not have yet, and close the connections."""
        for task in (self._renewing, self._returning):
            if task is not None:
                await cancel(task)
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=self._patience)
            await cancel(self._sending)
        with suppress(*self._failures):
            await self._client.aclose()

    def _give_back(self, name: str, decision: Decision | None) -> None:
        if decision is not None and decision.refusal is None:
            self.leave(name, 0)

    def _send_soon(self) -> None:
        """Send what waits, in the next turn of the event loop and after the round trip that runs."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while not self._away and (self._waiting or self._ended or self._renewal_is_due):
            admissions = self._waiting[:_MAX_ADMISSIONS]
            del self._waiting[:_MAX_ADMISSIONS]
            try:
                await self._send(admissions)
            except Exception:  # noqa: BLE001 - no request may wait for ever
                _log.exception("rate limit store sent an invalid answer")
                self._mark_away("its answer cannot be read")
            finally:
                _end_without_decision(admissions)

    async def _send(self, admissions: Sequence[_Admission]) -> None:
        """Send what waits in one round trip, and let the answer decide about *admissions*."""
        groups: dict[tuple[str, RateLimit], list[_Admission]] = {}
        for admission in admissions:
            if not admission.decision.cancelled():
                groups.setdefault((admission.name, admission.limit), []).append(admission)
        ended = self._ended
        self._ended = {}
        commands = [*self._leave_commands(ended), *self._renew_commands()]
        first = len(commands)
        for (name, limit), group in groups.items():
            arguments: list[Any] = [
                _number(limit.requests_per_minute),
                _number(limit.tokens_per_minute),
                _number(limit.concurrent_requests),
            ]
            arguments += [admission.lease for admission in group]
            commands.append((_ADMIT, _keys(name, "rtcx"), arguments))
        answers = await self._execute(commands)
        if answers is None:
            # Redis may have counted them all the same. The leases are sent again, because a lease is removed once. The
            # tokens are not: they may be counted already.
            for name, requests in ended.items():
                self._ended.setdefault(name, _Ended()).leases.extend(requests.leases)
            for admission in admissions:
                self._ended.setdefault(admission.name, _Ended()).leases.append(admission.lease)
            return
        for group, answer in zip(groups.values(), answers[first:], strict=True):
            self._decide(group, answer)

    @staticmethod
    def _leave_commands(ended: Mapping[str, _Ended]) -> list[_Command]:
        commands: list[_Command] = []
        for name, requests in ended.items():
            arguments = [requests.tokens, requests.charged, *requests.leases]
            commands.append((_LEAVE, _keys(name, "tcex"), arguments))
        return commands

    def _renew_commands(self) -> list[_Command]:
        if not self._renewal_is_due:
            return []
        self._renewal_is_due = False
        commands: list[_Command] = []
        for name, leases in self._leases.items():
            starts = range(0, len(leases), _MAX_LEASES)
            commands += [(_RENEW, _keys(name, "c"), leases[start : start + _MAX_LEASES]) for start in starts]
        return commands

    def _decide(self, group: Sequence[_Admission], answer: Sequence[Any]) -> None:
        """Decide about the requests of a *group*, which came in this order, by the *answer* of Redis."""
        count, time, running, requests, tokens, expected = answer
        now = float(time)
        name = group[0].name
        limit = group[0].limit
        account = Account(running, _minute(requests), _minute(tokens), expected=int(expected))
        for admission in group[:count]:
            account.running += 1
            account.requests.add(now, 1)
            self._leases.setdefault(name, []).append(admission.lease)
            decision = Decision(headers_of(limit, now, account))
            if admission.decision.done():
                # Its client has left meanwhile.
                self._give_back(name, decision)
            else:
                admission.decision.set_result(decision)
        if count and self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_leases())
        if count == len(group):
            return
        refusal = refusal_of(name, limit, now, account)
        refused = Decision(headers_of(limit, now, account, refusal), refusal)
        for admission in group[count:]:
            if not admission.decision.done():
                admission.decision.set_result(refused)

    async def _renew_leases(self) -> None:
        """Renew the leases until cancelled."""
        while True:
            await asyncio.sleep(_RENEWAL)
            self._renewal_is_due = bool(self._leases)
            self._send_soon()

    async def _execute(self, commands: Sequence[_Command]) -> Sequence[Any] | None:
        """Return the answers to *commands*; ``None`` if Redis does not answer in time, or fails."""
        pipeline = self._client.pipeline(transaction=False)
        for script, keys, arguments in commands:
            pipeline.eval(script, len(keys), *keys, *arguments)
        if self._answered_before:
            patience = self._patience
        else:
            patience = max(self._patience, _FIRST_PATIENCE)
        try:
            answers: Sequence[Any] = await answered_within(pipeline.execute(), patience)
        except self._failures as error:
            self._answered_before = True
            self._mark_away(str(error) or "it did not answer in time")
            return None
        self._answered_before = True
        return answers

    def _mark_away(self, reason: str) -> None:
        """Count locally until Redis answers again."""
        if self._away:
            return
        self._away = True
        _end_without_decision(self._waiting)
        self._waiting.clear()
        _log.warning("rate limit store unavailable", reason=reason, closed=self._closed)
        self._answers(False)
        self._returning = asyncio.create_task(self._wait_until_back())

    async def _wait_until_back(self) -> None:
        """Ping Redis until it answers again. No request waits for that."""
        while self._away:
            await asyncio.sleep(_PAUSE)
            with suppress(*self._failures):
                await answered_within(self._client.ping(), self._patience)
                self._away = False
        _log.info("rate limit store available again")
        self._answers(True)
        # Leases may have ended meanwhile.
        self._renewal_is_due = bool(self._leases)
        self._send_soon()


def _number(limit: int | None) -> int:
    """Return *limit* for a script, in which -1 is no limit."""
    if limit is None:
        return -1
    return limit


def _end_without_decision(admissions: Sequence[_Admission]) -> None:
    for admission in admissions:
        if not admission.decision.done():
            admission.decision.set_result(None)


def _keys(name: str, kinds: str) -> list[str]:
    """Return the names in Redis; what is in braces decides which part of a cluster has them."""
    return [f"triton_openai:{{{quote(name, safe='')}}}:{kind}" for kind in kinds]


def _minute(pairs: Sequence[Any]) -> Minute:
    numbers = list(map(int, pairs))
    return Minute(sorted(zip(numbers[::2], numbers[1::2], strict=True)))
