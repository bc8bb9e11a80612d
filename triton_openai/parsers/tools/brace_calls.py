"""Calls with braces: ``call:f{k:<|"|>text<|"|>,n:1}``, as Gemma 4 and FunctionGemma write them."""

from __future__ import annotations

import re
from typing import ClassVar

from triton_openai.parsers.reader import Ended, Malformed, Reader, Sink, Step, markers
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.json_text import dump
from triton_openai.parsers.tools.literals import Literals
from triton_openai.parsers.tools.tool_parser import MarkedCalls

_KEY = re.compile(r"[^\s:,{}\[\]<>\"]*")
_BARE = re.compile(r"[^,{}\[\]<>\"']*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_NAME = 1_000


class BraceCalls(MarkedCalls):
    """
    Keys without quotes, strings between quotes of their own, and objects, arrays, numbers and words as in JSON.
    """

    bare_names = True
    quote: ClassVar[str]
    #: What stands before the name.
    name_start: ClassVar[str] = "call:"

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        if self.name_start:
            yield from reader.token(self.name_start)
        else:
            yield from reader.space()
        name = yield from self._name()
        yield from reader.literal("{")
        self._start_call(name)
        output = self._output
        values = _Values(reader, self.quote)
        yield from values.members(output.arguments, output.arguments_to_confirm, types=self._types)
        self._end_call()
        if self.closing:
            yield from self._close(self.closing)


class _Values(Literals):
    """The values of a call, with a *quote* around strings. A word that JSON does not know is a string."""

    def __init__(self, reader: Reader, quote: str) -> None:
        super().__init__(reader)
        self._quote = quote
        self.quotes = quote[0]

    def _string(self, sink: Sink) -> Step[None]:
        yield from self._reader.literal(self._quote)
        if not (yield from self._reader.until(markers(self._quote), sink, drops_begun=True)):
            raise Ended

    def _bare_key(self, sink: Sink) -> Step[None]:
        key = yield from self._reader.collect(_KEY, _MAX_NAME)
        if not key:
            raise Malformed
        sink(key)

    def _bare(self, first: str, sink: Sink) -> Step[None]:
        if first == '"':
            yield from json_text.string(self._reader, sink)
            return
        text = yield from self._reader.collect(_BARE, _MAX_NAME)
        # Only what follows shows that it ends here.
        yield from self._reader.next()
        word = text.strip()
        if not word:
            raise Malformed
        if json_text.is_scalar(word):
            sink(word)
        else:
            sink(_WORDS.get(word) or dump(word))
