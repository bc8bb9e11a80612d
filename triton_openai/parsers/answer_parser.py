"""The last text stages of a chat: reasoning is split off first, then tool calls are taken out of what remains."""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallStart
from triton_openai.parsers.reasoning import ReasoningParser
from triton_openai.parsers.tools.tool_parser import ToolParser


class AnswerParser:
    """
    One choice's text in pieces in, events out; either stage may be missing. Holds that choice's state.

    From the first call inside of the thinking on, tool calls are taken out first, and the reasoning is split off from
    what remains. Without *parallel*, calls after the first are dropped, as a client that asked for one at a time cannot
    take them. *streams* is whether a client sees the thinking while it comes.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        parallel: bool = True,
        streams: bool = False,
    ) -> None:
        # Stages
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        #: Whether the text is just text.
        self.plain = reasoning is None and tools is None
        if reasoning is not None:
            reasoning.may_wait = not streams
            if tools is not None:
                reasoning.calls = tools.openings
        # Stream state
        self._tools_first = False
        self.calls = 0
        self.reasoning_tokens = 0
        self._undecided_tokens = 0
        # Whether tokens have come.
        self._counted = False
        #: Whether the text ended in the middle of a call that was passed on; known after the flush.
        self.cut = False
        self._thinking = False
        self._unknown = 0

    def feed(self, text: str, tokens: int | None = None) -> list[Event]:
        """Return what *text* adds; *tokens* is how many it is made of, where that is known."""
        if self.plain:
            return [Content(text)]
        reasoning = self._reasoning
        tools = self._tools
        if reasoning is None:
            assert tools is not None
            return self._take(tools.feed(text))
        if self._tools_first:
            events = self._calls_first(text)
        else:
            events = reasoning.feed(text)
            if tools is not None:
                events = self._through_tools(events, tools)
            if reasoning.handed_over:
                self._tools_first = True
                events += self._calls_first(reasoning.handed_over)
        if events:
            self._thinking = isinstance(events[-1], Reasoning)
        if tokens:
            if reasoning.is_undecided or self._undecided_tokens:
                self._count(events, tokens)
            elif self._thinking:
                self.reasoning_tokens += tokens
            elif not self._counted:
                # A whole answer.
                self.reasoning_tokens += _thinking_share(events, tokens)
            self._counted = True
        return self._take(events)

    def flush(self, *, cut: bool = False) -> list[Event]:
        """Return what was held back: the text has ended, and was *cut* by its limit or a stop string."""
        tools = self._tools
        reasoning = self._reasoning
        events: list[Event] = []
        if reasoning is not None:
            reasoning.was_cut = cut
        if tools is not None:
            tools.was_cut = cut
            if self._tools_first:
                events = self._back_through_reasoning(tools.flush())
        if reasoning is not None:
            rest = reasoning.flush()
            if tools is not None and not self._tools_first:
                rest = self._through_tools(rest, tools)
            events += rest
        if tools is not None and not self._tools_first:
            events += tools.flush()
        self._count(events, 0)
        events = self._take(events)
        self.cut = tools is not None and tools.unfinished and (self._parallel or self.calls < 2)
        return events

    def outcomes(self) -> list[tuple[str, str]]:
        """Return for each call what became of it, and what was repaired; known after the flush."""
        tools = self._tools
        if tools is None:
            return []
        outcomes: list[tuple[str, str]] = [("unknown_tool", "")] * self._unknown
        outcomes += [("text", "")] * tools.failed
        outcomes += [("cut", "")] * self.cut
        repaired = [kinds for index, kinds in tools.repairs.items() if index < self.calls]
        outcomes += [("repaired", kind) for kinds in repaired for kind in sorted(kinds)[:1]]
        outcomes += [("strict", "")] * max(0, self.calls - self._unknown - self.cut - len(repaired))
        return outcomes

    def _calls_first(self, text: str) -> list[Event]:
        assert self._tools is not None
        return self._back_through_reasoning(self._tools.feed(text))

    def _back_through_reasoning(self, events: list[Event]) -> list[Event]:
        """Return *events* of the tool parser, whose content may be thinking."""
        assert self._reasoning is not None
        passed: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                passed += self._reasoning.feed(event.text)
            else:
                passed += self._reasoning.confirm()
                passed.append(event)
        return passed

    def _through_tools(self, events: list[Event], tools: ToolParser) -> list[Event]:
        if len(events) == 1 and type(events[0]) is Content:
            return tools.feed(events[0].text)
        parsed: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                parsed += tools.feed(event.text)
            else:
                parsed.append(event)
        return parsed

    def _count(self, events: list[Event], tokens: int) -> None:
        """Count *tokens* whose text led to *events*; while it is open if they are thinking, they wait."""
        reasoning = self._reasoning
        if reasoning is not None and reasoning.is_undecided:
            self._undecided_tokens += tokens
            return
        if self._undecided_tokens:
            self.reasoning_tokens += _thinking_share(events, self._undecided_tokens)
            self._undecided_tokens = 0
        if self._thinking:
            self.reasoning_tokens += tokens

    def _take(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, ToolCallStart):
                self.calls = max(self.calls, event.index + 1)
                self._unknown += self._tools is not None and event.name not in self._tools.tools
        if self._parallel or self.calls < 2:
            return events
        return [event for event in events if isinstance(event, Content | Reasoning) or not event.index]


#: The parser of an answer that is just text. It has no state, so all such answers share it.
PLAIN = AnswerParser(None, None)


def _thinking_share(events: Sequence[Event], tokens: int) -> int:
    """
    Return how many of *tokens*, which came together, are thinking.

    An answer that comes whole does not show where its tokens are: their number is shared out by characters.
    """
    thinking = 0
    others = 0
    for event in events:
        if isinstance(event, Reasoning):
            thinking += len(event.text)
        elif isinstance(event, ToolCallStart):
            others += len(event.name)
        else:
            others += len(event.text)
    if not thinking:
        return 0
    if not others or tokens == 1:
        return tokens
    return min(max(1, round(tokens * thinking / (thinking + others))), tokens - 1)
