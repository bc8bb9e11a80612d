"""
The tools of a chat request: read, checked, and turned into what the template, the parsers and the backend need.

Source of the shapes: OpenAI's ``tools``, ``tool_choice`` and their older forms ``functions`` and ``function_call``
(openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from triton_openai.api.bodies import converted
from triton_openai.api.cut_json import read_cut_object
from triton_openai.errors import InvalidRequest, InvalidValue, missing
from triton_openai.generation import Guide


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


# Wider than OpenAI's [a-zA-Z0-9_-]{1,64}: names of MCP servers have dots, slashes and colons.
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}(?!\n)$")]


class FunctionDefinition(msgspec.Struct):
    """A function that may be called; ``parameters`` is the JSON schema of its arguments."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(msgspec.Struct):
    """What a custom tool's text follows."""

    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct):
    """The form of a custom tool's text: any, or that of a grammar."""

    type: Literal["text", "grammar"] = "text"
    grammar: Grammar | None = None


class CustomDefinition(msgspec.Struct):
    """A tool that takes text in place of arguments."""

    name: _Name
    description: str | None = None
    format: CustomFormat | None = None


class ToolDefinition(msgspec.Struct):
    """A function, or a custom tool."""

    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


def custom_function(description: str | None, grammar: Grammar | None) -> dict[str, Any]:
    """Return a custom tool as a function of one text; only a forced call is held to a regular expression."""
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
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        cut = read_cut_object(arguments)
        if cut.text is None or cut.members:
            return arguments
        return cut.text
    text = given.get("input", next(iter(given.values())) if len(given) == 1 else None)
    if isinstance(text, str):
        return text
    return arguments


class NamedFunction(msgspec.Struct):
    """One of the given functions, by its name."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """One of the given functions."""

    function: NamedFunction


class NamedCustomTool(msgspec.Struct, tag_field="type", tag="custom"):
    """One of the given custom tools."""

    custom: NamedFunction


class AllowedToolList(msgspec.Struct):
    """The tools that may be called, and whether one of them must be."""

    tools: Annotated[list[NamedTool | NamedCustomTool], Meta(min_length=1)]
    mode: Literal["auto", "required"] = "auto"


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Some of the given tools."""

    allowed_tools: AllowedToolList


def _checked_later(kind: type[msgspec.Struct]) -> Meta:
    return Meta(extra_json_schema={"$ref": f"#/components/schemas/{kind.__name__}"})


#: An item of ``tools``, and one of ``functions``: kept as it is for the template, and checked by :func:`plan_tools`.
Tool: TypeAlias = Annotated[dict[str, Any], _checked_later(ToolDefinition)]
Function: TypeAlias = Annotated[dict[str, Any], _checked_later(FunctionDefinition)]
#: ``tool_choice`` and ``function_call``
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools | None
FunctionChoice: TypeAlias = Literal["none", "auto", "required"] | NamedFunction | None


class _Definitions(msgspec.Struct):
    tools: Annotated[list[ToolDefinition], Meta(max_length=512)] = []
    functions: Annotated[list[FunctionDefinition], Meta(max_length=512)] = []


Mode = Literal["none", "auto", "required", "named"]


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

    @property
    def active(self) -> bool:
        """Whether the answer may hold calls."""
        return self.mode != "none"

    @property
    def param(self) -> str:
        """What the client calls the choice among its tools."""
        if self.legacy:
            return "function_call"
        return "tool_choice"

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")

    def guide(self) -> Guide:
        """Return the guide for an answer that has to be a call. Raises :class:`InvalidRequest`."""
        try:
            schema = (
                calls_schema(self.schemas, parallel=self.parallel) if self.name is None else self.schemas[self.name]
            )
            return Guide(kind="json_schema", value=msgspec.json.encode(schema).decode(), param=self.param)
        except RecursionError as error:
            raise InvalidRequest("A tool's parameters are nested too deeply.", param="tools") from error


def plan_tools(
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice = None,
    functions: Sequence[Function] | None = None,
    function_call: FunctionChoice = None,
    parallel: bool | None = None,
) -> ToolPlan:
    """Return the plan of a request. Raises :class:`InvalidRequest`."""
    legacy = not tools and bool(functions)
    if legacy:
        names = "functions"
        key = "function_call"
    else:
        names = "tools"
        key = "tool_choice"
    choice = function_call if legacy else tool_choice
    if choice is None and not tools and not legacy:
        return ToolPlan()
    given = converted({names: (functions if legacy else tools) or ()}, _Definitions)
    schemas: dict[str, Mapping[str, Any]] = {}
    listed: list[Mapping[str, Any]] = list(tools or [{"type": "function", "function": one} for one in functions or ()])
    custom = set()
    for index, tool in enumerate(given.tools or [ToolDefinition(function=one) for one in given.functions]):
        function = tool.function
        if tool.type == "custom":
            if tool.custom is None:
                raise missing(f"tools[{index}].custom")
            name = tool.custom.name
            form = tool.custom.format
            made = custom_function(tool.custom.description, None if form is None else form.grammar)
            function = FunctionDefinition(name, parameters=made["parameters"])
            listed[index] = {"type": "function", "function": {"name": name, **made}}
            custom.add(name)
        if function is None:
            raise missing(f"tools[{index}].function")
        if function.name in schemas:
            raise InvalidValue(f"There are two tools of the name '{function.name}'.", names)
        parameters = function.parameters
        if parameters is None:
            schemas[function.name] = {"type": "object", "properties": {}}
        else:
            schemas[function.name] = parameters
    if not schemas and choice not in (None, "none", "auto"):
        raise InvalidValue(f"'{key}' is only allowed when '{names}' are given.", key)
    if not schemas or choice == "none":
        # As OpenAI does it: the model knows of the tools and must not call them. Without them in the prompt it cannot.
        return ToolPlan()
    plan = ToolPlan(
        prompt=listed,
        schemas=schemas,
        mode="required" if choice == "required" else "auto",
        legacy=legacy,
        parallel=parallel is not False and not legacy,
        custom=frozenset(custom),
    )
    if isinstance(choice, NamedTool | NamedCustomTool | NamedFunction):
        return msgspec.structs.replace(plan, mode="named", name=_known(choice, key, schemas), parallel=False)
    if isinstance(choice, AllowedTools):
        place = "tool_choice.allowed_tools.tools"
        chosen = [_known(tool, f"{place}[{index}]", schemas) for index, tool in enumerate(choice.allowed_tools.tools)]
        return msgspec.structs.replace(
            plan,
            prompt=[tool for tool in listed if tool["function"]["name"] in chosen],
            schemas={name: schemas[name] for name in chosen},
            mode=choice.allowed_tools.mode,
        )
    return plan


def _known(tool: NamedTool | NamedCustomTool | NamedFunction, place: str, schemas: Mapping[str, Any]) -> str:
    if isinstance(tool, NamedTool):
        tool = tool.function
        place = f"{place}.function"
    elif isinstance(tool, NamedCustomTool):
        tool = tool.custom
        place = f"{place}.custom"
    if tool.name not in schemas:
        raise InvalidValue(f"'{place}.name' is not one of the given tools.", f"{place}.name")
    return tool.name
