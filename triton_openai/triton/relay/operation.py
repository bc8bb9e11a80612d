"""What one operation of Triton's protocol is to whoever lets it in; without gRPC, which only its relay needs."""

from __future__ import annotations

from typing import Literal

import msgspec

from triton_openai.config import Group


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """
    One operation: its *group*, whether it *manages* the server, and whether it changes which models are *loaded*.

    *guards* are the groups of this service's own API that it belongs to, all of which have to be open; *about* is what
    it tells of, uses or changes: the model that it names, all models, or none. *readiness* is whether load balancers
    ask it whether to send requests.
    """

    group: str
    guards: tuple[Group, ...]
    about: Literal["nothing", "model", "everything"]
    manages: bool = False
    loads: bool = False
    readiness: bool = False
