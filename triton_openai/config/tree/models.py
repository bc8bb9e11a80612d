"""How models are used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triton_openai.config.tree.fields import SettingsGroup, Text, Tokens, common_flag, file_only, flag


class DefaultParameters(SettingsGroup, frozen=True, omit_defaults=True):
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

    def explicit(self) -> dict[str, Any]:
        """Return the parameters that are set, by their names in a request."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class LoraSettings(SettingsGroup, frozen=True):
    """A LoRA adapter that an engine is sent, or reads itself."""

    name: Text
    #: Stands for it in the engine; made from its contents or its path if left out.
    task_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    #: The folder with its weights.
    path: Text | None = None
    #: The format of what an engine reads itself.
    ckpt_source: Literal["hf", "nemo"] | None = None


#: OpenAI's categories of harmful content.
Category = Literal[
    "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm",
    "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic",
]  # fmt: skip
_Share = Annotated[float, Meta(ge=0, le=1)]


class ModerationSettings(SettingsGroup, frozen=True):
    """What a classifier's labels mean in `/v1/moderations`."""

    #: The category that each label stands for.
    labels: Mapping[Text, Category] = {}
    #: A text falls into a category if its probability reaches this.
    threshold: _Share = 0.5
    #: The same for single categories.
    thresholds: Mapping[Category, _Share] = {}


_Rate = Annotated[int, Meta(ge=4000, le=192_000)]


class AudioSettings(SettingsGroup, frozen=True):
    """Settings of speech that a model's config does not have."""

    #: The rate of its audio in Hz.
    sample_rate: _Rate | None = None
    #: A recognizer gets longer audio cut; a synthesizer answers with as much at most.
    max_seconds: Annotated[float, Meta(ge=1, le=3600)] | None = None
    #: How a recognizer takes audio: the samples, or a WAV file as bytes or in base64.
    form: Literal["samples", "file", "base64"] | None = None
    #: A recognizer gets audio padded with silence to a multiple of this.
    pad_seconds: Annotated[float, Meta(ge=0, le=3600)] | None = None
    #: How much a recognizer that takes audio as a sequence of requests gets in each.
    part_seconds: Annotated[float, Meta(ge=0.01, le=60)] | None = None
    #: The codes of the languages of a recognizer, or a mapping of codes to its own names for them.
    languages: Mapping[Text, Text | int] | tuple[Text, ...] | None = None
    #: The one that is taken if a request names none.
    language: Text | None = None
    #: Whether a recognizer has room for a request's prompt.
    prompt: bool | None = None
    #: The rate of the recordings that a synthesizer imitates, in Hz.
    reference_sample_rate: _Rate | None = None
    #: By how much the parts of a synthesizer's answer overlap.
    overlap_seconds: Annotated[float, Meta(ge=0, le=1)] | None = None
    #: A folder of recordings, each NAME.wav with its text in NAME.txt; or the names of the model's voices, or a mapping
    #: of names to those of the model.
    voices: Text | tuple[Text, ...] | Mapping[Text, Text | int] = ()
    #: Other names for voices.
    voice_aliases: Mapping[Text, Text] = {}


class ModelDefaults(SettingsGroup, frozen=True):
    """Settings of all models. Each flag also takes MODEL=VALUE, for one model."""

    adapter: Annotated[
        str | None, flag("Adapter to use in place of the one that claims the model (see `triton-openai inspect`).")
    ] = None
    tokenizer: Annotated[
        str | None,
        common_flag("Folder with the tokenizer's files, or NAME[@REVISION] on the Hugging Face hub.", metavar="SOURCE"),
    ] = None
    generation_config: Annotated[
        Text | None,
        file_only(
            "Source of default sampling parameters: 'auto' (the default) is generation_config.json beside the "
            "tokenizer, 'none' is nothing; else a file or its folder."
        ),
    ] = None
    chat_template: Annotated[
        str | None, common_flag("Jinja file with the chat template, or the name of a built-in one.", metavar="FILE")
    ] = None
    history_template: Annotated[
        Text | None,
        flag(
            "Liquid template in place of a chat template, over 'items' with 'identity' and 'content' (needs the extra "
            "[liquid]). The flag is for all models.",
            metavar="TEXT",
            verbatim=True,
        ),
    ] = None
    fim_template: Annotated[
        Text | None,
        file_only(
            "How the model fills in the middle ('suffix'): a text with {prefix} and {suffix}, or the name of a known "
            "form."
        ),
    ] = None
    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        file_only(
            "How an encoder's vectors of a text's tokens become one: their mean, the first, or the last one. By "
            "default from the 1_Pooling/config.json beside the tokenizer, else 'mean'."
        ),
    ] = None
    normalize_embeddings: Annotated[
        bool | None,
        file_only(
            "Whether an encoder's vectors get the length 1. By default as the modules.json beside the tokenizer says; "
            "without that file, they do."
        ),
    ] = None
    embedding_prefix: Annotated[
        str | None,
        file_only(
            "What precedes each text for an encoder that takes token ids, such as 'passage: '. By default the default "
            "prompt of config_sentence_transformers.json beside the tokenizer."
        ),
    ] = None
    score_activation: Annotated[
        Literal["none", "sigmoid"] | None,
        file_only(
            "What to do with a cross-encoder's scores: 'none' (the default) returns them unchanged, 'sigmoid' is for a "
            "model that returns logits."
        ),
    ] = None
    problem_type: Annotated[
        Literal["single_label_classification", "multi_label_classification", "regression"] | None,
        file_only(
            "What a classifier's logits become: probabilities of which one class is true (softmax) or any number of "
            "them (sigmoid), or what they are. By default from the config.json beside the tokenizer."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        flag("Format of tool calls; 'auto' (the default) detects it by the chat template, 'none' turns parsing off."),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        flag("Format of reasoning; 'auto' (the default) detects it by the chat template, 'none' turns parsing off."),
    ] = None
    image_placeholder: Annotated[
        str | None,
        file_only(
            "Placeholder of an image in the prompt, for chat templates that take text only; {n} is the image's number. "
            "'none' if the backend inserts images itself, 'auto' (the default) leaves it to the template."
        ),
    ] = None
    audio_placeholder: Annotated[
        str | None,
        file_only(
            "Placeholder of audio in the prompt of a chat, as image_placeholder is for an image; {n} is its number."
        ),
    ] = None
    multimodal: Annotated[
        bool | None,
        file_only(
            "Whether the engine is set up for images, where the backend ignores them otherwise; by default from the "
            "model's files."
        ),
    ] = None
    max_model_len: Annotated[
        Tokens | None, flag("Most tokens of prompt and answer together; by default from the model's files.")
    ] = None
    kv_cache_block_size: Annotated[
        Tokens | None,
        file_only(
            "Tokens in a block of the engine's KV cache (tokens_per_block). usage then has the number of cached prompt "
            "tokens, if the backend counts blocks."
        ),
    ] = None
    default_parameters: DefaultParameters = DefaultParameters()


class ModelSettings(ModelDefaults, frozen=True):
    """Settings of one model, in addition to those of all models."""

    aliases: Annotated[
        tuple[Text, ...],
        common_flag("Another name for a model; * stands for any text.", name="alias", metavar="NAME=MODEL"),
    ] = ()
    #: Names of adapters in the backend, or mappings with name, path and task_id.
    loras: tuple[Text | LoraSettings, ...] = ()
    #: The base of their paths, by default the model's folder in ``model_repository``.
    lora_dir: Path | None = None
    # These four describe the tensors of a model that an adapter such as ``text`` serves.
    #: The names of inputs by their use.
    inputs: Mapping[str, Text] = msgspec.field(default_factory=dict)
    #: Inputs that always have the same value.
    constants: Mapping[str, Any] = msgspec.field(default_factory=dict)
    #: The names of outputs by their use.
    outputs: Mapping[str, Text] = msgspec.field(default_factory=dict)
    #: What a response holds: the new text, all of it so far, or only the last one has it.
    text: Literal["delta", "cumulative", "final"] | None = None
    #: The format of the model's tool calls, if it is none of the built-in ones: see "Describe a format".
    tool_format: Mapping[str, Any] = msgspec.field(default_factory=dict)
    max_enqueued_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        file_only("Most input tokens of one key in batches for this model, in place of batches.max_enqueued_tokens."),
    ] = None
    moderation: ModerationSettings = ModerationSettings()
    audio: AudioSettings = AudioSettings()
