"""Which clients may send requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from triton_openai.config.tree.fields import Count, File, SettingsGroup, common_flag, file_only, flag

#: Every route belongs to one of these. All but "info" (what the service says about itself) and "batch" (files and
#: batches) are those of NVIDIA's own OpenAI frontend for Triton.
ApiGroup = Literal["inference", "embedding", "batch", "model-repository", "metrics", "health", "info"]

# A field name of RFC 9110.
_HEADER = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
# An optional name, and a key that can follow "Bearer " in a header.
NAMED_KEY = r"^([A-Za-z0-9._-]{1,64}:)?[!-+\x2d-9;-~]{1,4096}$"
_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^][/?#\s,:*]+)(:([0-9]+|\*))?)$"


class RestrictedApi(SettingsGroup, frozen=True):
    """Groups of paths that are open only to some requests."""

    apis: Annotated[tuple[ApiGroup, ...], Meta(min_length=1)]
    #: The name of the header that opens them.
    header: Annotated[str, Meta(pattern=_HEADER)]
    #: What the header has to hold.
    value: Annotated[str, Meta(pattern=r"^[!-~]([ -~]*[!-~])?$")]


class GatewaySettings(SettingsGroup, frozen=True):
    """What the headers of a trusted gateway stand for: priorities, and limits of tenants whose API key has none."""

    #: The priority of each objective, 1 first.
    objectives: Mapping[str, Count] = msgspec.field(default_factory=dict)
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    batch_tokens_per_minute: Count | None = None
    audio_seconds_per_minute: Count | None = None


class AccessSettings(SettingsGroup, frozen=True):
    """Which clients may send requests, and to which APIs. Without keys, every client may."""

    api_key: Annotated[
        tuple[Annotated[str, Meta(pattern=NAMED_KEY)], ...],
        flag(
            "API key, with the name that the log shows. Other users of the machine can read flags, so prefer the "
            "environment or a file.",
            metavar="[NAME:]KEY",
            secret=True,
        ),
    ] = ()
    api_keys_file: Annotated[
        File, common_flag("YAML file with keys, their models and their limits; read again when it changes.")
    ] = None
    openai_restricted_api: Annotated[
        tuple[RestrictedApi, ...],
        flag(
            "Open groups of paths only to requests with VALUE in the header KEY. APIS are inference, embedding, batch, "
            "model-repository, metrics, health and info, separated by commas; in the environment, semicolons separate "
            "several restrictions.",
            metavar=("APIS", "KEY", "VALUE"),
            secret=True,
        ),
    ] = ()
    cors_allow_origin: Annotated[
        tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...],
        flag(
            "Let web pages of this origin (https://HOST[:PORT]) call the service; the port * is any port, and * alone "
            "is every origin.",
            form="https://HOST[:PORT] without a path, with * for any port, or * alone",
        ),
    ] = ()
    limits_store: Annotated[
        Annotated[str, Meta(pattern=r"^(rediss?|unix)://.+$")] | None,
        file_only(
            "Redis that counts for the limits of keys over several services; by default this service counts alone.",
            metavar="redis://...",
            form="redis://...",
            secret=True,
        ),
    ] = None
    limits_fail: Annotated[
        Literal["open", "closed"],
        file_only(
            "What happens while that Redis does not answer. open: each service counts alone; closed: requests get a "
            "503."
        ),
    ] = "open"
    trust_gateway: Annotated[
        bool,
        file_only(
            "Let the gateway in front name a request's objective and its tenant, in headers that it must not take over "
            "from clients. access.gateway has the priorities of objectives, and the limits of tenants."
        ),
    ] = False
    gateway: GatewaySettings = GatewaySettings()
