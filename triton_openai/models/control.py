"""
Loading and unloading models of a Triton that was started with ``--model-control-mode=explicit``.

Source of the facts: Triton's model repository extension, and its behaviour (2.51): a load answers when the model is
ready, an unload at once, also for a name that it does not know; a model is ``UNLOADING`` while requests of others still
run on it; a model that is a step of an ensemble takes the ensemble with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from triton_openai.adapters._common.registry import users_of
from triton_openai.config import Settings
from triton_openai.errors import (
    ConfigurationError,
    InvalidRequest,
    ManagementDisabled,
    ModelConflict,
    ModelNotFound,
    ServiceError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.models.gates import ModelGates
from triton_openai.models.served import Models
from triton_openai.telemetry.logging import warn
from triton_openai.triton.client import IndexEntry, TritonClient, check_name
from triton_openai.triton.tensors import ModelConfig

_log = structlog.get_logger(__name__)

# Longest time that Triton gets to let go of a model: engines give back tens of gigabytes of memory.
_UNLOAD_SECONDS = 120.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25


class ModelControl:
    """Loads and unloads models, one call per model at a time. What was begun goes on when its client leaves."""

    def __init__(self, settings: Settings, models: Models, client: TritonClient, gates: ModelGates) -> None:
        self._allowed = settings.triton.model_control_mode == "explicit"
        self._grace = settings.triton.unload_grace
        self._models = models
        self._client = client
        self._gates = gates
        self._tasks: set[asyncio.Task[Any]] = set()

    def check_allowed(self) -> None:
        """Raise :class:`ManagementDisabled` unless models may be loaded and unloaded."""
        if not self._allowed:
            raise ManagementDisabled(
                "Loading and unloading models is off; the service allows it with --model-control-mode explicit."
            )

    async def load(self, name: str) -> str:
        """
        Load the model *name*, or the one that this is an alias of, and return its own name, once it is served.

        A model that only serves others counts as served. Raises :class:`ManagementDisabled`, :class:`ModelNotFound`,
        :class:`ModelConflict` for a model that is loaded already or is being changed by another call,
        :class:`UpstreamError` for what Triton reports, and :class:`ConfigurationError` for a model that is loaded now
        and cannot be served.
        """
        model = self._resolve(name)
        await self._alone(self._load(model))
        return model

    async def unload(self, name: str, *, dependents: bool = False) -> str:
        """
        Unload the model *name*, or the one that this is an alias of, and return its own name, once it is gone.

        Running requests on it may finish first, for the configured time. With *dependents* the models that an ensemble
        consists of go too. Raises as :meth:`load` does; a model that is not loaded, or that a loaded one uses, is a
        :class:`ModelConflict`.
        """
        model = self._resolve(name)
        await self._alone(self._unload(model, dependents=dependents))
        return model

    def changed_elsewhere(self) -> None:
        """Look again at what Triton has, because somebody has changed it by another way."""
        self._start(self._gates.changed())
        self._start(self._models.catalog.renew())

    async def close(self) -> None:
        """Stop waiting for what is going on; Triton goes on with it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _resolve(self, name: str) -> str:
        """Return the Triton model that *name* means."""
        self.check_allowed()
        served = self._models.served.get(name)
        if served is not None and served.lora is not None:
            raise InvalidRequest(
                f"'{name}' is a LoRA adapter of the model '{served.owner}', and is served as long as that is loaded.",
                param="model",
            )
        model = self._models.owner(name)
        check_name(model)
        return model

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        # A task of its own: a client that leaves must not make the gate open, or the claim end, before Triton is done.
        await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Looked at, so that asyncio does not complain when nobody was left to hear of it.
            task.exception()

    async def _load(self, model: str) -> None:
        async with self._gates.claim([model]):
            entries = await self._entries(model)
            if any(entry.ready for entry in entries):
                raise ModelConflict(
                    f"The model '{model}' is already loaded.", param="model", code="model_already_loaded"
                )
            if _held(entries, [model]):
                # By another way than this service.
                raise ModelConflict(
                    f"Triton is loading or unloading the model '{model}'.", param="model", code="model_busy"
                )
            _log.info("loading model", model=model)
            try:
                await self._client.load_model(model)
            except ServiceError as error:
                warn(_log, "model was not loaded", error, model=model)
                raise
            finally:
                # Also after a failure, of which the index tells the reason.
                await self._models.catalog.renew()
            await self._gates.changed()
            self._check_served(model)

    def _check_served(self, model: str) -> None:
        snapshot = self._models.catalog.snapshot
        if snapshot.error is not None:
            raise snapshot.error
        if model in self._models.served:
            return
        if model in snapshot.waiting:
            raise UpstreamUnavailable(
                f"The model '{model}' was loaded and is not ready: {snapshot.waiting[model]}.", param="model"
            )
        why = {entry.name: entry for entry in self._models.unserved}.get(model)
        if why is None or why.role is None:
            reason = "it is gone again" if why is None else why.why
            raise ConfigurationError(f"The model '{model}' is loaded, but cannot be served: {reason}.", param="model")

    async def _unload(self, model: str, *, dependents: bool) -> None:
        async with self._gates.claim([model]):
            if not _held(await self._entries(model), [model]):
                raise ModelConflict(f"The model '{model}' is not loaded.", param="model", code="model_not_loaded")
            await self._models.catalog.renew()
            configs = self._models.catalog.snapshot.configs
            parts = _parts(model, configs) if dependents else set()
            async with self._gates.claim(sorted(parts)):
                _refuse_used({model, *parts}, configs)
                async with self._gates.closed({model, *parts}, self._grace):
                    _log.info("unloading model", model=model, with_parts=sorted(parts))
                    try:
                        await self._client.unload_model(model, dependents=dependents)
                        await self._gone({model, *parts})
                    finally:
                        await self._models.catalog.renew()
                        await self._gates.changed()

    async def _entries(self, model: str) -> Sequence[IndexEntry]:
        """Return the lines of *model* in the index. Raises :class:`ModelNotFound`: only names in it reach Triton."""
        entries = [entry for entry in await self._client.repository_index() if entry.name == model]
        if not entries:
            raise ModelNotFound(model)
        return entries

    async def _gone(self, models: Collection[str]) -> None:
        """Wait until *models* are unloaded. Raises :class:`UpstreamTimeout`."""
        deadline = asyncio.get_running_loop().time() + _UNLOAD_SECONDS
        pause = _FIRST_PAUSE
        while left := _held(await self._client.repository_index(), models):
            if asyncio.get_running_loop().time() > deadline:
                raise UpstreamTimeout(f"Triton has not yet unloaded {_listed(left)}.", param="model")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _held(index: Sequence[IndexEntry], models: Collection[str]) -> list[str]:
    """Return those of *models* that Triton holds, in whichever state."""
    states = {"READY", "LOADING", "UNLOADING"}
    return sorted({entry.name for entry in index if entry.name in models and entry.state in states})


def _parts(model: str, configs: Mapping[str, ModelConfig]) -> set[str]:
    """Return the models that *model* is an ensemble of, through all levels."""
    found: set[str] = set()
    left = [model]
    while left:
        config = configs.get(left.pop())
        new = {step.model for step in config.steps} - found if config is not None else set()
        found |= new
        left += new
    return found - {model}


def _refuse_used(models: Collection[str], configs: Mapping[str, ModelConfig]) -> None:
    """Raise :class:`ModelConflict` when one of *models* is used by a loaded model that is to stay."""
    for model in sorted(models):
        config = configs.get(model)
        users = [] if config is None else [user.name for user in users_of(config, configs) if user.name not in models]
        if users:
            raise ModelConflict(
                f"The model '{model}' is used by {_listed(sorted(users))}, to be unloaded first.",
                param="model",
                code="model_in_use",
            )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
