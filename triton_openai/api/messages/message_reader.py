"""
Reads a request of Anthropic's API as a conversation.

Content that says the same in another form, such as a string or a list of one text, becomes the same message, so that
the prompt of a conversation stays the prefix of its next one, and the backend's cache serves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec

from triton_openai.api.agents import LONGEST_TYPE, unsealed
from triton_openai.api.conversation import ChatOptions, Conversation
from triton_openai.api.guides import JsonSchemaFormat, NamedSchema
from triton_openai.api.messages import types
from triton_openai.api.tools import ANY_TOOL, ChosenTool, DeclaredTool, ToolSelection, plan_tools
from triton_openai.errors import UnsupportedParameter, missing, printable
from triton_openai.media import text_files as files
from triton_openai.prompts import messages
from triton_openai.prompts.origins import MessageOrigin, Origins

# Claude Code's first block: it says which release asks, changes with it, and is not for the model.
_BILLING = "x-anthropic-billing-header:"
# The names of the switches that templates have for thinking.
_SWITCHES = ("enable_thinking", "thinking")
# The names of options that chat completions call otherwise.
_NAMES = {
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "chat_template_kwargs.thinking_budget": "thinking.budget_tokens",
}


class _TurnOrigin(MessageOrigin, frozen=True):
    """The first of the client's messages that a message is made of. An error names that one as a whole."""

    def content(self, inner: str = "") -> str:
        return self.path

    def call(self, index: int, inner: str = "") -> str:
        return self.path

    def field(self, name: str) -> str:
        return self.path


class ParsedRequest(msgspec.Struct, frozen=True):
    """A request as a conversation."""

    conversation: Conversation
    #: The types of the tools and of the blocks that the conversation lacks.
    left_out: list[str]


def read(body: types.CountTokensRequest, *, strict_tools: bool) -> ParsedRequest:
    """
    Return *body* as a conversation.

    With *strict_tools*, tools that would be left out are refused. Raises :class:`InvalidRequest`.
    """
    left_out: list[str] = []
    pairs = list(_messages(body, left_out))
    last, _ = pairs[-1]
    parallel = None
    if body.tool_choice is not None:
        parallel = not body.tool_choice.disable_parallel_tool_use
    plan = plan_tools(_tools(body, left_out, strict=strict_tools), _selection(body), parallel=parallel)
    options = _options(body)
    if isinstance(last, messages.AssistantMessage):
        # The answer goes on with what the client wrote for it.
        options.continue_final_message = True
    origins = Origins(_NAMES, [_TurnOrigin(path) for _, path in pairs])
    return ParsedRequest(Conversation([message for message, _ in pairs], plan, options, origins), left_out)


def _options(body: types.CountTokensRequest) -> ChatOptions:
    options = ChatOptions(model=body.model)
    if body.thinking is not None:
        options.chat_template_kwargs = _thinking_variables(body.thinking)
    form = None
    config = body.output_config
    if config is not None:
        form = config.format
        if config.effort is not None:
            options.reasoning_effort = config.effort
    if isinstance(body, types.MessagesRequest):
        form = form or body.output_format
        options.max_tokens = body.max_tokens
        options.stop = body.stop_sequences
        options.stream = body.stream
        options.temperature = body.temperature
        options.top_p = body.top_p
        options.top_k = body.top_k
    if form is not None:
        options.response_format = JsonSchemaFormat(json_schema=NamedSchema(schema=form.schema))
    return options


def _thinking_variables(thinking: types.ThinkingParam) -> dict[str, Any]:
    """Return the variables of templates for *thinking*."""
    variables: dict[str, Any] = dict.fromkeys(_SWITCHES, thinking.type != "disabled")
    if thinking.budget_tokens is not None and thinking.type != "disabled":
        variables["thinking_budget"] = thinking.budget_tokens
    return variables


def _selection(body: types.CountTokensRequest) -> ToolSelection:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return ANY_TOOL
    if choice.type == "any":
        return ToolSelection("required")
    if choice.type == "none":
        return ToolSelection("none")
    if choice.name is None:
        raise missing("tool_choice.name")
    return ToolSelection("named", [ChosenTool(choice.name, "tool_choice.name")])


def _tools(body: types.CountTokensRequest, left_out: list[str], *, strict: bool) -> list[DeclaredTool]:
    """Return the tools that the model sees: deferred ones last, so that the prompt goes on where it ended before."""
    shown = []
    deferred = {}
    for index, tool in enumerate(body.tools or ()):
        if tool.type is not None and tool.type != "custom":
            if strict:
                raise UnsupportedParameter(
                    f"Tools of type '{tool.type[:LONGEST_TYPE]}' are not supported.", param=f"tools[{index}].type"
                )
            left_out.append(tool.type)
            continue
        if tool.input_schema is None:
            raise missing(f"tools[{index}].input_schema")
        if not tool.name:
            raise missing(f"tools[{index}].name")
        declared = _declared(tool, tool.input_schema)
        if tool.defer_loading:
            deferred[tool.name] = declared
        else:
            shown.append(declared)
    referred = dict.fromkeys(_references(body.messages))
    return [*shown, *(deferred[name] for name in referred if name in deferred)]


def _declared(tool: types.ToolParam, schema: Mapping[str, Any]) -> DeclaredTool:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = schema
    return DeclaredTool(tool.name, {"type": "function", "function": function}, schema)


def _references(messages: Iterable[types.MessageParam]) -> Iterator[str]:
    for message in messages:
        if not isinstance(message.content, list):
            continue
        for block in message.content:
            if isinstance(block, types.ToolResultBlockParam) and isinstance(block.content, list):
                yield from [part.tool_name for part in block.content if isinstance(part, types.ToolReferenceBlockParam)]


def _messages(body: types.CountTokensRequest, left_out: list[str]) -> Iterator[tuple[messages.Message, str]]:
    """Yield the messages of the conversation, each with its path in the request. Turns of one role become one."""
    texts = _system_texts(body)
    if texts:
        yield messages.SystemMessage(content=_content(texts)), "system"
    for role, group in groupby(enumerate(body.messages), key=lambda item: item[1].role):
        turns = list(group)
        path = f"messages[{turns[0][0]}]"
        blocks: list[types.BlockParam] = []
        for block in chain.from_iterable(_blocks(message) for _, message in turns):
            if isinstance(block, types.LeftOutBlockParam):
                left_out.append(str(block.__struct_config__.tag))
            else:
                blocks.append(block)
        if role == "assistant":
            yield _assistant(blocks, path), path
        elif role == "system":
            texts = [_text(block.text) for block in blocks if isinstance(block, types.TextBlock)]
            if len(texts) < len(blocks):
                raise UnsupportedParameter("Messages of the system have texts only.", param=path)
            yield messages.SystemMessage(content=_content(texts)), path
        else:
            yield from [(message, path) for message in _user(blocks, path)]


def _system_texts(body: types.CountTokensRequest) -> list[messages.ContentPart]:
    if not body.system:
        return []
    blocks = body.system
    if isinstance(blocks, str):
        blocks = [types.TextBlock(blocks)]
    return [_text(block.text) for block in blocks if not block.text.startswith(_BILLING)]


def _blocks(message: types.MessageParam) -> Sequence[types.BlockParam]:
    if isinstance(message.content, str):
        return [types.TextBlock(message.content)]
    return message.content


def _assistant(blocks: Sequence[types.BlockParam], path: str) -> messages.Message:
    texts = []
    thoughts = []
    calls = []
    for block in blocks:
        match block:
            case types.TextBlock():
                texts.append(_text(block.text))
            case types.ThinkingBlockParam():
                thoughts.append(block.thinking or unsealed(block.signature) or "")
            case types.ToolUseBlockParam():
                function = messages.MessageFunctionCall(name=block.name, arguments=block.input)
                calls.append(messages.MessageToolCall(id=block.id, type="function", function=function))
            case types.CompactionBlockParam():
                texts.append(_text(block.content or ""))
            case _:
                raise _misplaced(block, "an assistant's", path)
    content: messages.Content = None
    if texts:
        content = _content(texts)
    return messages.AssistantMessage(
        content=content,
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def _user(blocks: Sequence[types.BlockParam], path: str) -> Iterator[messages.Message]:
    """Yield what tools answered, and then the rest: the images of tools too, which templates take of users only."""
    parts: list[messages.ContentPart] = []
    answered = False
    for block in blocks:
        if isinstance(block, types.ToolResultBlockParam):
            results: list[messages.ContentPart] = []
            if isinstance(block.content, str):
                results.append(_text(block.content))
            else:
                for inner in block.content or ():
                    results += _parts(inner, path)
            text = _joined_text(results)
            if block.is_error and not text.lower().startswith(("error", "<tool_use_error")):
                text = f"Error: {text}"
            parts += [part for part in results if part.text is None]
            answered = True
            yield messages.ToolMessage(content=text, tool_call_id=block.tool_use_id)
        elif isinstance(block, types.ResultBlockParam) and not isinstance(block, types.ToolReferenceBlockParam):
            parts += _parts(block, path)
        else:
            raise _misplaced(block, "a user's", path)
    if parts or not answered:
        yield messages.UserMessage(content=_content(parts))


def _parts(block: types.ResultBlockParam, path: str) -> Iterator[messages.ContentPart]:
    match block:
        case types.TextBlock():
            yield _text(block.text)
        case types.ImageBlockParam(source=source):
            if isinstance(source, types.UrlSourceParam):
                url = source.url
            else:
                # The format is detected from the content, not from this type.
                url = f"data:image/{source.media_type.removeprefix('image/')};base64,{source.data}"
            yield messages.ContentPart(type="image_url", image_url=url)
        case types.DocumentBlockParam(source=types.TextSourceParam(data=text)):
            yield _document(block, text)
        case types.DocumentBlockParam(source=types.ContentSourceParam(content=str() as text)):
            yield _document(block, text)
        case types.DocumentBlockParam(source=types.ContentSourceParam(content=list() as inner)):
            parts: list[messages.ContentPart] = []
            for inner_block in inner:
                parts += _parts(inner_block, path)
            yield _document(block, _joined_text(parts))
            yield from [part for part in parts if part.text is None]
        case types.SearchResultBlockParam():
            texts = "\n".join([part.text for part in block.content])
            yield _text(files.render(block.title, f"{block.source}\n{texts}"))
        case types.ToolReferenceBlockParam(tool_name=name):
            yield _text(f"The tool {name} can be called now.")
        case types.DocumentBlockParam(source=other):
            if isinstance(other, types.Base64SourceParam):
                kind = other.media_type
            else:
                kind = str(other.__struct_config__.tag)
            if block.title is None:
                named = "A document"
            else:
                named = f"The document '{printable(block.title, 100)}'"
            raise UnsupportedParameter(
                f"{named} is of type '{printable(kind, 100)}', which is not supported: send its text, in a source "
                "of type 'text'.",
                param=path,
            )


def _document(block: types.DocumentBlockParam, text: str) -> messages.ContentPart:
    if block.context is not None:
        text = f"{block.context}\n{text}"
    return _text(files.render(block.title, text))


def _joined_text(parts: Iterable[messages.ContentPart]) -> str:
    return "\n".join([part.text for part in parts if part.text is not None])


def _text(text: str) -> messages.ContentPart:
    return messages.ContentPart(type="text", text=text)


def _content(parts: Sequence[messages.ContentPart]) -> messages.Content:
    if len(parts) == 1 and parts[0].text is not None:
        return parts[0].text
    return list(parts)


def _misplaced(block: types.BlockParam, whose: str, path: str) -> UnsupportedParameter:
    kind = block.__struct_config__.tag
    return UnsupportedParameter(f"A block of type '{kind}' cannot be in {whose} message.", param=path)
