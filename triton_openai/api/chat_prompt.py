"""From the messages of a request to the model's prompt, for chats and for ``/tokenize``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.chat import offload
from triton_openai.chat.images import marks
from triton_openai.chat.messages import Message
from triton_openai.chat.prompts import Prompter
from triton_openai.chat.template import ChatTemplate
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.models import ServedModel

# Longer than any published one by a factor of ten; compiling one of this size takes some tenths of a second.
_LONGEST_TEMPLATE = 128 * 1024
# Compiling costs 1 µs per character and more: what is done on the event loop takes less than 2 ms.
_INLINE_TEMPLATE = 1_000


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that say how its messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    reasoning_effort: str | None = None

    @classmethod
    def of(cls, request: msgspec.Struct) -> PromptOptions:
        """Return those of *request*."""
        return cls(**{name: getattr(request, name, None) for name in cls.__struct_fields__})


class ImageSpot(msgspec.Struct, frozen=True):
    """How the images of a request are written: the model's *placeholder* setting, and the *place* of the first one."""

    placeholder: str | None
    place: str


async def rendered(
    prompter: Prompter,
    messages: Sequence[Message],
    options: PromptOptions,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    images: ImageSpot | None = None,
    trust_template: bool,
) -> str:
    """
    Return *messages* as the model's template, or the request's own, writes them; *tools* are those that it is shown.

    *trust_template* is whether the operator lets requests bring a template. Raises :class:`InvalidRequest`,
    :class:`UnsupportedParameter`, and :class:`ConfigurationError` where the model has no template.
    """
    if options.continue_final_message and options.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' cannot be used together with 'add_generation_prompt'.",
            param="continue_final_message",
        )
    if options.chat_template is not None:
        prompter = await _with_template(prompter, options.chat_template, trusted=trust_template)
    template = prompter.template_for(tools=tools, documents=options.documents)
    if tools and "tools" not in template.variables:
        raise UnsupportedParameter("The model's chat template does not take tools.", param="tools")
    return await prompter.render_async(
        messages,
        tools=tools or None,
        documents=options.documents,
        add_generation_prompt=not options.continue_final_message and options.add_generation_prompt is not False,
        continue_final_message=bool(options.continue_final_message),
        variables=_variables(options, prompter),
        images=marks(template, images.placeholder, images.place) if images is not None else None,
    )


def as_sent(model: ServedModel, prompter: Prompter, prompt: str) -> str:
    """Return a rendered *prompt* as the model's backend has to get it."""
    tokenizer = prompter.tokenizer
    if model.adapter.hints.adds_bos and tokenizer is not None and tokenizer.adds_bos:
        # The backend puts the same token in front once more.
        return prompter.strip_bos(prompt)
    return prompt


async def _with_template(prompter: Prompter, source: str, *, trusted: bool) -> Prompter:
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
    template = await offload.run(
        lambda: ChatTemplate(
            source,
            name="of the request",
            special_tokens=prompter.template_variables,
            param="chat_template",
        ),
        size=len(source),
        threshold=_INLINE_TEMPLATE,
    )
    return prompter.with_template(template)


def _variables(options: PromptOptions, prompter: Prompter) -> dict[str, Any]:
    """Return what the client gives to the template, and ``reasoning_effort`` where the template reads it."""
    variables = dict(options.chat_template_kwargs or {})
    if options.reasoning_effort is not None:
        if "reasoning_effort" not in prompter.template_for().variables:
            raise UnsupportedParameter(
                "The model's chat template does not take a 'reasoning_effort'.", param="reasoning_effort"
            )
        variables.setdefault("reasoning_effort", options.reasoning_effort)
    return variables
