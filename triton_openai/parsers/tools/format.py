"""
Formats of tool calls as data: markers, order and quoting, by which one of a few grammars reads a family's calls.

``formats.yaml`` has the built-in ones. An operator writes another one into a model's settings, as ``tool_format``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import yaml
from msgspec import Meta

from triton_openai.errors import ConfigurationError
from triton_openai.parsers.reader import SPACE, Markers
from triton_openai.parsers.tools import tags
from triton_openai.parsers.tools.brace_calls import BraceCalls
from triton_openai.parsers.tools.json_calls import JsonCalls
from triton_openai.parsers.tools.pythonic import Pythonic
from triton_openai.parsers.tools.sections import Invokes, NamedJson, TagNames
from triton_openai.parsers.tools.tagged_calls import FunctionTags, KeyTags
from triton_openai.parsers.tools.tool_parser import ToolParser

#: A marker is a text that a model writes as it is.
Marker: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]
Pair: TypeAlias = tuple[Marker, Marker]
Markup: TypeAlias = Annotated[list[Marker], Meta(max_length=20)]


class _Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="notation"):
    """What all formats have."""

    #: The markers before a call, or before several.
    open: Markup
    #: The markers after them.
    close: Markup = []
    #: Whether tokenizers count the markers as special tokens.
    special_tokens: bool = False
    #: The models that write it, for people.
    description: str = ""
    #: Other names of it.
    aliases: list[str] = []

    def parser(self, name: str) -> type[ToolParser]:
        """Return the class of its parsers. Raises :class:`ConfigurationError`."""
        base, attributes = self._grammar()
        attributes = {
            "__doc__": self.description,
            "__module__": __name__,
            "special_tokens": self.special_tokens,
            "markers": Markers(*self.open),
            "closings": tuple(self.close),
            "own_openings": frozenset(self.open).difference(tags.OPENINGS),
            **attributes,
        }
        return type(name, (base,), attributes)

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        """Return the class that reads the format, and its attributes."""
        raise NotImplementedError

    def _own_fields(self) -> dict[str, Any]:
        """Return the fields of this notation. The class that reads it has attributes of the same names."""
        names = set(self.__struct_fields__).difference(_Format.__struct_fields__)
        return {name: getattr(self, name) for name in names}

    def _call_tags(self, call: Pair) -> dict[str, Any]:
        """Return the attributes of a class that reads calls between two tags, which may stand without a section."""
        return {"call": call[0], "call_end": call[1], "markers": Markers(*dict.fromkeys([*self.open, call[0]]))}

    def _only_close(self) -> str:
        """Return the only closing marker; empty if there is none."""
        if len(self.close) > 1:
            raise ConfigurationError("A format of this notation has one closing marker at most.")
        return "".join(self.close)


class JsonFormat(_Format, frozen=True, kw_only=True, tag="json"):
    """Objects with a name and arguments, alone or in an array."""

    #: The character with which calls begin that have no marker, at the beginning of the answer.
    bare: Literal["", "{", "["] = ""
    #: The keys of the name.
    name_keys: Annotated[tuple[Marker, ...], Meta(min_length=1)] = ("name",)
    #: Whether the name is the key of the arguments: ``{"f": {…}}``.
    name_is_key: bool = False
    #: Characters that may stand between calls beside white space.
    separators: str = ""
    #: Whether the opening marker contains the bracket of the array.
    opens_list: bool = False
    #: What may follow, by the opening marker, or for ``*``.
    optional_close: Mapping[str, Marker] = {}

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        separators = SPACE
        if self.separators:
            separators = re.compile(rf"[\s{re.escape(self.separators)}]*")
        return JsonCalls, {**self._own_fields(), "closing": self._only_close(), "separators": separators}


class PythonFormat(_Format, frozen=True, kw_only=True, tag="python"):
    """Python's calls with keywords: ``[f(a=1)]``."""

    bare: Literal["", "["] = ""
    #: Whether the answer may begin with the name of a tool, without a marker.
    bare_names: bool = False

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        return Pythonic, {**self._own_fields(), "closing": self._only_close()}


class FunctionsFormat(_Format, frozen=True, kw_only=True, tag="functions"):
    """``<function=f><parameter=k>value</parameter></function>`` between two markers."""

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        if len(self.open) != 1 or len(self.close) != 1:
            raise ConfigurationError("A format of functions has one opening and one closing marker.")
        opening = self.open[0]
        closing = self.close[0]
        return FunctionTags, {
            "opening": opening,
            "closing": closing,
            "markers": Markers(opening, "<function="),
            "doubts": ("\n<parameter=", "\n</function>", f"\n{closing}"),
        }


class InvokesFormat(_Format, frozen=True, kw_only=True, tag="invokes"):
    """Tags with attributes: ``<invoke name="f"><parameter name="k">value</parameter></invoke>``."""

    #: The beginning of the opening tag, without attributes, and the closing tag.
    call: Pair
    parameter: Pair
    #: What follows the beginning of the opening tag before its attributes, and what follows the closing tag.
    call_head: Markup = []
    call_tail: str = ""
    #: The end of an opening tag.
    tag_end: Marker = ">"
    name_attribute: Marker = "name"
    key_attribute: Marker = "name"
    #: The attribute that says that a value is a text, and its value.
    text_attribute: Pair = ("string", "true")
    #: Whether one line break on either side of a value is markup.
    trims_lines: bool = False
    #: The beginning of the opening tag and the closing tag of arguments that are one JSON object.
    json_block: Pair | None = None

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        return Invokes, {**self._own_fields(), **self._call_tags(self.call)}


class TagNamesFormat(_Format, frozen=True, kw_only=True, tag="tag_names"):
    """Tags with the names of parameters: ``<invoke name="f"><k>value</k></invoke>``."""

    #: The beginning of the opening tag, and the closing tag.
    call: Pair
    #: The beginnings of a parameter's opening and closing tags.
    parameter: Pair = ("<", "</")

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        return TagNames, {**self._own_fields(), **self._call_tags(self.call)}


class KeysFormat(_Format, frozen=True, kw_only=True, tag="keys"):
    """A name, then keys and values in tags of their own."""

    call: Pair
    key: Pair
    value: Pair
    #: What may follow the name.
    name_end: str = ""

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        # The beginning of the last tag is enough: a longer one would wait longer.
        closing = self.call[1][:8]
        doubts = (f"\n{self.key[0]}", self.key[0], f"\n{closing}", closing)
        return KeyTags, {**self._own_fields(), **self._call_tags(self.call), "doubts": doubts}


class BracesFormat(_Format, frozen=True, kw_only=True, tag="braces"):
    """``call:f{k:"text",n:1}`` with a quote of its own."""

    quote: Marker = '"'
    #: What stands before the name.
    name_start: str = "call:"

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        return BraceCalls, {**self._own_fields(), "closing": self._only_close()}


class NamedJsonFormat(_Format, frozen=True, kw_only=True, tag="named_json"):
    """A name, a separator and the arguments as a JSON object, between two markers."""

    call: Pair
    separator: Marker

    def _grammar(self) -> tuple[type[ToolParser], dict[str, Any]]:
        return NamedJson, {**self._own_fields(), **self._call_tags(self.call)}


#: A format; ``notation`` decides which.
ToolFormat: TypeAlias = (
    JsonFormat | PythonFormat | FunctionsFormat | InvokesFormat | TagNamesFormat | KeysFormat | BracesFormat
    | NamedJsonFormat
)  # fmt: skip


def read_format(value: Any, origin: str) -> ToolFormat:
    """Return the format that *value*, read from *origin*, describes. Raises :class:`ConfigurationError`."""
    try:
        made: ToolFormat = msgspec.convert(value, ToolFormat)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"The format of tool calls in {origin} is wrong: {error}.") from error
    return made


def read_format_file(path: Path) -> ToolFormat:
    """Return the format that the YAML file *path* describes. Raises :class:`ConfigurationError`. Blocks."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"The format of tool calls in {path} cannot be read: {error}.") from error
    return read_format(value, str(path))


@cache
def built_in_formats() -> Mapping[str, ToolFormat]:
    """Return the built-in formats that data describes, by name."""
    text = (files("triton_openai.parsers.tools") / "formats.yaml").read_text(encoding="utf-8")
    return {name: read_format(value, name) for name, value in yaml.safe_load(text).items()}


@cache
def built_in_parser(name: str) -> type[ToolParser]:
    """Return the class of the parsers for the built-in format *name*."""
    return built_in_formats()[name].parser(name)
