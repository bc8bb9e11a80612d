"""The share of this process in the lines that all processes may run for a model."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from triton_openai.batches import timing
from triton_openai.batches.host import Host
from triton_openai.batches.leased import RunningPart
from triton_openai.batches.line_limits import ModelLimits
from triton_openai.storage.slot_table import SlotTable

# Slots of a process that does not renew them are free after so many seconds.
_SECONDS = 20.0
# Slots beyond those that the limits allow now, so that the limits can grow until the next look.
_AHEAD = 2
# While all slots are used, they are updated so many times as often.
_FULL_FREQUENCY = 10


class Slots:
    """Takes slots for the process *holder* with the parts *batches*, and sets those of *limits*."""

    def __init__(
        self, table: SlotTable, host: Host, holder: str, batches: Mapping[str, RunningPart], limits: ModelLimits
    ) -> None:
        self._batches = batches
        self._host = host
        self._table = table
        self._holder = holder
        self._limits = limits
        self._taken: dict[str, int] = {}
        self._looked_at: dict[str, float] = {}

    async def update(self) -> None:
        """Take slots for the Triton models for which lines wait or run here; give back all others."""
        now = time.monotonic()
        wanted = self._targets()
        for target in wanted:
            if now >= self._looked_at.get(target, -math.inf) + self._pause(target):
                self._looked_at[target] = now
                total = self._limits.total(target)
                self._taken[target] = await self._table.take(
                    self._host.slots_of(target),
                    self._holder,
                    _SECONDS,
                    wanted=min(total, _AHEAD * self._limits.allowed_for(target)),
                    running=self._limits.running_for(target),
                    total=total,
                )
        for target in self._taken.keys() - wanted:
            await self._table.release(self._holder, self._host.slots_of(target))
            del self._taken[target]
            del self._looked_at[target]
        self._limits.slots = self._taken

    def _targets(self) -> Collection[str]:
        """Return the Triton models for which lines of this process wait or run."""
        targets = {target for target in self._limits.targets if self._limits.running_for(target)}
        for running in self._batches.values():
            targets.update(target for model in running.models() if (target := self._host.target(model)) is not None)
        return targets

    def _pause(self, target: str) -> float:
        """Return the seconds between two looks at a model, which are fewer while all slots are used."""
        if self._limits.running_for(target) >= self._taken.get(target, 0):
            return timing.SLOTS / _FULL_FREQUENCY
        return timing.SLOTS
