"""
Leases of Tritons: which one gets a request, whether a failed request is retried, and which ones are ejected.

What the lists of models have is kept by :class:`triton_openai.triton.fleet.Fleet`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog

from triton_openai.config.tree import Policy, RoutingSettings, TritonSettings
from triton_openai.errors import (
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
from triton_openai.tasks import spawn
from triton_openai.triton.ejection import Ejections
from triton_openai.triton.fleet_metrics import FleetMetrics
from triton_openai.triton.member import Lease, Member
from triton_openai.triton.routing import Pool, RetryBudget, Ring, Target
from triton_openai.triton.status import cut_off_error

_log = structlog.get_logger(__name__)

# A model on less than this part of the Tritons (1 / 16) has a hash ring of its own.
_SPARSE = 16
# The pause between two looks at the requests of a Triton that is drained.
_DRAIN_PAUSE = 0.1


class Attempts(list[str]):
    """The attempts of one request: the names of the Tritons that it was sent to."""

    #: Whether one of them ended while it worked for the request. The request itself may be the cause.
    lost = False


class Leasing:
    """
    The choice among *members*, by their names, and what is known of their failures.

    After each change of the members or their targets, :meth:`update` must be called.

    It has more than 20 methods, most of a few lines: the choice, a lease and its end work on the same pools.
    """

    def __init__(self, settings: TritonSettings, members: Mapping[str, Member], metrics: FleetMetrics) -> None:
        self._settings = settings
        #: The lease of every request where the settings name one Triton, ``None`` where they list several. Requests to
        #: a single Triton are neither counted nor retried.
        self.single: Lease | None = None
        self.ejections = Ejections(settings.ejection, metrics, self.update)
        #: Called when the :meth:`capacity` of a model may have changed.
        self.on_capacity: Callable[[], None] = _ignore_capacity
        self._members = members
        self._metrics = metrics
        self._max_running = math.inf
        self._pools: dict[str, Pool] = {}
        # The pool of a model that no Triton has.
        self._empty = Pool()
        self._ring = Ring()
        self._budget = RetryBudget(settings.failover.budget)

    def use_single(self, member: Member) -> None:
        """Lease *member* to every request."""
        self.single = Lease(member, "", None, self._on_release)

    # Settings and targets

    def configure(self, settings: TritonSettings) -> None:
        """Use other *settings* from now on."""
        self._settings = settings
        self._budget.share = settings.failover.budget
        self.ejections.settings = settings.ejection
        self.update(self.models)

    def limit(self, max_running: float) -> None:
        """Send no Triton more than *max_running* requests for a model at a time while another one has capacity."""
        self._max_running = max_running
        self.update(self.models)

    def capacity(self, model: str) -> float:
        """Return how many requests for *model* its Tritons run at a time; the number for one Triton if none has it."""
        return self._max_running * self.triton_count(model)

    def triton_names(self, model: str) -> Sequence[str]:
        """Return the names of the Tritons that take requests for *model* now."""
        return [target.endpoint for target in self._pools.get(model, self._empty).candidates]

    def triton_count(self, model: str) -> int:
        """Return how many Tritons take requests for *model* now, at least 1."""
        return max(1, len(self._pools.get(model, self._empty).candidates))

    @property
    def models(self) -> Sequence[str]:
        """The names of the models that a Triton has."""
        return list(self._pools)

    def update_members(self) -> None:
        """Use the members, and their weights, as they are now; :meth:`update` must follow."""
        weights = {name: member.settings.weight for name, member in self._members.items()}
        self._ring.update({name: weight for name, weight in weights.items() if weight})

    def update(self, models: Collection[str]) -> None:
        """Use the targets of *models* as they are now."""
        for model in models:
            self._update_pool(model)
        self.on_capacity()

    def _update_pool(self, model: str) -> None:
        settings = self._settings
        members = [member for member in self._members.values() if model in member.targets]
        pool = self._pools.get(model)
        if pool is None:
            pool = Pool()
            self._pools[model] = pool
        pool.policy = self.policy(model)
        pool.load_factor = settings.routing.load_factor
        pool.max_ejected = 0.0
        if len(self._members) > 1:
            pool.max_ejected = settings.ejection.max_share
        pool.max_running = self._max_running
        ring = None
        if len(members) * _SPARSE >= len(self._members):
            # A pool of few members would pass over too many others on the common ring.
            ring = self._ring
        panicked = pool.panics
        targets = [member.targets[model] for member in members]
        pool.update(targets, ejected=[member.name for member in members if member.ejected], ring=ring)
        if pool.panics and not panicked:
            self._metrics.count("panics", model)
            _log.error("too many Tritons are ejected: all are used", model=model)
        elif panicked and not pool.panics:
            self._metrics.count("panics", model, by=-1)
        if not members:
            del self._pools[model]

    # The choice

    @property
    def routing(self) -> RoutingSettings:
        """The settings of the choice."""
        return self._settings.routing

    def policy(self, model: str) -> Policy:
        """Return how requests to *model* are spread."""
        return self.routing.overrides.get(model, self.routing.policy)

    def takes(self, model: str, endpoint: str | None) -> bool:
        """Return whether the Triton called *endpoint* takes requests to *model*."""
        member = self._members.get(endpoint or "")
        if member is None or member.ejected:
            return False
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
        Return a lease for a request to the Triton model *model*.

        *among* are the names of the Tritons with the wanted variant of the model (all if empty), *avoid* of those that
        have failed. Requests with the same *key* get the same Triton; *at* names the only one that may be used. Raises
        :class:`UpstreamUnavailable` if no Triton can be used.
        """
        pool = self._pools.get(model, self._empty)
        retries = bool(avoid)
        member = None
        target = None
        if at is not None:
            member = self._members.get(at)
            if member is not None:
                target = member.targets.get(model)
        elif len(self._members) == 1:
            # Whatever models it has: a request for a model that was just unloaded gets this Triton's own error.
            (member,) = self._members.values()
            target = member.targets.get(model) or Target(member.name, 1.0)
        else:
            if among:
                avoid = {*avoid, *(target.endpoint for target in pool.active if target.endpoint not in among)}
            target = pool.choose(time.monotonic(), key=key, avoid=avoid)
            if target is not None:
                member = self._members.get(target.endpoint)
        if member is None or target is None:
            raise UpstreamUnavailable("No Triton that has the model takes requests at the moment.", retry_after=2)
        lease = Lease(member, model, target, self._on_release)
        pool.count(target, 1)
        member.leases.add(lease)
        self._metrics.count_at(member, "running", model)
        if not retries:
            self._budget.count(time.monotonic())
        return lease

    @asynccontextmanager
    async def drained(self, member: Member, models: Collection[str], grace: float) -> AsyncIterator[None]:
        """Drain *models* at *member*: no new requests in the block, and *grace* seconds for the running ones before."""
        targets = [member.targets[model] for model in models if model in member.targets]
        try:
            self._weigh(models, targets, 0.0)
            ends = time.monotonic() + grace
            while any(target.running for target in targets) and time.monotonic() < ends:  # noqa: ASYNC110 - it is seldom
                await asyncio.sleep(_DRAIN_PAUSE)
            yield
        finally:
            self._weigh(models, targets, member.settings.weight)

    def _weigh(self, models: Collection[str], targets: Sequence[Target], weight: float) -> None:
        for target in targets:
            target.weight = weight
        self.update([model for model in models if model in self._pools])

    # Failures

    def has_other(self, model: str, among: Collection[str], tried: Collection[str]) -> bool:
        """Return whether a Triton *among* those that have *model*, all if empty, is left beside those *tried*."""
        active = [target.endpoint for target in self._pools.get(model, self._empty).active]
        return any(name not in tried and (not among or name in among) for name in active)

    def may_retry(self, lease: Lease, error: Exception, attempts: Attempts) -> bool:
        """
        Return whether a request that failed with *error* at *lease*, before its answer began, is sent again.

        A request is retried once after a Triton ended while it worked for it: the request may be the cause. A request
        that reached no model is retried outside the budget: it costs no more than it would have cost in the first
        place.
        """
        settings = self._settings.failover
        if self.single is not None or len(attempts) >= settings.attempts:
            return False
        if not _is_retryable(error, on_timeout=settings.on_timeout):
            return False
        lost = ended_midway(error)
        if (lost and attempts.lost) or not self.has_other(lease.model, (), attempts):
            return False
        now = time.monotonic()
        if lost:
            free = lease.member.within_failover_grace(now)
        else:
            free = is_missing(error)
        if not free and not self._budget.spend(now):
            _log.warning("retry budget exhausted", model=lease.model)
            self._metrics.count("budget_exhausted")
            return False
        attempts.lost = attempts.lost or lost
        code = "error"
        if isinstance(error, ServiceError):
            code = error.code
        self._metrics.count("failovers", lease.model, code)
        return True

    def _on_release(self, lease: Lease, target: Target, error: Exception | None, answered: bool) -> None:
        """Record how the request of *lease* ended."""
        member = lease.member
        self._pools.get(lease.model, self._empty).count(target, -1)
        member.leases.discard(lease)
        if not member.leases:
            member.idle.set()
        if isinstance(error, UpstreamError) and not isinstance(error, ModelUnloading):
            outcome = "failed"
        elif answered or error is not None:
            # A Triton that refuses a request has answered it.
            outcome = "answered"
        else:
            outcome = "cancelled"
        self._metrics.count_at(member, "running", lease.model, by=-1)
        self._metrics.count_at(member, "ended", lease.model, outcome)
        if len(self._members) <= 1 or member.draining:
            return
        if outcome == "answered":
            target.succeed()
        elif outcome == "failed" and target.fail(time.monotonic(), self._settings.ejection):
            assert isinstance(error, ServiceError)
            self.ejections.record(member, lease.model, target, error)
        if is_missing(error):
            self._suspend(member, lease.model, target)

    def _suspend(self, member: Member, model: str, target: Target) -> None:
        """Send no requests for *model* to *member* before the next look at its list, which starts now."""
        if target.ejected_until is not None or member.targets.get(model) is not target:
            return
        if self.has_other(model, (), [member.name]):
            member.suspended_targets[model] = member.targets.pop(model)
            self.update([model])
            spawn(member.catalog.verify(), member.tasks)
        else:
            # The last target stays: it may answer the next request, and no other Triton can.
            spawn(member.catalog.refresh_on_miss(), member.tasks)


def _ignore_capacity() -> None:
    """Do nothing: no requests wait for capacity."""


def is_missing(error: Exception | None) -> bool:
    """Return whether *error* means that a Triton does not have the model ready, although its list has it."""
    if isinstance(error, ModelUnloading):
        return False
    return isinstance(error, ModelNotFound | UpstreamUnavailable)


def ended_midway(error: Exception) -> bool:
    """Return whether *error* means that a Triton, or a model in it, ended while it worked for the request."""
    return isinstance(error, UpstreamLost | ModelCrashed)


def lost_error() -> ServiceError:
    """Return the error of a request whose Triton is not waited for any more."""
    return cut_off_error("Triton has stopped answering, or is off the list")


def _is_retryable(error: Exception, *, on_timeout: bool) -> bool:
    """Return whether another Triton may answer: the request reached no model, or the connection was lost."""
    if isinstance(error, UpstreamTimeout):
        return on_timeout and error.code == "upstream_silent"
    return is_missing(error) or isinstance(error, Overloaded | UpstreamLost)
