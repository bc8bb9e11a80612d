"""The typed events that parsers make of text; the API modules render them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's thinking."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins; its arguments follow."""

    #: Counts the calls of a choice from 0.
    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments. All pieces of a finished call together are the text of one JSON object."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments
