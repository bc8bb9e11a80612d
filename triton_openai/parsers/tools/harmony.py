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

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Ended, Malformed, Step
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.base import CallGrammar

_ALL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_BETWEEN = Markers(*_ALL)
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
BODY_END = Markers(*_ENDS)
_HEADER_TEXT = re.compile(r"[^<]*")
_LONGEST_HEADER = 400
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony(CallGrammar):
    """
    Everything in one pass: ``analysis`` is reasoning, a message to a function is a call, and the rest is content.

    What is said to a tool that runs in the model's server (``python``, ``browser``) is reasoning: no client can answer.
    """

    special_tokens = True
    _has_reasoned = False

    def _text(self) -> Step[None]:
        yield from self._messages((yield from self._begins()))

    def _begins(self) -> Step[str]:
        """Return the beginning of a header that starts with the recipient, since the prompt ends within the header."""
        reader = self._reader
        reader.keep()
        try:
            # One space, or none where the prompt brought it.
            yield from reader.optional(" ")
            yield from reader.literal("to=")
        except (Malformed, Ended):
            self._output.content(reader.release())
            return ""
        return reader.release()

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
        self._before_call(marker)
        try:
            header = yield from self._header(marker)
        except (Malformed, Ended):
            self._output.content(self._reader.release())
            return ""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._is_function(recipient[1]):
            return (yield from self._call(recipient[1].removeprefix("functions.")))
        self._reader.release()
        if recipient is not None or (channel is not None and channel[1] == "analysis"):
            return (yield from self._reasoning())
        return (yield from self._reader.until(BODY_END, self._output.content))

    def _is_function(self, recipient: str) -> bool:
        """Return whether the client runs *recipient*."""
        return recipient.startswith("functions.") or recipient in self.tools

    def _header(self, marker: str) -> Step[str]:
        header = marker
        while True:
            header += yield from self._reader.collect(_HEADER_TEXT, _LONGEST_HEADER)
            marker = yield from self._reader.literal(*_ALL)
            if marker == "<|message|>":
                return header
            if marker not in {"<|channel|>", "<|constrain|>"} or len(header) > _LONGEST_HEADER:
                raise Malformed
            header += marker

    def _reasoning(self) -> Step[str]:
        if self._has_reasoned:
            self._output.reasoning("\n")
        self._has_reasoned = True
        return (yield from self._reader.until(BODY_END, self._output.reasoning))

    def _call(self, name: str) -> Step[str]:
        """Read the arguments of a call of *name*; return the marker that ended the message."""
        reader = self._reader
        try:
            yield from reader.space()
            if (yield from reader.next()) == "{":
                self._start_call(name)
                yield from json_text.value(reader, self._output.arguments)
                self._in_call = False
            else:
                # No arguments at all: the end of the message follows.
                end = yield from reader.literal(*_ENDS)
                self._start_call(name)
                self._output.arguments("{}")
                self._in_call = False
                return end
        except Malformed:
            self._in_call = False
            self._output.content(reader.release())
        except Ended:
            self._output.content(reader.release())
        return (yield from reader.until(BODY_END, self._output.content))
