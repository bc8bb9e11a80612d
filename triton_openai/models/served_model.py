"""What is found out about served models before somebody asks them, so that an operator sees mistakes at once."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
import structlog

from triton_openai.adapters._common.base import Adapter, Hints, Rule
from triton_openai.config import Settings
from triton_openai.config.tree import DefaultParameters, ModelSettings
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Lora
from triton_openai.models.lora.delivery import LoraDelivery
from triton_openai.parsers.choose import Parsers
from triton_openai.prompts.cache import LazyPrompter
from triton_openai.prompts.prompter import Prompter

if TYPE_CHECKING:
    from triton_openai.models.served import Models


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """
    A model that clients can use: one Triton model under one public *name*.

    *owner* is the Triton model whose name and settings these are; *adapter* may answer for it with another one, which
    needs the tokenizer: *text_level* is the model's own one then.
    *lora* is the LoRA adapter that the name stands for, *lora_delivery* what brings its weights where requests have to.
    *priorities* are the levels of priority in its queue, 0 where there are none. *fingerprint* changes with Triton's
    version and the model's configuration: OpenAI's ``system_fingerprint``. *settings* have the context length that the
    model's files tell, where the operator gives none; *hints* are what else its config and its files tell.
    """

    name: str
    owner: str
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

    @property
    def answers_as(self) -> str:
        """The name of what answers: that of the Triton model, or of the LoRA adapter."""
        return self.owner if self.lora is None else self.lora.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model is for: ``generate``, ``embed``, ``rerank``."""
        able = self.adapter.capabilities
        generates = able.generate and self.hints.generates
        every = (("generate", generates), ("embed", able.embed), ("rerank", able.score or able.embed))
        return tuple(task for task, can in every if can)

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
        """
        Return tokenizer and template. Raises :class:`ConfigurationError`, whose reason is for the log: it may hold
        paths.
        """
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

    async def default_parameters(self) -> DefaultParameters:
        """
        Return what holds where a request leaves parameters out: the operator's values, before those that the model's
        ``generation_config.json`` recommends and this model can honour. Raises :class:`ConfigurationError`.
        """
        recommended = (await self.prompter()).recommended
        honoured = {row.name for row in self.adapter.parameters if row.rule is not Rule.REFUSED}
        fitting = {name: value for name, value in recommended.items() if name in honoured}
        return DefaultParameters(**{**fitting, **self.settings.default_parameters.given()})

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


_log = structlog.get_logger(__name__)

# How often what could not be loaded is tried again.
_RECHECK_SECONDS = 60.0


async def keep_loaded(models: Models) -> None:
    """
    Load the tokenizers and templates of served models, and warn of models that cannot chat.

    Runs until cancelled. What failed is tried again every minute.
    """
    while True:
        models.changed.clear()
        owners = {model.owner: model for model in models.served.values() if model.lora is None}
        await asyncio.gather(*(_check(model) for model in owners.values() if not model.lazy_prompter.settled))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RECHECK_SECONDS):
                await models.changed.wait()


async def _check(model: ServedModel) -> None:
    # Another adapter stands in where the tokenizer turns out to be missing.
    capabilities = (model.text_level or model.adapter).capabilities
    await model.lazy_prompter.check(
        model.owner, chats="generate" in model.tasks, needs_tokenizer=capabilities.tokens or capabilities.token_pairs
    )


def warn_of_names(
    settings: Settings, known: Collection[str], served: Collection[str], warned: frozenset[str]
) -> frozenset[str]:
    """
    Warn of names in *settings* that no model has, which nothing else would show, and return them.

    *known* are the models that Triton has, loaded or not, *served* further public names; *warned* are names of which it
    was warned before.
    """
    unknown: dict[str, str] = {}
    aliases = settings.aliases()
    for name in settings.models.keys() - set(known):
        unknown[name] = "settings are for a model that Triton does not have"
        if name in aliases:
            unknown[name] = f"settings are for an alias: give them to the model '{aliases[name]}'"
    default = settings.api.default_model
    if default is not None and default not in {*known, *served, *aliases}:
        unknown[default] = "the default model is none that Triton has"
    for name in sorted(unknown.keys() - warned):
        close = difflib.get_close_matches(name, known, 1)
        _log.warning(unknown[name], name=name, did_you_mean=close[0] if close else None)
    return frozenset(unknown)
