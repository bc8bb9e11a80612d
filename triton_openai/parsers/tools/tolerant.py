# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""
Calls with slips, read after a format's own grammar has failed on them: one reading for all formats.

It takes a call in any notation that the formats have (an object, tags, keywords in parentheses), with any of their
tags around it, too many or too few. The request's tools decide what is a name, which keys there are, and of which type
a value is. Where a value ends, what follows shows: the next key, or the end of the call. What has two meanings is not
read: :class:`Unreadable`.

A result holds whatever text may follow. Where more text could change it, :class:`Incomplete` is raised.

The work is linear. Every look at the text counts as a step, and so does every character that a search passes. Beyond
:data:`MAX_STEPS` for each character, the text is :class:`Unreadable`. Each pattern looks at a bounded number of
characters from each position: what repeats has a bound, or is possessive and followed by nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.parsers.tools import names
from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tags import CLOSINGS, MESSAGE_ENDS, OPENINGS

#: How much text behind a place decides what stands there.
_AHEAD = 320
_DEEPEST = 50
_MAX_UNCLOSED = 8
#: How many steps a reading may take for each character of its text, how many on top of that, and how many in all. The
#: event loop waits for the reading: 50 ms at most.
MAX_STEPS = 10
_FREE_STEPS = 20_000
_MOST_STEPS = 100_000
#: Numbers and words such as ``true`` are not longer. Nor are keys, with the brackets of their tags.
_LONGEST_SCALAR = 400
_LONGEST_KEY_TAG = 258
_LONGEST_HEADER = 400


def _any(texts: Sequence[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


_CLOSINGS = (*CLOSINGS, *MESSAGE_ENDS)
_FENCE = "```"
_MORE_OPENINGS = ("<|plugin|>", "functools", "function<｜tool▁sep｜>", "function<｜tool_sep｜>", "```json", "```")
#: White space, and comments of some length.
_SPACE = re.compile(r"(?:\s++|//[^\n]{0,200}+\n|/\*(?:[^*]|\*(?!/)){0,200}+\*/)*+")
_COMMENT = re.compile(r"/[/*]")
_OPENING = re.compile(_any((*OPENINGS, *_MORE_OPENINGS)))
_TAG = r"(?:｜DSML｜|[\w.-]{1,40}:)?"
_NAMED = r"""(?:=|\s{1,64}+name\s{0,64}+=\s{0,64}+)["']?([^\s<>"'=]{1,256}+)["']?"""
_CALL_TAG = re.compile(rf"<{_TAG}(?:function|invoke|tool){_NAMED}\s{{0,64}}(?:/?>|(?=\n))")
_PARAMETER = re.compile(
    rf"""<{_TAG}(?:parameter|param|argument|arg){_NAMED}(?:\s{{1,64}}+string=["']?(true|false)["']?)?\s{{0,64}}+>"""
)
_PARAMETER_END = re.compile(rf"</{_TAG}(?:parameter|param|argument|arg)>")
_CALL_END = re.compile(rf"</{_TAG}(?:function|invoke|tool)>|<｜tool▁call▁end｜>")
_CLOSING = re.compile(rf"{_any(_CLOSINGS)}|</{_TAG}(?:function|invoke|tool)>|```")
#: What is between the tags is a key and white space.
_KEY_TAGS = re.compile(
    r"(<arg_key>)?\s{0,64}+([^\s<>][^<>\n]{0,199}+)\s{0,64}+"
    r"(?:(?P<end></arg_key>)\s{0,64}+(?P<value><arg_value>)?|(?P<only><arg_value>))"
)
_VALUE_END = re.compile(r"</arg_value>")
#: Quotes that open and close a string.
_QUOTE = r"""(?:<\|"\|>|<escape>|\\?["'`“”])"""
#: The key has no white space in front, but may have some behind it.
_KEY = re.compile(
    rf"""({_QUOTE}{{0,2}}+)([^\s"'`“”:=,;{{}}\[\]()<>\\][^"'`“”:=,;{{}}\[\]()<>\\\n]{{0,199}}+)"""
    rf"""\s{{0,64}}+({_QUOTE}{{0,2}}+)\s{{0,64}}+(:|=>|=)(?!=)"""
)
_JSON_KEY = re.compile(r'"((?:[^"\\\n]|\\.){0,200}+)"\s{0,64}+()()(:)')
_DELIMITERS = ('<|"|>', "<escape>", '"""', "'''", '\\"', '"', "'", "`", "“")
_ENDS_OF = {"“": "”"}
_NAME = re.compile(r"""(?:call:|function:)?\s{0,64}+["'`]?((?:[^\s<>(){}\[\]"'`,;=|｜]){1,256})["'`]?""")
#: What stands between the name of a call and its arguments.
_BETWEEN = re.compile(
    r"(?:\s++|\[CALL_ID\]\w{0,64}|\[ARGS\]|<\|tool_call_argument_begin\|>|<｜tool▁sep｜>|```(?:json)?|<\|channel\|>\w{0,64}+"
    r"|<\|constrain\|>\w{0,64}+|<\|message\|>|:(?=\s{0,64}+\{))*+"
)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CLOSERS = frozenset("}])")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "'": "'"}
_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*+(?:\.(?:\d[\d_]*+)?)?|\.\d[\d_]*+)(?:[eE][-+]?\d+)?)")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
_WORDS: Mapping[str, Any] = {
    "true": True, "True": True, "false": False, "False": False, "null": None, "None": None,
}  # fmt: skip
#: Words of programs, which are no text.
_NO_TEXT = frozenset({"undefined", "NaN", "nan", "Infinity", "-Infinity", "inf"})
_NAME_KEYS = ("name", "tool_name", "function_name", "function", "tool", "recipient_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "params", "input")
_ENVELOPE = frozenset({*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id", "tool_call_id", "index", "call_id"})


_BARE_SCALAR = re.compile(r"(?:[tT]rue|[fF]alse|null|None)\b")
_WORD_STOP = re.compile(r"[,;}\])\n<]|\Z")
_CALL_ID = re.compile(r"\[CALL_ID\](\w+)")
_TAG_STOP = re.compile(rf"\n?(?:{_PARAMETER.pattern}|<arg_key>|{_CLOSING.pattern})")
_STRAYS = {
    end: re.compile(rf"(?P<end>{end.pattern})|{_OPENING.pattern}|{_CALL_TAG.pattern}")
    for end in (_PARAMETER_END, _VALUE_END)
}
#: The parameters of what no schema describes.
_OPEN = Parameters(None)


class Unreadable(Exception):
    """The text is no call whose meaning is clear."""


class Incomplete(Exception):
    """More text could change the reading."""


class Call(msgspec.Struct, frozen=True):
    """A call that was read."""

    #: The name of the tool, and what the model wrote for it.
    name: str
    written: str
    arguments: Mapping[str, Any]
    #: What was repaired.
    kinds: frozenset[str]
    #: The id that the model wrote in a place of its own.
    id: str | None = None


class Calls(msgspec.Struct, frozen=True):
    """The calls that were read, and where the text after them begins."""

    calls: Sequence[Call]
    end: int


def read(
    text: str, tools: Mapping[str, Mapping[str, Any]], *, ended: bool, cut: bool, bare: bool = False,
    name: str | None = None, keeps_types: bool = False,
) -> Calls:  # fmt: skip
    """
    Return the calls that *text* begins with.

    *ended* is whether it is all that there is, and *cut* whether a limit ended it: then nothing that is missing at the
    end is filled in. *bare* says that no marker shows that it is a call: nothing but calls may then follow. With
    *name*, the text is the arguments of that tool. With *keeps_types*, a string stays one where the schema has another
    type. Raises :class:`Unreadable` or :class:`Incomplete`.
    """
    if not tools:
        raise Unreadable
    reading = _Reading(text, tools, ended=ended, cut=cut, bare=bare, keeps_types=keeps_types)
    try:
        if name is not None:
            return reading.arguments_of(name)
        return reading.calls()
    except RecursionError as error:
        raise Unreadable from error


class _Level(msgspec.Struct):
    """An object or an array that is open: its parameters, and the keys that it has."""

    is_object: bool
    parameters: Parameters
    keys: Collection[str] | None
    seen: set[str]
    #: Whether it has keywords in parentheses.
    is_keywords: bool = False


class _Steps:
    """Counts the steps of a reading, and of the readings in it."""

    def __init__(self, size: int) -> None:
        self._left = min(MAX_STEPS * size + _FREE_STEPS, _MOST_STEPS)

    def take(self, count: int) -> None:
        """Count steps. Raises :class:`Unreadable` if they are too many."""
        self._left -= count
        if self._left < 0:
            raise Unreadable


class _Reading:
    """One reading of a text."""

    def __init__(
        self,
        text: str,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        ended: bool,
        cut: bool,
        bare: bool,
        keeps_types: bool,
        steps: _Steps | None = None,
    ) -> None:
        self._text = text
        self._tools = tools
        self._ended = ended
        self._cut = cut
        self._bare = bare
        self._keeps_types = keeps_types
        self._steps = steps or _Steps(len(text))
        self._parameters: dict[str, Parameters] = {}
        # The parameters of the objects in others, each with those that it is in
        self._inner: dict[tuple[int, str], tuple[Parameters, Parameters]] = {}
        # Where runs of closing tags end, by the position of each tag
        self._runs: dict[int, int] = {}
        # Of the call that is read
        self._levels: list[_Level] = []
        self._kinds: set[str] = set()
        self._guesses = False
        # How many strings without an end were read, each up to the end of the text
        self._unclosed_strings = 0

    def _of(self, text: str) -> _Reading:
        """Return a reading of *text*, which is a string in this one."""
        return _Reading(
            text,
            self._tools,
            ended=True,
            cut=self._cut,
            bare=False,
            keeps_types=self._keeps_types,
            steps=self._steps,
        )

    def _parameters_of(self, name: str | None) -> Parameters:
        """Return the parameters of the tool *name*."""
        if name is None:
            return _OPEN
        if name not in self._parameters:
            self._parameters[name] = Parameters(self._tools[name])
        return self._parameters[name]

    def _inside(self, parameters: Parameters, key: str) -> Parameters:
        """Return the parameters of the object that is the value of *key*."""
        if not parameters.has(key):
            return _OPEN
        known = (id(parameters), key)
        if known not in self._inner:
            self._inner[known] = parameters, parameters.inside(key)
        return self._inner[known][1]

    def _resolved(self, written: str) -> str | None:
        """Return the name of the tool that *written* means, if it means one."""
        if written in self._tools:
            return written
        self._steps.take(len(written) + 8 * len(self._tools))
        return names.resolved(written, self._tools)

    # Places in the text

    def _need(self, at: int) -> None:
        """Raise :class:`Incomplete` if the text may go on near *at*."""
        if not self._ended and at + _AHEAD > len(self._text):
            raise Incomplete

    def _space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        if match:
            end = match.end()
        else:
            end = at
        self._steps.take(1 + end - at)
        self._need(end)
        return end

    def _is_over(self, at: int) -> bool:
        """Return whether nothing follows at *at*, which is behind white space."""
        return at >= len(self._text)

    def _closes(self, at: int) -> bool:
        """Return whether a closing tag, or the beginning of the next call, stands at *at*."""
        self._steps.take(1)
        return _CLOSING.match(self._text, at) is not None or self._opens(at)

    def _opens(self, at: int) -> bool:
        self._steps.take(1)
        return _OPENING.match(self._text, at) is not None or _CALL_TAG.match(self._text, at) is not None

    def _past_closings(self, at: int) -> int:
        """Return the place behind white space, closing tags and brackets from *at* on."""
        passed = []
        while at not in self._runs:
            passed.append(at)
            end = self._space(at)
            match = _CLOSING.match(self._text, end)
            if match is None:
                self._runs[at] = end
                break
            at = match.end()
        behind = self._runs[at]
        self._runs.update(dict.fromkeys(passed, behind))
        return behind

    # Calls

    def calls(self) -> Calls:
        """Read calls up to what is none."""
        calls: list[Call] = []
        end = at = self._begin(0)
        while True:
            try:
                call, at = self._call(at)
            except Unreadable:
                if not calls or self._bare:
                    raise
                break
            calls.append(call)
            at, is_closed = self._behind_call(at)
            end = at
            if is_closed:
                # What follows is for the format's own grammar again.
                break
            while at < len(self._text) and self._text[at] in ",;":
                at = self._space(at + 1)
            if self._is_over(at):
                end = at
                break
            at = self._begin(at)
            if at == end and self._text[at] not in "{<":
                break
        if self._bare and not self._is_over(self._past_closings(end)):
            raise Unreadable
        return Calls(calls, end)

    def _behind_call(self, at: int) -> tuple[int, bool]:
        """Return the place behind what closes a call and the lists around it, and whether that is a closing tag."""
        while True:
            at = self._space(at)
            closing = _CLOSING.match(self._text, at)
            if closing is not None and closing[0] != _FENCE:
                return closing.end(), True
            if closing is not None:
                at = closing.end()
                continue
            end = at
            while end < len(self._text) and self._text[end] in _CLOSERS and end < at + _DEEPEST:
                end = self._space(end + 1)
            if end == at:
                return at, False
            if "]" not in self._text[at:end] and not self._is_over(end) and not self._closes(end):
                # A bracket of the text
                return at, False
            at = end

    def arguments_of(self, name: str) -> Calls:
        """Read the arguments of *name*."""
        at = self._space(0)
        if self._is_over(at) or self._text[at] != "{":
            raise Unreadable
        arguments, end = self._arguments(name, at)
        end = self._past_closings(end)
        if not self._is_over(end):
            raise Unreadable
        return Calls([self._made(name, name, arguments)], end)

    def _begin(self, at: int) -> int:
        """Return the place behind opening tags and brackets."""
        while True:
            at = self._space(at)
            match = _OPENING.match(self._text, at)
            if match is not None:
                at = match.end()
            elif self._text.startswith("[", at):
                at += 1
            else:
                return at

    def _call(self, at: int) -> tuple[Call, int]:
        self._levels = []
        self._kinds = set()
        self._guesses = False
        if self._is_over(at):
            raise Unreadable
        tag = _CALL_TAG.match(self._text, at)
        if tag is not None:
            return self._named_call(tag[1], tag.end(), tagged=True)
        if self._text[at] == "{":
            return self._object_call(at)
        header = self._text.find("<|message|>", at, at + _LONGEST_HEADER)
        recipient = None
        if header >= 0:
            recipient = _RECIPIENT.search(self._text, at, header)
        if recipient is not None:
            return self._named_call(recipient[1], header + len("<|message|>"))
        word = _NAME.match(self._text, at)
        if word is None:
            raise Unreadable
        return self._named_call(word[1].rstrip(":") or word[1], word.end())

    def _named_call(self, written: str, at: int, *, tagged: bool = False) -> tuple[Call, int]:
        """Read the arguments of a call whose name was read."""
        name = self._resolved(written)
        if name is None and not names.is_opaque(written):
            raise Unreadable
        between = _BETWEEN.match(self._text, at)
        if between:
            start = between.end()
        else:
            start = at
        self._need(start)
        self._steps.take(start - at)
        call_id = _CALL_ID.search(self._text, at, start)
        if name != written:
            self._kinds.add("name")
        if self._bare and self._text[start : start + 1] not in ("(", "{", "<"):
            raise Unreadable
        arguments, end = self._arguments(name, start)
        if name is None:
            self._steps.take(64 * len(self._tools))
            known = names.by_arguments(arguments, self._tools)
            if known is None:
                raise Unreadable
            name, arguments = known
        if tagged:
            self._kinds.add("tags")
        return self._made(name, written, arguments, call_id[1] if call_id else None), end

    def _object_call(self, at: int) -> tuple[Call, int]:
        """Read a call that is an object with a name and arguments."""
        envelope, end = self._object(at, _OPEN, is_call=True)
        call_type = envelope.get("function")
        if isinstance(call_type, dict):
            envelope = call_type
        named = [(key, envelope[key]) for key in _NAME_KEYS if isinstance(envelope.get(key), str)]
        # A name that is one of a tool's own arguments is none of the call's.
        candidates = [(key, value, self._resolved(value)) for key, value in named]
        known = [each for each in candidates if each[2] is not None]
        if not known and len(envelope) == 1:
            # The name as the key of the arguments
            ((key, value),) = envelope.items()
            name = self._resolved(key)
            if name is not None and isinstance(value, dict) and not self._bare:
                self._kinds.add("notation")
                return self._made(name, key, self._typed(value, name)), end
        if not known:
            raise Unreadable
        key, written, name = known[0]
        assert name is not None
        if name != written:
            self._kinds.add("name")
        rest = {other: value for other, value in envelope.items() if other != key}
        keys = [other for other in _ARGUMENT_KEYS if other in rest]
        if keys:
            if self._bare and not rest.keys() <= _ENVELOPE:
                raise Unreadable
            return self._made(name, written, self._as_arguments(rest[keys[0]], name)), end
        own = {other: value for other, value in rest.items() if other not in ("type", "id", "tool_call_id")}
        if own and not names.fits(own, self._tools[name]):
            raise Unreadable
        if not own and (self._bare or self._parameters_of(name).required):
            raise Unreadable
        if own:
            self._kinds.add("notation")
        return self._made(name, written, own), end

    def _as_arguments(self, value: Any, name: str) -> Mapping[str, Any]:
        """Return the *value* of a call's arguments as an object."""
        if isinstance(value, str):
            text = value.strip()
            if not text:
                return {}
            inner = self._of(text)
            if not text.startswith("{"):
                raise Unreadable
            (call,) = inner.arguments_of(name).calls
            self._kinds |= call.kinds
            return call.arguments
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise Unreadable
        return self._typed(value, name)

    def _made(self, name: str, written: str, arguments: Mapping[str, Any], id: str | None = None) -> Call:
        parameters = self._parameters_of(name)
        is_known = parameters.required <= arguments.keys() and all(map(parameters.has, arguments))
        if self._guesses and parameters.names and not is_known:
            # Where a string ends was decided by what follows: that must then be what the tool takes.
            raise Unreadable
        return Call(name, written, arguments, frozenset(self._kinds or {"tags"}), id)

    def _typed(self, arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return *arguments*, read before the name was known, in the types of the tool's schema."""
        parameters = self._parameters_of(name)
        return {key: self._fitting(parameters, key, value) for key, value in arguments.items()}

    def _fitting(self, parameters: Parameters, key: str, value: Any) -> Any:
        """Return *value* in a type that the schema names, where its text is one of that."""
        if self._keeps_types or parameters.allows(key, value):
            return value
        types = parameters.types(key)
        if isinstance(value, str):
            read = json.loads(parameters.value(key, value))
            if not isinstance(read, str):
                self._kinds.add("types")
                return read
            if types & {"object", "array"} and value.strip()[:1] in ("{", "["):
                return self._nested(value.strip(), parameters, key)
        elif types == {"string"} and isinstance(value, int | float) and not isinstance(value, bool):
            self._kinds.add("types")
            return json.dumps(value)
        return value

    def _nested(self, text: str, parameters: Parameters, key: str) -> Any:
        """Return the object or array whose text a string is."""
        inner = self._of(text)
        inner._levels = [_Level(True, parameters, None, set())]
        value, end = inner._value(0, parameters, key)
        if not inner._is_over(inner._space(end)):
            raise Unreadable
        self._kinds |= inner._kinds | {"types"}
        return value

    # Arguments

    def _arguments(self, name: str | None, at: int) -> tuple[Mapping[str, Any], int]:
        """Read arguments in any notation."""
        parameters = self._parameters_of(name)
        self._levels = []
        if self._is_over(at) or self._closes(at):
            if self._is_over(at) and (self._cut or self._bare):
                raise Unreadable
            if parameters.required or name is None:
                raise Unreadable
            return {}, at
        if self._text[at] == "{":
            return self._object(at, parameters)
        if self._text[at] == "(":
            self._kinds.add("brackets")
            inner = self._space(at + 1)
            if self._text.startswith("{", inner):
                arguments, end = self._object(inner, parameters)
                end = self._space(end)
                if self._text.startswith(")", end):
                    return arguments, end + 1
                if not self._is_over(end) and not self._closes(end):
                    raise Unreadable
                return arguments, end
            return self._object(at, parameters)
        self._kinds.add("tags")
        return self._tags(at, parameters)

    def _tags(self, at: int, parameters: Parameters) -> tuple[dict[str, Any], int]:
        """Read parameters in tags."""
        arguments: dict[str, Any] = {}
        seen: set[str] = set()
        while True:
            at = self._space(at)
            if self._is_over(at):
                if self._cut or not arguments:
                    raise Unreadable
                return arguments, at
            key, start, kind = self._tag(at, parameters, seen)
            if key is None:
                if not self._closes(at) or (not arguments and parameters.required):
                    raise Unreadable
                return arguments, at
            if key in seen:
                raise Unreadable
            seen.add(key)
            text, at = self._tag_value(start, kind, parameters, seen)
            arguments[key] = self._tag_text(text, kind, parameters, key)

    def _tag(self, at: int, parameters: Parameters, seen: set[str]) -> tuple[str | None, int, str]:
        """Return the key of the parameter at *at*, where its value begins, and how it ends."""
        self._steps.take(1)
        match = _PARAMETER.match(self._text, at)
        if match is not None:
            return match[1], match.end(), {"true": "text", "false": "json"}.get(match[2], "tag")
        match = _KEY_TAGS.match(self._text, at)
        if match is not None:
            key = match[2].strip()
            known = parameters.has(key) and key not in seen
            if known or (match[1] and match["end"] and match["value"]):
                return key, match.end(), "value"
        if self._text.startswith("<", at):
            end = self._text.find(">", at, at + _LONGEST_KEY_TAG)
            name = self._text[at + 1 : max(end, at + 1)]
            if parameters.has(name) and name not in seen:
                return name, end + 1, f"</{name}>"
        return None, at, ""

    def _tag_value(self, start: int, kind: str, parameters: Parameters, seen: set[str]) -> tuple[str, int]:
        """
        Return the text of a parameter, and the place behind its end tag.

        That is the first end tag behind which the rest of a call stands.
        """
        end = _PARAMETER_END
        if kind == "value":
            end = _VALUE_END
        elif kind.startswith("</"):
            end = re.compile(re.escape(kind))
        at = start
        while True:
            match = end.search(self._text, at)
            # An end tag may be missing: the next parameter, or the end of the call, then begins a line.
            if match is None:
                stop = len(self._text)
            else:
                stop = match.start()
            self._steps.take(1 + stop - at)
            early = self._unclosed(at, stop, parameters, seen, is_last=match is None)
            if early is not None:
                return self._text[start:early], early
            if match is None:
                if not self._ended:
                    raise Incomplete
                raise Unreadable
            self._need(match.end())
            if self._goes_on(match.end(), end, parameters, seen):
                return self._text[start : match.start()], match.end()
            at = match.end()

    def _unclosed(
        self, at: int, stop: int, parameters: Parameters, seen: set[str], *, is_last: bool
    ) -> int | None:  # fmt: skip
        """Return where, from *at* to *stop*, a parameter ends that was not closed. *is_last*: no end tag follows."""
        while (match := _TAG_STOP.search(self._text, at, stop)) is not None:
            self._steps.take(1 + match.end() - at)
            at = match.end()
            is_line = match[0].startswith("\n")
            tag = match.start() + is_line
            parameter = _PARAMETER.match(self._text, tag)
            if parameter is not None:
                if is_line and parameters.has(parameter[1]) and parameter[1] not in seen:
                    return match.start()
            elif self._text.startswith("<arg_key>", tag):
                self._need(tag)
                key = _KEY_TAGS.match(self._text, tag)
                if key is not None and parameters.has(key[2].strip()) and key[2].strip() not in seen:
                    return match.start()
            elif is_last or is_line or not self._text.startswith("</", tag):
                self._need(match.end())
                behind = self._past_closings(match.start())
                if self._is_over(behind) or self._opens(behind):
                    return match.start()
                # The same follows on each tag up to there.
                at = max(at, behind)
        return None

    def _goes_on(self, at: int, end: re.Pattern[str], parameters: Parameters, seen: set[str]) -> bool:
        """Return whether the rest of a call stands at *at*, behind an end tag."""
        at = self._space(at)
        if self._is_over(at):
            return not self._cut
        key, _, _ = self._tag(at, parameters, seen)
        if key is not None:
            return key not in seen and (not parameters.names or parameters.has(key))
        if not self._closes(at):
            return False
        behind = self._past_closings(at)
        if self._is_over(behind) or self._opens(behind):
            return True
        # Text follows on the call. An end tag in it shows that all of this is still the value.
        strays = _STRAYS.get(end) or re.compile(rf"(?P<end>{end.pattern})|{_OPENING.pattern}|{_CALL_TAG.pattern}")
        stray = strays.search(self._text, behind)
        self._steps.take(1 + (len(self._text) if stray is None else stray.end()) - behind)
        if stray is None and not self._ended:
            raise Incomplete
        return stray is None or stray["end"] is None

    def _tag_text(self, text: str, kind: str, parameters: Parameters, key: str) -> Any:
        """Return the value that *text* means."""
        if kind == "tag":
            text = text.removeprefix("\n").removesuffix("\n")
        if kind == "text" or parameters.is_text(key):
            return text
        value = json.loads(parameters.value(key, text))
        stripped = text.strip()
        types = parameters.types(key)
        if isinstance(value, str) and types & {"object", "array"} and stripped[:1] in ("{", "["):
            return self._nested(stripped, parameters, key)
        return value

    # Objects, arrays, strings

    def _object(self, at: int, parameters: Parameters, *, is_call: bool = False) -> tuple[dict[str, Any], int]:
        """Read an object after its opening bracket at *at*."""
        if len(self._levels) > _DEEPEST:
            raise Unreadable
        keys = _ENVELOPE if is_call else parameters.names or None
        level = _Level(True, parameters, keys, set(), is_keywords=self._text[at] == "(")
        self._levels.append(level)
        result: dict[str, Any] = {}
        at += 1
        while True:
            at = self._separated(at, bool(result))
            if self._is_over(at):
                self._missing()
                break
            if self._text[at] in "})":
                at += 1
                break
            if self._closes(at):
                self._kinds.add("brackets")
                break
            key, at = self._key(at)
            if key in result:
                raise Unreadable
            level.seen.add(key)
            if is_call and key in _ARGUMENT_KEYS:
                result[key], at = self._call_arguments(at, result)
                continue
            result[key], at = self._value(at, parameters, key, is_call=is_call)
        self._levels.pop()
        return result, at

    def _call_arguments(self, at: int, envelope: Mapping[str, Any]) -> tuple[Any, int]:
        """Read the arguments in a call's object."""
        written = next((envelope[key] for key in _NAME_KEYS if isinstance(envelope.get(key), str)), None)
        if written is None:
            name = None
        else:
            name = self._resolved(written)
        at = self._space(at)
        if self._text.startswith("{", at):
            value, at = self._object(at, self._parameters_of(name))
            return value, at
        return self._value(at, _OPEN, "")

    def _separated(self, at: int, after_item: bool) -> int:
        """Return the place of the next item, behind commas."""
        start = at
        at = self._space(at)
        commas = 0
        while at < len(self._text) and self._text[at] in ",;":
            commas += 1
            at = self._space(at + 1)
        if _COMMENT.search(self._text, start, at):
            self._kinds.add("literals")
        closes = self._is_over(at) or self._text[at] in _CLOSERS
        if commas > 1 or (commas and (closes or not after_item)) or (after_item and not commas and not closes):
            self._kinds.add("commas")
        return at

    def _missing(self) -> None:
        """Note that brackets are missing at the end of the text. Raises :class:`Unreadable` if a limit ended it."""
        if self._cut:
            raise Unreadable
        self._kinds.add("brackets")

    def _key(self, at: int) -> tuple[str, int]:
        self._steps.take(1)
        match = _JSON_KEY.match(self._text, at)
        if match is not None:
            return _unescaped(match[1], self._kinds), match.end()
        match = _KEY.match(self._text, at)
        if match is None:
            raise Unreadable
        if match[1] != match[3] or match[1] not in ('"', ""):
            self._kinds.add("quotes")
        if not match[1] or match[4] != ":":
            self._kinds.add("notation")
        return match[2].strip(), match.end()

    def _value(self, at: int, parameters: Parameters, key: str, *, is_call: bool = False) -> tuple[Any, int]:
        at = self._space(at)
        if self._is_over(at):
            raise Unreadable
        first = self._text[at]
        if first == "{":
            return self._object(at, self._inside(parameters, key))
        if first in "[(":
            return self._array(at, self._inside(parameters, key))
        delimiter = next((each for each in _DELIMITERS if self._text.startswith(each, at)), None)
        if delimiter is None:
            return self._word(at, parameters, key, is_call=is_call)
        text, end = self._string(at, delimiter)
        return (text if is_call else self._fitting(parameters, key, text)), end

    def _array(self, at: int, parameters: Parameters) -> tuple[list[Any], int]:
        if len(self._levels) > _DEEPEST:
            raise Unreadable
        if self._text[at] == "(":
            self._kinds.add("literals")
        self._levels.append(_Level(False, parameters, None, set()))
        items: list[Any] = []
        at += 1
        while True:
            at = self._separated(at, bool(items))
            if self._is_over(at):
                self._missing()
                break
            if self._text[at] in "])":
                at += 1
                break
            if self._text[at] == "}" or self._closes(at):
                self._kinds.add("brackets")
                break
            before = at
            item: Any
            if self._text[at] == "{":
                item, at = self._object(at, parameters)
            elif self._text[at] in "[(":
                item, at = self._array(at, parameters)
            else:
                item, at = self._value(at, _OPEN, "")
            if at == before:
                raise Unreadable
            items.append(item)
        self._levels.pop()
        return items, at

    def _string(self, start: int, delimiter: str) -> tuple[str, int]:
        """Read the string that *delimiter* opens at *start*: it ends at the first delimiter that the rest follows."""
        body = start + len(delimiter)
        closing = _ENDS_OF.get(delimiter, delimiter)
        special = closing.startswith("<")
        if delimiter != '"':
            self._kinds.add("quotes" if delimiter != "'" else "literals")
        pattern = _scanner(closing)
        at = body
        inside = 0
        while True:
            match = pattern.search(self._text, at)
            self._steps.take(1 + (len(self._text) if match is None else match.end()) - at)
            if match is None:
                if not self._ended:
                    raise Incomplete
                return self._unclosed_string(body, closing)
            if match.lastgroup == "escape":
                at = match.end()
                continue
            if match.lastgroup == "stop":
                self._need(match.end())
                behind = self._past_closings(match.start("tag"))
                if self._is_over(behind) or self._opens(behind):
                    return self._unclosed_string(body, closing, match.start("tag"))
                at = match.end()
                continue
            self._need(match.end())
            if self._follows(match.end(), inside):
                break
            inside += 1
            at = match.end()
        text = self._text[body : match.start()]
        if inside:
            self._guesses = True
            self._kinds.add("quotes")
            text = _undoubled(text, closing)
            self._check_guess(text, closing)
        if special:
            return text.replace(closing, '"'), match.end()
        return _unescaped(text, self._kinds), match.end()

    def _check_guess(self, text: str, closing: str) -> None:
        """Raise :class:`Unreadable` if *text*, a string that has quotes in it, shows that it ends earlier."""
        level = None
        if self._levels:
            level = self._levels[-1]
        if level is None or not level.is_object:
            return
        keys = f"(?:{_any(sorted(level.seen))})"
        quote = re.escape(closing)
        self._steps.take(len(text))
        if re.search(rf"{quote}{keys}{quote}\s{{0,64}}+:", text):
            raise Unreadable
        if level.is_keywords and re.search(rf"(?<!\\){quote}\s{{0,64}}+[,)]", text):
            raise Unreadable

    def _unclosed_string(self, body: int, closing: str, stop: int | None = None) -> tuple[str, int]:
        """Return a string whose last quote is escaped or missing: what follows on it ends the call, and the text."""
        self._unclosed_strings += 1
        if (self._cut and stop is None) or self._unclosed_strings > _MAX_UNCLOSED:
            raise Unreadable
        self._steps.take(len(self._text) - body)
        if stop is None:
            end = self._without_end(body)
        else:
            end = stop
        text = self._text[body:end]
        key = self._next_key(text)
        self._guesses = True
        self._kinds.add("quotes")
        if key is not None:
            self._check_guess(text[:key], closing)
            return _unescaped(text[:key].rstrip(), self._kinds), body + key
        depth = len(self._levels)
        stripped = text.rstrip()
        while depth and stripped[-1:] in _CLOSERS and stripped:
            stripped = stripped[:-1].rstrip()
            depth -= 1
        if depth == len(self._levels) or closing != '"':
            # Nothing shows where it ends.
            raise Unreadable
        if stripped.count("{") != stripped.count("}") or stripped.count("[") != stripped.count("]"):
            raise Unreadable
        self._check_guess(stripped, closing)
        end = body + len(stripped)
        quotes = len(re.findall(r'(?<!\\)(?:\\\\)*\\"', stripped))
        if stripped.endswith('\\"') and quotes % 2:
            stripped = stripped[:-2]
        elif stripped.endswith('"') and not stripped.endswith('\\"'):
            stripped = stripped[:-1]
        return _unescaped(stripped, self._kinds), end

    def _without_end(self, body: int) -> int:
        """Return where the closing tags at the end of the text begin."""
        end = len(self._text)
        while True:
            while end > body and self._text[end - 1].isspace():
                end -= 1
            tag = next((each for each in _ENDINGS if self._text.endswith(each, body, end)), None)
            if tag is None:
                return end
            end -= len(tag)

    def _next_key(self, text: str) -> int | None:
        """Return where in *text* the member begins whose key shows that the string before it has ended."""
        level = None
        if self._levels:
            level = self._levels[-1]
        if level is None or not level.is_object or level.keys is None:
            return None
        for match in re.finditer(r',\s{0,64}+"([^"\\\n]{1,200}+)"\s{0,64}+:', text):
            if match[1] in level.keys and match[1] not in level.seen:
                return match.start()
        return None

    def _follows(self, at: int, inside: int) -> bool:
        """Return whether the rest of a call stands at *at*, behind a quote that may end a string."""
        closed = 0
        at = self._space(at)
        depth = len(self._levels)
        for _ in range(_DEEPEST):
            while at < len(self._text) and self._text[at] in _CLOSERS and closed <= depth + 2:
                closed += 1
                at = self._space(at + 1)
            if self._is_over(at):
                return not self._cut or closed >= depth
            if closed > depth + 2:
                return False
            if self._closes(at):
                return True
            if self._text[at] == ";" and closed >= depth:
                return True
            level = None
            if closed < depth:
                level = self._levels[depth - closed - 1]
            comma = self._text[at] == ","
            if not comma:
                if level is None:
                    return inside == 0 and self._text[at].isalnum()
                return level.is_object and self._is_marked_key(at) and self._is_key(at, level, certain=True)
            at = self._past_commas(at)
            if self._is_over(at) or self._text[at] in _CLOSERS:
                # A comma after the last item
                continue
            if level is None:
                return self._text[at] in "{<[" or _NAME.match(self._text, at) is not None
            if level.is_object:
                return self._is_key(at, level, certain=inside % 2 == 1)
            if inside % 2:
                return False
            return self._text[at] in "\"'[{(<-0123456789" or _BARE_SCALAR.match(self._text, at) is not None
        return False

    def _past_commas(self, at: int) -> int:
        """Return the place behind the commas from *at* on, and the white space after each."""
        while at < len(self._text) and self._text[at] == ",":
            at = self._space(at + 1)
        return at

    def _is_marked_key(self, at: int) -> bool:
        """Return whether what stands at *at* is a key even without a comma before it: in quotes, or before a sign."""
        self._steps.take(1)
        keyword = _KEY.match(self._text, at)
        return _JSON_KEY.match(self._text, at) is not None or (keyword is not None and keyword[4] == "=")

    def _is_key(self, at: int, level: _Level, *, certain: bool) -> bool:
        """Return whether a key of *level* stands at *at*; one that is *certain* is of the schema."""
        self._steps.take(1)
        match = _JSON_KEY.match(self._text, at) or _KEY.match(self._text, at)
        if match is None:
            return False
        if match.re is _KEY:
            key = match[2].strip()
        else:
            key = match[1]
        if key in level.seen:
            return False
        if level.keys is not None and (key in level.keys or certain):
            return key in level.keys
        return not certain and bool(match[1])

    def _word(self, at: int, parameters: Parameters, key: str, *, is_call: bool) -> tuple[Any, int]:
        """Read a value without quotes."""
        types = parameters.types(key)
        searched = at
        while True:
            match = _WORD_STOP.search(self._text, searched)
            assert match is not None
            self._steps.take(1 + match.end() - searched)
            if match.end() >= len(self._text) and not self._ended:
                raise Incomplete
            self._need(match.end())
            is_scalar = False
            if match.start() - at <= _LONGEST_SCALAR:
                word = self._text[at : match.start()].strip()
                is_scalar = word in _WORDS or _NUMBER.fullmatch(word) is not None
            if self._follows(match.start(), 0 if is_scalar else 1):
                break
            if match[0] in "\n":
                # Also the end of the text
                raise Unreadable
            searched = match.end()
            if match[0] == ",":
                # The same follows on each comma of a run.
                searched = self._past_commas(match.start())
        word = self._text[at : match.start()].strip()
        if self._is_over(match.start()) and self._cut:
            raise Unreadable
        if word in _WORDS and (not types or _WORDS[word] is None or types - {"string"}):
            if word not in ("true", "false", "null"):
                self._kinds.add("literals")
            return _WORDS[word], match.start()
        if _NUMBER.fullmatch(word):
            number = _number(word)
            if _JSON_NUMBER.fullmatch(word) is None:
                self._kinds.add("literals")
            return self._fitting(parameters, key, number), match.start()
        if word.endswith('"') and word.count('"') == 1:
            word = word[:-1]
        text_allowed = is_call or "string" in types
        if self._levels and self._levels[-1].is_keywords and "," in word:
            # A value without a key
            raise Unreadable
        if not text_allowed or not word or word in _NO_TEXT or re.search(r"""["'{}\[\]()\\\n]""", word):
            raise Unreadable
        self._guesses = True
        self._kinds.add("quotes")
        return word, match.start()


_ENDINGS = (*_CLOSINGS, "</function>", "</invoke>", "</｜DSML｜invoke>", "```")
_SCANNERS: dict[str, re.Pattern[str]] = {}
_STOP = rf"(?P<stop>[}}\])](?:\s{{0,8}}[}}\])]){{0,8}}\s{{0,8}}(?P<tag>{_any(_CLOSINGS)}))"


def _scanner(closing: str) -> re.Pattern[str]:
    """Return the pattern for what is looked at within a string that *closing* ends."""
    if closing not in _SCANNERS:
        if closing.startswith(("<", "\\")):
            escape = ""
        else:
            escape = r"(?P<escape>\\.)|"
        _SCANNERS[closing] = re.compile(rf"{escape}(?P<end>{re.escape(closing)})|{_STOP}", re.DOTALL)
    return _SCANNERS[closing]


def _undoubled(text: str, quote: str) -> str:
    """Return *text* without the quote that the model wrote twice at its beginning, at its end, or at both."""
    if text.count(quote) > 2:
        return text
    begins = text.startswith(quote)
    ends = text.endswith(quote) and not text.endswith("\\" + quote)
    if begins and ends and len(text) >= 2 * len(quote):
        return text[len(quote) : -len(quote)]
    if text.count(quote) == 1:
        if begins:
            return text.removeprefix(quote)
        if ends:
            return text.removesuffix(quote)
        return text
    return text


def _unescaped(text: str, kinds: set[str]) -> str:
    """Return what *text* of a JSON string means. A backslash that begins no escape is one of the text."""
    if "\\" not in text:
        return text
    invalid = False
    doubtful = False

    def replaced(match: re.Match[str]) -> str:
        nonlocal invalid, doubtful
        escape = match[1]
        if escape.startswith("u") and len(escape) == 5:
            return chr(int(escape[1:], 16))
        if escape in _ESCAPES:
            doubtful = doubtful or escape in "bf"
            return _ESCAPES[escape]
        invalid = True
        return match[0]

    result = re.sub(r"\\(u[0-9a-fA-F]{4}|.|\Z)", replaced, text, flags=re.DOTALL)
    if invalid:
        if doubtful:
            # As an escape, or as a backslash and a letter?
            raise Unreadable
        kinds.add("escapes")
    # Pairs of surrogates are one character.
    return result.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _number(word: str) -> int | float:
    plain = word.replace("_", "")
    try:
        if plain[:2].lower() == "0x" or plain.lstrip("+-")[:2].lower() == "0x":
            return int(plain, 0)
        return int(plain)
    except ValueError:
        pass
    number = float(plain)
    if not math.isfinite(number):
        raise Unreadable
    return number


def completion(begun: str, arguments: Mapping[str, Any]) -> str | None:
    """
    Return what makes *begun*, the beginning of a JSON text, one of *arguments*; nothing if no text does.
    """
    try:
        at, rest = _completed(begun, _json_space(begun, 0), arguments)
    except (ValueError, RecursionError):
        return None
    if rest is None:
        if not begun[at:].strip():
            return ""
        return None
    return rest


_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_JSON_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")


def _json_space(text: str, at: int) -> int:
    match = _JSON_SPACE.match(text, at)
    if match:
        return match.end()
    return at


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _completed(begun: str, at: int, value: Any) -> tuple[int, str | None]:
    """Return where *value* ends in *begun*, or what it lacks there. Raises ``ValueError`` if it is another value."""
    if at >= len(begun):
        return at, _dumped(value)
    if isinstance(value, Mapping):
        return _completed_items(begun, at, "{}", list(value.items()))
    if isinstance(value, list):
        return _completed_items(begun, at, "[]", [(None, item) for item in value])
    if isinstance(value, str):
        whole = _JSON_STRING.match(begun, at)
        if whole is not None:
            if json.loads(whole[0], strict=False) != value:
                raise ValueError
            return whole.end(), None
        part = json.loads(begun[at:] + '"', strict=False)
        if not isinstance(part, str) or not value.startswith(part):
            raise ValueError
        return len(begun), _dumped(value[len(part) :])[1:]
    scalar = _JSON_SCALAR.match(begun, at)
    if scalar is None or json.loads(scalar[0]) != value:
        raise ValueError
    return scalar.end(), None


def _completed_items(begun: str, at: int, brackets: str, items: list[tuple[str | None, Any]]) -> tuple[int, str | None]:
    """Do :func:`_completed` for the items of an object or an array."""
    if begun[at] != brackets[0]:
        raise ValueError
    at = _json_space(begun, at + 1)
    for number, (key, value) in enumerate(items):
        separator = ""
        if number:
            if at < len(begun):
                if begun[at] != ",":
                    raise ValueError
                at = _json_space(begun, at + 1)
            else:
                separator = ", "
        if at >= len(begun):
            if key is None:
                member = _dumped(value)
            else:
                member = f"{_dumped(key)}: {_dumped(value)}"
            return at, separator + member + _rest_of(items[number + 1 :]) + brackets[1]
        if key is not None:
            written = _JSON_STRING.match(begun, at)
            name = _dumped(key)
            if written is None and name.startswith(begun[at:]):
                member = f"{name[len(begun) - at :]}: {_dumped(value)}"
                return len(begun), member + _rest_of(items[number + 1 :]) + brackets[1]
            if written is None or json.loads(written[0], strict=False) != key:
                raise ValueError
            at = _json_space(begun, written.end())
            if at < len(begun):
                if begun[at] != ":":
                    raise ValueError
                at = _json_space(begun, at + 1)
            else:
                return at, f": {_dumped(value)}" + _rest_of(items[number + 1 :]) + brackets[1]
        at, lacks = _completed(begun, at, value)
        if lacks is not None:
            return at, lacks + _rest_of(items[number + 1 :]) + brackets[1]
        at = _json_space(begun, at)
    if at >= len(begun):
        return at, brackets[1]
    if begun[at] != brackets[1]:
        raise ValueError
    return at + 1, None


def _rest_of(items: list[tuple[str | None, Any]]) -> str:
    """Return *items* that follow on another one."""
    return "".join(
        [f", {_dumped(each)}" if key is None else f", {_dumped(key)}: {_dumped(each)}" for key, each in items]
    )
