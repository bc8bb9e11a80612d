"""
The settings tree: what can be set, its type, its limits, its default and its explanation, each in one place.

Flags, environment variables, help texts and the reference table are derived from the fields below (see ``options``), so
a new setting is one new field. What cannot be derived stands in the ``extra`` of its ``Meta``; what it says of a group
holds for all settings of the group:

``name``
    The flag's name, where the field's own name would be too short; of a group, what its flags begin with (``prefix``).
``metavar``
    What the help shows for the value.
``form``
    What an error message says that a text should be, in place of the pattern that it has to match.
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


#: What a setting that names something can also be: found by the service itself, or nothing.
AUTO = "auto"
NONE = "none"

_SECONDS = {"metavar": "SECONDS"}
Seconds = Annotated[float, Meta(gt=0, le=86_400, extra=_SECONDS)]
Bytes = Annotated[int, Meta(ge=1024, extra={"metavar": "BYTES"})]
Tokens = Annotated[int, Meta(ge=1, extra={"metavar": "TOKENS"})]
Count = Annotated[int, Meta(ge=1, extra={"metavar": "N"})]
Characters = Annotated[int, Meta(ge=1)]
Days = Annotated[float, Meta(gt=0, le=3650, extra={"metavar": "DAYS"})]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Text = Annotated[str, Meta(min_length=1)]
File = Annotated[Path | None, Meta(extra={"metavar": "FILE"})]
Folders = Annotated[tuple[Path, ...], Meta(extra={"metavar": "DIR"})]

#: Every route belongs to one of these. All but "info" (what the service says about itself) and "batch" (files and
#: batches) are those of NVIDIA's own OpenAI frontend for Triton.
Group = Literal["inference", "embedding", "batch", "model-repository", "metrics", "health", "info"]
#: How OTLP can be spoken, and the port that it has for itself then.
Protocol = Literal["grpc", "http/protobuf"]
OTLP_PORTS: Mapping[Protocol, int] = {"grpc": 4317, "http/protobuf": 4318}
#: The path of traces at a collector that takes OTLP over HTTP.
OTLP_PATH = "/v1/traces"

# A field name of RFC 9110.
_HEADER = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
# An optional name, and a key that can follow "Bearer " in a header.
NAMED_KEY = r"^([A-Za-z0-9._-]{1,64}:)?[!-+\x2d-9;-~]{1,4096}$"
# An address, or a network; whether it is one is found out when it is used.
_NETWORK = r"^[0-9a-fA-F.:]+(/[0-9]{1,3})?$"
_ALLOWED_HOST = r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[?[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]?)$"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^][/?#\s,:*]+)(:([0-9]+|\*))?)$"


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all groups of settings: immutable, and without unknown fields."""


class ServerSettings(_Group, frozen=True):
    """The service itself."""

    host: Annotated[Text, _common("Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1"
    port: Annotated[Port, _common("Port to listen on; 0 takes a free one.")] = 9000
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=_ALLOWED_HOST)], ...],
        _flag(
            "Without API keys: also answer requests for this host (*.HOST: every name below it), beside localhost; * "
            "alone is every host. Hosts are then checked at every address, and not only at those of the loopback.",
            name="allowed-host",
            metavar="HOST",
            form="a host name or an address without a port, *.HOST, or * alone",
            live=True,
        ),
    ] = ()
    workers: Annotated[Count, Meta(le=256), _common("Processes that serve together, one core each.")] = 1
    worker_timeout: Annotated[
        float,
        Meta(ge=2, le=86_400, extra=_SECONDS),
        _file_only("A worker silent for this long is replaced.", live=True),
    ] = 60.0
    max_body_size: Annotated[Bytes, _flag("Largest request body, images included.")] = 48 * 1024 * 1024
    heartbeat_interval: Annotated[Seconds, _file_only("A silent stream sends a comment this often.", live=True)] = 15.0
    max_running_requests: Annotated[
        Count | None, _common("Most running requests, divided among the workers; others wait.", live=True)
    ] = None
    max_running_requests_per_model: Annotated[
        Count | None, _flag("Most running requests of one model, divided among the workers.", live=True)
    ] = None
    max_running_requests_per_endpoint: Annotated[
        Count | None,
        _file_only("Most running requests of one model on each Triton, divided among the workers.", live=True),
    ] = None
    max_queued_requests: Annotated[
        int,
        Meta(ge=0, extra={"metavar": "N"}),
        _flag("Most waiting requests, divided among the workers; others get a 503.", live=True),
    ] = 1000
    trusted_proxies: Annotated[
        tuple[Annotated[str, Meta(pattern=_NETWORK)], ...],
        _file_only(
            "Address or network (10.0.0.0/8) of a proxy in front, whose X-Forwarded-For or Forwarded names the "
            "client's address for log lines.",
            form="an IP address, or a network such as 10.0.0.0/8",
        ),
    ] = ()
    queue_timeout: Annotated[
        Seconds, _file_only("Longest wait in the queue; then the request gets a 503.", live=True)
    ] = 30.0
    shutdown_delay: Annotated[
        float,
        Meta(ge=0, le=86_400, extra=_SECONDS),
        _flag("After SIGTERM, serve for this long while not ready, so that load balancers notice.", live=True),
    ] = 0.0
    shutdown_grace: Annotated[
        Seconds,
        _flag("Time for running requests to finish when the service stops, or their model is unloaded.", live=True),
    ] = 10.0
    enable_kserve_frontends: Annotated[
        bool,
        _flag(
            "Let the Triton that is started here (--model-repository) listen at --host for clients of its own protocol."
        ),
    ] = False
    kserve_http_port: Annotated[Port, _flag("Port of that Triton's HTTP protocol; 0 takes a free one.")] = 8000
    kserve_grpc_port: Annotated[Port, _flag("Port of that Triton's gRPC protocol; 0 takes a free one.")] = 8001
    page: Annotated[
        bool,
        _flag("Serve a page for people at /, and the description of the API at /docs. Both are open to everybody."),
    ] = True
    log_format: Annotated[Literal["console", "json"], _common("Log for people, or JSON.")] = "console"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _flag("Least severe log line.")] = "info"
    log_content: Annotated[
        Characters | None,
        _file_only("Log prompts and answers too, each cut to this many characters; by default they are not logged."),
    ] = None


class TlsSettings(_Group, frozen=True):
    """HTTPS. All files are PEM, and are read again when they change."""

    certificate: Annotated[File, _common("Serve HTTPS with this certificate and its chain.")] = None
    key: Annotated[File, _common("Private key, without a passphrase, if it is not in the certificate's file.")] = None
    client_ca: Annotated[File, _flag("Accept only clients with a certificate from one of these authorities.")] = None


class TritonAccess(_Group, frozen=True):
    """Certificates and credentials for Triton. Files are read again when they change."""

    ca: Annotated[File, _flag("Authorities that sign Triton's certificate, in place of the system's.")] = None
    certificate: Annotated[File, _flag("Certificate to show to Triton, with its chain.")] = None
    key: Annotated[File, _flag("Private key of that certificate, if it is not in the same file.")] = None
    server_name: Annotated[str | None, _file_only("Name in Triton's certificate, if it is not the address's host.")] = (
        None
    )
    headers: Annotated[
        tuple[str, ...],
        _flag(
            "Header of every request to Triton (over gRPC: metadata); in the environment one per line.",
            name="header",
            metavar="NAME:VALUE",
            verbatim=True,
        ),
    ] = ()
    token_file: Annotated[File, _flag("File with a token, sent to Triton as `Authorization: Bearer`.")] = None


#: How requests are spread over several Tritons.
Policy = Literal["least_requests", "round_robin", "affinity"]


class RoutingSettings(_Group, frozen=True):
    """How requests are spread over several Tritons."""

    policy: Policy = "least_requests"
    #: What keeps requests at one Triton with the policy ``affinity``: the first of these that a request has.
    affinity: tuple[Literal["session", "conversation", "prompt"], ...] = ("session", "conversation", "prompt")
    #: With ``affinity``, the most that a Triton runs: this times its share of all requests.
    load_factor: Annotated[float, Meta(ge=1.01, le=100)] = 1.25
    #: The bytes at the beginning of a prompt that count for ``prompt``. `python -m bench.fleet` compares sizes: with
    #: more than this, short system prompts keep no requests together; with less, all have the beginning of a template.
    prefix_size: Annotated[int, Meta(ge=1, le=1024 * 1024)] = 192
    #: Policies of single models.
    overrides: Mapping[str, Policy] = msgspec.field(default_factory=dict)


class FailoverSettings(_Group, frozen=True):
    """When a request that has failed before its first token goes to another Triton."""

    #: The Tritons that a request may reach; 1 turns failover off.
    attempts: Annotated[int, Meta(ge=1, le=16)] = 3
    #: The part of the requests of ten seconds that may be sent again; three always may, and what no model has got.
    budget: Annotated[float, Meta(ge=0, le=1)] = 0.2
    #: Whether a request whose first token takes too long is cancelled and sent again.
    on_timeout: bool = False


class EjectionSettings(_Group, frozen=True):
    """When a Triton that fails gets no requests for a model."""

    #: Failures in a row.
    failures: Annotated[int, Meta(ge=1, le=1000)] = 5
    #: Seconds until it is asked again; they double each time up to ``max_time``.
    time: Seconds = 10.0
    max_time: Seconds = 300.0
    #: The largest part that is ejected; beyond it, all are used.
    max_share: Annotated[float, Meta(ge=0, le=1)] = 0.5


#: The name of an endpoint.
ENDPOINT_NAME = r"^[A-Za-z0-9._:\[\]-]{1,64}$"


class EndpointSettings(_Group, frozen=True):
    """One of several Tritons."""

    #: Its HTTP address, its gRPC address, or both.
    url: tuple[Text, ...]
    #: By default host and port of its first address.
    name: Annotated[str, Meta(pattern=ENDPOINT_NAME)] | None = None
    #: Its share of the requests; 0 takes none.
    weight: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    #: Whether each address of the host is a Triton; those of the family that the system prefers, IPv4 or IPv6.
    dns: bool = False
    #: Its own certificates and credentials, in place of ``triton_access``.
    access: TritonAccess | None = None


class TritonSettings(_Group, frozen=True):
    """The Triton behind the service: one or several that already run, or one that the service starts."""

    url: Annotated[
        tuple[str, ...],
        _common("Where Triton runs: http(s)://HOST:PORT, grpc(s)://HOST:PORT, or one of each.", name="triton-url"),
    ] = ("http://127.0.0.1:8000",)
    endpoints: Annotated[
        tuple[Text | EndpointSettings, ...],
        _flag(
            "One of several Tritons, such as a=http://HOST:8000+grpc://HOST:8001; after dns+, every address of the "
            "host is one.",
            name="endpoint",
            metavar="[NAME=]URL[+URL]",
            live=True,
        ),
    ] = ()
    endpoints_file: Annotated[
        File, _file_only("YAML file with more of them, a list as in triton.endpoints; read again when it changes.")
    ] = None
    dns_interval: Annotated[Seconds, _file_only("How often the hosts of endpoints with dns are looked up.")] = 5.0
    routing: RoutingSettings = RoutingSettings()
    failover: FailoverSettings = FailoverSettings()
    ejection: EjectionSettings = EjectionSettings()
    model_repository: Annotated[Folders, _common("Start a Triton on this model repository, and use that one.")] = ()
    repository: Annotated[
        Folders,
        _flag(
            "Model repository of a running Triton, if this service can read it; it finds a model's tokenizer, context "
            "length and LoRA adapters there.",
            name="triton-repository",
        ),
    ] = ()
    model_control_mode: Annotated[
        Literal["none", "explicit"],
        _flag("'explicit' lets clients load and unload models; a Triton that already runs needs the same mode."),
    ] = "none"
    load_model: Annotated[
        tuple[str, ...], _flag("Model that a Triton started by this service loads first, in explicit mode; * is all.")
    ] = ()
    first_token_timeout: Annotated[Seconds, _file_only("Longest wait for a stream's first token.", live=True)] = 600.0
    idle_timeout: Annotated[Seconds, _file_only("Longest silence between two tokens of a stream.", live=True)] = 120.0
    request_timeout: Annotated[Seconds, _flag("Longest time for a request that does not stream.", live=True)] = 600.0
    stream_timeout: Annotated[
        Seconds | None, _file_only("Longest time for a stream; by default no limit.", live=True)
    ] = None
    refresh_interval: Annotated[Seconds, _file_only("How often the service reads the list of models.")] = 2.0
    prefer_token_level: Annotated[
        Literal["auto", "always", "never"],
        _flag(
            "When to send a model's requests to the engine behind it, for exact characters, counts, token ids and log "
            "probabilities; needs the tokenizer. auto: if the model's streams lose characters.",
            live=True,
        ),
    ] = "auto"

    @property
    def readable_repositories(self) -> tuple[Path, ...]:
        """The model repositories whose files can be read here."""
        return self.model_repository or self.repository


class ApiSettings(_Group, frozen=True):
    """The API for clients."""

    default_model: Annotated[Text | None, _flag("Model for requests that name none, or 'default'.")] = None
    default_max_tokens: Annotated[Tokens, _flag("Longest answer to a request without a limit.")] = 512
    strict_parameters: Annotated[bool, _file_only("Refuse unknown request fields instead of ignoring them.")] = False
    lora_separator: Annotated[str | None, _flag("Serve each LoRA adapter as MODEL<separator>NAME, not as NAME.")] = None
    always_include_usage: Annotated[
        bool, _file_only("End every stream with its usage, also if the request does not ask for it.")
    ] = False
    reasoning_field: Annotated[
        Literal["reasoning_content", "reasoning", "both"], _file_only("Name of the field with an answer's reasoning.")
    ] = "reasoning_content"
    strict_tools: Annotated[
        bool, _flag("Refuse tools that run at the provider, such as web_search, and not leave them out.")
    ] = False
    trust_request_chat_template: Annotated[
        bool, _flag("Let a request bring its own chat template: a program that this service runs in Jinja's sandbox.")
    ] = False


class ResponsesSettings(_Group, frozen=True):
    """What is kept of the Responses API: responses that clients ask to store, and conversations."""

    store: Annotated[
        str,
        Meta(pattern=r"^(none|memory|sqlite(:.+)?|[a-z][a-z0-9+.-]*://.+)$"),
        _flag(
            "Where responses and conversations are kept: none, memory, sqlite[:PATH] or postgresql://...; "
            "by default a SQLite file in the user's state folder.",
            metavar="STORE",
            form="none, memory, sqlite[:PATH] or postgresql://...",
            secret=True,
        ),
    ] = "sqlite"
    max_age: Annotated[Days, _file_only("Days after which what was not used is dropped.")] = 30.0
    max_size: Annotated[
        Bytes, _file_only("Bytes that are kept at most; what the key that has most used longest ago goes first.")
    ] = 1024**3
    max_size_per_key: Annotated[
        Bytes | None,
        _file_only("Bytes that are kept of one key at most, by default max_size; what it used longest ago goes first."),
    ] = None
    max_conversation_size: Annotated[
        Bytes, _file_only("Bytes of a conversation's items. One of more than server.max_body_size cannot be used.")
    ] = 48 * 1024 * 1024
    max_conversation_items: Annotated[Count, Meta(le=4096), _file_only("Most items of a conversation.")] = 4096

    max_background: Annotated[
        Count,
        _file_only(
            "Most responses that are made or wait in the background, divided among the workers; others get a 503.",
            live=True,
        ),
    ] = 1000
    max_lanes: Annotated[
        Count,
        _file_only("Most responses that one WebSocket makes at once, each in a stream of its own.", live=True),
    ] = 8

    @property
    def max_age_seconds(self) -> float:
        """The same in seconds."""
        return self.max_age * 86_400


class FilesSettings(_Group, frozen=True):
    """Files that clients upload, and those with the results of batches."""

    store: Annotated[
        str,
        Meta(pattern=r"^(dir(:.+)?|s3://[^/]+(/.*)?)$"),
        _flag(
            "Where files are kept: dir[:PATH] or s3://BUCKET[/PREFIX]; by default the folder 'files' in the user's "
            "state folder. Endpoint, region and credentials of S3 are the variables AWS_...",
            metavar="STORE",
            form="dir[:PATH] or s3://BUCKET[/PREFIX]",
        ),
    ] = "dir"
    max_size: Annotated[Bytes, _file_only("Largest file that a client may upload.")] = 512 * 1024 * 1024
    max_batch_size: Annotated[Bytes, _file_only("Largest file with the requests of a batch.")] = 200 * 1024 * 1024
    max_total: Annotated[
        Bytes, _file_only("Bytes that the files of one key may have for a new upload or batch; each counts 4 KiB more.")
    ] = 10 * 1024**3
    max_age: Annotated[
        Days, _file_only("Days after which batches are deleted, and their files unless a request says otherwise.")
    ] = 30.0


class BatchesSettings(_Group, frozen=True):
    """Batches of requests, which run below live traffic."""

    enabled: Annotated[
        bool | None, _flag("Serve files and batches; by default if their folders can be written to.", name="")
    ] = None
    store: Annotated[
        str,
        Meta(pattern=r"^(sqlite(:.+)?|postgres(ql)?://.+)$"),
        _flag(
            "Where the state of batches is kept: sqlite[:PATH], or postgresql://... for several replicas; by default a "
            "SQLite file in the user's state folder.",
            metavar="STORE",
            form="sqlite[:PATH] or postgresql://...",
            secret=True,
        ),
    ] = "sqlite"
    lease: Annotated[
        float,
        Meta(ge=5, le=86_400, extra=_SECONDS),
        _file_only("Time after which other processes take over the batches of one that does not answer."),
    ] = 60.0
    checkpoint: Annotated[
        Seconds,
        _file_only("With S3: how often results are uploaded. What was answered since then runs again after a crash."),
    ] = 60.0
    max_requests: Annotated[Count, Meta(le=1_000_000), _file_only("Most requests of a batch.")] = 50_000
    max_batches: Annotated[Count, _file_only("Most batches of one key that have not ended.")] = 100
    max_running: Annotated[
        Count, _file_only("Most requests of batches that run for one model, divided among the workers.", live=True)
    ] = 8
    max_share: Annotated[
        float,
        Meta(gt=0, le=1),
        _file_only("Requests of batches take at most this part of max_running_requests_per_model.", live=True),
    ] = 0.8
    live_first_token: Annotated[
        Seconds | None,
        _file_only(
            "Run fewer requests of batches while 1 in 20 other requests waits longer than this for its first token."
        ),
    ] = None
    request_timeout: Annotated[Seconds, _file_only("Longest time for a request of a batch.", live=True)] = 3600.0
    hours: Annotated[
        Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d$")] | None,
        _file_only(
            "Begin requests of batches only at these hours, in local time.",
            metavar="HH:MM-HH:MM",
            form="HH:MM-HH:MM",
            live=True,
        ),
    ] = None
    paused: Annotated[bool, _file_only("Begin no requests of batches.", live=True)] = False


class MediaSettings(_Group, frozen=True):
    """Images in requests. Without allowed hosts, only data URLs are accepted."""

    allowed_domains: Annotated[
        tuple[str, ...],
        _flag(
            "Host of images that may be fetched: example.com, or *.example.com for all below it; both also with :PORT.",
            name="allowed-media-domain",
        ),
    ] = ()
    private_addresses: Annotated[
        bool,
        _file_only(
            "Also fetch images from allowed hosts on loopback and private networks. Clients can then make this service "
            "request any path of those hosts."
        ),
    ] = False
    max_images: Annotated[Count, Meta(le=4096), _file_only("Most images in one request.")] = 16
    max_image_size: Annotated[Bytes, _file_only("Largest image file.")] = 20 * 1024 * 1024


class AudioLimits(_Group, frozen=True):
    """Audio in requests. Reading it needs the extra [audio], and for MP4, WebM and AAC also [media]."""

    max_file_size: Annotated[Bytes, _file_only("Largest file of audio, whatever server.max_body_size is.")] = (
        25 * 1024 * 1024
    )
    max_total_size: Annotated[
        Bytes,
        _file_only(
            "Memory of a worker for media: uploaded files of audio, what is decoded of them and of chats, and images. "
            "Each key has a fair part; what does not fit waits."
        ),
    ] = 512 * 1024 * 1024
    max_duration: Annotated[Seconds, _file_only("Longest audio of a request.")] = 3600.0
    parallel_chunks: Annotated[
        Count, Meta(le=64), _file_only("Most chunks of one recording that Triton has at the same time.")
    ] = 4


class MetricsSettings(_Group, frozen=True):
    """The metrics for Prometheus."""

    vllm_names: Annotated[
        bool,
        _flag(
            "Also export the main metrics under vLLM's names, for its dashboards and gateways, and report a model's "
            "load in answers to requests that ask for it.",
            name="vllm-metrics",
        ),
    ] = False
    relay_triton: Annotated[
        bool, _flag("Also export Triton's own metrics, read from triton-metrics-url.", name="relay-triton-metrics")
    ] = False
    triton_url: Annotated[
        str | None,
        _flag(
            "URL of Triton's metrics; by default port 8002 of the host in triton-url, or that of the Triton that this "
            "service starts.",
            name="triton-metrics-url",
        ),
    ] = None


class TracesSettings(_Group, frozen=True):
    """
    Spans of each request, for OpenTelemetry. The SDK's environment variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS and so on) set the rest.
    """

    otlp_endpoint: Annotated[
        str | None,
        _common(
            "Send traces to this collector, http(s)://HOST:PORT; by default OTEL_EXPORTER_OTLP_ENDPOINT, if it is set.",
            metavar="URL",
        ),
    ] = None
    otlp_protocol: Annotated[
        Protocol | None,
        _file_only(
            "Protocol of the collector; by default OTEL_EXPORTER_OTLP_PROTOCOL, else grpc on port 4317 and "
            "http/protobuf on every other."
        ),
    ] = None
    content: Annotated[
        Characters | None,
        _file_only(
            "Put prompts and answers into spans, each text cut to this many characters; by default only if "
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says so."
        ),
    ] = None

    @property
    def protocol(self) -> Protocol:
        """How the collector is spoken to."""
        if self.otlp_protocol is not None:
            return self.otlp_protocol
        port = urlsplit(self.otlp_endpoint or "").port
        if port == OTLP_PORTS["grpc"]:
            return "grpc"
        return "http/protobuf"

    @property
    def exporter_url(self) -> str | None:
        """The address of the collector in the form of the exporter for :attr:`protocol`: over HTTP with a path."""
        url = self.otlp_endpoint
        if url is None or self.protocol == "grpc" or urlsplit(url).path.strip("/"):
            return url
        # A URL that ends with its port, or with a slash after it, is a whole collector's, whichever variable has it.
        return url.rstrip("/") + OTLP_PATH


class RestrictedApi(_Group, frozen=True):
    """Groups of paths that are open only to some requests."""

    apis: Annotated[tuple[Group, ...], Meta(min_length=1)]
    #: The name of the header that opens them.
    header: Annotated[str, Meta(pattern=_HEADER)]
    #: What the header has to hold.
    value: Annotated[str, Meta(pattern=r"^[!-~]([ -~]*[!-~])?$")]


class GatewaySettings(_Group, frozen=True):
    """What the headers of a trusted gateway stand for: priorities, and limits of tenants whose API key has none."""

    #: The priority of each objective, 1 first.
    objectives: Mapping[str, Count] = msgspec.field(default_factory=dict)
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    batch_tokens_per_minute: Count | None = None
    audio_seconds_per_minute: Count | None = None


class AccessSettings(_Group, frozen=True):
    """Which clients may send requests, and to which APIs. Without keys, every client may."""

    api_key: Annotated[
        tuple[Annotated[str, Meta(pattern=NAMED_KEY)], ...],
        _flag(
            "API key, with the name that the log shows. Other users of the machine can read flags, so prefer the "
            "environment or a file.",
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
            "Open groups of paths only to requests with VALUE in the header KEY. APIS are inference, embedding, batch, "
            "model-repository, metrics, health and info, separated by commas; in the environment, semicolons separate "
            "several restrictions.",
            metavar=("APIS", "KEY", "VALUE"),
            secret=True,
        ),
    ] = ()
    cors_allow_origin: Annotated[
        tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...],
        _flag(
            "Let web pages of this origin (https://HOST[:PORT]) call the service; the port * is any port, and * alone "
            "is every origin.",
            form="https://HOST[:PORT] without a path, with * for any port, or * alone",
        ),
    ] = ()
    limits_store: Annotated[
        Annotated[str, Meta(pattern=r"^(rediss?|unix)://.+$")] | None,
        _file_only(
            "Redis that counts for the limits of keys over several services; by default this service counts alone.",
            metavar="redis://...",
            form="redis://...",
            secret=True,
        ),
    ] = None
    limits_fail: Annotated[
        Literal["open", "closed"],
        _file_only(
            "What happens while that Redis does not answer: open lets each service count alone, closed answers 503."
        ),
    ] = "open"
    trust_gateway: Annotated[
        bool,
        _file_only(
            "Let the gateway in front name a request's objective and its tenant, in headers that it must not take over "
            "from clients. access.gateway has the priorities of objectives, and the limits of tenants."
        ),
    ] = False
    gateway: GatewaySettings = GatewaySettings()


class LimitSettings(_Group, frozen=True):
    """How large a request may be (see also server.max_body_size), and how slow its client."""

    max_token_ids: Annotated[Tokens, _file_only("Most token ids in a request.")] = 512 * 1024
    max_text_size: Annotated[Bytes, _file_only("Largest request body without its images (data URLs).")] = (
        4 * 1024 * 1024
    )
    header_timeout: Annotated[Seconds, _file_only("Longest time for a TLS handshake, and for a request's head.")] = 30.0
    body_timeout: Annotated[
        Seconds, _file_only("Longest time for a request's body, plus a second for each 16 KiB that has arrived.")
    ] = 30.0
    keepalive_timeout: Annotated[
        Seconds,
        _file_only(
            "Close an idle connection after this time. Keep it above the load balancer's (often 60), so that the load "
            "balancer closes first."
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


class ModerationSettings(_Group, frozen=True):
    """What a classifier's labels mean in `/v1/moderations`."""

    #: The category that each label stands for.
    labels: Mapping[Text, Category] = {}
    #: A text falls into a category if its probability reaches this.
    threshold: _Share = 0.5
    #: The same for single categories.
    thresholds: Mapping[Category, _Share] = {}


_Rate = Annotated[int, Meta(ge=4000, le=192_000)]


class AudioSettings(_Group, frozen=True):
    """What a model's config does not say of speech."""

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
    #: The codes of the languages that a recognizer knows, or a mapping of codes to what it calls them.
    languages: Mapping[Text, Text | int] | tuple[Text, ...] | None = None
    #: The one that is taken if a request names none.
    language: Text | None = None
    #: Whether a recognizer has room for a request's prompt.
    prompt: bool | None = None
    #: The rate of the recordings that a synthesizer imitates, in Hz.
    reference_sample_rate: _Rate | None = None
    #: By how much the parts of a synthesizer's answer overlap.
    overlap_seconds: Annotated[float, Meta(ge=0, le=1)] | None = None
    #: A folder of recordings, each NAME.wav with what is said in NAME.txt; or the names of the voices that the model
    #: knows, or a mapping of names to what the model calls them.
    voices: Text | tuple[Text, ...] | Mapping[Text, Text | int] = ()
    #: Other names for voices.
    voice_aliases: Mapping[Text, Text] = {}


class ModelDefaults(_Group, frozen=True):
    """Settings of all models. Each flag also takes MODEL=VALUE, for one model."""

    adapter: Annotated[
        str | None, _flag("Adapter to use in place of the one that claims the model (see `triton-openai inspect`).")
    ] = None
    tokenizer: Annotated[
        str | None,
        _common("Folder with the tokenizer's files, or NAME[@REVISION] on the Hugging Face hub.", metavar="SOURCE"),
    ] = None
    generation_config: Annotated[
        Text | None,
        _file_only(
            "Source of default sampling parameters: 'auto' (the default) is generation_config.json beside the "
            "tokenizer, 'none' is nothing; else a file or its folder."
        ),
    ] = None
    chat_template: Annotated[
        str | None, _common("Jinja file with the chat template, or the name of a built-in one.", metavar="FILE")
    ] = None
    history_template: Annotated[
        Text | None,
        _file_only(
            "Liquid template in place of a chat template, over 'items' with 'identity' and 'content' (needs the extra "
            "[liquid])."
        ),
    ] = None
    fim_template: Annotated[
        Text | None,
        _file_only(
            "How the model fills in the middle ('suffix'): a text with {prefix} and {suffix}, or the name of a known "
            "form."
        ),
    ] = None
    pooling: Annotated[
        Literal["mean", "cls", "last"] | None,
        _file_only(
            "How an encoder's vectors of a text's tokens become one: their mean, the first, "
            "or the last one. By default from the 1_Pooling/config.json beside the tokenizer, else 'mean'."
        ),
    ] = None
    normalize_embeddings: Annotated[
        bool | None,
        _file_only(
            "Whether an encoder's vectors get the length 1. By default as the modules.json beside the tokenizer says; "
            "without that file, they do."
        ),
    ] = None
    embedding_prefix: Annotated[
        str | None,
        _file_only(
            "What precedes each text for an encoder that takes token ids, such as 'passage: '. By default the default "
            "prompt of config_sentence_transformers.json beside the tokenizer."
        ),
    ] = None
    score_activation: Annotated[
        Literal["none", "sigmoid"] | None,
        _file_only(
            "What to do with a cross-encoder's scores: 'none' (the default) returns them unchanged, 'sigmoid' is for a "
            "model that returns logits."
        ),
    ] = None
    problem_type: Annotated[
        Literal["single_label_classification", "multi_label_classification", "regression"] | None,
        _file_only(
            "What a classifier's logits become: probabilities of which one class is true (softmax) or any number of "
            "them (sigmoid), or what they are. By default from the config.json beside the tokenizer."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _flag("Format of tool calls; 'auto' (the default) detects it by the chat template, 'none' turns parsing off."),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _flag("Format of reasoning; 'auto' (the default) detects it by the chat template, 'none' turns parsing off."),
    ] = None
    image_placeholder: Annotated[
        str | None,
        _file_only(
            "Placeholder of an image in the prompt, for chat templates that take text only; {n} is the image's number. "
            "'none' if the backend inserts images itself, 'auto' (the default) leaves it to the template."
        ),
    ] = None
    audio_placeholder: Annotated[
        str | None,
        _file_only(
            "Placeholder of audio in the prompt of a chat, as image_placeholder is for an image; {n} is its number."
        ),
    ] = None
    multimodal: Annotated[
        bool | None,
        _file_only(
            "Whether the engine is set up for images, where the backend ignores them otherwise; by default from the "
            "model's files."
        ),
    ] = None
    max_model_len: Annotated[
        Tokens | None, _flag("Most tokens of prompt and answer together; by default from the model's files.")
    ] = None
    kv_cache_block_size: Annotated[
        Tokens | None,
        _file_only(
            "Tokens in a block of the engine's KV cache (tokens_per_block). usage then has the number of cached prompt "
            "tokens, if the backend counts blocks."
        ),
    ] = None
    default_parameters: DefaultParameters = DefaultParameters()


class ModelSettings(ModelDefaults, frozen=True):
    """Settings of one model, in addition to those of all models."""

    aliases: Annotated[
        tuple[Text, ...],
        _common("Another name for a model; * stands for any text.", name="alias", metavar="NAME=MODEL"),
    ] = ()
    #: Names that the backend knows, or mappings with name, path and task_id.
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
    moderation: ModerationSettings = ModerationSettings()
    audio: AudioSettings = AudioSettings()


_LIVE = Meta(extra={"live": True})


class Settings(_Group, frozen=True):
    """Everything that can be set. ``load_settings`` makes it; it never changes afterwards."""

    server: ServerSettings = ServerSettings()
    tls: Annotated[TlsSettings, Meta(extra={"prefix": "tls-"})] = TlsSettings()
    triton: TritonSettings = TritonSettings()
    triton_access: Annotated[TritonAccess, Meta(extra={"prefix": "triton-"})] = TritonAccess()
    api: Annotated[ApiSettings, _LIVE] = ApiSettings()
    responses: Annotated[ResponsesSettings, Meta(extra={"prefix": "responses-"})] = ResponsesSettings()
    files: Annotated[FilesSettings, Meta(extra={"prefix": "files-"})] = FilesSettings()
    batches: Annotated[BatchesSettings, Meta(extra={"prefix": "batches-"})] = BatchesSettings()
    media: MediaSettings = MediaSettings()
    audio: Annotated[AudioLimits, _LIVE] = AudioLimits()
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    access: Annotated[AccessSettings, _LIVE] = AccessSettings()
    limits: LimitSettings = LimitSettings()
    defaults: Annotated[ModelDefaults, _LIVE] = ModelDefaults()
    models: Annotated[Mapping[str, ModelSettings], _LIVE] = msgspec.field(default_factory=dict)

    def model(self, name: str) -> ModelSettings:
        """Return how the model *name* is used: its own settings, completed from the defaults."""
        own = self.models.get(name, ModelSettings())
        defaults = self.defaults
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
    def triton_for_batches(self) -> TritonSettings:
        """The settings of Triton for requests of batches, which have time."""
        seconds = self.batches.request_timeout
        triton = self.triton
        first = max(seconds, triton.first_token_timeout)
        return msgspec.structs.replace(triton, request_timeout=seconds, first_token_timeout=first)

    @property
    def triton_metrics_url(self) -> str:
        """The address of Triton's metrics: the one that is configured, else the usual port of its host."""
        host = urlsplit(self.triton.url[0]).hostname or "localhost"
        return self.metrics.triton_url or f"http://{f'[{host}]' if ':' in host else host}:8002/metrics"
