"""A chat's messages in the forms of clients and of chat templates."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from triton_openai.config.tree import AUTO, NONE
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.media import text_files as files
from triton_openai.prompts.origins import CHAT_ORIGINS, MessageOrigin, Origins
from triton_openai.prompts.past_calls import PastCalls


# A request may have thousands of what follows. It has no reference cycles, so the garbage collector leaves it out.
class ImageUrl(msgspec.Struct, gc=False, frozen=True):
    """The URL of an image. No backend takes a level of detail, so ``detail`` has no effect."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(msgspec.Struct, gc=False, frozen=True):
    """Audio: a file in base64. What its format is, the file itself says."""

    data: str | None = None
    format: str | None = None


class FileContent(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """A file: its content in base64, or a data URL with it. Files that are stored elsewhere are refused."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    file_url: str | None = None


class ContentPart(FileContent, frozen=True, kw_only=True):
    """
    One part of a message's content. Which types of parts are accepted depends on the model.

    Files are texts. Their fields stand in ``file``, or in the part itself, as in the Responses API.
    """

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    #: An object with a ``url``; or the URL itself, as some clients and the Responses API send it.
    image_url: ImageUrl | str | None = None
    file: FileContent | None = None
    input_audio: InputAudio | None = None


#: A message's content: text, parts (some clients put bare strings between them), or null.
Content: TypeAlias = str | Annotated[list[ContentPart | str], Meta(max_length=4096)] | None


class MessageFunctionCall(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """
    The function that an assistant called. ``arguments`` is JSON text; some clients send it parsed.

    What is broken or no object is taken too, and becomes an object for the model.
    """

    name: str
    arguments: str | dict[str, Any] | list[Any] | bool | int | float | None = None


class MessageCustomCall(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """The custom tool that an assistant called, with its text."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One tool call of an assistant's message."""

    id: str | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"anyOf": [{"enum": ["function", "custom", None]}]})] = None
    function: MessageFunctionCall | None = None
    custom: MessageCustomCall | None = None


class _Message(msgspec.Struct, gc=False, frozen=True, kw_only=True, tag_field="role"):
    content: Content = None
    name: str | None = None


class DeveloperMessage(_Message, frozen=True, kw_only=True, tag="developer"):
    """Instructions; the system message of newer OpenAI models."""


class SystemMessage(_Message, frozen=True, kw_only=True, tag="system"):
    """Instructions."""


class UserMessage(_Message, frozen=True, kw_only=True, tag="user"):
    """A message of the user."""


class AssistantMessage(_Message, frozen=True, kw_only=True, tag="assistant"):
    """An answer of the model: text, a refusal, or tool calls; with its reasoning if the client keeps it."""

    refusal: str | None = None
    reasoning_content: str | None = None
    #: Another name for ``reasoning_content``, which some servers return and clients send back.
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    #: Deprecated by OpenAI in favour of ``tool_calls``.
    function_call: MessageFunctionCall | None = None
    #: Refused: a prompt holds text only.
    audio: Annotated[dict[str, Any] | None, Meta(extra_json_schema={"anyOf": [{"type": "null"}]})] = None


class ToolMessage(_Message, frozen=True, kw_only=True, tag="tool"):
    """The result of a tool."""

    tool_call_id: str | None = None


class FunctionMessage(_Message, frozen=True, kw_only=True, tag="function"):
    """The result of a function. Deprecated by OpenAI in favour of ``tool``."""


#: An item of a request's ``messages``; msgspec picks the type by ``role``.
Message: TypeAlias = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


#: The second is the Responses API's; agents that use both APIs confuse the two.
_IMAGE_TYPES = frozenset({"image_url", "input_image"})
AUDIO_TYPE = "input_audio"
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_FILE_TYPES = frozenset({"file", "input_file"})
#: Joins the text parts of a message for templates that take one string, as in vLLM.
_BETWEEN_PARTS = "\n"


class ImageMarks:
    """
    How a prompt marks the images of one request: with a *part* for which the template writes a placeholder, or with the
    *placeholder* itself, in which ``{n}`` is the image's number within the request; not at all if both are ``None``.

    It counts images, so each rendering needs a new one.
    """

    def __init__(self, *, part: Mapping[str, Any] | None = None, placeholder: str | None = None) -> None:
        self.part = part
        self._placeholder = placeholder
        self._count = 0

    def missing(self, texts: Sequence[str], images: int, param: str, what: str = "an image") -> list[str]:
        """
        Return the placeholders of a message's *images*, or *what* else they are, that its *texts* lack.

        They go in front, as in vLLM's server. *param* is the client's path of the message's content.

        Raises :class:`InvalidRequest` if the texts have more placeholders than there are images.
        """
        if self._placeholder is None:
            return []
        numbers = range(self._count + 1, self._count + images + 1)
        self._count += images
        marks = [self._placeholder.replace("{n}", str(number)) for number in numbers]
        lacking = []
        for mark in dict.fromkeys(marks):
            more = marks.count(mark) - sum(text.count(mark) for text in texts)
            if more < 0:
                raise InvalidRequest(
                    f"The message's text holds the placeholder of {what} ('{mark}') more often than it has such parts.",
                    param=param,
                )
            lacking += [mark] * more
        return lacking


def is_image(part: ContentPart | str) -> bool:
    """Return whether *part* is an image."""
    return not isinstance(part, str) and part.type in _IMAGE_TYPES


def is_audio(part: ContentPart | str) -> bool:
    """Return whether *part* is audio."""
    return not isinstance(part, str) and part.type == AUDIO_TYPE


def text_of(message: UserMessage, origin: MessageOrigin) -> str:
    """Return the text of *message* without its images. Raises as :func:`prepare`."""
    if isinstance(message.content, str):
        return message.content
    parts = enumerate(message.content or ())
    return _BETWEEN_PARTS.join(_text(part, origin, f"[{index}]") for index, part in parts if not is_image(part))


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """How a chat template renders messages: its other inputs, and where the prompt ends."""

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    #: Whether the prompt ends with the last message's text.
    continue_final_message: bool = False
    #: The client's ``chat_template_kwargs``.
    variables: Mapping[str, Any] = {}
    #: How the prompt marks images; without it, messages with images are refused.
    images: ImageMarks | None = None
    #: The same for audio.
    audio: ImageMarks | None = None
    #: Collects the names of the functions whose past calls had arguments that were no object.
    repaired: list[str] | None = None
    #: The client's names, for errors.
    origins: Origins = CHAT_ORIGINS


#: A chat without tools or options.
PLAIN = Rendering()


class ToolForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of tool calls that a template expects."""

    text_arguments: bool = False
    null_content: bool = False
    #: ``any`` (unchanged), ``short`` (nine letters and digits), or ``named`` (``functions.<name>:<count>``, if the
    #: template shows the function's name nowhere else).
    ids: Literal["any", "short", "named"] = "any"
    needs_names: bool = False
    #: The field for the thinking before a call, and whether the template takes either that or content, but not both (as
    #: gpt-oss's, whose field is ``thinking``).
    reasoning: str = "reasoning_content"
    reasoning_alone: bool = False


class PromptTemplate(ABC):
    """Renders messages to a prompt, and describes the form of messages that it takes. Immutable; thread-safe."""

    #: The template's origin, for people.
    name: str
    #: The template's own text.
    source: str
    #: The variables that it reads besides the messages.
    variables: frozenset[str] = frozenset()
    #: Why it fails on every message, which is the operator's mistake; ``None`` if it works.
    failure: str | None = None
    #: Whether content must be, and may be, a list of parts.
    wants_parts: bool = False
    takes_parts: bool = False
    #: The part that stands for an image; ``None`` if the template ignores images.
    image_part: Mapping[str, Any] | None = None
    #: The same for audio.
    audio_part: Mapping[str, Any] | None = None
    #: Whether it knows the role ``developer``, and whether system messages may follow other messages.
    takes_developers: bool = False
    takes_late_system: bool = True
    tool_form: ToolForm = ToolForm()

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = PLAIN) -> str:
        """Return the prompt of prepared *messages*. Raises :class:`InvalidRequest`."""


def marks(
    template: PromptTemplate, setting: str | None, param: str, kind: Literal["image", "audio"] = "image"
) -> ImageMarks:
    """
    Return how prompts of *template* mark parts of a *kind*. *setting* is the operator's placeholder for it.

    *param* is the client's path of the first one. Raises :class:`UnsupportedParameter` if neither has a placeholder.
    """
    if setting not in (None, AUTO):
        return ImageMarks(placeholder=None if setting == NONE else setting)
    if kind == "image":
        part = template.image_part
        what = "images"
    else:
        part = template.audio_part
        what = "audio"
    if part is None:
        raise UnsupportedParameter(
            f"The model's chat template takes no {what}. If the model does, its placeholder has to be configured "
            f"({kind}_placeholder).",
            param=param,
        )
    return ImageMarks(part=part)


def prepare(
    messages: Sequence[Message],
    template: PromptTemplate,
    images: ImageMarks | None = None,
    audio: ImageMarks | None = None,
    past_calls: Callable[[], PastCalls] = PastCalls,
    origins: Origins = CHAT_ORIGINS,
) -> list[dict[str, Any]]:
    """
    Return *messages* in the form that *template* takes; without *images* and *audio*, all parts but text are refused.

    *past_calls* makes what reads the arguments of past calls. *origins* has the client's names, for errors.

    Developer messages become system messages, unless the template knows developers. System messages that the template
    does not take where they stand become part of the first one, or of the user's. Function results become tool results,
    arguments of tool calls become objects, and parts are joined for templates that take strings. Raises
    :class:`InvalidRequest` or :class:`UnsupportedParameter`, whose ``param`` is a path (``messages[0].content[1]``).
    """
    if not messages:
        param = origins.name("messages")
        raise InvalidRequest(f"'{param}' must hold at least one message.", param=param)
    marks = (images, audio)
    prepared = []
    for index, message in enumerate(messages):
        if origins.messages is None:
            origin = MessageOrigin(f"messages[{index}]")
        else:
            origin = origins.messages[index]
        prepared.append(_prepare(message, template, marks, past_calls, origin))
    if not template.takes_late_system and any(message["role"] in _SYSTEM for message in prepared[1:]):
        prepared = _merged(prepared)
    form = template.tool_form
    if (form.ids != "any" or form.needs_names) and any("tool_calls" in message for message in prepared):
        _fit_ids(prepared, form)
    return prepared


#: How images and audio are marked.
_Marks: TypeAlias = tuple[ImageMarks | None, ImageMarks | None]
_NO_MARKS: _Marks = (None, None)


def _prepare(
    message: Message,
    template: PromptTemplate,
    marks: _Marks,
    past_calls: Callable[[], PastCalls],
    origin: MessageOrigin,
) -> dict[str, Any]:
    content = _content(message.content, template, marks, origin)
    if isinstance(message, AssistantMessage):
        prepared = _assistant(message, content, template, past_calls, origin)
    elif isinstance(message, (ToolMessage, FunctionMessage)):
        prepared = {"role": "tool", "content": _empty(template) if content is None else content}
        if isinstance(message, ToolMessage) and message.tool_call_id is not None:
            prepared["tool_call_id"] = message.tool_call_id
    else:
        if isinstance(message, UserMessage):
            role = "user"
        else:
            role = "system"
        if isinstance(message, DeveloperMessage) and template.takes_developers:
            role = "developer"
        if content is None:
            raise InvalidRequest(
                f"The content of a {role} message must be a string or a list of parts.", param=origin.content()
            )
        prepared = {"role": role, "content": content}
    if message.name is not None:
        prepared["name"] = message.name
    return prepared


_SYSTEM = ("system", "developer")


def _merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return prepared *messages*: later system messages become the user's, and consecutive user messages are merged."""
    merged: list[dict[str, Any]] = []
    # All contents of each are joined at once: pair by pair would copy the first ones again and again.
    contents: list[list[str | list[dict[str, str]]]] = []
    for message in messages:
        last = None
        if merged:
            last = merged[-1]["role"]
        role = message["role"]
        leading = role in _SYSTEM and last in (None, *_SYSTEM)
        if role in _SYSTEM and not leading:
            role = "user"
        if merged and (leading or role == last == "user"):
            contents[-1].append(message["content"])
        else:
            merged.append({**message, "role": role})
            contents.append([message["content"]])
    for message, joined in zip(merged, contents, strict=True):
        if len(joined) > 1:
            message["content"] = _joined(joined)
    return merged


def _joined(contents: Sequence[str | list[dict[str, str]]]) -> str | list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    texts: list[str] = []
    for content in contents:
        if isinstance(content, str):
            texts.append(content)
            continue
        parts += [_text_part("\n\n".join(texts))] if texts else []
        parts += content
        texts = []
    text = "\n\n".join(texts)
    if not parts:
        return text
    if texts:
        return [*parts, _text_part(text)]
    return parts


def _assistant(
    message: AssistantMessage,
    content: Any,
    template: PromptTemplate,
    past_calls: Callable[[], PastCalls],
    origin: MessageOrigin,
) -> dict[str, Any]:
    if message.audio is not None:
        raise UnsupportedParameter("Audio is not supported by this model; only text is.", param=origin.field("audio"))
    if content is None and message.refusal is not None:
        content = _content(message.refusal, template, _NO_MARKS, origin)
    past = past_calls()
    calls = [_call(call, template, past, origin, index) for index, call in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        function = _function(message.function_call, template, past)
        calls.append({"type": "function", "function": function})
    form = template.tool_form
    if message.reasoning_content is None:
        reasoning = message.reasoning
    else:
        reasoning = message.reasoning_content
    if reasoning is not None and form.reasoning_alone and calls and content:
        # Such a template renders either of them as the thinking before the call.
        if isinstance(content, str):
            words = content
        else:
            words = _BETWEEN_PARTS.join(part["text"] for part in content)
        if reasoning:
            reasoning = f"{reasoning}\n{words}"
        else:
            reasoning = words
        content = _empty(template)
    elif not content:
        # Most templates add content to other text: a null fails, or is rendered as "None". Other templates show calls
        # only if content is null, and clients often send an empty text instead.
        if calls and form.null_content:
            content = None
        else:
            content = _empty(template)
    prepared: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        # Left out when empty: templates ask whether the key is there.
        prepared["tool_calls"] = calls
    if reasoning is not None:
        prepared[form.reasoning] = reasoning
    return prepared


def _call(
    call: MessageToolCall, template: PromptTemplate, past: PastCalls, origin: MessageOrigin, index: int
) -> dict[str, Any]:
    function = call.function
    if call.type == "custom" and call.custom is not None:
        # To the model it is a function of one text.
        function = MessageFunctionCall(name=call.custom.name, arguments={"input": call.custom.input})
    if function is None:
        if call.type == "custom":
            raise InvalidRequest("A call of a custom tool must have 'custom'.", param=origin.call(index, ".custom"))
        if call.type in (None, "function"):
            raise InvalidRequest(
                "A tool call must have a 'function' with a 'name'.", param=origin.call(index, ".function")
            )
        raise UnsupportedParameter(
            f"Tool calls of type '{call.type[:100]}' are not supported by this model; functions and custom tools are.",
            param=origin.call(index, ".type"),
        )
    prepared: dict[str, Any] = {"type": "function", "function": _function(function, template, past)}
    if call.id is not None:
        prepared["id"] = call.id
    return prepared


def _function(function: MessageFunctionCall, template: PromptTemplate, past: PastCalls) -> dict[str, Any]:
    """Return the call with its arguments in the template's form: an object, or JSON text."""
    arguments = function.arguments
    parsed, was_another = past.read(function.name, arguments)
    if not template.tool_form.text_arguments:
        return {"name": function.name, "arguments": parsed}
    if isinstance(arguments, str) and arguments.strip() and not was_another:
        # The client returns the model's own text, so the prompt's prefix stays the same.
        return {"name": function.name, "arguments": arguments}
    return {"name": function.name, "arguments": json.dumps(parsed, ensure_ascii=False)}


def _content(
    content: Content, template: PromptTemplate, marks: _Marks, origin: MessageOrigin
) -> str | list[dict[str, Any]] | None:
    if content is None:
        return None
    if isinstance(content, str):
        if template.wants_parts:
            return [_text_part(content)]
        return content
    images, audio = marks
    # A text, or how what is no text is marked.
    found = [
        (images if is_image(part) else audio if is_audio(part) else None) or _text(part, origin, f"[{index}]")
        for index, part in enumerate(content)
    ]
    texts = [text for text in found if isinstance(text, str)]
    lacking: list[str] = []
    for one, what in ((images, "an image"), (audio, "audio")):
        if one is not None and one in found and one.part is None:
            lacking += one.missing(texts, found.count(one), origin.content(), what)
    if any(not isinstance(one, str) and one.part is not None for one in found):
        parts = [_text_part(one) if isinstance(one, str) else one.part for one in [*lacking, *found]]
        return [dict(part) for part in parts if part is not None]
    # On a line each, as in vLLM's server, whatever the template puts between parts.
    if lacking:
        texts = [_BETWEEN_PARTS.join([*lacking, *texts])]
    # One part says no more than a string, and templates that take both handle strings better.
    if template.wants_parts or (template.takes_parts and len(texts) > 1):
        return [_text_part(text) for text in texts]
    return _BETWEEN_PARTS.join(texts)


def _text(part: ContentPart | str, origin: MessageOrigin, inner: str) -> str:
    """Return the text of *part*, which is at *inner* in the content of the message from *origin*."""
    if isinstance(part, str):
        return part
    if part.type is None or part.type in _TEXT_TYPES:
        text = part.text
    elif part.type == "refusal":
        text = part.refusal
    elif part.type in _FILE_TYPES:
        if part.file is None:
            return _file(part, origin, inner)
        return _file(part.file, origin, f"{inner}.file")
    else:
        raise UnsupportedParameter(
            f"Content of type '{part.type[:100]}' is not supported by this model; only text is.",
            param=origin.content(inner),
        )
    if text is None:
        raise InvalidRequest(f"A part of type '{part.type or 'text'}' must have its text.", param=origin.content(inner))
    return text


def _file(file: FileContent, origin: MessageOrigin, inner: str) -> str:
    if file.file_data is None:
        if file.file_id is not None:
            elsewhere = "file_id"
        elif file.file_url is not None:
            elsewhere = "file_url"
        else:
            raise InvalidRequest(
                "A file must have its content in 'file_data'.", param=origin.content(f"{inner}.file_data")
            )
        raise UnsupportedParameter(
            f"'{elsewhere}' is not supported: send the file's content in 'file_data'.",
            param=origin.content(f"{inner}.{elsewhere}"),
        )
    try:
        text = files.read(file.file_data, file.filename)
    except InvalidRequest as error:
        error.param = origin.content(f"{inner}.file_data")
        raise
    return files.shown(file.filename, text)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _empty(template: PromptTemplate) -> str | list[dict[str, str]]:
    if template.wants_parts:
        return [_text_part("")]
    return ""


_SHORT = re.compile(r"[A-Za-z0-9]{9}")
_NAMED = re.compile(r"functions\..+:[0-9]+")


def _fit_ids(messages: Sequence[dict[str, Any]], form: ToolForm) -> None:
    """
    Change the ids in prepared *messages*, and the names of tool messages, to *form*, in place and consistently.

    A tool message without an id answers the first unanswered call, of its name if it has one.
    """
    # By the client's id: the new id and the function's name.
    given: dict[str, tuple[str, str]] = {}
    # Ordered; a dictionary, because a conversation may have thousands of calls.
    unanswered: dict[tuple[str, str], None] = {}
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            old = call.get("id")
            call["id"] = _fitting(old, name, count, form)
            count += 1
            unanswered[call["id"], name] = None
            if old is not None:
                given[old] = (call["id"], name)
        if message["role"] != "tool":
            continue
        old = message.get("tool_call_id")
        name = message.get("name")
        if old is not None:
            found = given.get(old)
        else:
            found = next((call for call in unanswered if name in (None, call[1])), None)
        if found is not None:
            unanswered.pop(found, None)
            message["tool_call_id"] = found[0]
            if form.needs_names:
                message.setdefault("name", found[1])
        elif old is not None and form.ids == "short":
            message["tool_call_id"] = _short(old)


def _fitting(old: str | None, name: str, count: int, form: ToolForm) -> str:
    if form.ids == "named":
        if old is not None and _NAMED.fullmatch(old):
            return old
        return f"functions.{name}:{count}"
    if form.ids == "short":
        return _short(old if old is not None else f"{name}:{count}")
    if old is not None:
        return old
    return f"call_{count}"


def _short(text: str) -> str:
    if _SHORT.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:9]


def continued(
    messages: Sequence[dict[str, Any]],
    render: Callable[[Sequence[dict[str, Any]]], str],
    origins: Origins = CHAT_ORIGINS,
) -> str:
    """
    Return the prompt that *render* makes of prepared *messages*, up to the end of the last message's text.

    A mark after that text shows where to cut the prompt, whatever the template does to the text, as ``transformers``
    does it for ``continue_final_message``. Raises :class:`InvalidRequest` if the last message is not an assistant's
    text, or if the template omits the text.
    """
    param = origins.name("continue_final_message")
    last = messages[-1]
    content = last["content"]
    if last["role"] != "assistant" or "tool_calls" in last:
        raise InvalidRequest(f"'{param}' needs an assistant's last message, without tool calls.", param=param)
    if isinstance(content, str):
        text = content
    elif content:
        text = content[-1].get("text")
    else:
        text = ""
    if not text:
        raise InvalidRequest(f"'{param}' needs the last message to have text.", param=param)
    mark = secrets.token_hex(16)
    # The space after the mark shows whether the template trims the text.
    text = f"{text}{mark} "
    marked = text if isinstance(content, str) else [*content[:-1], _text_part(text)]
    before, found, after = render([*messages[:-1], {**last, "content": marked}]).rpartition(mark)
    if not found:
        raise InvalidRequest(
            "The model's chat template does not show the last message as it is, so it cannot be continued.",
            param=param,
        )
    if after.startswith(" "):
        return before
    return before.rstrip()
