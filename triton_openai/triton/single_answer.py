"""The one answer of a model that answers once, in the form of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from triton_openai.errors import ServiceError
from triton_openai.triton.client import TritonClient
from triton_openai.triton.tensors import InferRequest, InferResponse


class SingleAnswer:
    """The one answer of a model that is not decoupled, as a stream of one response."""

    def __init__(self, client: TritonClient, request: InferRequest) -> None:
        self._task: asyncio.Task[InferResponse] | None = asyncio.create_task(client.infer(request))
        self._error: ServiceError | None = None

    async def read(self) -> Sequence[InferResponse]:
        """Return the answer, then nothing."""
        task = self._task
        if task is None:
            return ()
        try:
            # Waited for and not awaited: cancelling this reader, or the task by abort(), must not look the same.
            await asyncio.wait({task})
        finally:
            self.close()
        if self._error is not None:
            raise self._error
        return (task.result(),)

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error*."""
        self._error = error
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Cancel the call unless it has ended."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
