"""Finds the served model that a request names, in a table that follows the models of Triton."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec
import structlog

from triton_openai.access.keys import NO_KEY, ApiKey
from triton_openai.config.tree import Settings
from triton_openai.config.validation import did_you_mean
from triton_openai.draining import Draining, ModelDraining
from triton_openai.errors import ConfigurationError, ModelNotFound, UpstreamUnavailable, missing
from triton_openai.models.binding import Binder
from triton_openai.models.loading import Prompters, warn_of
from triton_openai.models.lora.names import LoraModels
from triton_openai.models.served import ServedModel, Unserved
from triton_openai.tasks import cancel, wait_any
from triton_openai.triton.catalog import Snapshot
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.reloading import reloading_error

_log = structlog.get_logger(__name__)

# What a request that names no model has in its place.
_DEFAULT_NAMES = frozenset({"", "default"})
#: What OpenAI's moderation takes for a request without a model.
MODERATION_DEFAULT = "omni-moderation-latest"
# OpenAI's moderation models, which stand for the classifier whose settings map its labels to categories.
_MODERATION_NAMES = frozenset({MODERATION_DEFAULT, "text-moderation-latest", "text-moderation-stable"})
# Models that an unknown name is compared with and that its error lists, and the longest name that is compared: the time
# for that grows with both (20 ms).
_MAX_SUGGESTED = 20
_MAX_COMPARED_CHARS = 100
# The states in Triton of models that were never loaded, and of those that were unloaded.
_NOT_LOADED = frozenset({"", "unloaded"})
# How often what could not be loaded is tried again.
_RECHECK_SECONDS = 60.0
# How long the warning of a model may wait for those of others, which are often the same.
_TOGETHER_SECONDS = 1.0


class Models:
    """The table of served models by name; it follows the models of Triton."""

    def __init__(self, settings: Settings, fleet: Fleet, draining: ModelDraining | None = None) -> None:
        """*draining* has another version once another process of the service has loaded or unloaded a model."""
        self._draining = draining or ModelDraining(Draining())
        self._version = self._draining.version
        self._binder = Binder(settings, Prompters())
        self._binding = asyncio.Lock()
        self.loras = LoraModels()
        #: By public name, aliases included.
        self.served: Mapping[str, ServedModel] = {}
        self.unserved: Sequence[Unserved] = ()
        #: By Triton model: when it was first seen loaded, in whole seconds since the epoch.
        self.created: Mapping[str, int] = {}
        #: Set when other models are served, or other settings hold.
        self.changed = asyncio.Event()
        #: Names in the settings that no model has, each with what is wrong, in a sentence.
        self.misnamed: Mapping[str, str] = {}
        #: By Triton model: how it differs between Tritons, in sentences.
        self.differences: Mapping[str, Sequence[str]] = {}
        self.fleet = fleet
        fleet.on_change = self._rebind

    @property
    def ready(self) -> bool:
        """
        Whether Triton answers and at least one served model is ready.

        Where clients load the models, none need be there yet. But one that is loading, or could not be loaded or
        served, is missing.
        """
        snapshot = self.fleet.snapshot
        if self.served or not snapshot.reachable or self._binder.settings.triton.model_control_mode != "explicit":
            return snapshot.reachable and bool(self.served)
        failed = any(model.failed for model in self.unserved)
        return not failed and all(reason in _NOT_LOADED for reason in snapshot.waiting.values())

    def triton_model(self, name: str) -> str:
        """Return the Triton model that *name* stands for, loaded or not: an alias's, or *name* itself."""
        if self._exists(name):
            return name
        return self._binder.aliases.get(name, name)

    def _exists(self, name: str) -> bool:
        return any(entry.name == name for entry in self.fleet.snapshot.index)

    def requested_name(self, name: str, key: ApiKey = NO_KEY) -> str:
        """
        Return the name of the model that answers a request for *name*.

        A name of OpenAI's moderation means the only classifier that can moderate, of those that *key*
        opens, or the default model if it is one of several. Raises :class:`InvalidRequest` if there is none.
        """
        if name in self.served or self._exists(name):
            return name
        default = self._binder.settings.api.default_model
        if name not in _DEFAULT_NAMES:
            fitting = [alias for alias in self._binder.aliases if "*" in alias and fnmatchcase(name, alias)]
            if fitting:
                return self._binder.aliases[max(fitting, key=len)]
            if name not in _MODERATION_NAMES:
                return name
            moderators = self._moderators(key)
            if default in moderators:
                return default
            if len(moderators) == 1:
                return moderators[0]
            return name
        if default is None and not name:
            raise missing("model")
        return default or name

    def _moderators(self, key: ApiKey) -> list[str]:
        """Return the served models whose settings map labels to OpenAI's categories."""
        return [
            name
            for name, model in self.served.items()
            if name == model.triton_model and model.settings.moderation.labels and key.allows(name)
        ]

    async def listed(self) -> Mapping[str, ServedModel]:
        """Return the served models by public name. If there are none, wait for those that are being bound."""
        if self.served:
            return self.served
        if any(not member.catalog.first.is_set() for member in self.fleet.members.values()):
            # As a request for a model does, in a process that has just started.
            await self.fleet.refresh_on_miss()
        async with self._binding:
            return self.served

    async def find(self, name: str, key: ApiKey = NO_KEY) -> ServedModel:
        """
        Return the served model called *name*, asking Triton again if it is not known.

        An empty name, and ``default`` unless a model has that name, is the default model where one is configured.
        *key* is the client's, which may not open all models. Raises :class:`InvalidRequest` for an empty name without a
        default model, :class:`ModelNotFound`, or :class:`UpstreamUnavailable` when Triton does not answer or loads the
        model.
        """
        version = self._draining.version
        if version != self._version:
            await self.fleet.reload()
            self._version = version
        if not self.served:
            # Some names stand for what is served, which a process that has just started does not have yet.
            await self.listed()
        if name not in self.served:
            name = self.requested_name(name, key)
        if key.models is not None and not key.allows(name):
            raise ModelNotFound(name, hidden=True, hint=self._suggestion(name, key))
        unlisted = None
        if name not in self.served:
            unlisted = self.unlisted_lora(name)
        known = name in self.served or unlisted is not None
        if not known or self.fleet.snapshot.error is not None:
            await self.fleet.refresh_on_miss()
        model = self.served.get(name) or unlisted
        if model is not None:
            if model.variants:
                model = model.variant_at(self.fleet.leasing.choose(model.triton_model))
            if model.text_level is None:
                return model
            return await model.with_fallback()
        snapshot = self.fleet.snapshot
        if snapshot.error is not None:
            raise UpstreamUnavailable(
                "Triton cannot be reached at the moment.", detail=snapshot.error.detail, retry_after=2
            )
        triton_model = self.loras.waiting.get(name) or self._binder.aliases.get(name, name)
        if triton_model in snapshot.coming:
            raise UpstreamUnavailable(f"The model '{name}' is not ready.", param="model", retry_after=2)
        reloading = reloading_error(triton_model, name)
        if reloading is not None:
            raise reloading
        if triton_model in snapshot.waiting:
            # A retry, as official clients do after a 503, would not help: clients load models here.
            raise ModelNotFound(name, why="is not loaded", detail=snapshot.waiting[triton_model])
        unserved = next((entry for entry in self.unserved if entry.name == triton_model), None)
        if unserved is not None and unserved.role is None:
            hint = f" Triton has it, but {unserved.why}."
            if unserved.failed:
                # What is wrong with the settings may name files of the operator.
                hint = " Triton has it, but what is configured for it cannot be used: the service's log says why."
            if unserved.settings:
                hint += f" These settings would serve it:\n{unserved.settings}"
            raise ModelNotFound(name, why="is not served", hint=hint)
        raise ModelNotFound(name, hint=self._suggestion(name, key))

    def _suggestion(self, name: str, key: ApiKey) -> str:
        """Return a sentence with the name that the client may have meant, or with all that it may use."""
        if name in _MODERATION_NAMES:
            moderators = self._moderators(key)
            if moderators:
                return f" Several models moderate, so name one of them: {', '.join(moderators[:_MAX_SUGGESTED])}."
            return (
                " It stands for a classifier whose settings map its labels to categories ('moderation'): there is none."
            )
        names = [served for served in self.served if key.allows(served)]
        if len(names) > _MAX_SUGGESTED:
            return " GET /v1/models lists the models."
        hint = ""
        if len(name) <= _MAX_COMPARED_CHARS:
            hint = did_you_mean(name, names)
        if not hint and names:
            return f" Available: {', '.join(names)}."
        return hint

    async def apply_settings(self, settings: Settings, *, reload: bool) -> None:
        """
        Serve by *settings* from now on; running requests keep the model that they began with.

        Tokenizers and templates that the settings change are resolved before anything else changes; all others too
        when asked to *reload*, but one that then fails stays as it was. Raises :class:`ConfigurationError` where the
        settings cannot be used; nothing has changed then.
        """
        prompters = await self._binder.prompters.reloaded(settings, reload=reload)
        async with self._binding:
            await self._bind_all(self.fleet.snapshot, Binder(settings, prompters), refuse=True)

    def unlisted_lora(self, name: str) -> ServedModel | None:
        """
        Return the model and LoRA adapter that *name* consists of, where only the backend has the list of its adapters.
        """
        return self.loras.unlisted(name, self.served, self._binder.settings.api.lora_separator)

    async def _rebind(self, snapshot: Snapshot) -> None:
        async with self._binding:
            await self._bind_all(snapshot, self._binder)

    async def _bind_all(self, snapshot: Snapshot, binder: Binder, *, refuse: bool = False) -> None:
        """
        Bind every model of *snapshot* by *binder*, which holds from then on.

        When asked to *refuse*, raise :class:`ConfigurationError` where a mistake takes away a model that was served.
        """
        if not snapshot.reachable:
            # What was served stays known: requests for it get a 503 and not a 404 while Triton is away.
            self._binder = binder
            return
        configs = snapshot.configs
        over_grpc = self.fleet.over_grpc
        every = await asyncio.to_thread(
            lambda: [binder.bind_with_variants(name, snapshot, over_grpc=over_grpc) for name in configs]
        )
        served = {bound.name: bound for bound in every if isinstance(bound, ServedModel)}
        unserved = [bound for bound in every if isinstance(bound, Unserved)]
        lost = [bound for bound in unserved if bound.failed and bound.name in self.served]
        if refuse and lost:
            raise ConfigurationError(f"{lost[0].name}: {lost[0].why}")
        for alias, name in binder.aliases.items():
            if alias in configs:
                _log.warning("alias is hidden by a model of that name", alias=alias, model=name)
            elif name in served and "*" not in alias:
                served[alias] = msgspec.structs.replace(served[name], name=alias)
        await self.loras.add(served, snapshot, binder.settings, over_grpc=over_grpc)
        for name in served.keys() - self.served.keys():
            adapter = served[name].adapter
            advice = {}
            if adapter.advice:
                advice["advice"] = adapter.advice
            _log.info("model is served", model=name, adapter=adapter.name, **advice)
        for name in self.served.keys() - served.keys():
            _log.info("model is gone", model=name)
        differences = {}
        for name, model in served.items():
            sentences = [*model.differences, *_versions(snapshot.versions.get(model.triton_model, {}))]
            if sentences:
                differences[name] = sentences
            if sentences and sentences != self.differences.get(name):
                _log.warning("model differs between Tritons", model=name, differences=sentences)
        self.differences = differences
        now = int(time.time())
        self.created = {name: self.created.get(name, now) for name in configs}
        self._binder = binder
        self.served = served
        self.unserved = unserved
        binder.prompters.keep({model.triton_model for model in served.values()})
        known = {entry.name for entry in snapshot.index}
        misnamed = _misnamed(binder.settings, known, served.keys() | self.loras.waiting)
        for name in sorted(misnamed.keys() - self.misnamed):
            _log.warning("a name in the settings is no model's", name=name, reason=misnamed[name])
        self.misnamed = misnamed
        self.changed.set()


def _versions(loaded: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the sentence that several Tritons have *loaded* different versions of a model."""
    if loaded:
        parts = [f"{version} at {' and '.join(names)}" for version, names in sorted(loaded.items())]
        yield f"Its loaded version is {', '.join(parts)}."


async def keep_loaded(models: Models) -> None:
    """
    Load the tokenizers and templates of served models, and warn of models that cannot chat.

    Runs until cancelled. What failed is tried again every minute.
    """
    while True:
        models.changed.clear()
        by_triton_model = {model.triton_model: model for model in models.served.values() if model.lora is None}
        await _check([model for model in by_triton_model.values() if not model.lazy_prompter.check_is_final])
        await wait_any(models.changed, timeout=_RECHECK_SECONDS)


async def _check(models: Sequence[ServedModel]) -> None:
    """Check *models*, and warn of those whose requests would fail, in one line where they are checked at once."""
    checks = {asyncio.create_task(model.check()): model.triton_model for model in models}
    pending = set(checks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=_TOGETHER_SECONDS)
            failures = {}
            for task in sorted(done, key=lambda task: checks[task]):
                failure = task.result()
                if failure is not None:
                    failures[checks[task]] = failure
            warn_of(failures)
    finally:
        await cancel(*pending)


def _misnamed(settings: Settings, known: Collection[str], served: Collection[str]) -> Mapping[str, str]:
    """
    Return the names in *settings* that no model has, which nothing else would show, with what is wrong.

    *known* are the models that Triton has, loaded or not, *served* further public names.
    """
    aliases = settings.aliases()
    problems = {}
    for name in settings.models.keys() - set(known):
        if name in aliases:
            problems[name] = f"The settings are for an alias: give them to the model '{aliases[name]}'."
        else:
            problems[name] = f"The settings are for a model that Triton does not have.{did_you_mean(name, known)}"
    default = settings.api.default_model
    if default is not None and default not in {*known, *served, *aliases}:
        problems[default] = f"The default model is none that Triton has.{did_you_mean(default, [*known, *served])}"
    return problems
