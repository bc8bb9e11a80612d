"""Turns the messages of a request into the plain dicts that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from triton_openai.chat.images import ImageMarks, is_image
from triton_openai.chat.messages import (
    AssistantMessage,
    Content,
    ContentPart,
    DeveloperMessage,
    FunctionCall,
    FunctionMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from triton_openai.chat.tool_form import ToolForm, fit_ids
from triton_openai.errors import InvalidRequest, UnsupportedParameter

#: The last two are what the Responses API calls text; agents that speak both mix them up.
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})

#: Between the text parts of a message when a template wants one string: what vLLM puts there.
_BETWEEN_PARTS = "\n"


class Wishes(Protocol):
    """What a template says about the form of its messages; ``ChatTemplate`` is one."""

    @property
    def wants_parts(self) -> bool:
        """Whether content must be a list of parts."""

    @property
    def takes_parts(self) -> bool:
        """Whether content may be a list of parts."""

    @property
    def takes_developers(self) -> bool:
        """Whether the role ``developer`` is known."""

    @property
    def tool_form(self) -> ToolForm:
        """How tool calls are to be written."""


def prepare(messages: Sequence[Message], template: Wishes, images: ImageMarks | None = None) -> list[dict[str, Any]]:
    """
    Return *messages* as *template* wants them.

    *images* says what is written for an image; without it, images are refused like all parts that are not text.

    A developer's message becomes the system's unless the template knows developers; a function's answer becomes a
    tool's; arguments of tool calls become objects; parts are joined for templates that expect strings. Raises
    :class:`InvalidRequest`, or :class:`UnsupportedParameter` for parts that are not text, with ``param`` naming the
    place (``messages[0].content[1]``).
    """
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages")
    prepared = [_prepare(message, template, images, f"messages[{index}]") for index, message in enumerate(messages)]
    if any("tool_calls" in message for message in prepared):
        fit_ids(prepared, template.tool_form)
    return prepared


def _prepare(message: Message, template: Wishes, images: ImageMarks | None, place: str) -> dict[str, Any]:
    if isinstance(message, AssistantMessage):
        return _assistant(message, template, images, place)
    content = _content(message.content, template, images, f"{place}.content")
    prepared: dict[str, Any]
    if isinstance(message, ToolMessage):
        prepared = {"role": "tool", "content": _empty(template) if content is None else content}
        if message.tool_call_id is not None:
            prepared["tool_call_id"] = message.tool_call_id
    elif isinstance(message, FunctionMessage):
        prepared = {"role": "tool", "content": _empty(template) if content is None else content}
    else:
        role = _role(message, template)
        if content is None:
            raise InvalidRequest(
                f"The content of a {role} message must be a string or a list of parts.", param=f"{place}.content"
            )
        prepared = {"role": role, "content": content}
    if message.name is not None:
        prepared["name"] = message.name
    return prepared


def _role(message: DeveloperMessage | SystemMessage | UserMessage, template: Wishes) -> str:
    if isinstance(message, UserMessage):
        return "user"
    if isinstance(message, DeveloperMessage) and template.takes_developers:
        return "developer"
    return "system"


def _assistant(message: AssistantMessage, template: Wishes, images: ImageMarks | None, place: str) -> dict[str, Any]:
    if message.audio is not None:
        raise UnsupportedParameter("Audio is not supported by this model; only text is.", param=f"{place}.audio")
    content = _content(message.content, template, images, f"{place}.content")
    if content is None and message.refusal is not None:
        content = _content(message.refusal, template, images, f"{place}.refusal")
    calls = [
        _call(call, template, f"{place}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None:
        function = _function(message.function_call, template, f"{place}.function_call")
        calls.append({"type": "function", "function": function})
    if not content:
        # Most templates add content to other text; a null there fails, or is written as "None". Others show calls only
        # where it is null, and clients send an empty text as often.
        content = None if calls and template.tool_form.null_content else _empty(template)
    prepared: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        # Left out when empty: templates ask whether the key is there.
        prepared["tool_calls"] = calls
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        _add_reasoning(prepared, reasoning, template)
    if message.name is not None:
        prepared["name"] = message.name
    return prepared


def _add_reasoning(prepared: dict[str, Any], reasoning: str, template: Wishes) -> None:
    """Put *reasoning* where the template reads it."""
    form = template.tool_form
    content = prepared["content"]
    if form.reasoning_alone and "tool_calls" in prepared and content:
        # Such a template writes either as the thinking before the call.
        words = content if isinstance(content, str) else _BETWEEN_PARTS.join(part["text"] for part in content)
        reasoning = f"{reasoning}\n{words}" if reasoning else words
        prepared["content"] = _empty(template)
    prepared[form.reasoning] = reasoning


def _call(call: ToolCall, template: Wishes, place: str) -> dict[str, Any]:
    if call.function is None:
        if call.type in (None, "function"):
            raise InvalidRequest("A tool call must have a 'function' with a 'name'.", param=f"{place}.function")
        raise UnsupportedParameter(
            f"Tool calls of type '{call.type[:100]}' are not supported by this model; only functions are.",
            param=f"{place}.type",
        )
    prepared: dict[str, Any] = {"type": "function", "function": _function(call.function, template, f"{place}.function")}
    if call.id is not None:
        prepared["id"] = call.id
    return prepared


def _function(function: FunctionCall, template: Wishes, place: str) -> dict[str, Any]:
    """Return the call with its arguments as the template takes them: as an object, or as their JSON text."""
    arguments = function.arguments
    parsed = _parse(arguments, f"{place}.arguments") if isinstance(arguments, str) else arguments or {}
    if not template.tool_form.text_arguments:
        return {"name": function.name, "arguments": parsed}
    # The client's own text is the model's own: its prefix stays the same.
    is_text = isinstance(arguments, str) and arguments.strip()
    return {"name": function.name, "arguments": arguments if is_text else json.dumps(parsed, ensure_ascii=False)}


def _parse(text: str, place: str) -> dict[str, Any]:
    if not text.strip():
        # What several clients send for a call without arguments.
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(
            "The arguments of a tool call must be valid JSON.", param=place, detail=str(error)
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequest("The arguments of a tool call must be a JSON object.", param=place)
    return value


def _content(
    content: Content, template: Wishes, images: ImageMarks | None, place: str
) -> str | list[dict[str, Any]] | None:
    if content is None:
        return None
    if isinstance(content, str):
        return [_text_part(content)] if template.wants_parts else content
    if images is not None and any(map(is_image, content)):
        if images.part is not None:
            return [
                dict(images.part) if is_image(part) else _text_part(_text(part, f"{place}[{index}]"))
                for index, part in enumerate(content)
            ]
        texts = [_text(part, f"{place}[{index}]") for index, part in enumerate(content) if not is_image(part)]
        texts = [*images.missing(texts, len(content) - len(texts), place), *texts]
    else:
        texts = [_text(part, f"{place}[{index}]") for index, part in enumerate(content)]
    # One part says no more than a string, and templates that take both treat strings with more care.
    if template.wants_parts or (template.takes_parts and len(texts) > 1):
        return [_text_part(text) for text in texts]
    return _BETWEEN_PARTS.join(texts)


def _text(part: ContentPart | str, place: str) -> str:
    if isinstance(part, str):
        return part
    if part.type is None or part.type in _TEXT_TYPES:
        text = part.text
    elif part.type == "refusal":
        text = part.refusal
    else:
        raise UnsupportedParameter(
            f"Content of type '{part.type[:100]}' is not supported by this model; only text is.", param=place
        )
    if text is None:
        raise InvalidRequest(f"A part of type '{part.type or 'text'}' must have its text.", param=place)
    return text


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _empty(template: Wishes) -> str | list[dict[str, str]]:
    return [_text_part("")] if template.wants_parts else ""
