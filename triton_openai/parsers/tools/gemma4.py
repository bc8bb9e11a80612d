"""
Gemma 4: ``<|tool_call>call:f{k:<|"|>text<|"|>,n:1}<tool_call|>``, repeated for each call.

FunctionGemma writes the same between ``<start_function_call>`` and ``<end_function_call>``, with ``<escape>`` for
quotes.
"""

from __future__ import annotations

import re
from typing import ClassVar

from triton_openai.parsers.markers import Markers, markers
from triton_openai.parsers.reader import Ended, Malformed, Sink, Step
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.base import MarkedCalls
from triton_openai.parsers.tools.json_text import escape, quote

_KEY = re.compile(r"[^\s:,{}\[\]<>\"]*")
_BARE = re.compile(r"[^,{}\[\]<>\"]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LONGEST = 1_000
#: Each level is a generator within a generator.
_DEEPEST = 50


class Gemma4(MarkedCalls):
    """
    As the chat templates of Google's Gemma 4 write calls: keys without quotes, strings between quotes of their own, and
    objects, arrays, numbers and words as in JSON. A word that JSON does not know is a string.
    """

    special_tokens = True
    markers = Markers("<|tool_call>")
    closing: ClassVar[str] = "<tool_call|>"
    quotes: ClassVar[str] = '<|"|>'

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        yield from reader.literal("call:")
        name = yield from self._name()
        yield from reader.literal("{")
        self._start_call(name)
        yield from self._entries(self._output.arguments, 0)
        self._behind_call()
        yield from reader.space()
        yield from self._close(self.closing)

    def _entries(self, sink: Sink, depth: int) -> Step[None]:
        """Read an object behind its opening brace."""
        sink("{")
        separator = ""
        while not (yield from self._ends("}", separator)):
            key = yield from self._key()
            yield from self._reader.space()
            yield from self._reader.literal(":")
            sink(f"{separator}{quote(key)}: ")
            yield from self._value(sink, depth + 1)
            separator = ", "
        sink("}")

    def _items(self, sink: Sink, depth: int) -> Step[None]:
        """Read an array behind its opening bracket."""
        sink("[")
        separator = ""
        while not (yield from self._ends("]", separator)):
            sink(separator)
            yield from self._value(sink, depth + 1)
            separator = ", "
        sink("]")

    def _ends(self, closing: str, separator: str) -> Step[bool]:
        """Read up to the next item, or past *closing* and a comma in front of it. Say whether it was closed."""
        yield from self._reader.space()
        if (yield from self._reader.optional(closing)):
            return True
        if not separator:
            return False
        yield from self._reader.literal(",")
        yield from self._reader.space()
        return (yield from self._reader.optional(closing))

    def _key(self) -> Step[str]:
        if (yield from self._reader.next()) == self.quotes[0]:
            parts: list[str] = []
            yield from self._quoted(parts.append)
            return "".join(parts)
        key = yield from self._reader.collect(_KEY, _LONGEST)
        if not key:
            raise Malformed
        return key

    def _value(self, sink: Sink, depth: int) -> Step[None]:
        if depth > _DEEPEST:
            raise Malformed
        reader = self._reader
        yield from reader.space()
        first = yield from reader.next()
        if first == self.quotes[0]:
            sink('"')
            yield from self._quoted(lambda text: sink(escape(text)))
            sink('"')
        elif first == '"':
            yield from json_text.string(reader, sink)
        elif first in "{[":
            reader.take()
            yield from (self._entries(sink, depth) if first == "{" else self._items(sink, depth))
        else:
            text = yield from reader.collect(_BARE, _LONGEST)
            # Only what follows shows that it ends here.
            yield from reader.next()
            word = text.strip()
            if not word:
                raise Malformed
            sink(word if _SCALAR.fullmatch(word) else _WORDS.get(word) or quote(word))

    def _quoted(self, sink: Sink) -> Step[None]:
        yield from self._reader.literal(self.quotes)
        if not (yield from self._reader.until(markers(self.quotes), sink)):
            raise Ended


class FunctionGemma(Gemma4):
    """As Google's FunctionGemma writes calls."""

    markers = Markers("<start_function_call>")
    closing = "<end_function_call>"
    quotes = "<escape>"
