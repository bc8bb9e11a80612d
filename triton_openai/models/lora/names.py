"""The LoRA adapters that are served as models of their own, and the names that they have then."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import structlog
from msgspec.structs import replace

from triton_openai.config.tree import Settings
from triton_openai.generation import Lora, LoraFormat
from triton_openai.models.lora.delivery import LoraDeliveries
from triton_openai.models.lora.lora_files import FoundLora, find_loras, names_of, served_name
from triton_openai.models.served import ServedModel
from triton_openai.triton.catalog import Snapshot

_log = structlog.get_logger(__name__)


class LoraModels:
    """Finds the LoRA adapters of the served models, and keeps what is known of them."""

    def __init__(self) -> None:
        #: The names of adapters of models that exist and are not ready, each with its model.
        self.waiting: Mapping[str, str] = {}
        #: By Triton model, in sentences: why LoRA adapters of it are not served.
        self.problems: Mapping[str, Sequence[str]] = {}
        # Triton models of whose LoRA adapters only the backend has a list.
        self._unlisted: Collection[str] = ()
        self._deliveries: dict[tuple[str, FoundLora, LoraFormat], LoraDeliveries] = {}

    async def add(
        self, served: dict[str, ServedModel], snapshot: Snapshot, settings: Settings, *, over_grpc: bool
    ) -> None:
        """Add the LoRA adapters of the models that can be asked for one, under names that are free and unambiguous."""
        repositories = settings.triton.readable_repositories
        separator = settings.api.lora_separator
        named: dict[str, list[ServedModel]] = {}
        unlisted: set[str] = set()
        problems: dict[str, Sequence[str]] = {}
        for model in served.values():
            if model.name == model.triton_model and model.adapter.capabilities.lora:
                loras, problems[model.name] = await asyncio.to_thread(_found, model, settings, over_grpc)
                for lora in loras:
                    name = served_name(model.name, lora.name, separator)
                    named.setdefault(name, []).append(self._bound(model, lora, name))
                if separator and not loras and not problems[model.name] and _only_backend_knows(model, settings):
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
                if sentence not in self.problems.get(name, ()):
                    _log.warning("LoRA adapter is not served", model=name, reason=sentence)
        self.problems = problems
        self._unlisted = unlisted
        self.waiting = await asyncio.to_thread(names_of, snapshot.waiting, settings.model, repositories, separator)

    def unlisted(self, name: str, served: Mapping[str, ServedModel], separator: str | None) -> ServedModel | None:
        """
        Return the model and LoRA adapter that *name* consists of, where only the backend has the list of its adapters.
        """
        base, _, lora = name.partition(separator or "\0")
        model = served.get(base)
        if not lora or model is None or model.lora is not None or model.triton_model not in self._unlisted:
            return None
        return replace(model, name=name, lora=Lora(name=lora), listed=False)

    def _bound(self, model: ServedModel, lora: FoundLora, name: str) -> ServedModel:
        form = model.adapter.capabilities.lora
        delivery = None
        if isinstance(form, LoraFormat) and lora.folder is not None:
            key = (model.name, lora, form)
            # Kept over reloads of the model: an engine that has forgotten the weights says so.
            delivery = self._deliveries.setdefault(key, LoraDeliveries(partial(asyncio.to_thread, lora.read, form)))
        return replace(model, name=name, lora=lora, lora_delivery=delivery)


def _only_backend_knows(model: ServedModel, settings: Settings) -> bool:
    """Return whether only the backend of *model* has the list of its LoRA adapters: it reads them from its files."""
    repositories = settings.triton.readable_repositories
    by_name = model.adapter.capabilities.lora == "name" and model.metadata.loras
    return by_name and not any((path / model.name).is_dir() for path in repositories)


def _found(model: ServedModel, settings: Settings, over_grpc: bool) -> tuple[list[FoundLora], list[str]]:
    if not model.metadata.loras:
        why = "Its engine takes no LoRA adapters, as the model's files say."
        return [], [why] if model.settings.loras else []
    capabilities = model.adapter.capabilities
    repositories = settings.triton.readable_repositories
    local = bool(settings.triton.model_repository)
    loras, problems = find_loras(model.name, model.settings, repositories, capabilities.lora, local=local)
    if capabilities.streaming and not over_grpc:
        # Over HTTP a stream's inputs are JSON, which has no matrices, and other requests get no stream.
        problems += [
            f"The LoRA adapter '{lora.name}' is not served: its weights need Triton's gRPC address (--triton-url)."
            for lora in loras
            if lora.folder is not None
        ]
        loras = [lora for lora in loras if lora.folder is None]
    return loras, problems
