"""
Reads a request of Anthropic's API as a chat.

Content that says the same in another form, such as a string or a list of one text, becomes the same message, so that
the prompt of a conversation stays the prefix of its next one, and the backend's cache serves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from triton_openai.api.agents import LONGEST_TYPE, unsealed, warn_left_out
from triton_openai.api.bodies import missing
from triton_openai.api.chat import ChatRequest
from triton_openai.api.messages import types
from triton_openai.api.parameters import JsonSchemaFormat, NamedSchema
from triton_openai.api.tools import NamedFunction, NamedTool, Tool, ToolChoice
from triton_openai.errors import ServiceError, UnsupportedParameter
from triton_openai.prompts import messages

# Claude Code's first block: it says which release asks, changes with it, and is not for the model.
_BILLING = "x-anthropic-billing-header:"
# Templates that know levels know these three.
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
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
    """A request as a *chat*; *origins* has the place in the request from which each of the chat's messages comes."""

    chat: ChatRequest
    origins: Sequence[str]

    def blame(self, error: ServiceError) -> None:
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
    pairs = list(_messages(body))
    last = pairs[-1][0]
    choice, thinking, config = body.tool_choice, body.thinking, body.output_config
    form = None if config is None else config.format
    chat = ChatRequest(
        model=body.model,
        messages=[message for message, _ in pairs],
        tools=list(_tools(body, strict=strict_tools)),
        tool_choice=_choice(body),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        # The answer goes on with what the client wrote for it.
        continue_final_message=isinstance(last, messages.AssistantMessage) or None,
        reasoning_effort=None if config is None or config.effort is None else _EFFORTS[config.effort],
        chat_template_kwargs=None if thinking is None else dict.fromkeys(_SWITCHES, thinking.type != "disabled"),
    )
    if isinstance(body, types.MessagesRequest):
        form = form or body.output_format
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.stream = body.stream
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    if form is not None:
        chat.response_format = JsonSchemaFormat(json_schema=NamedSchema(schema=form.schema))
    return Reading(chat, [origin for _, origin in pairs])


def _choice(body: types.CountTokensRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else "none"
    if choice.name is None:
        raise missing("tool_choice.name")
    return NamedTool(function=NamedFunction(name=choice.name))


def _tools(body: types.CountTokensRequest, *, strict: bool) -> Iterator[Tool]:
    """Yield the tools that the model sees: deferred ones last, so that the prompt goes on where it ended before."""
    found = dict.fromkeys(_references(body.messages))
    shown, deferred = [], {}
    for index, tool in enumerate(body.tools or ()):
        if tool.type is not None and tool.type != "custom":
            if strict:
                raise UnsupportedParameter(
                    f"Tools of type '{tool.type[:LONGEST_TYPE]}' are not supported.", param=f"tools[{index}].type"
                )
            warn_left_out(tool.type)
        elif tool.input_schema is None or not tool.name:
            raise missing(f"tools[{index}].{'name' if tool.input_schema is not None else 'input_schema'}")
        elif tool.defer_loading:
            deferred[tool.name] = tool
        else:
            shown.append(tool)
    yield from map(_tool, shown)
    yield from [_tool(deferred[name]) for name in found if name in deferred]


def _tool(tool: types.ToolParam) -> Tool:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _references(messages: Iterable[types.MessageParam]) -> Iterator[str]:
    for message in messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, types.ToolResultBlockParam) and isinstance(block.content, list):
                yield from [part.tool_name for part in block.content if isinstance(part, types.ToolReferenceBlockParam)]


def _messages(body: types.CountTokensRequest) -> Iterator[tuple[messages.Message, str]]:
    """Yield the messages of the chat, each with the place that it comes from. Turns of one role become one."""
    if body.system:
        given = [types.TextBlock(body.system)] if isinstance(body.system, str) else body.system
        texts = [_text(block.text) for block in given if not block.text.startswith(_BILLING)]
        if texts:
            yield messages.SystemMessage(content=_content(texts)), "system"
    for role, group in groupby(enumerate(body.messages), key=lambda item: item[1].role):
        turns = list(group)
        place = f"messages[{turns[0][0]}]"
        blocks = [block for _, message in turns for block in _blocks(message)]
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
    return [types.TextBlock(message.content)] if isinstance(message.content, str) else message.content


def _assistant(blocks: Sequence[types.BlockParam], place: str) -> messages.Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block:
            case types.TextBlock():
                texts.append(_text(block.text))
            case types.ThinkingBlockParam():
                thoughts.append(block.thinking or unsealed(block.signature) or "")
            case types.ToolUseBlock():
                function = messages.MessageFunctionCall(name=block.name, arguments=block.input)
                calls.append(messages.MessageToolCall(id=block.id, type="function", function=function))
            case types.RedactedThinkingBlockParam():
                pass
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
            found = [_part(part, place) for part in given]
            text = "\n".join([part.text for part in found if part.text is not None])
            if block.is_error and not text.lower().startswith(("error", "<tool_use_error")):
                text = f"Error: {text}"
            parts += [part for part in found if part.text is None]
            answered = True
            yield messages.ToolMessage(content=text, tool_call_id=block.tool_use_id)
        elif isinstance(block, types.TextBlock | types.ImageBlockParam | types.DocumentBlockParam):
            parts.append(_part(block, place))
        else:
            raise _misplaced(block, "a user's", place)
    if parts or not answered:
        yield messages.UserMessage(content=_content(parts))


def _part(block: types.ResultBlockParam, place: str) -> messages.ContentPart:
    match block:
        case types.TextBlock():
            return _text(block.text)
        case types.ImageBlockParam(source=types.UrlSourceParam(url=url)):
            return messages.ContentPart(type="image_url", image_url=url)
        case types.ImageBlockParam(source=types.Base64SourceParam(media_type=media_type, data=data)):
            # What it really is, its first bytes say.
            url = f"data:image/{media_type.removeprefix('image/')};base64,{data}"
            return messages.ContentPart(type="image_url", image_url=url)
        case types.DocumentBlockParam(source=types.TextSourceParam(data=data)):
            return _text(data if block.title is None else f"{block.title}\n{data}")
        case types.ToolReferenceBlockParam(tool_name=name):
            return _text(f"The tool {name} can be called now.")
        case _:
            raise UnsupportedParameter("Of documents, only those of plain text are supported.", param=place)


def _text(text: str) -> messages.ContentPart:
    return messages.ContentPart(type="text", text=text)


def _content(parts: Sequence[messages.ContentPart]) -> messages.Content:
    return parts[0].text if len(parts) == 1 and parts[0].text is not None else list(parts)


def _misplaced(block: types.BlockParam, whose: str, place: str) -> UnsupportedParameter:
    kind = block.__struct_config__.tag
    return UnsupportedParameter(f"A block of type '{kind}' cannot be in {whose} message.", param=place)
