"""
The settings tree: what can be set, its type, its limits, its default and its explanation, each in one place.

Flags, environment variables, help texts and the reference table are derived from the fields below (see ``options``), so
a new setting is one new field. ``extra`` holds what cannot be derived; what it says of a group holds for all settings
of the group:

``name``
    The flag's name, where the field's own name would be too short.
``metavar``
    What the help shows for the value.
``common``
    ``serve --help`` shows the flag; ``serve --help-all`` shows every flag.
``file_only``
    No flag and no environment variable: the setting is in the YAML file only. Most settings belong there; a flag is for
    what people set in a shell or in a container's arguments.
``verbatim``
    The value is a text in which commas and equals signs mean nothing.
``secret``
    Error messages do not repeat the value.
``live``
    A running service takes a new value over (see ``reload``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from triton_openai.config.access import AccessSettings, LimitSettings, Seconds
from triton_openai.config.models import DefaultParameters, LoraSettings, MediaSettings, ModelDefaults, ModelSettings
from triton_openai.config.observability import MetricsSettings, TracesSettings
from triton_openai.config.tls import TlsSettings, TritonAccess

__all__ = [
    "AccessSettings",
    "ApiSettings",
    "DefaultParameters",
    "LimitSettings",
    "LoraSettings",
    "MediaSettings",
    "MetricsSettings",
    "ModelDefaults",
    "ModelSettings",
    "ServerSettings",
    "Settings",
    "TlsSettings",
    "TracesSettings",
    "TritonAccess",
    "TritonSettings",
]


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The service itself."""

    host: Annotated[
        str,
        Meta(min_length=1, description="Address to listen on; 0.0.0.0 for every interface.", extra={"common": True}),
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port to listen on; 0 takes a free one.", extra={"common": True})
    ] = 9000
    backlog: Annotated[
        int,
        Meta(
            ge=1,
            le=65_535,
            description="Connections that may wait to be accepted; net.core.somaxconn limits it too.",
            extra={"file_only": True},
        ),
    ] = 4096
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Processes that serve together on the port; one core is the most that each of them uses.",
            extra={"common": True, "metavar": "N"},
        ),
    ] = 1
    worker_timeout: Annotated[
        float,
        Meta(
            ge=2,
            le=86_400,
            description="A worker whose event loop has not turned for this long hangs: it is killed and replaced.",
            extra={"file_only": True, "metavar": "SECONDS", "live": True},
        ),
    ] = 60.0
    max_body_size: Annotated[
        int,
        Meta(
            ge=1024,
            description="Largest request body that is read, images included (see limits.max_text_size).",
            extra={"metavar": "BYTES"},
        ),
    ] = 48 * 1024 * 1024
    heartbeat_interval: Annotated[
        Seconds,
        Meta(
            description="A stream that has nothing to send sends a comment this often.",
            extra={"file_only": True, "live": True},
        ),
    ] = 15.0
    max_running_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Requests that may run at the same time, divided among the workers; further ones wait.",
            extra={"common": True, "metavar": "N", "live": True},
        ),
    ] = None
    max_running_requests_per_model: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Requests that may run at the same time on one model, divided among the workers.",
            extra={"metavar": "N", "live": True},
        ),
    ] = None
    max_queued_requests: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests that may wait for others to end, divided among the workers; further ones get a 503.",
            extra={"common": True, "metavar": "N", "live": True},
        ),
    ] = 1000
    queue_timeout: Annotated[
        Seconds,
        Meta(description="Longest wait for others to end, then it is a 503.", extra={"file_only": True, "live": True}),
    ] = 30.0
    max_loop_lag: Annotated[
        Seconds | None,
        Meta(
            description="A process that is late by more than this, five times in a row, refuses new requests with 503.",
            extra={"file_only": True, "live": True, "metavar": "SECONDS"},
        ),
    ] = 1.0
    shutdown_delay: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="After SIGTERM, go on serving for this long while readiness says no; load balancers notice it.",
            extra={"common": True, "metavar": "SECONDS", "live": True},
        ),
    ] = 0.0
    enable_kserve_frontends: Annotated[
        bool,
        Meta(
            description="Serve Triton's own protocol too; requests are relayed, over HTTP and gRPC.",
            extra={"common": True},
        ),
    ] = False
    kserve_http_port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port for Triton's HTTP protocol; 0 takes a free one.")
    ] = 8000
    kserve_grpc_port: Annotated[
        int, Meta(ge=0, le=65_535, description="Port for Triton's gRPC protocol; 0 takes a free one.")
    ] = 8001
    kserve_allow: Annotated[
        tuple[Literal["shared-memory", "trace", "logging", "model-overrides"], ...],
        Meta(
            description="What of Triton's protocol that manages the server is relayed too; loading models is, in "
            "explicit mode, but configurations and files that come with a load only with 'model-overrides'.",
            extra={"file_only": True},
        ),
    ] = ()
    shutdown_grace: Annotated[
        Seconds,
        Meta(
            description="Time in which running requests may finish when the service stops.",
            extra={"common": True, "live": True},
        ),
    ] = 10.0
    log_format: Annotated[
        Literal["console", "json"],
        Meta(description="Log lines and the banner for people, or one JSON object per line.", extra={"common": True}),
    ] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least severe log line that is written.", extra={"common": True}),
    ] = "info"
    log_content: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Log prompts and answers too, each text cut to this many characters. They may hold what nobody "
            "should read; by default they are never logged.",
            extra={"file_only": True},
        ),
    ] = None


class TritonSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Triton behind the service: one that runs already, or one that is started here."""

    url: Annotated[
        tuple[str, ...],
        Meta(
            description="Where Triton runs: http(s)://HOST:PORT, grpc(s)://HOST:PORT, or one of each. "
            "May be given twice or separated by a comma.",
            extra={"common": True, "name": "triton-url", "metavar": "URL"},
        ),
    ] = ("http://127.0.0.1:8000",)
    model_repository: Annotated[
        tuple[Path, ...],
        Meta(
            description="Start a Triton on this model repository and supervise it; no other is used then. "
            "May be given several times.",
            extra={"common": True, "metavar": "DIR"},
        ),
    ] = ()
    repository: Annotated[
        tuple[Path, ...],
        Meta(
            description="The model repository of a running Triton, where it can be read here; the tokenizer, the "
            "context length and the LoRA adapters that a model's files name are found in it. May be given several "
            "times.",
            extra={"common": True, "name": "triton-repository", "metavar": "DIR"},
        ),
    ] = ()
    model_control_mode: Annotated[
        Literal["none", "explicit"],
        Meta(
            description="'explicit' lets clients load and unload models. A Triton that is started here gets the same "
            "mode, one that runs already has to have it.",
            extra={"common": True},
        ),
    ] = "none"
    load_model: Annotated[
        tuple[str, ...],
        Meta(
            description="A model that the Triton started here has from the beginning, in explicit mode; * is all. "
            "May be given several times.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    unload_grace: Annotated[
        Seconds,
        Meta(
            description="Time that running requests are given to finish before their model is unloaded.",
            extra={"file_only": True},
        ),
    ] = 30.0
    connect_timeout: Annotated[
        Seconds, Meta(description="Longest wait for a connection to Triton.", extra={"file_only": True})
    ] = 5.0
    first_token_timeout: Annotated[
        Seconds,
        Meta(
            description="Longest wait for a stream's first token, queueing included.",
            extra={"file_only": True, "live": True},
        ),
    ] = 600.0
    idle_timeout: Annotated[
        Seconds,
        Meta(description="Longest silence between two tokens of a stream.", extra={"file_only": True, "live": True}),
    ] = 120.0
    request_timeout: Annotated[
        Seconds,
        Meta(description="Longest time for a request that does not stream.", extra={"common": True, "live": True}),
    ] = 600.0
    stream_timeout: Annotated[
        Seconds | None,
        Meta(
            description="Longest time that a stream may take in all; without it there is no limit.",
            extra={"file_only": True, "live": True, "metavar": "SECONDS"},
        ),
    ] = None
    refresh_interval: Annotated[
        Seconds,
        Meta(description="How often the list of models and their readiness is read again.", extra={"file_only": True}),
    ] = 2.0
    prefer_token_level: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="When to answer for a model of text with the engine behind it, where there is one and the "
            "tokenizer is known: exact characters, counts, token ids and log probabilities. auto: where streams of the "
            "model lose characters.",
            extra={"live": True},
        ),
    ] = "auto"
    stop_requests: Annotated[
        bool,
        Meta(
            description="Tell the engine behind an ensemble to stop when its request is abandoned.",
            extra={"file_only": True, "live": True},
        ),
    ] = True

    @property
    def http_url(self) -> str | None:
        """The HTTP address of Triton, without a trailing slash, if one is configured."""
        return self._first("http", "https")

    @property
    def grpc_url(self) -> str | None:
        """The gRPC address of Triton (``grpc://`` or ``grpcs://``), without a trailing slash, if one is configured."""
        return self._first("grpc", "grpcs")

    @property
    def readable_repositories(self) -> tuple[Path, ...]:
        """The model repositories whose files can be read here."""
        return self.model_repository or self.repository

    def _first(self, *schemes: str) -> str | None:
        return next((url.rstrip("/") for url in self.url if urlsplit(url).scheme in schemes), None)


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What clients see."""

    default_model: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="The model, alias or LoRA adapter of requests that name no model, or 'default'.",
            extra={"common": True, "metavar": "NAME"},
        ),
    ] = None
    default_max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Length limit of an answer for requests that set none; backends have no useful default.",
            extra={"common": True, "metavar": "TOKENS"},
        ),
    ] = 512
    strict_parameters: Annotated[
        bool,
        Meta(
            description="Refuse request fields that are not known, instead of ignoring them.", extra={"file_only": True}
        ),
    ] = False
    lora_separator: Annotated[
        str | None,
        Meta(
            description="Serve a LoRA adapter as MODEL<separator>NAME too, not only under its own name.",
            extra={"metavar": "TEXT"},
        ),
    ] = None
    always_include_usage: Annotated[
        bool,
        Meta(
            description="End every stream with its usage, also for clients that do not ask for it.",
            extra={"file_only": True},
        ),
    ] = False
    reasoning_field: Annotated[
        Literal["reasoning_content", "reasoning", "both"],
        Meta(description="Name under which an answer's reasoning is given.", extra={"file_only": True}),
    ] = "reasoning_content"
    trust_request_chat_template: Annotated[
        bool,
        Meta(description="Let a request bring its own chat template: a program that runs here, in Jinja's sandbox."),
    ] = False
    list_all_models: Annotated[
        bool,
        Meta(
            description="List helper models (tokenizing and detokenizing steps) too, and serve inner engines.",
            extra={"file_only": True},
        ),
    ] = False


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that can be set. ``load_settings`` makes it; it never changes afterwards."""

    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    triton: TritonSettings = TritonSettings()
    triton_access: TritonAccess = TritonAccess()
    api: Annotated[ApiSettings, Meta(extra={"live": True})] = ApiSettings()
    media: MediaSettings = MediaSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    access: Annotated[AccessSettings, Meta(extra={"live": True})] = AccessSettings()
    limits: Annotated[LimitSettings, Meta(extra={"file_only": True})] = LimitSettings()
    defaults: Annotated[ModelDefaults, Meta(extra={"live": True})] = ModelDefaults()
    models: Annotated[
        Mapping[str, ModelSettings],
        Meta(description="What differs for single models, by the name that Triton knows.", extra={"live": True}),
    ] = msgspec.field(default_factory=dict)

    def model(self, name: str) -> ModelSettings:
        """Return how the model *name* is used: its own settings, completed from the defaults."""
        own = self.models.get(name, ModelSettings())
        # These three are one choice: what is said of a model takes the place of whatever is said of all.
        chosen = own if own.chat_template or own.history_template or own.history_template_file else self.defaults
        parameters = {**self.defaults.default_parameters.given(), **own.default_parameters.given()}
        return ModelSettings(
            adapter=own.adapter or self.defaults.adapter,
            tokenizer=own.tokenizer or self.defaults.tokenizer,
            generation_config=own.generation_config or self.defaults.generation_config,
            chat_template=chosen.chat_template,
            history_template=chosen.history_template,
            history_template_file=chosen.history_template_file,
            fim_template=own.fim_template or self.defaults.fim_template,
            score_activation=own.score_activation or self.defaults.score_activation,
            tool_call_parser=own.tool_call_parser or self.defaults.tool_call_parser,
            reasoning_parser=own.reasoning_parser or self.defaults.reasoning_parser,
            image_placeholder=own.image_placeholder or self.defaults.image_placeholder,
            max_model_len=own.max_model_len or self.defaults.max_model_len,
            kv_cache_block_size=own.kv_cache_block_size or self.defaults.kv_cache_block_size,
            default_parameters=DefaultParameters(**parameters),
            aliases=own.aliases,
            loras=own.loras,
            lora_dir=own.lora_dir,
        )

    def aliases(self) -> dict[str, str]:
        """Return every alias with the model it stands for."""
        return {alias: name for name, model in self.models.items() for alias in model.aliases}

    def with_triton(self, *urls: str, metrics_url: str | None = None) -> Settings:
        """Return these settings for the Triton at *urls*, for when it was started here."""
        metrics = msgspec.structs.replace(self.metrics, triton_url=self.metrics.triton_url or metrics_url)
        return msgspec.structs.replace(self, triton=msgspec.structs.replace(self.triton, url=urls), metrics=metrics)

    @property
    def triton_metrics_url(self) -> str:
        """The address of Triton's metrics: the one that is configured, else the usual port of its host."""
        host = urlsplit(self.triton.url[0]).hostname or "localhost"
        return self.metrics.triton_url or f"http://{f'[{host}]' if ':' in host else host}:8002/metrics"
