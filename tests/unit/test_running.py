"""One run of a generation, in front of a Triton whose moments the test chooses."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest.mock import MagicMock, Mock

from triton_openai.background import Background
from triton_openai.config.tree import TritonSettings
from triton_openai.generation import Generation, Sampling
from triton_openai.running import Run
from triton_openai.time_limits import TimeLimits


class SlowToOpen:
    """A client whose streams are opened when the test says so, also for who has been cancelled meanwhile."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.opens = asyncio.Event()
        self.opened = Mock()

    async def stream(self, request: Any) -> Any:
        self.asked.set()
        while not self.opens.is_set():
            # As asyncio.wait_for does, before Python 3.12, where the result was there already.
            with contextlib.suppress(asyncio.CancelledError):
                await self.opens.wait()
        return self.opened


async def test_closed_while_the_stream_is_being_opened() -> None:
    """The stream is closed as soon as it is there, and nothing watches it."""
    client = SlowToOpen()
    model = MagicMock(lora_delivery=None)
    model.adapter.capabilities.tokens = False
    model.adapter.encode.return_value = MagicMock(stream=True)
    run = Run(
        model,
        Generation(id="1", prompt="Hello", sampling=Sampling(max_tokens=5)),
        client=client,  # type: ignore[arg-type]
        settings=TritonSettings(),
        limits=TimeLimits(first_token=60, idle=60, total=60),
        background=Background(),
        tokenizer=None,
    )
    task = asyncio.create_task(run.start())
    await client.asked.wait()
    task.cancel()
    run.close()
    client.opens.set()
    await task

    client.opened.close.assert_called_once_with()
    assert run.finished
    assert run._watch is None
