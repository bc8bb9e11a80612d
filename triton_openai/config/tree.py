"""
The settings tree: what can be set, its type, its limits, its default and its explanation, each in one place.

Flags, environment variables, help texts and the reference table are derived from the fields below (see ``options``), so
a new setting is one new field. ``extra`` holds what cannot be derived: ``name`` where the field's own name would be too
short for a flag, and ``metavar``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from triton_openai.config.access import AccessSettings, LimitSettings

Seconds = Annotated[float, Meta(gt=0, le=86_400, extra={"metavar": "SECONDS"})]


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The service itself."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on; 0.0.0.0 for every interface.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port to listen on; 0 takes a free one.")] = 9000
    backlog: Annotated[
        int,
        Meta(
            ge=1,
            le=65_535,
            description="Connections that may wait to be accepted; net.core.somaxconn limits it too.",
        ),
    ] = 4096
    max_body_size: Annotated[
        int, Meta(ge=1024, description="Largest request body that is read.", extra={"metavar": "BYTES"})
    ] = 64 * 1024 * 1024
    heartbeat_interval: Annotated[
        Seconds, Meta(description="A stream that has nothing to send sends a comment this often.")
    ] = 15.0
    shutdown_grace: Annotated[
        Seconds, Meta(description="Time that running requests are given to finish when the service is told to stop.")
    ] = 10.0
    log_format: Annotated[
        Literal["console", "json"],
        Meta(description="Log lines and the banner for people, or one JSON object per line."),
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe log line that is written.")
    ] = "info"


class TritonSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Triton behind the service: one that runs already, or one that is started here."""

    url: Annotated[
        tuple[str, ...],
        Meta(
            description="Where Triton runs: http(s)://HOST:PORT, grpc(s)://HOST:PORT, or one of each. "
            "May be given twice or separated by a comma.",
            extra={"name": "triton-url", "metavar": "URL"},
        ),
    ] = ("http://127.0.0.1:8000",)
    model_repository: Annotated[
        tuple[Path, ...],
        Meta(
            description="Start a Triton on this model repository and supervise it, instead of using a running one. "
            "May be given several times.",
            extra={"metavar": "DIR"},
        ),
    ] = ()
    connect_timeout: Annotated[Seconds, Meta(description="Longest wait for a connection to Triton.")] = 5.0
    first_token_timeout: Annotated[
        Seconds, Meta(description="Longest wait for a stream's first token, queueing included.")
    ] = 600.0
    idle_timeout: Annotated[Seconds, Meta(description="Longest silence between two tokens of a stream.")] = 120.0
    request_timeout: Annotated[
        Seconds, Meta(description="Longest time that a request which does not stream may take.")
    ] = 600.0
    refresh_interval: Annotated[
        Seconds, Meta(description="How often the list of models and their readiness is read again.")
    ] = 2.0
    prefer_token_level: Annotated[
        bool,
        Meta(
            description="Answer for a model of text with the engine behind it, where there is one and the tokenizer is "
            "known: exact characters, counts, token ids and log probabilities."
        ),
    ] = False
    stop_requests: Annotated[
        bool,
        Meta(description="Tell the engine behind an ensemble to stop when its request is abandoned."),
    ] = True

    @property
    def http_url(self) -> str | None:
        """The HTTP address of Triton, without a trailing slash, if one is configured."""
        return self._first("http", "https")

    @property
    def grpc_url(self) -> str | None:
        """The gRPC address of Triton (``grpc://`` or ``grpcs://``), without a trailing slash, if one is configured."""
        return self._first("grpc", "grpcs")

    def _first(self, *schemes: str) -> str | None:
        return next((url.rstrip("/") for url in self.url if urlsplit(url).scheme in schemes), None)


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What clients see."""

    default_max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Length limit of an answer for requests that do not set one (backends have no useful default).",
            extra={"metavar": "TOKENS"},
        ),
    ] = 512
    strict_parameters: Annotated[
        bool, Meta(description="Refuse request fields that are not known, instead of ignoring them.")
    ] = False
    lora_separator: Annotated[
        str | None,
        Meta(
            description="Serve a LoRA adapter as MODEL<separator>NAME too, not only under its own name.",
            extra={"metavar": "TEXT"},
        ),
    ] = None
    always_include_usage: Annotated[
        bool, Meta(description="End every stream with its usage, also for clients that do not ask for it.")
    ] = False
    reasoning_field: Annotated[
        Literal["reasoning_content", "reasoning", "both"],
        Meta(description="Name under which an answer's reasoning is given."),
    ] = "reasoning_content"
    trust_request_chat_template: Annotated[
        bool,
        Meta(description="Let a request bring its own chat template: a program that runs here, in Jinja's sandbox."),
    ] = False
    list_all_models: Annotated[
        bool, Meta(description="List helper models (tokenizing and detokenizing steps) too, and serve inner engines.")
    ] = False


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
        tuple[str, ...],
        Meta(
            description="Further name under which a model is served. May be given several times.",
            extra={"name": "alias", "metavar": "NAME=MODEL"},
        ),
    ] = ()
    loras: Annotated[
        tuple[str, ...],
        Meta(
            description="LoRA adapters that the model's server knows; each is served under its name. In a repository "
            "that can be read here, multi_lora.json is read as well."
        ),
    ] = ()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that can be set. ``load_settings`` makes it; it never changes afterwards."""

    server: ServerSettings = ServerSettings()
    triton: TritonSettings = TritonSettings()
    api: ApiSettings = ApiSettings()
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    defaults: ModelDefaults = ModelDefaults()
    models: Annotated[
        Mapping[str, ModelSettings], Meta(description="What differs for single models, by the name that Triton knows.")
    ] = msgspec.field(default_factory=dict)

    def model(self, name: str) -> ModelSettings:
        """Return how the model *name* is used: its own settings, completed from the defaults."""
        own = self.models.get(name, ModelSettings())
        parameters = {**self.defaults.default_parameters.given(), **own.default_parameters.given()}
        return ModelSettings(
            adapter=own.adapter or self.defaults.adapter,
            tokenizer=own.tokenizer or self.defaults.tokenizer,
            chat_template=own.chat_template or self.defaults.chat_template,
            tool_call_parser=own.tool_call_parser or self.defaults.tool_call_parser,
            reasoning_parser=own.reasoning_parser or self.defaults.reasoning_parser,
            max_model_len=own.max_model_len or self.defaults.max_model_len,
            kv_cache_block_size=own.kv_cache_block_size or self.defaults.kv_cache_block_size,
            default_parameters=DefaultParameters(**parameters),
            aliases=own.aliases,
            loras=own.loras,
        )

    def aliases(self) -> dict[str, str]:
        """Return every alias with the model it stands for."""
        return {alias: name for name, model in self.models.items() for alias in model.aliases}

    def with_triton(self, *urls: str) -> Settings:
        """Return these settings for the Triton at *urls*, for when it was started here."""
        return msgspec.structs.replace(self, triton=msgspec.structs.replace(self.triton, url=urls))
