"""Parameters in tags of any format: ``<parameter=k>``, ``<parameter name="k">``, ``<arg_key>k</arg_key>``, ``<k>``."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import msgspec

from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tolerant.context import Context, ContextReader
from triton_openai.parsers.tools.tolerant.scanner import (
    CALL_TAG,
    CLOSING,
    NAME_ATTRIBUTE,
    NAMESPACE,
    OPENING,
    Incomplete,
    Unreadable,
)
from triton_openai.parsers.tools.tolerant.values import ValueReader

#: A key with the brackets of its tag is not longer.
_MAX_KEY_TAG = 258
_PARAMETER_TAG = rf"{NAMESPACE}(?:parameter|param|argument|arg)"
_PARAMETER = re.compile(
    rf"""<{_PARAMETER_TAG}{NAME_ATTRIBUTE}(?:\s{{1,64}}+string=["']?(true|false)["']?)?\s{{0,64}}+>"""
)
#: Some models repeat the key in it.
_PARAMETER_END = re.compile(rf"</{_PARAMETER_TAG}(?:=[^<>\n]{{1,256}}+)?>")
#: Between the tags are a key and white space.
_KEY_TAGS = re.compile(
    r"(<arg_key>)?\s{0,64}+([^\s<>][^<>\n]{0,199}+)\s{0,64}+"
    r"(?:(?P<end></arg_key>)\s{0,64}+[:=]?\s{0,64}+(?P<value><arg_value>)?|(?P<only><arg_value>))"
)
_VALUE_END = re.compile(r"</arg_value>")
#: What ends a value without an end tag.
_NEXT_TAG = re.compile(rf"\n?(?:{_PARAMETER.pattern}|<arg_key>|{CLOSING.pattern})")
_OPENS = re.compile(rf"{_PARAMETER.pattern}|<arg_key>|{OPENING.pattern}|{CALL_TAG.pattern}")


@lru_cache(maxsize=64)
def _parameter_end(key: str) -> re.Pattern[str]:
    """Return a pattern for the end tag of the parameter *key*, or one with its name."""
    return re.compile(rf"{_PARAMETER_END.pattern}|</{re.escape(key)}>")


@lru_cache(maxsize=64)
def _end_or_call(end: str) -> re.Pattern[str]:
    """Return a pattern for the end tag *end* and for what opens a call."""
    return re.compile(rf"(?P<end>{end})|{OPENING.pattern}|{CALL_TAG.pattern}")


class _Tag(msgspec.Struct, frozen=True):
    """The opening tag of a parameter."""

    key: str
    #: Where the value begins.
    start: int
    #: The end tag.
    end: re.Pattern[str]
    #: Whether line breaks at the beginning and at the end of the value are markup.
    trims_lines: bool = False
    #: Whether the tag says that the value is a string.
    is_text: bool = False
    #: What stands in the tag before the key.
    form: str = ""


class TagReader(ContextReader):
    """Reads parameters in tags."""

    def __init__(self, context: Context, values: ValueReader) -> None:
        super().__init__(context)
        self._values = values
        # Of the call that is read
        self._parameters = Parameters(None)
        self._seen: set[str] = set()

    def read(self, at: int, parameters: Parameters) -> tuple[dict[str, Any], int]:
        """Return the arguments whose tags begin at *at*, and the position after them."""
        scanner = self._scanner
        self._parameters = parameters
        self._seen = set()
        arguments: dict[str, Any] = {}
        while True:
            at = scanner.after_space(at)
            if scanner.is_over(at):
                if self._options.cut or not arguments:
                    raise Unreadable
                return arguments, at
            tag = self._tag(at)
            if tag is None:
                if not scanner.closes(at) or (not arguments and parameters.required):
                    raise Unreadable
                return arguments, at
            if tag.key in self._seen:
                raise Unreadable
            self._seen.add(tag.key)
            text, at = self._text(tag)
            arguments[tag.key] = self._value(tag, text)

    def _is_next(self, key: str) -> bool:
        """Return whether *key* is a parameter that has not come yet."""
        return self._parameters.has(key) and key not in self._seen

    def _tag(self, at: int) -> _Tag | None:
        """Return the opening tag at *at*."""
        text = self._scanner.text
        self._scanner.budget.take()
        match = _PARAMETER.match(text, at)
        if match is not None:
            return _Tag(
                match[1],
                match.end(),
                _parameter_end(match[1]),
                trims_lines=match[2] is None,
                is_text=match[2] == "true",
                form=text[at : match.start(1)],
            )
        match = _KEY_TAGS.match(text, at)
        if match is not None:
            key = match[2].strip()
            is_complete = bool(match[1] and match["end"] and match["value"])
            if is_complete or self._is_next(key):
                return _Tag(key, match.end(), _VALUE_END, form=match[1] or "")
        if text.startswith("<", at):
            end = text.find(">", at, at + _MAX_KEY_TAG)
            key = text[at + 1 : max(end, at + 1)]
            if self._is_next(key):
                # A value on lines of its own
                is_block = text.startswith("\n", end + 1)
                return _Tag(key, end + 1, re.compile(re.escape(f"</{key}>")), trims_lines=is_block)
        return None

    def _text(self, tag: _Tag) -> tuple[str, int]:
        """
        Return the text of a parameter, and the position after its end tag.

        The text ends at the first end tag behind which the rest of the call follows.
        """
        scanner = self._scanner
        at = tag.start
        while True:
            match = tag.end.search(scanner.text, at)
            stop = len(scanner.text)
            if match is not None:
                stop = match.start()
            scanner.budget.take(1 + stop - at)
            unclosed = self._end_of_unclosed(at, stop, is_last=match is None)
            if unclosed is not None:
                return scanner.text[tag.start : unclosed], unclosed
            if match is None:
                if not scanner.ended:
                    raise Incomplete
                raise Unreadable
            at = match.end()
            scanner.require_lookahead(at)
            if self._ends(match, tag) and self._continues(at, tag):
                return scanner.text[tag.start : match.start()], at

    def _ends(self, match: re.Match[str], tag: _Tag) -> bool:
        """Return whether *match* may be the end of *tag*; that of the key's own name is not if the value opens it."""
        if match[0] != f"</{tag.key}>":
            return True
        opening = self._scanner.text.find(f"<{tag.key}", tag.start, match.start())
        if opening >= 0:
            self._scanner.budget.take(1 + opening - tag.start)
            return False
        self._scanner.budget.take(1 + match.start() - tag.start)
        return True

    def _end_of_unclosed(self, at: int, stop: int, *, is_last: bool) -> int | None:
        """
        Return where, from *at* to *stop*, a parameter without an end tag ends.

        The next parameter, or the end of the call, then begins a line. *is_last*: no end tag follows.
        """
        scanner = self._scanner
        while (match := _NEXT_TAG.search(scanner.text, at, stop)) is not None:
            scanner.budget.take(1 + match.end() - at)
            at = match.end()
            begins_line = match[0].startswith("\n")
            tag = match.start() + begins_line
            parameter = _PARAMETER.match(scanner.text, tag)
            if parameter is not None:
                if begins_line and self._is_next(parameter[1]):
                    return match.start()
            elif scanner.text.startswith("<arg_key>", tag):
                scanner.require_lookahead(tag)
                key = _KEY_TAGS.match(scanner.text, tag)
                if key is not None and self._is_next(key[2].strip()):
                    return match.start()
            elif is_last or begins_line or not scanner.text.startswith("</", tag):
                scanner.require_lookahead(match.end())
                behind = scanner.after_closings(match.start())
                if scanner.is_over(behind) or scanner.opens(behind):
                    return match.start()
                # The result is the same for each tag up to there.
                at = max(at, behind)
        return None

    def _continues(self, at: int, before: _Tag) -> bool:
        """
        Return whether the rest of the call begins at *at*, behind an end tag of the parameter *before*.

        A parameter that the schema does not have is one if its tag has the same form.
        """
        scanner = self._scanner
        at = scanner.after_space(at)
        if scanner.is_over(at):
            return not self._options.cut
        tag = self._tag(at)
        if tag is not None:
            if tag.key in self._seen:
                if not self._has_parameter(before.start, at):
                    # The parameter comes twice, or the value contains its tags: nothing shows which.
                    raise Unreadable
                return False
            is_same_form = bool(tag.form) and tag.form == before.form
            return is_same_form or not self._parameters.names or self._parameters.has(tag.key)
        if not scanner.closes(at):
            return False
        behind = scanner.after_closings(at)
        if scanner.is_over(behind) or scanner.opens(behind):
            return True
        return not self._has_end_tag(behind, before.end)

    def _has_parameter(self, start: int, end: int) -> bool:
        """Return whether a parameter or a call opens from *start* to *end*."""
        self._scanner.budget.take(end - start)
        return _OPENS.search(self._scanner.text, start, end) is not None

    def _has_end_tag(self, at: int, end: re.Pattern[str]) -> bool:
        """
        Return whether the text after a call has an end tag before the next call begins.

        Then what seemed to be the end of the call is a part of the value.
        """
        scanner = self._scanner
        match = _end_or_call(end.pattern).search(scanner.text, at)
        searched = len(scanner.text)
        if match is not None:
            searched = match.end()
        scanner.budget.take(1 + searched - at)
        if match is None and not scanner.ended:
            raise Incomplete
        return match is not None and match["end"] is not None

    def _value(self, tag: _Tag, text: str) -> Any:
        """Return the value of a parameter whose text is *text*."""
        if tag.trims_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        if tag.is_text or self._parameters.is_text(tag.key):
            return text
        value = json.loads(self._parameters.value(tag.key, text))
        if isinstance(value, str):
            return self._values.parsed_text(value, self._parameters, tag.key)
        return value
