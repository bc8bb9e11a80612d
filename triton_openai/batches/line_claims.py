"""
Claims of lines: this process claims a chunk of lines when it can run more of them than it has.

Other processes claim lines of the same batches at the same time. So a chunk is as large as the lines that may run here,
and no larger: what one process has claimed, no other process can run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from triton_openai.batches import timing
from triton_openai.batches.away_models import AwayModels
from triton_openai.batches.claims import Claims
from triton_openai.batches.file_folder import Files
from triton_openai.batches.host import Host
from triton_openai.batches.key_limits import KeyLimits
from triton_openai.batches.leased import Phase, RunningPart
from triton_openai.batches.line_limits import ModelLimits, is_open
from triton_openai.batches.part_runner import PartRunner
from triton_openai.storage.batch_records import Batch, LeaseLost

# The smallest chunk, and the chunk for a model of which no line has run.
_MIN_CHUNK = 4
_FIRST_CHUNK = 16
# Of the lines without a result, a process claims this part in advance, so that near the end no process has lines that
# wait while another one has none.
_AHEAD_DIVISOR = 16
# Lines that wait are given back where they are so many times as many as may run.
_MAX_WAITING = 2


class LineClaims:
    """
    Claims lines of the batches that are open, for the process *holder*; *batches* are the parts that it has.

    *announce* is called when other processes can claim lines.
    """

    def __init__(
        self,
        files: Files,
        host: Host,
        holder: str,
        batches: dict[str, RunningPart],
        claims: Claims,
        parts: PartRunner,
        away: AwayModels,
        limits: ModelLimits,
        keys: KeyLimits,
        announce: Callable[[], None],
    ) -> None:
        self._announce = announce
        self._files = files
        self._lines = files.store.lines
        self._host = host
        self._holder = holder
        self._batches = batches
        self._claims = claims
        self._parts = parts
        self._away = away
        self._limits = limits
        self._keys = keys
        # Batches of which no lines waited, with the models that were left out.
        self._exhausted: dict[str, Collection[str]] = {}
        # Models of which lines were given back, because live requests left no room for any.
        self._without_capacity: set[str] = set()

    def reset(self) -> None:
        """Look at all batches again: something has changed."""
        self._exhausted.clear()

    async def refill(self) -> bool:
        """
        Claim lines of the batches that come next, where this process could run more than it has.

        Returns whether it has claimed any.
        """
        settings = self._host.settings
        if self._host.stopping or settings.paused or not is_open(settings.hours):
            return False
        for running in list(self._batches.values()):
            await self._reconcile(running)
            await self._give_back(running)
        by_owner: dict[str, list[Batch]] = {}
        for batch in self._claims.open:
            if batch.status == "in_progress" and not batch.problems and not self._keys.must_wait(batch.owner):
                by_owner.setdefault(batch.owner, []).append(batch)
        claimed = False
        for batches in by_owner.values():
            claimed |= await self._refill_owner(batches, len(by_owner))
        return claimed

    async def _refill_owner(self, batches: Sequence[Batch], owners: int) -> bool:
        """
        Claim lines of the oldest of *batches* that has any; all are those of one of so many *owners*.

        Returns whether it has claimed any.
        """
        for batch in batches:
            running = self._batches.get(batch.id)
            if running is not None and (running.starting is not None or running.unsure):
                return False
            if running is not None and (running.phase is not Phase.RUNNING or running.backlogged):
                continue
            chunk = max(_MIN_CHUNK, self._chunk(batch) // owners)
            blocked = self._blocked(running, chunk)
            if running is not None and running.ready(blocked) > chunk // 2:
                return False
            if running is not None and batch.model in blocked:
                if batch.model not in self._away:
                    return False
                continue
            if self._exhausted.get(batch.id) == blocked:
                continue
            if running is not None:
                chunk = max(_MIN_CHUNK, chunk - running.ready(blocked))
            if await self._claim(batch, running, chunk, blocked):
                return True
            self._exhausted[batch.id] = blocked
        return False

    async def _reconcile(self, running: RunningPart) -> None:
        """Read which lines this process has, after a failure that left it unknown."""
        if not running.unsure or running.starting is not None or not running.runs_lines:
            return
        try:
            claimed = await self._lines.unfinished_in(running.part)
        except LeaseLost:
            running.lose()
            return
        running.unsure = False
        here = running.numbers()
        running.add_waiting([line for line in claimed if line.number not in here])

    async def _give_back(self, running: RunningPart) -> None:
        """
        Give lines back, so that other processes run them.

        These are lines that could not start for a while, and those that are many more than may run here now.
        """
        if running.starting is not None or running.unsure:
            return
        without_capacity = self._models_without_capacity(running)
        numbers: list[int] = []
        for model, lines in running.waiting.items():
            keep: int | None = 0
            if model not in without_capacity:
                keep = self._max_waiting(model)
            if keep is None:
                continue
            numbers += [line.number for line in islice(lines, keep, None)]
        if not numbers:
            return
        running.drop(numbers)
        running.unsure = True
        try:
            await self._lines.give_back(running.part, numbers)
        except LeaseLost:
            running.lose()
            return
        running.unsure = False
        self._without_capacity.update(without_capacity)
        self._announce()

    def _models_without_capacity(self, running: RunningPart) -> Collection[str]:
        """Return the models whose lines could not start for a while."""
        if running.active or time.monotonic() - running.moved_at < timing.GIVE_BACK:
            return ()
        return [model for model in running.waiting if model not in self._away and not self._limits.has_room(model)]

    def _max_waiting(self, model: str) -> int | None:
        """Return how many lines for *model* may wait here; ``None`` for any number."""
        target = self._host.target(model)
        if target is None or model in self._away:
            return None
        return _MAX_WAITING * max(_FIRST_CHUNK, self._limits.allowed_for(target))

    def _chunk(self, batch: Batch) -> int:
        """Return how many lines of *batch* to claim: those that may start here now, and some in advance."""
        targets = set(self._limits.targets)
        if batch.model is not None:
            target = self._host.target(batch.model)
            targets &= {target or ""}
        ahead = max(_MIN_CHUNK, batch.unfinished // _AHEAD_DIVISOR)
        chunks = [min(_FIRST_CHUNK, _FIRST_CHUNK // 2 + ahead)]
        for target in targets:
            allowed = self._limits.allowed_for(target)
            room = min(allowed, self._limits.slots.get(target, allowed)) - self._limits.running_for(target)
            chunks.append(min(allowed, max(0, room) + ahead))
        return max(chunks)

    def _blocked(self, running: RunningPart | None, chunk: int) -> Collection[str]:
        """Return the models for which no lines are claimed: those that are away, and those with enough lines here."""
        self._without_capacity = {
            model for model in self._without_capacity if not self._limits.has_live_capacity(model)
        }
        blocked = {*self._away, *self._without_capacity}
        if running is not None:
            blocked |= {
                model
                for model, lines in running.waiting.items()
                if len(lines) > chunk // 2 and not self._limits.has_room(model)
            }
        return frozenset(blocked)

    async def _claim(self, batch: Batch, running: RunningPart | None, chunk: int, without: Collection[str]) -> bool:
        """Claim lines of *batch*; return whether there were any."""
        if running is None:
            return await self._join(batch, chunk, without)
        running.unsure = True
        try:
            lines = await self._lines.claim(running.part, chunk, without)
        except LeaseLost:
            running.lose()
            return False
        running.unsure = False
        running.more = len(lines) >= chunk
        running.add_waiting(lines)
        return bool(lines)

    async def _join(self, batch: Batch, chunk: int, without: Collection[str]) -> bool:
        """Claim lines of *batch*, of which this process has no part."""
        await self._claims.lock()
        lease = self._host.settings.lease
        joined = await self._lines.join(batch.id, self._holder, lease, chunk, without)
        if joined is None and not self._without_capacity.isdisjoint(without):
            return False
        if joined is None and without:
            # A few lines, so that the batch is among those that wait for the model: its key may ask for it.
            joined = await self._lines.join(batch.id, self._holder, lease, _MIN_CHUNK)
        if joined is None:
            return False
        current, part, lines = joined
        if batch.id in self._batches:
            # Added while this one waited.
            await self._files.store.leases.release_part(part)
            return False
        running = self._parts.add(current, part)
        running.more = len(lines) >= chunk
        running.add_waiting(lines)
        return True
