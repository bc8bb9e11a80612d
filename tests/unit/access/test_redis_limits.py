"""Rate limits in a real Redis, shared by services."""

import asyncio
import math

import pytest
import structlog

from tests.cases import every_case
from tests.clock import turns
from triton_openai.access import redis_limits
from triton_openai.access.rate_limits import RateLimit, RateLimits
from triton_openai.access.redis_limits import RedisLimits
from triton_openai.errors import ServiceOverloaded


@pytest.fixture
async def services(redis, clock):
    """
    Return a maker of services that count in the same Redis.

    Their time stands still until a test moves it: nothing is decided by how busy the machine is, and no lease is
    renewed.
    """
    made, url = [], redis.url()

    def make(**options):
        made.append(RedisLimits(url, RateLimits(), **options))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def kinds(decisions):
    return [one.refusal and one.refusal.kind for one in decisions]


async def test_services_share_exact_limits(services):
    """Of many requests that come to four services at once, exactly as many are admitted as the limit allows."""
    limit, several = RateLimit(requests_per_minute=37), [services() for _ in range(4)]
    decisions = await asyncio.gather(*[several[number % 4].admit("a", limit) for number in range(80)])
    assert kinds(decisions).count(None) == 37
    last = await several[0].admit("a", limit)
    assert "limit 37, used 37" in last.refusal.message
    assert last.headers["x-ratelimit-limit-requests"] == "37"
    assert last.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= last.refusal.wait <= 60
    assert (await several[1].admit("b", limit)).headers["x-ratelimit-remaining-requests"] == "36"


async def test_concurrent_requests_are_counted_until_they_leave(services):
    """A request that ends at one service makes room at another, and its tokens count there."""
    first, second = services(), services()
    limit = RateLimit(concurrent_requests=2, tokens_per_minute=100)
    assert kinds([await first.admit("a", limit), await second.admit("a", limit)]) == [None, None]
    assert (await first.admit("a", limit)).refusal.kind == "requests"
    second.leave("a", 40)
    while (after := await first.admit("a", limit)).refusal is not None:
        pass
    assert after.headers["x-ratelimit-remaining-tokens"] == "60"
    first.leave("a", 60)
    while (after := await second.admit("a", limit)).refusal is None or after.refusal.kind != "tokens":
        if after.refusal is None:
            second.leave("a", 0)
    assert after.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_names_with_special_characters_are_keys_of_their_own(services):
    """A tenant's name may have braces and colons, and no name reaches another's counts."""
    one, limit = services(), RateLimit(requests_per_minute=1)
    names = ["a", "a}", "{a", "a:r", "{a}:r", "a b", "%"]
    assert kinds([await one.admit(name, limit) for name in names]) == [None] * len(names)


async def test_a_killed_process_frees_its_requests(services, redis):
    """Leases that nobody renews end by Redis's clock."""
    dead, other, limit = services(), services(), RateLimit(concurrent_requests=1)
    assert (await dead.admit("a", limit)).refusal is None
    assert (await other.admit("a", limit)).refusal is not None
    # As if a minute had passed.
    await dead._client.zadd("triton_openai:{a}:c", dict.fromkeys(await leases(dead), 1))
    assert (await other.admit("a", limit)).refusal is None


async def leases(limits, name="a"):
    return await limits._client.zrange(f"triton_openai:{{{name}}}:c", 0, -1)


async def test_leases_are_renewed(services, clock):
    """What still runs keeps its place, also in a Redis that has lost everything."""
    one, limit = services(), RateLimit(concurrent_requests=1)
    assert (await one.admit("a", limit)).refusal is None
    await one._client.flushdb()
    await turns()
    clock.advance(redis_limits._RENEWAL)
    while not await leases(one):
        pass
    assert (await services().admit("a", limit)).refusal is not None


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_service_counts_alone_while_redis_is_away(services, redis, clock, fault, monkeypatch):
    """Requests go on by the service's own counts, or are refused, and the log says it once."""
    monkeypatch.setattr(redis_limits, "_PAUSE", 0.001)
    heard: list[bool] = []
    one, closed = services(answers=heard.append), services(closed=True)
    limit = RateLimit(requests_per_minute=2)
    assert (await one.admit("a", limit)).refusal is None
    assert (await closed.admit("a", limit)).refusal is None
    if fault == "killed":
        redis.stop()
    else:
        redis.freeze()
    # From now on, silence counts.
    clock.run()
    try:
        with structlog.testing.capture_logs() as lines:
            decisions = [await one.admit("a", limit) for _ in range(3)]
            with pytest.raises(ServiceOverloaded):
                await closed.admit("c", limit)
        assert kinds(decisions) == [None, None, "requests"]
        assert [line["event"] for line in lines] == ["rate limit store unavailable"] * 2
        assert heard == [False]
        for _ in range(3):
            one.leave("a", 5)
    finally:
        if fault == "killed":
            redis.start()
        else:
            redis.thaw()
    while len(heard) == 1:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    assert heard == [False, True]


async def test_scripts_are_loaded_again(services):
    """A Redis that has been restarted, or has lost its scripts, counts again at once."""
    one = services()
    await one.admit("a", RateLimit(requests_per_minute=9))
    await one._client.script_flush()
    assert (await one.admit("a", RateLimit(requests_per_minute=9))).headers["x-ratelimit-remaining-requests"] == "7"


async def test_a_full_redis_goes_on_counting(services):
    """At its limit of memory, Redis still runs a script that first removes what is old; counts stay exact."""
    one, limit = services(), RateLimit(requests_per_minute=5, concurrent_requests=9)
    await one._client.config_set("maxmemory", "1")
    try:
        assert kinds([await one.admit("a", limit) for _ in range(7)]).count(None) == 5
    finally:
        await one._client.config_set("maxmemory", "0")


async def test_a_request_that_is_cancelled_leaves_no_lease(services):
    """Whoever leaves before Redis has counted the request, or while it does, makes room for another."""
    store, other, limit = services(), services(), RateLimit(concurrent_requests=1)
    assert (await store.admit("b", limit)).refusal is None
    for count in range(6):
        asking = asyncio.create_task(store.admit("a", limit))
        for _ in range(count):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while (await other.admit("a", limit)).refusal is not None:
            pass
        other.leave("a", 0)
        while await leases(store):
            pass


async def test_the_end_of_a_service(services):
    """A service that ends tells Redis of its last requests, and does not wait for a driver that takes no end."""
    store, other, limit = services(), services(), RateLimit(concurrent_requests=1)
    assert (await store.admit("a", limit)).refusal is None
    store.leave("a", 0)
    await store.close()
    assert (await other.admit("a", limit)).refusal is None


async def busy(clock):
    """Let the event loop be busy with something else: time in which it is does not count as silence of Redis."""
    for _ in range(8):
        await asyncio.sleep(0)
        # A turn of the event loop that takes a minute.
        clock.advance(60)


LIMITS = {
    "requests": RateLimit(requests_per_minute=40),
    "tokens": RateLimit(tokens_per_minute=40),
    "concurrent": RateLimit(concurrent_requests=40),
    "all": RateLimit(requests_per_minute=40, tokens_per_minute=10_000, concurrent_requests=50),
}


@every_case("name, size", [(name, size) for name in LIMITS for size in (20, 39, 40, 41, 200, 1000)])
async def test_bursts_are_counted_exactly(services, clock, name, size):
    """Of a burst at two services, exactly as many requests are admitted as the limit allows, and none counts alone."""
    heard: list[bool] = []
    several = [services(answers=heard.append) for _ in range(2)]
    burst = [several[number % 2].admit(f"{name}-{size}", LIMITS[name]) for number in range(size)]
    _, *decisions = await asyncio.gather(busy(clock), *burst)
    assert heard == []
    assert kinds(decisions).count(None) == min(size, 40)
    for number, decision in enumerate(decisions):
        if decision.refusal is None:
            several[number % 2].leave(f"{name}-{size}", 0)
    if name in ("tokens", "concurrent"):
        # All have room again.
        again = await asyncio.gather(*[several[n % 2].admit(f"{name}-{size}", LIMITS[name]) for n in range(size)])
        assert kinds(again).count(None) == min(size, 40)


@every_case("tokens, size", [(tokens, size) for tokens in (1, 7, 250, 999, 5000) for size in (20, 200, 1000)])
@every_case("store", ["redis", "memory"])
async def test_bursts_of_many_tokens(services, clock, store, tokens, size):
    """A burst admits as many requests as if each had come after the end of the one before."""
    name, limit = f"{tokens}-{size}", RateLimit(tokens_per_minute=1000)
    several = [RateLimits(clock)] * 2
    if store == "redis":
        several = [services() for _ in range(2)]
    assert (await several[0].admit(name, limit)).refusal is None
    several[0].leave(name, tokens)
    while (await several[1].admit(name, limit)).headers["x-ratelimit-remaining-tokens"] != str(max(0, 1000 - tokens)):
        several[1].leave(name, 0)
    if tokens < 1000:
        several[1].leave(name, 0)
    while store == "redis" and await leases(several[0], name):
        pass
    decisions = await asyncio.gather(*[several[number % 2].admit(name, limit) for number in range(size)])
    expected = math.ceil(max(0, 1000 - tokens) / tokens)
    assert kinds(decisions).count(None) == min(size, expected)
    if size > expected:
        refusal = next(decision.refusal for decision in decisions if decision.refusal is not None)
        assert refusal.kind == "tokens"
        assert f"limit 1000, used {tokens * (1 + expected)}" in refusal.message


async def test_a_busy_service_does_not_take_redis_for_silent(services, clock):
    """Redis has answered in time, however late the service itself comes to read it."""
    heard: list[bool] = []
    one = services(answers=heard.append)
    limit = RateLimit(requests_per_minute=1000)
    assert (await one.admit("a", limit)).refusal is None

    decisions = await asyncio.gather(busy(clock), *[one.admit("a", limit) for _ in range(30)])
    assert heard == []
    assert kinds(decisions[1:]) == [None] * 30


async def test_one_round_trip_for_a_burst(services, redis):
    """The admissions of one turn go to Redis together, for each key in one script, over one connection."""
    one, limit = services(), RateLimit(requests_per_minute=1000)
    await one.admit("a", limit)
    before = await one._client.info("all")
    await asyncio.gather(*[one.admit(f"key-{number % 3}", limit) for number in range(150)])
    after = await one._client.info("all")
    assert after["cmdstat_eval"]["calls"] - before["cmdstat_eval"]["calls"] == 3
    assert after["total_connections_received"] == before["total_connections_received"]


async def test_answers_that_cannot_be_read(services, monkeypatch):
    """Something else than Redis, or another version of the script, makes no request wait for ever."""
    one = services()
    monkeypatch.setattr(redis_limits, "_ADMIT", "return {1}")
    assert (await asyncio.wait_for(one.admit("a", RateLimit(requests_per_minute=1)), 120)).refusal is None
    assert one._away


async def test_tokens_of_an_outage(services, redis, clock, monkeypatch):
    """What was admitted before an outage makes room after it; tokens that were used meanwhile are not charged."""
    monkeypatch.setattr(redis_limits, "_PAUSE", 0.001)
    heard: list[bool] = []
    one, limit = services(answers=heard.append), RateLimit(concurrent_requests=1, tokens_per_minute=50)
    assert (await one.admit("a", limit)).refusal is None
    with redis.frozen():
        # From now on, silence counts.
        clock.run()
        assert (await one.admit("b", limit)).refusal is None
        one.leave("a", 1000)
    while heard != [False, True]:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    # The request that Redis was asked about when it fell silent has no lease either.
    for name in ("a", "b"):
        while (decision := await one.admit(name, limit)).refusal is not None:
            assert decision.refusal.kind != "tokens"


async def test_the_first_answer_may_take_longer(services, clock, monkeypatch):
    """Until then a connection is opened; it is no outage."""
    store = services(patience=0.01)
    connect = store._client.connection_pool.get_connection

    async def slow(*arguments, **options):
        await clock.elapse(0.1, steps=100)
        return await connect(*arguments, **options)

    monkeypatch.setattr(store._client.connection_pool, "get_connection", slow)
    assert (await store.admit("a", RateLimit(requests_per_minute=1))).refusal is None
    assert not store._away
    await store.admit("a", RateLimit(requests_per_minute=1))
    assert store._away
