"""
Loading and unloading models of a Triton that was started with ``--model-control-mode=explicit``.

Source of the facts: Triton's model repository extension, and its behaviour (2.51): a load answers when the model is
ready, an unload at once, also for an unknown name; a model is ``UNLOADING`` while requests of others still
run on it; a model that is a step of an ensemble unloads the ensemble too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from triton_openai import errors
from triton_openai.adapters._common.registry import users_of
from triton_openai.config.tree import Settings
from triton_openai.draining import ModelDraining
from triton_openai.errors import ServiceError
from triton_openai.models.lookup import Models
from triton_openai.tasks import cancel, spawn
from triton_openai.telemetry.logging import warn
from triton_openai.triton.client import IndexEntry, TritonClient, check_name
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.member import Member
from triton_openai.triton.tensors import ModelConfig

_log = structlog.get_logger(__name__)

# Longest time that Triton gets to let go of a model: engines give back tens of gigabytes of memory.
_UNLOAD_SECONDS = 120.0
# Tritons that load a model at a time: the others serve meanwhile.
_LOADS = 2
# Between two looks at Triton's list.
_PAUSE = 0.1
_Work = Callable[[Member], Awaitable[None]]


class ModelControl:
    """Loads and unloads models, one call per model at a time. A call is completed also when its client disconnects."""

    def __init__(self, settings: Settings, models: Models, fleet: Fleet, draining: ModelDraining) -> None:
        self._allowed = settings.triton.model_control_mode == "explicit"
        self._grace = settings.server.shutdown_grace
        self._models = models
        self._fleet = fleet
        self._draining = draining
        self._tasks: set[asyncio.Task[None]] = set()

    def check_allowed(self) -> None:
        """Raise :class:`ManagementDisabled` unless models may be loaded and unloaded."""
        if not self._allowed:
            raise errors.ManagementDisabled(
                "Loading and unloading models is off; the service allows it with --model-control-mode explicit."
            )

    async def load(self, name: str, *, endpoint: str | None = None) -> tuple[str, str | None]:
        """
        Load the model *name*, or the one that this is an alias of, and return its own name, once it is loaded.

        It is loaded on every Triton, on two at a time, so that the others go on with what they serve; or on the one
        called *endpoint*. What fails at one Triton does not keep it from the others.

        The second value is why it is not served, such as a step of an ensemble; ``None`` for a model that is. Raises
        :class:`ManagementDisabled`, :class:`ModelNotFound`, :class:`ModelConflict` for a model that is loaded already
        or is being changed by another call, and :class:`UpstreamError` for what Triton reports.
        """
        model = self._resolve(name)
        await asyncio.shield(self._start(self._load(model, self._members(endpoint))))
        return model, self._why_not_served(model)

    async def unload(self, name: str, *, dependents: bool = False, endpoint: str | None = None) -> str:
        """
        Unload the model *name*, or the one that this is an alias of, and return its own name, once it is gone.

        It is unloaded on every Triton at once, or on the one called *endpoint*, while the others go on with it.

        Running requests on it may finish first, for the configured time. With *dependents* the models that an ensemble
        consists of go too. Raises as :meth:`load` does; a model that is not loaded, or that a loaded one uses, is a
        :class:`ModelConflict`.
        """
        model = self._resolve(name)
        await asyncio.shield(self._start(self._unload(model, endpoint, dependents=dependents)))
        return model

    async def close(self) -> None:
        """Stop waiting for running calls; Triton completes them."""
        await cancel(*self._tasks)

    def _resolve(self, name: str) -> str:
        """Return the Triton model that *name* means."""
        self.check_allowed()
        served = self._models.served.get(name)
        if served is not None and served.lora is not None:
            raise errors.InvalidRequest(
                f"'{name}' is a LoRA adapter of the model '{served.triton_model}', and is served as long as that is "
                "loaded.",
                param="model",
            )
        model = self._models.triton_model(name)
        check_name(model)
        return model

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return a task of its own for *work*: a client that leaves must not end a claim before Triton is done."""
        task = spawn(work, self._tasks)
        # Looked at, so that asyncio does not complain when the client has left.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _members(self, endpoint: str | None) -> Sequence[Member]:
        """Return the Tritons that a call is for. Raises :class:`InvalidRequest`."""
        members = self._fleet.members
        if endpoint is None:
            return list(members.values())
        if endpoint not in members:
            raise errors.InvalidValue(
                f"There is no endpoint '{endpoint[:100]}'. It is one of: {', '.join(members)}.", "endpoint"
            )
        return [members[endpoint]]

    async def _load(self, model: str, members: Sequence[Member]) -> None:
        async with self._draining.claim([model]):
            indexes, failures = await self._indexes(model, members)
            missing = [member for member, index in indexes.items() if not _is_ready(index, model)]
            if not missing and not failures:
                raise _conflict(f"The model '{model}' is already loaded.", "model_already_loaded")

            async def load(member: Member) -> None:
                if _held(indexes[member], [model]):
                    # By another way than this service.
                    raise _conflict(f"Triton is loading or unloading the model '{model}'.", "model_busy")
                _log.info("loading model", model=model, endpoint=member.name)
                try:
                    await member.client.load_model(model)
                except ServiceError as error:
                    warn(_log, "model was not loaded", error, model=model, endpoint=member.name)
                    raise

            failures |= await self._change(missing, load, parallel=_LOADS)
            self._check(failures, members, "loaded")

    async def _indexes(
        self, model: str, members: Sequence[Member]
    ) -> tuple[Mapping[Member, Sequence[IndexEntry]], dict[str, ServiceError]]:
        """
        Return the lists of Tritons, and by name why one cannot be read.

        Raises :class:`ModelNotFound` for a *model* that none has: only names in a list reach a Triton.
        """
        indexes: dict[Member, Sequence[IndexEntry]] = {}

        async def read(member: Member) -> None:
            indexes[member] = await member.client.repository_index()

        failures = await self._on_each(members, read, parallel=len(members) or 1)
        if not any(entry.name == model for index in indexes.values() for entry in index):
            self._check(failures, members, "found")
            raise errors.ModelNotFound(model)
        return indexes, failures

    async def _change(self, members: Sequence[Member], work: _Work, *, parallel: int) -> dict[str, ServiceError]:
        """Run *work*, which changes the models of each Triton, and announce the change; see :meth:`_on_each`."""
        try:
            return await self._on_each(members, work, parallel=parallel)
        finally:
            # Also after a failure, of which the index has the reason.
            await self._models.fleet.reload()
            await self._draining.changed()

    async def _on_each(self, members: Sequence[Member], work: _Work, *, parallel: int) -> dict[str, ServiceError]:
        """Do *work* on each Triton, on *parallel* at a time, and return by name what has failed."""
        limit = asyncio.Semaphore(parallel)
        failures: dict[str, ServiceError] = {}

        async def on(member: Member) -> None:
            async with limit:
                try:
                    await work(member)
                except ServiceError as error:
                    failures[member.name] = error

        await asyncio.gather(*map(on, members))
        return failures

    def _check(self, failures: Mapping[str, ServiceError], members: Sequence[Member], done: str) -> None:
        """Raise :class:`UpstreamError`, which says at which of several Tritons a model is *done*, if one failed."""
        if not failures:
            return
        if len(self._fleet.members) <= 1:
            raise next(iter(failures.values()))
        problems = " ".join(f"At '{name}': {error.message}" for name, error in failures.items())
        message = f"This failed at {len(failures)} of {len(members)} Tritons. {problems}"
        well = [member.name for member in members if member.name not in failures]
        if well and done != "found":
            message += f" The model is {done} at {_listed(well)}."
        reasons = "; ".join(f"{name}: {error.reason}" for name, error in failures.items())
        raise errors.UpstreamError(message, detail=reasons)

    def _why_not_served(self, model: str) -> str | None:
        snapshot = self._models.fleet.snapshot
        if snapshot.error is not None:
            raise snapshot.error
        if model in self._models.served:
            return None
        if model in snapshot.waiting:
            raise errors.UpstreamUnavailable(
                f"The model '{model}' was loaded and is not ready: {snapshot.waiting[model]}.", param="model"
            )
        for entry in self._models.unserved:
            if entry.name == model:
                return entry.why
        raise _conflict(f"The model '{model}' was loaded and is gone again.", "model_not_loaded")

    async def _unload(self, model: str, endpoint: str | None, *, dependents: bool) -> None:
        members = self._members(endpoint)
        async with self._draining.claim([model]):
            indexes, failures = await self._indexes(model, members)
            loaded = [member for member, index in indexes.items() if _held(index, [model])]
            if not loaded and not failures:
                raise _conflict(f"The model '{model}' is not loaded.", "model_not_loaded")
            await self._models.fleet.reload()
            configs = self._models.fleet.snapshot.configs
            if dependents:
                parts = _parts(model, configs)
            else:
                parts = set()
            every = {model, *parts}
            async with self._draining.claim(sorted(parts)):
                _refuse_used(every, configs)

                async def unload(member: Member) -> None:
                    await member.client.unload_model(model, dependents=dependents)
                    await _gone(member.client, every)

                if endpoint is not None and len(self._fleet.members) > 1:
                    drained = self._fleet.leasing.drained(members[0], every, self._grace)
                else:
                    drained = self._draining.drained(every, self._grace)
                async with drained:
                    _log.info("unloading model", model=model, with_parts=sorted(parts))
                    failures |= await self._change(loaded, unload, parallel=len(members))
            self._check(failures, members, "unloaded")


async def _gone(client: TritonClient, models: Collection[str]) -> None:
    """Wait until *models* are unloaded. Raises :class:`UpstreamTimeout`."""
    left: Sequence[str] = ()
    try:
        async with asyncio.timeout(_UNLOAD_SECONDS):
            while left := _held(await client.repository_index(), models):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(_PAUSE)
    except TimeoutError as error:
        raise errors.UpstreamTimeout(f"Triton has not yet unloaded {_listed(left)}.", param="model") from error


def _is_ready(index: Sequence[IndexEntry], model: str) -> bool:
    """Return whether Triton has *model* ready."""
    return any(entry.name == model and entry.ready for entry in index)


def _held(index: Sequence[IndexEntry], models: Collection[str]) -> list[str]:
    """Return those of *models* that Triton holds, in whichever state."""
    states = {"READY", "LOADING", "UNLOADING"}
    return sorted({entry.name for entry in index if entry.name in models and entry.state in states})


def _parts(model: str, configs: Mapping[str, ModelConfig]) -> set[str]:
    """Return the models that *model* is an ensemble of, through all levels."""
    parts = {model}
    left = [model]
    while left:
        config = configs.get(left.pop())
        if config is not None:
            new = {step.model for step in config.steps} - parts
        else:
            new = set()
        parts |= new
        left += new
    return parts - {model}


def _refuse_used(models: Collection[str], configs: Mapping[str, ModelConfig]) -> None:
    """Raise :class:`ModelConflict` when one of *models* is used by a loaded model that is to stay."""
    for model in sorted(models):
        config = configs.get(model)
        if config is None:
            users = []
        else:
            users = [user.name for user in users_of(config, configs) if user.name not in models]
        if users:
            raise _conflict(
                f"The model '{model}' is used by {_listed(sorted(users))}, to be unloaded first.", "model_in_use"
            )


def _conflict(message: str, code: str) -> errors.ModelConflict:
    return errors.ModelConflict(message, param="model", code=code)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
