"""
gpt-oss, as OpenAI's "harmony response format" has it: messages with a header, each on a channel::

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

The prompt ends with ``<|start|>assistant``, so that the text begins inside of a header. The recipient may stand in
front of the channel too: then it is the first of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from triton_openai.parsers.reader import Malformed, Markers, Step, discard
from triton_openai.parsers.reasoning import ReasoningGrammar
from triton_openai.parsers.thinking_meter import ThinkingMeter
from triton_openai.parsers.tools import names
from triton_openai.parsers.tools.tags import HEADER_TEXT, MAX_HEADER, RECIPIENT
from triton_openai.parsers.tools.tool_parser import CallGrammar

_ALL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_BETWEEN = Markers(*_ALL)
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
#: The model may begin its next message without ending this one.
_BODY_ENDS = (*_ENDS, "<|channel|>")
_BODY_END = Markers(*_BODY_ENDS)
_CLOSERS = re.compile(r"[\s}\])]*")
#: The tools of the model's server, as the format names them.
_SERVER_TOOLS = frozenset({"python", "browser", "container"})
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(CallGrammar):
    """
    Everything in one pass: ``analysis`` is reasoning, a message to a function is a call, and the rest is content.

    What is said to a tool that runs in the model's server (``python``, ``browser``) is reasoning: no client can answer.
    """

    special_tokens = True
    openings = ("<|start|>", "<|channel|>")
    _has_reasoned = False

    def _text(self) -> Step[None]:
        marker = yield from self._begins()
        yield from self._messages(marker)

    def _begins(self) -> Step[str]:
        """Return the beginning of a header that starts with the recipient, since the prompt ends within the header."""
        # One space, or none where the prompt brought it.
        recipient = self._reader.literal("to=", " to=")
        return (yield from self._reader.attempt(recipient, self._output.content)) or ""

    def _messages(self, marker: str) -> Step[None]:
        """Read messages; *marker* is the last one that was read."""
        while True:
            if marker in {"<|start|>", "<|channel|>", "to=", " to="}:
                marker = yield from self._message(marker)
                continue
            marker = yield from self._reader.until(_BETWEEN, self._output.content)
            if not marker:
                return

    def _message(self, marker: str) -> Step[str]:
        """Read a message whose header begins with *marker*; return the marker that ended it."""
        header = yield from self._reader.attempt(self._header(marker), self._output.content, marker)
        if header is None:
            return ""
        channel = _CHANNEL.search(header)
        recipient = RECIPIENT.search(header)
        if recipient is not None and self._is_function(recipient[1]):
            return (yield from self._call(recipient[1].removeprefix("functions."), header))
        if recipient is not None or (channel is not None and channel[1] == "analysis"):
            return (yield from self._reasoning())
        return (yield from self._reader.until(_BODY_END, self._output.content))

    def _is_function(self, recipient: str) -> bool:
        """Return whether the client runs *recipient*."""
        return recipient.startswith("functions.") or names.resolve(recipient, self.tools) is not None

    def _header(self, marker: str) -> Step[str]:
        header = marker
        while True:
            header += yield from self._reader.collect(HEADER_TEXT, MAX_HEADER)
            marker = yield from self._reader.literal(*_ALL)
            if marker == "<|message|>":
                return header + marker
            if marker not in {"<|channel|>", "<|constrain|>"} or len(header) > MAX_HEADER:
                raise Malformed
            header += marker

    def _reasoning(self) -> Step[str]:
        if self._has_reasoned:
            self._output.reasoning("\n")
        self._has_reasoned = True
        return (yield from self._thinking())

    def _thinking(self) -> Step[str]:
        """Read the body of a message that is reasoning; return the marker that ended it."""
        return (yield from self._reader.until(_BODY_END, self._output.reasoning))

    def _call(self, name: str, header: str) -> Step[str]:
        """Read the call of *name* after its *header*; return the marker that ended the message."""
        end = yield from self._attempt(self._arguments(name), header)
        if self._output.is_after_call:
            # Brackets too many
            yield from self._reader.run(_CLOSERS, discard)
        return end or (yield from self._reader.until(_BODY_END, self._output.content))

    def _arguments(self, name: str) -> Step[str]:
        """Read the arguments of a call; where there are none, return the marker that ended the message."""
        yield from self._reader.space()
        if (yield from self._reader.next()) == "{":
            yield from self._json_call(name)
            return ""
        end = yield from self._reader.literal(*_ENDS)
        self._start_call(name)
        self._output.arguments_to_confirm("{}")
        self._end_call()
        return end


class HarmonyReasoning(Harmony, ReasoningGrammar):
    """
    Harmony's ``analysis`` as reasoning, its other messages as content.

    A message to a function passes as content with its markup, exactly as the model wrote it: the tool parser
    reads it next, or, where the request has no tools, the client sees it.
    """

    def __init__(self, *, inside: bool | None = None) -> None:
        super().__init__()
        self._inside = bool(inside)

    @classmethod
    def inside_after(cls, prompt: str) -> bool | None:
        """Return whether *prompt* ends with the header of an analysis."""
        if prompt.endswith("<|channel|>analysis<|message|>"):
            return True
        return None

    @classmethod
    def meter(cls, prompt: str, calls: Sequence[str]) -> ThinkingMeter:
        ends = (*_BODY_ENDS, *[text for text in calls if text not in _BODY_ENDS])
        inside = bool(cls.inside_after(prompt))
        return ThinkingMeter(("<|channel|>analysis<|message|>",), ends, inside=inside, anywhere=True)

    @classmethod
    def ending(cls, *, calls: bool) -> str:
        if calls:
            # A call, or text before it: the model says which.
            return "<|end|><|start|>assistant<|channel|>commentary"
        return "<|end|><|start|>assistant<|channel|>final<|message|>"

    def _text(self) -> Step[None]:
        if self._inside:
            marker = yield from self._reasoning()
        else:
            marker = yield from self._begins()
        yield from self._messages(marker)

    def _thinking(self) -> Step[str]:
        return (yield from self._read_thinking(_BODY_ENDS, self._output.reasoning))

    def _is_function(self, recipient: str) -> bool:
        # The request's tools are not known here: the tool parser decides about what is not the server's for certain.
        return recipient.partition(".")[0] not in _SERVER_TOOLS

    def _call(self, name: str, header: str) -> Step[str]:
        self._output.content(header)
        end = yield from self._reader.until(_BODY_END, self._output.content)
        # The next message's beginning is not the end of this one.
        if end not in ("<|start|>", "<|channel|>"):
            self._output.content(end)
        return end
