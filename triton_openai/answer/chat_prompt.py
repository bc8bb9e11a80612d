"""The prompt of a chat, as a chat template renders its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from triton_openai.errors import InvalidRequest, UnsupportedParameter, missing
from triton_openai.media.audio import AudioReference
from triton_openai.media.images import ImageReference
from triton_openai.models.served import ServedModel
from triton_openai.prompts.content import text_of
from triton_openai.prompts.messages import ContentPart, Message, UserMessage, is_audio, is_image
from triton_openai.prompts.origins import CHAT_ORIGINS, Origins
from triton_openai.prompts.prompt_template import TOOLS_REMEDY, Rendering, marks
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.template import ChatTemplate

# Most published templates are shorter. Compiling one of this size takes some tenths of a second.
_LONGEST_TEMPLATE = 16 * 1024


class ChatPromptRequest(Protocol):
    """The fields of a request that decide how its messages become a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None


async def rendered_chat(
    model: ServedModel,
    prompter: Prompter,
    request: ChatPromptRequest,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]],
    images: Sequence[ImageReference] = (),
    audio: Sequence[AudioReference] = (),
    reasoning_effort: str | None = None,
    switches: Mapping[str, Any] | None = None,
    trust_template: bool,
    repaired: list[str] | None = None,
    origins: Origins = CHAT_ORIGINS,
) -> tuple[str, str]:
    """
    Return *messages* as the template of *model*'s *prompter*, or the request's own, renders them; and its name.

    *reasoning_effort* and *switches* (variables of any template for the thinking) reach the template in its own words.
    The template gets *tools*; *images* and *audio* are those in the messages; *trust_template* is whether requests may
    have their own template. The names of functions whose past calls had broken arguments are added to *repaired*.
    *origins* has the client's names, for errors.
    Raises :class:`InvalidRequest`, :class:`UnsupportedParameter`, and :class:`ConfigurationError` if the model has no
    template.
    """
    if images and model.adapter.capabilities.images_as_turn:
        text = _only_text(request, messages, tools=tools, reasoning_effort=reasoning_effort, origins=origins)
        return text, "the model's own"
    if request.continue_final_message and request.add_generation_prompt:
        param = origins.name("continue_final_message")
        raise InvalidRequest(f"'{param}' cannot be used together with 'add_generation_prompt'.", param=param)
    if request.chat_template is not None:
        prompter = await _with_template(prompter, request.chat_template, trusted=trust_template)
    rendering = Rendering(
        tools=tools,
        documents=request.documents,
        add_generation_prompt=not request.continue_final_message and request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=request.chat_template_kwargs or {},
        repaired=repaired,
        origins=origins,
    )
    template = prompter.template_for(rendering)
    if tools and "tools" not in template.variables:
        raise UnsupportedParameter(
            f"The model's chat template does not take tools. {TOOLS_REMEDY}", param=origins.name("tools")
        )
    if reasoning_effort is not None and not template.takes_effort(reasoning_effort):
        param = origins.name("reasoning_effort")
        raise UnsupportedParameter(f"The model's chat template does not take a '{param}'.", param=param)
    if reasoning_effort is not None or switches or request.chat_template_kwargs:
        wishes = {**(switches or {}), **(request.chat_template_kwargs or {})}
        rendering = replace(rendering, variables=template.thinking_variables(wishes, reasoning_effort))
    if images:
        image_marks = marks(template, model.settings.image_placeholder, images[0].param)
        rendering = replace(rendering, images=image_marks)
    if audio:
        audio_marks = marks(template, model.settings.audio_placeholder, audio[0].param, "audio")
        rendering = replace(rendering, audio=audio_marks)
    return await prompter.render_async(messages, rendering, template), template.name


def _only_text(
    request: ChatPromptRequest,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]],
    reasoning_effort: str | None,
    origins: Origins,
) -> str:
    """Return the text of the only message. Raises :class:`UnsupportedParameter` for all that the text cannot say."""
    for option, value in (
        ("tools", tools),
        ("documents", request.documents),
        ("chat_template", request.chat_template),
        ("chat_template_kwargs", request.chat_template_kwargs),
        ("reasoning_effort", reasoning_effort),
        ("continue_final_message", request.continue_final_message),
        ("add_generation_prompt", request.add_generation_prompt is False),
    ):
        if value:
            param = origins.name(option)
            raise UnsupportedParameter(f"This model does not take '{param}' together with images.", param=param)
    first = messages[0]
    if isinstance(first, UserMessage):
        if len(messages) == 1:
            return text_of(first, origins.message(0))
        refused = 1
    else:
        refused = 0
    raise UnsupportedParameter(
        "With images, this model takes one user message alone: its own template takes no others.",
        param=origins.message(refused).path,
    )


async def _with_template(prompter: Prompter, source: str, *, trusted: bool) -> Prompter:
    """Return *prompter* with the template *source* of a request."""
    if not trusted:
        raise UnsupportedParameter(
            "A request's own chat template is not accepted: the operator of this service has to allow it "
            "(--trust-request-chat-template).",
            param="chat_template",
        )
    if len(source) > _LONGEST_TEMPLATE:
        raise InvalidRequest(
            f"'chat_template' may have {_LONGEST_TEMPLATE} characters at most, this one has {len(source)}.",
            param="chat_template",
            code="string_above_max_length",
        )
    template = await asyncio.to_thread(
        ChatTemplate, source, name="of the request", special_tokens=prompter.template_variables, param="chat_template"
    )
    return prompter.with_template(template)


def media_of(
    model: ServedModel, messages: Sequence[Message], origins: Origins = CHAT_ORIGINS
) -> tuple[Sequence[ImageReference], Sequence[AudioReference]]:
    """
    Return the images of *messages* and their audio, in their order, neither loaded nor decoded yet.

    *origins* has the client's names, for errors. Raises :class:`InvalidRequest`.
    """
    images: list[ImageReference] = []
    audio: list[AudioReference] = []
    for number, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for index, part in enumerate(message.content):
            if not isinstance(part, ContentPart):
                continue
            if is_image(part):
                accepted = model.takes_images
            elif is_audio(part):
                accepted = model.adapter.capabilities.audio
            else:
                continue
            origin = origins.message(number)
            inner = f"[{index}]"
            if not accepted:
                raise UnsupportedParameter(
                    f"Content of type '{part.type}' is not supported by this model; only text is.",
                    param=origin.content(inner),
                )
            if is_audio(part):
                audio.append(_audio_of(part, origin.content(f"{inner}.input_audio.data")))
            else:
                images.append(_image_of(part, origin.content(f"{inner}.image_url")))
    return images, audio


def _audio_of(part: ContentPart, path: str) -> AudioReference:
    """Return the audio of *part*; *path* is the client's. Raises :class:`InvalidRequest`."""
    if part.input_audio is None or part.input_audio.data is None:
        raise missing(path)
    return AudioReference(path, part.input_audio.data)


def _image_of(part: ContentPart, path: str) -> ImageReference:
    """Return the image of *part*; *path* is the client's. Raises :class:`InvalidRequest`."""
    source = part.image_url
    if source is None:
        raise missing(path)
    if isinstance(source, str):
        url = source
    else:
        url = source.url
    return ImageReference(path, url.strip())
