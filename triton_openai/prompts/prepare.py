"""Messages of a chat in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.prompts.call_ids import fit_ids
from triton_openai.prompts.content import BETWEEN_PARTS, NO_MARKS, Marks, empty_content, prepared_content
from triton_openai.prompts.media_marks import ImageMarks
from triton_openai.prompts.messages import (
    AssistantMessage,
    DeveloperMessage,
    FunctionMessage,
    Message,
    MessageFunctionCall,
    MessageToolCall,
    ToolMessage,
    UserMessage,
)
from triton_openai.prompts.origins import CHAT_ORIGINS, MessageOrigin, Origins
from triton_openai.prompts.parts import Prepared
from triton_openai.prompts.past_calls import PastCalls
from triton_openai.prompts.prompt_template import PromptTemplate
from triton_openai.prompts.results import results_behind_calls
from triton_openai.prompts.system_messages import SYSTEM_ROLES, merged_system_messages
from triton_openai.prompts.turns import ANY_ORDER, fit_turns


def prepare(
    messages: Sequence[Message],
    template: PromptTemplate,
    images: ImageMarks | None = None,
    audio: ImageMarks | None = None,
    past_calls: PastCalls | None = None,
    origins: Origins = CHAT_ORIGINS,
) -> list[dict[str, Any]]:
    """
    Return *messages* in the form that *template* takes; without *images* and *audio*, all parts but text are refused.

    *past_calls* reads the arguments of past calls. *origins* has the client's names, for errors. Developer messages
    become system messages, unless the template has a role for developers. System messages that the template does not
    take where they stand become part of the first one, or of the user's. Turns come in an order that the template
    takes. Function results become tool results, arguments of tool calls become objects, and parts are joined for
    templates that take strings.

    Raises :class:`InvalidRequest` or :class:`UnsupportedParameter`, whose ``param`` is the path in the request
    (``messages[0].content[1]``).
    """
    if not messages:
        param = origins.name("messages")
        raise InvalidRequest(f"'{param}' must hold at least one message.", param=param)
    marks = (images, audio)
    if past_calls is None:
        past_calls = PastCalls()
    prepared = []
    for index, message in enumerate(messages):
        if origins.messages is None:
            origin = MessageOrigin(f"messages[{index}]")
        else:
            origin = origins.messages[index]
        prepared.append(_prepare(message, template, marks, past_calls, origin))
    if any(message["role"] == "tool" for message in prepared):
        prepared = results_behind_calls(prepared)
    if not template.takes_late_system and any(message["role"] in SYSTEM_ROLES for message in prepared[1:]):
        prepared = merged_system_messages(prepared)
    form = template.tool_form
    if (form.ids != "any" or form.needs_names) and any("tool_calls" in message for message in prepared):
        fit_ids(prepared, form)
    if template.turns is not ANY_ORDER:
        prepared = fit_turns(prepared, template.turns, in_parts=template.wants_parts)
    return prepared


def _prepare(
    message: Message, template: PromptTemplate, marks: Marks, past_calls: PastCalls, origin: MessageOrigin
) -> dict[str, Any]:
    content: Prepared | None
    if isinstance(message.content, str) and not template.wants_parts:
        content = message.content
    else:
        content = prepared_content(message.content, template, marks, origin)
    if isinstance(message, AssistantMessage):
        prepared = _assistant(message, content, template, past_calls, origin)
    elif isinstance(message, ToolMessage | FunctionMessage):
        prepared = _tool_result(message, content, template)
    else:
        role = _role(message, template)
        if content is None:
            raise InvalidRequest(
                f"The content of a {role} message must be a string or a list of parts.", param=origin.content()
            )
        prepared = {"role": role, "content": content}
    if message.name is not None:
        prepared["name"] = message.name
    return prepared


def _role(message: Message, template: PromptTemplate) -> str:
    if isinstance(message, UserMessage):
        return "user"
    if isinstance(message, DeveloperMessage) and template.takes_developers:
        return "developer"
    return "system"


def _tool_result(
    message: ToolMessage | FunctionMessage, content: Prepared | None, template: PromptTemplate
) -> dict[str, Any]:
    if content is None:
        content = empty_content(template)
    prepared: dict[str, Any] = {"role": "tool", "content": content}
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        prepared["tool_call_id"] = message.tool_call_id
    return prepared


def _assistant(
    message: AssistantMessage,
    content: Prepared | None,
    template: PromptTemplate,
    past_calls: PastCalls,
    origin: MessageOrigin,
) -> dict[str, Any]:
    if message.audio is not None:
        raise UnsupportedParameter("Audio is not supported by this model; only text is.", param=origin.field("audio"))
    if content is None and message.refusal is not None:
        content = prepared_content(message.refusal, template, NO_MARKS, origin)
    calls = _calls(message, template, past_calls, origin)
    form = template.tool_form
    reasoning = message.reasoning_content
    if reasoning is None:
        reasoning = message.reasoning
    if reasoning is not None and form.reasoning_alone and calls and content:
        # Such a template renders either of them as the thinking before the call.
        reasoning = _with_words(reasoning, content)
        content = empty_content(template)
    elif not content:
        # Most templates add content to other text: a null fails, or is rendered as "None". Other templates show calls
        # only if content is null, and clients often send an empty text instead.
        content = empty_content(template)
        if calls and form.null_content:
            content = None
    prepared: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        # Left out when empty: templates ask whether the key is there.
        prepared["tool_calls"] = calls
    if reasoning is not None:
        prepared[form.reasoning] = reasoning
    return prepared


def _with_words(reasoning: str, content: Prepared) -> str:
    """Return *reasoning* and the text of *content*."""
    if isinstance(content, str):
        words = content
    else:
        words = BETWEEN_PARTS.join(part["text"] for part in content)
    if reasoning:
        return f"{reasoning}\n{words}"
    return words


def _calls(
    message: AssistantMessage, template: PromptTemplate, past_calls: PastCalls, origin: MessageOrigin
) -> list[dict[str, Any]]:
    """Return the tool calls of *message*."""
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(message.tool_calls or ()):
        function = _function_of(call, origin, index)
        prepared = {"type": "function", "function": _function(function, template, past_calls)}
        if call.id is not None:
            prepared["id"] = call.id
        calls.append(prepared)
    if message.function_call is not None:
        calls.append({"type": "function", "function": _function(message.function_call, template, past_calls)})
    return calls


def _function_of(call: MessageToolCall, origin: MessageOrigin, index: int) -> MessageFunctionCall:
    """Return the function that *call* calls. Raises :class:`InvalidRequest` or :class:`UnsupportedParameter`."""
    if call.type == "custom" and call.custom is not None:
        # To the model it is a function of one text.
        return MessageFunctionCall(name=call.custom.name, arguments={"input": call.custom.input})
    if call.function is not None:
        return call.function
    if call.type == "custom":
        raise InvalidRequest("A call of a custom tool must have 'custom'.", param=origin.call(index, ".custom"))
    if call.type in (None, "function"):
        raise InvalidRequest("A tool call must have a 'function' with a 'name'.", param=origin.call(index, ".function"))
    raise UnsupportedParameter(
        f"Tool calls of type '{call.type[:100]}' are not supported by this model; functions and custom tools are.",
        param=origin.call(index, ".type"),
    )


def _function(function: MessageFunctionCall, template: PromptTemplate, past_calls: PastCalls) -> dict[str, Any]:
    """Return the call with its arguments in the template's form: an object, or JSON text."""
    arguments = function.arguments
    parsed, was_another = past_calls.read(function.name, arguments)
    if not template.tool_form.text_arguments:
        return {"name": function.name, "arguments": parsed}
    if isinstance(arguments, str) and arguments.strip() and not was_another:
        # The client returns the model's own text, so the prompt's prefix stays the same.
        return {"name": function.name, "arguments": arguments}
    return {"name": function.name, "arguments": json.dumps(parsed, ensure_ascii=False)}
