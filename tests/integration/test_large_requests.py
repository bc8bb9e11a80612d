"""Requests as large as people send them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json

import pytest

from tests.clients.service import steered
from tests.extended import sample
from tests.faults.event_loop import USUAL, exposed
from tests.triton_fixture import TestTriton
from triton_openai.api.messages.types import MessageParam
from triton_openai.prompts.messages import UserMessage

JSON = {"Content-Type": "application/json"}


@pytest.mark.sampled
async def test_large_requests_are_not_refused(triton: TestTriton) -> None:
    """The limits leave room for what people send; ``make turns`` measures how long it holds the event loop."""
    async with exposed(triton) as proxy:
        for name in sample(list(USUAL), few=5):
            path, body = USUAL[name]()
            answer = await proxy.post(path, body)
            # The stand-ins have short contexts.
            assert answer.status == 200 or "maximum" in answer.error["message"], name


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_messages_are_freed_while_they_are_answered(triton: TestTriton, path: str) -> None:
    """A long chat that is answered takes the memory of its prompt, and no object for each message."""
    texts = ["of this test", "b", steered(text="one two", hang_at=1)]
    kind, name = ("input_text", "input") if path == "/v1/responses" else ("text", "messages")
    # The garbage collector looks at objects that hold others.
    given = [{"role": "user", "content": [{"type": kind, "text": text}]} for text in texts]
    body = {"model": "vllm_model", "stream": True, name: given, **({} if name == "input" else {"max_tokens": 9})}
    async with (
        exposed(triton) as proxy,
        proxy.client.post(path, data=json.dumps(body).encode(), headers=JSON) as answer,
    ):
        while b"one" not in await answer.content.readline():
            pass

        def held() -> list[object]:
            return [
                one
                for one in gc.get_objects()
                if (isinstance(one, MessageParam | UserMessage) or (isinstance(one, dict) and "role" in one))
                and one is not given[0]
                and texts[0] in str(one)
            ]

        # A thread that has made the prompt may hold its arguments for a moment longer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(120):
                while held():  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.01)
        assert [] == held()
