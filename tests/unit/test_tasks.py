"""Tasks that are cancelled, and their limits of time."""

from __future__ import annotations

import asyncio

import pytest

from triton_openai.tasks import cancel, within


async def turns() -> None:
    """Let everything happen that can happen by now."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("swallows", ["fails", "answers"])
async def test_a_driver_that_takes_a_cancellation_for_its_own(swallows: str) -> None:
    """A failure or an answer in place of the cancellation keeps no task."""

    async def work() -> None:
        async with within(60):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallows == "fails":
                    raise OSError("lost") from None

    task = asyncio.create_task(work())
    await turns()
    await asyncio.wait_for(cancel(task), 120)
    assert task.cancelled()


async def test_what_takes_too_long_or_fails() -> None:
    """Without a cancellation, a time limit and a failure are what they are."""
    with pytest.raises(TimeoutError):
        async with within(0):
            await asyncio.Event().wait()
    with pytest.raises(OSError, match="lost"):
        async with within(60):
            raise OSError("lost")
