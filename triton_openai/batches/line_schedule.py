"""Which lines start next: owner by owner, then by the age of batches, while there is room."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count

from triton_openai.batches.away_models import AwayModels
from triton_openai.batches.host import Host
from triton_openai.batches.key_limits import KeyLimits
from triton_openai.batches.leased import RunningPart
from triton_openai.batches.line_limits import ModelLimits, PickedLine, is_open
from triton_openai.batches.quarantine import Quarantine


class LineSchedule:
    """Picks the lines of *batches* that start next."""

    def __init__(
        self,
        host: Host,
        batches: Mapping[str, RunningPart],
        away: AwayModels,
        limits: ModelLimits,
        keys: KeyLimits,
        quarantine: Quarantine,
    ) -> None:
        self._host = host
        self._batches = batches
        self._away = away
        self._limits = limits
        self._keys = keys
        self._quarantine = quarantine
        # The turn in which each owner last started a line.
        self._last_turns: dict[str, int] = {}
        self._turns = count()

    async def pick(self) -> Mapping[str, Sequence[PickedLine]]:
        """Return the lines that start now, by batch; each is counted in its limit."""
        settings = self._host.settings
        if self._host.stopping or settings.paused or not is_open(settings.hours):
            return {}
        now = time.monotonic()
        for running in self._batches.values():
            running.put_back_due(now)
        self._away.check(self._batches.values())
        quarantined = await self._quarantine.pick()
        if quarantined is not None:
            return quarantined
        return self._pick_by_owner()

    def _pick_by_owner(self) -> Mapping[str, Sequence[PickedLine]]:
        by_owner: dict[str, list[RunningPart]] = {}
        for running in sorted(self._batches.values(), key=lambda running: running.batch.created):
            if not self._keys.must_wait(running.batch.owner):
                by_owner.setdefault(running.batch.owner, []).append(running)
        self._last_turns = {owner: self._last_turns.get(owner, -1) for owner in by_owner}
        owners = deque(sorted(by_owner, key=self._last_turns.__getitem__))
        picked: dict[str, list[PickedLine]] = {}
        while owners:
            owner = owners.popleft()
            for running in by_owner[owner]:
                line = self._pick_line(running)
                if line is not None:
                    picked.setdefault(running.batch.id, []).append(line)
                    self._last_turns[owner] = next(self._turns)
                    owners.append(owner)
                    break
        return picked

    def _pick_line(self, running: RunningPart) -> PickedLine | None:
        """Return the next line of a batch, counted in its limit; ``None`` if none may start."""
        if not running.starts_lines or running.backlogged:
            return None
        for lines in running.candidates(self._away):
            limit = self._limits.take(lines[0].model)
            if limit is not None:
                return PickedLine(lines.popleft(), limit)
        return None
