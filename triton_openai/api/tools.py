"""
The tools of a chat request: read, checked, and turned into what the template, the parsers and the backend need.

Source of the shapes: OpenAI's ``tools``, ``tool_choice`` and their older forms ``functions`` and ``function_call``
(openai-openapi 2.3.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from triton_openai.errors import InvalidRequest, UnsupportedParameter
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


_encode = msgspec.json.Encoder().encode
# Wider than OpenAI's [a-zA-Z0-9_-]{1,64}: names of MCP servers have dots, slashes and colons.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

Mode = Literal["none", "auto", "required", "named"]


class ToolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """
    What becomes of a request's tools.

    ``prompt`` is what the template gets. ``schemas`` are the parameters' schemas of the tools that may be called, by
    name. ``name`` is the tool that must be called in mode ``named``. ``legacy`` is whether the client speaks of
    functions, and gets its answer in their form. ``parallel`` is whether there may be several calls.
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
        """
        Return what holds the answer to a call, where it has to be one.

        Raises :class:`InvalidRequest` for schemas nested beyond reason.
        """
        try:
            if self.mode == "named" and self.name is not None:
                return Guide(kind="json_schema", value=_text(self.schemas[self.name]), param=self.param)
            if self.mode == "required":
                schema = calls_schema(self.schemas, parallel=self.parallel)
                return Guide(kind="json_schema", value=_text(schema), param=self.param)
        except RecursionError as error:
            raise InvalidRequest("A tool's parameters are nested too deeply.", param="tools") from error
        return None


def plan(
    *,
    tools: Sequence[Any] | None,
    tool_choice: Any,
    functions: Sequence[Any] | None,
    function_call: Any,
    parallel: bool | None,
) -> ToolPlan:
    """Return the plan of a request. Raises :class:`InvalidRequest` and :class:`UnsupportedParameter`."""
    legacy = not tools and bool(functions)
    if legacy:
        listed = [{"type": "function", "function": function} for function in functions or ()]
        names, key, choice = "functions", "function_call", _from_function_call(function_call)
    else:
        listed = list(tools or ())
        names, key, choice = "tools", "tool_choice", tool_choice
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(listed):
        name, schema = _function(tool, f"{names}[{index}]", legacy=legacy)
        if name in schemas:
            raise InvalidRequest(f"There are two tools of the name '{name}'.", param=names, code="invalid_value")
        schemas[name] = schema
    if not listed:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"'{key}' is only allowed when '{names}' are given.", param=key, code="invalid_value")
        return ToolPlan()
    mode, chosen = _mode(choice, key, schemas)
    if mode == "none":
        # As OpenAI does it: the model knows of the tools and must not call them. Without them in the prompt it cannot.
        return ToolPlan()
    if mode == "named":
        return ToolPlan(prompt=listed, schemas=schemas, mode=mode, name=chosen[0], legacy=legacy, parallel=False)
    allowed = {name: schemas[name] for name in chosen}
    return ToolPlan(
        prompt=[tool for tool in listed if tool["function"]["name"] in allowed],
        schemas=allowed,
        mode=mode,
        legacy=legacy,
        parallel=parallel is not False and not legacy,
    )


def _function(tool: Any, place: str, *, legacy: bool) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the parameters' schema of *tool*, which stands at *place* in the request."""
    if not isinstance(tool, dict):
        raise InvalidRequest(f"'{place}' must be an object.", param=place, code="invalid_type")
    kind = tool.get("type", "function")
    if kind != "function":
        raise UnsupportedParameter(
            f"'{place}.type': only tools of the type 'function' are supported.", param=f"{place}.type"
        )
    function = tool.get("function")
    where = place if legacy else f"{place}.function"
    if not isinstance(function, dict):
        raise InvalidRequest(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"'{where}.name' is not a valid name.", param=f"{where}.name", code="invalid_value")
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"'{where}.parameters' must be a JSON schema.", param=f"{where}.parameters", code="invalid_type"
        )
    return name, schema


def _mode(choice: Any, key: str, schemas: Mapping[str, Any]) -> tuple[Mode, Sequence[str]]:
    """Return the mode and the names of the tools that may be called."""
    everything = list(schemas)
    if choice is None or choice == "auto":
        return "auto", everything
    if choice == "none":
        return "none", ()
    if choice == "required":
        return "required", everything
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "function":
            return "named", [_known(choice.get("function"), f"{key}.function", schemas)]
        if kind == "allowed_tools":
            return _allowed(choice.get("allowed_tools"), f"{key}.allowed_tools", schemas)
        if kind == "custom":
            raise UnsupportedParameter("Custom tools are not supported.", param=key)
    raise InvalidRequest(
        f"'{key}' must be 'none', 'auto', 'required', or an object that names tools.", param=key, code="invalid_value"
    )


def _allowed(allowed: Any, place: str, schemas: Mapping[str, Any]) -> tuple[Mode, Sequence[str]]:
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise InvalidRequest(
            f"'{place}.tools' must be a list of tools.", param=f"{place}.tools", code="missing_required_parameter"
        )
    names = []
    for index, tool in enumerate(allowed["tools"]):
        where = f"{place}.tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        names.append(_known(function, f"{where}.function", schemas))
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(
            f"'{place}.mode' must be 'auto' or 'required'.", param=f"{place}.mode", code="invalid_value"
        )
    return mode, names


def _known(function: Any, place: str, schemas: Mapping[str, Any]) -> str:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in schemas:
        raise InvalidRequest(
            f"'{place}.name' is not one of the given tools.", param=f"{place}.name", code="invalid_value"
        )
    return name


def _from_function_call(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": choice}
    return choice


def _text(value: Any) -> str:
    return _encode(value).decode()
