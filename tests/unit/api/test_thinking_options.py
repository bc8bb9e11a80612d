"""OpenRouter's ``reasoning``, beside the other names of the same."""

from __future__ import annotations

from typing import Any

from tests.cases import every_case
from tests.conformance.calls import steered
from tests.faces import MODEL, running
from triton_openai.api.conversation import ChatOptions


@every_case(
    "fields, wanted",
    [
        ({"reasoning": {"effort": "low", "enabled": True}}, {"think": "low"}),
        ({"reasoning": {"enabled": False}}, {"think": False}),
        ({"think": False, "reasoning": {"max_tokens": 5}}, {"think": False, "thinking_budget": 5}),
        ({"think": "high", "reasoning": {"effort": "low"}}, {"think": "high"}),
        ({"reasoning": {}}, {}),
    ],
)
def test_switches(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    """What a client says on its own name wins."""
    assert wanted == ChatOptions(model="m", **fields).switches


@every_case("stream", [False, True])
async def test_reasoning_that_is_excluded(stream: bool) -> None:
    """The model thinks, and the client does not see it."""
    async with running(chat_template="chatml", reasoning_parser="deepseek_r1") as faces:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": steered("", text="<think>Hidden.</think>Said.")}],
            "max_tokens": 50,
            "stream": stream,
        }
        shown = await faces.post("/v1/chat/completions", body)
        excluded = await faces.post("/v1/chat/completions", {**body, "reasoning": {"exclude": True}})

    assert b"reasoning_content" in shown.body
    assert b"reasoning_content" not in excluded.body
    assert 200 == excluded.status
