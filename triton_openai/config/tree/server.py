"""The service itself: its address, its workers, HTTPS, and limits of requests."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from triton_openai.config.tree.fields import (
    SECONDS,
    Bytes,
    Characters,
    Count,
    File,
    Port,
    Seconds,
    SettingsGroup,
    Text,
    Tokens,
    common_flag,
    file_only,
    flag,
)

# The characters of an address or a network. Its user checks whether it is one.
_NETWORK = r"^[0-9a-fA-F.:]+(/[0-9]{1,3})?$"
_ALLOWED_HOST = r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[?[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]?)$"


class ServerSettings(SettingsGroup, frozen=True):
    """The service itself."""

    host: Annotated[Text, common_flag("Address to listen on; 0.0.0.0 for every interface.")] = "127.0.0.1"
    port: Annotated[Port, common_flag("Port to listen on; 0 takes a free one.")] = 9000
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(pattern=_ALLOWED_HOST)], ...],
        flag(
            "Without API keys: also answer requests for this host (*.HOST: every name below it), beside localhost; * "
            "alone is every host. Hosts are then checked at every address, and not only at those of the loopback.",
            name="allowed-host",
            metavar="HOST",
            form="a host name or an address without a port, *.HOST, or * alone",
            live=True,
        ),
    ] = ()
    workers: Annotated[Count, Meta(le=256), common_flag("Processes that serve together, one core each.")] = 1
    worker_timeout: Annotated[
        float,
        Meta(ge=2, le=86_400, extra=SECONDS),
        file_only("A worker silent for this long is replaced.", live=True),
    ] = 60.0
    max_body_size: Annotated[
        Bytes,
        flag("Largest request body, images included. A frame of a Responses WebSocket has 24 MiB at most in any case."),
    ] = 48 * 1024 * 1024
    heartbeat_interval: Annotated[Seconds, file_only("A silent stream sends a comment this often.", live=True)] = 15.0
    max_running_requests: Annotated[
        Count | None, common_flag("Most running requests, divided among the workers; others wait.", live=True)
    ] = None
    max_running_requests_per_model: Annotated[
        Count | None, flag("Most running requests of one model, divided among the workers.", live=True)
    ] = None
    max_running_requests_per_endpoint: Annotated[
        Count | None,
        file_only("Most running requests of one model on each Triton, divided among the workers.", live=True),
    ] = None
    follow_engine_queue: Annotated[
        bool,
        file_only("Let requests wait here where an engine that reports its queue runs as many as it can.", live=True),
    ] = True
    max_queued_requests: Annotated[
        int,
        Meta(ge=0, extra={"metavar": "N"}),
        flag("Most waiting requests, divided among the workers; others get a 503.", live=True),
    ] = 1000
    trusted_proxies: Annotated[
        tuple[Annotated[str, Meta(pattern=_NETWORK)], ...],
        file_only(
            "Address or network (10.0.0.0/8) of a proxy in front, whose X-Forwarded-For or Forwarded names the "
            "client's address for log lines.",
            form="an IP address, or a network such as 10.0.0.0/8",
        ),
    ] = ()
    queue_timeout: Annotated[
        Seconds, file_only("Longest wait in the queue; then the request gets a 503.", live=True)
    ] = 30.0
    shutdown_delay: Annotated[
        float,
        Meta(ge=0, le=86_400, extra=SECONDS),
        flag("After SIGTERM, serve for this long while not ready, so that load balancers notice.", live=True),
    ] = 0.0
    shutdown_grace: Annotated[
        Seconds,
        flag("Time for running requests to finish when the service stops, or their model is unloaded.", live=True),
    ] = 10.0
    enable_kserve_frontends: Annotated[
        bool,
        flag(
            "Let the Triton that is started here (--model-repository) listen at --host for clients of its own protocol."
        ),
    ] = False
    kserve_http_port: Annotated[Port, flag("Port of that Triton's HTTP protocol; 0 takes a free one.")] = 8000
    kserve_grpc_port: Annotated[Port, flag("Port of that Triton's gRPC protocol; 0 takes a free one.")] = 8001
    page: Annotated[
        bool,
        flag("Serve a page for people at /, and the description of the API at /docs. Both are open to everybody."),
    ] = True
    log_format: Annotated[Literal["console", "json"], common_flag("Log for people, or JSON.")] = "console"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], flag("Least severe log line.")] = "info"
    log_content: Annotated[
        Characters | None,
        file_only("Log prompts and answers too, each cut to this many characters; by default they are not logged."),
    ] = None


class TlsSettings(SettingsGroup, frozen=True):
    """HTTPS. All files are PEM, and are read again when they change."""

    certificate: Annotated[File, common_flag("Serve HTTPS with this certificate and its chain.")] = None
    key: Annotated[File, common_flag("Private key, without a passphrase, if it is not in the certificate's file.")] = (
        None
    )
    client_ca: Annotated[File, flag("Accept only clients with a certificate from one of these authorities.")] = None


class LimitSettings(SettingsGroup, frozen=True):
    """How large a request may be (see also server.max_body_size), and how slow its client."""

    max_token_ids: Annotated[Tokens, file_only("Most token ids in a request.")] = 512 * 1024
    max_text_size: Annotated[Bytes, file_only("Largest request body without its images (data URLs).")] = 4 * 1024 * 1024
    header_timeout: Annotated[Seconds, file_only("Longest time for a TLS handshake, and for a request's head.")] = 30.0
    body_timeout: Annotated[
        Seconds, file_only("Longest time for a request's body, plus a second for each 16 KiB that has arrived.")
    ] = 30.0
    keepalive_timeout: Annotated[
        Seconds,
        file_only(
            "Close an idle connection after this time. Keep it above the load balancer's (often 60), so that the load "
            "balancer closes first."
        ),
    ] = 75.0
