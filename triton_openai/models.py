"""
The served models: what the catalog found, bound to adapters, tokenizers, templates, names and defaults.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import structlog

from triton_openai.adapters.base import Adapter
from triton_openai.adapters.helpers import ENGINE, helper_role
from triton_openai.adapters.registry import Claim, Registry
from triton_openai.chat.parsers import Parsers
from triton_openai.chat.prompts import Prompter, may_have_tokenizer
from triton_openai.config import Settings
from triton_openai.config.tree import ModelSettings
from triton_openai.errors import ConfigurationError, InvalidRequest, ModelNotFound, ServiceError, UpstreamUnavailable
from triton_openai.generation import Lora, LoraFormat
from triton_openai.loras.delivery import LoraDelivery
from triton_openai.loras.discovery import FoundLora, find_loras, names_of, served_names
from triton_openai.prompters import LazyPrompter, Prompters
from triton_openai.triton.catalog import Catalog, Snapshot
from triton_openai.triton.client import TritonClient
from triton_openai.triton.tensors import ModelConfig

_log = structlog.get_logger(__name__)

# What a request that names no model has in its place.
_DEFAULT_NAMES = frozenset({"", "default"})


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """
    A model that clients can use: one Triton model under one public *name*. *created* is when it was first seen.

    *owner* is the Triton model whose name and settings these are; *adapter* may answer for it with another one.
    *lora* is the LoRA adapter that the name stands for, *lora_delivery* what brings its weights where requests have to.
    *priorities* are the levels of priority in its queue, 0 where there are none.
    """

    name: str
    owner: str
    adapter: Adapter
    reason: str
    settings: ModelSettings
    created: int
    lazy_prompter: LazyPrompter
    lora: Lora | None = None
    lora_delivery: LoraDelivery | None = None
    priorities: int = 0

    @property
    def answers_as(self) -> str:
        """The name of what answers: that of the Triton model, or of the LoRA adapter."""
        return self.owner if self.lora is None else self.lora.name

    async def prompter(self) -> Prompter:
        """Return tokenizer and template. Raises :class:`ConfigurationError`."""
        return await self.lazy_prompter.get()

    async def parsers(self) -> Parsers:
        """Return what reads this model's answers. Raises :class:`ConfigurationError`."""
        return self.lazy_prompter.parsers(await self.prompter())


class Unserved(msgspec.Struct, frozen=True, kw_only=True):
    """
    A Triton model that is not offered, and why; ``role`` is set for a helper of other models.

    ``failed`` is whether what is configured for it is at fault.
    """

    name: str
    why: str
    role: str | None = None
    failed: bool = False


class Models:
    """Finds the served model of a name, and keeps up with what Triton has."""

    def __init__(self, settings: Settings, client: TritonClient, *, version: Callable[[], int] = lambda: 0) -> None:
        """*version* gives another number when another process of the service has changed what Triton has."""
        self._settings = settings
        self._version = version
        self._seen = version()
        self._registry = Registry()
        self._aliases = settings.aliases()
        self._created: dict[str, int] = {}
        self._served: dict[str, ServedModel] = {}
        # Those of models that exist and are not ready
        self._waiting_loras: frozenset[str] = frozenset()
        self._prompters = Prompters()
        self._binding = asyncio.Lock()
        self._deliveries: dict[tuple[str, FoundLora, LoraFormat], LoraDelivery] = {}
        self.unserved: Sequence[Unserved] = ()
        #: By Triton model, in sentences: why LoRA adapters of it are not served.
        self.lora_problems: Mapping[str, Sequence[str]] = {}
        self.catalog = Catalog(client, interval=settings.triton.refresh_interval, changed=self._rebind)

    @property
    def served(self) -> Mapping[str, ServedModel]:
        """Every public name, aliases included."""
        return self._served

    @property
    def ready(self) -> bool:
        """Whether Triton answers and at least one served model is ready."""
        return self.catalog.snapshot.reachable and bool(self._served)

    def owner(self, name: str) -> str:
        """Return the Triton model that *name* stands for, loaded or not: an alias's, or *name* itself."""
        return name if self._exists(name) else self._aliases.get(name, name)

    def _exists(self, name: str) -> bool:
        return any(entry.name == name for entry in self.catalog.snapshot.index)

    def wanted(self, name: str) -> str:
        """Return the name of the model that a request for *name* wants. Raises :class:`InvalidRequest` if none."""
        if name not in _DEFAULT_NAMES or name in self._served or self._exists(name):
            return name
        default = self._settings.api.default_model
        if default is None and not name:
            raise InvalidRequest(
                "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
            )
        return default or name

    async def find(self, name: str) -> ServedModel:
        """
        Return the served model called *name*, asking Triton again if it is not known.

        An empty name, and ``default`` unless a model has that name, is the default model where one is configured.
        Raises :class:`InvalidRequest` for an empty name where none is, :class:`ModelNotFound`, or
        :class:`UpstreamUnavailable` when Triton does not answer or the model is there and not ready.
        """
        version = self._version()
        if version != self._seen:
            await self.catalog.renew()
            self._seen = version
        name = self.wanted(name)
        found = self._served.get(name)
        if found is not None and self.catalog.snapshot.reachable:
            return found
        await self.catalog.refresh_on_miss()
        found = self._served.get(name)
        if found is not None:
            return found
        snapshot = self.catalog.snapshot
        if snapshot.error is not None:
            raise UpstreamUnavailable(
                "Triton cannot be reached at the moment.", detail=snapshot.error.detail, retry_after=2
            )
        if self._aliases.get(name, name) in snapshot.waiting or name in self._waiting_loras:
            raise UpstreamUnavailable(f"The model '{name}' is not ready.", param="model", retry_after=2)
        raise ModelNotFound(name)

    def listed(self) -> Sequence[tuple[str, int]]:
        """Return the public names and the times since when they are served, for the list of models."""
        names = [(model.name, model.created) for model in self._served.values()]
        if self._settings.api.list_all_models:
            names += [(entry.name, self.since(entry.name)) for entry in self.unserved]
        return names

    async def take_over(self, settings: Settings, *, renew: bool) -> None:
        """
        Serve by *settings* from now on; running requests keep the model that they began with.

        Tokenizers and templates that the settings change are resolved before anything else changes; all others too
        when asked to *renew*, but one that then fails stays as it was. Raises :class:`ConfigurationError` where the
        settings cannot be used; nothing has changed then.
        """
        prompters = await self._prompters.renewed(settings, renew=renew)
        async with self._binding:
            before = self._settings, self._aliases, self._prompters
            self._settings, self._aliases, self._prompters = settings, settings.aliases(), prompters
            try:
                await self._bind_all(self.catalog.snapshot, refuse=True)
            except BaseException:
                self._settings, self._aliases, self._prompters = before
                raise

    def since(self, name: str) -> int:
        """Return when this service first saw the model *name*: now, if it never has."""
        return self._created.setdefault(name, int(time.time()))

    async def _rebind(self, snapshot: Snapshot) -> None:
        async with self._binding:
            await self._bind_all(snapshot)

    async def _bind_all(self, snapshot: Snapshot, *, refuse: bool = False) -> None:
        """
        Bind every model of *snapshot*.

        When asked to *refuse*, raise :class:`ConfigurationError` where a mistake takes away a model that was served.
        """
        if not snapshot.reachable:
            # What was served stays known: requests for it get a 503 and not a 404 while Triton is away.
            return
        served: dict[str, ServedModel] = {}
        unserved: list[Unserved] = []
        for config in snapshot.configs.values():
            bound = self._bind(config, snapshot.configs)
            if isinstance(bound, ServedModel):
                served[config.name] = bound
            else:
                unserved.append(bound)
                if refuse and bound.failed and config.name in self._served:
                    raise ConfigurationError(f"{config.name}: {bound.why}")
        for alias, name in self._aliases.items():
            if alias in snapshot.configs:
                _log.warning("alias is hidden by a model of that name", alias=alias, model=name)
            elif name in served:
                served[alias] = msgspec.structs.replace(served[name], name=alias)
        await self._add_loras(served, snapshot)
        for name in served.keys() - self._served.keys():
            _log.info("model is served", model=name, adapter=served[name].adapter.name)
        for name in self._served.keys() - served.keys():
            _log.info("model is gone", model=name)
        self._served, self.unserved = served, unserved
        self._prompters.keep({model.owner for model in served.values()})

    async def _add_loras(self, served: dict[str, ServedModel], snapshot: Snapshot) -> None:
        """Add the LoRA adapters of the models that can be asked for one, under names that are free and unambiguous."""
        named: dict[str, list[ServedModel]] = {}
        problems: dict[str, Sequence[str]] = {}
        for model in served.values():
            if model.name != model.owner or not model.adapter.capabilities.lora:
                continue
            found, problems[model.name] = await asyncio.to_thread(self._find_loras, model)
            for lora in found:
                bound = self._bind_lora(model, lora)
                for name in served_names(model.name, lora.name, self._settings.api.lora_separator):
                    named.setdefault(name, []).append(msgspec.structs.replace(bound, name=name))
        for name, models in named.items():
            if len(models) > 1 or name in served or name in snapshot.configs:
                _log.warning("a LoRA adapter's name is taken", name=name)
            else:
                served[name] = models[0]
        for owner, sentences in problems.items():
            for sentence in sentences:
                if sentence not in self.lora_problems.get(owner, ()):
                    _log.warning("LoRA adapter is not served", model=owner, reason=sentence)
        self.lora_problems = problems
        settings = self._settings
        self._waiting_loras = await asyncio.to_thread(
            names_of, snapshot.waiting, settings.model, settings.triton.model_repository, settings.api.lora_separator
        )

    def _find_loras(self, model: ServedModel) -> tuple[list[FoundLora], list[str]]:
        triton, capabilities = self._settings.triton, model.adapter.capabilities
        found, problems = find_loras(model.name, model.settings, triton.model_repository, capabilities.lora_format)
        if capabilities.streaming and triton.grpc_url is None:
            # Over HTTP a stream's inputs are JSON, which has no matrices, and other requests get no stream.
            problems += [
                f"The LoRA adapter '{lora.name}' is not served: its weights need Triton's gRPC address (--triton-url)."
                for lora in found
                if lora.folder is not None
            ]
            found = [lora for lora in found if lora.folder is None]
        return found, problems

    def _bind_lora(self, model: ServedModel, found: FoundLora) -> ServedModel:
        wanted = model.adapter.capabilities.lora_format
        delivery = None
        if wanted is not None and found.folder is not None:
            key = (model.name, found, wanted)
            # Kept over reloads of the model: an engine that has forgotten the weights says so.
            delivery = self._deliveries.setdefault(key, LoraDelivery(partial(asyncio.to_thread, found.read, wanted)))
        lora = Lora(name=found.name, number=found.number)
        return msgspec.structs.replace(model, lora=lora, lora_delivery=delivery)

    def _bind(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> ServedModel | Unserved:
        settings = self._settings.model(config.name)
        try:
            found = self._adapter(config, settings, repository)
            if isinstance(found, Unserved):
                return found
            adapter, reason = found
            hint = adapter.hints.tokenizer_dir
            routed = self._settings.triton.prefer_token_level and settings.adapter is None
            if routed and may_have_tokenizer(settings.tokenizer, hint):
                adapter, reason = self._token_level(adapter, reason, repository)
        except ServiceError as error:
            _log.error("model cannot be served", model=config.name, reason=error.message)
            return Unserved(name=config.name, why=error.message, failed=True)
        except Exception as error:  # noqa: BLE001 - a third party's mistake must not keep the others from their models
            _log.exception("an adapter failed to take a model", model=config.name)
            return Unserved(name=config.name, why=f"its adapter failed: {type(error).__name__}", failed=True)
        return ServedModel(
            name=config.name,
            owner=config.name,
            adapter=adapter,
            reason=reason,
            settings=settings,
            created=self.since(config.name),
            lazy_prompter=self._prompters.of(config.name, settings, hint),
            priorities=_priorities(adapter.config, repository),
        )

    def _adapter(
        self, config: ModelConfig, settings: ModelSettings, repository: Mapping[str, ModelConfig]
    ) -> tuple[Adapter, str] | Unserved:
        # A default adapter for all models is for those that could be served: a helper stays a helper.
        own = self._settings.models.get(config.name)
        named = own is not None and own.adapter is not None
        role = helper_role(config, repository)
        if role == ENGINE and self._settings.api.list_all_models:
            role = None
        claim: Claim | None
        if settings.adapter is not None and (role is None or named):
            claim = self._registry.named(settings.adapter)
        elif role is not None:
            return Unserved(name=config.name, why=f"it is the {role}", role=role)
        else:
            claim = self._registry.claim(config)
        if claim is None:
            return Unserved(name=config.name, why=_why_unclaimed(config))
        return claim.adapter(config, repository), claim.reason

    def _token_level(self, adapter: Adapter, reason: str, repository: Mapping[str, ModelConfig]) -> tuple[Adapter, str]:
        """Return what answers with the engine behind *adapter*'s model, or what was given where there is none."""
        engine = adapter.token_level
        claim = None if engine is None else self._registry.claim(engine)
        if engine is None or claim is None:
            return adapter, reason
        direct = claim.adapter(engine, repository)
        if not direct.capabilities.tokens:
            return adapter, reason
        return direct, f"{adapter.name}, answered by its engine '{engine.name}' as prefer_token_level is set"


def _priorities(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> int:
    """Return the levels of priority of a model's queue; an ensemble hands a request's priority to each of its steps."""
    steps = [step for step in (repository.get(step.model) for step in config.steps) if step is not None]
    return max([config.priority_levels, *(step.priority_levels for step in steps)])


def _why_unclaimed(config: ModelConfig) -> str:
    inputs = ", ".join(f"{spec.name}{'?' if spec.optional else ''} {spec.datatype}" for spec in config.inputs.values())
    outputs = ", ".join(f"{spec.name} {spec.datatype}" for spec in config.outputs.values())
    return f"no adapter knows its tensors (inputs: {inputs or 'none'}; outputs: {outputs or 'none'})"
