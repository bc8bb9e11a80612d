"""The operations of Triton's protocol, and what the relays ask of whoever decides who is let in; needs no gRPC."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import msgspec
from multidict import CIMultiDictProxy

from triton_openai.config import Group
from triton_openai.errors import ServiceError


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


class Visit(Protocol):
    """
    One request or call, from its head to its end.

    Until the client was let in, what is asked of the visit may change.
    """

    @property
    def passed_on(self) -> Mapping[str, str]:
        """What is added to the headers for Triton."""
        ...

    @property
    def told(self) -> Mapping[str, str]:
        """What is added to the headers of the answer."""
        ...

    @property
    def withheld(self) -> Collection[str]:
        """Names, in lower case, of headers that are not for Triton: with them the client was let in here."""
        ...

    @property
    def names_models(self) -> bool:
        """Whether :meth:`use` has to be called before a request reaches a model."""
        ...

    @property
    def last(self) -> bool:
        """Whether the service is ending, so that a client should not send its next request over this connection."""
        ...

    @property
    def counted(self) -> bool:
        """Whether :meth:`count` has to be called for each request of a stream after its first."""
        ...

    async def enter(self, operation: Operation | None) -> None:
        """Let the client in for *operation*, which is ``None`` for what is none. Raises :class:`ServiceError`."""
        ...

    def use(self, names: Collection[str]) -> None:
        """Let it use a model that may be meant by any of *names*. Raises :class:`ServiceError`."""
        ...

    async def count(self) -> None:
        """Let a further request in. Raises :class:`ServiceError`."""
        ...

    def failed(self, error: ServiceError) -> None:
        """Learn what the client is told instead of Triton's answer."""
        ...

    def end(self, status: str | None) -> None:
        """Learn how it ended, in the words of its protocol; ``None`` when the client has left."""
        ...


class Door(Protocol):
    """Receives who comes to a relay."""

    def visit(self, protocol: Literal["http", "grpc"], method: str, path: str, headers: CIMultiDictProxy[str]) -> Visit:
        """Begin a visit; *path* is as it stands in the request, without its query."""
        ...
