"""What a tool parser is, and what those that are grammars over a reader share."""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

from triton_openai.parsers.grammar import Grammar, TextParser
from triton_openai.parsers.reader import SPACE, Ended, Malformed, Markers, Step, discard
from triton_openai.parsers.tools import json_text

_Result = TypeVar("_Result")

#: The tools of a request: name → JSON schema of the parameters (empty where the tool has none).
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]

#: Makes the id of a call.
NewId: TypeAlias = Callable[[], str]

#: What may stand in a function's name. Wider than OpenAI's own ``[a-zA-Z0-9_-]``: names of MCP servers have dots,
#: slashes and colons. Without white space, quotes and brackets nothing of any markup can be taken for a name.
NAME = re.compile(r"""[^\s<>(){}\[\]"'`,;=|\uff5c]*""")
LONGEST_NAME = 256


class ToolParser(TextParser):
    """
    A text stage of which content and tool calls come out.

    Base of the classes that the entry-point group ``triton_openai.tool_parsers`` takes.
    """

    #: Whether the limit of tokens, or a stop string, ended the text; known before the flush.
    was_cut = False

    def __init__(self, tools: Tools | None = None, *, new_id: NewId | None = None) -> None:
        """Begin an answer to a request with *tools*; *new_id* makes the ids of its calls."""
        self.tools: Tools = tools or {}
        self._new_id = new_id or self.new_id

    @staticmethod
    def new_id() -> str:
        """Return an id for a call, in the style of OpenAI's own; a family of models may have another."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def call_id(self) -> str:
        """Return the id of the next call."""
        return self._new_id()

    @property
    def unfinished(self) -> bool:
        """Whether a call has begun and not ended: after the flush, whether the text ended in the middle of one."""
        return False

    def drop_rest(self) -> None:
        """Make no text of what the end, with the next flush, leaves of a call. By default it is ignored."""


class CallGrammar(Grammar, ToolParser):
    """
    A grammar that finds tool calls.

    What a call begins with is kept until the call's name and the beginning of its arguments are known. If that never
    happens, it becomes content, exactly as the model wrote it. After that point nothing can be taken back: the
    arguments of a malformed call end where the fault is, and the rest is content. After :meth:`drop_rest`, the end
    makes a call without arguments of one whose name is known, and nothing of less.
    """

    # Stream state
    _is_after_call = False
    _in_call = False
    # The name of the call that is read, once it is known to be whole, and its id if it has one
    _named: tuple[str, str | None] | None = None

    def __init__(self, tools: Tools | None = None, *, new_id: NewId | None = None) -> None:
        ToolParser.__init__(self, tools, new_id=new_id)
        Grammar.__init__(self)

    @property
    def unfinished(self) -> bool:
        return self._in_call

    def drop_rest(self) -> None:
        self._reader.drops_rest = True

    def _attempt(self, block: Step[_Result], already: str) -> Step[_Result | None]:
        """Read a *block* that began with the text *already*. What turns out not to be a call becomes content."""
        self._before_call(already)
        try:
            result = yield from block
            self._output.content(self._reader.release())
            return result
        except Malformed:
            self._in_call = False
            self._output.content(self._reader.release())
        except Ended:
            # Separators and the beginning of a closing marker after a complete call are no text.
            rest = self._reader.release()
            if not (self._is_after_call or self._reader.drops_rest):
                self._output.content(rest)
            elif self._named is not None and self._named[0] in self.tools:
                self._start_call(*self._named)
        return None

    def _before_call(self, already: str = "") -> None:
        """Keep *already*, and what is read from here on, in case that it is no call and becomes content."""
        self._reader.keep(already)
        self._is_after_call = False
        self._named = None

    def _start_call(self, name: str, id: str | None = None) -> None:
        """Announce a call: it will not be taken back. Raises :class:`Malformed` for what cannot be a call."""
        if not name:
            raise Malformed
        self._reader.release()
        self._in_call = True
        self._named = None
        self._output.start(id or self._new_id(), name)

    def _end_call(self) -> None:
        """Note the end of a complete call, or of the markup after it."""
        self._reader.keep()
        self._is_after_call = True
        self._in_call = False

    def _close(self, marker: str) -> Step[None]:
        """Read white space and the *marker* after a call. Raises :class:`Malformed` or :class:`Ended`."""
        yield from self._reader.token(marker)
        self._end_call()

    def _json_call(self, name: str, id: str | None = None) -> Step[None]:
        """Read white space, and a call's arguments as a JSON object. Raises :class:`Malformed` or :class:`Ended`."""
        self._named = name, id
        yield from self._reader.space()
        if (yield from self._reader.next()) != "{":
            raise Malformed
        self._start_call(name, id)
        yield from json_text.value(self._reader, self._output.arguments)
        self._end_call()

    def _name(self) -> Step[str]:
        """Read a function's name. Raises :class:`Malformed` where there is none."""
        name = yield from self._reader.collect(NAME, LONGEST_NAME)
        # At the end of the text, it may be a part of a name.
        yield from self._reader.next()
        if not name:
            raise Malformed
        self._named = name, None
        return name


class MarkedCalls(CallGrammar):
    """Content with tool calls in it, each after a marker."""

    #: What opens a call, or a block of calls.
    markers: ClassVar[Markers]
    #: Characters that open a call without a marker, as the first of the whole text.
    bare: ClassVar[str] = ""
    # Whether a call without a marker is read
    _is_bare = False

    @abstractmethod
    def _block(self, marker: str) -> Step[None]:
        """Read what follows on *marker* (nothing where the text begins with a bare call)."""

    def _text(self) -> Step[None]:
        if self.bare:
            yield from self._reader.run(SPACE, self._output.content)
            first = yield from self._reader.peek()
            if first and first in self.bare:
                self._is_bare = True
                yield from self._attempt(self._block(""), "")
                self._is_bare = False
        while marker := (yield from self._reader.until(self.markers, self._output.content)):
            yield from self._attempt(self._block(marker), marker)

    def _start_call(self, name: str, id: str | None = None) -> None:
        # Without a marker, JSON or a list may just be the answer: only the name of a tool shows that it is a call.
        if self._is_bare and name not in self.tools:
            raise Malformed
        super()._start_call(name, id)


class ListedCalls(MarkedCalls):
    """Calls after each marker, in brackets with commas between them or one after the other, then :attr:`closing`."""

    #: The marker after the calls; empty if there is none.
    closing: ClassVar[str] = ""
    #: What may stand between calls without brackets, and what begins a call that is not the first.
    separators: ClassVar[re.Pattern[str]] = SPACE
    begins: ClassVar[re.Pattern[str]]

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.optional("[")):
            yield from self._list()
        else:
            yield from self._call()
            yield from reader.run(self.separators, discard)
            while self.begins.match((yield from reader.peek())):
                self._before_call()
                yield from self._call()
                yield from reader.run(self.separators, discard)
        if marker and self.closing:
            yield from self._close(self.closing)

    def _list(self) -> Step[None]:
        """Read calls up to a bracket, in front of which a comma may stand."""
        reader = self._reader
        yield from reader.space()
        yield from self._call()
        while (yield from reader.token(",", "]")) == ",":
            yield from reader.space()
            if (yield from reader.optional("]")):
                break
            if not self.begins.match((yield from reader.next())):
                raise Malformed
            self._before_call()
            yield from self._call()
        self._end_call()

    @abstractmethod
    def _call(self) -> Step[None]:
        """Read one call."""
