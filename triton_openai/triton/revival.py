"""
Has Triton load a model again whose process has died.

Triton's Python backend does not start a process again that was killed, and answers nothing for it. It loads the model
again if it is asked to, where its model control is explicit (seen with release 2.51).
"""

from __future__ import annotations

import asyncio

import structlog

from triton_openai.errors import ServiceError
from triton_openai.tasks import spawn
from triton_openai.triton.client import TritonClient
from triton_openai.triton.reloading import reload_lock

_log = structlog.get_logger(__name__)

# Seconds after a model was loaded in which a process may still have an older list of models. A request that finds no
# model has the list read again, at most twice a second.
_LISTED_SECONDS = 1.0


class Revivals:
    """The models of one Triton that are being loaded again. Of the processes of a machine one does it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._models: set[str] = set()

    def start(self, client: TritonClient, model: str) -> None:
        """Have Triton load *model* again, unless that is under way."""
        if model not in self._models:
            self._models.add(model)
            spawn(self._load(client, model), self._tasks)

    async def _load(self, client: TritonClient, model: str) -> None:
        try:
            with reload_lock(model) as first:
                if not first:
                    return
                _log.error("a model's process has died: Triton is asked to load the model again", model=model)
                # Triton loads nothing whose files are as they were, unless it has been unloaded.
                await client.unload_model(model)
                await client.load_model(model)
                _log.info("the model was loaded again", model=model)
                await asyncio.sleep(_LISTED_SECONDS)
        except ServiceError as error:
            advice = "restart Triton, or start it with --model-control-mode=explicit"
            _log.error("the model cannot be loaded again", model=model, reason=error.reason, advice=advice)
        except OSError as error:
            _log.error("the model is not loaded again: its lock cannot be opened", model=model, reason=str(error))
        finally:
            self._models.discard(model)

    def close(self) -> None:
        """Stop waiting for Triton."""
        for task in self._tasks:
            task.cancel()
