"""Rate limits in a real Redis, shared by services."""

import asyncio

import pytest
import structlog

from triton_openai.access import redis_limits
from triton_openai.access.rate_limits import RateLimit, RateLimits
from triton_openai.access.redis_limits import RedisLimits
from triton_openai.errors import ServiceOverloaded


@pytest.fixture
async def services(redis):
    """Return a maker of services that count in the same Redis."""
    made, url = [], redis.url()

    def make(**options):
        # Nothing is decided by how busy the machine is.
        made.append(RedisLimits(url, RateLimits(), **{"patience": 30.0, **options}))
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


async def leases(limits):
    return await limits._client.zrange("triton_openai:{a}:c", 0, -1)


async def test_leases_are_renewed(services, monkeypatch):
    """What still runs keeps its place, also in a Redis that has lost everything."""
    monkeypatch.setattr("triton_openai.access.redis_limits._RENEWAL", 0.01)
    one, limit = services(), RateLimit(concurrent_requests=1)
    assert (await one.admit("a", limit)).refusal is None
    await one._client.flushdb()
    while not await leases(one):
        pass
    assert (await services().admit("a", limit)).refusal is not None


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_service_counts_alone_while_redis_is_away(services, redis, fault):
    """Requests go on by the service's own counts, or are refused, and the log says it once."""
    heard: list[bool] = []
    patience = 1.0 if fault == "frozen" else 30.0
    one, closed = services(answers=heard.append, patience=patience), services(closed=True, patience=patience)
    limit = RateLimit(requests_per_minute=2)
    assert (await one.admit("a", limit)).refusal is None
    assert (await closed.admit("a", limit)).refusal is None
    if fault == "killed":
        redis.stop()
    else:
        redis.freeze()
    try:
        with structlog.testing.capture_logs() as lines:
            decisions = [await one.admit("a", limit) for _ in range(3)]
            with pytest.raises(ServiceOverloaded):
                await closed.admit("c", limit)
        assert kinds(decisions) == [None, None, "requests"]
        assert [line["event"] for line in lines] == ["the store of rate limits does not answer"] * 2
        assert heard == [False]
        for _ in range(3):
            one.leave("a", 5)
    finally:
        if fault == "killed":
            redis.start()
        else:
            redis.thaw()
    one._away_until = 0.0
    while len(heard) == 1:
        await one.admit("b", RateLimit(requests_per_minute=1000))
        one._away_until = 0.0
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


async def test_a_request_that_is_cancelled_leaves_no_lease(services, monkeypatch):
    """Whoever leaves while Redis counts the request makes room for another."""
    store, other, limit = services(), services(), RateLimit(concurrent_requests=1)
    admitted, run = asyncio.Event(), store._admit

    async def slow(**call):
        await run(**call)
        admitted.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "_admit", slow)
    asking = asyncio.create_task(store.admit("a", limit))
    await admitted.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    while (await other.admit("a", limit)).refusal is not None:
        pass


async def test_a_driver_that_swallows_the_end(services, monkeypatch):
    """The renewal of leases ends where Redis' client takes its cancellation for a time-out, or answers all the same."""
    monkeypatch.setattr(redis_limits, "_RENEWAL", 0)
    for name, failure in ("a", TimeoutError), ("b", None):
        store, renewing = services(), asyncio.Event()

        async def renew(*, renewing=renewing, failure=failure, **call):
            renewing.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if failure is not None:
                    raise failure from None

        monkeypatch.setattr(store, "_renew", renew)
        await store.admit(name, RateLimit(concurrent_requests=1))
        await renewing.wait()
        await asyncio.wait_for(store.close(), 10)


async def test_the_first_answer_may_take_longer(services, monkeypatch):
    """Until then connections are opened and scripts are loaded; it is no outage."""
    store = services(patience=0.0)
    run = store._admit

    async def slow(**call):
        await asyncio.sleep(0.01)
        return await run(**call)

    monkeypatch.setattr(store, "_admit", slow)
    assert (await store.admit("a", RateLimit(requests_per_minute=1))).refusal is None
    assert not store._away
    await store.admit("a", RateLimit(requests_per_minute=1))
    assert store._away
