"""An agent whose model slips in each turn: twenty turns, through every API for chats, without a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cases import every_case
from tests.conformance.calls import steered
from tests.faces import MODEL, Faces, running
from tests.proxy_fixture import Answer
from tests.slipping import slipping_calls

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "everything.jinja"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
TURNS = 20


def arguments_in(turn: int) -> dict[str, str]:
    """Return the arguments of the call in *turn*. The schema does not have the second: models write it all the same."""
    return {"cmd": f"cat note{turn + 1}.txt", "description": "Read the note"}


def order(turn: int) -> str:
    """Return what a tool says in the turn before *turn*: the model writes its call with another slip each time."""
    if turn == TURNS:
        return steered(f"Note {turn} says:", text="All notes are read.")
    return steered(f"Note {turn} says:", text=slipping_calls("exec", arguments_in(turn))[turn])


def deltas(answer: Answer) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    lines = answer.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class Chat:
    """The conversation as a client of chat completions keeps it."""

    def __init__(self, faces: Faces, *, stream: bool) -> None:
        self._faces = faces
        self._stream = stream
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": order(0)}]
        function = {"name": "exec", "description": "Run a command.", "parameters": SCHEMA}
        self._tools = [{"type": "function", "function": function}]

    async def turn(self) -> tuple[str | None, str]:
        """Return the call of the next turn, and its text."""
        body = {"model": MODEL, "messages": self._messages, "tools": self._tools, "stream": self._stream}
        answer = await self._faces.post("/v1/chat/completions", body)
        assert 200 == answer.status, answer.body
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        if not self._stream:
            message |= {"tool_calls": [], **answer.json["choices"][0]["message"]}
        for chunk in deltas(answer):
            for choice in chunk["choices"]:
                message["content"] += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    if "id" in call:
                        message["tool_calls"].append(call)
                    else:
                        message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        self._messages.append(message)
        if not message["tool_calls"]:
            return None, message["content"]
        (call,) = message["tool_calls"]
        self._id = call["id"]
        return call["function"]["arguments"], message["content"] or ""

    def tell(self, result: str) -> None:
        """Add the result of the call."""
        self._messages.append({"role": "tool", "tool_call_id": self._id, "content": result})


class Responses(Chat):
    """The conversation as a client of Responses keeps it."""

    def __init__(self, faces: Faces, *, stream: bool) -> None:
        super().__init__(faces, stream=stream)
        self._tools = [{"type": "function", "name": "exec", "parameters": SCHEMA}]

    async def turn(self) -> tuple[str | None, str]:
        body = {"model": MODEL, "input": self._messages, "tools": self._tools, "stream": self._stream, "store": False}
        answer = await self._faces.post("/v1/responses", body)
        assert 200 == answer.status, answer.body
        response = deltas(answer)[-1]["response"] if self._stream else answer.json
        assert "completed" == response["status"], response
        self._messages += response["output"]
        texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not calls:
            return None, "".join(texts)
        (call,) = calls
        self._id = call["call_id"]
        return call["arguments"], "".join(texts)

    def tell(self, result: str) -> None:
        self._messages.append({"type": "function_call_output", "call_id": self._id, "output": result})


class Messages(Chat):
    """The conversation as a client of Messages keeps it."""

    def __init__(self, faces: Faces, *, stream: bool) -> None:
        super().__init__(faces, stream=stream)
        self._tools = [{"name": "exec", "input_schema": SCHEMA}]

    async def turn(self) -> tuple[str | None, str]:
        body = {"model": MODEL, "messages": self._messages, "tools": self._tools, "stream": self._stream}
        answer = await self._faces.post("/v1/messages", {**body, "max_tokens": 500})
        assert 200 == answer.status, answer.body
        content: list[dict[str, Any]] = []
        if not self._stream:
            content = answer.json["content"]
        for event in deltas(answer):
            if event["type"] == "content_block_start":
                content.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                content[-1]["json"] += delta.get("partial_json", "")
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        content[-1][name] = content[-1].get(name, "") + delta[name]
        for block in content:
            if text := block.pop("json", ""):
                block["input"] = json.loads(text)
        self._messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        text = "".join([block["text"] for block in content if block["type"] == "text"])
        if not calls:
            return None, text
        (call,) = calls
        self._id = call["id"]
        return json.dumps(call["input"]), text

    def tell(self, result: str) -> None:
        block = {"type": "tool_result", "tool_use_id": self._id, "content": result}
        self._messages.append({"role": "user", "content": [block]})


@every_case("stream", [False, True])
@every_case("client", [Chat, Responses, Messages])
async def test_twenty_turns(client: type[Chat], stream: bool) -> None:
    """Each slip is the call that it means, and what came before is taken as history."""
    options = {"chat_template": str(TEMPLATE), "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with running(**options, max_model_len=8000) as faces:
        session = client(faces, stream=stream)
        for turn in range(TURNS):
            arguments, _ = await session.turn()
            assert arguments is not None, f"no call in turn {turn}: {order(turn)}"
            assert arguments_in(turn) == json.loads(arguments)
            session.tell(order(turn + 1))
        assert (None, "All notes are read.") == await session.turn()
