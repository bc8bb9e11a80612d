"""Models that are away: their lines wait, and small requests find out whether they are back."""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import structlog

from triton_openai import errors
from triton_openai.batches.line_limits import Pause
from triton_openai.batches.running_batch import RunningBatch
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_store import Batch
from triton_openai.tasks import cancel, spawn

_log = structlog.get_logger(__name__)
# Why a batch may not ask: they say nothing of its model.
_OF_THE_KEY = (errors.InvalidApiKey, errors.ApiRestricted, errors.KeyNotSufficient)


class Prober(Protocol):
    """The service whose models lines ask."""

    def target(self, model: str) -> str | None:
        """Return the Triton model behind the name *model*; ``None`` while it is not served."""

    async def probe(self, batch: Batch, model: str) -> None:
        """
        Read the list of models again, and ask *model* for the least that it does.

        Raises :class:`ServiceError` unless it answers.
        """


class _MayNotAsk(Exception):
    """The key of a batch may not ask the model, which says nothing of the model."""


class AwayModels:
    """
    The models of *host* that are away, by the names that lines have for them.

    *found* is called when one is back.
    """

    def __init__(self, host: Prober, found: Callable[[], None]) -> None:
        self._host = host
        self._found = found
        self._pauses: dict[str, Pause] = {}
        # The batches whose lines wait for each model.
        self._batches: dict[str, list[Batch]] = {}
        self._probes: dict[str, asyncio.Task[bool]] = {}
        self._looks: set[asyncio.Task[None]] = set()

    def __contains__(self, model: object) -> bool:
        return model in self._pauses

    def __len__(self) -> int:
        return len(self._pauses)

    def pause(self, model: str, reason: str) -> None:
        """Begin no lines for *model* until it is found; *reason* is for the log."""
        if model not in self._pauses:
            _log.warning("a model is away: lines of batches wait for it", model=model, reason=reason)
            self._pauses[model] = Pause()

    def look(self, batches: Collection[RunningBatch]) -> None:
        """Look for the models that lines of *batches* wait for, those that are due."""
        wanted: defaultdict[str, list[Batch]] = defaultdict(list)
        for running in batches:
            if running.begins_lines:
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
                pause.look()
                spawn(self._look(wanted[model][0], model, pause), self._looks)

    async def answers(self, batch: Batch, model: str) -> bool:
        """
        Return whether *model*, which lines of *batch* ask, answers a small request. Several ask at the same time.

        If the key of *batch* may not ask it, those of other batches with lines for the model do. If none may, the
        answer is ``True``: their lines fail before they reach the model.
        """
        probe = self._probes.get(model)
        if probe is None:
            others = [other for other in self._batches.get(model, ()) if other.id != batch.id]
            # Without the context of the line that happens to be the first one.
            probe = contextvars.Context().run(asyncio.create_task, self._answers([batch, *others], model))
            self._probes[model] = probe
            probe.add_done_callback(partial(self._forget, model))
        return await asyncio.shield(probe)

    async def close(self) -> None:
        """Stop looking."""
        await cancel(*self._looks, *self._probes.values())

    def _forget(self, model: str, _: object) -> None:
        del self._probes[model]

    async def _look(self, batch: Batch, model: str, pause: Pause) -> None:
        there = await self.answers(batch, model) and self._host.target(model) is not None
        if self._pauses.get(model) is not pause:
            return
        if not there:
            pause.go_on()
            return
        del self._pauses[model]
        _log.info("a model is back: lines of batches go on", model=model)
        self._found()

    async def _answers(self, batches: Sequence[Batch], model: str) -> bool:
        for batch in batches:
            with suppress(_MayNotAsk):
                return await self._answers_to(batch, model)
        return True

    async def _answers_to(self, batch: Batch, model: str) -> bool:
        """Return whether *model* answers *batch*. Raises :class:`_MayNotAsk` if the key of the batch may not ask it."""
        try:
            await self._host.probe(batch, model)
        except errors.ModelNotFound as error:
            if error.hidden:
                raise _MayNotAsk from error
            return False
        except _OF_THE_KEY as error:
            raise _MayNotAsk from error
        except (errors.InvalidRequest, errors.Overloaded, errors.ServiceOverloaded):
            # What refuses a request is there.
            return True
        except ServiceError:
            return False
        except Exception:  # noqa: BLE001 - an adapter's mistake says nothing of its model
            _log.exception("an adapter failed to ask a model", model=model)
        return True
