"""The settings of models: how each is used, and how those are that say nothing themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triton_openai.config.access import Seconds


class MediaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Images in requests. Without allowed hosts, they come as data URLs only."""

    allowed_domains: Annotated[
        tuple[str, ...],
        Meta(
            description="Host from which images may be fetched; example.com, *.example.com (every host below it), "
            "either with :PORT. May be given several times.",
            extra={"common": True, "name": "allowed-media-domain", "metavar": "HOST"},
        ),
    ] = ()
    private_addresses: Annotated[
        bool,
        Meta(
            description="Fetch images also from allowed hosts whose addresses are not public (loopback, private "
            "networks). Then a request can reach into this network, as far as the allowed hosts go.",
            extra={"file_only": True, "name": "private-media-addresses"},
        ),
    ] = False
    max_images: Annotated[
        int, Meta(ge=1, le=4096, description="Most images in one request.", extra={"file_only": True})
    ] = 16
    max_image_size: Annotated[
        int,
        Meta(ge=1024, description="Largest image file that is taken.", extra={"file_only": True, "metavar": "BYTES"}),
    ] = 20 * 1024 * 1024
    fetch_timeout: Annotated[
        Seconds,
        Meta(
            description="Longest time that fetching one image may take.",
            extra={"file_only": True, "name": "media-fetch-timeout", "metavar": "SECONDS"},
        ),
    ] = 10.0
    max_fetches: Annotated[
        int,
        Meta(
            ge=1,
            description="Images that are fetched at the same time; others wait.",
            extra={"file_only": True, "name": "max-media-fetches"},
        ),
    ] = 32


class DefaultParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Values for request parameters that a client leaves out, with the limits that a request has."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
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
            extra={"metavar": "NAME"},
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Meta(
            description="Folder with the tokenizer's files, or a model on the Hugging Face hub: NAME or NAME@REVISION.",
            extra={"common": True, "metavar": "SOURCE"},
        ),
    ] = None
    generation_config: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="What recommends the sampling of requests that ask for none: 'auto' (the default) is "
            "generation_config.json beside the tokenizer, 'none' is nothing, else the file or its folder.",
            extra={"file_only": True},
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(
            description="Jinja file with the chat template, or the name of a built-in one.",
            extra={"common": True, "metavar": "TEMPLATE"},
        ),
    ] = None
    history_template: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Liquid text over 'items' with 'identity' and 'content' that makes the prompt of a chat, in "
            "place of a chat template (needs the extra [liquid]).",
            extra={"file_only": True},
        ),
    ] = None
    history_template_file: Annotated[
        Path | None, Meta(description="File with such a Liquid text.", extra={"file_only": True})
    ] = None
    fim_template: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="How a model that was trained to fill in the middle takes 'suffix': a text with {prefix} and "
            "{suffix}, or the name of a known form.",
            extra={"file_only": True},
        ),
    ] = None
    score_activation: Annotated[
        Literal["none", "sigmoid"] | None,
        Meta(
            description="What is done to the scores of a cross-encoder: 'none' (the default) gives them as the model "
            "does, 'sigmoid' is for one that gives logits.",
            extra={"file_only": True},
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="How the model writes tool calls; 'auto' (the default) goes by its chat template, 'none' "
            "leaves them in the text.",
            extra={"common": True, "metavar": "NAME"},
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(
            description="How the model marks its reasoning; 'auto' (the default) goes by its chat template, 'none' "
            "leaves it in the text.",
            extra={"common": True, "metavar": "NAME"},
        ),
    ] = None
    image_placeholder: Annotated[
        str | None,
        Meta(
            description="What stands in the prompt for an image, {n} being its number, where the chat template takes "
            "text only; 'none' where the backend itself puts images into the prompt. 'auto' (the default) leaves it to "
            "the template.",
            extra={"file_only": True},
        ),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Tokens that prompt and answer may have together; by default what the model's files tell.",
            extra={"metavar": "TOKENS"},
        ),
    ] = None
    kv_cache_block_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Tokens in a block of the engine's KV cache (its tokens_per_block): with it, usage tells how "
            "many of the prompt's tokens came from the cache, where the backend counts them.",
            extra={"file_only": True},
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
            extra={"common": True, "name": "alias", "metavar": "NAME=MODEL"},
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
