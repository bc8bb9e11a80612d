"""
Reads a request of the Responses API as a conversation: its items as messages, its tools as functions.

Items that the model's turn consists of, one after the other, are one message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from triton_openai.api.agents import LONGEST_TYPE, unsealed
from triton_openai.api.bodies import MAX_MESSAGES, explain
from triton_openai.api.conversation import ChatOptions, Conversation
from triton_openai.api.guides import JsonSchemaFormat, NamedSchema, ResponseFormat
from triton_openai.api.responses.objects import (
    SHARED_OPTIONS,
    Item,
    OutputCompaction,
    ResponsesRequest,
    SchemaFormat,
)
from triton_openai.api.tools import (
    ANY_TOOL,
    MAX_TOOLS,
    ChosenTool,
    DeclaredTool,
    FunctionDefinition,
    Grammar,
    ToolSelection,
    custom_function,
    declared_function,
    plan_tools,
)
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter, missing, printable
from triton_openai.generation import AnswerState
from triton_openai.prompts import messages
from triton_openai.prompts.origins import MessageOrigin, Origins

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
    """Return the name of a function of a *namespace* for models, which have no namespaces."""
    if namespace is None:
        return name
    return f"{namespace}__{name}"


def _convert(value: Any, kind: type[_T], path: str) -> _T:
    """Return *value*, which is at *path* in the request, as *kind*. Raises :class:`InvalidRequest`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), path) from error


class ToolName(msgspec.Struct, frozen=True):
    """The client's name of a tool, and whether it takes text in place of arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def flat(self) -> str:
        """The name that the model gets."""
        return _flat(self.name, self.namespace)


class Tools:
    """
    The tools of a request, as functions for the model, and as the client calls them.

    Functions of a namespace have its name in front of theirs; custom tools take their text as the argument ``input``.
    Tools that would run at the provider are left out, or refused if *strict*.
    """

    def __init__(self, *, strict: bool) -> None:
        self.declared: list[DeclaredTool] = []
        #: As the response repeats them.
        self.shown: list[Mapping[str, Any]] = []
        #: The client's names by the name that the model gets.
        self.names: dict[str, ToolName] = {}
        #: The types of the tools, and of the items, that are left out.
        self.left_out: list[str] = []
        self._strict = strict

    def add(self, tools: Iterable[dict[str, Any]], path: str) -> None:
        """Add *tools*, which are at *path* in the request. Raises :class:`InvalidRequest`."""
        for index, tool in enumerate(tools):
            if not self._add(tool, f"{path}[{index}]", None):
                continue
            if tool["type"] == "function":
                self.shown.append({"description": None, "parameters": None, "strict": None, **tool})
            else:
                self.shown.append(tool)

    def _add(self, tool: dict[str, Any], path: str, namespace: str | None) -> bool:
        """Add a tool, and return whether it, or one of its namespace, was not left out."""
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise missing(f"{path}.type")
        if kind == "function":
            self._add_function(tool, path, namespace)
            return True
        if kind == "custom":
            self._add_custom(tool, path, namespace)
            return True
        if kind == "namespace" and namespace is None:
            whole = _convert(tool, _Namespace, path)
            # All of them, whichever are left out.
            added = [self._add(inner, f"{path}.tools[{n}]", whole.name) for n, inner in enumerate(whole.tools)]
            return any(added)
        if self._strict or kind == "file_search":
            # Without the documents, an answer would be made up.
            raise UnsupportedParameter(
                f"Tools of type '{printable(kind, LONGEST_TYPE)}' are not supported; functions, custom tools and "
                "namespaces of them are.",
                param=f"{path}.type",
            )
        self.left_out.append(kind)
        return False

    def _add_function(self, tool: dict[str, Any], path: str, namespace: str | None) -> None:
        described = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
        name = ToolName(_convert(tool, _ToolName, path).name, namespace)
        self._declare(name, described, path)

    def _add_custom(self, tool: dict[str, Any], path: str, namespace: str | None) -> None:
        custom = _convert(tool, _CustomTool, path)
        form = custom.format
        grammar = None
        if form is not None and form.definition:
            grammar = Grammar(form.definition, form.syntax or "lark")
        name = ToolName(custom.name, namespace, custom=True)
        self._declare(name, custom_function(custom.description, grammar), path)

    def _declare(self, name: ToolName, described: Mapping[str, Any], path: str) -> None:
        if len(self.declared) == MAX_TOOLS:
            raise InvalidRequest(
                f"Invalid value for 'tools': expected an array of length <= {MAX_TOOLS}.",
                param="tools",
                code="array_above_max_length",
            )
        function = {"name": name.flat, **described}
        definition = _convert(function, FunctionDefinition, path)
        self.declared.append(declared_function(definition, {"type": "function", "function": function}))
        self.names[name.flat] = name

    def selection(self, choice: str | dict[str, Any] | None) -> ToolSelection:
        """Return which tools may be called by the request's ``tool_choice``. Raises :class:`InvalidRequest`."""
        path = "tool_choice"
        if choice is None:
            return ANY_TOOL
        if not isinstance(choice, dict):
            # The request's type allows the same words.
            return ToolSelection(choice)  # type: ignore[arg-type]
        if choice.get("type") == "allowed_tools":
            allowed = _convert(choice, _Allowed, path)
            named = [self._chosen(tool, f"{path}.tools[{n}]") for n, tool in enumerate(allowed.tools)]
            # Those that were left out cannot be called anyway.
            known = [tool for tool in named if tool is not None]
            if not known:
                raise InvalidValue("'tool_choice.tools' names none of the given tools.", f"{path}.tools")
            return ToolSelection(allowed.mode, known)
        tool = self._chosen(choice, path)
        if tool is None:
            raise UnsupportedParameter("'tool_choice' names a kind of tool that is not supported.", param=path)
        return ToolSelection("named", [tool])

    def _chosen(self, choice: dict[str, Any], path: str) -> ChosenTool | None:
        if choice.get("type") not in ("function", "custom"):
            return None
        tool = _convert(choice, _ToolName, path)
        name = _flat(tool.name, tool.namespace)
        if name not in self.names:
            raise InvalidValue(f"'{path}.name' is not one of the given tools.", f"{path}.name")
        return ChosenTool(name, f"{path}.name")


class _ItemOrigin(MessageOrigin, frozen=True):
    """The item that a message comes from: its path is that of the content. Calls are items of their own."""

    calls: Sequence[str] = ()

    def content(self, inner: str = "") -> str:
        return f"{self.path}{inner}"

    def call(self, index: int, inner: str = "") -> str:
        # An item has the function's fields itself.
        return f"{self.calls[index]}{inner.removeprefix('.function')}"


class MessageBuilder:
    """
    Builds messages of items, each message with its origin.

    What an assistant thinks, says and calls in a row is one message, as the model wrote it.
    """

    def __init__(self, answered: Collection[str] = ()) -> None:
        #: The ids of the calls that have an output.
        self.answered = answered
        self.messages: list[messages.Message] = []
        self.origins: list[MessageOrigin] = []
        # Of the assistant's message that is open.
        self._thoughts: list[str] = []
        self._said: messages.Content = None
        self._calls: list[messages.MessageToolCall] = []
        self._path = ""
        self._call_paths: list[str] = []

    def add(self, message: messages.Message, path: str) -> None:
        """Add a message that is not the assistant's; *path* is that of its content."""
        self.close()
        self.messages.append(message)
        self.origins.append(_ItemOrigin(path))

    def think(self, text: str, path: str) -> None:
        """Add thinking; after text or a call it begins the next message."""
        if self._said is not None or self._calls:
            self.close()
        self._thoughts.append(text)
        self._path = path

    def say(self, content: messages.Content, path: str) -> None:
        """Add a message of the assistant."""
        if self._said is not None or self._calls:
            self.close()
        self._said = content
        self._path = path

    def call(self, call_id: str, name: str, arguments: Any, path: str) -> None:
        """Add a call."""
        function = messages.MessageFunctionCall(name=name, arguments=arguments)
        self._calls.append(messages.MessageToolCall(id=call_id, type="function", function=function))
        self._call_paths.append(path)

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
        self.origins.append(_ItemOrigin(self._path or self._call_paths[0], self._call_paths))
        self._thoughts = []
        self._said = None
        self._calls = []
        self._path = ""
        self._call_paths = []


# Characters of an id in an error.
_MAX_SHOWN_ID = 64
_ROLES: Mapping[str, type[messages.UserMessage | messages.SystemMessage | messages.DeveloperMessage]] = {
    "user": messages.UserMessage, "system": messages.SystemMessage, "developer": messages.DeveloperMessage,
}  # fmt: skip
# The names of options that chat completions call otherwise.
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_budget": "reasoning.max_tokens",
}


class _Options(ChatOptions, kw_only=True):
    """The options of a response."""

    @property
    def limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_tokens


class ParsedRequest(msgspec.Struct):
    """A request, as it was sent and as a conversation."""

    body: ResponsesRequest
    conversation: Conversation
    tools: Tools
    #: The items that it goes on from.
    before: Sequence[Item] = ()
    #: Whether the conversation is compacted; ``None`` until its tokens are counted.
    exceeds_threshold: bool | None = None
    #: The summary that the answer goes on from, if the conversation was compacted for it.
    compaction: OutputCompaction | None = None
    #: How the model made that summary.
    summarized: Sequence[AnswerState] = ()


def read(
    body: ResponsesRequest, items: Sequence[tuple[str, Item]], *, strict_tools: bool, effort: str | None
) -> ParsedRequest:
    """
    Return *body* as a conversation of *items*, each with its path in the request.

    *effort* is that of the thinking, if the model's template takes one. With *strict_tools*, tools that would run at
    the provider are refused. Raises :class:`InvalidRequest`.
    """
    tools = Tools(strict=strict_tools)
    builder = MessageBuilder(frozenset([item["call_id"] for _, item in items if _is_output(item)]))
    if body.instructions is not None:
        builder.add(messages.SystemMessage(content=body.instructions), "instructions")
    for path, item in items:
        _read_item(item, path, builder, tools)
    builder.close()
    tools.add(body.tools or (), "tools")
    if len(builder.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"A conversation can have {MAX_MESSAGES} messages at most.", param="input", code="array_above_max_length"
        )
    plan = plan_tools(tools.declared, tools.selection(body.tool_choice), parallel=body.parallel_tool_calls)
    max_thinking = None
    if body.reasoning is not None:
        max_thinking = body.reasoning.max_tokens
    options = _Options(
        max_tokens=body.max_output_tokens,
        logprobs=bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ()),
        top_logprobs=body.top_logprobs,
        reasoning_effort=effort,
        thinking_budget=max_thinking,
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=_format(body),
        **{name: getattr(body, name) for name in SHARED_OPTIONS},
    )
    conversation = Conversation(builder.messages, plan, options, Origins(_NAMES, builder.origins))
    return ParsedRequest(body, conversation, tools)


def summary_text(summary: str) -> str:
    """Return what the assistant says where a conversation was compacted to a *summary*."""
    return f"Summary of the conversation so far:\n{summary}"


def check_items(items: Iterable[Item]) -> None:
    """Raise :class:`InvalidRequest` for *items* that no request could hold."""
    for number, item in enumerate(items):
        _read_item(item, f"items[{number}]", MessageBuilder(), Tools(strict=False))


def check_outputs(before: Iterable[Item], items: Sequence[Item]) -> None:
    """
    Raise :class:`InvalidValue` for an output among *items* whose call is neither there nor in what was *before*.

    A request that goes on from a response sends what is new only, so such an output belongs to another conversation.
    Source of the text, which agents look for: OpenAI's API.
    """
    called = {item["call_id"] for item in (*before, *items) if item.get("type") in _CALLS and _has_call_id(item)}
    for number, item in enumerate(items):
        if _is_output(item) and item["call_id"] not in called:
            shown = printable(item["call_id"], _MAX_SHOWN_ID)
            message = f"No tool call found for function call output with call_id {shown}."
            raise InvalidValue(message, f"input[{number}].call_id")


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    if body.text is None:
        return None
    form = body.text.format
    if isinstance(form, SchemaFormat):
        return JsonSchemaFormat(NamedSchema(form.schema))
    return form


def _is_output(item: Item) -> bool:
    return item.get("type") in _OUTPUTS and _has_call_id(item)


def _has_call_id(item: Item) -> bool:
    """Return whether *item*, which is not converted yet, has the id of a call: of another type it is refused later."""
    return isinstance(item.get("call_id"), str)


def _breaks_off(item: Item, answered: Collection[str]) -> bool:
    """Return whether *item* is a call whose arguments end in the middle, and that is none of those *answered*."""
    return item.get("status") == "incomplete" and _has_call_id(item) and item["call_id"] not in answered


def _read_item(item: Item, path: str, builder: MessageBuilder, tools: Tools) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        message = _convert(item, _InputMessage, path)
        within = f"{path}.content"
        if message.role == "assistant":
            builder.say(message.content, within)
        else:
            builder.add(_ROLES[message.role](content=message.content), within)
    elif kind in _CALLS and _breaks_off(item, builder.answered):
        tools.left_out.append(kind)
    elif kind in _CALLS:
        call = _convert(item, _Call, path)
        arguments = call.arguments
        if kind == "custom_tool_call":
            arguments = msgspec.json.encode({"input": call.input or ""}).decode()
        builder.call(call.call_id, _flat(call.name, call.namespace), arguments, path)
    elif kind in _OUTPUTS:
        answer = _convert(item, _CallOutput, path)
        # Part n of the output is part n of the message's content.
        builder.add(messages.ToolMessage(content=answer.output, tool_call_id=answer.call_id), f"{path}.output")
    elif kind == "reasoning":
        thought = _thinking(_convert(item, _Reasoning, path))
        if thought is not None:
            builder.think(thought, path)
        elif item.get("encrypted_content"):
            # Another service's.
            tools.left_out.append(kind)
    elif kind == "additional_tools":
        tools.add(_convert(item, _MoreTools, path).tools, f"{path}.tools")
    elif isinstance(kind, str) and kind in _SKIPPED:
        tools.left_out.append(kind)
    elif kind == "compaction":
        summary = unsealed(_convert(item, _Compaction, path).encrypted_content)
        if summary is None:
            raise InvalidValue("A compaction that another service made cannot be read.", path)
        builder.say(summary_text(summary), path)
    else:
        raise InvalidValue(f"'{path}.type' is not a known kind of item.", f"{path}.type")


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
