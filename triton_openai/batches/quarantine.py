"""
Quarantine: lines that may have ended a process or a Triton run while no others of this process do.

A line that ran when a process or a Triton ended may be the cause. Such lines run again an eighth of those that ran
together at a time, and in the end alone. Of all processes, one runs quarantined lines at a time; the others run normal
lines meanwhile. Only a death while it ran alone counts against a line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

from triton_openai import errors
from triton_openai.batches.away_models import AwayModels
from triton_openai.batches.host import Host
from triton_openai.batches.key_limits import KeyLimits
from triton_openai.batches.leased import Phase, RunningPart
from triton_openai.batches.line_limits import ModelLimits, PickedLine
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, Line
from triton_openai.storage.lease_table import LeaseTable

# A line does not start again once so many processes, or so many Tritons, have ended while it ran alone. The number of
# Tritons is smaller because a Triton takes minutes to start.
_MAX_PROCESS_DEATHS = 3
_MAX_TRITON_DEATHS = 2
# Each line that succeeds after a death shows another cause, and allows all lines one death more, up to this number.
_MAX_EXONERATED = 3


class _State(Enum):
    """What this process does about quarantined lines."""

    #: It has no lease to run them.
    OUTSIDE = "outside"
    #: It has the lease, and runs none.
    LEASED = "leased"
    #: Some run, and no other lines of this process.
    RUNNING = "running"


class Quarantine:
    """Decides when quarantined lines of *batches* start. *holder* is the name of this process for leases."""

    def __init__(
        self,
        host: Host,
        leases: LeaseTable,
        holder: str,
        batches: Mapping[str, RunningPart],
        away: AwayModels,
        limits: ModelLimits,
        keys: KeyLimits,
    ) -> None:
        self._host = host
        self._leases = leases
        self._holder = holder
        self._batches = batches
        self._away = away
        self._limits = limits
        self._keys = keys
        self._state = _State.OUTSIDE

    @property
    def runs(self) -> bool:
        """Whether quarantined lines run."""
        return self._state is _State.RUNNING

    async def pick(self) -> Mapping[str, Sequence[PickedLine]] | None:
        """
        Return the quarantined lines that start now, by batch; ``None`` if normal lines may start instead.

        While another process has the lease, normal lines start: as many as there is room for. The lease is asked for
        again when they have ended.
        """
        if self.runs and self._is_busy():
            return {}
        if self.runs:
            self._state = _State.LEASED
        if any(self._host.target(line.model) is not None for _, line in self._candidates()):
            if self._is_busy():
                return {}
            # Each time: the lease may have expired while this process was frozen.
            if not await self._leases.enter_quarantine(self._holder, self._host.settings.lease):
                self._state = _State.OUTSIDE
                return None
            self._state = _State.LEASED
            group = self._pick_group()
            if group:
                self._state = _State.RUNNING
                return group
        if self._state is _State.LEASED:
            await self._leases.leave_quarantine(self._holder)
            self._state = _State.OUTSIDE
        return None

    def _is_busy(self) -> bool:
        """Return whether lines run, or have results that are not written: a death would be blamed on those."""
        unwritten = any(running.done and running.phase is Phase.RUNNING for running in self._batches.values())
        return self._limits.running > 0 or unwritten

    def _candidates(self) -> list[tuple[RunningPart, Line]]:
        """Return the quarantined lines that may start next: fewest deaths first, then the largest groups."""
        candidates = [
            (running, line)
            for running in self._batches.values()
            if running.starts_lines and not self._keys.must_wait(running.batch.owner)
            for line in running.quarantined_candidates(self._away)
        ]
        return sorted(candidates, key=lambda candidate: (candidate[1].deaths, -candidate[1].max_group))

    def _pick_group(self) -> Mapping[str, Sequence[PickedLine]]:
        """Return as many candidates as may run together, by batch."""
        max_group = math.inf
        size = 0
        group: dict[str, list[PickedLine]] = {}
        for running, line in self._candidates():
            max_group = min(max_group, line.max_group)
            if size >= max_group:
                break
            limit = self._limits.take(line.model)
            if limit is not None:
                size += 1
                running.quarantined.remove(line)
                group.setdefault(running.batch.id, []).append(PickedLine(line, limit))
        return group


def fatal_error(batch: Batch, line: Line) -> ServiceError | None:
    """Return the result of a *line* that has ended too many processes or Tritons; ``None`` for a line that may run."""
    further = min(batch.exonerated, _MAX_EXONERATED)
    message = "{} ended {} times while the request ran as the only one of a batch in its process."
    if line.triton_deaths >= _MAX_TRITON_DEATHS + further:
        return errors.UpstreamLost(message.format("Triton", line.triton_deaths))
    if line.process_deaths >= _MAX_PROCESS_DEATHS + further:
        return ServiceError(message.format("The service", line.process_deaths), code="server_error")
    return None
