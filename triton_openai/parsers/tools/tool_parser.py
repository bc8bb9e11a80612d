"""What a tool parser is, and what those that are grammars over a reader share."""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec

from triton_openai.parsers.grammar import Grammar, TextParser
from triton_openai.parsers.reader import SPACE, Ended, Malformed, Markers, Step, discard, markers
from triton_openai.parsers.tools import json_text, names, tags, tolerant
from triton_openai.parsers.tools.argument_types import ArgumentTypes
from triton_openai.parsers.tools.schema import Parameters

_Result = TypeVar("_Result")

#: The tools of a request: name → JSON schema of the parameters (empty where the tool has none).
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]

#: Makes the id of a call.
NewId: TypeAlias = Callable[[], str]

#: What may stand in a function's name. Wider than OpenAI's own ``[a-zA-Z0-9_-]``: names of MCP servers have dots,
#: slashes and colons. Without white space, quotes and brackets nothing of any markup can be taken for a name.
NAME = re.compile(r"""[^\s<>(){}\[\]"'`,;=|\uff5c]*""")
MAX_NAME = 256
_BARE = "{["
#: How objects of calls without a marker begin, behind their first character.
_BARE_BEGINNINGS = {
    "{": ('"name"', ' "name"', '\n  "name"', '"type": "function"'),
    "[": ('{"name"', '{ "name"', '\n  {"name"', '{"type": "function"'),
}
_WORD = re.compile(r"[\w.:-]*")
_FENCE = re.compile("`*")
_MAX_FENCE = 64
#: The languages of code blocks in which models write calls.
_LANGUAGES_OF_CALLS = frozenset({"", "json", "python", "tool_call", "tool_code"})
# Tolerant readings may read so many characters of an answer more than once, or in vain.
_MAX_SPENT = 100_000
# One reading gets no more characters than this.
_MAX_TOLERANT = 100_000


class ToolParser(TextParser):
    """
    A text stage of which content and tool calls come out.

    Base of the classes that the entry-point group ``triton_openai.tool_parsers`` takes.
    """

    #: Whether the limit of tokens, or a stop string, ended the text; known before the flush. ``None``: nobody said so.
    was_cut: bool | None = None
    #: Whether nobody reads a call while it comes, so that all of it may wait until it is known to be one.
    may_wait = False
    #: What opens a call; in thinking too.
    openings: Sequence[str] = ()

    def __init__(self, tools: Tools | None = None, *, new_id: NewId | None = None) -> None:
        """Begin an answer to a request with *tools*; *new_id* makes the ids of its calls."""
        self.tools: Tools = tools or {}
        self._new_id = new_id or self.new_id
        #: What was repaired, by the number of the call.
        self.repairs: dict[int, frozenset[str]] = {}
        #: How many texts that a marker had announced as calls were none.
        self.failed = 0

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

    What a call begins with is kept until the call's name and the beginning of a value in its arguments are known. Where
    the grammar fails, :mod:`tolerant` reads the call, with the request's tools. If that fails too and nothing of the
    call was passed on, it becomes content, exactly as the model wrote it. What was passed on cannot be taken back: the
    arguments of such a call end where the fault is, the call counts as unfinished, and the rest is content. After
    :meth:`drop_rest`, the end makes a call without arguments of one whose name is known, and nothing of less.
    """

    # Stream state
    _is_after_call = False
    _in_call = False
    _is_broken = False
    # The name of the call that is read, once it is known to be whole, and its id if it has one
    _named: tuple[str, str | None] | None = None
    # The tool that the latest call means, and how the model wrote its name
    _called = ""
    _written = ""
    _is_opaque = False
    # Converts arguments of the latest call, if the request has its tool
    _types: ArgumentTypes | None = None
    # Where the latest call ends in what is kept
    _call_end = 0
    # Whether no marker showed that it is a call
    _is_bare = False
    # The function that every call means
    _only: str | None = None
    #: Opening markers that the tolerant reader does not know: it begins behind them.
    own_openings: ClassVar[frozenset[str]] = frozenset()
    # How long the one is with which the text begins that is kept
    _opening_size = 0
    # Characters that were read tolerantly, and that no repaired call has
    _spent = 0

    def __init__(self, tools: Tools | None = None, *, new_id: NewId | None = None) -> None:
        ToolParser.__init__(self, tools, new_id=new_id)
        Grammar.__init__(self)

    @property
    def unfinished(self) -> bool:
        return self._in_call or self._is_broken

    def drop_rest(self) -> None:
        self._reader.drops_rest = True

    def _attempt(self, block: Step[_Result], already: str) -> Step[_Result | None]:
        """Read a *block* that began with the text *already*. What turns out not to be a call becomes content."""
        self._before_call(already)
        self._opening_size = 0
        if already in self.own_openings:
            self._opening_size = len(already)
        try:
            result = yield from block
            self._finish_block()
            return result
        except Malformed:
            if not (yield from self._repaired()):
                self._give_up()
        except Ended:
            if self._is_after_call or not (yield from self._repaired()):
                self._give_up_at_end()
        return None

    def _finish_block(self) -> None:
        """Pass on what waits of the latest call; what was read after it is content."""
        self._output.confirm()
        rest = self._reader.release()[self._call_end :]
        self._call_end = 0
        self._output.content(rest)

    def _give_up(self) -> None:
        """End a block that is malformed."""
        if self._is_after_call:
            self._finish_block()
            return
        self.failed += 1
        kept = self._reader.release()
        if self._output.has_waiting_start or not self._in_call:
            self._output.drop_waiting()
            self._output.content(kept)
        else:
            # Too late: a part of it was passed on.
            self._output.confirm()
            self._is_broken = True
        self._in_call = False

    def _give_up_at_end(self) -> None:
        """End a block in whose middle the text has ended."""
        if self._is_after_call:
            # Separators and the beginning of a closing marker after a complete call are no text.
            self._output.confirm()
            self._reader.release()
            return
        rest = self._reader.release()
        if self._in_call:
            self._output.confirm()
        elif self._output.is_after_call and rest.strip() in self.openings:
            # The model announced another call, and ended.
            return
        elif not self._reader.drops_rest:
            self._output.content(rest)
        elif self._named is not None and self._named[0] in self.tools:
            self._start_call(*self._named)
            self._output.confirm()

    def _repaired(self) -> Step[bool]:
        """
        Read what is kept, and what follows, as calls with slips.

        Return whether it is some. Then they are passed on, and the text behind them is what is read next.
        """
        reader = self._reader
        read = len(reader.kept())
        if not self.tools or self._spent > _MAX_SPENT:
            return False
        size = max(2 * read, 256)
        calls: tolerant.Calls | None = None
        cost = 0
        while calls is None:
            yield from self._kept_up_to(size)
            text = reader.kept()
            if len(text) > _MAX_TOLERANT:
                self._spent += cost
                reader.rewind(read)
                return False
            cost += len(text)
            try:
                calls = self._read_tolerantly(text)
            except tolerant.Incomplete:
                size = 2 * len(text)
            except tolerant.Unreadable:
                self._spent += cost
                reader.rewind(read)
                return False
        self._spent += cost - calls.end
        self._output.confirm()
        reader.release_up_to(calls.end)
        self._call_end = 0
        self._is_after_call = True
        self._in_call = False
        return True

    def _kept_up_to(self, size: int) -> Step[None]:
        """Read on until *size* characters are kept, or the text ends."""
        reader = self._reader
        kept = len(reader.kept())
        while kept < size:
            piece = reader.take(size - kept)
            kept += len(piece)
            if not piece:
                if reader.ended:
                    return
                yield

    def _read_tolerantly(self, text: str) -> tolerant.Calls:
        """
        Read *text* as calls with slips, and pass them on.

        Raises :class:`tolerant.Unreadable`, also where they do not begin with what was passed on of the first one.
        """
        reader = self._reader
        output = self._output
        begun = (self._in_call or self._is_after_call) and not output.has_waiting_start
        for keeps_types in (False, True) if begun else (False,):
            calls = tolerant.read(
                text,
                self.tools,
                ended=reader.ended and not reader.rest(),
                cut=self.was_cut is not False,
                bare=self._is_bare,
                name=self._only,
                keeps_types=keeps_types,
                start=self._opening_size,
            )
            if not begun:
                self._pass_on(calls.calls)
                return calls
            first, *others = calls.calls
            rest = None
            if first.name == self._called:
                rest = tolerant.missing_rest(output.passed_on(), first.arguments)
            if rest is not None:
                self.repairs[output.calls - 1] = first.repairs
                output.replace_waiting(rest)
                output.confirm()
                self._pass_on(others)
                return calls
        raise tolerant.Unreadable

    def _pass_on(self, calls: Sequence[tolerant.Call]) -> None:
        for call in calls:
            self.repairs[self._output.calls] = call.repairs
            self._output.start(partial(self._id_of, call), call.name)
            self._output.arguments(json_text.dump(call.arguments))

    def _id_of(self, call: tolerant.Call) -> str:
        """Return the id of a *call* with slips."""
        return call.id or self._new_id()

    def _before_call(self, already: str = "") -> None:
        """Keep *already*, and what is read from here on, in case that it is no call and becomes content."""
        self._output.confirm()
        self._reader.keep(already)
        self._is_after_call = False
        self._opening_size = 0
        self._call_end = 0
        self._named = None

    def _start_call(self, name: str, id: str | None = None) -> None:
        """Announce a call. Raises :class:`Malformed` for what cannot be one."""
        if not name:
            raise Malformed
        self._in_call = True
        self._is_after_call = False
        self._named = None
        self._written = name
        self._called = names.resolve(name, self.tools) or name
        is_opaque = bool(self.tools) and self._called not in self.tools and names.is_opaque(name)
        self._is_opaque = is_opaque
        self._types = None
        if self._called in self.tools:
            self._types = ArgumentTypes(Parameters(self.tools[self._called]))
        make_id = self._new_id
        if id is not None:
            make_id = partial(str, id)
        self._output.start(make_id, self._called, waits_for_end=is_opaque or self.may_wait)

    def _end_call(self) -> None:
        """Note the end of a complete call, or of the markup after it."""
        if self._in_call and self._is_opaque:
            self._name_by_arguments()
        kinds: set[str] = set()
        if self._in_call and self._called != self._written:
            kinds.add("name")
        if self._in_call and self._types is not None and self._types.has_converted:
            kinds.add("types")
        if kinds:
            self.repairs[self._output.calls - (not self._output.has_waiting_start)] = frozenset(kinds)
        self._call_end = self._reader.kept_size
        self._is_after_call = True
        self._in_call = False

    def _name_by_arguments(self) -> None:
        """Give the call whose name is a mere id the name of the only tool that takes its arguments."""
        try:
            known = names.tool_for_arguments(json_text.OBJECT.decode(self._output.waiting()), self.tools)
        except (msgspec.MsgspecError, RecursionError):
            known = None
        if known is not None:
            self._called, arguments = known
            self._output.replace_waiting(json_text.dump(arguments), name=self._called)

    def _close(self, marker: str) -> Step[None]:
        """Read white space and the *marker* after a call. Raises :class:`Malformed` or :class:`Ended`."""
        yield from self._reader.token(marker)
        self._end_call()
        self._output.confirm()

    def _json_call(self, name: str, id: str | None = None) -> Step[None]:
        """Read white space, and a call's arguments as a JSON object. Raises :class:`Malformed` or :class:`Ended`."""
        self._named = name, id
        yield from self._reader.space()
        if (yield from self._reader.next()) != "{":
            raise Malformed
        self._start_call(name, id)
        yield from json_text.value(self._reader, self._output.arguments, self._output.arguments_to_confirm, self._types)
        self._end_call()

    def _name(self) -> Step[str]:
        """Read a function's name. Raises :class:`Malformed` where there is none."""
        name = yield from self._reader.collect(NAME, MAX_NAME)
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
    #: Whether the text may begin with the name of a tool, and its arguments.
    bare_names: ClassVar[bool] = False
    #: The marker after a call, or after a block of calls; empty if there is none. Where there are several, all of them.
    closing: ClassVar[str] = ""
    closings: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def _block(self, marker: str) -> Step[None]:
        """Read what follows on *marker* (nothing where the text begins with a bare call)."""

    def __init__(self, tools: Tools | None = None, *, new_id: NewId | None = None) -> None:
        super().__init__(tools, new_id=new_id)
        own = self.markers.texts
        self.openings = (*own, *self._bare_openings())
        others: list[str] = []
        # Without tools, nothing shows that what is no call of the format's own is one.
        if self.tools:
            others = [tag for tag in tags.COMMON_OPENINGS if not tag.startswith(own)]
        strays = [*tags.COMMON_CLOSINGS, *tags.STRAYS_AFTER_CALLS, *self.closings, *filter(None, [self.closing])]
        self._strays = frozenset(strays).difference(own)
        self._markers = markers(*own, *others, *self._strays)

    def _text(self) -> Step[None]:
        yield from self._reader.run(SPACE, self._output.content)
        marker = yield from self._reader.marker(self._markers)
        if marker:
            first = ""
        else:
            first = yield from self._reader.peek()
        self._is_bare = True
        if first and first in self.bare:
            yield from self._attempt(self._block(""), "")
        elif first and self.tools:
            yield from self._bare_form(first)
        self._is_bare = False
        while marker := marker or (yield from self._reader.until(self._markers, self._output.content)):
            if marker in self.markers.texts:
                yield from self._attempt(self._block(marker), marker)
            elif marker not in self._strays:
                yield from self._attempt(self._another_form(), marker)
            elif not self._output.is_after_call:
                # After a call, it is one too many.
                self._output.content(marker)
            marker = ""

    def _bare_form(self, first: str) -> Step[None]:
        """Read what begins with the character *first*, as calls in another form than the format's own have it."""
        if first in _BARE:
            yield from self._attempt(self._another_form(), "")
        elif first == "`":
            yield from self._fenced()
        elif self.bare_names:
            yield from self._bare_name("")

    def _fenced(self) -> Step[None]:
        """Read calls in a code block with which the text begins, or what is no such block."""
        reader = self._reader
        fence = yield from reader.up_to(_FENCE, _MAX_FENCE)
        language = yield from reader.up_to(_WORD, MAX_NAME)
        space = yield from reader.up_to(SPACE, _MAX_FENCE)
        opening = fence + language + space
        if fence != "```" or language not in _LANGUAGES_OF_CALLS:
            self._output.content(opening)
        elif (yield from reader.peek()) in ("{", "["):
            yield from self._attempt(self._another_form(), opening)
        else:
            yield from self._bare_name(opening)

    def _bare_name(self, before: str) -> Step[None]:
        """Read calls that begin with a name, or what is no name of a tool; the text *before* it was read."""
        word = yield from self._reader.up_to(_WORD, MAX_NAME)
        is_known = names.resolve(word.removeprefix("call:"), self.tools) is not None
        if is_known and (yield from self._reader.peek()) in ("(", "{", "<", "["):
            yield from self._attempt(self._another_form(), before + word)
        else:
            self._output.content(before + word)

    def _bare_openings(self) -> Sequence[str]:
        """Return what opens a call without a marker at the beginning of a line."""
        return [f"\n{self.bare}{text}" for text in _BARE_BEGINNINGS.get(self.bare, ())]

    def _another_form(self) -> Step[None]:
        """Leave a call that is not in the format's own form to the tolerant reading."""
        yield from ()
        raise Malformed

    def _start_call(self, name: str, id: str | None = None) -> None:
        # Without a marker, JSON or a list may just be the answer: only the name of a tool shows that it is a call.
        if self._is_bare and name not in self.tools:
            raise Malformed
        super()._start_call(name, id)


class ListedCalls(MarkedCalls):
    """Calls after each marker, in brackets with commas between them or one after the other, then :attr:`closing`."""

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
