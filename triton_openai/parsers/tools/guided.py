"""Calls that the backend was held to by a schema."""

from __future__ import annotations

import re

from triton_openai.parsers.events import Content, Event, ToolCallStart
from triton_openai.parsers.reader import SPACE, Markers, Step
from triton_openai.parsers.tools.json_calls import JsonCalls
from triton_openai.parsers.tools.tool_parser import CallGrammar, NewId, ToolParser, Tools

_REST = re.compile(r".*", re.DOTALL)


class GuidedCalls(JsonCalls):
    """
    The answer to ``tool_choice: required``: ``[{"name": "f", "parameters": {…}}, …]`` and nothing else; its schema is
    made in ``triton_openai.api.tools``.

    The array is recognised at the start of the text alone. An answer that is none is content.
    """

    markers = Markers()

    def _text(self) -> Step[None]:
        yield from self._reader.run(SPACE, self._output.content)
        if (yield from self._reader.peek()) == "[":
            self._is_bare = True
            yield from self._attempt(self._block(""), "")
        yield from self._reader.run(_REST, self._output.content)


class ForcedCall(CallGrammar):
    """An answer that is the arguments of one known tool. Arguments are an object: another answer is content."""

    def __init__(self, name: str, tools: Tools | None = None, *, new_id: NewId) -> None:
        super().__init__(tools, new_id=new_id)
        self._function = self._only = name

    def _text(self) -> Step[None]:
        yield from self._reader.space()
        if (yield from self._reader.peek()) == "{":
            yield from self._attempt(self._json_call(self._function), "")
        yield from self._reader.run(_REST, self._output.content)


class ConstrainedCalls(ToolParser):
    """
    The stage for an answer that guided decoding was to restrict to calls: *guided* reads it.

    A backend may ignore the guide, and some follow it only after the thinking. What *guided* takes for content goes to
    *own*, which reads the model's own form of calls, until the first call.
    """

    def __init__(self, guided: ToolParser, own: ToolParser) -> None:
        super().__init__(own.tools)
        self._guided = guided
        self._own = own
        self._has_call = False

    @property
    def unfinished(self) -> bool:
        return self._guided.unfinished or self._own.unfinished

    def feed(self, text: str) -> list[Event]:
        return self._pass_on(self._guided.feed(text))

    def flush(self) -> list[Event]:
        self._guided.was_cut = self._own.was_cut = self.was_cut
        if self.was_cut:
            self._guided.drop_rest()
            self._own.drop_rest()
        events = self._pass_on(self._guided.flush()) + self._own.flush()
        self.repairs = {**self._guided.repairs, **self._own.repairs}
        self.failed = self._own.failed
        return events

    def _pass_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            self._has_call = self._has_call or isinstance(event, ToolCallStart)
            if isinstance(event, Content) and not self._has_call:
                passed += self._own.feed(event.text)
            else:
                passed.append(event)
        return passed
