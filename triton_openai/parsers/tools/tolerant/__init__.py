"""
Calls with slips, read after a format's own grammar has failed: one reader for all formats.

It takes a call in any notation that the formats have (an object, tags, keywords in parentheses), with any of their
tags around it, too many or too few. The request's tools decide what is a name, which keys there are, and which type a
value has. What follows decides where a value ends: the next key, or the end of the call. What has two meanings is not
read: :class:`Unreadable`.

A result is valid whatever text follows. Where more text could change it, :class:`Incomplete` is raised.

The work is linear: :mod:`scanner` has the budget of steps. :mod:`calls` reads calls, :mod:`values` JSON-like values and
keywords, :mod:`tagged` parameters in tags; :mod:`strings` and :mod:`keys` decide where a string ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_openai.parsers.tools.tolerant.calls import Call, CallReader, Calls
from triton_openai.parsers.tools.tolerant.context import Context
from triton_openai.parsers.tools.tolerant.missing_rest import missing_rest
from triton_openai.parsers.tools.tolerant.request_tools import RequestTools
from triton_openai.parsers.tools.tolerant.scanner import Incomplete, Scanner, StepBudget, Unreadable
from triton_openai.parsers.tools.tolerant.state import CallState, Options

__all__ = ["Call", "Calls", "Incomplete", "Unreadable", "missing_rest", "read"]


def read(
    text: str, tools: Mapping[str, Mapping[str, Any]], *, ended: bool, cut: bool, bare: bool = False,
    name: str | None = None, keeps_types: bool = False, start: int = 0,
) -> Calls:  # fmt: skip
    """
    Return the calls that *text* begins with.

    *ended* is whether no more text follows, and *cut* whether a limit ended the text: then nothing that is missing at
    its end is added. *bare* is whether no marker shows that the text is a call: then nothing but calls may follow. With
    *name*, the text is the arguments of that tool. With *keeps_types*, a string stays a string where the schema has
    another type. The calls begin at *start*. Raises :class:`Unreadable` or :class:`Incomplete`.
    """
    if not tools:
        raise Unreadable
    budget = StepBudget(len(text))
    context = Context(
        scanner=Scanner(text, budget, ended=ended, names=tools.keys()),
        tools=RequestTools(tools, budget),
        options=Options(cut=cut, bare=bare, keeps_types=keeps_types),
        state=CallState(),
    )
    reader = CallReader(context)
    try:
        if name is not None:
            return reader.arguments_of(name)
        return reader.calls(start)
    except RecursionError as error:
        raise Unreadable from error
