"""
Reads a request of Anthropic's API as a chat.

Content that says the same in another form, such as a string or a list of one text, becomes the same message, so that
the prompt of a conversation stays the prefix of its next one, and the backend's cache serves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec

from triton_openai.api.agents import LONGEST_TYPE, unsealed
from triton_openai.api.chat import ChatRequest
from triton_openai.api.messages import types
from triton_openai.api.parameters import JsonSchemaFormat, NamedSchema
from triton_openai.api.tools import NamedFunction, NamedTool, Tool, ToolChoice
from triton_openai.errors import ServiceError, UnsupportedParameter, missing, printable
from triton_openai.media import text_files as files
from triton_openai.prompts import messages

# Claude Code's first block: it says which release asks, changes with it, and is not for the model.
_BILLING = "x-anthropic-billing-header:"
# The names of the switches that templates have for thinking.
_SWITCHES = ("enable_thinking", "thinking")
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
    "tool_choice.function.name": "tool_choice.name",
    "stop": "stop_sequences",
}


class Reading(msgspec.Struct, frozen=True):
    """A request as a chat."""

    chat: ChatRequest
    #: The place in the request from which each of the chat's messages comes.
    origins: Sequence[str]
    #: What the chat lacks of the request.
    left_out: list[str]

    def relabel_param(self, error: ServiceError) -> None:
        """Name the request's own fields in an *error* of the chat."""
        param = error.param or ""
        for index, origin in enumerate(self.origins if param.startswith("messages[") else ()):
            if param.startswith(f"messages[{index}]"):
                error.param = origin
        for name, own in _NAMES.items():
            error.message = error.message.replace(f"'{name}'", f"'{own}'")
            if param == name:
                error.param = own


def read(body: types.CountTokensRequest, *, strict_tools: bool) -> Reading:
    """Return *body* as a chat. Raises :class:`InvalidRequest`; with *strict_tools* also for tools else left out."""
    left_out: list[str] = []
    pairs = list(_messages(body, left_out))
    last = pairs[-1][0]
    choice = body.tool_choice
    thinking = body.thinking
    config = body.output_config
    if config is None:
        form = None
    else:
        form = config.format
    chat = ChatRequest(
        model=body.model,
        messages=[message for message, _ in pairs],
        tools=list(_tools(body, left_out, strict=strict_tools)),
        tool_choice=_choice(body),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        # The answer goes on with what the client wrote for it.
        continue_final_message=isinstance(last, messages.AssistantMessage) or None,
        reasoning_effort=None if config is None else config.effort,
        chat_template_kwargs=_thinking_variables(thinking),
    )
    if isinstance(body, types.MessagesRequest):
        form = form or body.output_format
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.stream = body.stream
        chat.temperature = body.temperature
        chat.top_p = body.top_p
        chat.top_k = body.top_k
    if form is not None:
        chat.response_format = JsonSchemaFormat(json_schema=NamedSchema(schema=form.schema))
    return Reading(chat, [origin for _, origin in pairs], left_out)


def _thinking_variables(thinking: types.ThinkingParam | None) -> dict[str, Any] | None:
    """Return the variables of templates for *thinking*."""
    if thinking is None:
        return None
    variables: dict[str, Any] = dict.fromkeys(_SWITCHES, thinking.type != "disabled")
    if thinking.budget_tokens is not None and thinking.type != "disabled":
        variables["thinking_budget"] = thinking.budget_tokens
    return variables


def _choice(body: types.CountTokensRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return None
    if choice.type != "tool":
        if choice.type == "any":
            return "required"
        return "none"
    if choice.name is None:
        raise missing("tool_choice.name")
    return NamedTool(function=NamedFunction(name=choice.name))


def _tools(body: types.CountTokensRequest, left_out: list[str], *, strict: bool) -> Iterator[Tool]:
    """Yield the tools that the model sees: deferred ones last, so that the prompt goes on where it ended before."""
    found = dict.fromkeys(_references(body.messages))
    shown = []
    deferred = {}
    for index, tool in enumerate(body.tools or ()):
        if tool.type is not None and tool.type != "custom":
            if strict:
                raise UnsupportedParameter(
                    f"Tools of type '{tool.type[:LONGEST_TYPE]}' are not supported.", param=f"tools[{index}].type"
                )
            left_out.append(tool.type)
        elif tool.input_schema is None or not tool.name:
            raise missing(f"tools[{index}].{'name' if tool.input_schema is not None else 'input_schema'}")
        elif tool.defer_loading:
            deferred[tool.name] = tool
        else:
            shown.append(tool)
    yield from map(_tool, shown)
    yield from [_tool(deferred[name]) for name in found if name in deferred]


def _tool(tool: types.ToolParam) -> Tool:
    if tool.description is None:
        described = {}
    else:
        described = {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _references(messages: Iterable[types.MessageParam]) -> Iterator[str]:
    for message in messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, types.ToolResultBlockParam) and isinstance(block.content, list):
                yield from [part.tool_name for part in block.content if isinstance(part, types.ToolReferenceBlockParam)]


def _messages(body: types.CountTokensRequest, left_out: list[str]) -> Iterator[tuple[messages.Message, str]]:
    """Yield the messages of the chat, each with the place that it comes from. Turns of one role become one."""
    if body.system:
        if isinstance(body.system, str):
            given = [types.TextBlock(body.system)]
        else:
            given = body.system
        texts = [_text(block.text) for block in given if not block.text.startswith(_BILLING)]
        if texts:
            yield messages.SystemMessage(content=_content(texts)), "system"
    for role, group in groupby(enumerate(body.messages), key=lambda item: item[1].role):
        turns = list(group)
        place = f"messages[{turns[0][0]}]"
        blocks: list[types.BlockParam] = []
        for block in chain.from_iterable(_blocks(message) for _, message in turns):
            if isinstance(block, types.LeftOutBlockParam):
                left_out.append(str(block.__struct_config__.tag))
            else:
                blocks.append(block)
        if role == "assistant":
            yield _assistant(blocks, place), place
        elif role == "system":
            texts = [_text(block.text) for block in blocks if isinstance(block, types.TextBlock)]
            if len(texts) < len(blocks):
                raise UnsupportedParameter("Messages of the system have texts only.", param=place)
            yield messages.SystemMessage(content=_content(texts)), place
        else:
            yield from [(message, place) for message in _user(blocks, place)]


def _blocks(message: types.MessageParam) -> Sequence[types.BlockParam]:
    if isinstance(message.content, str):
        return [types.TextBlock(message.content)]
    return message.content


def _assistant(blocks: Sequence[types.BlockParam], place: str) -> messages.Message:
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
                raise _misplaced(block, "an assistant's", place)
    return messages.AssistantMessage(
        content=_content(texts) if texts else None,
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def _user(blocks: Sequence[types.BlockParam], place: str) -> Iterator[messages.Message]:
    """Yield what tools answered, and then the rest: the images of tools too, which templates take of users only."""
    parts: list[messages.ContentPart] = []
    answered = False
    for block in blocks:
        if isinstance(block, types.ToolResultBlockParam):
            given = [types.TextBlock(block.content)] if isinstance(block.content, str) else block.content or ()
            found = [part for block_part in given for part in _parts(block_part, place)]
            text = "\n".join([part.text for part in found if part.text is not None])
            if block.is_error and not text.lower().startswith(("error", "<tool_use_error")):
                text = f"Error: {text}"
            parts += [part for part in found if part.text is None]
            answered = True
            yield messages.ToolMessage(content=text, tool_call_id=block.tool_use_id)
        elif isinstance(block, types.ResultBlockParam) and not isinstance(block, types.ToolReferenceBlockParam):
            parts += _parts(block, place)
        else:
            raise _misplaced(block, "a user's", place)
    if parts or not answered:
        yield messages.UserMessage(content=_content(parts))


def _parts(block: types.ResultBlockParam, place: str) -> Iterator[messages.ContentPart]:
    match block:
        case types.TextBlock():
            yield _text(block.text)
        case types.ImageBlockParam(source=source):
            # What a file really is, its first bytes say.
            yield messages.ContentPart(
                type="image_url",
                image_url=source.url
                if isinstance(source, types.UrlSourceParam)
                else f"data:image/{source.media_type.removeprefix('image/')};base64,{source.data}",
            )
        case types.DocumentBlockParam(source=types.TextSourceParam(data=text)):
            yield _document(block, text)
        case types.DocumentBlockParam(source=types.ContentSourceParam(content=str() as text)):
            yield _document(block, text)
        case types.DocumentBlockParam(source=types.ContentSourceParam(content=list() as inner)):
            found = [part for each in inner for part in _parts(each, place)]
            yield _document(block, "\n".join([part.text for part in found if part.text is not None]))
            yield from [part for part in found if part.text is None]
        case types.SearchResultBlockParam():
            texts = "\n".join([part.text for part in block.content])
            yield _text(files.shown(block.title, f"{block.source}\n{texts}"))
        case types.ToolReferenceBlockParam(tool_name=name):
            yield _text(f"The tool {name} can be called now.")
        case types.DocumentBlockParam(source=other):
            kind = other.media_type if isinstance(other, types.Base64SourceParam) else other.__struct_config__.tag
            if block.title is None:
                named = "A document"
            else:
                named = f"The document '{printable(block.title, 100)}'"
            raise UnsupportedParameter(
                f"{named} is of type '{printable(str(kind), 100)}', which is not supported: send its text, in a source "
                "of type 'text'.",
                param=place,
            )


def _document(block: types.DocumentBlockParam, text: str) -> messages.ContentPart:
    return _text(files.shown(block.title, text if block.context is None else f"{block.context}\n{text}"))


def _text(text: str) -> messages.ContentPart:
    return messages.ContentPart(type="text", text=text)


def _content(parts: Sequence[messages.ContentPart]) -> messages.Content:
    if len(parts) == 1 and parts[0].text is not None:
        return parts[0].text
    return list(parts)


def _misplaced(block: types.BlockParam, whose: str, place: str) -> UnsupportedParameter:
    kind = block.__struct_config__.tag
    return UnsupportedParameter(f"A block of type '{kind}' cannot be in {whose} message.", param=place)
