"""One Triton of a fleet, and the leases of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeAlias

from triton_openai.config.tree import EndpointSettings
from triton_openai.errors import UpstreamUnavailable
from triton_openai.triton.catalog import Catalog, Snapshot
from triton_openai.triton.client import TritonClient
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.routing import Target
from triton_openai.triton.tensors import InferRequest

# How long the requests that ran on a lost Triton may be retried outside the retry budget.
_GRACE_SECONDS = 10.0
# A Triton with this many ejected models is ejected for all models.
_EJECTED_MODELS = 3


class Member:
    """One Triton of a fleet."""

    def __init__(self, settings: EndpointSettings, client: TritonClient) -> None:
        assert settings.name is not None, "the settings have been completed"
        self.name = settings.name
        self.settings = settings
        self.client = client
        #: Returns the address to which a request is sent, ``None`` if it is not known.
        self.address_of: Callable[[InferRequest], str | None] = _unknown_address
        if isinstance(client, Endpoint):
            self.address_of = client.address_of
        #: The name in metrics; ``None`` once its series are dropped.
        self.label: str | None = None
        self.snapshot = Snapshot(error=UpstreamUnavailable("Triton has not been asked yet.", retry_after=1))
        self.catalog: Catalog
        #: By Triton model.
        self.targets: dict[str, Target] = {}
        #: The targets of models that were not ready for a request, until the next look at the list of models.
        self.suspended_targets: dict[str, Target] = {}
        #: Tasks that end with this member: probes of ejected models, and further looks at its list.
        self.tasks: set[asyncio.Task[None]] = set()
        #: The leases that have not ended.
        self.leases: set[Lease] = set()
        #: Set when the last lease ends.
        self.idle = asyncio.Event()
        #: Whether it is off the list, and its last requests run.
        self.draining = False
        # The requests that may still be retried outside the retry budget, and until when.
        self._free_retries = 0
        self._grace_until = -math.inf

    def within_failover_grace(self, now: float) -> bool:
        """
        Return whether a request that lost its connection here is retried outside the retry budget.

        Requests that were running when the connection broke are: one Triton that ends must not exhaust the budget.
        """
        if now >= self._grace_until:
            self._free_retries = len(self.leases)
            self._grace_until = now + _GRACE_SECONDS
        self._free_retries -= 1
        return self._free_retries >= 0

    def report_lost(self, *, final: bool) -> None:
        """Call :attr:`Lease.lost` of each request: the Triton has stopped answering."""
        for lease in list(self.leases):
            if lease.lost is not None:
                lease.lost(final)

    @property
    def ejected(self) -> bool:
        """Whether so many of its models are ejected that it gets no requests at all."""
        ejected = [target for target in self.targets.values() if target.ejected_until is not None]
        return len(ejected) >= _EJECTED_MODELS


#: Takes the end of a lease: its target, the error if the request failed, and whether the model has answered.
OnRelease: TypeAlias = Callable[["Lease", Target, Exception | None, bool], None]


class Lease:
    """A Triton for one request of *model*. Its owner must call :meth:`close`."""

    __slots__ = (
        "_on_release",
        "_target",
        "address_of",
        "client",
        "counted",
        "endpoint",
        "lost",
        "member",
        "model",
        "name",
    )

    def __init__(self, member: Member, model: str, target: Target | None, on_release: OnRelease) -> None:
        self._on_release = on_release
        # None after the end, and for the only Triton, whose requests are not counted.
        self._target = target
        self.member = member
        self.client = member.client
        #: The name of the Triton.
        self.endpoint = member.name
        self.model = model
        #: Whether its requests are counted: the settings list several Tritons.
        self.counted = target is not None
        #: The name of the Triton in the settings, ``None`` for the only one.
        self.name: str | None = None
        if self.counted:
            self.name = member.name
        #: Returns the address to which a request is sent, ``None`` if it is not known.
        self.address_of = member.address_of
        #: Called when the Triton has stopped answering; with true, the request must end.
        self.lost: Callable[[bool], None] | None = None

    def close(self, error: Exception | None = None, *, answered: bool = True) -> None:
        """
        End the lease. Further calls do nothing.

        *error* is how the request failed, *answered* whether the model sent anything: a client that leaves before that
        is no evidence for or against the Triton.
        """
        target = self._target
        self._target = None
        # Breaks a reference cycle.
        self.lost = None
        if target is not None:
            self._on_release(self, target, error, answered)


def _unknown_address(request: InferRequest) -> str | None:
    """Return ``None``: the client is no endpoint with addresses."""
    return None
