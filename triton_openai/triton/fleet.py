"""
Several Tritons as one: a catalog of each, one list of models, and a lease of one of them for each request.

A single Triton is a fleet of one: nothing is chosen, and nothing is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from copy import copy
from functools import partial
from typing import Literal, Protocol, TypeVar

import msgspec
import structlog

from triton_openai.config.addresses import endpoints
from triton_openai.config.tree import EndpointSettings, Policy, TritonAccess, TritonSettings
from triton_openai.errors import (
    ConfigurationError,
    ModelCrashed,
    ModelNotFound,
    ModelUnloading,
    Overloaded,
    ServiceError,
    UpstreamError,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.tasks import cancel, spawn
from triton_openai.triton.catalog import Catalog, Snapshot, merge
from triton_openai.triton.client import TritonClient
from triton_openai.triton.connection import OPEN_ACCESS
from triton_openai.triton.discovery import Discovery
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.routing import Pool, RetryBudget, Ring, Target
from triton_openai.triton.shared_lists import ListChannel, SharedLists
from triton_openai.triton.status import cut_off_error
from triton_openai.triton.tensors import InferRequest

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

# Longest wait for the answer to the request that shows whether an ejected Triton answers again.
_PROBE_SECONDS = 30.0
# Names of Tritons that are labels of metrics at a time.
_MAX_LABELS = 64
# Multiples of it are spread evenly over 0 to 1.
_GOLDEN = (math.sqrt(5) - 1) / 2
_CREDIT_SECONDS = 10.0
# A model that one of more Tritons has gets a hash ring of its own.
_SPARSE = 16
# So many models that are ejected on a Triton eject it for all.
_EJECTED_MODELS = 3


#: What is counted among several Tritons, with the labels that stand beside it: the names that the settings give them,
#: models, and the outcome or the code of an error. With ``endpoints``, they are the names of all that there are.
Event = Literal[
    "up", "running", "ended", "ejected", "ejections", "panics", "failovers", "budget_exhausted", "lookup_failures",
    "endpoints",
]  # fmt: skip


class Tell(Protocol):
    """Counts what happens among several Tritons."""

    def __call__(self, event: Event, *labels: str, by: int = 1) -> None:
        """Count *event*."""


def _untold(event: Event, *labels: str, by: int = 1) -> None:
    """Count nothing: there is no choice among Tritons, or nobody wants to know."""


class Member:
    """One Triton of a fleet."""

    def __init__(self, settings: EndpointSettings, client: TritonClient, label: str) -> None:
        assert settings.name is not None, "the settings have been completed"
        self.name = settings.name
        self.settings = settings
        self.client = client
        #: The name in metrics; ``None`` once its series are dropped.
        self.label: str | None = label
        self.snapshot = Snapshot(error=UpstreamUnavailable("Triton has not been asked yet.", retry_after=1))
        self.catalog: Catalog
        #: By Triton model.
        self.targets: dict[str, Target] = {}
        #: Those of models that it has not had ready for a request, until the next look at its list.
        self.suspended_targets: dict[str, Target] = {}
        #: What finds out whether it answers again.
        self.probes: set[asyncio.Task[None]] = set()
        #: Those that have not ended.
        self.leases: set[Lease] = set()
        #: Set when there are none.
        self.idle = asyncio.Event()
        self.draining = False
        # Requests that it took with it when it ended, which may go elsewhere beside the budget, and until when.
        self._credit = 0
        self._credit_until = -math.inf

    def within_failover_grace(self, now: float) -> bool:
        """
        Return whether a request that lost its connection here may go elsewhere without counting as a retry.

        Those that ran when the first one was lost may: a Triton that ends must not cost more than the budget has.
        """
        if now >= self._credit_until:
            self._credit = len(self.leases)
            self._credit_until = now + _CREDIT_SECONDS
        self._credit -= 1
        return self._credit >= 0

    def lose(self, *, final: bool) -> None:
        """Tell its requests that it has stopped answering."""
        for lease in list(self.leases):
            if lease.lost is not None:
                lease.lost(final)

    @property
    def ejected(self) -> bool:
        """Whether so many of its models fail that it gets no requests at all."""
        return sum(target.ejected_until is not None for target in self.targets.values()) >= _EJECTED_MODELS


class MemberList:
    """The list of *member* among those that the processes of a service share; see :class:`SharedList`."""

    def __init__(self, lists: SharedLists, member: Member) -> None:
        self._lists = lists
        self._member = member

    @property
    def newest(self) -> Snapshot | None:
        """What the process that looks has published, if it is another one."""
        if not self._lists.follows:
            return None
        newest = self._lists.newest.get(self._member.name)
        client = self._member.client
        if newest is not None and newest.server is not None and isinstance(client, Endpoint):
            client.grpc_answers = newest.server.grpc_answers
        return newest

    async def ask(self, *, reload: bool) -> bool:
        """Have that process look now; return whether :attr:`newest` is what it has seen."""
        return await self._lists.ask(self._member.name, reload)

    def publish(self, snapshot: Snapshot) -> None:
        """Give the others a new snapshot, if this is the process that looks."""
        if not self._member.draining:
            self._lists.publish(self._member.name, snapshot)


class Attempts(list[str]):
    """The names of the Tritons that a request has been sent to."""

    #: Whether one of them ended in mid-work, which may be the request's own fault.
    lost = False


class Lease:
    """A Triton for one request. Whoever has it says how the request ended: :meth:`close`."""

    __slots__ = ("_fleet", "_target", "client", "counted", "endpoint", "lost", "member", "model")

    def __init__(self, fleet: Fleet, member: Member, target: Target | None, model: str) -> None:
        self._fleet = fleet
        # None once it has ended, and for the only Triton, of which nothing is counted.
        self._target = target
        self.member = member
        self.client = member.client
        #: The name of the Triton.
        self.endpoint = member.name
        self.model = model
        #: Whether it is one of several Tritons, whose requests are counted.
        self.counted = target is not None
        #: Called when the Triton has stopped answering, so that the request may go elsewhere; with true, it also ends.
        self.lost: Callable[[bool], None] | None = None

    @property
    def name(self) -> str | None:
        """What the Triton is called in the settings, if it is one of several."""
        if self.counted:
            return self.endpoint
        return None

    def address_of(self, request: InferRequest) -> str | None:
        """Return the address to which *request* goes, if it is known."""
        if isinstance(self.client, Endpoint):
            return self.client.address_of(request)
        return None

    def close(self, error: Exception | None = None, *, answered: bool = True) -> None:
        """
        End the lease, once: further calls do nothing.

        *error* is how the request failed, *answered* whether the model sent anything. A client that leaves before that
        says nothing about the Triton.
        """
        target = self._target
        self._target = None
        # Breaks a reference cycle.
        self.lost = None
        if target is not None:
            self._fleet.end(self, target, error, answered=answered)


class Route:
    """
    The way of a client's request to the Tritons that have its model. All answers to one prompt go to the same one.

    *among* are the names of those that have the wanted variant of the model, all if empty. *key* is what should stay at
    one Triton; without one, the beginning of the prompt and the *lora* adapter may be it. *at* names the only one.
    *previous_attempts* are those of another variant that the request has been sent to. Without *resends_lost*, a
    request that runs when its Triton ends is not sent to another one: it may be what ended the first.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: str,
        *,
        among: Collection[str] = (),
        key: str | None = None,
        lora: str = "",
        at: str | None = None,
        previous_attempts: Attempts | None = None,
        resends_lost: bool = True,
    ) -> None:
        self._fleet = fleet
        self.model = model
        self.previous_attempts = previous_attempts
        self.resends_lost = resends_lost
        self._among = among
        if key is None:
            self._key = None
        else:
            self._key = key.encode("utf-8", "surrogatepass")
        self._lora = lora
        self._at = at
        self._prompt: str | None = None
        #: The Triton that got the request last, and how many have.
        self.endpoint: str | None = None
        self.attempts = 0
        #: What a request has tried that may go on to a Triton with another variant, which only its sender can ask.
        self.exhausted: Attempts | None = None

    def tried(self) -> Attempts:
        """Return where a request begins."""
        if self.previous_attempts is None:
            return Attempts()
        return copy(self.previous_attempts)

    def lease(self, tried: Collection[str] = (), *, prompt: str | None = None) -> Lease:
        """
        Return a Triton for the request, none of those that it has *tried*. *prompt* is what is sent.

        Raises :class:`UpstreamUnavailable` if there is none.
        """
        if self._fleet.alone is not None:
            return self._fleet.alone
        at = self._at
        key = self._key
        if self._fleet.several and at is None:
            policy = self._fleet.policy(self.model)
            if prompt is not None and prompt == self._prompt and not tried and policy != "round_robin":
                at = None
                if self._fleet.takes(self.model, self.endpoint):
                    at = self.endpoint
            if key is None and policy == "affinity" and prompt is not None:
                key = self._fleet.prefix_key(self.model, self._lora, prompt)
        try:
            lease = self._fleet.lease(self.model, among=self._among, key=key, avoid=tried, at=at)
        except UpstreamUnavailable:
            if self._at is None and self._fleet.has(self.model, (), tried):
                # What was lost on the way counts there, too.
                if isinstance(tried, Attempts):
                    self.exhausted = tried
                else:
                    self.exhausted = self.tried()
            raise
        self._prompt, self.endpoint, self.attempts = prompt, lease.endpoint, max(self.attempts, len(tried) + 1)
        return lease

    @property
    def name(self) -> str | None:
        """What the Triton that got the request last is called, if it is one of several."""
        if self._fleet.listed:
            return self.endpoint
        return None

    def may_retry(self, lease: Lease, error: Exception, tried: Attempts) -> bool:
        """
        Return whether a request that got nothing at *lease*, but *error*, may go on to another one than *tried*.

        Ask before the lease is closed.
        """
        if self._at is not None or (ended_midway(error) and not self.resends_lost):
            return False
        if not self._fleet.may_retry(lease, error, tried):
            return False
        if self._fleet.has(self.model, self._among, tried):
            return True
        self.exhausted = tried
        return False


class Fleet:
    """
    The Tritons of a service.

    *connect* makes the connection to one, by default to its addresses. *grace* is how many seconds the requests of one
    that is taken away may still run. *lists* leads to the other processes of the service, one of which looks at the
    models of all. Raises :class:`ConfigurationError` for endpoints that cannot be used.
    """

    def __init__(
        self,
        settings: TritonSettings,
        access: TritonAccess = OPEN_ACCESS,
        *,
        connect: Callable[[EndpointSettings], TritonClient] | None = None,
        grace: float = 10.0,
        tell: Tell = _untold,
        lists: ListChannel | None = None,
    ) -> None:
        self._settings = settings
        if lists is None:
            self._lists = None
        else:
            self._lists = SharedLists(lists, settings.refresh_interval)
        self._access = access
        self._connect = connect or self._endpoint
        self._grace = grace
        #: Whether there is a choice.
        self.several = False
        #: The lease for every request, where one Triton alone is named.
        self.alone: Lease | None = None
        #: Whether several are named; one alone has no name in logs and metrics.
        self.listed = bool(settings.endpoints or settings.endpoints_file)
        if self.listed:
            self._tell = tell
        else:
            self._tell = _untold
        self._changed: Callable[[Snapshot], Awaitable[None]] | None = None
        self._ask: Callable[[str, str], Awaitable[None]] | None = None
        self._room: Callable[[], None] = lambda: None
        self._most_running = math.inf
        #: By name.
        self.members: dict[str, Member] = {}
        #: What all have together.
        self.snapshot = Snapshot(error=UpstreamUnavailable("Triton has not been asked yet.", retry_after=1))
        #: Set once every Triton has been asked.
        self.first = asyncio.Event()
        self._pools: dict[str, Pool] = {}
        self._ring = Ring()
        # Of a model that no Triton has.
        self._empty = Pool("least_requests", max_ejected=0.0, load_factor=1.0)
        self._budget = RetryBudget(settings.failover.budget)
        self._merging = asyncio.Lock()
        self._merge_wanted = False
        self._merge_seconds = 0.0
        # Models whose Tritons have changed.
        self._stale: set[str] = set()
        self._looks: dict[Member, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # By name in metrics, how many Tritons have it, and of how many that leave the requests still run.
        self._labels: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        self._running = False
        self._discovery = Discovery(settings, access, self._apply, failed=lambda: self._tell("lookup_failures"))
        # Names are looked up when there is a loop.
        self._looked = not any(each.dns for each in self._discovery.listed)
        for each in self._discovery.listed:
            if not each.dns:
                self._add(each, self._connect(each))
        self._count_members()

    def _endpoint(self, settings: EndpointSettings) -> Endpoint:
        return Endpoint(settings.url, access=settings.access or self._access)

    # Models: what a catalog is for one Triton, this is for all

    def watch(
        self,
        changed: Callable[[Snapshot], Awaitable[None]] | None = None,
        ask: Callable[[str, str], Awaitable[None]] | None = None,
        room: Callable[[], None] | None = None,
    ) -> None:
        """
        Set *changed*, which is awaited with the models of all when these change, *ask* or *room*.

        *ask* raises :class:`ServiceError` unless a model at the Triton of a name answers a small request. *room* is
        called when the :meth:`capacity` of a model may have changed.
        """
        self._changed = changed or self._changed
        self._ask = ask or self._ask
        self._room = room or self._room

    def limit(self, most_running: float) -> None:
        """Send no Triton more than *most_running* requests for a model at a time while another one has room."""
        self._most_running = most_running
        self._update_pools(list(self._pools))

    def capacity(self, model: str) -> float:
        """Return how many requests for *model* its Tritons run at a time; that of one if none has it."""
        return self._most_running * max(1, len(self._pools.get(model, self._empty).candidates))

    async def run(self) -> None:
        """Look for Tritons, and at the models of each, until cancelled."""
        if self._lists is not None:
            await self._lists.join(self)
            spawn(self._lists.run(), self._tasks)
        self._running = True
        for member in self.members.values():
            self._looks[member] = asyncio.create_task(member.catalog.run())
        spawn(self._discovery.run(), self._tasks)
        try:
            await self._find()
            await asyncio.gather(*[member.catalog.first.wait() for member in self.members.values()])
            # A process that replaces another one goes on with its series.
            self._tell_endpoints()
            self.first.set()
            await asyncio.Event().wait()
        finally:
            probes = [probe for member in self.members.values() for probe in member.probes]
            await cancel(*self._looks.values(), *self._tasks, *probes)

    async def _find(self) -> None:
        if not self._looked:
            self._looked = True
            await self._discovery.look()

    async def prepare(self, settings: TritonSettings) -> Callable[[], Awaitable[None]]:
        """Return what takes other *settings* over. Raises :class:`ConfigurationError`."""
        if self.listed != bool(settings.endpoints or settings.endpoints_file):
            raise ConfigurationError("To serve several Tritons in place of one, or one in place of several, restart.")
        listed = await asyncio.to_thread(endpoints, settings)

        async def apply_settings() -> None:
            self._settings = settings
            self._budget.share = settings.failover.budget
            self._update_pools(list(self._pools))
            await self._discovery.replace(settings, listed)

        return apply_settings

    # What the processes of a service share

    async def look(self, name: str, reload: bool) -> bool:
        """Look at the models of the Triton *name* for another process; return whether it is known here."""
        member = self.members.get(name)
        if member is None or self._lists is None or not self._lists.leads:
            return False
        await (member.catalog.reload() if reload else member.catalog.refresh())
        return True

    def follow(self, name: str) -> None:
        """Take the list of the Triton *name* that another process has published."""
        if (member := self.members.get(name)) is not None:
            spawn(member.catalog.follow(), member.probes)

    async def refresh(self) -> None:
        """Look at the models of all now."""
        await self._find()
        await self._of_all(lambda member: member.catalog.refresh())

    async def reload(self) -> None:
        """Look at the models of all, beginning now, configs included, after a change."""
        await self._of_all(lambda member: member.catalog.reload())

    async def refresh_on_miss(self) -> None:
        """Look at the models of all after a request for an unknown model, at most twice a second."""
        await self._of_all(lambda member: member.catalog.refresh_on_miss())

    async def _of_all(self, look: Callable[[Member], Awaitable[None]]) -> None:
        await asyncio.gather(*map(look, self.members.values()))

    async def close(self) -> None:
        """Close all connections."""
        for member in list(self.members.values()):
            await member.catalog.close()
            await member.client.close()

    def _add(self, settings: EndpointSettings, client: TritonClient) -> None:
        name = settings.name or ""
        if name in self._labels or len(self._labels) < _MAX_LABELS:
            label = name
        else:
            label = "other"
        self._labels[label] += 1
        member = Member(settings, client, label)
        member.catalog = Catalog(
            client,
            interval=self._settings.refresh_interval,
            changed=partial(self._take, member),
            starts=bool(self._settings.model_repository),
            phase=len(self.members) * _GOLDEN % 1,
            name=name if self.listed else None,
            shared=None if self._lists is None else MemberList(self._lists, member),
        )
        self.members[name] = member
        if not self.listed:
            self.alone = Lease(self, member, None, "")
        if self._running:
            self._looks[member] = asyncio.create_task(member.catalog.run())

    def _count_members(self) -> None:
        """Learn that the Tritons, or their weights, are others."""
        self.several = len(self.members) > 1
        self._ring.update({name: each.settings.weight for name, each in self.members.items() if each.settings.weight})

    async def _take(self, member: Member, snapshot: Snapshot) -> None:
        """Take the new *snapshot* of a Triton."""
        if member.draining:
            return
        lost = member.snapshot.reachable and not snapshot.reachable
        if member.snapshot.reachable != snapshot.reachable:
            self._count("up", member, by=-1 if lost else 1)
        member.snapshot = snapshot
        now = time.monotonic()
        was = member.targets
        member.targets = {}
        for model in snapshot.configs:
            target = was.get(model)
            if target is None and model in member.suspended_targets:
                target = member.suspended_targets[model]
                target.since = now
            if target is None:
                # A Triton that was there from the start needs no time to warm up.
                if member.catalog.first.is_set():
                    since = now
                else:
                    since = -math.inf
                target = Target(member.name, member.settings.weight, since=since)
            member.targets[model] = target
        member.suspended_targets.clear()
        # At once, however long the merge takes: what fails fast would get every request until then.
        self._update_pools(was.keys() - member.targets.keys())
        await self._merge(was.keys() | member.targets.keys())
        if lost and self.several:
            # It has not answered a simple question: what has no token yet is better off elsewhere.
            member.lose(final=False)

    async def _merge(self, models: Collection[str]) -> None:
        """Prepare the choice for *models*, and tell of the models of all. What comes meanwhile is told together."""
        self._stale.update(models)
        self._merge_wanted = True
        async with self._merging:
            if not self._merge_wanted:
                return
            # With hundreds of Tritons a merge takes milliseconds: it gets a tenth of the time at most.
            await asyncio.sleep(10 * self._merge_seconds)
            began = time.monotonic()
            self._merge_wanted = False
            stale = self._stale
            self._stale = set()
            self._update_pools(stale)
            snapshot = merge({name: member.snapshot for name, member in self.members.items()})
            if self.several:
                self._merge_seconds = min(time.monotonic() - began, 0.1)
            else:
                self._merge_seconds = 0.0
            if self._changed is not None:
                await self._changed(snapshot)
            self.snapshot = snapshot

    def _update_pools(self, models: Collection[str]) -> None:
        """Prepare the choice for *models*."""
        routing = self._settings.routing
        for model in models:
            members = [each for each in self.members.values() if model in each.targets]
            targets = [each.targets[model] for each in members]
            if (pool := self._pools.get(model)) is None:
                pool = self._pools[model] = Pool(self.policy(model), max_ejected=0.0, load_factor=1.0)
            panicked = pool.panics
            pool.policy = self.policy(model)
            pool.load_factor = routing.load_factor
            if self.several:
                pool.max_ejected = self._settings.ejection.max_share
            else:
                pool.max_ejected = 0.0
            pool.most_running = self._most_running
            # A pool of few would pass over too many others.
            ring = None
            if len(targets) * _SPARSE >= len(self.members):
                ring = self._ring
            pool.update(targets, ejected=[each.name for each in members if each.ejected], ring=ring)
            if pool.panics != panicked:
                self._tell("panics", model, by=1 if pool.panics else -1)
                if pool.panics:
                    _log.error("too many Tritons are ejected: all are used", model=model)
            if not targets:
                del self._pools[model]
        self._room()

    # Requests

    @property
    def over_grpc(self) -> bool:
        """Whether every Triton's gRPC address is known."""
        return all(any(url.startswith("grpc") for url in each.settings.url) for each in self.members.values())

    def policy(self, model: str) -> Policy:
        """Return how requests to *model* are spread."""
        routing = self._settings.routing
        return routing.overrides.get(model, routing.policy)

    def session_of(self, *names: tuple[str, str | None]) -> str | None:
        """Return the first of the settings' kinds of key that *names* (kind and value) have a value for."""
        wanted = self._settings.routing.affinity
        found = [(wanted.index(kind), value) for kind, value in names if value and kind in wanted]
        if found:
            return min(found)[1]
        return None

    def prefix_key(self, model: str, lora: str, prompt: str) -> bytes | None:
        """Return what stands for the beginning of *prompt*, if that is to keep requests at one Triton."""
        routing = self._settings.routing
        if "prompt" not in routing.affinity:
            return None
        # A character has a byte at least.
        start = prompt[: routing.prefix_size].encode("utf-8", "surrogatepass")[: routing.prefix_size]
        return b"\0".join((model.encode(), lora.encode(), start))

    def without(self, model: str) -> Sequence[str]:
        """Return the names of the Tritons that answer and do not have *model* ready."""
        return [name for name, one in self.members.items() if one.snapshot.reachable and model not in one.targets]

    def takes(self, model: str, endpoint: str | None) -> bool:
        """Return whether the Triton called *endpoint* takes requests to *model*."""
        member = self.members.get(endpoint or "")
        if member is None or member.ejected:
            target = None
        else:
            target = member.targets.get(model)
        return target is not None and target.weight > 0 and target.ejected_until is None

    def choose(self, model: str) -> str | None:
        """Return the name of the Triton that a request to *model* would get now, ``None`` if there is none."""
        target = self._pools.get(model, self._empty).choose(time.monotonic())
        if target is None:
            return None
        return target.endpoint

    def lease(
        self,
        model: str,
        *,
        among: Collection[str] = (),
        key: bytes | None = None,
        avoid: Collection[str] = (),
        at: str | None = None,
    ) -> Lease:
        """
        Return a Triton for a request to the Triton model *model*.

        *among* are the names of those that have the wanted variant of the model, *avoid* of those that have failed.
        *key* is what should stay at one Triton; *at* names the one. Raises :class:`UpstreamUnavailable` if there is
        none.
        """
        first = not avoid
        if at is not None:
            member = self.members.get(at)
            if member is None:
                target = None
            else:
                target = member.targets.get(model)
        elif not self.several and self.members:
            # Whatever it has: a model that has just been unloaded is its answer to give.
            (member,) = self.members.values()
            target = member.targets.get(model) or Target(member.name, 1.0)
        else:
            pool = self._pools.get(model, self._empty)
            if among:
                avoid = {*avoid, *(one.endpoint for one in pool.active if one.endpoint not in among)}
            target = pool.choose(time.monotonic(), key=key, avoid=avoid)
            if target is None:
                member = None
            else:
                member = self.members.get(target.endpoint)
        if member is None or target is None:
            raise UpstreamUnavailable("No Triton that has the model takes requests at the moment.", retry_after=2)
        lease = Lease(self, member, target, model)
        self._pools.get(model, self._empty).count(target, 1)
        member.leases.add(lease)
        self._count("running", member, model)
        if first:
            self._budget.count(time.monotonic())
        return lease

    @contextlib.asynccontextmanager
    async def drained(self, member: Member, models: Collection[str], grace: float) -> AsyncIterator[None]:
        """Send *member* no requests for *models* meanwhile; first its running ones may end, for *grace* seconds."""
        targets = [member.targets[model] for model in models if model in member.targets]
        try:
            self._weigh(targets, 0.0, models)
            ends = time.monotonic() + grace
            while any(target.running for target in targets) and time.monotonic() < ends:  # noqa: ASYNC110 - it is seldom
                await asyncio.sleep(0.1)
            yield
        finally:
            self._weigh(targets, member.settings.weight, models)

    def _weigh(self, targets: Sequence[Target], weight: float, models: Collection[str]) -> None:
        for target in targets:
            target.weight = weight
        self._update_pools([model for model in models if model in self._pools])

    def end(self, lease: Lease, target: Target, error: Exception | None, *, answered: bool) -> None:
        """Learn how the request of *lease* ended."""
        member = lease.member
        now = time.monotonic()
        self._pools.get(lease.model, self._empty).count(target, -1)
        member.leases.discard(lease)
        if not member.leases:
            member.idle.set()
        failed = isinstance(error, UpstreamError) and not isinstance(error, ModelUnloading)
        self._count("running", member, lease.model, by=-1)
        # Whoever refuses a request has answered.
        if failed:
            outcome = "failed"
        elif answered or error is not None:
            outcome = "answered"
        else:
            outcome = "cancelled"
        self._count("ended", member, lease.model, outcome)
        if not self.several or member.draining:
            return
        if not failed and (answered or error is not None):
            target.succeed()
        elif failed and target.fail(now, self._settings.ejection):
            assert isinstance(error, ServiceError)
            self._eject(member, lease.model, target, error)
        if not_there(error) and target.ejected_until is None and member.targets.get(lease.model) is target:
            # Until the next look at its models, which is now: this may have been for a moment, or it has ended. The
            # last one stays: it may answer the next request, and nobody else does.
            if self.has(lease.model, (), [member.name]):
                member.suspended_targets[lease.model] = member.targets.pop(lease.model)
                self._update_pools([lease.model])
                spawn(member.catalog.doubt(), member.probes)
            else:
                spawn(member.catalog.refresh_on_miss(), member.probes)

    def has(self, model: str, among: Collection[str], tried: Collection[str]) -> bool:
        """Return whether a Triton *among* those that have *model*, all if empty, is left beside those *tried*."""
        active = [one.endpoint for one in self._pools.get(model, self._empty).active]
        return any(name not in tried and (not among or name in among) for name in active)

    def may_retry(self, lease: Lease, error: Exception, tried: Attempts) -> bool:
        """
        Return whether a request that got nothing at *lease*, but *error*, may go to another Triton.

        *tried* are those that it has been sent to. Of one that ended in mid-work, only one other Triton may bear the
        risk that the request is what ended the first. What no model has got costs nothing that it would not have cost
        at the other one in the first place: it needs no budget.
        """
        settings = self._settings.failover
        if not self.listed or len(tried) >= settings.attempts or not _passes(error, settings.on_timeout):
            return False
        lost = ended_midway(error)
        if (lost and tried.lost) or not self.has(lease.model, (), tried):
            return False
        now = time.monotonic()
        if not (lease.member.within_failover_grace(now) if lost else not_there(error)) and not self._budget.spend(now):
            _log.warning("a request is not sent again: too many were", model=lease.model)
            self._tell("budget_exhausted")
            return False
        tried.lost = tried.lost or lost
        self._tell("failovers", lease.model, error.code if isinstance(error, ServiceError) else "error")
        return True

    # Ejection

    def _eject(self, member: Member, model: str, target: Target, error: ServiceError) -> None:
        _log.warning("a Triton is ejected", endpoint=member.name, model=model, reason=error.reason)
        self._count("ejected", member, model)
        self._count("ejections", member, model, error.code)
        self._update_pools(member.targets if member.ejected else [model])
        spawn(self._bring_back(member, model, target), member.probes)

    async def _bring_back(self, member: Member, model: str, target: Target) -> None:
        """Ask an ejected Triton after its time, until it answers or is gone."""
        try:
            while member.targets.get(model) is target and target.ejected_until is not None:
                await asyncio.sleep(target.ejected_until - time.monotonic())
                if not await self._answers(member, model):
                    target.eject(time.monotonic(), self._settings.ejection)
                    continue
                was_out = member.ejected
                target.restore(time.monotonic())
                _log.info("a Triton takes requests again", endpoint=member.name, model=model)
                self._update_pools(member.targets if was_out else [model])
        finally:
            self._count("ejected", member, model, by=-1)

    async def _answers(self, member: Member, model: str) -> bool:
        """Return whether *model* answers a small request at *member*. Whoever refuses one is there."""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                if self._ask is not None:
                    await self._ask(model, member.name)
        except (UpstreamError, TimeoutError):
            return False
        except Exception as error:  # noqa: BLE001 - nor does an adapter's mistake say anything of its Triton
            _log.debug("small request refused", endpoint=member.name, model=model, exc_info=error)
        return True

    # Changes

    async def _apply(self, found: Sequence[EndpointSettings]) -> None:
        """Take *found* in place of those that there are. What leaves may finish its requests for a time."""
        wanted = {each.name or "": each for each in found}
        old = {name: msgspec.structs.replace(each.settings, weight=1.0) for name, each in self.members.items()}
        # Before anything changes: certificates and headers may be wrong. Nothing is opened yet.
        changed = [new for name, new in wanted.items() if msgspec.structs.replace(new, weight=1.0) != old.get(name)]
        clients = {new.name or "": self._connect(new) for new in changed}
        for name, member in list(self.members.items()):
            if name in clients or name not in wanted:
                del self.members[name]
                member.draining = True
                assert member.label is not None, "it leaves once"
                self._labels -= Counter([member.label])
                self._leaving[member.label] += 1
                if self._lists is not None:
                    self._lists.publish(name, None)
                spawn(self._remove(member), self._tasks)
            elif wanted[name] != member.settings:
                member.settings = wanted[name]
                for target in member.targets.values():
                    target.weight = member.settings.weight
        for name, client in clients.items():
            self._add(wanted[name], client)
        self._count_members()
        models = {*self._pools, *(model for one in self.members.values() for model in one.targets)}
        # At once: no request may choose a Triton that has gone.
        self._update_pools(models)
        await self._merge(models)

    async def _remove(self, member: Member) -> None:
        """Let the requests of *member* finish, for a time, and close its connections."""
        if member.snapshot.reachable:
            self._count("up", member, by=-1)
        try:
            look = self._looks.pop(member, None)
            await cancel(*member.probes, *([] if look is None else [look]))
            if member.leases:
                member.idle.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._grace):
                        await member.idle.wait()
                member.lose(final=True)
        finally:
            await member.catalog.close()
            # Whoever waits for the first look need not wait for this one.
            member.catalog.first.set()
            self._drop_label(member)
            await member.client.close()

    def _count(self, event: Event, member: Member, *labels: str, by: int = 1) -> None:
        """Count an *event* of *member*, unless its series are dropped."""
        if member.label is not None:
            self._tell(event, member.label, *labels, by=by)

    def _tell_endpoints(self) -> None:
        self._tell("endpoints", *sorted(self._labels.keys() | self._leaving.keys()))

    def _drop_label(self, member: Member) -> None:
        """Drop the series of a Triton that has left. One that came in its place may have the same name."""
        label = member.label
        member.label = None
        assert label is not None, "it leaves once"
        for lease in member.leases:
            self._tell("running", label, lease.model, by=-1)
        self._leaving -= Counter([label])
        if label not in self._labels and label not in self._leaving:
            self._tell_endpoints()


def not_there(error: Exception | None) -> bool:
    """Return whether *error* says that a Triton does not have the model ready, though its list says so."""
    return isinstance(error, ModelNotFound) or (
        isinstance(error, UpstreamUnavailable) and not isinstance(error, ModelUnloading)
    )


def ended_midway(error: Exception) -> bool:
    """Return whether *error* says that a Triton, or a model in it, ended while it worked for the request."""
    return isinstance(error, UpstreamLost | ModelCrashed)


def lost_error() -> ServiceError:
    """Return the error of a request whose Triton is not waited for any more."""
    return cut_off_error("Triton has stopped answering, or is off the list")


def _passes(error: Exception, on_timeout: bool) -> bool:
    """Return whether another Triton may do better: the request did not reach a model, or its connection was lost."""
    if isinstance(error, UpstreamTimeout):
        return on_timeout and error.code == "upstream_silent"
    return not_there(error) or isinstance(error, Overloaded | UpstreamLost)
