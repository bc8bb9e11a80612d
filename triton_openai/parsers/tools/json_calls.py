"""Calls written as JSON objects: ``{"name": "f", "arguments": {…}}``, alone or in an array."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from triton_openai.parsers.reader import SPACE, Malformed, Sink, Step, discard
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.base import MarkedCalls

#: Llama writes the second.
_ARGUMENTS = frozenset({"arguments", "parameters"})
#: What else an object may hold that nothing but its keys shows to be a call.
_ENVELOPE = frozenset({"name", "type", "id"})


class JsonCalls(MarkedCalls):
    """
    One object or an array of them behind each marker, and then :attr:`closing`.

    Arguments go on as the model writes them; a string of JSON, which some models write there, goes on decoded, and null
    or nothing is an empty object. Other keys are ignored.
    """

    #: The marker behind the calls; nothing where there is none.
    closing: ClassVar[str] = ""
    #: What may stand between objects that are not in an array.
    separators: ClassVar[re.Pattern[str]] = SPACE
    #: The keys under which a function's name stands.
    name_keys: ClassVar[frozenset[str]] = frozenset({"name"})

    def _block(self, marker: str) -> Step[None]:
        yield from self._reader.space()
        if (yield from self._reader.next()) == "[":
            yield from self._array()
        else:
            yield from self._objects()
        if self.closing:
            yield from self._reader.space()
            yield from self._close(self.closing)

    def _objects(self) -> Step[None]:
        """Read an object, and further ones where the model put several behind one marker."""
        yield from self._object()
        while True:
            yield from self._reader.run(self.separators, discard)
            if (yield from self._reader.peek()) != "{":
                return
            self._before_call()
            yield from self._object()

    def _array(self) -> Step[None]:
        yield from self._reader.literal("[")
        yield from self._items()

    def _items(self) -> Step[None]:
        """Read an array whose bracket was read already."""
        yield from self._reader.space()
        yield from self._object()
        while True:
            yield from self._reader.space()
            if (yield from self._reader.one_of((",", "]"))) == "]":
                self._behind_call()
                return
            yield from self._reader.space()
            if (yield from self._reader.next()) != "{":
                raise Malformed
            self._before_call()
            yield from self._object()

    def _object(self) -> Step[None]:
        reader = self._reader
        name: str | None = None
        early: list[str] = []
        started = False

        def begin() -> Sink:
            nonlocal started
            if name is None:
                return early.append
            self._start_call(name)
            started = True
            return self._output.arguments

        yield from reader.literal("{")
        while True:
            yield from reader.space()
            key = yield from json_text.decoded_string(reader)
            yield from reader.space()
            yield from reader.literal(":")
            yield from reader.space()
            if key in self.name_keys and name is None:
                name = yield from json_text.decoded_string(reader)
                if early:
                    begin()("".join(early))
            elif key in _ARGUMENTS and not started and not early:
                yield from self._arguments(begin)
            elif self._is_bare and key not in _ENVELOPE:
                raise Malformed
            else:
                yield from json_text.value(reader, discard)
            yield from reader.space()
            following = yield from reader.next()
            if following not in ",}":
                if not started:
                    raise Malformed
                # Qwen 2.5 at times leaves out the last brace.
                break
            reader.take()
            if following == "}":
                break
        if not started:
            if name is None or self._is_bare:
                raise Malformed
            begin()("{}")
        self._behind_call()

    def _arguments(self, begin: Callable[[], Sink]) -> Step[None]:
        """Read the arguments; *begin* says where to, once they are known to be some."""
        first = yield from self._reader.next()
        if first == "{":
            yield from json_text.value(self._reader, begin())
        elif first == '"':
            text = (yield from json_text.decoded_string(self._reader)).strip() or "{}"
            if not json_text.is_object(text):
                raise Malformed
            begin()(text)
        else:
            yield from self._reader.literal("null")
            begin()("{}")
