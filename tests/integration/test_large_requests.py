"""Requests as large as people send them."""

from __future__ import annotations

from tests.faults.event_loop import USUAL, exposed
from tests.triton_fixture import TestTriton


async def test_large_requests_are_not_refused(triton: TestTriton) -> None:
    """The limits leave room for what people send; ``make turns`` measures how long it holds the event loop."""
    async with exposed(triton) as proxy:
        for name, made in USUAL.items():
            path, body = made()
            answer = await proxy.post(path, body)
            # The stand-ins have short contexts.
            assert answer.status == 200 or "maximum" in answer.error["message"], name
