"""
Rate limits that several services share, in Redis.

An admission is one script, so it is exact for all services; the clock is the server's. A running request is a lease
that its process renews, so those of a process that was killed vanish. Without Redis each service counts for itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

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
from triton_openai.errors import ConfigurationError, ServiceOverloaded
from triton_openai.tasks import cancel, spawn, within

_log = structlog.get_logger(__name__)

# Longest wait for Redis, and how long it is then left alone.
_PATIENCE = 0.1
# The same for the first answer, before which modules are imported, connections opened and scripts loaded.
_FIRST_PATIENCE = 2.0
_PAUSE = 1.0
# A lease ends after so many seconds unless it is renewed, which happens three times in between.
_LEASE = 60
_RENEWAL = 20.0
_CONNECTIONS = 16
# Leases in one command.
_MANY = 1000
_TIME = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local tick = math.floor(now)
"""
# Returns whether the request is admitted, the time, the running requests, and the ticks of requests and tokens. A tick
# counts as long as Minute.used counts it. A script that has begun to write, as this one does by removing what is old,
# is not stopped by a limit of memory.
_ADMIT = f"""{_TIME}
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
local requests, tokens, running = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local count = redis.call('ZCARD', KEYS[3])
local _, asked = minute(KEYS[1])
local spent, used = minute(KEYS[2])
local admitted = (running < 0 or count < running) and (requests < 0 or asked < requests)
  and (tokens < 0 or used < tokens)
if admitted then
  redis.call('ZADD', KEYS[3], now + {_LEASE}, ARGV[1])
  redis.call('EXPIRE', KEYS[3], {_LEASE + 1})
  if requests >= 0 then
    redis.call('HINCRBY', KEYS[1], tick, 1)
    redis.call('EXPIRE', KEYS[1], {WINDOW + 2})
  end
end
return {{admitted and 1 or 0, tostring(now), count, minute(KEYS[1]), spent}}
"""
_LEAVE = f"""{_TIME}
redis.call('ZREM', KEYS[2], ARGV[1])
if tonumber(ARGV[2]) > 0 then
  redis.call('HINCRBY', KEYS[1], tick, ARGV[2])
  redis.call('EXPIRE', KEYS[1], {WINDOW + 2})
end
"""
_RENEW = f"""{_TIME}
for _, lease in ipairs(ARGV) do redis.call('ZADD', KEYS[1], now + {_LEASE}, lease) end
redis.call('EXPIRE', KEYS[1], {_LEASE + 1})
"""


class RedisLimits:
    """
    Counts in the Redis at *url*, and by *local* while that does not answer; with *closed* nothing is admitted then.

    See :class:`triton_openai.access.rate_limits.LimitStore`. *answers* is called with whether Redis answers when that
    changes, *patience* is how many seconds it has. Raises :class:`ConfigurationError` without the extra [redis].
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
        except ImportError as error:
            raise ConfigurationError(
                "access.limits_store needs the extra [redis]: pip install 'triton-openai[redis]'."
            ) from error
        self._local = local
        self._closed = closed
        self._answers = answers
        self._patience = patience
        # Whether Redis has answered, or has not in time.
        self._called = False
        # Requests that come at once share connections: to open one for each takes longer than to wait.
        pool = redis.BlockingConnectionPool.from_url(url, max_connections=_CONNECTIONS, timeout=None)
        self._client = redis.Redis.from_pool(pool)
        self._failures: tuple[type[Exception], ...] = (redis.RedisError, OSError, TimeoutError)
        self._admit, self._leave, self._renew = map(self._client.register_script, (_ADMIT, _LEAVE, _RENEW))
        # By key: the leases of this process. Which of them a request has does not matter.
        self._leases: dict[str, list[str]] = {}
        self._away_until = 0.0
        self._away = False
        self._leaving: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def admit(self, name: str, limit: RateLimit) -> Decision:
        """Count a request in. Raises :class:`ServiceOverloaded` where Redis is away and the service is *closed*."""
        now = time.monotonic()
        if now >= self._away_until:
            if self._away:
                # Until this request has its answer, the others do not wait for one.
                self._away_until = now + _PAUSE
            lease = secrets.token_hex(8)
            limits = (limit.requests_per_minute, limit.tokens_per_minute, limit.concurrent_requests)
            arguments = [lease, *(-1 if most is None else most for most in limits)]
            try:
                answer = await self._call(self._admit, _keys(name, "rtc"), arguments)
            except asyncio.CancelledError:
                # Its client has left; it may have been counted.
                spawn(self._gone(name, lease, 0), self._leaving)
                raise
            if answer is not None:
                return self._decision(name, limit, lease, answer)
        if self._closed:
            raise ServiceOverloaded("The rate limits cannot be checked now.", retry_after=1)
        return await self._local.admit(name, limit)

    def _decision(self, name: str, limit: RateLimit, lease: str, answer: Sequence[Any]) -> Decision:
        admitted, now, running, requests, tokens = answer
        account = Account(running, _minute(requests), _minute(tokens))
        if not admitted:
            refusal = refusal_of(name, limit, float(now), account)
            return Decision(headers_of(limit, float(now), account, refusal), refusal)
        self._leases.setdefault(name, []).append(lease)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._keep())
        return Decision(headers_of(limit, float(now), account))

    def leave(self, name: str, tokens: int) -> None:
        leases = self._leases.get(name)
        if not leases:
            self._local.leave(name, tokens)
            return
        lease = leases.pop()
        if not leases:
            del self._leases[name]
        if time.monotonic() >= self._away_until:
            spawn(self._gone(name, lease, tokens), self._leaving)

    async def _gone(self, name: str, lease: str, tokens: int) -> None:
        await self._call(self._leave, _keys(name, "tc"), [lease, tokens])

    async def _keep(self) -> None:
        """Renew the leases until cancelled."""
        while True:
            await asyncio.sleep(_RENEWAL)
            for name, leases in list(self._leases.items()):
                for start in range(0, len(leases), _MANY):
                    if time.monotonic() >= self._away_until:
                        await self._call(self._renew, _keys(name, "c"), leases[start : start + _MANY])

    async def _call(self, script: Any, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Return the answer of *script*, ``None`` where Redis does not give one in time."""
        try:
            async with within(self._patience if self._called else max(self._patience, _FIRST_PATIENCE)):
                answer = await script(keys=keys, args=arguments)
        except self._failures as error:
            self._called = True
            self._away_until = time.monotonic() + _PAUSE
            if not self._away:
                self._away = True
                reason = str(error) or "it did not answer in time"
                _log.warning("the store of rate limits does not answer", reason=reason, closed=self._closed)
                self._answers(False)
            return None
        self._called = True
        if self._away:
            self._away, self._away_until = False, 0.0
            _log.info("the store of rate limits answers again")
            self._answers(True)
        return answer if answer is not None else ()

    async def close(self) -> None:
        """Tell Redis of the requests that have ended, and close the connections."""
        if self._renewing is not None:
            await cancel(self._renewing)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=self._patience)
            await cancel(*self._leaving)
        with suppress(*self._failures):
            await self._client.aclose()


def _keys(name: str, kinds: str) -> list[str]:
    """Return the names in Redis; what is in braces decides which part of a cluster has them."""
    return [f"triton_openai:{{{quote(name, safe='')}}}:{kind}" for kind in kinds]


def _minute(pairs: Sequence[Any]) -> Minute:
    numbers = list(map(int, pairs))
    return Minute(sorted(zip(numbers[::2], numbers[1::2], strict=True)))
