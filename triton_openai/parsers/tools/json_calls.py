"""Calls written as JSON objects, ``{"name": "f", "arguments": {…}}``, alone or in an array."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

from triton_openai.parsers.reader import Malformed, Markers, Sink, Step, discard
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.argument_types import ArgumentTypes
from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tool_parser import ListedCalls

#: Llama writes the second.
_ARGUMENTS = frozenset({"arguments", "parameters"})
#: What else an object may hold that nothing but its keys shows to be a call.
_ENVELOPE = frozenset({"name", "type", "id"})
#: What may stand beside a name without arguments.
_NO_ARGUMENTS = frozenset({*_ENVELOPE, "index", "call_id", "tool_call_id"})
_ID = re.compile(r"[A-Za-z0-9]*")


class JsonCalls(ListedCalls):
    """
    Objects, or an array of them.

    Arguments go on as the model writes them; a string of JSON, which some models write there, goes on decoded, and null
    or nothing is an empty object. Other keys are ignored.
    """

    begins = re.compile(r"\{")
    #: The keys of a function's name.
    name_keys: ClassVar[Collection[str]] = ("name",)
    #: Whether the name is the key of the arguments.
    name_is_key: ClassVar[bool] = False
    #: Whether the marker contains the bracket of the array.
    opens_list: ClassVar[bool] = False
    #: What may follow, by the opening marker; ``*`` stands for any.
    optional_close: ClassVar[Mapping[str, str]] = {}

    def _block(self, marker: str) -> Step[None]:
        if self.opens_list and marker:
            yield from self._list()
            return
        yield from super()._block(marker)
        closing = self.optional_close.get(marker, self.optional_close.get("*"))
        if closing is not None and marker:
            yield from self._reader.space()
            if (yield from self._reader.peek()) == closing[0]:
                yield from self._close(closing)

    def _keyed_call(self) -> Step[None]:
        """Read a call whose name is the key of its arguments."""
        reader = self._reader
        yield from reader.literal("{")
        yield from reader.space()
        name = yield from json_text.decoded_string(reader)
        yield from reader.token(":")
        yield from self._json_call(name)
        yield from reader.token("}")
        self._end_call()

    def _call(self) -> Step[None]:
        if self.name_is_key:
            yield from self._keyed_call()
            return
        reader = self._reader
        name: str | None = None
        early: list[str] = []
        others: list[str] = []
        started = False

        def begin() -> tuple[Sink, Sink, ArgumentTypes | None]:
            """Return where the arguments go, and the ends of their values, and what converts them."""
            nonlocal started
            if name is None:
                return early.append, early.append, None
            self._start_call(name)
            started = True
            return self._output.arguments, self._output.arguments_to_confirm, self._types

        def whole(text: str) -> None:
            """Take arguments that were read as a whole."""
            _, ends, types = begin()
            if types is not None:
                text = types.object(text)
            ends(text)

        yield from reader.literal("{")
        while True:
            yield from reader.space()
            key = yield from json_text.decoded_string(reader)
            yield from reader.token(":")
            yield from reader.space()
            if key in self.name_keys and name is None:
                name = yield from json_text.decoded_string(reader)
                self._named = name, None
                if early:
                    whole("".join(early))
            elif key in _ARGUMENTS and not started and not early:
                yield from self._arguments(begin, whole)
            elif self._is_bare and not started and key not in _ENVELOPE:
                raise Malformed
            else:
                others.append(key)
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
            if name is None or self._is_bare or self._may_be_arguments(name, others):
                raise Malformed
            whole("{}")
        self._end_call()

    def _may_be_arguments(self, name: str, keys: Sequence[str]) -> bool:
        """Return whether what stands under *keys* beside *name*, without arguments, may be arguments of that tool."""
        parameters = Parameters(self.tools.get(name))
        if not parameters.names:
            return False
        return not _NO_ARGUMENTS.issuperset(keys) or any(map(parameters.has, keys))

    def _arguments(self, begin: Callable[[], tuple[Sink, Sink, ArgumentTypes | None]], whole: Sink) -> Step[None]:
        """Read the arguments into what *begin* returns once they are known to be some, or all at once into *whole*."""
        first = yield from self._reader.next()
        if first == "{":
            yield from json_text.value(self._reader, *begin())
        elif first == '"':
            text = (yield from json_text.decoded_string(self._reader)).strip() or "{}"
            if not json_text.is_object(text):
                raise Malformed
            whole(text)
        else:
            yield from self._reader.literal("null")
            whole("{}")


class Mistral(JsonCalls):
    """
    Mistral's ``[TOOL_CALLS][{"name": "f", "arguments": {…}}]``, and from tokenizer version 11 on
    ``[TOOL_CALLS]f[ARGS]{…}``, repeated for each call, with ``[CALL_ID]id`` before ``[ARGS]`` in some releases. What
    follows on the marker tells them apart.

    Mistral's templates (and ``mistral-common``'s validator) take ids of exactly nine letters and digits; an id that the
    model gives itself, as version 11 may, is kept.
    """

    special_tokens = True
    bare_names = True
    markers = Markers("[TOOL_CALLS]")
    # Some fine-tunes write it.
    closings = ("[/TOOL_CALLS]",)

    @staticmethod
    def new_id() -> str:
        """Return nine letters and digits."""
        return uuid.uuid4().hex[:9]

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.next()) in "[{":
            yield from super()._block(marker)
            return
        name = yield from self._name()
        call_id: str | None = None
        if (yield from reader.next()) != "{":
            marker = yield from reader.literal("[CALL_ID]", "[ARGS]")
            if marker == "[CALL_ID]":
                call_id = yield from reader.collect(_ID, 64)
                yield from reader.literal("[ARGS]")
        yield from self._json_call(name, call_id)
