"""The tools of the request, by which a call with slips is read: names, parameters, and the types of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_openai.parsers.tools import names
from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tolerant.scanner import StepBudget

#: The keys of an object that is a call.
_NAME_KEYS = ("name", "tool_name", "function_name", "function", "tool", "recipient_name", "action")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "params", "kwargs", "input", "action_input", "tool_input")
CALL_KEYS = frozenset({*_NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "tool_call_id", "index", "call_id"})
#: The only key of an object around a call, or around a list of calls.
WRAPPERS = frozenset({"tool_calls", "tool_call", "function_call", "function_calls", "calls", "call"})
#: The parameters of what no schema describes.
NO_PARAMETERS = Parameters(None)
# Steps for each tool: to compare a name with its name, and arguments with its schema.
_NAME_STEPS = 8
_SCHEMA_STEPS = 64


class RequestTools:
    """Names and parameters of a request's tools."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], budget: StepBudget) -> None:
        """Take *tools*, the schemas of parameters by the tools' names."""
        self._tools = tools
        self._budget = budget
        self._parameters: dict[str, Parameters] = {}
        # The parameters of objects inside of others, each with those of the object around it
        self._inner: dict[tuple[int, str], tuple[Parameters, Parameters]] = {}

    def has(self, name: str) -> bool:
        """Return whether a tool has exactly this *name*."""
        return name in self._tools

    def resolve(self, written: str) -> str | None:
        """Return the name of the tool that *written* means; ``None`` if it means no tool or several."""
        if written in self._tools:
            return written
        self._budget.take(len(written) + _NAME_STEPS * len(self._tools))
        return names.resolve(written, self._tools)

    def named_in(self, members: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return the key of the first of a call's *members* that names a tool, and the tool's name."""
        for key in _NAME_KEYS:
            written = members.get(key)
            if isinstance(written, str):
                name = self.resolve(written)
                if name is not None:
                    return key, name
        return None

    def names_no_tool(self, key: str, value: Any) -> bool:
        """Return whether *key* and *value* in an object name something that is no tool."""
        return key in _NAME_KEYS and isinstance(value, str) and self.resolve(value) is None

    def tool_for_arguments(self, arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
        """Return the name of the only tool that takes *arguments*, and the arguments."""
        self._budget.take(_SCHEMA_STEPS * len(self._tools))
        return names.tool_for_arguments(arguments, self._tools)

    def takes(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether the tool *name* takes *arguments*."""
        return names.fits(arguments, self._tools[name])

    def parameters(self, name: str | None) -> Parameters:
        """Return the parameters of the tool *name*."""
        if name is None:
            return NO_PARAMETERS
        if name not in self._parameters:
            self._parameters[name] = Parameters(self._tools[name])
        return self._parameters[name]

    def inner_parameters(self, parameters: Parameters, key: str) -> Parameters:
        """Return the parameters of the object that is the value of *key*."""
        if not parameters.has(key):
            return NO_PARAMETERS
        known = (id(parameters), key)
        if known not in self._inner:
            self._inner[known] = (parameters, parameters.inside(key))
        return self._inner[known][1]
