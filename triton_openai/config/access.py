"""Settings of who may ask for what, and of how large and how slow a request may be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from triton_openai.config.units import Seconds

Count = Annotated[int, Meta(ge=1)]

# Every route belongs to one of these. All but "info" (what the service says about itself) are those of NVIDIA's own
# OpenAI frontend for Triton.
Group = Literal["inference", "embedding", "model-repository", "metrics", "health", "info"]

# A field name of RFC 9110.
_HEADER = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
# What can stand in a header after "Bearer ", with a name before it or none.
_NAMED_KEY = r"^([A-Za-z0-9._-]{1,64}:)?[!-+\x2d-9;-~]{1,4096}$"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/?#\s,]+)$"


class RestrictedApi(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Groups of paths that are open only to requests with *value* in *header*."""

    apis: Annotated[tuple[Group, ...], Meta(min_length=1)]
    header: Annotated[str, Meta(pattern=_HEADER)]
    value: Annotated[str, Meta(pattern=r"^[!-~]([ -~]*[!-~])?$")]


class AccessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may ask, and for what. Without a key, everybody who can reach the service may."""

    api_key: Annotated[
        tuple[Annotated[str, Meta(pattern=_NAMED_KEY)], ...],
        Meta(
            description="A key that a client has to have, with the name under which it is logged. May be given "
            "several times. Other users of the machine can read flags: better use the environment, or a file.",
            extra={"metavar": "[NAME:]KEY", "secret": True},
        ),
    ] = ()
    api_keys_file: Annotated[
        Path | None,
        Meta(
            description="YAML file with keys, their models and their limits; read again when it changes.",
            extra={"metavar": "FILE"},
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
            description="Web pages of this origin (https://HOST[:PORT]) may ask; * for all. May be given several "
            "times.",
            extra={"metavar": "ORIGIN"},
        ),
    ] = ()
    cors_allow_method: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Z]+$")], ...],
        Meta(description="Methods that web pages may use.", extra={"metavar": "METHOD"}),
    ] = ("GET", "HEAD", "POST")
    cors_allow_header: Annotated[
        tuple[Annotated[str, Meta(pattern=_HEADER)], ...],
        Meta(
            description="Headers that web pages may send; every one that they ask for unless it is given.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    cors_allow_credentials: Annotated[
        bool, Meta(description="Let browsers send cookies and client certificates along; not with the origin *.")
    ] = False


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How large a request may be (see --max-body-size too), and how slow its client."""

    max_header_size: Annotated[
        int,
        Meta(
            ge=1024, le=1024 * 1024, description="Longest single header, or request line.", extra={"metavar": "BYTES"}
        ),
    ] = 64 * 1024
    max_head_size: Annotated[
        int,
        Meta(
            ge=1024,
            le=16 * 1024 * 1024,
            description="Most of a request's head while it is not complete: the request line and all headers.",
            extra={"metavar": "BYTES"},
        ),
    ] = 256 * 1024
    max_json_depth: Annotated[
        int, Meta(ge=8, le=500, description="Deepest nesting of a request's JSON.", extra={"metavar": "LEVELS"})
    ] = 100
    max_json_values: Annotated[Count, Meta(description="Most values in a request's JSON, token ids included.")] = (
        1_000_000
    )
    max_json_containers: Annotated[
        Count, Meta(description="Most lists and objects in it: they cost far more to read than what is in them.")
    ] = 100_000
    max_json_string: Annotated[
        Count, Meta(description="Longest string in a request's JSON, as it is written.", extra={"metavar": "BYTES"})
    ] = 16 * 1024 * 1024
    max_messages: Annotated[Count, Meta(description="Most messages in a chat.")] = 4096
    max_content_parts: Annotated[
        Count, Meta(description="Most content parts in all messages together.", extra={"metavar": "PARTS"})
    ] = 4096
    max_tools: Annotated[Count, Meta(description="Most tools, and functions.")] = 512
    max_prompts: Annotated[
        Annotated[int, Meta(ge=1, le=2048)], Meta(description="Most prompts, inputs or documents in one request.")
    ] = 2048
    header_timeout: Annotated[
        Seconds,
        Meta(description="Time for a TLS handshake, and in which a client has to send the head of its request."),
    ] = 30.0
    body_timeout: Annotated[
        Seconds, Meta(description="Time in which it has to send the body, plus one second for each --min-body-rate.")
    ] = 30.0
    min_body_rate: Annotated[
        Count, Meta(description="Bytes in a second that a long body has to come with.", extra={"metavar": "BYTES"})
    ] = 4096
    write_timeout: Annotated[
        Seconds, Meta(description="Time after which a client that takes nothing of its answer is disconnected.")
    ] = 300.0
    keepalive_timeout: Annotated[
        Seconds,
        Meta(
            description="Time after which a connection without a request is closed; longer than that of the load "
            "balancer in front (often 60), which then closes first."
        ),
    ] = 75.0
