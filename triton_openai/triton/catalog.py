"""
Discovery: which models Triton has ready, and their configurations.

The repository index and the configs are read at start, every few seconds, and when a request names an unknown
model. A Triton that does not answer leaves an empty snapshot and is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import structlog

from triton_openai.errors import ServiceError, UpstreamUnavailable
from triton_openai.tasks import cancel
from triton_openai.triton.client import IndexEntry, ServerInfo, TritonClient
from triton_openai.triton.tensors import ModelConfig

_log = structlog.get_logger(__name__)

# While the index is unchanged, the configs are not read again. But the index does not show a model that was reloaded in
# between, so after this many seconds they are read anyway.
_CONFIGS_FRESH = 10.0
# Config calls in flight at a time, so that a repository of hundreds of models does not open hundreds of connections.
_PARALLEL_CONFIGS = 16
# The pause between two looks for requests that did not find their model, in seconds.
_MISS_SECONDS = 0.5


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One of several configurations that a model has on several Tritons."""

    #: The configurations of all models on the first of its Tritons: its own, and those of an ensemble's steps.
    repository: Mapping[str, ModelConfig]
    #: The names of the Tritons that have the model like this.
    endpoints: frozenset[str]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The models of one Triton, or of several together, at one moment."""

    index: Sequence[IndexEntry] = ()
    #: The configurations of ready models.
    configs: Mapping[str, ModelConfig] = {}
    #: Models that exist and are not ready, with the server's reason.
    waiting: Mapping[str, str] = {}
    #: Whether every config could be read.
    complete: bool = False
    #: Triton's name and version, if known.
    server: ServerInfo | None = None
    #: Why Triton could not be asked.
    error: ServiceError | None = None
    #: By ready model: a digest that is equal on Tritons that answer alike.
    digests: Mapping[str, bytes] = {}
    #: By model that several Tritons have in different ways: the variants, the one with most Tritons first.
    variants: Mapping[str, Sequence[Variant]] = {}
    #: By model of which several Tritons have loaded different versions: the Tritons of each.
    versions: Mapping[str, Mapping[str, Sequence[str]]] = {}

    @property
    def reachable(self) -> bool:
        """Whether Triton answered."""
        return self.error is None

    @property
    def coming(self) -> frozenset[str]:
        """The models that are being loaded: a client may try again soon."""
        states = frozenset({"LOADING", "READY"})
        return frozenset(entry.name for entry in self.index if entry.state in states and entry.name in self.waiting)


async def take_snapshot(client: TritonClient, *, previous: Snapshot | None = None) -> Snapshot:
    """Read the index and the config of every ready model. If Triton fails, the snapshot's ``error`` says so."""
    try:
        index = await client.repository_index()
    except ServiceError as error:
        # Its traceback refers to this frame and *previous*: it would keep all snapshots of an outage.
        return Snapshot(error=error.with_traceback(None))
    if previous is not None and previous.complete and list(index) == list(previous.index):
        return previous
    ready = sorted({entry.name for entry in index if entry.ready})
    waiting = {
        entry.name: entry.reason or entry.state for entry in index if not entry.ready and entry.name not in ready
    }
    limit = asyncio.Semaphore(_PARALLEL_CONFIGS)
    configs: dict[str, ModelConfig] = {}
    server: ServerInfo | None = None
    with contextlib.suppress(ServiceError):
        # Nothing depends on it.
        server = await client.server_info()

    async def read(name: str) -> None:
        async with limit:
            try:
                config = await client.model_config(name)
            except ServiceError as error:
                # Usually the model was unloaded between the two calls.
                waiting[name] = error.message
            else:
                if server is None:
                    version = ""
                else:
                    version = server.version
                configs[name] = msgspec.structs.replace(config, server_version=version)

    await asyncio.gather(*map(read, ready))
    complete = len(configs) == len(ready)
    # Ordered by name.
    configs = dict(sorted(configs.items()))
    digests = {name: config_digest(name, configs) for name in configs}
    return Snapshot(index=index, configs=configs, digests=digests, waiting=waiting, complete=complete, server=server)


def merge(snapshots: Mapping[str, Snapshot]) -> Snapshot:
    """
    Return the models of several Tritons together, from the *snapshots* of each by its name.

    A model that is ready on one of them is ready. If they have it in different ways, ``configs`` has the configuration
    of most Tritons.
    """
    reached = {name: snapshot for name, snapshot in snapshots.items() if snapshot.reachable}
    if not snapshots:
        return Snapshot(error=UpstreamUnavailable("No Triton is known.", retry_after=2))
    if len(snapshots) == 1 or not reached:
        return next(iter(snapshots.values()))
    index: dict[tuple[str, str], IndexEntry] = {}
    waiting: dict[str, str] = {}
    groups: dict[str, dict[bytes, list[str]]] = {}
    loaded: dict[str, dict[str, list[str]]] = {}
    for endpoint, snapshot in reached.items():
        for entry in snapshot.index:
            if entry.ready or (entry.name, entry.version) not in index:
                index[entry.name, entry.version] = entry
            if entry.ready:
                loaded.setdefault(entry.name, {}).setdefault(entry.version, []).append(endpoint)
        for model, reason in snapshot.waiting.items():
            waiting.setdefault(model, reason)
        for model in snapshot.configs:
            groups.setdefault(model, {}).setdefault(snapshot.digests[model], []).append(endpoint)
    configs: dict[str, ModelConfig] = {}
    variants: dict[str, Sequence[Variant]] = {}
    for model in sorted(groups):
        by_size = sorted(groups[model].values(), key=len, reverse=True)
        configs[model] = reached[by_size[0][0]].configs[model]
        if len(by_size) > 1:
            variants[model] = [
                Variant(repository=reached[names[0]].configs, endpoints=frozenset(names)) for names in by_size
            ]
    servers = [snapshot.server for snapshot in reached.values() if snapshot.server is not None]
    return Snapshot(
        index=[entry for _, entry in sorted(index.items())],
        configs=configs,
        waiting={model: reason for model, reason in sorted(waiting.items()) if model not in configs},
        complete=all(snapshot.complete for snapshot in reached.values()),
        server=next(iter(servers), None),
        variants=variants,
        versions={model: versions for model, versions in loaded.items() if _differ(versions)},
    )


def _differ(versions: Mapping[str, Sequence[str]]) -> bool:
    """Return whether the Tritons of one version are others than those of another one."""
    return len({tuple(endpoints) for endpoints in versions.values()}) > 1


def config_digest(model: str, configs: Mapping[str, ModelConfig]) -> bytes:
    """Return a digest of the configs of *model* and the models that it uses, without what changes no answer."""
    configs_used: dict[str, ModelConfig] = {}
    left = [model]
    while left:
        name = left.pop()
        if name not in configs_used and name in configs:
            config = configs[name].behaviour
            configs_used[name] = config
            left += [step.model for step in config.steps]
            # Such as tensorrt_llm_model_name.
            left += [value for value in config.parameters.values() if value in configs]
    return hashlib.sha256(msgspec.json.encode(list(configs_used.values()), order="deterministic")).digest()


class SharedList(Protocol):
    """The list of one Triton that several processes share; one of them looks at Triton."""

    @property
    def newest(self) -> Snapshot | None:
        """The list that another process has published, ``None`` if this process looks."""

    async def ask(self, *, reload: bool) -> bool:
        """Make that process look now; return whether :attr:`newest` is what it has seen."""

    def publish(self, snapshot: Snapshot) -> None:
        """Publish a new snapshot, if this is the process that looks."""


class Catalog:
    """
    Keeps the newest snapshot of a Triton, and calls *changed* when it differs from the one before.

    *changed* is awaited before the snapshot counts as current, so its effect is there when :meth:`refresh` returns.
    A Triton that *starts* with the service does not answer at first, which is not logged. *phase*, a part of the
    *interval*, spreads the looks at several Tritons; *name* is the name of one of several in the log. With a *shared*
    list, another process may look at this Triton.
    """

    def __init__(
        self,
        client: TritonClient,
        *,
        interval: float,
        changed: Callable[[Snapshot], Awaitable[None]],
        starts: bool = False,
        phase: float = 0.0,
        name: str | None = None,
        shared: SharedList | None = None,
    ) -> None:
        self._client = client
        self._shared = shared
        self._interval = interval
        self._changed = changed
        self._starts = starts
        self._phase = phase
        if name is None:
            self._log = _log
        else:
            self._log = _log.bind(endpoint=name)
        self._refreshing: asyncio.Task[None] | None = None
        self._last_miss = float("-inf")
        self._verifies = False
        self._configs_read = float("-inf")
        # Whether the next look reads all configs.
        self._reloads = False
        self.snapshot = Snapshot(error=UpstreamUnavailable("Triton has not been asked yet.", retry_after=1))
        self.first = asyncio.Event()

    async def run(self) -> None:
        """Refresh for ever; cancel to stop."""
        wait = self._interval * (1 + self._phase)
        while True:
            try:
                if self._shared is None:
                    newest = None
                else:
                    newest = self._shared.newest
                if newest is None:
                    await self.refresh()
                elif newest is not self.snapshot:
                    # It is the first, or this process has looked for itself while the other one was silent.
                    await self.follow()
            except Exception:  # noqa: BLE001 - a failed look must not end discovery
                self._log.exception("discovery failed")
            await asyncio.sleep(wait)
            wait = self._interval

    async def refresh(self) -> None:
        """Take a snapshot now, or wait for the one that is being taken."""
        if not self._busy:
            self._refreshing = asyncio.create_task(self._refresh())
        assert self._refreshing is not None
        # Shielded: a cancelled request must not cancel the refresh for all others.
        await asyncio.shield(self._refreshing)

    async def follow(self) -> None:
        """Use the list that another process has published."""
        if self._busy:
            # It may have read what was published before.
            await self.refresh()
        if not self._busy:
            self._refreshing = asyncio.create_task(self._refresh(asks=False))
        await self.refresh()

    @property
    def _busy(self) -> bool:
        return self._refreshing is not None and not self._refreshing.done()

    async def reload(self) -> None:
        """Take a snapshot that begins now, configs included, after a change of Triton's models."""
        if self._busy:
            # It may have read the index before the change.
            await self.refresh()
        self._reloads = True
        await self.refresh()

    async def refresh_on_miss(self) -> None:
        """
        Refresh after a request for an unknown model, at most twice a second: unknown names must not load Triton.

        If a refresh is running, wait for it, so that simultaneous requests get the same result.
        """
        now = asyncio.get_running_loop().time()
        if not self._busy:
            if now - self._last_miss < _MISS_SECONDS:
                return
            self._last_miss = now
        await self.refresh()

    async def verify(self) -> None:
        """Look soon, and call *changed* even if the snapshot is the same: a request did not find its model."""
        self._verifies = True
        await self.refresh_on_miss()
        if self._verifies:
            # A look had begun before, or was just made.
            await asyncio.sleep(_MISS_SECONDS)
            await self.refresh_on_miss()

    async def close(self) -> None:
        """Stop a refresh in flight."""
        if self._refreshing is not None:
            await cancel(self._refreshing)

    async def _look(self, *, asks: bool) -> Snapshot:
        """Return a new snapshot, taken here or, unless this process alone can, by another one that *asks* has look."""
        reloads = self._reloads
        self._reloads = False
        shared = self._shared
        if shared is not None and shared.newest is not None and (not asks or await shared.ask(reload=reloads)):
            newest = shared.newest
            if newest is not None:
                return newest
        now = asyncio.get_running_loop().time()
        reuse = not reloads and now - self._configs_read < _CONFIGS_FRESH
        previous = None
        if reuse:
            previous = self.snapshot
        snapshot = await take_snapshot(self._client, previous=previous)
        if snapshot is not self.snapshot:
            self._configs_read = now
        return snapshot

    async def _refresh(self, *, asks: bool = True) -> None:
        before = self.snapshot
        verifies = self._verifies
        self._verifies = False
        snapshot = await self._look(asks=asks)
        if snapshot.reachable != before.reachable or not (self.first.is_set() or self._starts):
            if snapshot.reachable:
                if snapshot.server is None:
                    version = None
                else:
                    version = snapshot.server.version
                self._log.info("Triton answers", models=len(snapshot.configs), version=version)
            else:
                assert snapshot.error is not None
                self._log.warning("Triton does not answer", reason=snapshot.error.reason)
        # The digests depend on what adapters have read so far.
        parts = ("configs", "waiting", "index", "reachable", "digests")
        changed = not self.first.is_set() or any(getattr(snapshot, part) != getattr(before, part) for part in parts)
        if self._shared is not None and (changed or snapshot.server != before.server):
            self._shared.publish(snapshot)
        if verifies or changed:
            try:
                await self._changed(snapshot)
            except Exception:  # noqa: BLE001 - an adapter's mistake about one model must not end all discovery
                self._log.exception("models could not be bound")
        self.snapshot = snapshot
        self.first.set()
