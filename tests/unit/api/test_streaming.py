"""Streams whose moments the test chooses."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

import pytest

from triton_openai.api.streaming import stream
from triton_openai.errors import UpstreamTimeout


async def test_a_limit_that_ends_while_the_stream_is_being_opened() -> None:
    """It holds from the beginning: there is nothing to abort yet, and the client need not wait for that."""
    run = MagicMock()
    run.start = asyncio.Event().wait

    with pytest.raises(UpstreamTimeout):
        await asyncio.wait_for(stream(MagicMock(), [run], MagicMock(), heartbeat=60, timeout=0.01), 10)

    run.close.assert_called_once_with()
