"""Models that are away: their lines wait, and small requests show when they are back."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import structlog

from triton_openai import errors
from triton_openai.batches import timing
from triton_openai.batches.host import Host
from triton_openai.batches.leased import RunningPart
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch
from triton_openai.tasks import cancel, spawn

_log = structlog.get_logger(__name__)
# Errors that are about the key of a batch, and show nothing about its model.
_OF_THE_KEY = (errors.InvalidApiKey, errors.ApiRestricted, errors.KeyNotSufficient)


class Pause:
    """The pause of a model that is away. It is checked at growing intervals."""

    def __init__(self) -> None:
        self._seconds = timing.FIRST_PAUSE
        self._due_at = time.monotonic() + self._seconds
        self._checking = False

    @property
    def due(self) -> bool:
        """Whether it is time to check the model."""
        return not self._checking and time.monotonic() >= self._due_at

    def begin_check(self) -> None:
        """Note that the model is being checked."""
        self._checking = True

    def extend(self) -> None:
        """Note that the model is still away."""
        self._checking = False
        self._seconds = min(2 * self._seconds, timing.MAX_PAUSE)
        self._due_at = time.monotonic() + self._seconds


class AwayModels:
    """
    The models of *host* that are away, by the names that lines have for them.

    *on_return* is called when one is back.
    """

    def __init__(self, host: Host, on_return: Callable[[], None]) -> None:
        self._host = host
        self._on_return = on_return
        self._pauses: dict[str, Pause] = {}
        # The batches whose lines wait for each model.
        self._batches: dict[str, list[Batch]] = {}
        self._probes: dict[str, asyncio.Task[bool]] = {}
        self._checks: set[asyncio.Task[None]] = set()

    def __contains__(self, model: object) -> bool:
        return model in self._pauses

    def __iter__(self) -> Iterator[str]:
        return iter(self._pauses)

    def __len__(self) -> int:
        return len(self._pauses)

    def pause(self, model: str, reason: str) -> None:
        """Start no lines for *model* until it is back; *reason* is for the log."""
        if model not in self._pauses:
            _log.warning("model away, lines wait", model=model, reason=reason)
            self._pauses[model] = Pause()

    def check(self, batches: Collection[RunningPart]) -> None:
        """Note which models lines of *batches* wait for, and check those that are due."""
        wanted: defaultdict[str, list[Batch]] = defaultdict(list)
        for running in batches:
            if running.batch.status == "in_progress":
                for model in running.models():
                    wanted[model].append(running.batch)
        self._batches = dict(wanted)
        for model in wanted:
            if self._host.target(model) is None:
                self.pause(model, "it is not served")
        for model in self._pauses.keys() - wanted.keys():
            del self._pauses[model]
        for model, pause in self._pauses.items():
            if pause.due:
                pause.begin_check()
                spawn(self._check(wanted[model][0], model, pause), self._checks)

    async def answers(self, batch: Batch, model: str) -> bool:
        """
        Return whether *model*, which lines of *batch* ask, answers a small request. Several callers share a request.

        If the key of *batch* may not ask it, the service asks with the keys of other batches that have lines for the
        model. If no key may, the result is ``True``: their lines fail before they reach the model.
        """
        probe = self._probes.get(model)
        if probe is None:
            others = [other for other in self._batches.get(model, ()) if other.id != batch.id]
            # In an empty context: it is not part of the line that happens to be the first one.
            probe = contextvars.Context().run(asyncio.create_task, self._probe([batch, *others], model))
            self._probes[model] = probe
            probe.add_done_callback(partial(self._end_probe, model))
        return await asyncio.shield(probe)

    async def close(self) -> None:
        """Stop checking."""
        await cancel(*self._checks, *self._probes.values())

    def _end_probe(self, model: str, _: object) -> None:
        del self._probes[model]

    async def _check(self, batch: Batch, model: str, pause: Pause) -> None:
        back = await self.answers(batch, model) and self._host.target(model) is not None
        if self._pauses.get(model) is not pause:
            return
        if not back:
            pause.extend()
            return
        del self._pauses[model]
        _log.info("model back, lines resume", model=model)
        self._on_return()

    async def _probe(self, batches: Sequence[Batch], model: str) -> bool:
        for batch in batches:
            answers = await self._answers_batch(batch, model)
            if answers is not None:
                return answers
        return True

    async def _answers_batch(self, batch: Batch, model: str) -> bool | None:
        """Return whether *model* answers *batch*; ``None`` if the key of the batch may not ask it."""
        try:
            await self._host.probe(batch, model)
        except errors.ModelNotFound as error:
            if error.hidden:
                return None
            return False
        except _OF_THE_KEY:
            return None
        except (errors.InvalidRequest, errors.Overloaded, errors.ServiceOverloaded):
            # A model that refuses a request is not away.
            return True
        except ServiceError:
            return False
        except Exception:  # noqa: BLE001 - a bug of an adapter shows nothing about its model
            _log.exception("adapter failed to probe a model", model=model)
        return True
