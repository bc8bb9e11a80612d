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
# Between two looks for requests that did not find their model.
_MISS_SECONDS = 0.5


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One of several configurations that a model has on several Tritons."""

    #: The configurations of all models on the first of its Tritons: its own, and those of an ensemble's steps.
    repository: Mapping[str, ModelConfig]
    #: The names of the Tritons that have the model like this.
    endpoints: frozenset[str]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What one Triton, or several together, had at one moment."""

    index: Sequence[IndexEntry] = ()
    #: Those of ready models.
    configs: Mapping[str, ModelConfig] = {}
    #: Models that exist and are not ready, with the server's reason.
    waiting: Mapping[str, str] = {}
    #: Whether every config could be read.
    complete: bool = False
    #: Triton's name and version, if known.
    server: ServerInfo | None = None
    #: Why Triton could not be asked.
    error: ServiceError | None = None
    #: By ready model: what two Tritons that answer alike have in common.
    kinds: Mapping[str, bytes] = {}
    #: By model, where several Tritons have it in different ways: the one with most Tritons first.
    variants: Mapping[str, Sequence[Variant]] = {}
    #: By model of which several Tritons have loaded different versions: the Tritons of each.
    versions: Mapping[str, Mapping[str, Sequence[str]]] = {}

    @property
    def reachable(self) -> bool:
        """Whether Triton answered."""
        return self.error is None

    @property
    def coming(self) -> frozenset[str]:
        """The waiting models that become ready by themselves: a client may try again soon."""
        states = frozenset({"LOADING", "READY"})
        return frozenset(entry.name for entry in self.index if entry.state in states and entry.name in self.waiting)


async def take_snapshot(client: TritonClient, *, previous: Snapshot | None = None) -> Snapshot:
    """Read the index and the config of every ready model. If Triton fails, the snapshot's ``error`` says so."""
    try:
        index = await client.repository_index()
    except ServiceError as error:
        # Its traceback has this frame, and so *previous*: all snapshots of an outage would stay.
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
    kinds = {name: kind_of(name, configs) for name in configs}
    return Snapshot(index=index, configs=configs, kinds=kinds, waiting=waiting, complete=complete, server=server)


def merge(snapshots: Mapping[str, Snapshot]) -> Snapshot:
    """
    Return what several Tritons have together, from the *snapshots* of each by its name.

    A model that is ready on one of them is ready. Of one that they have in different ways, the configuration of most
    Tritons is in ``configs``.
    """
    reached = {name: each for name, each in snapshots.items() if each.reachable}
    if not snapshots:
        return Snapshot(error=UpstreamUnavailable("No Triton is known.", retry_after=2))
    if len(snapshots) == 1 or not reached:
        return next(iter(snapshots.values()))
    index: dict[tuple[str, str], IndexEntry] = {}
    waiting: dict[str, str] = {}
    groups: dict[str, dict[bytes, list[str]]] = {}
    loaded: dict[str, dict[str, list[str]]] = {}
    for endpoint, each in reached.items():
        for entry in each.index:
            if entry.ready or (entry.name, entry.version) not in index:
                index[entry.name, entry.version] = entry
            if entry.ready:
                loaded.setdefault(entry.name, {}).setdefault(entry.version, []).append(endpoint)
        for model, reason in each.waiting.items():
            waiting.setdefault(model, reason)
        for model in each.configs:
            groups.setdefault(model, {}).setdefault(each.kinds[model], []).append(endpoint)
    configs: dict[str, ModelConfig] = {}
    variants: dict[str, Sequence[Variant]] = {}
    for model in sorted(groups):
        found = sorted(groups[model].values(), key=len, reverse=True)
        configs[model] = reached[found[0][0]].configs[model]
        if len(found) > 1:
            variants[model] = [
                Variant(repository=reached[names[0]].configs, endpoints=frozenset(names)) for names in found
            ]
    return Snapshot(
        index=[entry for _, entry in sorted(index.items())],
        configs=configs,
        waiting={model: reason for model, reason in sorted(waiting.items()) if model not in configs},
        complete=all(each.complete for each in reached.values()),
        server=next((each.server for each in reached.values() if each.server is not None), None),
        variants=variants,
        versions={model: found for model, found in loaded.items() if len(set(map(tuple, found.values()))) > 1},
    )


def kind_of(model: str, configs: Mapping[str, ModelConfig]) -> bytes:
    """Return a digest of the configs of *model* and of what it works through, without what changes no answer."""
    found: dict[str, ModelConfig] = {}
    left = [model]
    while left:
        name = left.pop()
        if name not in found and name in configs:
            config = found[name] = configs[name].behaviour
            left += [step.model for step in config.steps]
            # Such as tensorrt_llm_model_name.
            left += [value for value in config.parameters.values() if value in configs]
    return hashlib.sha256(msgspec.json.encode(list(found.values()), order="deterministic")).digest()


class SharedList(Protocol):
    """The list of one Triton that several processes share, of which one looks."""

    @property
    def newest(self) -> Snapshot | None:
        """What the process that looks has published, if it is another one."""

    async def ask(self, *, reload: bool) -> bool:
        """Have that process look now; return whether :attr:`newest` is what it has seen."""

    def publish(self, snapshot: Snapshot) -> None:
        """Give the others a new snapshot, if this is the process that looks."""


class Catalog:
    """
    Keeps the newest snapshot of a Triton, and calls *changed* when it differs from the one before.

    *changed* is awaited before the snapshot counts as current, so its effect is there when :meth:`refresh` returns.
    A Triton that *starts* with the service does not answer at first, which the log need not say. *phase*, a part of the
    *interval*, moves the looks at several Tritons apart; *name* is what the log calls one of several. With a *shared*
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
            except Exception:  # noqa: BLE001 - a mistake of one look must not end discovery
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
        """Take what another process has published."""
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
        Refresh after a request for an unknown model, at most twice a second, so that made-up names cost Triton nothing.

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
        snapshot = await take_snapshot(self._client, previous=self.snapshot if reuse else None)
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
        # The kinds depend on what adapters have read so far.
        parts = ("configs", "waiting", "index", "reachable", "kinds")
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
