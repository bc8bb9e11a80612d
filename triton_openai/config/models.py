"""The settings of models: how each is used, and how those are that say nothing themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class DefaultParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Values for request parameters that a client leaves out, with the limits that a request has."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None

    def given(self) -> dict[str, Any]:
        """Return only what is set, under its name in a request."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class LoraSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """
    A LoRA adapter that an engine is sent, or has read itself: its *name*, the *task_id* that stands for it there (made
    from its contents if left out), and the *path* of the folder with its weights.
    """

    name: Annotated[str, Meta(min_length=1)]
    task_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    path: Annotated[str, Meta(min_length=1)] | None = None


class ModelDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How models are used that say nothing else themselves. Each flag also takes MODEL=VALUE, for that model only."""

    adapter: Annotated[
        str | None,
        Meta(
            description="Adapter to use, instead of the one that claims the model (see `triton-openai inspect`).",
            extra={"metavar": "[MODEL=]NAME", "per_model": True},
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Meta(
            description="Folder with the tokenizer's files, or the name of a model on the Hugging Face hub.",
            extra={"metavar": "[MODEL=]SOURCE", "per_model": True},
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(
            description="Jinja file with the chat template, or the name of a built-in one.",
            extra={"metavar": "[MODEL=]TEMPLATE", "per_model": True},
        ),
    ] = None
    history_template: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Liquid text over 'items' with 'identity' and 'content' that makes the prompt of a chat, in "
            "place of a chat template (needs the extra [liquid]).",
            extra={"metavar": "[MODEL=]TEXT", "per_model": True, "verbatim": True},
        ),
    ] = None
    history_template_file: Annotated[
        Path | None,
        Meta(
            description="File with such a Liquid text.",
            extra={"metavar": "[MODEL=]FILE", "per_model": True},
        ),
    ] = None
    fim_template: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="How a model that was trained to fill in the middle takes 'suffix': a text with {prefix} and "
            "{suffix}, the name of a known form, or 'auto' for the form whose tokens the tokenizer has.",
            extra={"metavar": "[MODEL=]FORM", "per_model": True, "verbatim": True},
        ),
    ] = None
    score_activation: Annotated[
        Literal["none", "sigmoid"] | None,
        Meta(
            description="What is done to the scores of a cross-encoder: 'none' (the default) gives them as the model "
            "does, 'sigmoid' is for one that gives logits.",
            extra={"metavar": "[MODEL=]NAME", "per_model": True},
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="How the model writes tool calls; 'auto' (the default) goes by its chat template, 'none' "
            "leaves them in the text.",
            extra={"metavar": "[MODEL=]NAME", "per_model": True},
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(
            description="How the model marks its reasoning; 'auto' (the default) goes by its chat template, 'none' "
            "leaves it in the text.",
            extra={"metavar": "[MODEL=]NAME", "per_model": True},
        ),
    ] = None
    image_placeholder: Annotated[
        str | None,
        Meta(
            description="What stands in the prompt for an image, {n} being its number, where the chat template takes "
            "text only; 'none' where the backend itself puts images into the prompt. 'auto' (the default) leaves it to "
            "the template.",
            extra={"metavar": "[MODEL=]TEXT", "per_model": True},
        ),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Tokens that prompt and answer may have together; no backend tells it.",
            extra={"metavar": "[MODEL=]TOKENS", "per_model": True},
        ),
    ] = None
    kv_cache_block_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Tokens in a block of the engine's KV cache (its tokens_per_block): with it, usage tells how "
            "many of the prompt's tokens came from the cache, where the backend counts them.",
            extra={"metavar": "[MODEL=]TOKENS", "per_model": True},
        ),
    ] = None
    default_parameters: Annotated[
        DefaultParameters,
        Meta(description="Values for request parameters that a client leaves out, such as temperature."),
    ] = DefaultParameters()


class ModelSettings(ModelDefaults, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one model is used; what is left out comes from the defaults."""

    aliases: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="Further name under which a model is served. May be given several times.",
            extra={"name": "alias", "metavar": "NAME=MODEL"},
        ),
    ] = ()
    loras: Annotated[
        tuple[Annotated[str, Meta(min_length=1)] | LoraSettings, ...],
        Meta(
            description="LoRA adapters of the model, each served under its name: names that the model's server knows, "
            "or mappings with name, path and task_id. In a repository that can be read here, multi_lora.json is read "
            "as well."
        ),
    ] = ()
    lora_dir: Annotated[
        Path | None,
        Meta(
            description="Folder in which the paths of loras lie; by default the model's own folder in model_repository."
        ),
    ] = None
