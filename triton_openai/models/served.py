"""
The served models: what the catalog found, bound to adapters, tokenizers, templates, names and defaults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog

from triton_openai.adapters._common.base import Adapter
from triton_openai.adapters._common.registry import ENGINE, Claim, Registry, helper_role
from triton_openai.config import Settings
from triton_openai.config.tree import ModelSettings
from triton_openai.errors import ConfigurationError, InvalidRequest, ModelNotFound, ServiceError, UpstreamUnavailable
from triton_openai.generation import Lora, LoraFormat
from triton_openai.models.lora.delivery import LoraDelivery
from triton_openai.models.lora.discovery import FoundLora, find_loras, names_of, served_names
from triton_openai.models.served_model import ServedModel, Unserved, warn_of_names
from triton_openai.prompts.cache import Prompters
from triton_openai.prompts.prompter import may_have_tokenizer
from triton_openai.triton.catalog import Catalog, Snapshot
from triton_openai.triton.client import TritonClient
from triton_openai.triton.tensors import ModelConfig

# What is read are settings; nobody writes longer ones.
_LARGEST = 1 << 20


class RepositoryFiles:
    """Reads files of the models in *repositories*."""

    def __init__(self, repositories: Sequence[Path]) -> None:
        self._repositories = repositories

    def __call__(self, model: str, name: str) -> bytes | None:
        """
        Return the file *name* of the newest version of *model*; ``None`` where there is none that can be read.

        The first repository that has the model counts, as it does for Triton. Blocks.
        """
        folder = next((path / model for path in self._repositories if (path / model).is_dir()), None)
        if folder is None:
            return None
        try:
            versions = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
            path = max(versions, key=lambda path: int(path.name)) / name
            return path.read_bytes() if path.stat().st_size <= _LARGEST else None
        except (OSError, ValueError):
            return None


__all__ = ["Models", "ServedModel", "Unserved"]

_log = structlog.get_logger(__name__)

# What a request that names no model has in its place.
_DEFAULT_NAMES = frozenset({"", "default"})


class Models:
    """Finds the served model of a name, and keeps up with what Triton has."""

    def __init__(self, settings: Settings, client: TritonClient, *, version: Callable[[], int] = lambda: 0) -> None:
        """*version* gives another number when another process of the service has changed what Triton has."""
        self._settings = settings
        self._version = version
        self._seen = version()
        self._registry = Registry()
        self._aliases = settings.aliases()
        self._served: dict[str, ServedModel] = {}
        # The names of LoRA adapters of models that exist and are not ready, each with its model
        self._waiting_loras: Mapping[str, str] = {}
        self._prompters = Prompters()
        self._binding = asyncio.Lock()
        #: Set when other models are served, or other settings hold.
        self.changed = asyncio.Event()
        self._warned: frozenset[str] = frozenset()
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
        :class:`UpstreamUnavailable` when Triton does not answer or the model is being loaded.
        """
        version = self._version()
        if version != self._seen:
            await self.catalog.renew()
            self._seen = version
        name = self.wanted(name)
        found = self._served.get(name)
        if found is not None and self.catalog.snapshot.reachable:
            return await self.settled(found)
        await self.catalog.refresh_on_miss()
        found = self._served.get(name)
        if found is not None:
            return await self.settled(found)
        snapshot = self.catalog.snapshot
        if snapshot.error is not None:
            raise UpstreamUnavailable(
                "Triton cannot be reached at the moment.", detail=snapshot.error.detail, retry_after=2
            )
        owner = self._waiting_loras.get(name) or self._aliases.get(name, name)
        if owner in snapshot.coming:
            raise UpstreamUnavailable(f"The model '{name}' is not ready.", param="model", retry_after=2)
        if owner in snapshot.waiting:
            # Nobody loads it for a client that tries again, as the official ones do after a 503.
            raise ModelNotFound(name, why="is not loaded", detail=snapshot.waiting[owner])
        raise ModelNotFound(name)

    async def settled(self, model: ServedModel) -> ServedModel:
        """Return *model*, with its own adapter where the tokenizer that another one needs turns out to be unusable."""
        if model.text_level is None:
            return model
        try:
            known = (await model.prompter()).tokenizer is not None
        except ConfigurationError:
            # Nothing can be done without a tokenizer that the operator has named: whoever needs it says so.
            known = True
        if known:
            return model
        return model.on_text_level("its engine could answer, but the tokenizer is unusable")

    def listed(self) -> Sequence[str]:
        """Return the public names for the list of models."""
        names = [model.name for model in self._served.values()]
        if self._settings.api.list_all_models:
            names += [entry.name for entry in self.unserved]
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
        configs = snapshot.configs
        files = RepositoryFiles(self._settings.triton.readable_repositories)
        # In a thread: it reads files.
        every = await asyncio.to_thread(lambda: [(each, self._bind(each, configs, files)) for each in configs.values()])
        for config, bound in every:
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
        known = {entry.name for entry in snapshot.index}
        self._warned = warn_of_names(self._settings, known, served.keys() | self._waiting_loras, self._warned)
        self.changed.set()

    async def _add_loras(self, served: dict[str, ServedModel], snapshot: Snapshot) -> None:
        """Add the LoRA adapters of the models that can be asked for one, under names that are free and unambiguous."""
        named: dict[str, list[ServedModel]] = {}
        problems: dict[str, Sequence[str]] = {}
        for model in served.values():
            if model.name != model.owner or not model.adapter.capabilities.lora:
                continue
            if not model.hints.loras:
                if model.settings.loras:
                    problems[model.name] = ["Its engine takes no LoRA adapters, as the model's files say."]
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
            names_of,
            snapshot.waiting,
            settings.model,
            settings.triton.readable_repositories,
            settings.api.lora_separator,
        )

    def _find_loras(self, model: ServedModel) -> tuple[list[FoundLora], list[str]]:
        triton, capabilities = self._settings.triton, model.adapter.capabilities
        found, problems = find_loras(model.name, model.settings, triton.readable_repositories, capabilities.lora_format)
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

    def _bind(
        self, config: ModelConfig, repository: Mapping[str, ModelConfig], files: RepositoryFiles
    ) -> ServedModel | Unserved:
        settings = self._settings.model(config.name)
        try:
            found = self._adapter(config, settings, repository)
            if isinstance(found, Unserved):
                return found
            adapter, reason = found
            hints, text_level = adapter.hints_with(files), None
            direct = self._token_level(adapter, repository) if settings.adapter is None else None
            if direct is not None and may_have_tokenizer(settings.tokenizer, hints.tokenizer_dir):
                reason = f"{adapter.name}, answered by its engine '{direct.config.name}', see --prefer-token-level"
                adapter, text_level = direct, adapter
        except ServiceError as error:
            _log.error("model cannot be served", model=config.name, reason=error.message)
            return Unserved(name=config.name, why=error.message, failed=True)
        except Exception as error:  # noqa: BLE001 - a third party's mistake must not keep the others from their models
            _log.exception("an adapter failed to take a model", model=config.name)
            return Unserved(name=config.name, why=f"its adapter failed: {type(error).__name__}", failed=True)
        if settings.max_model_len is None:
            settings = msgspec.structs.replace(settings, max_model_len=hints.max_model_len)
        return ServedModel(
            name=config.name,
            owner=config.name,
            adapter=adapter,
            reason=reason,
            settings=settings,
            lazy_prompter=self._prompters.of(config.name, settings, hints.tokenizer_dir, hints.tokenizer),
            text_level=text_level,
            priorities=max(_priorities(each.config, repository) for each in (adapter, text_level) if each is not None),
            fingerprint=config.fingerprint,
            hints=hints,
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

    def _token_level(self, adapter: Adapter, repository: Mapping[str, ModelConfig]) -> Adapter | None:
        """Return what answers with the engine behind *adapter*'s model, where there is one and it is wanted."""
        mode = self._settings.triton.prefer_token_level
        if mode == "never" or (mode == "auto" and not adapter.capabilities.splits_characters):
            return None
        engine = adapter.token_level
        claim = None if engine is None else self._registry.claim(engine)
        if engine is None or claim is None:
            return None
        direct = claim.adapter(engine, repository)
        return direct if direct.capabilities.tokens else None


def _priorities(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> int:
    """Return the levels of priority of a model's queue; an ensemble hands a request's priority to each of its steps."""
    steps = [step for step in (repository.get(step.model) for step in config.steps) if step is not None]
    return max([config.priority_levels, *(step.priority_levels for step in steps)])


def _why_unclaimed(config: ModelConfig) -> str:
    inputs = ", ".join(f"{spec.name}{'?' if spec.optional else ''} {spec.datatype}" for spec in config.inputs.values())
    outputs = ", ".join(f"{spec.name} {spec.datatype}" for spec in config.outputs.values())
    return f"no adapter knows its tensors (inputs: {inputs or 'none'}; outputs: {outputs or 'none'})"
