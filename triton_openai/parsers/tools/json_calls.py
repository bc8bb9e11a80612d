"""Calls written as JSON objects, ``{"name": "f", "arguments": {…}}``, alone or in an array: the families that do so."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import ClassVar

from triton_openai.parsers.reader import Malformed, Markers, Sink, Step, discard
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tool_parser import ListedCalls

#: Llama writes the second.
_ARGUMENTS = frozenset({"arguments", "parameters"})
#: What else an object may hold that nothing but its keys shows to be a call.
_ENVELOPE = frozenset({"name", "type", "id"})
_ID = re.compile(r"[A-Za-z0-9]*")


class JsonCalls(ListedCalls):
    """
    Objects, or an array of them.

    Arguments go on as the model writes them; a string of JSON, which some models write there, goes on decoded, and null
    or nothing is an empty object. Other keys are ignored.
    """

    begins = re.compile(r"\{")
    #: The keys under which a function's name stands.
    name_keys: ClassVar[frozenset[str]] = frozenset({"name"})

    def _call(self) -> Step[None]:
        reader = self._reader
        name: str | None = None
        early: list[str] = []
        others: list[str] = []
        started = False

        def begin() -> tuple[Sink, Sink]:
            """Return where the arguments go, and where the ends of their values."""
            nonlocal started
            if name is None:
                return early.append, early.append
            self._start_call(name)
            started = True
            return self._output.arguments, self._output.ending

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
                    begin()[1]("".join(early))
            elif key in _ARGUMENTS and not started and not early:
                yield from self._arguments(begin)
            elif self._is_bare and key not in _ENVELOPE:
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
            # Arguments that stand beside the name are no strict call.
            if name is None or self._is_bare or any(map(Parameters(self.tools.get(name)).has, others)):
                raise Malformed
            begin()[1]("{}")
        self._end_call()

    def _arguments(self, begin: Callable[[], tuple[Sink, Sink]]) -> Step[None]:
        """Read the arguments; *begin* says where to, once they are known to be some."""
        first = yield from self._reader.next()
        if first == "{":
            yield from json_text.value(self._reader, *begin())
        elif first == '"':
            text = (yield from json_text.decoded_string(self._reader)).strip() or "{}"
            if not json_text.is_object(text):
                raise Malformed
            begin()[1](text)
        else:
            yield from self._reader.literal("null")
            begin()[1]("{}")


class Hermes(JsonCalls):
    """
    As the chat templates of Nous Hermes 2 Pro and 3, Qwen 2.5, Qwen 3, QwQ and Granite 4 ask for calls:
    ``<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>``, repeated for each call.
    """

    markers = Markers("<tool_call>")
    closing = "</tool_call>"


class Llama3Json(JsonCalls):
    """
    As Meta's chat templates for Llama 3.1, 3.2, 3.3 and 4 ask for calls: the answer is a bare
    ``{"name": "f", "parameters": {…}}``, or several joined by ``;``, and nothing else, in front of which
    ``<|python_tag|>`` may stand. JSON further on in an answer is the answer's own.
    """

    special_tokens = True
    markers = Markers("<|python_tag|>")
    bare = "{"
    separators = re.compile(r"[\s;,]*")


class Mistral(JsonCalls):
    """
    Mistral's ``[TOOL_CALLS][{"name": "f", "arguments": {…}}]``, and from tokenizer version 11 on
    ``[TOOL_CALLS]f[ARGS]{…}``, repeated for each call, with ``[CALL_ID]id`` before ``[ARGS]`` in some releases. What
    follows on the marker tells them apart.

    Mistral's templates (and ``mistral-common``'s validator) take ids of exactly nine letters and digits; an id that the
    model gives itself, as version 11 may, is kept.
    """

    special_tokens = True
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


class Granite(JsonCalls):
    """
    As IBM's Granite 3 writes calls: ``<|tool_call|>[{"name": "f", "arguments": {…}}, …]`` (3.0) or ``<tool_call>[…]``
    (3.1 and later). Some releases write the array with no marker, or the marker is a special token that was skipped: an
    array of calls of known tools is taken at the beginning of the text too.
    """

    special_tokens = True
    markers = Markers("<|tool_call|>", "<tool_call>")
    bare = "["

    def _block(self, marker: str) -> Step[None]:
        yield from super()._block(marker)
        if marker == "<tool_call>":
            # Granite 4 closes it, the third generation does not.
            yield from self._reader.space()
            if (yield from self._reader.peek()) == "<":
                yield from self._close("</tool_call>")


class Granite4(Hermes):
    """As the chat template of IBM's Granite 4 asks for calls; its markers are special tokens."""

    special_tokens = True


class Granite20bFunctionCalling(JsonCalls):
    """As IBM's Granite 20B Function Calling writes calls: ``<function_call>{…}`` for each."""

    markers = Markers("<function_call>")


class Nemotron(JsonCalls):
    """As the chat templates of NVIDIA's Llama 3.3 Nemotron Super 1.5 and Nemotron Nano 9B v2 ask for calls."""

    markers = Markers("<TOOLCALL>")
    closing = "</TOOLCALL>"


class Phi4Mini(JsonCalls):
    """As vLLM's chat template for Phi 4 mini asks for calls: ``functools[{…}, …]``, with nothing after it."""

    markers = Markers("functools[")

    def _block(self, marker: str) -> Step[None]:
        yield from self._list()


class Cohere(JsonCalls):
    """
    As Cohere's chat templates for Command R7B, Command A and later write calls:
    ``<|START_ACTION|>[{"tool_name": "f", "parameters": {…}}, …]<|END_ACTION|>``. The ``tool_call_id`` that the model
    gives is a count, which the template makes anew from the order of the calls; so the ids are ours.
    """

    special_tokens = True
    markers = Markers("<|START_ACTION|>")
    closing = "<|END_ACTION|>"
    name_keys = frozenset({"tool_name", "name"})


class Jamba(JsonCalls):
    """AI21's Jamba 1.5 and later, Hunyuan A13B and Apriel; MiniMax M1 writes an object a line instead of an array."""

    special_tokens = True
    markers = Markers("<tool_calls>")
    closing = "</tool_calls>"


class InternLM(JsonCalls):
    """As InternLM 2 and 2.5 write calls; code for their ``<|interpreter|>`` is none."""

    special_tokens = True
    markers = Markers("<|action_start|><|plugin|>")
    closing = "<|action_end|>"


class LongCat(JsonCalls):
    """As Meituan's chat template for LongCat Flash asks for calls."""

    markers = Markers("<longcat_tool_call>")
    closing = "</longcat_tool_call>"


class Xlam(JsonCalls):
    """
    As Salesforce's xLAM 2 writes calls: the answer is an array of them. Only the name of a tool shows that it is no
    other array. What is tuned from models with a marker of their own may write that.
    """

    markers = Markers("<tool_call>")
    bare = "["
