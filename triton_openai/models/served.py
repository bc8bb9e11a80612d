"""A served model: a model of Triton with its adapter, tokenizer, templates, settings and name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import force_setattr, replace

from triton_openai.adapters._common.base import Adapter, ModelMetadata
from triton_openai.config.tree import DefaultParameters, ModelSettings
from triton_openai.errors import ConfigurationError, UnsupportedParameter
from triton_openai.generation import Lora
from triton_openai.jobs import JobType
from triton_openai.models.loading import CheckFailure, LazyPrompter, tokenizer_problem
from triton_openai.models.lora.delivery import LoraDeliveries
from triton_openai.models.voices import Voices
from triton_openai.prompts.prompt_template import marks
from triton_openai.prompts.prompter import Prompter


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that clients can use: one Triton model under one public name."""

    name: str
    #: The Triton model whose settings these are.
    triton_model: str
    #: What answers for it; may use another Triton model, and then needs the tokenizer.
    adapter: Adapter
    #: Why it has this adapter, for a person to read.
    reason: str
    #: With the context length of the model's files where the operator gives none.
    settings: ModelSettings
    lazy_prompter: LazyPrompter
    #: The model's own adapter, where another one answers for it.
    text_level: Adapter | None = None
    #: The LoRA adapter that the name stands for.
    lora: Lora | None = None
    #: Sends the LoRA adapter's weights where requests have to.
    lora_delivery: LoraDeliveries | None = None
    #: The levels of its queue, 0 where there are none.
    priorities: int = 0
    #: OpenAI's ``system_fingerprint``: changes with Triton's version and the model's config.
    fingerprint: str = ""
    #: What else its config and its files say.
    metadata: ModelMetadata = ModelMetadata()
    #: The names of the Tritons that have it like this; all that have it if empty.
    endpoints: frozenset[str] = frozenset()
    #: How it is on other Tritons, where several have it in different ways.
    variants: tuple[ServedModel, ...] = ()
    #: Its voices, if it synthesizes speech.
    voices: Voices | None = None
    #: Whether it is among the models; else its client made up the name.
    listed: bool = True
    #: Whether every Triton has a gRPC address.
    over_grpc: bool = False
    #: Whether its tokenizer is the one that the settings have for all models.
    common_tokenizer: bool = False
    # What follows from the fields above
    #: The types of the jobs that the model takes, what it is mainly for first.
    jobs: Sequence[JobType] = ()
    #: The name of what answers: that of the Triton model, or of the LoRA adapter.
    answers_as: str = ""

    def __post_init__(self) -> None:
        jobs = [job for job in self.adapter.jobs if job not in self.metadata.lacks]
        force_setattr(self, "jobs", jobs)
        answers_as = self.triton_model
        if self.lora is not None:
            answers_as = self.lora.name
        force_setattr(self, "answers_as", answers_as)

    def variant_at(self, endpoint: str | None) -> ServedModel:
        """Return the model as the Triton *endpoint* has it, under this name."""
        variant = next((other for other in self.variants if endpoint in other.endpoints), None)
        if variant is None:
            return self
        own = {name: getattr(self, name) for name in ("name", "lora", "lora_delivery", "listed")}
        others = (
            replace(self, variants=()),
            *(other for other in self.variants if other is not variant),
        )
        return replace(variant, **own, variants=others)

    @property
    def differences(self) -> Sequence[str]:
        """The differences of the model between Tritons that clients can notice, in sentences."""
        every = (self, *self.variants)
        properties: dict[str, Callable[[ServedModel], object]] = {
            "Its context length": lambda model: model.metadata.max_model_len,
            "Its tokenizer": lambda model: Path(model.metadata.tokenizer or model.metadata.tokenizer_dir or "").name,
            "Its adapter": lambda model: model.adapter.name,
            "The release of Triton": lambda model: model.adapter.config.server_version,
        }
        lines = []
        for what, value_of in properties.items():
            values = [f"{value_of(model) or 'unknown'} at {' and '.join(sorted(model.endpoints))}" for model in every]
            if len({value_of(model) for model in every}) > 1:
                lines.append(f"{what} is {', '.join(values)}.")
        return lines

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model is for."""
        return tuple(dict.fromkeys(task for job in self.jobs for task in job.tasks))

    @property
    def takes_images(self) -> bool:
        """Whether requests can have images."""
        return self.adapter.capabilities.images > 0 and self.metadata.images

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

    async def with_fallback(self) -> ServedModel:
        """Return the model, with its own adapter where the tokenizer that another one needs is unusable."""
        if self.text_level is None:
            return self
        try:
            tokenizer = (await self.prompter()).tokenizer
        except ConfigurationError:
            # The operator has named a tokenizer for this model: the request that needs it reports the error.
            if not self.common_tokenizer:
                return self
            tokenizer = None
        if tokenizer is None:
            return self.on_text_level("its engine could answer, but the tokenizer is unusable")
        problem = tokenizer_problem(tokenizer, self.adapter.capabilities)
        if problem is not None:
            return self.on_text_level(f"its engine could answer, but {problem}")
        return self

    def on_text_level(self, why: str) -> ServedModel:
        """Return the model with its own adapter, where another one answers for it; *why* is for a person to read."""
        if self.text_level is None:
            return self
        return replace(self, adapter=self.text_level, reason=why, text_level=None)

    async def prompter(self) -> Prompter:
        """Return tokenizer and template. Raises :class:`ConfigurationError`, whose detail is for the log alone."""
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

    def default_parameters(self, prompter: Prompter) -> DefaultParameters:
        """
        Return what holds where a request leaves parameters out: the operator's values, before those that *prompter*'s
        ``generation_config.json`` recommends and this model can honour.
        """
        fitting = {name: value for name, value in prompter.recommended.items() if name in self.adapter.supported}
        return DefaultParameters(**{**fitting, **self.settings.default_parameters.explicit()})

    async def check(self) -> CheckFailure | None:
        """Load its tokenizer and template, and return why its requests would fail, if that is new."""
        # Another adapter stands in where the tokenizer turns out to be missing.
        capabilities = (self.text_level or self.adapter).capabilities
        return await self.lazy_prompter.check(
            self.triton_model, chats="generate" in self.tasks, capabilities=capabilities
        )


class Unserved(msgspec.Struct, frozen=True, kw_only=True):
    """A Triton model that is not offered."""

    name: str
    #: Why, in words.
    why: str
    #: What it does for other models.
    role: str | None = None
    #: Whether what is configured for it is at fault.
    failed: bool = False
    #: Settings in YAML that would serve it; empty where none are found.
    settings: str = ""
