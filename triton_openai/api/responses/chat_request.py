"""Turns a request of the Responses API into a chat: its items into messages, its tools into functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from triton_openai.api.agents import LONGEST_TYPE, unsealed
from triton_openai.api.bodies import MAX_MESSAGES, explain
from triton_openai.api.chat import ChatRequest
from triton_openai.api.parameters import JsonSchemaFormat, NamedSchema, ResponseFormat
from triton_openai.api.responses.objects import SHARED, Item, ResponsesRequest, SchemaFormat
from triton_openai.api.tools import (
    AllowedToolList,
    AllowedTools,
    Grammar,
    NamedCustomTool,
    NamedFunction,
    NamedTool,
    ToolChoice,
    custom_function,
)
from triton_openai.errors import InvalidRequest, InvalidValue, ServiceError, UnsupportedParameter, missing, printable
from triton_openai.prompts import messages

_T = TypeVar("_T", bound=msgspec.Struct)

# Items about tools that run at the provider, or that this service leaves out: nothing in a prompt can stand for them.
_SKIPPED = frozenset({
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction_trigger", "computer_call",
    "computer_call_output", "configuration_update", "file_search_call", "image_generation_call", "local_shell_call",
    "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
    "program", "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
    "web_search_call",
})  # fmt: skip


_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


class _InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: messages.Content


class _Call(msgspec.Struct):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str | dict[str, Any] | list[Any] | bool | int | float | None = None
    input: str | None = None


class _CallOutput(msgspec.Struct):
    call_id: str
    output: messages.Content


class _Thought(msgspec.Struct):
    text: str | None = None


class _Reasoning(msgspec.Struct):
    content: list[_Thought] | None = None
    summary: list[_Thought] | None = None
    encrypted_content: str | None = None


class _Compaction(msgspec.Struct):
    encrypted_content: str


class _MoreTools(msgspec.Struct):
    tools: list[dict[str, Any]]


class _ToolName(msgspec.Struct):
    name: str
    namespace: str | None = None
    description: str | None = None


class _CustomFormat(msgspec.Struct):
    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


class _CustomTool(_ToolName):
    format: _CustomFormat | None = None


class _Namespace(_MoreTools):
    name: str


class _Allowed(_MoreTools):
    mode: Literal["auto", "required"] = "auto"


def _flat(name: str, namespace: str | None) -> str:
    """Return the name of a function of a *namespace* for models, which know no namespaces."""
    if namespace is None:
        return name
    return f"{namespace}__{name}"


def _convert(value: Any, kind: type[_T], place: str) -> _T:
    """Return *value*, which stands at *place* in the request, as *kind*. Raises :class:`InvalidRequest`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise explain(
            text.replace("`$", f"`$.{place}", 1) if " - at `$" in text else f"{text} - at `$.{place}`"
        ) from error


class ToolName(msgspec.Struct, frozen=True):
    """How the client calls a tool, and whether it takes text in place of arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


class Tools:
    """
    The tools of a request: ``chat`` for the chat, each with its place in ``places``; ``shown`` as the response repeats
    them; ``names`` by the name that the model knows; ``left_out`` the types of those, and of items, that are left out.

    Functions of a namespace have its name in front of theirs; custom tools take their text as the argument ``input``.
    Tools that would run at the provider are left out, or refused if *strict*.
    """

    def __init__(self, *, strict: bool) -> None:
        self.chat: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.shown: list[Mapping[str, Any]] = []
        self.names: dict[str, ToolName] = {}
        self.left_out: list[str] = []
        self._strict = strict

    def add(self, tools: Iterable[dict[str, Any]], place: str) -> None:
        """Add *tools*, which stand at *place* in the request. Raises :class:`InvalidRequest`."""
        for index, tool in enumerate(tools):
            if self._add(tool, f"{place}[{index}]", None):
                self.shown.append(
                    {"description": None, "parameters": None, "strict": None, **tool}
                    if tool["type"] == "function"
                    else tool
                )

    def _add(self, tool: dict[str, Any], place: str, namespace: str | None) -> bool:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise missing(f"{place}.type")
        if kind == "function":
            described = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
            name = _convert(tool, _ToolName, place).name
            custom = False
        elif kind == "custom":
            given = _convert(tool, _CustomTool, place)
            form = given.format
            grammar = None
            if form is not None and form.definition:
                grammar = Grammar(form.definition, form.syntax or "lark")
            name = given.name
            custom = True
            described = custom_function(given.description, grammar)
        elif kind == "namespace" and namespace is None:
            whole = _convert(tool, _Namespace, place)
            # All of them, whichever are left out.
            added = [self._add(each, f"{place}.tools[{n}]", whole.name) for n, each in enumerate(whole.tools)]
            return any(added)
        elif self._strict or kind == "file_search":
            # Without the documents, an answer would be made up.
            raise UnsupportedParameter(
                f"Tools of type '{printable(kind, LONGEST_TYPE)}' are not supported; functions, custom tools and "
                "namespaces of them are.",
                param=f"{place}.type",
            )
        else:
            self.left_out.append(kind)
            return False
        flat = _flat(name, namespace)
        self.chat.append({"type": "function", "function": {"name": flat, **described}})
        self.places.append(place)
        self.names[flat] = ToolName(name, namespace, custom)
        return True

    def choice(self, given: str | dict[str, Any] | None) -> ToolChoice:
        """Return the ``tool_choice`` of the chat. Raises :class:`InvalidRequest`."""
        if not isinstance(given, dict):
            return given  # type: ignore[return-value]  # the request's type allows the same words
        kind = given.get("type")
        place = "tool_choice"
        if kind == "allowed_tools":
            allowed = _convert(given, _Allowed, place)
            named = [self._named(tool, f"{place}.tools[{n}]") for n, tool in enumerate(allowed.tools)]
            # Those that were left out cannot be called anyway.
            known: list[NamedTool | NamedCustomTool] = [tool for tool in named if tool is not None]
            if not known:
                raise InvalidValue("'tool_choice.tools' names none of the given tools.", f"{place}.tools")
            return AllowedTools(AllowedToolList(known, allowed.mode))
        tool = self._named(given, place)
        if tool is None:
            raise UnsupportedParameter("'tool_choice' names a kind of tool that is not supported.", param=place)
        return tool

    def _named(self, given: dict[str, Any], place: str) -> NamedTool | None:
        if given.get("type") not in ("function", "custom"):
            return None
        choice = _convert(given, _ToolName, place)
        flat = _flat(choice.name, choice.namespace)
        if flat not in self.names:
            raise InvalidValue(f"'{place}.name' is not one of the given tools.", f"{place}.name")
        return NamedTool(NamedFunction(flat))


class _Turns:
    """Collects messages. What an assistant thinks, says and calls in a row is one message, as the model wrote it."""

    def __init__(self, answered: Collection[str] = ()) -> None:
        #: The ids of the calls that have an output.
        self.answered = answered
        self.messages: list[messages.Message] = []
        #: Of each message the place of its content, and those of its calls.
        self.places: list[tuple[str, list[str]]] = []
        self._thoughts: list[str] = []
        self._said: messages.Content = None
        self._calls: list[messages.MessageToolCall] = []
        self._place = ""
        self._call_places: list[str] = []

    def add(self, message: messages.Message, place: str) -> None:
        """Add a message that is not the assistant's."""
        self.close()
        self.messages.append(message)
        self.places.append((place, []))

    def think(self, text: str, place: str) -> None:
        """Add thinking; after text or a call it begins the next message."""
        if self._said is not None or self._calls:
            self.close()
        self._thoughts.append(text)
        self._place = place

    def say(self, content: messages.Content, place: str) -> None:
        """Add a message of the assistant."""
        if self._said is not None or self._calls:
            self.close()
        self._said = content
        self._place = place

    def call(self, call_id: str, name: str, arguments: Any, place: str) -> None:
        """Add a call."""
        function = messages.MessageFunctionCall(name=name, arguments=arguments)
        self._calls.append(messages.MessageToolCall(id=call_id, type="function", function=function))
        self._call_places.append(place)

    def close(self) -> None:
        """End the assistant's message, if one is open."""
        if not self._thoughts and self._said is None and not self._calls:
            return
        thoughts = None
        if self._thoughts:
            thoughts = "\n".join(self._thoughts)
        self.messages.append(
            messages.AssistantMessage(content=self._said, reasoning_content=thoughts, tool_calls=self._calls or None)
        )
        self.places.append((self._place or self._call_places[0], self._call_places))
        self._thoughts = []
        self._said = None
        self._calls = []
        self._place = ""
        self._call_places = []


_ROLES: Mapping[str, type[messages.UserMessage | messages.SystemMessage | messages.DeveloperMessage]] = {
    "user": messages.UserMessage, "system": messages.SystemMessage, "developer": messages.DeveloperMessage,
}  # fmt: skip
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content)?(?:\.tool_calls\[(\d+)\](?:\.function)?)?(.*)", re.DOTALL)
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)", re.DOTALL)
# The chat's names of what a response calls otherwise; `messages[0]` and `tools[0]` come with their places.
_RENAMED = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip


class Reading(msgspec.Struct):
    """A request as a chat."""

    body: ResponsesRequest
    chat: ChatRequest
    tools: Tools
    #: The places in the request that the chat's messages come from.
    places: Sequence[tuple[str, Sequence[str]]]
    #: The items that it goes on from.
    before: Sequence[Item] = ()

    def keep(self, numbers: Sequence[int]) -> None:
        """Leave out all messages but those with these *numbers*."""
        self.chat = msgspec.structs.replace(self.chat, messages=[self.chat.messages[number] for number in numbers])
        self.places = [self.places[number] for number in numbers]

    def relabel_param(self, error: ServiceError) -> None:
        """Make *error*, which may name a field of the chat, name the field of the request."""
        param = error.param
        if param is not None:
            if (found := _MESSAGE.fullmatch(param)) and int(found[1]) < len(self.places):
                place, calls = self.places[int(found[1])]
                error.param = (calls[int(found[2])] if found[2] else place) + found[3]
            elif (found := _TOOL.fullmatch(param)) and int(found[1]) < len(self.tools.places):
                error.param = self.tools.places[int(found[1])] + found[2]
            else:
                error.param = _RENAMED.get(param, param)
            error.message = error.message.replace(f"'{param}", f"'{error.param}")
        for name, renamed in _RENAMED.items():
            error.message = error.message.replace(f"'{name}'", f"'{renamed}'")


def read(
    body: ResponsesRequest, items: Sequence[tuple[str, Item]], *, strict_tools: bool, effort: str | None
) -> Reading:
    """
    Return *body* as a chat about *items*, each with its place in the request.

    *effort* is that of the thinking, if the model's template takes one. With *strict_tools*, tools that would run at
    the provider are refused. Raises :class:`InvalidRequest`.
    """
    tools = Tools(strict=strict_tools)
    turns = _Turns(frozenset([item["call_id"] for _, item in items if _is_output(item)]))
    if body.instructions is not None:
        turns.add(messages.SystemMessage(content=body.instructions), "instructions")
    for place, item in items:
        _read_item(item, place, turns, tools)
    turns.close()
    tools.add(body.tools or (), "tools")
    if len(turns.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"A conversation can have {MAX_MESSAGES} messages at most.", param="input", code="array_above_max_length"
        )
    wants_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ())
    chat = ChatRequest(
        model=body.model,
        messages=turns.messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs,
        reasoning_effort=effort,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=tools.chat or None,
        tool_choice=tools.choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        **{name: getattr(body, name) for name in SHARED},
    )
    return Reading(body, chat, tools, turns.places)


def check_items(items: Iterable[Item]) -> None:
    """Raise :class:`InvalidRequest` for *items* that no request could hold."""
    for number, item in enumerate(items):
        _read_item(item, f"items[{number}]", _Turns(), Tools(strict=False))


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    if body.text is None:
        wanted = None
    else:
        wanted = body.text.format
    if isinstance(wanted, SchemaFormat):
        return JsonSchemaFormat(NamedSchema(wanted.schema))
    return wanted


def _is_output(item: Item) -> bool:
    return item.get("type") in _OUTPUTS and isinstance(item.get("call_id"), str)


def _read_item(item: Item, place: str, turns: _Turns, tools: Tools) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        message = _convert(item, _InputMessage, place)
        within = f"{place}.content"
        if message.role == "assistant":
            turns.say(message.content, within)
        else:
            turns.add(_ROLES[message.role](content=message.content), within)
    elif kind in _CALLS and item.get("status") == "incomplete" and item.get("call_id") not in turns.answered:
        # Its arguments end in the middle, and nobody has answered it.
        tools.left_out.append(kind)
    elif kind in _CALLS:
        call = _convert(item, _Call, place)
        custom = kind == "custom_tool_call"
        arguments = msgspec.json.encode({"input": call.input or ""}).decode() if custom else call.arguments
        turns.call(call.call_id, _flat(call.name, call.namespace), arguments, place)
    elif kind in _OUTPUTS:
        answer = _convert(item, _CallOutput, place)
        # Part n of the output is part n of the message's content.
        turns.add(messages.ToolMessage(content=answer.output, tool_call_id=answer.call_id), f"{place}.output")
    elif kind == "reasoning":
        thought = _thinking(_convert(item, _Reasoning, place))
        if thought is not None:
            turns.think(thought, place)
        elif item.get("encrypted_content"):
            # Another service's.
            tools.left_out.append(kind)
    elif kind == "additional_tools":
        tools.add(_convert(item, _MoreTools, place).tools, f"{place}.tools")
    elif isinstance(kind, str) and kind in _SKIPPED:
        tools.left_out.append(kind)
    elif kind == "compaction":
        summary = unsealed(_convert(item, _Compaction, place).encrypted_content)
        if summary is None:
            raise InvalidValue("A compaction that another service made cannot be read.", place)
        turns.say(f"Summary of the conversation so far:\n{summary}", place)
    else:
        raise InvalidValue(f"'{place}.type' is not a known kind of item.", f"{place}.type")


def _thinking(item: _Reasoning) -> str | None:
    """Return the text of a reasoning item; ``None`` where there is none that can be read."""
    whole = _joined(item.content)
    if whole is None:
        whole = unsealed(item.encrypted_content)
    if whole is None:
        return _joined(item.summary)
    return whole


def _joined(parts: Sequence[_Thought] | None) -> str | None:
    return "\n".join([part.text for part in parts or () if part.text]) or None
