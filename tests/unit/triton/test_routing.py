"""The choice of a Triton for a request."""

import heapq
import math
import random
from collections import Counter, defaultdict
from hashlib import blake2b

import pytest

from bench.fleet import TEMPLATES, share_at_one_triton
from tests.cases import every_case
from triton_openai.config.tree import EjectionSettings, RoutingSettings
from triton_openai.triton import routing
from triton_openai.triton.routing import Pool, RetryBudget, Ring, Target

EJECTION = EjectionSettings()


def pool_of(*weights, policy="least_requests", **options):
    pool = Pool(policy, **{"max_ejected": 0.5, "load_factor": 1.25, "seed": 1, **options})
    pool.update([Target(f"t{place}", weight) for place, weight in enumerate(weights)])
    return pool


def chosen(pool, key):
    return pool.choose(0.0, key=key).endpoint


def spread(pool, requests, *, running=0, now=100.0, key=lambda number: None):
    """Send *requests*, of which as many as *running* run at a time, and return how many each target got."""
    got: Counter[str] = Counter()
    open_ones, order = [], random.Random(7)
    for number in range(requests):
        target = pool.choose(now, key=key(number))
        got[target.endpoint] += 1
        pool.count(target, 1)
        open_ones.append(target)
        while len(open_ones) > running:
            pool.count(open_ones.pop(order.randrange(len(open_ones))), -1)
    for target in open_ones:
        pool.count(target, -1)
    return got


@pytest.mark.parametrize("policy", ["least_requests", "round_robin"])
@pytest.mark.parametrize("running", [0, 60])
@pytest.mark.parametrize("weights", [(1, 1, 1), (2, 1, 1), (3, 1, 1, 1, 1, 1, 1)])
def test_requests_are_spread_by_weight(policy, running, weights):
    """Every target gets its share, with few requests at a time and with many."""
    got = spread(pool_of(*weights, policy=policy), 6000, running=running)
    for place, weight in enumerate(weights):
        assert got[f"t{place}"] == pytest.approx(6000 * weight / sum(weights), rel=0.25)


def work(pools, requests, *, running, key=lambda number: None):
    """
    Send *requests* of mixed length, of which *running* run at a time, through *pools*, each of which sees its own only.

    Returns the requests, and the tokens, of each target.
    """
    order = random.Random(11)
    got: Counter[str] = Counter()
    tokens: defaultdict[str, float] = defaultdict(float)
    ends: list[tuple[float, int, Pool, Target]] = []
    now = 0.0
    for number in range(requests):
        if len(ends) >= running:
            now, _, pool, target = heapq.heappop(ends)
            pool.count(target, -1)
        pool = pools[number % len(pools)]
        target = pool.choose(now + 100, key=key(number))
        pool.count(target, 1)
        # Most are short, some are very long: 40 tokens are the median, and one in a hundred has more than 1,600.
        length = order.lognormvariate(math.log(40), 1.6)
        heapq.heappush(ends, (now + length, number, pool, target))
        got[target.endpoint] += 1
        tokens[target.endpoint] += length
    return got, tokens


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("policy", ["least_requests", "round_robin", "affinity"])
def test_the_busiest_of_three_tritons_is_near_the_mean(policy, workers):
    """Of 3,000 requests of mixed length, and of their tokens, it gets 15 % more than the mean at most."""
    pools = [pool_of(1, 1, 1, policy=policy, seed=seed) for seed in range(workers)]
    sessions = random.Random(5)
    got, tokens = work(pools, 3000, running=64, key=lambda _: b"%d" % sessions.randrange(500))
    assert sum(got.values()) == 3000
    assert max(got.values()) <= 1.15 * 3000 / 3
    assert max(tokens.values()) <= 1.15 * sum(tokens.values()) / 3


def test_round_robin_takes_turns():
    """Equal targets get one request after the other."""
    pool = pool_of(1, 1, 1, policy="round_robin")
    turns = [pool.choose(0.0).endpoint for _ in range(9)]
    assert turns == turns[:3] * 3
    assert len(set(turns[:3])) == 3


def test_the_slowest_target_gets_least():
    """A target whose requests do not end gets no more of them than the others have."""
    pool = pool_of(1, 1, 1)
    for _ in range(300):
        target = pool.choose(0.0)
        target.running += 1
        if target.endpoint != "t0":
            target.running -= 1
    assert pool.targets[0].running < 5


def test_nobody_is_chosen_without_weight_or_after_a_failure():
    """Weight 0 and a failed Triton get nothing."""
    pool = pool_of(0, 1, 1)
    assert set(spread(pool, 100)) == {"t1", "t2"}
    assert {pool.choose(0.0, avoid=["t1"]).endpoint for _ in range(20)} == {"t2"}
    assert pool.choose(0.0, avoid=["t1", "t2"]) is None
    many = pool_of(*[1] * 50)
    failed = [target.endpoint for target in many.targets[1:]]
    assert {many.choose(0.0, avoid=failed).endpoint for _ in range(50)} == {"t0"}
    assert pool_of().choose(0.0) is None
    assert pool_of(0).choose(0.0) is None


@pytest.mark.parametrize("others", [2, 9])
def test_a_target_that_came_back_begins_with_a_tenth(others):
    """A target that came back gets some 10 % of its share at first, and all of it after ten seconds."""
    for age, part in ((0.0, 0.1), (5.0, 0.5), (10.0, 1.0)):
        pool = pool_of(*[1] * (others + 1))
        pool.targets[0].restore(100.0)
        got = spread(pool, 20_000, now=100.0 + age)["t0"]
        assert got == pytest.approx(20_000 * part / (others + part), rel=0.3), age


def test_ejected_targets_get_nothing_unless_too_many_are():
    """Failures in a row eject; beyond the largest share all are used."""
    pool = pool_of(1, 1, 1, 1)
    first, second, third, _ = pool.targets
    assert [first.fail(0.0, EJECTION) for _ in range(5)] == [False] * 4 + [True]
    pool.update(pool.targets)
    assert set(spread(pool, 200)) == {"t1", "t2", "t3"}
    second.eject(0.0, EJECTION)
    pool.update(pool.targets)
    assert not pool.panics
    assert set(spread(pool, 200)) == {"t2", "t3"}
    third.eject(0.0, EJECTION)
    pool.update(pool.targets)
    assert pool.panics
    assert set(spread(pool, 200)) == {"t0", "t1", "t2", "t3"}


def test_success_ends_a_row_of_failures():
    """Only failures in a row count."""
    target = Target("a", 1)
    for _ in range(20):
        assert not any(target.fail(0.0, EJECTION) for _ in range(4))
        target.succeed()


def test_the_time_of_an_ejection_doubles():
    """Each ejection without a success in between lasts twice as long, up to the limit."""
    target, times = Target("a", 1), []
    for _ in range(8):
        target.eject(0.0, EJECTION)
        times.append(target.ejected_until)
        target.restore(0.0)
    assert times == [10, 20, 40, 80, 160, 300, 300, 300]
    target.succeed()
    target.eject(0.0, EJECTION)
    assert target.ejected_until == 10


def test_a_key_stays_and_few_move_when_a_target_leaves():
    """Of the keys, those of the target that leaves move, and no others."""
    keys = [str(number).encode() for number in range(3000)]

    def homes(*names):
        pool = Pool("affinity", max_ejected=0.5, load_factor=100.0)
        pool.update([Target(name, 1) for name in names])
        return {key: chosen(pool, key) for key in keys}

    before, after = homes("a", "b", "c", "d", "e"), homes("a", "b", "c", "d")
    assert before == homes("e", "d", "c", "b", "a")
    moved = [key for key in keys if before[key] != after[key]]
    assert {before[key] for key in moved} == {"e"}
    assert len(moved) == pytest.approx(3000 / 5, rel=0.3)
    assert max(Counter(before.values()).values()) < 1.3 * 3000 / 5


def test_a_ring_with_less_room_moves_few_keys():
    """With so many targets that each has fewer points, keys still stay."""
    keys = [str(number).encode() for number in range(2000)]

    def homes(count):
        pool = Pool("affinity", max_ejected=0.5, load_factor=100.0)
        pool.update([Target(f"t{number}", 1) for number in range(count)])
        return [chosen(pool, key) for key in keys]

    moved = sum(before != after for before, after in zip(homes(300), homes(299), strict=True))
    assert moved < 100


def test_pools_share_a_ring():
    """A pool on a ring of more Tritons than it has chooses as on its own, also when one is ejected."""
    ring = Ring()
    ring.update({f"t{place}": 1.0 for place in range(40)})
    own, shared = pool_of(*[1] * 7, policy="affinity"), pool_of(*[1] * 7, policy="affinity")
    keys = [str(number).encode() for number in range(300)]
    targets = list(shared.targets)
    shared.update(targets, ring=ring)
    before = [chosen(own, key) for key in keys]
    assert before == [chosen(shared, key) for key in keys]
    targets[3].ejected_until = 1.0
    for pool, ringed in ((own, None), (shared, ring)):
        pool.update(targets if ringed else own.targets, ejected=["t3"], ring=ringed)
    moved = [chosen(shared, key) for key in keys]
    assert moved == [chosen(own, key) for key in keys]
    assert "t3" not in moved
    assert all(now == then for now, then in zip(moved, before, strict=True) if then != "t3")


def test_a_changed_ring_keeps_the_points_of_other_tritons(monkeypatch):
    """Where one of many Tritons comes or goes, only its points are made; the ring is the same as a new one."""
    made: Counter[bytes] = Counter()

    def counted(data, **options):
        made[data.split(b"#")[0]] += 1
        return blake2b(data, **options)

    monkeypatch.setattr(routing, "blake2b", counted)
    ring, names = Ring(), {f"t{place}": 1.0 for place in range(300)}
    keys = [str(number).encode() for number in range(200)]
    ring.update(names)
    for changes in ({"t7": None}, {"t7": 1.0}, {"t8": 2.0, "t9": None}, {"new": 1.0, "newer": 3.0}) * 2:
        assert next(ring.owners(b"x"))
        made.clear()
        names = {name: weight for name, weight in {**names, **changes}.items() if weight is not None}
        ring.update(names)
        assert next(ring.owners(b"x"))
        assert made.keys() - {b"x"} <= {name.encode() for name in changes}
        fresh = Ring()
        fresh.update(names)
        assert [next(ring.owners(key)) for key in keys] == [next(fresh.owners(key)) for key in keys]


def test_no_target_gets_more_than_its_bounded_load():
    """One key for all requests: they move on when its target has more than the load factor allows."""
    pool = pool_of(1, 1, 1, 1, policy="affinity")
    for _ in range(400):
        pool.count(pool.choose(0.0, key=b"the same"), 1)
    assert max(target.running for target in pool.targets) <= 126
    assert sorted(target.running for target in pool.targets)[-3] >= 100


@pytest.mark.parametrize("policy", ["least_requests", "round_robin", "affinity"])
@pytest.mark.parametrize("others", [2, 9])
def test_no_target_runs_more_than_it_may_while_another_has_room(policy, others):
    """Whatever the policy and the weights: all are full before one gets more, and then one does."""
    pool = pool_of(5, *[1] * others, policy=policy)
    pool.max_running = 4
    for number in range(4 * (others + 1)):
        pool.count(pool.choose(100.0, key=b"the same" if number % 2 else None), 1)
    assert {target.running for target in pool.targets} == {4}
    assert pool.choose(100.0, key=b"the same") is not None
    assert pool.choose(100.0, avoid=[target.endpoint for target in pool.targets[1:]]).endpoint == "t0"


def test_a_key_goes_on_where_only_loaded_targets_are_left():
    """The bound spreads requests; it refuses none when the others have failed or do not fit."""
    pool = pool_of(1, 1, policy="affinity")
    for _ in range(20):
        pool.count(pool.targets[1], 1)
    assert pool.choose(0.0, key=b"k", avoid=["t0"]).endpoint == "t1"


def test_requests_of_a_target_that_left_do_not_count():
    """Requests of a target that left end later, and the bound of the others stays right."""
    pool = pool_of(1, 1, 1, policy="affinity")
    gone, *others = pool.targets
    for _ in range(20):
        pool.count(gone, 1)
    pool.update(others)
    for _ in range(20):
        pool.count(gone, -1)
    assert (pool.running, gone.running) == (0, 0)


def test_requests_without_a_key_go_to_where_fewest_run():
    """Affinity without a key is least requests."""
    pool = pool_of(1, 1, 1, policy="affinity")
    pool.targets[0].running = pool.targets[2].running = 9
    assert pool.choose(0.0).endpoint == "t1"


@every_case("head", TEMPLATES.values())
def test_the_default_size_of_a_prefix_keeps_short_system_prompts_together(head):
    """Tenants stay at a Triton, whatever their template; one tenant alone uses all Tritons within the load factor."""
    settings = RoutingSettings()
    assert share_at_one_triton(settings.prefix_size, head, 30)[0] > 0.7
    assert share_at_one_triton(1024, head, 30)[0] < 0.5
    share, busiest = share_at_one_triton(settings.prefix_size, head, 1)
    assert share < 0.5
    assert busiest <= settings.load_factor


def test_a_budget_bounds_retries():
    """Retries are a fifth of the requests of ten seconds, and at least three."""
    budget = RetryBudget(0.2)
    assert [budget.spend(0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    for second in range(20, 30):
        for _ in range(10):
            budget.count(second)
    assert sum(budget.spend(29.5) for _ in range(50)) == 20
    assert sum(budget.spend(60.0) for _ in range(50)) == 3
