"""Requests as large as people send them."""

from __future__ import annotations

import pytest

from tests.faults.event_loop import LOGPROBS, USUAL, Cases, exposed
from tests.triton_fixture import TestTriton


@pytest.mark.parametrize("cases, transport", [(USUAL, "http"), (LOGPROBS, "both")], ids=["usual", "logprobs"])
async def test_large_requests_are_answered(triton: TestTriton, cases: Cases, transport: str) -> None:
    """None is refused; how long they hold the event loop is measured by ``make turns``."""
    async with exposed(triton, transport) as proxy:
        for name, made in cases.items():
            path, body = made()
            answer = await proxy.post(path, body)
            # The stand-ins have short contexts.
            assert answer.status == 200 or "maximum" in answer.error["message"], name
