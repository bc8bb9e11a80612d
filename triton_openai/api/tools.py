"""
The tools of a conversation: those that a client declares, the choice among them, and the plan that follows.

Each API for chats reads its own shapes into :class:`DeclaredTool` and :class:`ToolSelection`. The plan has what the
template, the parsers and the backend need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triton_openai.api.cut_json import read_cut_object
from triton_openai.errors import InvalidRequest, InvalidValue
from triton_openai.generation import Guide

#: Most tools of a request.
MAX_TOOLS = 512


def calls_schema(schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """
    Return the schema of a list of at least one call, each ``{"name": …, "parameters": {…}}`` with its tool's schema.

    Each tool's schema becomes a definition as a whole, and the references inside it, which count from the root, are
    moved along with it. Raises ``RecursionError`` for schemas nested beyond reason.
    """
    definitions: dict[str, Any] = {}
    variants = []
    for number, (name, schema) in enumerate(schemas.items()):
        # Not the tool's name: what stands in a reference has to be free of slashes.
        root = f"#/$defs/tool{number}"
        definitions[f"tool{number}"] = _moved(schema, root)
        variants.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": {"$ref": root}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    result: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": variants}, "$defs": definitions}
    if not parallel:
        result["maxItems"] = 1
    return result


def _moved(node: Any, root: str) -> Any:
    """Return *node* with the references that count from its schema's root counting from *root*."""
    if isinstance(node, list):
        return [_moved(item, root) for item in node]
    if not isinstance(node, Mapping):
        return node
    moved = {key: _moved(value, root) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


#: A tool's name. Wider than OpenAI's [a-zA-Z0-9_-]{1,64}: names of MCP servers have dots, slashes and colons.
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}(?!\n)$")]


class FunctionDefinition(msgspec.Struct):
    """A function that may be called; ``parameters`` is the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(msgspec.Struct):
    """What a custom tool's text follows."""

    definition: str
    syntax: Literal["lark", "regex"]


def custom_function(description: str | None, grammar: Grammar | None) -> dict[str, Any]:
    """Return a custom tool as a function of one text. A regular expression guides forced calls only."""
    text: dict[str, Any] = {"type": "string", "description": "The tool's input, as plain text."}
    whole = description or ""
    if grammar is not None:
        whole += f"\n\nThe input follows this {grammar.syntax} grammar:\n{grammar.definition}"
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"description": whole.strip(), "parameters": parameters}


def custom_input(arguments: str) -> str:
    """
    Return the text for a custom tool: the argument ``input``, or the only one, or else what the model wrote.

    Of arguments that were cut, it is the text up to there.
    """
    try:
        members = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        cut = read_cut_object(arguments)
        if cut.text is None or cut.members:
            return arguments
        return cut.text
    text = members.get("input")
    if "input" not in members and len(members) == 1:
        (text,) = members.values()
    if isinstance(text, str):
        return text
    return arguments


class DeclaredTool(msgspec.Struct, frozen=True):
    """A tool of a request, which is a function to the model. The reader of the request has checked it."""

    name: str
    #: What the template gets.
    shown: Mapping[str, Any]
    #: The JSON schema of its arguments.
    parameters: Mapping[str, Any]
    #: Whether it takes text in place of arguments.
    custom: bool = False


def declared_function(function: FunctionDefinition, shown: Mapping[str, Any]) -> DeclaredTool:
    """Return *function* as a tool, of which the template gets what is *shown*."""
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    return DeclaredTool(function.name, shown, parameters)


class ChosenTool(msgspec.Struct, frozen=True):
    """A tool that a request chooses."""

    name: str
    #: The client's path of the name.
    path: str


Mode = Literal["none", "auto", "required", "named"]


class ToolSelection(msgspec.Struct, frozen=True):
    """Which of a request's tools the model may call."""

    mode: Mode = "auto"
    #: The only tools that may be called; without any, all may. In mode ``named`` it is the one that must be called.
    tools: Sequence[ChosenTool] = ()


ANY_TOOL = ToolSelection()


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a request's tools are used.

    ``prompt`` is what the template gets. ``schemas`` are the parameters' schemas of the tools that may be called, by
    name. ``name`` is the tool that must be called in mode ``named``. ``legacy`` is whether the client uses
    ``functions``, the older form, also for its answer. ``parallel`` is whether there may be several calls. ``custom``
    are the names of the tools that take text in place of arguments, which are functions to the model.
    """

    prompt: Sequence[Mapping[str, Any]] = ()
    schemas: Mapping[str, Mapping[str, Any]] = {}
    mode: Mode = "none"
    name: str | None = None
    legacy: bool = False
    parallel: bool = True
    custom: frozenset[str] = frozenset()
    #: Whether the answer has to be a call.
    forced: bool = False

    @property
    def param(self) -> str:
        """What the client calls the choice among its tools."""
        if self.legacy:
            return "function_call"
        return "tool_choice"

    def guide(self) -> Guide:
        """Return the guide for an answer that has to be a call. Raises :class:`InvalidRequest`."""
        try:
            if self.name is None:
                schema: Mapping[str, Any] = calls_schema(self.schemas, parallel=self.parallel)
            else:
                schema = self.schemas[self.name]
            return Guide(kind="json_schema", value=msgspec.json.encode(schema).decode(), param=self.param)
        except RecursionError as error:
            raise InvalidRequest("A tool's parameters are nested too deeply.", param="tools") from error


#: The plan of a request without tools.
NO_TOOLS = ToolPlan()


def plan_tools(
    tools: Sequence[DeclaredTool],
    selection: ToolSelection = ANY_TOOL,
    *,
    parallel: bool | None = None,
    legacy: bool = False,
) -> ToolPlan:
    """
    Return how *tools* are used, of which *selection* says which may be called.

    *parallel* is whether there may be several calls, which ``None`` permits. *legacy* is whether the client uses
    ``functions``. Raises :class:`InvalidRequest`.
    """
    if legacy:
        list_param = "functions"
        choice_param = "function_call"
    else:
        list_param = "tools"
        choice_param = "tool_choice"
    if not tools:
        if selection.tools or selection.mode == "required":
            raise InvalidValue(f"'{choice_param}' is only allowed when '{list_param}' are given.", choice_param)
        return NO_TOOLS
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        if tool.name in schemas:
            raise InvalidValue(f"There are two tools of the name '{tool.name}'.", list_param)
        schemas[tool.name] = tool.parameters
    if selection.mode == "none":
        # OpenAI shows the model tools that it must not call. Without them in the prompt it cannot call them.
        return NO_TOOLS
    for chosen in selection.tools:
        if chosen.name not in schemas:
            raise InvalidValue(f"'{chosen.path}' is not one of the given tools.", chosen.path)
    shown = tools
    name = None
    if selection.mode == "named":
        name = selection.tools[0].name
    elif selection.tools:
        names = {chosen.name for chosen in selection.tools}
        shown = [tool for tool in tools if tool.name in names]
        schemas = {chosen.name: schemas[chosen.name] for chosen in selection.tools}
    return ToolPlan(
        prompt=[tool.shown for tool in shown],
        schemas=schemas,
        mode=selection.mode,
        name=name,
        legacy=legacy,
        parallel=name is None and parallel is not False and not legacy,
        custom=frozenset([tool.name for tool in tools if tool.custom]),
        forced=selection.mode in ("required", "named"),
    )
