"""What a parser is, and the base of those that read a format from left to right, as if the whole text were there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.reader import Reader, Step


class TextParser(ABC):
    """
    A text stage: text in pieces goes in, events come out. Made per choice; holds that choice's state.

    Neither :meth:`feed` nor :meth:`flush` ever raises for what a model wrote.
    """

    #: Whether the markup is made of tokens that tokenizers count as special: they must then not be skipped.
    special_tokens: ClassVar[bool] = False

    @abstractmethod
    def feed(self, text: str) -> list[Event]:
        """Return what *text*, following on all text before, adds."""

    def flush(self) -> list[Event]:
        """Return what was held back: the text has ended."""
        return []


class Output:
    """
    Collects what a grammar finds as events: the events since the last :meth:`take`.

    White space before, between and after tool calls is markup and is dropped, unless text both precedes and follows
    the calls: then what stands between the last call and that text is kept. Hence white space at the end of content is
    held until it is known what comes next; text without calls passes as it is.

    The start of a call, and the end of each value in its arguments, wait until what follows confirms them: the next
    value, or the end of the call. Until then they can be dropped.
    """

    def __init__(self) -> None:
        # Since the last take
        self._events: list[Event] = []
        self._kind: Callable[[str], Event] | None = None
        self._parts: list[str] = []
        # Stream state
        self._calls = 0
        self._arguments: Callable[[str], Event] = partial(ToolCallArguments, 0)
        self._space: list[str] = []
        self._shown = False
        self._after_call = False
        # Whether something waits, and what: the start of a call, and text of its arguments
        self._waits = False
        self._waiting_start: tuple[Callable[[], str], str] | None = None
        self._waiting: list[str] = []
        self._waits_for_end = False
        # The arguments of the latest call that were passed on
        self._passed_on: list[str] = []

    @property
    def is_after_call(self) -> bool:
        """Whether nothing but white space came since the latest call."""
        return self._after_call

    @property
    def calls(self) -> int:
        """How many calls were passed on."""
        return self._calls

    @property
    def has_waiting_start(self) -> bool:
        """Whether the latest call waits as a whole."""
        return self._waiting_start is not None

    def content(self, text: str) -> None:
        """Add *text* of the answer."""
        visible = text.rstrip()
        tail = text[len(visible) :]
        if visible:
            if self._after_call and not self._shown:
                self._space.clear()
                visible = visible.lstrip()
            self._add(Content, *self._space, visible)
            self._space.clear()
            self._shown = True
            self._after_call = False
        if tail:
            self._space.append(tail)

    def reasoning(self, text: str) -> None:
        """Add *text* of the thinking."""
        if text:
            self._add(Reasoning, text)

    def start(self, make_id: Callable[[], str], name: str, *, waits_for_end: bool = False) -> None:
        """
        Add the start of the next call, to which *make_id* gives its id.

        With *waits_for_end*, the whole call waits for its end.
        """
        self._waits = True
        self._waiting_start = make_id, name
        self._waiting = []
        self._waits_for_end = waits_for_end

    def arguments(self, text: str) -> None:
        """Add *text* to the arguments of the latest call; it confirms what waits."""
        if self._waits:
            if self._waits_for_end:
                self._waiting.append(text)
                return
            self.confirm()
        if text:
            self._add(self._arguments, text)

    def arguments_to_confirm(self, text: str) -> None:
        """Add *text* to the arguments of the latest call once something confirms it."""
        self._waits = True
        self._waiting.append(text)

    def confirm(self) -> None:
        """Pass on what waits of the latest call."""
        if not self._waits:
            return
        self._waits = self._waits_for_end = False
        if self._waiting_start is not None:
            make_id, name = self._waiting_start
            self._waiting_start = None
            self._space.clear()
            self._after_call = True
            self._close()
            self._passed_on = []
            self._events.append(ToolCallStart(self._calls, make_id(), name))
            self._arguments = partial(ToolCallArguments, self._calls)
            self._calls += 1
        waiting = "".join(self._waiting)
        self._waiting = []
        if waiting:
            self._add(self._arguments, waiting)

    def replace_waiting(self, text: str, *, name: str | None = None) -> None:
        """Let *text* wait for what waits of the arguments, and *name* for the name."""
        self._waits = True
        self._waiting = [text]
        if name is not None and self._waiting_start is not None:
            self._waiting_start = self._waiting_start[0], name

    def waiting(self) -> str:
        """Return the arguments that wait."""
        return "".join(self._waiting)

    def drop_waiting(self) -> None:
        """Drop what waits of the latest call."""
        self._waits = False
        self._waiting_start = None
        self._waiting = []
        self._waits_for_end = False

    def passed_on(self) -> str:
        """Return the arguments of the latest call that were passed on."""
        self._close()
        return "".join(self._passed_on)

    def trim(self) -> None:
        """Drop white space at the end of the content so far: it is markup."""
        self._space.clear()

    def finish(self) -> None:
        """Add what was held back: the text has ended."""
        if self._space and not self._after_call:
            self._add(Content, *self._space)
        self._space.clear()

    def take(self) -> list[Event]:
        """Return the events and begin anew."""
        self._close()
        events = self._events
        self._events = []
        return events

    def _add(self, kind: Callable[[str], Event], *parts: str) -> None:
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._parts.extend(parts)

    def _close(self) -> None:
        if self._kind is not None:
            text = "".join(self._parts)
            self._events.append(self._kind(text))
            if self._kind is self._arguments:
                self._passed_on.append(text)
            self._kind = None
            self._parts = []


class Grammar(TextParser):
    """``feed`` and ``flush`` over a generator that reads the whole text."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._output = Output()
        self._reading = self._text()

    @property
    def examined(self) -> int:
        """How many characters were copied or looked at so far: the cost of the stream, for those who measure it."""
        return self._reader.examined

    def feed(self, text: str) -> list[Event]:
        self._reader.add(text)
        next(self._reading)
        return self._output.take()

    def flush(self) -> list[Event]:
        self._reader.end()
        for _ in self._reading:
            pass
        self._output.finish()
        return self._output.take()

    @abstractmethod
    def _text(self) -> Step[None]:
        """Read the text to its end."""
