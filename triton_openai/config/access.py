"""Settings of who may ask for what, and of how large and how slow a request may be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=86_400, extra={"metavar": "SECONDS"})]


Count = Annotated[int, Meta(ge=1)]

# Every route belongs to one of these. All but "info" (what the service says about itself) are those of NVIDIA's own
# OpenAI frontend for Triton.
Group = Literal["inference", "embedding", "model-repository", "metrics", "health", "info"]

# A field name of RFC 9110.
_HEADER = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
# What can stand in a header after "Bearer ", with a name before it or none.
NAMED_KEY = r"^([A-Za-z0-9._-]{1,64}:)?[!-+\x2d-9;-~]{1,4096}$"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^][/?#\s,:*]+)(:([0-9]+|\*))?)$"


class RestrictedApi(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Groups of paths that are open only to requests with *value* in *header*."""

    apis: Annotated[tuple[Group, ...], Meta(min_length=1)]
    header: Annotated[str, Meta(pattern=_HEADER)]
    value: Annotated[str, Meta(pattern=r"^[!-~]([ -~]*[!-~])?$")]


class AccessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may ask, and for what. Without a key, everybody who can reach the service may."""

    api_key: Annotated[
        tuple[Annotated[str, Meta(pattern=NAMED_KEY)], ...],
        Meta(
            description="A key that a client has to have, with the name under which it is logged. May be given "
            "several times. Other users of the machine can read flags: better use the environment, or a file.",
            extra={"common": True, "metavar": "[NAME:]KEY", "secret": True},
        ),
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Meta(
            description="YAML file with keys, their models and their limits; read again when it changes.",
            extra={"common": True, "metavar": "FILE"},
        ),
    ] = None
    openai_restricted_api: Annotated[
        tuple[RestrictedApi, ...],
        Meta(
            description="Open groups of paths only to requests that have VALUE in the header KEY. APIS are inference, "
            "embedding, model-repository, metrics, health and info, separated by commas. May be given several times; "
            "in the environment separated by semicolons.",
            extra={"metavar": ("APIS", "KEY", "VALUE"), "secret": True},
        ),
    ] = ()
    cors_allow_origin: Annotated[
        tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...],
        Meta(
            description="Web pages of this origin (https://HOST[:PORT]) may ask; the port * stands for any port, and * "
            "alone for every origin. May be given several times.",
            extra={"common": True, "metavar": "ORIGIN"},
        ),
    ] = ()
    cors_allow_method: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Z]+$")], ...],
        Meta(description="Methods that web pages may use.", extra={"file_only": True}),
    ] = ("GET", "HEAD", "POST")
    cors_allow_header: Annotated[
        tuple[Annotated[str, Meta(pattern=_HEADER)], ...],
        Meta(
            description="Headers that web pages may send; every one that they ask for unless it is given.",
            extra={"file_only": True},
        ),
    ] = ()
    cors_allow_credentials: Annotated[
        bool,
        Meta(
            description="Let browsers send cookies and client certificates along; not with the origin *.",
            extra={"file_only": True},
        ),
    ] = False


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How large a request may be (see server.max_body_size too), and how slow its client."""

    max_header_size: Annotated[
        int,
        Meta(
            ge=1024,
            le=1024 * 1024,
            description="Longest single header, or request line. A request may have 128 headers.",
            extra={"metavar": "BYTES"},
        ),
    ] = 16 * 1024
    max_json_depth: Annotated[
        int, Meta(ge=8, le=500, description="Deepest nesting of a request's JSON.", extra={"metavar": "LEVELS"})
    ] = 100
    max_json_values: Annotated[
        Count,
        Meta(description="Most values in a request's JSON, and in that of past tool calls in it; token ids aside."),
    ] = 50_000
    max_token_ids: Annotated[
        Count, Meta(description="Most token ids in a request: whole numbers in lists.", extra={"metavar": "TOKENS"})
    ] = 512 * 1024
    max_text_size: Annotated[
        Count, Meta(description="Largest request body, without its images (data URLs).", extra={"metavar": "BYTES"})
    ] = 4 * 1024 * 1024
    header_timeout: Annotated[
        Seconds,
        Meta(description="Time for a TLS handshake, and in which a client has to send the head of its request."),
    ] = 30.0
    body_timeout: Annotated[
        Seconds, Meta(description="Time in which it has to send the body, plus one second for each min_body_rate.")
    ] = 30.0
    min_body_rate: Annotated[
        Count, Meta(description="Bytes in a second that a long body has to come with.", extra={"metavar": "BYTES"})
    ] = 4096
    write_timeout: Annotated[
        Seconds,
        Meta(description="Time after which a client that takes nothing of its answer is disconnected (on Linux)."),
    ] = 300.0
    keepalive_timeout: Annotated[
        Seconds,
        Meta(
            description="Time after which a connection without a request is closed; longer than that of the load "
            "balancer in front (often 60), which then closes first."
        ),
    ] = 75.0
