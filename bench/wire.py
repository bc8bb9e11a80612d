"""What is said on the wire: the same request in each protocol, and the counting of tokens in what comes back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bench.messages import CHOICES, Form, Target
from bench.repository import MARK

PROMPT = "Say something."
_TOOL = {
    "name": "note",
    "parameters": {"type": "object", "properties": {"text~": {"type": "string"}}, "required": ["text~"]},
}
_FIELDS: Mapping[Form, Mapping[str, Any]] = {
    "tools": {"tools": [{"type": "function", "function": _TOOL}]},
    "choices": {"n": CHOICES},
    "whole": {"stream": False},
}
# As much as a coding agent sends before anything was said.
_INSTRUCTIONS = "You are a coding agent. " * 2800
_ABOUT = "Runs a command in the user's shell, and returns what it prints. " * 30
_COMMAND = {"type": "object", "properties": {"command": {"type": "string", "description": "It."}}}
_AGENT_TOOLS = [{"name": f"tool_{number}", "description": _ABOUT} for number in range(40)]
_END = b"\r\n0\r\n\r\n"
_OK = b"HTTP/1.1 200 "
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
FLAGS = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")


def http_request(target: Target, model: str, tokens: int, form: Form = "text", more: str = "") -> bytes:
    """Return a whole HTTP request; Triton itself knows no *form*. *more* is for its head, in whole lines."""
    body: dict[str, Any]
    asked = [{"role": "user", "content": PROMPT}]
    if form.endswith("responses"):
        path = "/v1/responses"
        body = {"model": model, "input": asked, "max_output_tokens": tokens, "stream": True, "store": False}
        if form == "agent-responses":
            tools = [{"type": "function", "parameters": _COMMAND, **tool} for tool in _AGENT_TOOLS]
            body |= {"instructions": _INSTRUCTIONS, "tools": tools}
    elif form.endswith("messages"):
        path = "/v1/messages"
        body = {"model": model, "messages": asked, "max_tokens": tokens, "stream": True}
        if form == "agent-messages":
            body |= {"system": _INSTRUCTIONS, "tools": [{"input_schema": _COMMAND, **tool} for tool in _AGENT_TOOLS]}
    elif form == "embeddings":
        path = "/v1/embeddings"
        body = {"model": model, "input": PROMPT}
    elif target.protocol == "chat":
        path = "/v1/chat/completions"
        body = {"model": model, "messages": asked, "max_tokens": tokens, "stream": True, **_FIELDS.get(form, {})}
    else:
        path = f"/v2/models/{model}/generate_stream"
        # What the service asks for as well, so that Triton says the same on each way.
        body = {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps({"max_tokens": tokens})}
        body |= dict.fromkeys(FLAGS, True)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {target.host}\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class AnswerReader:
    """
    Counts the tokens of an HTTP answer and notices its end, without parsing it.

    That is enough because the token's mark is one byte that occurs nowhere else, and because neither a header nor an
    event ends as the last chunk of a chunked body does. A body that is not streamed has its length in the head.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._in_head = True
        self._left: int | None = None
        self.ended = False
        self.uncounted = 0
        # For the message when the answer turns out to be an error.
        self.head = b""

    def feed(self, data: bytes) -> int:
        """Return how many tokens are in *data*. Raises `ValueError` when the answer is not a good one."""
        if self._in_head:
            self.head += data
            if not self.head.startswith(_OK):
                raise ValueError(self.head[:300].decode(errors="replace"))
            head, end, body = self.head.partition(b"\r\n\r\n")
            self._in_head = not end
            length = _LENGTH.search(head)
            if end and length is not None:
                self._left = int(length[1]) - len(body)
                self.ended = not self._left
                return data.count(MARK)
        if self._left is not None:
            self._left -= len(data)
            self.ended = not self._left
        else:
            # Also when the end comes in two pieces.
            if len(data) >= len(_END):
                self._tail = data
            else:
                self._tail = self._tail[-len(_END) :] + data
            self.ended = self._tail.endswith(_END)
        return data.count(MARK)
