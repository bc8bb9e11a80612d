"""The last text stages of a chat: reasoning is split off first, then tool calls are taken out of what remains."""

from __future__ import annotations

from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallStart
from triton_openai.parsers.reasoning import ReasoningParser
from triton_openai.parsers.tools.tool_parser import ToolParser


class AnswerParser:
    """
    One choice's text in pieces in, events out; either stage may be missing. Holds that choice's state.

    Without *parallel*, calls after the first are dropped, as a client that asked for one at a time cannot take them.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, parallel: bool = True) -> None:
        # Stages
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        #: Whether the text is just text.
        self.plain = reasoning is None and tools is None
        # Stream state
        self.calls = 0
        self.reasoning_tokens = 0
        #: Whether the text ended in the middle of a call that was passed on; known after the flush.
        self.cut = False
        self._thinking = False

    def feed(self, text: str, tokens: int | None = None) -> list[Event]:
        """Return what *text* adds; *tokens* is how many it is made of, where that is known."""
        if self.plain:
            return [Content(text)]
        events: list[Event] = self._reasoning.feed(text) if self._reasoning is not None else [Content(text)]
        if events:
            self._thinking = isinstance(events[-1], Reasoning)
        if self._thinking:
            self.reasoning_tokens += tokens or 0
        return self._take(self._through_tools(events))

    def flush(self, *, cut: bool = False) -> list[Event]:
        """Return what was held back: the text has ended, and was *cut* by its limit or a stop string."""
        events = self._through_tools(self._reasoning.flush() if self._reasoning is not None else [])
        if self._tools is not None:
            self._tools.was_cut = cut
            events += self._tools.flush()
        events = self._take(events)
        self.cut = self._tools is not None and self._tools.unfinished and (self._parallel or self.calls < 2)
        return events

    def _through_tools(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        parsed: list[Event] = []
        for event in events:
            parsed += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return parsed

    def _take(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, ToolCallStart):
                self.calls = max(self.calls, event.index + 1)
        if self._parallel or self.calls < 2:
            return events
        return [event for event in events if isinstance(event, Content | Reasoning) or not event.index]
