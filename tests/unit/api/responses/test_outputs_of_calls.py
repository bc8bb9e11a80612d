"""Results of calls that nobody made: refused where a request goes on from a response, taken in a whole history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conformance.calls import steered
from tests.faces import MODEL, running

TEMPLATE = Path(__file__).parents[3] / "fixtures" / "everything.jinja"
PATH = "/v1/responses"


async def test_outputs_of_calls() -> None:
    """An output after a response belongs to a call of the response, or of the request itself."""
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    orphan = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "x"}
    last = {"role": "user", "content": steered("Go on.", text="done")}
    async with running(chat_template=str(TEMPLATE), tool_call_parser="hermes") as faces:
        made = await faces.post(PATH, {"model": MODEL, "input": steered("Look.", text=call), "tools": tools})
        after = {"model": MODEL, "tools": tools, "previous_response_id": made.json["id"]}

        refused = await faces.post(PATH, {**after, "input": [last, orphan]})
        assert (400, "input[1].call_id") == (refused.status, refused.json["error"]["param"])
        assert "No tool call found for function call output" in refused.json["error"]["message"]

        (item,) = [item for item in made.json["output"] if item["type"] == "function_call"]
        own = {"type": "function_call", "call_id": "call_own", "name": "look", "arguments": "{}"}
        for items in (
            [{**orphan, "call_id": item["call_id"]}, last],
            [own, {**orphan, "call_id": "call_own"}, last],
        ):
            answer = await faces.post(PATH, {**after, "input": items})
            assert 200 == answer.status, answer.body
        whole = await faces.post(PATH, {"model": MODEL, "input": [orphan, last]})
        assert 200 == whole.status, whole.body


async def test_call_ids_of_other_types() -> None:
    """A call whose id is no text is refused, wherever its id is looked for."""
    call = {"type": "function_call", "name": "look", "arguments": "{}"}
    last = {"role": "user", "content": steered("Go on.", text="done")}
    async with running() as faces:
        made = await faces.post(PATH, {"model": MODEL, "input": steered("Look.", text="seen")})
        for after in ({}, {"previous_response_id": made.json["id"]}):
            for status in ("completed", "incomplete"):
                ids: tuple[Any, ...] = ([], {}, 1, None)
                for call_id in ids:
                    items = [{**call, "status": status, "call_id": call_id}, last]
                    answer = await faces.post(PATH, {"model": MODEL, "input": items, **after})
                    assert (400, "input[0].call_id") == (answer.status, answer.json["error"]["param"]), call_id
