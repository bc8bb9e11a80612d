"""The Triton behind the service, or several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from triton_openai.config.tree.fields import File, Folders, Seconds, SettingsGroup, Text, common_flag, file_only, flag


class TritonAccess(SettingsGroup, frozen=True):
    """Certificates and credentials for Triton. Files are read again when they change."""

    ca: Annotated[File, flag("Authorities that sign Triton's certificate, in place of the system's.")] = None
    certificate: Annotated[File, flag("Certificate to show to Triton, with its chain.")] = None
    key: Annotated[File, flag("Private key of that certificate, if it is not in the same file.")] = None
    server_name: Annotated[str | None, file_only("Name in Triton's certificate, if it is not the address's host.")] = (
        None
    )
    headers: Annotated[
        tuple[str, ...],
        flag(
            "Header of every request to Triton (over gRPC: metadata); in the environment one per line.",
            name="header",
            metavar="NAME:VALUE",
            verbatim=True,
        ),
    ] = ()
    token_file: Annotated[File, flag("File with a token, sent to Triton as `Authorization: Bearer`.")] = None


#: How requests are spread over several Tritons.
Policy = Literal["least_requests", "round_robin", "affinity"]


class RoutingSettings(SettingsGroup, frozen=True):
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


class FailoverSettings(SettingsGroup, frozen=True):
    """When a request that has failed before its first token goes to another Triton."""

    #: The Tritons that a request may reach; 1 turns failover off.
    attempts: Annotated[int, Meta(ge=1, le=16)] = 3
    #: The part of the requests of ten seconds that may be sent again; three always may, and what no model has got.
    budget: Annotated[float, Meta(ge=0, le=1)] = 0.2
    #: Whether a request whose first token takes too long is cancelled and sent again.
    on_timeout: bool = False


class EjectionSettings(SettingsGroup, frozen=True):
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


class EndpointSettings(SettingsGroup, frozen=True):
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


class TritonSettings(SettingsGroup, frozen=True):
    """The Triton behind the service: one or several that already run, or one that the service starts."""

    url: Annotated[
        tuple[str, ...],
        common_flag("Where Triton runs: http(s)://HOST:PORT, grpc(s)://HOST:PORT, or one of each.", name="triton-url"),
    ] = ("http://127.0.0.1:8000",)
    endpoints: Annotated[
        tuple[Text | EndpointSettings, ...],
        flag(
            "One of several Tritons, such as a=http://HOST:8000+grpc://HOST:8001; after dns+, every address of the "
            "host is one.",
            name="endpoint",
            metavar="[NAME=]URL[+URL]",
            live=True,
        ),
    ] = ()
    endpoints_file: Annotated[
        File, file_only("YAML file with more of them, a list as in triton.endpoints; read again when it changes.")
    ] = None
    dns_interval: Annotated[Seconds, file_only("How often the hosts of endpoints with dns are looked up.")] = 5.0
    routing: RoutingSettings = RoutingSettings()
    failover: FailoverSettings = FailoverSettings()
    ejection: EjectionSettings = EjectionSettings()
    model_repository: Annotated[Folders, common_flag("Start a Triton on this model repository, and use that one.")] = ()
    repository: Annotated[
        Folders,
        flag(
            "Model repository of a running Triton, if this service can read it; it finds a model's tokenizer, context "
            "length and LoRA adapters there.",
            name="triton-repository",
        ),
    ] = ()
    model_control_mode: Annotated[
        Literal["none", "explicit"],
        flag("'explicit': clients can load and unload models; a Triton that already runs needs the same mode."),
    ] = "none"
    load_model: Annotated[
        tuple[str, ...], flag("Model that a Triton started by this service loads first, in explicit mode; * is all.")
    ] = ()
    first_token_timeout: Annotated[Seconds, file_only("Longest wait for a stream's first token.", live=True)] = 600.0
    idle_timeout: Annotated[Seconds, file_only("Longest silence between two tokens of a stream.", live=True)] = 120.0
    request_timeout: Annotated[Seconds, flag("Longest time for a request that does not stream.", live=True)] = 600.0
    stream_timeout: Annotated[
        Seconds | None, file_only("Longest time for a stream; by default no limit.", live=True)
    ] = None
    refresh_interval: Annotated[Seconds, file_only("How often the service reads the list of models.")] = 2.0
    prefer_token_level: Annotated[
        Literal["auto", "always", "never"],
        flag(
            "When to send a model's requests to the engine behind it, for exact characters, counts, token ids and log "
            "probabilities; needs the tokenizer. auto: if the model's streams lose characters.",
            live=True,
        ),
    ] = "auto"

    @property
    def readable_repositories(self) -> tuple[Path, ...]:
        """The model repositories whose files can be read here."""
        return self.model_repository or self.repository
