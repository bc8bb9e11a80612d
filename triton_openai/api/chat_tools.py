"""
The tools of chat completions: their wire types, and how they are read.

Source of the shapes: OpenAI's ``tools``, ``tool_choice`` and their older forms ``functions`` and ``function_call``
(openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from triton_openai.api.bodies import converted
from triton_openai.api.tools import (
    ANY_TOOL,
    MAX_TOOLS,
    ChosenTool,
    DeclaredTool,
    FunctionDefinition,
    Grammar,
    ToolName,
    ToolPlan,
    ToolSelection,
    custom_function,
    declared_function,
    plan_tools,
)
from triton_openai.errors import missing


class CustomFormat(msgspec.Struct):
    """The form of a custom tool's text: any, or that of a grammar."""

    type: Literal["text", "grammar"] = "text"
    grammar: Grammar | None = None


class CustomDefinition(msgspec.Struct):
    """A tool that takes text in place of arguments."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class ToolDefinition(msgspec.Struct):
    """A function, or a custom tool."""

    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class NamedFunction(msgspec.Struct):
    """One of the request's functions, by its name."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """One of the request's functions."""

    function: NamedFunction


class NamedCustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """One of the request's custom tools."""

    custom: NamedFunction


class AllowedToolList(msgspec.Struct):
    """The tools that may be called, and whether one of them must be."""

    tools: Annotated[list[NamedTool | NamedCustomTool], Meta(min_length=1)]
    mode: Literal["auto", "required"] = "auto"


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Some of the request's tools."""

    allowed_tools: AllowedToolList


def _checked_later(kind: type[msgspec.Struct]) -> Meta:
    return Meta(extra_json_schema={"$ref": f"#/components/schemas/{kind.__name__}"})


#: An item of ``tools``, and one of ``functions``: kept as it is for the template. :func:`plan_chat_tools` checks it.
Tool: TypeAlias = Annotated[dict[str, Any], _checked_later(ToolDefinition)]
Function: TypeAlias = Annotated[dict[str, Any], _checked_later(FunctionDefinition)]
#: ``tool_choice`` and ``function_call``
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools | None
FunctionChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction | None


class _Definitions(msgspec.Struct):
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] = []
    functions: Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS)] = []


def plan_chat_tools(
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice = None,
    functions: Sequence[Function] | None = None,
    function_call: FunctionChoice = None,
    parallel: bool | None = None,
) -> ToolPlan:
    """Return how the tools of a request are used. Raises :class:`InvalidRequest`."""
    if functions and not tools:
        return plan_tools(_declared_functions(functions), _selection(function_call, "function_call"), legacy=True)
    if tools:
        declared = _declared_tools(tools)
    else:
        declared = []
    return plan_tools(declared, _selection(tool_choice, "tool_choice"), parallel=parallel)


def _declared_functions(functions: Sequence[Function]) -> list[DeclaredTool]:
    definitions = converted({"functions": functions}, _Definitions).functions
    return [
        declared_function(definition, {"type": "function", "function": function})
        for definition, function in zip(definitions, functions, strict=True)
    ]


def _declared_tools(tools: Sequence[Tool]) -> list[DeclaredTool]:
    definitions = converted({"tools": tools}, _Definitions).tools
    declared = []
    for index, definition in enumerate(definitions):
        if definition.type == "custom":
            if definition.custom is None:
                raise missing(f"tools[{index}].custom")
            declared.append(_declared_custom(definition.custom))
        elif definition.function is None:
            raise missing(f"tools[{index}].function")
        else:
            declared.append(declared_function(definition.function, tools[index]))
    return declared


def _declared_custom(custom: CustomDefinition) -> DeclaredTool:
    grammar = None
    if custom.format is not None:
        grammar = custom.format.grammar
    function = custom_function(custom.description, grammar)
    shown = {"type": "function", "function": {"name": custom.name, **function}}
    return DeclaredTool(custom.name, shown, function["parameters"], custom=True)


def _selection(choice: ToolChoice | FunctionChoice, param: str) -> ToolSelection:
    """Return what *choice*, which the client calls *param*, says."""
    if choice is None:
        return ANY_TOOL
    if isinstance(choice, str):
        return ToolSelection(choice)
    if isinstance(choice, AllowedTools):
        allowed = choice.allowed_tools
        path = f"{param}.allowed_tools.tools"
        chosen = [_chosen(tool, f"{path}[{index}]") for index, tool in enumerate(allowed.tools)]
        return ToolSelection(allowed.mode, chosen)
    return ToolSelection("named", [_chosen(choice, param)])


def _chosen(tool: NamedTool | NamedCustomTool | NamedFunction, path: str) -> ChosenTool:
    if isinstance(tool, NamedTool):
        return ChosenTool(tool.function.name, f"{path}.function.name")
    if isinstance(tool, NamedCustomTool):
        return ChosenTool(tool.custom.name, f"{path}.custom.name")
    return ChosenTool(tool.name, f"{path}.name")
