"""LiteLLM with the Responses API: ``python litellm_client.py BASE_URL MODEL``."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}


def steered(text: str) -> str:
    """Return a prompt that is answered *text*."""
    return f"Hello <<steer {json.dumps({'text': text})}>>"


def main() -> None:
    """Ask, stream, call a tool and answer it."""
    base, model = sys.argv[1:]
    given: dict[str, Any] = {"model": f"openai/{model}", "api_base": base, "api_key": "none", "num_retries": 0}
    first = litellm.responses(input=steered("one two"), **given)
    assert "one two" == first.output[0].content[0].text
    events = list(litellm.responses(input=steered("three"), stream=True, previous_response_id=first.id, **given))
    assert "response.completed" == events[-1].type, events[-1]
    assert "three" == events[-1].response.output[0].content[0].text
    (call,) = litellm.responses(input=steered(CALL), tools=[TOOL], **given).output
    assert ("get_weather", {"city": "Bonn"}) == (call.name, json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
    asked = [call.model_dump(), output, {"role": "user", "content": steered("It is fine.")}]
    assert "It is fine." == litellm.responses(input=asked, tools=[TOOL], **given).output[0].content[0].text
    print("PASSED")


main()
