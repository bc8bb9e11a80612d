"""
The Tritons of a service: which ones there are, and the models that they have together.

A single Triton is a fleet of one. :class:`triton_openai.triton.leasing.Leasing` chooses the one for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from triton_openai.config.addresses import endpoints
from triton_openai.config.tree import EndpointSettings, TritonAccess, TritonSettings
from triton_openai.errors import ConfigurationError, UpstreamUnavailable
from triton_openai.tasks import cancel, spawn
from triton_openai.triton.catalog import Catalog, Snapshot, merge
from triton_openai.triton.client import TritonClient
from triton_openai.triton.connection import OPEN_ACCESS
from triton_openai.triton.discovery import Discovery
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.engine_capacity import EngineCapacity
from triton_openai.triton.fleet_metrics import CountEvent, FleetMetrics, ignore_event
from triton_openai.triton.leasing import Leasing
from triton_openai.triton.member import Member
from triton_openai.triton.routing import Target
from triton_openai.triton.shared_lists import ListChannel, SharedLists

# Multiples of it are spread evenly over 0 to 1.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# The pause after a merge, in multiples of the time that it took, which counts up to the limit in seconds.
_MERGE_PAUSE = 10
_MAX_MERGE_SECONDS = 0.1

#: Takes the new models of all Tritons.
OnChange: TypeAlias = Callable[[Snapshot], Awaitable[None]]


class MemberList:
    """The list of *member* that the processes of a service share; see :class:`SharedList`."""

    def __init__(self, lists: SharedLists, member: Member) -> None:
        self._lists = lists
        self._member = member

    @property
    def newest(self) -> Snapshot | None:
        """The list that another process has published, ``None`` if this process looks for itself."""
        if not self._lists.follows:
            return None
        newest = self._lists.newest.get(self._member.name)
        client = self._member.client
        if newest is not None and newest.server is not None and isinstance(client, Endpoint):
            client.grpc_answers = newest.server.grpc_answers
        return newest

    async def ask(self, *, reload: bool) -> bool:
        """Make the other process look now; return whether :attr:`newest` is what it has seen."""
        return await self._lists.ask(self._member.name, reload)

    def publish(self, snapshot: Snapshot) -> None:
        """Publish *snapshot*, if this is the process that looks."""
        if not self._member.draining:
            self._lists.publish(self._member.name, snapshot)


class Fleet:
    """
    The Tritons of a service, each with its list of models, and these lists merged to one.

    *connect* connects to one Triton, by default to its addresses. *grace* is how many seconds the running requests of a
    Triton have after it is taken off the list. *count* counts events for metrics. *lists* is the channel to the other
    processes of the service, one of which looks at the models of all Tritons. Raises :class:`ConfigurationError` for
    endpoints that cannot be used.
    """

    def __init__(
        self,
        settings: TritonSettings,
        access: TritonAccess = OPEN_ACCESS,
        *,
        connect: Callable[[EndpointSettings], TritonClient] | None = None,
        grace: float = 10.0,
        count: CountEvent = ignore_event,
        lists: ListChannel | None = None,
    ) -> None:
        self._settings = settings
        self._access = access
        self._connect = connect or self._connect_endpoint
        self._grace = grace
        self._lists: SharedLists | None = None
        if lists is not None:
            self._lists = SharedLists(lists, settings.refresh_interval, look=self.look, follow=self.follow)
        # Whether the settings list several Tritons; a single one has no name in logs and metrics.
        self._is_list = _lists_endpoints(settings)
        if not self._is_list:
            count = ignore_event
        #: By name.
        self.members: dict[str, Member] = {}
        self.metrics = FleetMetrics(count)
        #: What the engines that report their queue take.
        self.engine_capacity = EngineCapacity()
        self.leasing = Leasing(settings, self.members, self.metrics)
        self.engine_capacity.tritons = self.leasing.triton_count
        #: Awaited with the models of all Tritons when these have changed.
        self.on_change: OnChange | None = None
        #: The models of all Tritons together.
        self.snapshot = Snapshot(error=UpstreamUnavailable("Triton has not been asked yet.", retry_after=1))
        #: Set once every Triton has been asked.
        self.first = asyncio.Event()
        self._merging = asyncio.Lock()
        self._merge_wanted = False
        self._merge_seconds = 0.0
        # The models whose Tritons have changed since the last merge.
        self._changed_models: set[str] = set()
        self._running = False
        # By member, what looks at its list again and again.
        self._looks: dict[Member, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._discovery = Discovery(
            settings, access, self._apply, on_failure=lambda: self.metrics.count("lookup_failures")
        )
        self._names_looked_up = True
        for endpoint in self._discovery.listed:
            if endpoint.dns:
                # Names are looked up when there is an event loop.
                self._names_looked_up = False
            else:
                self._add(endpoint, self._connect(endpoint))
        self.leasing.update_members()

    def _connect_endpoint(self, settings: EndpointSettings) -> Endpoint:
        return Endpoint(settings.url, access=settings.access or self._access, capacity=self.engine_capacity)

    # The life of the service

    async def run(self) -> None:
        """Look for Tritons, and at the models of each, until cancelled."""
        if self._lists is not None:
            await self._lists.join()
            spawn(self._lists.run(), self._tasks)
        self._running = True
        for member in self.members.values():
            self._looks[member] = asyncio.create_task(member.catalog.run())
        spawn(self._discovery.run(), self._tasks)
        try:
            await self._look_up_names()
            await asyncio.gather(*[member.catalog.first.wait() for member in self.members.values()])
            # A process that replaces another one continues its series.
            self.metrics.publish_labels()
            self.first.set()
            await asyncio.Event().wait()
        finally:
            tasks = [*self._looks.values(), *self._tasks]
            for member in self.members.values():
                tasks += member.tasks
            await cancel(*tasks)

    async def _look_up_names(self) -> None:
        if not self._names_looked_up:
            self._names_looked_up = True
            await self._discovery.look()

    async def prepare(self, settings: TritonSettings) -> Callable[[], Awaitable[None]]:
        """Return a function that applies other *settings*. Raises :class:`ConfigurationError`."""
        if self._is_list != _lists_endpoints(settings):
            raise ConfigurationError("To serve several Tritons in place of one, or one in place of several, restart.")
        listed = await asyncio.to_thread(endpoints, settings)

        async def apply_settings() -> None:
            self._settings = settings
            self.leasing.configure(settings)
            await self._discovery.replace(settings, listed)

        return apply_settings

    async def close(self) -> None:
        """Close all connections."""
        for member in list(self.members.values()):
            await member.catalog.close()
            await member.client.close()

    # The lists of models

    @property
    def over_grpc(self) -> bool:
        """Whether every Triton's gRPC address is known."""
        return all(_has_grpc(member.settings) for member in self.members.values())

    def without(self, model: str) -> Sequence[str]:
        """Return the names of the Tritons that answer and do not have *model* ready."""
        answering = [member for member in self.members.values() if member.snapshot.reachable]
        return [member.name for member in answering if model not in member.targets]

    async def refresh(self) -> None:
        """Look at the models of all Tritons now."""
        await self._look_up_names()
        await asyncio.gather(*[member.catalog.refresh() for member in self.members.values()])

    async def reload(self) -> None:
        """Look at the models of all Tritons, beginning now, configs included, after a change."""
        await asyncio.gather(*[member.catalog.reload() for member in self.members.values()])

    async def refresh_on_miss(self) -> None:
        """Look at the models of all Tritons after a request for an unknown model, at most twice a second."""
        await asyncio.gather(*[member.catalog.refresh_on_miss() for member in self.members.values()])

    async def look(self, name: str, reload: bool) -> bool:
        """Look at the models of the Triton *name* for another process; return whether it is known here."""
        member = self.members.get(name)
        if member is None or self._lists is None or not self._lists.leads:
            return False
        if reload:
            await member.catalog.reload()
        else:
            await member.catalog.refresh()
        return True

    def follow(self, name: str) -> None:
        """Use the list of the Triton *name* that another process has published."""
        member = self.members.get(name)
        if member is not None:
            spawn(member.catalog.follow(), member.tasks)

    async def _take(self, member: Member, snapshot: Snapshot) -> None:
        """Use the new *snapshot* of *member*."""
        if member.draining:
            return
        lost = member.snapshot.reachable and not snapshot.reachable
        if lost:
            self.metrics.count_at(member, "up", by=-1)
        elif snapshot.reachable and not member.snapshot.reachable:
            self.metrics.count_at(member, "up")
        member.snapshot = snapshot
        previous = member.targets
        member.targets = {model: self._target(member, previous, model) for model in snapshot.configs}
        member.suspended_targets.clear()
        # At once, however long the merge takes: a Triton without the model fails fast, and would get every request.
        self.leasing.update(previous.keys() - member.targets.keys())
        await self._merge(previous.keys() | member.targets.keys())
        if lost and len(self.members) > 1:
            # It did not answer a simple question: requests without an answer so far have better chances elsewhere.
            member.report_lost(final=False)

    def _target(self, member: Member, previous: Mapping[str, Target], model: str) -> Target:
        """Return the target of *model* at *member*: the *previous* one, the suspended one, or a new one."""
        target = previous.get(model)
        if target is not None:
            return target
        now = time.monotonic()
        target = member.suspended_targets.get(model)
        if target is not None:
            target.since = now
            return target
        since = now
        if not member.catalog.first.is_set():
            # A Triton that was there from the start needs no time to warm up.
            since = -math.inf
        return Target(member.name, member.settings.weight, since=since)

    async def _merge(self, models: Collection[str]) -> None:
        """Merge all lists after a change of *models*. Changes that come meanwhile are merged together."""
        self._changed_models.update(models)
        self._merge_wanted = True
        async with self._merging:
            if not self._merge_wanted:
                return
            # With hundreds of Tritons a merge takes milliseconds: it gets a tenth of the time at most.
            await asyncio.sleep(_MERGE_PAUSE * self._merge_seconds)
            began = time.monotonic()
            self._merge_wanted = False
            changed = self._changed_models
            self._changed_models = set()
            self.leasing.update(changed)
            snapshot = merge({name: member.snapshot for name, member in self.members.items()})
            self._merge_seconds = 0.0
            if len(self.members) > 1:
                self._merge_seconds = min(time.monotonic() - began, _MAX_MERGE_SECONDS)
            if self.on_change is not None:
                await self.on_change(snapshot)
            self.snapshot = snapshot

    # The members

    def _add(self, settings: EndpointSettings, client: TritonClient) -> None:
        member = Member(settings, client)
        self.metrics.join(member)
        name = None
        if self._is_list:
            name = member.name
        shared = None
        if self._lists is not None:
            shared = MemberList(self._lists, member)
        member.catalog = Catalog(
            client,
            interval=self._settings.refresh_interval,
            changed=partial(self._take, member),
            starts=bool(self._settings.model_repository),
            phase=len(self.members) * _GOLDEN_RATIO % 1,
            name=name,
            shared=shared,
        )
        self.members[member.name] = member
        if not self._is_list:
            self.leasing.use_single(member)
        if self._running:
            self._looks[member] = asyncio.create_task(member.catalog.run())

    async def _apply(self, listed: Sequence[EndpointSettings]) -> None:
        """Replace the members by *listed*. Members that leave may finish their requests for the grace time."""
        wanted = {endpoint.name or "": endpoint for endpoint in listed}
        # All are made before anything changes: certificates and headers may be wrong. Nothing connects yet.
        clients: dict[str, TritonClient] = {}
        for name, endpoint in wanted.items():
            member = self.members.get(name)
            if member is None or _unweighted(endpoint) != _unweighted(member.settings):
                clients[name] = self._connect(endpoint)
        for name, member in list(self.members.items()):
            if name in clients or name not in wanted:
                self._start_removal(member)
            elif wanted[name] != member.settings:
                member.settings = wanted[name]
                for target in member.targets.values():
                    target.weight = member.settings.weight
        for name, client in clients.items():
            self._add(wanted[name], client)
        self.leasing.update_members()
        models = set(self.leasing.models)
        for member in self.members.values():
            models.update(member.targets)
        # At once: no request may choose a member that has left.
        self.leasing.update(models)
        await self._merge(models)

    def _start_removal(self, member: Member) -> None:
        del self.members[member.name]
        member.draining = True
        self.metrics.leave(member)
        if self._lists is not None:
            self._lists.publish(member.name, None)
        spawn(self._remove(member), self._tasks)

    async def _remove(self, member: Member) -> None:
        """Wait for the requests of *member*, for the grace time, and close its connections."""
        if member.snapshot.reachable:
            self.metrics.count_at(member, "up", by=-1)
        try:
            tasks = list(member.tasks)
            if member in self._looks:
                tasks.append(self._looks.pop(member))
            await cancel(*tasks)
            if member.leases:
                member.idle.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._grace):
                        await member.idle.wait()
                member.report_lost(final=True)
        finally:
            await member.catalog.close()
            # Whoever waits for the first look does not wait for this one.
            member.catalog.first.set()
            self.metrics.drop(member)
            await member.client.close()


def _lists_endpoints(settings: TritonSettings) -> bool:
    return bool(settings.endpoints or settings.endpoints_file)


def _unweighted(settings: EndpointSettings) -> EndpointSettings:
    """Return *settings* without the weight, which changes without a new connection."""
    return msgspec.structs.replace(settings, weight=1.0)


def _has_grpc(settings: EndpointSettings) -> bool:
    return any(url.startswith("grpc") for url in settings.url)
