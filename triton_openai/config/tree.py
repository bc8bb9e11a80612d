"""
The settings tree: what can be set, its type, its limits, its default and its explanation, each in one place.

Flags, environment variables, help texts and the reference table are derived from the fields below (see ``options``), so
a new setting is one new field. What cannot be derived stands in the ``extra`` of its ``Meta``; what it says of a group
holds for all settings of the group:

``name``
    The flag's name, where the field's own name would be too short; of a group, what its flags begin with (``prefix``).
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
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta


def _flag(text: str, **extra: Any) -> Meta:
    """Explain a setting that has a flag and a variable."""
    return Meta(description=text, extra=extra)


def _common(text: str, **extra: Any) -> Meta:
    """Explain a setting whose flag the short help shows."""
    return _flag(text, common=True, **extra)


def _file_only(text: str, **extra: Any) -> Meta:
    """Explain a setting of the YAML file."""
    return _flag(text, file_only=True, **extra)


_SECONDS = {"metavar": "SECONDS"}
Seconds = Annotated[float, Meta(gt=0, le=86_400, extra=_SECONDS)]
Bytes = Annotated[int, Meta(ge=1024, extra={"metavar": "BYTES"})]
Tokens = Annotated[int, Meta(ge=1, extra={"metavar": "TOKENS"})]
Count = Annotated[int, Meta(ge=1, extra={"metavar": "N"})]
Characters = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Text = Annotated[str, Meta(min_length=1)]
File = Annotated[Path | None, Meta(extra={"metavar": "FILE"})]
Folders = Annotated[tuple[Path, ...], Meta(extra={"metavar": "DIR"})]

#: Every route belongs to one of these. All but "info" (what the service says about itself) are those of NVIDIA's own
#: OpenAI frontend for Triton.
Group = Literal["inference", "embedding", "model-repository", "metrics", "health", "info"]
#: How OTLP can be spoken, and the port that it has for itself then.
Protocol = Literal["grpc", "http/protobuf"]
OTLP_PORTS: Mapping[Protocol, int] = {"grpc": 4317, "http/protobuf": 4318}
#: The path of traces at a collector that takes OTLP over HTTP.
OTLP_PATH = "/v1/traces"

# A field name of RFC 9110.
_HEADER = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
# An optional name, and a key that can follow "Bearer " in a header.
NAMED_KEY = r"^([A-Za-z0-9._-]{1,64}:)?[!-+\x2d-9;-~]{1,4096}$"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^][/?#\s,:*]+)(:([0-9]+|\*))?)$"


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all groups of settings: immutable, and without unknown fields."""


class ServerSettings(_Group, frozen=True):
    """The service itself."""

    host: Annotated[Text, _common("Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1"
    port: Annotated[Port, _common("Port to listen on; 0 takes a free one.")] = 9000
    workers: Annotated[Count, Meta(le=256), _common("Processes that serve together, one core each.")] = 1
    worker_timeout: Annotated[
        float,
        Meta(ge=2, le=86_400, extra=_SECONDS),
        _file_only("A worker silent for this long is replaced.", live=True),
    ] = 60.0
    max_body_size: Annotated[Bytes, _flag("Largest request body, images included.")] = 48 * 1024 * 1024
    heartbeat_interval: Annotated[Seconds, _file_only("A silent stream sends a comment this often.", live=True)] = 15.0
    max_running_requests: Annotated[
        Count | None, _common("Requests that run at the same time, divided among the workers; others wait.", live=True)
    ] = None
    max_running_requests_per_model: Annotated[
        Count | None, _flag("Requests that run at the same time on one model, divided among the workers.", live=True)
    ] = None
    max_queued_requests: Annotated[
        int,
        Meta(ge=0, extra={"metavar": "N"}),
        _flag("Requests that may wait, divided among the workers; others get a 503.", live=True),
    ] = 1000
    queue_timeout: Annotated[Seconds, _file_only("Longest wait for others to end, then it is a 503.", live=True)] = 30.0
    shutdown_delay: Annotated[
        float,
        Meta(ge=0, le=86_400, extra=_SECONDS),
        _flag("After SIGTERM, serve for this long while readiness says no, so that load balancers notice.", live=True),
    ] = 0.0
    shutdown_grace: Annotated[
        Seconds,
        _flag("Time for running requests to finish when the service stops, or their model is unloaded.", live=True),
    ] = 10.0
    enable_kserve_frontends: Annotated[bool, _flag("Relay Triton's own protocol too, over HTTP and gRPC.")] = False
    kserve_http_port: Annotated[Port, _flag("Port for Triton's HTTP protocol; 0 takes a free one.")] = 8000
    kserve_grpc_port: Annotated[Port, _flag("Port for Triton's gRPC protocol; 0 takes a free one.")] = 8001
    page: Annotated[
        bool,
        _flag("Serve a page for people at /, and the description of the API at /docs. Both are open to everybody."),
    ] = True
    log_format: Annotated[Literal["console", "json"], _common("Log for people, or JSON.")] = "console"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _flag("Least severe log line.")] = "info"
    log_content: Annotated[
        Characters | None,
        _file_only("Log prompts and answers too, cut to this many characters each; by default they are never logged."),
    ] = None


class TlsSettings(_Group, frozen=True):
    """HTTPS. All files are PEM, and are read again when they change."""

    certificate: Annotated[File, _common("Serve HTTPS with this certificate and its chain.")] = None
    key: Annotated[
        File, _common("The private key, without a passphrase, where it is not in the certificate's file.")
    ] = None
    client_ca: Annotated[File, _flag("Accept only clients with a certificate from one of these authorities.")] = None


class TritonSettings(_Group, frozen=True):
    """The Triton behind the service: one that runs already, or one that is started here."""

    url: Annotated[
        tuple[str, ...],
        _common("Where Triton runs: http(s)://HOST:PORT, grpc(s)://HOST:PORT, or one of each.", name="triton-url"),
    ] = ("http://127.0.0.1:8000",)
    model_repository: Annotated[Folders, _common("Start a Triton on this model repository and use no other.")] = ()
    repository: Annotated[
        Folders,
        _flag(
            "The model repository of a running Triton, where it can be read here; what a model's files say of its "
            "tokenizer, context length and LoRA adapters is found in it.",
            name="triton-repository",
        ),
    ] = ()
    model_control_mode: Annotated[
        Literal["none", "explicit"],
        _flag("'explicit' lets clients load and unload models; a Triton that runs already needs the same mode."),
    ] = "none"
    load_model: Annotated[
        tuple[str, ...], _flag("Model that the Triton started here loads first, in explicit mode; * is all.")
    ] = ()
    grpc_client: Annotated[
        Literal["own", "grpcio"],
        _flag(
            "What carries text streams over gRPC: an HTTP/2 client of the service's own, which takes a fraction of the "
            "CPU time, or the library grpcio."
        ),
    ] = "own"
    first_token_timeout: Annotated[Seconds, _file_only("Longest wait for a stream's first token.", live=True)] = 600.0
    idle_timeout: Annotated[Seconds, _file_only("Longest silence between two tokens of a stream.", live=True)] = 120.0
    request_timeout: Annotated[Seconds, _flag("Longest time for a request that does not stream.", live=True)] = 600.0
    stream_timeout: Annotated[Seconds | None, _file_only("Longest time for a stream; by default any.", live=True)] = (
        None
    )
    refresh_interval: Annotated[Seconds, _file_only("How often the list of models is read again.")] = 2.0
    prefer_token_level: Annotated[
        Literal["auto", "always", "never"],
        _flag(
            "When to answer for a model of text with the engine behind it, where there is one and the tokenizer is "
            "known: exact characters, counts, token ids and log probabilities. auto: where streams of the model lose "
            "characters.",
            live=True,
        ),
    ] = "auto"

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


class TritonAccess(_Group, frozen=True):
    """Triton behind https:// or grpcs://, or behind something that asks for credentials. Files are read again when
    they change."""

    ca: Annotated[File, _flag("Authorities that sign Triton's certificate, if not the common ones.")] = None
    certificate: Annotated[File, _flag("Certificate to show to Triton, with its chain.")] = None
    key: Annotated[File, _flag("Private key of that certificate, where it is not in the same file.")] = None
    server_name: Annotated[str | None, _file_only("Name in Triton's certificate, where it is not the address's.")] = (
        None
    )
    headers: Annotated[
        tuple[str, ...],
        _flag(
            "Header to send to Triton with everything (over gRPC as metadata); in the environment one per line.",
            name="header",
            metavar="NAME:VALUE",
            verbatim=True,
        ),
    ] = ()
    token_file: Annotated[File, _flag("File with a token, sent to Triton as `Authorization: Bearer`.")] = None


class ApiSettings(_Group, frozen=True):
    """The API for clients."""

    default_model: Annotated[Text | None, _flag("Model of requests that name none, or 'default'.")] = None
    default_max_tokens: Annotated[Tokens, _flag("Longest answer to requests that set no limit.")] = 512
    strict_parameters: Annotated[bool, _file_only("Refuse unknown request fields, and not ignore them.")] = False
    lora_separator: Annotated[
        str | None, _flag("Serve a LoRA adapter as MODEL<separator>NAME too, not only under its own name.")
    ] = None
    always_include_usage: Annotated[bool, _file_only("End every stream with its usage, unasked.")] = False
    reasoning_field: Annotated[
        Literal["reasoning_content", "reasoning", "both"],
        _file_only("Name under which an answer's reasoning is given."),
    ] = "reasoning_content"
    strict_tools: Annotated[
        bool, _flag("Refuse tools that run at the provider, such as web_search, and not leave them out.")
    ] = False
    trust_request_chat_template: Annotated[
        bool, _flag("Let a request bring its own chat template: a program that runs here, in Jinja's sandbox.")
    ] = False


class MediaSettings(_Group, frozen=True):
    """Images in requests. Without allowed hosts, they come as data URLs only."""

    allowed_domains: Annotated[
        tuple[str, ...],
        _flag(
            "Host from which images may be fetched: example.com, or *.example.com for all below it, either with :PORT.",
            name="allowed-media-domain",
        ),
    ] = ()
    private_addresses: Annotated[
        bool,
        _file_only(
            "Fetch images also from allowed hosts whose addresses are not public (loopback, private networks). Then a "
            "request can reach into this network, as far as the allowed hosts go."
        ),
    ] = False
    max_images: Annotated[Count, Meta(le=4096), _file_only("Most images in one request.")] = 16
    max_image_size: Annotated[Bytes, _file_only("Largest image file that is taken.")] = 20 * 1024 * 1024


class MetricsSettings(_Group, frozen=True):
    """The metrics for Prometheus."""

    vllm_names: Annotated[
        bool,
        _flag("Give the main metrics under vLLM's names too, for its dashboards and gateways.", name="vllm-metrics"),
    ] = False
    relay_triton: Annotated[
        bool, _flag("Give Triton's own metrics too, read from triton-metrics-url.", name="relay-triton-metrics")
    ] = False
    triton_url: Annotated[
        str | None,
        _flag(
            "Where Triton has its metrics; by default port 8002 of the host in triton-url, or where a Triton that is "
            "started here has them.",
            name="triton-metrics-url",
        ),
    ] = None


class TracesSettings(_Group, frozen=True):
    """
    Spans of each request, for OpenTelemetry. The SDK's environment variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS and so on) say the rest.
    """

    otlp_endpoint: Annotated[
        str | None,
        _common(
            "Send traces to this collector, http(s)://HOST:PORT; by default what OTEL_EXPORTER_OTLP_ENDPOINT says, if "
            "anything.",
            metavar="URL",
        ),
    ] = None
    otlp_protocol: Annotated[
        Protocol | None,
        _file_only(
            "The protocol of the collector. By default that of OTEL_EXPORTER_OTLP_PROTOCOL, else grpc on port 4317 "
            "and http/protobuf on every other."
        ),
    ] = None
    content: Annotated[
        Characters | None,
        _file_only(
            "Put prompts and answers into spans too, each text cut to this many characters. By default what "
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says; without either there are none."
        ),
    ] = None

    @property
    def protocol(self) -> Protocol:
        """How the collector is spoken to."""
        if self.otlp_protocol is not None:
            return self.otlp_protocol
        port = urlsplit(self.otlp_endpoint or "").port
        return "grpc" if port == OTLP_PORTS["grpc"] else "http/protobuf"

    @property
    def exporter_url(self) -> str | None:
        """The address of the collector in the form of the exporter for :attr:`protocol`: over HTTP with a path."""
        url = self.otlp_endpoint
        if url is None or self.protocol == "grpc" or urlsplit(url).path.strip("/"):
            return url
        # A URL that ends with its port, or with a slash after it, is a whole collector's, whichever variable has it.
        return url.rstrip("/") + OTLP_PATH


class RestrictedApi(_Group, frozen=True):
    """Groups of paths that are open only to requests with *value* in *header*."""

    apis: Annotated[tuple[Group, ...], Meta(min_length=1)]
    header: Annotated[str, Meta(pattern=_HEADER)]
    value: Annotated[str, Meta(pattern=r"^[!-~]([ -~]*[!-~])?$")]


class AccessSettings(_Group, frozen=True):
    """The clients that may send requests, and to which APIs. Without a key, every client may."""

    api_key: Annotated[
        tuple[Annotated[str, Meta(pattern=NAMED_KEY)], ...],
        _flag(
            "A key that a client has to have, with the name under which it is logged. Other users of the machine can "
            "read flags: better use the environment, or a file.",
            metavar="[NAME:]KEY",
            secret=True,
        ),
    ] = ()
    api_keys_file: Annotated[
        File, _common("YAML file with keys, their models and their limits; read again when it changes.")
    ] = None
    openai_restricted_api: Annotated[
        tuple[RestrictedApi, ...],
        _flag(
            "Open groups of paths only to requests that have VALUE in the header KEY. APIS are inference, embedding, "
            "model-repository, metrics, health and info, separated by commas; the environment has semicolons between "
            "several.",
            metavar=("APIS", "KEY", "VALUE"),
            secret=True,
        ),
    ] = ()
    cors_allow_origin: Annotated[
        tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...],
        _flag(
            "Web pages of this origin (https://HOST[:PORT]) may ask; the port * stands for any port, and * alone for "
            "every origin."
        ),
    ] = ()


class LimitSettings(_Group, frozen=True):
    """How large a request may be (see server.max_body_size too), and how slow its client."""

    max_token_ids: Annotated[Tokens, _file_only("Most token ids in a request.")] = 512 * 1024
    max_text_size: Annotated[Bytes, _file_only("Largest request body without its images (data URLs).")] = (
        4 * 1024 * 1024
    )
    header_timeout: Annotated[Seconds, _file_only("Longest time for a TLS handshake, and for a request's head.")] = 30.0
    body_timeout: Annotated[Seconds, _file_only("Longest time for its body, and a second more per 4096 bytes.")] = 30.0
    keepalive_timeout: Annotated[
        Seconds,
        _file_only(
            "Time after which a connection without a request is closed; longer than that of the load balancer in front "
            "(often 60), which then closes first."
        ),
    ] = 75.0


class DefaultParameters(_Group, frozen=True, omit_defaults=True):
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


class LoraSettings(_Group, frozen=True):
    """
    A LoRA adapter that an engine is sent, or has read itself: its *name*, the *task_id* that stands for it there (made
    from its contents if left out), and the *path* of the folder with its weights.
    """

    name: Text
    task_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    path: Text | None = None


class ModelDefaults(_Group, frozen=True):
    """How models are used that say nothing else themselves. Each flag also takes MODEL=VALUE, for that model only."""

    adapter: Annotated[
        str | None, _flag("Adapter to use, whichever claims the model (see `triton-openai inspect`).")
    ] = None
    tokenizer: Annotated[
        str | None,
        _common("Folder with the tokenizer's files, or NAME[@REVISION] on the Hugging Face hub.", metavar="SOURCE"),
    ] = None
    generation_config: Annotated[
        Text | None,
        _file_only(
            "What recommends the sampling of requests that ask for none: 'auto' (the default) is "
            "generation_config.json beside the tokenizer, 'none' is nothing, else the file or its folder."
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _common("Jinja file with the chat template, or the name of a built-in one.", metavar="FILE"),
    ] = None
    history_template: Annotated[
        Text | None,
        _file_only(
            "Liquid text over 'items' with 'identity' and 'content' that makes the prompt of a chat, in place of a "
            "chat template (needs the extra [liquid])."
        ),
    ] = None
    fim_template: Annotated[
        Text | None,
        _file_only(
            "How a model that was trained to fill in the middle takes 'suffix': a text with {prefix} and {suffix}, or "
            "the name of a known form."
        ),
    ] = None
    score_activation: Annotated[
        Literal["none", "sigmoid"] | None,
        _file_only(
            "What is done to the scores of a cross-encoder: 'none' (the default) gives them as the model does, "
            "'sigmoid' is for one that gives logits."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _flag("How the model writes tool calls; 'auto' (the default) goes by its chat template, 'none' leaves them."),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _flag("How the model marks its reasoning; 'auto' (the default) goes by its chat template, 'none' leaves it."),
    ] = None
    image_placeholder: Annotated[
        str | None,
        _file_only(
            "What stands in the prompt for an image, {n} being its number, where the chat template takes text only; "
            "'none' where the backend itself puts images into the prompt. 'auto' (the default) leaves it to the "
            "template."
        ),
    ] = None
    max_model_len: Annotated[
        Tokens | None, _flag("Tokens that prompt and answer may have together; by default what the model's files tell.")
    ] = None
    kv_cache_block_size: Annotated[
        Tokens | None,
        _file_only(
            "Tokens in a block of the engine's KV cache (its tokens_per_block): with it, usage tells how many of the "
            "prompt's tokens came from the cache, where the backend counts them."
        ),
    ] = None
    default_parameters: DefaultParameters = DefaultParameters()


class ModelSettings(ModelDefaults, frozen=True):
    """
    How one model is used; what is left out comes from the defaults.

    *loras* are names that the model's server knows, or mappings; those of a readable repository's ``multi_lora.json``
    are served as well. Their paths lie in *lora_dir*, by default the model's own folder in ``model_repository``.
    *inputs*, *constants*, *outputs* and *text* describe the tensors of a model that an adapter such as ``text`` serves.
    """

    aliases: Annotated[
        tuple[Text, ...], _common("Further name under which a model is served.", name="alias", metavar="NAME=MODEL")
    ] = ()
    loras: tuple[Text | LoraSettings, ...] = ()
    lora_dir: Path | None = None
    inputs: Mapping[str, Text] = msgspec.field(default_factory=dict)
    constants: Mapping[str, Any] = msgspec.field(default_factory=dict)
    outputs: Mapping[str, Text] = msgspec.field(default_factory=dict)
    text: Literal["delta", "cumulative", "final"] | None = None


_LIVE = Meta(extra={"live": True})


class Settings(_Group, frozen=True):
    """Everything that can be set. ``load_settings`` makes it; it never changes afterwards."""

    server: ServerSettings = ServerSettings()
    tls: Annotated[TlsSettings, Meta(extra={"prefix": "tls-"})] = TlsSettings()
    triton: TritonSettings = TritonSettings()
    triton_access: Annotated[TritonAccess, Meta(extra={"prefix": "triton-"})] = TritonAccess()
    api: Annotated[ApiSettings, _LIVE] = ApiSettings()
    media: MediaSettings = MediaSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    access: Annotated[AccessSettings, _LIVE] = AccessSettings()
    limits: LimitSettings = LimitSettings()
    defaults: Annotated[ModelDefaults, _LIVE] = ModelDefaults()
    models: Annotated[Mapping[str, ModelSettings], _LIVE] = msgspec.field(default_factory=dict)

    def model(self, name: str) -> ModelSettings:
        """Return how the model *name* is used: its own settings, completed from the defaults."""
        own, defaults = self.models.get(name, ModelSettings()), self.defaults
        used = {field: getattr(own, field) or getattr(defaults, field) for field in ModelDefaults.__struct_fields__}
        if own.chat_template or own.history_template:
            # A prompt is made in one way: what is said of a model takes the place of whatever is said of all.
            used.update(chat_template=own.chat_template, history_template=own.history_template)
        parameters = {**defaults.default_parameters.given(), **own.default_parameters.given()}
        used["default_parameters"] = DefaultParameters(**parameters)
        return msgspec.structs.replace(own, **used)

    def aliases(self) -> dict[str, str]:
        """Return every alias with its model."""
        return {alias: name for name, model in self.models.items() for alias in model.aliases}

    def with_triton(self, *urls: str, metrics_url: str | None = None) -> Settings:
        """Return these settings for a Triton that was started here."""
        metrics = msgspec.structs.replace(self.metrics, triton_url=self.metrics.triton_url or metrics_url)
        return msgspec.structs.replace(self, triton=msgspec.structs.replace(self.triton, url=urls), metrics=metrics)

    @property
    def triton_metrics_url(self) -> str:
        """The address of Triton's metrics: the one that is configured, else the usual port of its host."""
        host = urlsplit(self.triton.url[0]).hostname or "localhost"
        return self.metrics.triton_url or f"http://{f'[{host}]' if ':' in host else host}:8002/metrics"
