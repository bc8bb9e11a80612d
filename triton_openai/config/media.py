"""The settings of images in messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from triton_openai.config.units import Seconds


class MediaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Images in requests. Without allowed hosts, they come as data URLs only."""

    allowed_domains: Annotated[
        tuple[str, ...],
        Meta(
            description="Host from which images may be fetched: example.com, *.example.com (every host below it), "
            "either with :PORT. May be given several times.",
            extra={"name": "allowed-media-domain", "metavar": "HOST"},
        ),
    ] = ()
    private_addresses: Annotated[
        bool,
        Meta(
            description="Fetch images also from allowed hosts whose addresses are not public (loopback, private "
            "networks). Then a request can reach into this network, as far as the allowed hosts go.",
            extra={"name": "private-media-addresses"},
        ),
    ] = False
    max_images: Annotated[int, Meta(ge=1, le=4096, description="Most images in one request.")] = 16
    max_image_size: Annotated[
        int, Meta(ge=1024, description="Largest image file that is taken.", extra={"metavar": "BYTES"})
    ] = 20 * 1024 * 1024
    fetch_timeout: Annotated[
        Seconds,
        Meta(
            description="Longest time that fetching one image may take.",
            extra={"name": "media-fetch-timeout", "metavar": "SECONDS"},
        ),
    ] = 10.0
    max_fetches: Annotated[
        int,
        Meta(
            ge=1,
            description="Images that are fetched at the same time; others wait.",
            extra={"name": "max-media-fetches"},
        ),
    ] = 32
