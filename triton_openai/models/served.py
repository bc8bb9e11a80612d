"""The served models: what the catalog found, bound to adapters, tokenizers, templates, names and defaults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import msgspec
import structlog

from triton_openai.adapters._common.base import Adapter, Hints, ModelFiles
from triton_openai.adapters._common.registry import Registry, helper_role
from triton_openai.config.sources import closest
from triton_openai.config.tree import DefaultParameters, ModelSettings, Settings
from triton_openai.errors import (
    ConfigurationError,
    InvalidRequest,
    ModelNotFound,
    ServiceError,
    UnsupportedParameter,
    UpstreamUnavailable,
)
from triton_openai.generation import Interface, Lora, LoraFormat
from triton_openai.models.lora.delivery import LoraDelivery
from triton_openai.models.lora.files import FoundLora, find_loras, names_of, served_name
from triton_openai.parsers.registry import Parsers, choose
from triton_openai.prompts.messages import marks
from triton_openai.prompts.prompter import LazyPrompter, Prompter, Prompters, may_have_tokenizer
from triton_openai.tasks import first_of
from triton_openai.triton.catalog import Catalog, Snapshot
from triton_openai.triton.client import TritonClient
from triton_openai.triton.tensors import ModelConfig

_log = structlog.get_logger(__name__)

# What a request that names no model has in its place.
_DEFAULT_NAMES = frozenset({"", "default"})
# Of a file in a model's folder. What is read are settings; nobody writes longer ones.
_LARGEST = 1 << 20
# Models that an unknown name is compared with and that its error lists, and the longest name that is compared: the time
# for that grows with both (20 ms).
_MOST_SUGGESTED = 20
_LONGEST_COMPARED = 100
# What Triton says of models that nobody has loaded, and of those that were unloaded.
_NOT_LOADED = frozenset({"", "unloaded"})
# How often what could not be loaded is tried again.
_RECHECK_SECONDS = 60.0


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """
    A model that clients can use: one Triton model under one public *name*.

    *triton_model* is the Triton model whose settings these are. *adapter* may answer for it with another one, which
    needs the tokenizer; then *text_level* is the model's own. *lora* is the LoRA adapter that the name stands for,
    *lora_delivery* sends its weights where requests have to. *priorities* are the levels of its queue, 0 where there
    are none. *fingerprint*, OpenAI's ``system_fingerprint``, changes with Triton's version and the model's config.
    *settings* have the context length of the model's files where the operator gives none; *hints* are what else its
    config and its files say. A model that is not *listed* has a name that its client made up.
    """

    name: str
    triton_model: str
    adapter: Adapter
    reason: str
    settings: ModelSettings
    lazy_prompter: LazyPrompter
    text_level: Adapter | None = None
    lora: Lora | None = None
    lora_delivery: LoraDelivery | None = None
    priorities: int = 0
    fingerprint: str = ""
    hints: Hints = Hints()
    listed: bool = True

    @property
    def answers_as(self) -> str:
        """The name of what answers: that of the Triton model, or of the LoRA adapter."""
        return self.triton_model if self.lora is None else self.lora.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model is for: ``generate``, ``embed``, ``rerank``, ``classify``."""
        able = self.adapter.capabilities
        generates, embeds = able.generate and self.hints.generates, able.embed and self.hints.embeds
        ranks = able.score or embeds
        every = (("generate", generates), ("embed", embeds), ("rerank", ranks), ("classify", able.classify))
        return tuple(task for task, can in every if can)

    @property
    def takes_images(self) -> bool:
        """Whether requests can have images."""
        return self.adapter.capabilities.images and self.hints.images

    @property
    def marks_images(self) -> bool:
        """Whether prompts can show where images are: with the chat template or ``image_placeholder``."""
        if self.adapter.capabilities.images_as_turn:
            return True
        prompter = self.lazy_prompter.resolved
        with contextlib.suppress(ConfigurationError, UnsupportedParameter):
            return prompter is not None and bool(marks(prompter.template_for(), self.settings.image_placeholder, ""))
        return False

    @property
    def can_chat(self) -> bool | None:
        """Whether chats find a template that works; ``None`` for a model that takes none, and until it is known."""
        if "generate" not in self.tasks or not self.lazy_prompter.checked.is_set():
            return None
        return self.lazy_prompter.problem is None

    def on_text_level(self, why: str) -> ServedModel:
        """Return the model with its own adapter, where another one answers for it; *why* is for a person to read."""
        if self.text_level is None:
            return self
        return msgspec.structs.replace(self, adapter=self.text_level, reason=why, text_level=None)

    async def prompter(self) -> Prompter:
        """Return tokenizer and template. Raises :class:`ConfigurationError`, whose detail is for the log alone."""
        if self.lazy_prompter.resolved is not None:
            return self.lazy_prompter.resolved
        try:
            return await self.lazy_prompter.get()
        except ConfigurationError as error:
            raise ConfigurationError(
                f"The model '{self.name}' cannot be used: its tokenizer or its chat template cannot be loaded. The log "
                "of the service says why.",
                param="model",
                detail=error.message if error.detail is None else f"{error.message} ({error.detail})",
                retry_after=error.retry_after,
            ) from error

    @property
    def parsers(self) -> Parsers:
        """What reads its answers: parsers that the operator names, or that the chat template shows once it is known."""
        prompter, settings = self.lazy_prompter.resolved, self.settings
        template = "" if prompter is None else prompter.tools_source
        return choose(template, tools=settings.tool_call_parser, reasoning=settings.reasoning_parser)

    def default_parameters(self, prompter: Prompter) -> DefaultParameters:
        """
        Return what holds where a request leaves parameters out: the operator's values, before those that *prompter*'s
        ``generation_config.json`` recommends and this model can honour.
        """
        recommended = prompter.recommended
        if not recommended:
            return self.settings.default_parameters
        fitting = {name: value for name, value in recommended.items() if name in self.adapter.honoured}
        return DefaultParameters(**{**fitting, **self.settings.default_parameters.given()})

    async def check(self) -> None:
        """Load its tokenizer and template, and warn of what its requests lack."""
        # Another adapter stands in where the tokenizer turns out to be missing.
        capabilities = (self.text_level or self.adapter).capabilities
        needs_tokenizer = capabilities.tokens or capabilities.encoded
        await self.lazy_prompter.check(
            self.triton_model, chats="generate" in self.tasks, needs_tokenizer=needs_tokenizer
        )


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
        #: By public name, aliases included.
        self.served: Mapping[str, ServedModel] = {}
        # The names of LoRA adapters of models that exist and are not ready, each with its model
        self._waiting_loras: Mapping[str, str] = {}
        # Triton models whose LoRA adapters only the backend knows.
        self._unlisted_loras: Collection[str] = ()
        #: By Triton model: when it was first seen loaded, in whole seconds since the epoch.
        self.created: Mapping[str, int] = {}
        self._prompters = Prompters()
        self._binding = asyncio.Lock()
        #: Set when other models are served, or other settings hold.
        self.changed = asyncio.Event()
        #: Names in the settings that no model has, each with what is wrong, in a sentence.
        self.misnamed: Mapping[str, str] = {}
        self._deliveries: dict[tuple[str, FoundLora, LoraFormat], LoraDelivery] = {}
        self.unserved: Sequence[Unserved] = ()
        #: By Triton model, in sentences: why LoRA adapters of it are not served.
        self.lora_problems: Mapping[str, Sequence[str]] = {}
        triton = settings.triton
        self.catalog = Catalog(
            client, interval=triton.refresh_interval, changed=self._rebind, starts=bool(triton.model_repository)
        )

    @property
    def over_grpc(self) -> bool:
        """Whether Triton's gRPC address is known."""
        return self._settings.triton.grpc_url is not None

    @property
    def ready(self) -> bool:
        """
        Whether Triton answers and at least one served model is ready.

        Where clients load the models, none need be there yet. But one that is loading, or could not be loaded or
        served, is missing.
        """
        snapshot = self.catalog.snapshot
        if self.served or not snapshot.reachable or self._settings.triton.model_control_mode != "explicit":
            return snapshot.reachable and bool(self.served)
        failed = any(model.failed for model in self.unserved)
        return not failed and all(reason in _NOT_LOADED for reason in snapshot.waiting.values())

    def triton_model(self, name: str) -> str:
        """Return the Triton model that *name* stands for, loaded or not: an alias's, or *name* itself."""
        return name if self._exists(name) else self._aliases.get(name, name)

    def _exists(self, name: str) -> bool:
        return any(entry.name == name for entry in self.catalog.snapshot.index)

    def wanted(self, name: str) -> str:
        """Return the name of the model that a request for *name* wants. Raises :class:`InvalidRequest` if none."""
        if name in self.served or self._exists(name):
            return name
        if name not in _DEFAULT_NAMES:
            fitting = [alias for alias in self._aliases if "*" in alias and fnmatchcase(name, alias)]
            return self._aliases[max(fitting, key=len)] if fitting else name
        default = self._settings.api.default_model
        if default is None and not name:
            raise InvalidRequest(
                "Missing required parameter: 'model'.", param="model", code="missing_required_parameter"
            )
        return default or name

    async def find(self, name: str, allows: Callable[[str], bool] = lambda _: True) -> ServedModel:
        """
        Return the served model called *name*, asking Triton again if it is not known.

        An empty name, and ``default`` unless a model has that name, is the default model where one is configured.
        *allows* says which names the client may use. Raises :class:`InvalidRequest` for an empty name without a default
        model, :class:`ModelNotFound`, or :class:`UpstreamUnavailable` when Triton does not answer or loads the model.
        """
        version = self._version()
        if version != self._seen:
            await self.catalog.renew()
            self._seen = version
        if name not in self.served:
            name = self.wanted(name)
        if not allows(name):
            raise ModelNotFound(name, hidden=True, hint=self._suggestion(name, allows))
        unlisted = None if name in self.served else self.unlisted_lora(name)
        if (name not in self.served and unlisted is None) or not self.catalog.snapshot.reachable:
            await self.catalog.refresh_on_miss()
        model = self.served.get(name) or unlisted
        if model is not None:
            return model if model.text_level is None else await self.settled(model)
        snapshot = self.catalog.snapshot
        if snapshot.error is not None:
            raise UpstreamUnavailable(
                "Triton cannot be reached at the moment.", detail=snapshot.error.detail, retry_after=2
            )
        triton_model = self._waiting_loras.get(name) or self._aliases.get(name, name)
        if triton_model in snapshot.coming:
            raise UpstreamUnavailable(f"The model '{name}' is not ready.", param="model", retry_after=2)
        if triton_model in snapshot.waiting:
            # Nobody loads it for a client that tries again, as the official ones do after a 503.
            raise ModelNotFound(name, why="is not loaded", detail=snapshot.waiting[triton_model])
        raise ModelNotFound(name, hint=self._suggestion(name, allows))

    def _suggestion(self, name: str, allows: Callable[[str], bool]) -> str:
        """Return a sentence with the name that the client may have meant, or with all that it may use."""
        names = [one for one in self.served if allows(one)]
        if len(names) > _MOST_SUGGESTED:
            return " GET /v1/models lists the models."
        hint = closest(name, names) if len(name) <= _LONGEST_COMPARED else ""
        return hint or (f" Available: {', '.join(names)}." if names else "")

    async def settled(self, model: ServedModel) -> ServedModel:
        """Return *model*, with its own adapter where the tokenizer that another one needs turns out to be unusable."""
        if model.text_level is None:
            return model
        # Nothing can be done without a tokenizer that the operator has named: whoever needs it says so.
        with contextlib.suppress(ConfigurationError):
            if (await model.prompter()).tokenizer is None:
                return model.on_text_level("its engine could answer, but the tokenizer is unusable")
        return model

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
        files = partial(_read_file, self._settings.triton.readable_repositories)
        # In a thread: it reads files.
        every = await asyncio.to_thread(lambda: [self._bind(each, configs, files) for each in configs.values()])
        for bound in every:
            if isinstance(bound, ServedModel):
                served[bound.name] = bound
            else:
                unserved.append(bound)
                if refuse and bound.failed and bound.name in self.served:
                    raise ConfigurationError(f"{bound.name}: {bound.why}")
        for alias, name in self._aliases.items():
            if "*" in alias:
                continue
            if alias in snapshot.configs:
                _log.warning("alias is hidden by a model of that name", alias=alias, model=name)
            elif name in served:
                served[alias] = msgspec.structs.replace(served[name], name=alias)
        await self._add_loras(served, snapshot)
        for name in served.keys() - self.served.keys():
            _log.info("model is served", model=name, adapter=served[name].adapter.name)
        for name in self.served.keys() - served.keys():
            _log.info("model is gone", model=name)
        now = int(time.time())
        self.created = {name: self.created.get(name, now) for name in configs}
        self.served, self.unserved = served, unserved
        self._prompters.keep({model.triton_model for model in served.values()})
        known = {entry.name for entry in snapshot.index}
        misnamed = _misnamed(self._settings, known, served.keys() | self._waiting_loras)
        for name in sorted(misnamed.keys() - self.misnamed):
            _log.warning("a name in the settings is no model's", name=name, reason=misnamed[name])
        self.misnamed = misnamed
        self.changed.set()

    async def _add_loras(self, served: dict[str, ServedModel], snapshot: Snapshot) -> None:
        """Add the LoRA adapters of the models that can be asked for one, under names that are free and unambiguous."""
        settings = self._settings
        repositories, separator = settings.triton.readable_repositories, settings.api.lora_separator
        named: dict[str, list[ServedModel]] = {}
        unlisted: set[str] = set()
        problems: dict[str, Sequence[str]] = {}
        for model in served.values():
            if model.name == model.triton_model and model.adapter.capabilities.lora:
                found, problems[model.name] = await asyncio.to_thread(self._find_loras, model)
                for lora in found:
                    name = served_name(model.name, lora.name, separator)
                    named.setdefault(name, []).append(self._bind_lora(model, lora, name))
                if separator and not found and not problems[model.name] and self._backend_knows_loras(model):
                    unlisted.add(model.name)
            elif model.name == model.triton_model and model.settings.loras:
                problems[model.name] = ["Its LoRA adapters are not served: the model has no inputs for them."]
        for name, models in named.items():
            if len(models) > 1 or name in served or name in snapshot.configs:
                _log.warning("a LoRA adapter's name is taken", name=name)
            else:
                served[name] = models[0]
        for name, sentences in problems.items():
            for sentence in sentences:
                if sentence not in self.lora_problems.get(name, ()):
                    _log.warning("LoRA adapter is not served", model=name, reason=sentence)
        self.lora_problems, self._unlisted_loras = problems, unlisted
        self._waiting_loras = await asyncio.to_thread(
            names_of, snapshot.waiting, settings.model, repositories, separator
        )

    def _backend_knows_loras(self, model: ServedModel) -> bool:
        """Return whether only *model*'s backend can tell its LoRA adapters: it takes them by name, from its files."""
        able, repositories = model.adapter.capabilities, self._settings.triton.readable_repositories
        by_name = able.lora_format is None and not able.lora_paths and model.hints.loras
        return by_name and not any((path / model.name).is_dir() for path in repositories)

    def unlisted_lora(self, name: str) -> ServedModel | None:
        """Return the model and LoRA adapter that *name* consists of, where only the backend knows its adapters."""
        base, _, lora = name.partition(self._settings.api.lora_separator or "\0")
        model = self.served.get(base)
        if not lora or model is None or model.lora is not None or model.triton_model not in self._unlisted_loras:
            return None
        return msgspec.structs.replace(model, name=name, lora=Lora(name=lora), listed=False)

    def _find_loras(self, model: ServedModel) -> tuple[list[FoundLora], list[str]]:
        if not model.hints.loras:
            why = "Its engine takes no LoRA adapters, as the model's files say."
            return [], [why] if model.settings.loras else []
        triton, capabilities = self._settings.triton, model.adapter.capabilities
        found, problems = find_loras(
            model.name,
            model.settings,
            triton.readable_repositories,
            capabilities.lora_format,
            by_path=capabilities.lora_paths,
            local=bool(triton.model_repository),
        )
        if capabilities.streaming and triton.grpc_url is None:
            # Over HTTP a stream's inputs are JSON, which has no matrices, and other requests get no stream.
            problems += [
                f"The LoRA adapter '{lora.name}' is not served: its weights need Triton's gRPC address (--triton-url)."
                for lora in found
                if lora.folder is not None
            ]
            found = [lora for lora in found if lora.folder is None]
        return found, problems

    def _bind_lora(self, model: ServedModel, found: FoundLora, name: str) -> ServedModel:
        wanted = model.adapter.capabilities.lora_format
        delivery = None
        if wanted is not None and found.folder is not None:
            key = (model.name, found, wanted)
            # Kept over reloads of the model: an engine that has forgotten the weights says so.
            delivery = self._deliveries.setdefault(key, LoraDelivery(partial(asyncio.to_thread, found.read, wanted)))
        return msgspec.structs.replace(model, name=name, lora=found, lora_delivery=delivery)

    def _bind(
        self, config: ModelConfig, repository: Mapping[str, ModelConfig], files: ModelFiles
    ) -> ServedModel | Unserved:
        name, settings, own = config.name, self._settings.model(config.name), self._settings.models.get(config.name)
        role = helper_role(config, repository)
        # A default adapter for all models is for those that could be served: a helper stays a helper.
        if role is not None and (own is None or own.adapter is None):
            return Unserved(name=name, why=f"it is the {role}", role=role)
        try:
            registry = self._registry
            claim = registry.claim(config) if settings.adapter is None else registry.named(settings.adapter)
            if claim is None:
                return Unserved(name=name, why=_why_unclaimed(config))
            adapter, reason = claim.adapter.described(config, repository, _interface(settings)), claim.reason
            hints, text_level = adapter.hints_with(files), None
            direct = self._token_level(adapter, repository) if settings.adapter is None else None
            if direct is not None and may_have_tokenizer(settings.tokenizer, hints.tokenizer_dir):
                reason = f"{adapter.name}, answered by its engine '{direct.config.name}', see --prefer-token-level"
                adapter, text_level = direct, adapter
        except ServiceError as error:
            _log.error("model cannot be served", model=name, reason=error.message)
            return Unserved(name=name, why=error.message, failed=True)
        except Exception as error:  # noqa: BLE001 - a third party's mistake must not keep the others from their models
            _log.exception("an adapter failed to take a model", model=name)
            return Unserved(name=name, why=f"its adapter failed: {type(error).__name__}", failed=True)
        if settings.multimodal is not None:
            hints = msgspec.structs.replace(hints, images=settings.multimodal)
        if settings.max_model_len is None:
            settings = msgspec.structs.replace(settings, max_model_len=hints.max_model_len)
        return ServedModel(
            name=name,
            triton_model=name,
            adapter=adapter,
            reason=reason,
            settings=settings,
            lazy_prompter=self._prompters.of(name, settings, hints.tokenizer_dir, hints.tokenizer),
            text_level=text_level,
            priorities=max(_priorities(each.config, repository) for each in (adapter, text_level) if each is not None),
            fingerprint=config.fingerprint,
            hints=hints,
        )

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


def _interface(settings: ModelSettings) -> Interface | None:
    """Return the model's tensors, where its settings describe them."""
    if not (settings.inputs or settings.constants or settings.outputs or settings.text):
        return None
    return Interface(inputs=settings.inputs, constants=settings.constants, outputs=settings.outputs, text=settings.text)


def _priorities(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> int:
    """Return the levels of priority of a model's queue; an ensemble hands a request's priority to each of its steps."""
    steps = [step for step in (repository.get(step.model) for step in config.steps) if step is not None]
    return max([config.priority_levels, *(step.priority_levels for step in steps)])


def _why_unclaimed(config: ModelConfig) -> str:
    inputs = ", ".join(f"{spec.name}{'?' if spec.optional else ''} {spec.datatype}" for spec in config.inputs.values())
    outputs = ", ".join(f"{spec.name} {spec.datatype}" for spec in config.outputs.values())
    return f"no adapter knows its tensors (inputs: {inputs or 'none'}; outputs: {outputs or 'none'})"


def _read_file(repositories: Sequence[Path], model: str, name: str) -> bytes | None:
    """
    Return the file *name* of the newest version of *model*; ``None`` where there is none that can be read.

    The first of *repositories* that has the model counts, as it does for Triton. Blocks.
    """
    folder = next((path / model for path in repositories if (path / model).is_dir()), None)
    if folder is None:
        return None
    try:
        versions = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        path = max(versions, key=lambda path: int(path.name)) / name
        return path.read_bytes() if path.stat().st_size <= _LARGEST else None
    except (OSError, ValueError):
        return None


async def keep_loaded(models: Models) -> None:
    """
    Load the tokenizers and templates of served models, and warn of models that cannot chat.

    Runs until cancelled. What failed is tried again every minute.
    """
    while True:
        models.changed.clear()
        by_triton_model = {model.triton_model: model for model in models.served.values() if model.lora is None}
        await asyncio.gather(*(model.check() for model in by_triton_model.values() if not model.lazy_prompter.settled))
        await first_of(models.changed, timeout=_RECHECK_SECONDS)


def _misnamed(settings: Settings, known: Collection[str], served: Collection[str]) -> Mapping[str, str]:
    """
    Return the names in *settings* that no model has, which nothing else would show, with what is wrong.

    *known* are the models that Triton has, loaded or not, *served* further public names.
    """
    aliases = settings.aliases()
    found = {
        name: f"The settings are for an alias: give them to the model '{aliases[name]}'."
        if name in aliases
        else f"The settings are for a model that Triton does not have.{closest(name, known)}"
        for name in settings.models.keys() - set(known)
    }
    default = settings.api.default_model
    if default is not None and default not in {*known, *served, *aliases}:
        found[default] = f"The default model is none that Triton has.{closest(default, [*known, *served])}"
    return found
