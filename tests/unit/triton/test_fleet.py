"""Several Tritons as one: what they have together, leases, failover and ejection."""

import asyncio
import contextlib
import math
from collections import Counter
from typing import Any

import msgspec
import pytest
import structlog

from tests.unit.triton.test_catalog import FakeClient
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.config.tree import (
    EjectionSettings,
    EndpointSettings,
    FailoverSettings,
    RoutingSettings,
    TritonSettings,
)
from triton_openai.errors import (
    ConfigurationError,
    InvalidRequest,
    ModelCrashed,
    Overloaded,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallTracer
from triton_openai.triton import routing
from triton_openai.triton.catalog import Snapshot, config_digest, merge
from triton_openai.triton.client import IndexEntry
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.leasing import Attempts
from triton_openai.triton.route import Route
from triton_openai.triton.status import classify, cut_off_error, foreign_error
from triton_openai.triton.tensors import EnsembleStep, InferRequest, ModelConfig


class Triton(FakeClient):
    """Answers requests with itself, or raises what the test has put into ``failure``."""

    size = 0

    def __init__(self, *models):
        super().__init__(*models)
        self.failure = None
        self.asked_for = []
        self.hangs = None

    async def infer(self, request):
        self.asked_for.append(request.model)
        if self.hangs is not None:
            await self.hangs.wait()
        if self.failure is not None:
            raise self.failure
        return self

    async def close(self):
        self.closed = True


class Told:
    """Counts what a fleet tells."""

    def __init__(self):
        self.events: Counter[Any] = Counter()
        self.running: Counter[str] = Counter()
        self.endpoints: set[str] = set()

    def __call__(self, event, *labels, by=1):
        if event == "endpoints":
            self.endpoints = set(labels)
        elif event == "running":
            self.running[labels[0]] += by
        else:
            self.events[event, *labels] += by


@pytest.fixture
async def fleets():
    """Return a maker of fleets whose Tritons have been looked at once."""
    made = []

    async def make(ask=None, grace=10.0, **options):
        tritons = options.pop("tritons")
        listed = [EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in tritons]
        # No timer takes what a test has applied back.
        options = {"refresh_interval": 1000.0, "dns_interval": 1000.0, **options}
        settings = TritonSettings(endpoints=tuple(listed), **options)
        told = Told()
        fleet = Fleet(settings, connect=lambda each: tritons[each.name], count=told, grace=grace)
        fleet.leasing.ejections.probe = ask
        running = asyncio.create_task(fleet.run())
        await fleet.first.wait()
        made.append((fleet, running))
        return fleet

    yield make
    for fleet, running in made:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await fleet.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)


async def asked(fleet, route=None):
    """Ask the model for an answer."""
    client = UpstreamClient(route or Route(fleet.leasing, "m"), CallTracer(), Background())
    return tuple(await client.ask(InferRequest(model="m", id="1", inputs=())))


def tried(*names):
    found = Attempts()
    found.extend(names)
    return found


async def test_models_of_all_are_served(fleets):
    """A model that one Triton has is there; one that is ready somewhere does not wait."""
    a, b = Triton("m", "only-a"), Triton("m")
    b.index.append(IndexEntry(name="only-a", version="1", state="UNAVAILABLE", reason="unloaded"))
    b.index.append(IndexEntry(name="nowhere", version="1", state="UNAVAILABLE", reason="failed"))
    fleet = await fleets(tritons={"a": a, "b": b})
    assert list(fleet.snapshot.configs) == ["m", "only-a"]
    assert fleet.snapshot.waiting == {"nowhere": "failed"}
    assert {fleet.leasing.lease("only-a").endpoint for _ in range(9)} == {"a"}
    assert {fleet.leasing.lease("m").endpoint for _ in range(9)} == {"a", "b"}
    with pytest.raises(UpstreamUnavailable):
        fleet.leasing.lease("nowhere")


async def test_a_triton_that_is_away_takes_nothing_away(fleets):
    """The models of the others stay, and the service is reachable until none answers."""
    a, b = Triton("m"), Triton("m")
    a.error = UpstreamUnavailable("gone")
    fleet = await fleets(tritons={"a": a, "b": b})
    assert fleet.snapshot.reachable
    assert {fleet.leasing.lease("m").endpoint for _ in range(9)} == {"b"}
    b.error = a.error
    await fleet.refresh()
    assert not fleet.snapshot.reachable


def test_variants_are_told_by_what_changes_an_answer():
    """Another batch size makes a variant; a parameter that no adapter reads does not; an ensemble has its steps'."""

    def snapshot(**configs):
        digests = {name: config_digest(name, configs) for name in configs}
        return Snapshot(configs=configs, digests=digests, complete=True)

    step = EnsembleStep(model="engine", input_map={}, output_map={})
    ModelConfig(name="x").parameter("decoding_mode")

    def triton(batch=8, **parameters):
        return snapshot(
            whole=ModelConfig(name="whole", steps=(step,)),
            engine=ModelConfig(name="engine", max_batch_size=batch, parameters=parameters),
        )

    ModelConfig(name="x").parameter("tokenizer_dir")
    same = merge(
        {"a": triton(gpu_device_ids="0", tokenizer_dir="/a/t"), "b": triton(gpu_device_ids="1", tokenizer_dir="/t")}
    )
    assert not same.variants
    other = merge({"a": triton(batch=4), "b": triton(), "c": triton()})
    assert {name: [sorted(one.endpoints) for one in found] for name, found in other.variants.items()} == {
        "engine": [["b", "c"], ["a"]],
        "whole": [["b", "c"], ["a"]],
    }
    assert other.configs["engine"].max_batch_size == 8
    assert other.variants["whole"][1].repository["engine"].max_batch_size == 4
    assert merge({"a": triton(decoding_mode="beam"), "b": triton()}).variants.keys() == {"engine", "whole"}


@pytest.mark.parametrize(
    "failure",
    [
        UpstreamUnavailable("away"),
        cut_off_error("reset"),
        classify("Request for unknown model: 'm' is not found", "m"),
        classify("Exceeds maximum queue size", "m"),
        classify("Socket closed", "m", "UNAVAILABLE"),
        *(foreign_error(status, "<html>") for status in ("200", "302", "401", "404", "429", "500", "502", "503")),
    ],
)
async def test_what_did_not_reach_a_model_goes_elsewhere(fleets, failure):
    """A request that one Triton cannot take is answered by another one."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b}, failover=FailoverSettings(budget=1.0))
    # So that the first goes to the one that fails.
    busy = fleet.leasing.lease("m", at="b")
    a.failure = failure
    answers = [await asked(fleet) for _ in range(10)]
    busy.close()
    assert answers == [(b,)] * 10
    assert fleet.metrics.count.running.total() == 0
    assert fleet.metrics.count.events["failovers", "m", failure.code] == len(a.asked_for) > 0


@pytest.mark.parametrize(
    "failure",
    [UpstreamError("The model failed."), InvalidRequest("wrong"), UpstreamTimeout("late", code="upstream_silent")],
)
async def test_what_a_model_refused_goes_nowhere_else(fleets, failure):
    """The same request would fail again, or still runs."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    a.failure = b.failure = failure
    with pytest.raises(type(failure)):
        await asked(fleet)
    assert len(a.asked_for + b.asked_for) == 1


async def test_attempts_are_bounded_and_no_request_kills_three(fleets):
    """A request reaches as many Tritons as the settings allow, and two at most if it may be what ends them."""
    crashed = classify("Stub process 'm_0_0' is not healthy.", "m")
    for failure, reached in ((UpstreamUnavailable("away"), 3), (cut_off_error("reset"), 2), (crashed, 2)):
        tritons = {name: Triton("m") for name in "abcd"}
        fleet = await fleets(tritons=tritons, failover=FailoverSettings(attempts=3))
        for triton in tritons.values():
            triton.failure = failure
        with pytest.raises(UpstreamError):
            await asked(fleet)
        assert sum(len(triton.asked_for) for triton in tritons.values()) == reached


async def test_retries_have_a_budget(clock, fleets):
    """When every request fails, only a part of them is sent again."""
    tritons = {name: Triton("m") for name in "ab"}
    fleet = await fleets(tritons=tritons, ejection=EjectionSettings(failures=1000))
    for triton in tritons.values():
        triton.failure = classify("Exceeds maximum queue size", "m")
    for _ in range(50):
        with pytest.raises(Overloaded):
            await asked(fleet)
    assert sum(len(triton.asked_for) for triton in tritons.values()) == 60
    assert fleet.metrics.count.events[("budget_exhausted",)] == 40


async def test_a_model_that_fails_is_ejected_and_comes_back(fleets):
    """Five failures in a row eject it; it is asked after its time, and takes requests once it answers."""
    a, b, c = (Triton("m") for _ in range(3))
    probes, answers = [], asyncio.Event()

    async def ask(model, endpoint):
        probes.append((model, endpoint))
        if len(probes) < 3:
            raise UpstreamError("still broken")
        answers.set()

    fleet = await fleets(ask, tritons={"a": a, "b": b, "c": c}, ejection=EjectionSettings(time=0.01, max_time=0.02))
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            fleet.leasing.lease("m", at="a").close(UpstreamError("The model failed."))
        assert {fleet.leasing.lease("m").endpoint for _ in range(30)} == {"b", "c"}
        await answers.wait()
        await until(lambda: lines[-1]["event"] == "Triton restored")
    assert probes == [("m", "a")] * 3
    assert fleet.metrics.count.events["ejections", "a", "m", "upstream_error"] == 1
    assert fleet.metrics.count.events["ejected", "a", "m"] == 0
    assert [line["event"] for line in lines] == ["Triton ejected", "Triton restored"]


async def test_three_ejected_models_eject_a_triton(fleets):
    """A fourth model gets no requests there either."""
    models = ("m", "n", "o", "p")
    fleet = await fleets(tritons={name: Triton(*models) for name in "abc"})
    for model in models[:3]:
        assert {fleet.leasing.lease("p").endpoint for _ in range(60)} == {"a", "b", "c"}
        for _ in range(5):
            fleet.leasing.lease(model, at="a").close(UpstreamError("The model failed."))
    assert {fleet.leasing.lease("p").endpoint for _ in range(60)} == {"b", "c"}


async def test_requests_without_a_token_learn_that_their_triton_is_lost(fleets):
    """A Triton whose list cannot be read any more is left by what still can go elsewhere."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    lost = []
    for name in "ab":
        fleet.leasing.lease("m", at=name).lost = lambda final, name=name: lost.append((name, final))
    a.error = UpstreamTimeout("frozen")
    await fleet.refresh()
    assert lost == [("a", False)]


async def test_a_triton_that_leaves_may_finish(fleets):
    """What is taken off the list gets no requests, and its connections close when the last has ended."""
    a, b, c = Triton("m"), Triton("m"), Triton("m", "new")
    tritons = {"a": a, "b": b}
    fleet = await fleets(tritons=tritons)
    held = fleet.leasing.lease("m", at="a")
    tritons["c"] = c
    await fleet._apply([EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in ("b", "c")])
    await until(lambda: "new" in fleet.snapshot.configs)
    assert {fleet.leasing.lease("m").endpoint for _ in range(60)} == {"b", "c"}
    assert not hasattr(a, "closed")
    held.close()
    await until(lambda: hasattr(a, "closed"))


async def test_weights_change_without_a_new_connection(fleets):
    """Weight 0 takes the requests away, and another weight brings them back."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    for weight, used in ((0.0, {"b"}), (1.0, {"a", "b"})):
        await fleet._apply(
            [
                EndpointSettings(name="a", url=("http://a:8000",), weight=weight),
                EndpointSettings(name="b", url=("http://b:8000",)),
            ]
        )
        leases = [fleet.leasing.lease("m") for _ in range(60)]
        assert {lease.endpoint for lease in leases} == used
        for lease in leases:
            lease.close()
    assert not hasattr(a, "closed")


async def test_a_list_that_changes_makes_no_hash_ring(fleets, monkeypatch):
    """With affinity, a model that comes and goes, an outage and an ejection leave the points of the Tritons alone."""
    tritons = {f"t{place}": Triton("m", "n") for place in range(40)}
    fleet = await fleets(tritons=tritons, routing=RoutingSettings(policy="affinity"))

    def chosen(number):
        with contextlib.closing(fleet.leasing.lease("m", key=b"%d" % number)) as lease:
            return lease.endpoint

    before = [chosen(number) for number in range(100)]
    monkeypatch.setattr(routing.Ring, "_apply", None)
    changed = fleet.members["t7"]
    for index in ([], [entry for entry in tritons["t7"].index if entry.name == "n"], list(tritons["t7"].index)):
        tritons["t7"].index = index
        await changed.catalog.refresh()
        chosen(0)
    tritons["t7"].error = UpstreamUnavailable("gone")
    await changed.catalog.refresh()
    for number, endpoint in enumerate(before):
        assert (chosen(number) == endpoint) is (endpoint != "t7")


async def test_policies_hold_for_single_models(fleets):
    """An override is for its model alone."""
    fleet = await fleets(
        tritons={name: Triton("m", "n") for name in "abc"},
        routing=RoutingSettings(policy="affinity", overrides={"n": "round_robin"}),
    )
    for model, key, expected in (("m", b"k", 1), ("n", b"k", 3)):
        chosen = set()
        for _ in range(6):
            lease = fleet.leasing.lease(model, key=key)
            chosen.add(lease.endpoint)
            lease.close()
        assert len(chosen) == expected


async def test_one_triton_is_asked_whatever_it_has(fleets):
    """With one Triton nothing is ejected, and it says itself that it does not have a model."""
    a = Triton("m")
    fleet = await fleets(tritons={"a": a})
    for _ in range(20):
        fleet.leasing.lease("m").close(UpstreamError("The model failed."))
    assert fleet.leasing.lease("m").endpoint == fleet.leasing.lease("gone").endpoint == "a"
    a.failure = UpstreamUnavailable("away")
    with pytest.raises(UpstreamUnavailable):
        await asked(fleet)
    assert a.asked_for == ["m"]


async def test_what_a_triton_takes_with_it_may_go_elsewhere(fleets):
    """The requests that ran on a Triton that ends are no storm: each goes on once, and those after it have a budget."""
    fleet = await fleets(tritons={"a": Triton("m"), "b": Triton("m")}, failover=FailoverSettings(budget=0.0))
    leases = [fleet.leasing.lease("m", at="a") for _ in range(30)]
    gone = []
    for lease in leases:
        gone.append(fleet.leasing.may_retry(lease, cut_off_error("reset"), tried("a")))
        lease.close(cut_off_error("reset"))
    assert gone == [True] * 30
    later = fleet.leasing.lease("m", at="a")
    assert [fleet.leasing.may_retry(later, cut_off_error("reset"), tried("a")) for _ in range(4)] == [
        True,
        True,
        True,
        False,
    ]
    later.close(cut_off_error("reset"))


async def test_a_triton_that_fails_for_a_moment_takes_requests_again(fleets):
    """What it did not have ready once, it has at the next look, which is at once, though its list is the same."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    held = fleet.leasing.lease("m", at="a")
    fleet.leasing.lease("m", at="a").close(UpstreamUnavailable("restarts"))
    assert {fleet.leasing.lease("m").endpoint for _ in range(30)} == {"b"}
    await until(lambda: fleet.leasing.takes("m", "a"))
    assert fleet.members["a"].targets["m"].running == 1
    held.close()
    assert fleet.members["a"].targets["m"].running == 0


async def test_a_triton_that_takes_no_connections_is_ejected(fleets, monkeypatch):
    """Though its list has the model: failures count over the looks in between."""
    monkeypatch.setattr("triton_openai.triton.catalog._MISS_SECONDS", 0.0)
    answers = asyncio.Event()

    async def ask(model, endpoint):
        await answers.wait()

    fleet = await fleets(ask, tritons={"a": Triton("m"), "b": Triton("m")}, ejection=EjectionSettings(time=0.001))
    for _ in range(5):
        await until(lambda: fleet.leasing.takes("m", "a"))
        fleet.leasing.lease("m", at="a").close(UpstreamUnavailable("refused"))
    assert fleet.metrics.count.events["ejected", "a", "m"] == 1
    answers.set()
    await until(lambda: fleet.leasing.takes("m", "a"))
    assert fleet.metrics.count.events["ejected", "a", "m"] == 0


async def test_no_tritons_are_an_outage(fleets):
    """A list without Tritons answers requests with an error, until there is one."""
    fleet = await fleets(tritons={"a": Triton("m"), "b": Triton("m")})
    both = [EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in "ab"]
    await fleet._apply([])
    assert not fleet.snapshot.reachable
    with pytest.raises(UpstreamUnavailable):
        fleet.leasing.lease("m")
    await fleet._apply(both)
    await until(lambda: fleet.snapshot.reachable)


async def test_a_triton_that_leaves_is_not_counted(fleets):
    """Its metrics do not stay: neither that it answers, nor that it is ejected; nobody asks it any more."""
    fleet = await fleets(tritons={name: Triton("m") for name in "abc"})
    for _ in range(5):
        fleet.leasing.lease("m", at="a").close(UpstreamError("The model failed."))
    events = fleet.metrics.count.events
    assert (events["up", "a"], events["ejected", "a", "m"]) == (1, 1)
    await fleet._apply([EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in "bc"])
    await until(lambda: not events["ejected", "a", "m"])
    assert (events["up", "a"], events["up", "b"]) == (0, 1)


async def test_names_in_metrics_follow_the_tritons_that_there_are(fleets):
    """However many have been there, 64 at a time have their names; who leaves, also with requests, is not counted."""
    present = {f"t{number}": Triton("m") for number in range(64)}
    fleet = await fleets(tritons=present, grace=0.0)
    apply = fleet._discovery._apply

    def listed(*names):
        for name in names:
            present.setdefault(name, Triton("m"))
        return [EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in names]

    running = fleet.leasing.lease("m", at="t0")
    names = []
    for generation in range(3):
        # Those that leave are still there for a moment.
        names = [f"{generation}-{number}" for number in range(64)]
        await apply(listed(*names))
    await apply(listed("last", *names[1:]))
    await until(lambda: not [one for one in fleet._tasks if "_remove" in str(one)])
    running.close()
    await until(fleet.members["last"].catalog.first.is_set)
    fleet.leasing.lease("m", at="last").close()
    labels = fleet.metrics.count.events
    assert labels["ended", "last", "m", "cancelled"] + labels["ended", "last", "m", "answered"] == 1
    assert fleet.metrics.count.running.total() == 0
    assert fleet.metrics.count.endpoints == {"last", *names[1:]}


async def test_ejection_holds_for_tritons_that_came_later(fleets):
    """Beside a Triton that was alone, as the addresses of a name may be, others are ejected as well."""
    tritons = {"a": Triton("m")}
    fleet = await fleets(tritons=tritons)
    tritons["b"] = Triton("m")
    await fleet._apply([EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in "ab"])
    await until(lambda: fleet.leasing.takes("m", "b"))
    for _ in range(5):
        fleet.leasing.lease("m", at="b").close(UpstreamError("The model failed."))
    assert {fleet.leasing.lease("m").endpoint for _ in range(30)} == {"a"}


async def test_all_are_used_when_too_many_are_ejected_altogether(fleets):
    """Tritons that are ejected for all models count for the largest share that may be."""
    models = ("m", "n", "o", "p")
    fleet = await fleets(tritons={name: Triton(*models) for name in "abc"})
    for name in "ab":
        for model in models[:3]:
            for _ in range(5):
                fleet.leasing.lease(model, at=name).close(UpstreamError("The model failed."))
    assert fleet.metrics.count.events["panics", "p"] == 1
    assert {fleet.leasing.lease("p").endpoint for _ in range(60)} == {"a", "b", "c"}


async def test_other_settings_hold_at_once(fleets):
    """Policies, ejection and failover change under requests, none of which finds no Triton meanwhile."""
    fleet = await fleets(tritons={name: Triton("m") for name in "abc"})
    changed = msgspec.structs.replace(
        fleet._settings,
        routing=RoutingSettings(policy="round_robin"),
        failover=FailoverSettings(attempts=1),
        ejection=EjectionSettings(failures=1),
    )
    changing = asyncio.create_task((await fleet.prepare(changed))())
    while not changing.done():
        fleet.leasing.lease("m").close()
        await asyncio.sleep(0)
    turns = [fleet.leasing.lease("m").endpoint for _ in range(6)]
    assert turns == turns[:3] * 2
    lease = fleet.leasing.lease("m", at="a")
    assert not fleet.leasing.may_retry(lease, cut_off_error("reset"), tried("a"))
    lease.close(UpstreamError("The model failed."))
    assert {fleet.leasing.lease("m").endpoint for _ in range(9)} == {"b", "c"}


async def test_one_triton_becomes_several_by_a_restart(fleets):
    """Settings that name one Triton in place of several are refused, and nothing changes."""
    fleet = await fleets(tritons={"a": Triton("m"), "b": Triton("m")})
    with pytest.raises(ConfigurationError, match="restart"):
        await fleet.prepare(TritonSettings())
    alone = Fleet(TritonSettings(), connect=lambda _: Triton("m"))
    with pytest.raises(ConfigurationError, match="restart"):
        await alone.prepare(fleet._settings)


async def test_requests_to_one_of_several_variants_count_for_the_budget(fleets):
    """The share of retries is one of all requests, those included that only some Tritons can take."""
    fleet = await fleets(tritons={name: Triton("m") for name in "abc"}, failover=FailoverSettings(budget=1.0))
    leases = [fleet.leasing.lease("m", among=("a", "b")) for _ in range(10)]
    error = Overloaded("full")
    assert all(fleet.leasing.may_retry(lease, error, tried(lease.endpoint)) for lease in leases)


async def test_a_further_answer_goes_elsewhere_when_its_triton_has_gone(fleets):
    """The answers to a prompt share a Triton, but only while that takes requests."""
    fleet = await fleets(tritons={"a": Triton("m"), "b": Triton("m")})
    route = Route(fleet.leasing, "m")
    first = route.lease(Attempts(), prompt="Hello")
    assert {route.lease(Attempts(), prompt="Hello").endpoint for _ in range(9)} == {first.endpoint}
    first.close(UpstreamUnavailable("refused"))
    assert {route.lease(Attempts(), prompt="Hello").endpoint for _ in range(9)} == {"a", "b"} - {first.endpoint}


async def test_a_line_of_a_batch_ends_one_triton_at_most(fleets):
    """What must not be sent again when its Triton ends, or stops answering, still goes on to another one before."""

    async def attempts_of(failure, *, freezes=False):
        tritons = {name: Triton("m") for name in "abc"}
        fleet = await fleets(tritons=tritons)
        for triton in tritons.values():
            triton.failure = failure
            if freezes:
                triton.hangs = asyncio.Event()
        asking = asyncio.create_task(asked(fleet, Route(fleet.leasing, "m", resends_lost=False)))
        if freezes:
            await until(lambda: any(triton.asked_for for triton in tritons.values()))
            for member in fleet.members.values():
                member.report_lost(final=False)
        with pytest.raises(UpstreamError):
            await asking
        return sum(len(triton.asked_for) for triton in tritons.values())

    assert 1 == await attempts_of(cut_off_error("reset"))
    assert 1 == await attempts_of(ModelCrashed("ended"))
    assert 1 == await attempts_of(None, freezes=True)
    assert 3 == await attempts_of(UpstreamUnavailable("refused"))


async def test_endpoints_that_cannot_be_used_change_nothing(fleets):
    """A list with one wrong entry takes no Triton away."""
    a, b, new = Triton("m"), Triton("m"), Triton("m")
    tritons = {"a": a, "b": b, "new": new}
    fleet = await fleets(tritons={"a": a, "b": b})

    def connect(each):
        if each.name == "wrong":
            raise ConfigurationError("There is no certificate.")
        return tritons[each.name]

    fleet._connect = connect
    with pytest.raises(ConfigurationError):
        await fleet._apply([EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in ("new", "wrong")])
    assert list(fleet.members) == ["a", "b"]


async def test_the_capacity_of_a_model_follows_its_tritons(fleets):
    """It is that of those that take requests; whoever waits for room is told when it may be another one."""
    fleet = await fleets(tritons={"a": Triton("m"), "b": Triton("m"), "c": Triton("n")})
    told = []
    fleet.leasing.on_capacity = lambda: told.append(fleet.leasing.capacity("m"))
    assert fleet.leasing.capacity("m") == math.inf
    fleet.leasing.limit(3)
    assert (fleet.leasing.capacity("m"), fleet.leasing.capacity("n"), fleet.leasing.capacity("nobody's")) == (6, 3, 3)
    for _ in range(5):
        fleet.leasing.lease("m", at="a").close(UpstreamError("The model failed."))
    assert told[-1] == fleet.leasing.capacity("m") == 3
    await fleet._apply([EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in "bc"])
    assert told[-1] == fleet.leasing.capacity("m") == 3


async def test_a_triton_is_drained_of_a_model(fleets):
    """It gets no more requests for it, its running ones end first, and the others go on."""
    fleet = await fleets(tritons={"a": Triton("m", "n"), "b": Triton("m", "n")})
    held, inside, leave = fleet.leasing.lease("m", at="a"), asyncio.Event(), asyncio.Event()

    async def empty():
        async with fleet.leasing.drained(fleet.members["a"], ["m", "unknown"], 1000.0):
            inside.set()
            await leave.wait()

    emptying = asyncio.create_task(empty())
    await until(lambda: not fleet.leasing.takes("m", "a"))
    assert {fleet.leasing.lease("m").endpoint for _ in range(9)} == {"b"}
    assert {fleet.leasing.lease("n").endpoint for _ in range(9)} == {"a", "b"}
    assert not inside.is_set()
    held.close()
    await inside.wait()
    assert {fleet.leasing.lease("m").endpoint for _ in range(9)} == {"b"}
    leave.set()
    await emptying
    assert fleet.leasing.takes("m", "a")


async def test_an_adapter_that_fails_to_ask_leaves_no_triton_ejected(fleets):
    """A mistake of an adapter says nothing of the Triton that it asks."""

    async def ask(model, endpoint):
        raise KeyError("an adapter's mistake")

    fleet = await fleets(ask, tritons={name: Triton("m") for name in "abc"}, ejection=EjectionSettings(time=0.01))
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            fleet.leasing.lease("m", at="a").close(UpstreamError("The model failed."))
        await until(lambda: lines[-1]["event"] == "Triton restored")


async def test_whoever_waits_for_the_first_look_need_not_wait_for_one_that_leaves(fleets):
    """A Triton that is taken off the list before it has answered ends the wait for it."""
    a, silent = Triton("m"), Triton("m")
    never = asyncio.Event()
    settings = TritonSettings(endpoints=("a=http://a:8000", "silent=http://silent:8000"), refresh_interval=1000.0)
    fleet = Fleet(settings, connect=lambda each: a if each.name == "a" else silent)
    silent.gate = never
    running = asyncio.create_task(fleet.run())
    await until(fleet.members["a"].catalog.first.is_set)
    await fleet._apply([EndpointSettings(name="a", url=("http://a:8000",))])
    async with asyncio.timeout(120):
        await fleet.first.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await fleet.close()


async def test_a_triton_that_has_gone_is_not_chosen_while_its_loss_is_told(fleets):
    """However long that takes: it fails fast, and so it would get every request."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    told, go_on = asyncio.Event(), asyncio.Event()

    async def changed(snapshot):
        told.set()
        await go_on.wait()

    fleet.on_change = changed
    b.error = UpstreamUnavailable("gone")
    # Another change is being told of.
    a.index.append(IndexEntry(name="new", version="1", state="LOADING"))
    first = asyncio.create_task(fleet.members["a"].catalog.refresh())
    await told.wait()
    second = asyncio.create_task(fleet.members["b"].catalog.refresh())
    await until(lambda: not fleet.members["b"].snapshot.reachable)
    held = [fleet.leasing.lease("m") for _ in range(9)]
    assert {lease.endpoint for lease in held} == {"a"}
    go_on.set()
    await asyncio.gather(first, second)


async def test_what_reached_no_model_needs_no_budget(fleets):
    """However few requests there are: at another Triton it costs what it would have cost there in the first place."""
    fleet = await fleets(tritons={name: Triton("m") for name in "abc"}, failover=FailoverSettings(budget=0.0))
    for error in (UpstreamUnavailable("refused"), classify("Request for unknown model: 'm' is not found", "m")):
        lease = fleet.leasing.lease("m", at="a")
        assert all(fleet.leasing.may_retry(lease, error, tried("a")) for _ in range(9))
    lease = fleet.leasing.lease("m", at="a")
    assert [fleet.leasing.may_retry(lease, Overloaded("full"), tried("a")) for _ in range(4)] == [
        True,
        True,
        True,
        False,
    ]


async def test_the_last_triton_is_not_doubted(fleets):
    """Of one that fails for a moment while there is no other, the next request gets an answer."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    a.error = UpstreamUnavailable("gone")
    await fleet.refresh()
    looks = b.index_calls
    fleet.leasing.lease("m").close(UpstreamUnavailable("for a moment"))
    assert fleet.leasing.lease("m").endpoint == "b"
    await until(lambda: b.index_calls > looks)


async def test_where_no_other_is_left_an_ejected_triton_gets_the_request(fleets):
    """It may answer, and nobody else does; what has no token yet is not given up before."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    for _ in range(5):
        fleet.leasing.lease("m", at="a").close(UpstreamError("The model failed."))
    b.failure = UpstreamUnavailable("gone")
    assert await asked(fleet) == (a,)


async def test_a_refusal_is_no_loss(fleets):
    """A request that one Triton refuses and another one loses goes to a third; what two have lost does not."""
    for failures, answered in (("rl", True), ("lr", True), ("ll", False)):
        tritons = {name: Triton("m") for name in "abc"}
        fleet = await fleets(tritons=tritons, routing=RoutingSettings(policy="round_robin"))
        for triton, failure in zip(tritons.values(), failures, strict=False):
            triton.failure = UpstreamUnavailable("refused") if failure == "r" else cut_off_error("reset")
        if answered:
            assert await asked(fleet) == (tritons["c"],)
        else:
            with pytest.raises(UpstreamError, match="lost"):
                await asked(fleet)
            assert not tritons["c"].asked_for


async def test_a_whole_answer_is_asked_for_elsewhere_when_its_triton_is_lost(fleets):
    """Such as an embedding: its Triton hangs, or is off the list and its time is over."""
    for final in (False, True):
        a, b = Triton("m"), Triton("m")
        fleet = await fleets(tritons={"a": a, "b": b}, grace=0.0)
        busy = fleet.leasing.lease("m", at="b")
        a.hangs = asyncio.Event()
        answer = asyncio.create_task(asked(fleet))
        await until(lambda triton=a: triton.asked_for)
        busy.close()
        if final:
            await fleet._apply([EndpointSettings(name="b", url=("http://b:8000",))])
        else:
            a.error = UpstreamTimeout("frozen")
            await fleet.refresh()
        assert await answer == (b,)
        assert fleet.metrics.count.running.total() == 0


async def test_a_whole_answer_of_the_last_triton_is_waited_for(fleets):
    """While there is no other one, its Triton may still send it; once that is off the list, it has its time."""
    a = Triton("m")
    fleet = await fleets(tritons={"a": a, "b": Triton("n")}, grace=0.0)
    a.hangs = asyncio.Event()
    answer = asyncio.create_task(asked(fleet))
    await until(lambda: a.asked_for)
    a.error = UpstreamTimeout("frozen")
    await fleet.refresh()
    assert not answer.done()
    await fleet._apply([EndpointSettings(name="b", url=("http://b:8000",))])
    with pytest.raises(UpstreamError, match="lost"):
        await answer


async def test_a_request_may_go_on_with_another_variant(fleets):
    """Its route says what it has tried, for whoever can ask for another variant; it counts as one request."""
    tritons = {name: Triton("m") for name in "abc"}
    for triton in tritons.values():
        triton.failure = cut_off_error("reset")
    fleet = await fleets(tritons=tritons)
    route = Route(fleet.leasing, "m", among=("a",))
    with pytest.raises(UpstreamError, match="lost"):
        await asked(fleet, route)
    assert route.exhausted == ["a"]
    onward = Route(fleet.leasing, "m", among=("b", "c"), previous_attempts=route.exhausted)
    with pytest.raises(UpstreamError, match="lost"):
        await asked(fleet, onward)
    # Two have lost it.
    assert (onward.attempts, onward.exhausted) == (2, None)


async def test_a_variant_without_a_triton_leaves_its_requests_to_the_others(fleets):
    """Its last Triton may go after a request has been read for it."""
    a, b = Triton("m"), Triton("m")
    fleet = await fleets(tritons={"a": a, "b": b})
    route = Route(fleet.leasing, "m", among=("a",))
    a.error = UpstreamUnavailable("stops")
    await fleet.refresh()
    with pytest.raises(UpstreamUnavailable):
        route.lease(Attempts())
    assert route.exhausted == []
    b.error = a.error
    await fleet.refresh()
    route.exhausted = None
    with pytest.raises(UpstreamUnavailable):
        route.lease(Attempts())
    assert route.exhausted is None
