"""Chats whose last message the model is to go on with: vLLM's and transformers' ``continue_final_message``."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.prompts import json_values
from triton_openai.prompts.template_analysis import ToolForm, fit_ids

#: What is read by hand, as it should be; see ``api.fields``.
ImageUrl: TypeAlias = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["url"],
                    "properties": {
                        "url": {"type": "string"},
                        "detail": {"enum": ["auto", "low", "high", "original", None]},
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content. Only its type is known here: which types work is the model's affair."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    #: Read by ``images``: an object with a ``url``, or the URL itself, which is how some clients and the Responses API
    #: write it.
    image_url: ImageUrl = None


#: A message's content: text, parts (some clients put bare strings between them), or null.
Content: TypeAlias = str | Annotated[list[ContentPart | str], Meta(max_length=4096)] | None


class MessageFunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The function that an assistant called. ``arguments`` is JSON text; some clients send it parsed."""

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of an assistant's message."""

    id: str | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"anyOf": [{"enum": ["function", None]}]})] = None
    function: MessageFunctionCall | None = None


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    content: Content = None
    name: str | None = None


class DeveloperMessage(_Message, frozen=True, kw_only=True, tag="developer"):
    """Instructions; what newer OpenAI models have in place of a system message."""


class SystemMessage(_Message, frozen=True, kw_only=True, tag="system"):
    """Instructions."""


class UserMessage(_Message, frozen=True, kw_only=True, tag="user"):
    """What the user says."""


class AssistantMessage(_Message, frozen=True, kw_only=True, tag="assistant"):
    """What the model said: text, a refusal, or calls of tools; with its reasoning where the client keeps it."""

    refusal: str | None = None
    reasoning_content: str | None = None
    #: The other name under which servers return, and clients send back, the same thing.
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    #: Deprecated by OpenAI in favour of ``tool_calls``.
    function_call: MessageFunctionCall | None = None
    #: Refused: only text can be told again.
    audio: Annotated[dict[str, Any] | None, Meta(extra_json_schema={"anyOf": [{"type": "null"}]})] = None


class ToolMessage(_Message, frozen=True, kw_only=True, tag="tool"):
    """What a tool answered."""

    tool_call_id: str | None = None


class FunctionMessage(_Message, frozen=True, kw_only=True, tag="function"):
    """What a function answered. Deprecated by OpenAI in favour of ``tool``."""


#: What a request's ``messages`` is a list of; msgspec picks the type by ``role``.
Message: TypeAlias = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


AUTO = "auto"
NONE = "none"
#: The second is the Responses API's, which agents that speak both mix up with the first.
IMAGE_TYPES = frozenset({"image_url", "input_image"})
_NUMBER = "{n}"


class TakesImages(Protocol):
    """What a template says about images; ``ChatTemplate`` is one."""

    @property
    def image_part(self) -> Mapping[str, Any] | None:
        """The part that stands for an image, ``None`` where the template has no use for one."""


class ImageMarks:
    """
    What stands for the images of one request: a *part* that the template writes the placeholder for, or the
    *placeholder* itself, in which ``{n}`` is the image's number within the request; where both are ``None``, nothing.

    Made for one rendering, as it counts.
    """

    def __init__(self, *, part: Mapping[str, Any] | None = None, placeholder: str | None = None) -> None:
        self.part = part
        self._placeholder = placeholder
        self._count = 0

    def missing(self, texts: Sequence[str], images: int, place: str) -> list[str]:
        """
        Return the placeholders of a message's *images* that its *texts* do not hold yet, to be put in front of them.

        In front is where vLLM's own server puts them, and where the models learnt to find them. Raises
        :class:`InvalidRequest` when the texts hold more placeholders than there are images.
        """
        if self._placeholder is None:
            return []
        marks = []
        for _ in range(images):
            self._count += 1
            marks.append(self._placeholder.replace(_NUMBER, str(self._count)))
        lacking = []
        for mark in dict.fromkeys(marks):
            wanted = marks.count(mark)
            there = sum(text.count(mark) for text in texts)
            if there > wanted:
                raise InvalidRequest(
                    f"The message's text holds the placeholder of an image ('{mark}') more often than it has images.",
                    param=place,
                )
            lacking += [mark] * (wanted - there)
        return lacking


def marks(template: TakesImages, setting: str | None, place: str) -> ImageMarks:
    """
    Return what stands for the images in a prompt of *template*; *setting* is the operator's ``image_placeholder``,
    *place* the first image.

    Raises :class:`UnsupportedParameter` where neither knows, as it is with models that see nothing.
    """
    if setting == NONE:
        return ImageMarks()
    if setting not in (None, AUTO):
        return ImageMarks(placeholder=setting)
    part = template.image_part
    if part is None:
        raise UnsupportedParameter(
            "The model's chat template takes no images. If the model does, its placeholder for them has to be "
            "configured (image_placeholder).",
            param=place,
        )
    return ImageMarks(part=part)


def is_image(part: ContentPart | str) -> bool:
    """Return whether *part* is an image."""
    return not isinstance(part, str) and part.type in IMAGE_TYPES


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """
    How a chat template renders messages: what it is given beside them, and where the prompt ends.

    *variables* are the client's ``chat_template_kwargs``. With *continue_final_message* the prompt ends with the last
    message's text. *images* says how images are written; without it, messages with images are refused.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = {}
    images: ImageMarks | None = None


#: A chat without tools or options.
PLAIN = Rendering()

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


def _call(call: MessageToolCall, template: Wishes, place: str) -> dict[str, Any]:
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


def _function(function: MessageFunctionCall, template: Wishes, place: str) -> dict[str, Any]:
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
        value = json_values.decode(text)
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


_PARAM = "continue_final_message"


class Continuation:
    """
    Renders an open end: the last message's text gets a mark behind it, and the prompt is cut there.

    Cutting at the mark, and not at the text, is right whatever the template does to the text; transformers does it the
    same way.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)

    def mark(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Return prepared *messages* with the mark behind the last one's text.

        Raises :class:`InvalidRequest` where there is nothing of an assistant's to go on with.
        """
        last = messages[-1]
        content = last.get("content")
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise InvalidRequest(
                f"'{_PARAM}' needs the last message to be an assistant's, without tool calls.", param=_PARAM
            )
        # The space behind the mark shows whether the template trims the text.
        if isinstance(content, str) and content:
            marked: Any = f"{content}{self._mark} "
        elif isinstance(content, list) and content and content[-1].get("text"):
            marked = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{self._mark} "}]
        else:
            raise InvalidRequest(f"'{_PARAM}' needs the last message to have text.", param=_PARAM)
        return [*messages[:-1], {**last, "content": marked}]

    def cut(self, prompt: str) -> str:
        """
        Return *prompt* up to the end of the last message's text, trimmed where the template trims it.

        Raises :class:`InvalidRequest` where the template leaves the text out.
        """
        place = prompt.rfind(self._mark)
        if place < 0:
            raise InvalidRequest(
                "The model's chat template does not show the last message as it is, so it cannot be continued.",
                param=_PARAM,
            )
        text = prompt[:place]
        return text if prompt.startswith(" ", place + len(self._mark)) else text.rstrip()
