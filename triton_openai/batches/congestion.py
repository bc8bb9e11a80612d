"""Signs of congestion, at which fewer lines run: live requests that wait, and queues in front of engines."""

from __future__ import annotations

import asyncio
import time

import structlog

from triton_openai.batches import timing
from triton_openai.batches.engine_queues import EngineQueues
from triton_openai.batches.first_tokens import FirstTokens
from triton_openai.batches.host import Host
from triton_openai.batches.line_limits import ModelLimits
from triton_openai.tasks import cancel

_log = structlog.get_logger(__name__)
# With fewer lines of a model in this process, live requests wait as they do without lines.
_FEW_LINES = 1


class CongestionMonitor:
    """Looks for congestion, and shrinks *limits*. *first_tokens* shows how long live requests wait."""

    def __init__(self, host: Host, first_tokens: FirstTokens, limits: ModelLimits) -> None:
        self._host = host
        self._first_tokens = first_tokens
        self._limits = limits
        self._queues = EngineQueues()
        self._next_check = 0.0
        self._reading: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Look for congestion, at most once in a while."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + timing.POLL
        self.check_first_tokens()
        if self._limits.running and (self._reading is None or self._reading.done()):
            # In a task: nothing waits for a Triton whose metrics do not come.
            self._reading = asyncio.create_task(self._read_queues())

    def check_first_tokens(self) -> None:
        """Shrink the limits of models whose live requests wait too long."""
        for target in {*self._limits.targets, *self._first_tokens.models}:
            self._check_first_tokens(target)

    def _check_first_tokens(self, target: str) -> None:
        waits = self._first_tokens.of(target)
        running = self._limits.running_for(target)
        if self._limits.is_exceeded(target):
            # What was done shows when the lines have ended.
            waits.clear()
            return
        few = running <= _FEW_LINES
        if waits.are_long(few_lines=few, max_wait=self._host.settings.live_first_token):
            self._limits.slow_down(target)
            waits.clear()

    async def _read_queues(self) -> None:
        try:
            await self._refresh()
        except Exception:  # noqa: BLE001 - the last resort: logged, and read again
            _log.exception("queues of engines cannot be read")

    async def _refresh(self) -> None:
        targets = [target for target in self._limits.targets if self._limits.running_for(target)]
        urls = {target: self._host.metrics_urls(target) for target in targets}
        await self._queues.refresh({url for by_name in urls.values() for url in by_name.values()})
        for target, by_name in urls.items():
            models = self._host.queue_models(target)
            for limit in self._limits.of(target):
                waiting = self._queues.waiting(by_name.get(limit.endpoint, ""), models)
                if waiting is not None:
                    waiting *= self._host.share
                limit.queue(waiting)

    async def close(self) -> None:
        """Stop looking."""
        await cancel(self._reading)
