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

from triton_openai.api.bodies import explain
from triton_openai.errors import InvalidRequest, InvalidValue
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


class ToolDefinition(msgspec.Struct):
    """A tool: only functions are supported."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """One of the given functions, by its name."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """One of the given tools."""

    function: NamedFunction


class AllowedToolList(msgspec.Struct):
    """The tools that may be called, and whether one of them must be."""

    tools: Annotated[list[NamedTool], Meta(min_length=1)]
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
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | AllowedTools | None
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
    ``functions``, the older form, also for its answer. ``parallel`` is whether there may be several calls.
    """

    prompt: Sequence[Mapping[str, Any]] = ()
    schemas: Mapping[str, Mapping[str, Any]] = {}
    mode: Mode = "none"
    name: str | None = None
    legacy: bool = False
    parallel: bool = True

    @property
    def active(self) -> bool:
        """Whether the answer may hold calls."""
        return self.mode != "none"

    @property
    def param(self) -> str:
        """What the client calls the choice among its tools."""
        return "function_call" if self.legacy else "tool_choice"

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")

    def guide(self) -> Guide | None:
        """Return the guide for an answer that must be a call, else ``None``. Raises :class:`InvalidRequest`."""
        try:
            if self.name is not None:
                schema = self.schemas[self.name]
            elif self.mode == "required":
                schema = calls_schema(self.schemas, parallel=self.parallel)
            else:
                return None
            return Guide(kind="json_schema", value=msgspec.json.encode(schema).decode(), param=self.param)
        except RecursionError as error:
            raise InvalidRequest("A tool's parameters are nested too deeply.", param="tools") from error


def plan_tools(
    *,
    tools: Sequence[Tool] | None,
    tool_choice: ToolChoice = None,
    functions: Sequence[Function] | None = None,
    function_call: FunctionChoice = None,
    parallel: bool | None = None,
) -> ToolPlan:
    """Return the plan of a request. Raises :class:`InvalidRequest`."""
    legacy = not tools and bool(functions)
    names, key = ("functions", "function_call") if legacy else ("tools", "tool_choice")
    choice = function_call if legacy else tool_choice
    if choice is None and not tools and not legacy:
        return ToolPlan()
    try:
        given = msgspec.convert({names: (functions if legacy else tools) or ()}, _Definitions)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    schemas: dict[str, Mapping[str, Any]] = {}
    for function in given.functions or [tool.function for tool in given.tools]:
        if function.name in schemas:
            raise InvalidValue(f"There are two tools of the name '{function.name}'.", names)
        parameters = function.parameters
        schemas[function.name] = {"type": "object", "properties": {}} if parameters is None else parameters
    if not schemas:
        if choice not in (None, "none", "auto"):
            raise InvalidValue(f"'{key}' is only allowed when '{names}' are given.", key)
        return ToolPlan()
    if choice == "none":
        # As OpenAI does it: the model knows of the tools and must not call them. Without them in the prompt it cannot.
        return ToolPlan()
    listed: Sequence[Mapping[str, Any]] = tools or ()
    if legacy:
        listed = [{"type": "function", "function": function} for function in functions or ()]
    parallel = parallel is not False and not legacy
    if isinstance(choice, NamedTool | NamedFunction):
        called, place = (choice, key) if isinstance(choice, NamedFunction) else (choice.function, f"{key}.function")
        name = _known(called, place, schemas)
        return ToolPlan(prompt=listed, schemas=schemas, mode="named", name=name, legacy=legacy, parallel=False)
    mode: Mode = "required" if choice == "required" else "auto"
    if isinstance(choice, AllowedTools):
        mode, place = choice.allowed_tools.mode, "tool_choice.allowed_tools.tools"
        chosen = [
            _known(tool.function, f"{place}[{index}].function", schemas)
            for index, tool in enumerate(choice.allowed_tools.tools)
        ]
        listed = [tool for tool in listed if tool["function"]["name"] in chosen]
        schemas = {name: schemas[name] for name in chosen}
    return ToolPlan(prompt=listed, schemas=schemas, mode=mode, legacy=legacy, parallel=parallel)


def _known(function: NamedFunction, place: str, schemas: Mapping[str, Any]) -> str:
    if function.name not in schemas:
        raise InvalidValue(f"'{place}.name' is not one of the given tools.", f"{place}.name")
    return function.name
