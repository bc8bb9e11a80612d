"""Brings ejected Tritons back: each is probed after its ejection time, until it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TypeAlias

import structlog

from triton_openai.config.tree import EjectionSettings
from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.tasks import spawn
from triton_openai.triton.fleet_metrics import FleetMetrics
from triton_openai.triton.member import Member
from triton_openai.triton.routing import Target

_log = structlog.get_logger(__name__)

# The time limit of a probe, in seconds.
_PROBE_SECONDS = 30.0

#: Sends a small request for a model to the Triton of a name. Raises :class:`ServiceError` unless it is answered.
Probe: TypeAlias = Callable[[str, str], Awaitable[None]]


class Ejections:
    """The ejected models of Tritons. *update* is called with the models whose choice has changed."""

    def __init__(
        self, settings: EjectionSettings, metrics: FleetMetrics, update: Callable[[Collection[str]], None]
    ) -> None:
        self.settings = settings
        #: Without a probe, an ejected Triton is restored after its time.
        self.probe: Probe | None = None
        self._metrics = metrics
        self._update = update

    def record(self, member: Member, model: str, target: Target, error: ServiceError) -> None:
        """Record that *model* at *member* was ejected after *error*, and start its probes."""
        _log.warning("Triton ejected", endpoint=member.name, model=model, reason=error.reason)
        self._metrics.count_at(member, "ejected", model)
        self._metrics.count_at(member, "ejections", model, error.code)
        self._update_choice(member, model, affects_all=member.ejected)
        spawn(self._restore(member, model, target), member.tasks)

    def _update_choice(self, member: Member, model: str, *, affects_all: bool) -> None:
        if affects_all:
            self._update(member.targets)
        else:
            self._update([model])

    async def _restore(self, member: Member, model: str, target: Target) -> None:
        """Probe an ejected Triton after each ejection time, until it answers or is gone."""
        try:
            while member.targets.get(model) is target and target.ejected_until is not None:
                await asyncio.sleep(target.ejected_until - time.monotonic())
                if not await self._answers(member, model):
                    target.eject(time.monotonic(), self.settings)
                    continue
                affects_all = member.ejected
                target.restore(time.monotonic())
                _log.info("Triton restored", endpoint=member.name, model=model)
                self._update_choice(member, model, affects_all=affects_all)
        finally:
            self._metrics.count_at(member, "ejected", model, by=-1)

    async def _answers(self, member: Member, model: str) -> bool:
        """Return whether *model* answers a small request at *member*; a refusal is an answer."""
        if self.probe is None:
            return True
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self.probe(model, member.name)
        except (UpstreamError, TimeoutError):
            return False
        except Exception as error:  # noqa: BLE001 - a mistake of an adapter is no evidence against its Triton
            _log.debug("probe refused", endpoint=member.name, model=model, exc_info=error)
        return True
