"""The prompts of requests: those of a completions request, and those that a chat template renders from messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from triton_openai.api.bodies import MAX_ITEMS, missing
from triton_openai.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    InvalidValue,
    UnsupportedParameter,
)
from triton_openai.media.images import ImageReference
from triton_openai.models.served import ServedModel
from triton_openai.prompts.infill import fill, fim_form, known_fim_form
from triton_openai.prompts.messages import ContentPart, Message, Rendering, UserMessage, is_image, marks, text_of
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.template import ChatTemplate
from triton_openai.prompts.tokenizer import Tokenizer

# Most published templates are shorter. Compiling one of this size takes some tenths of a second.
_LONGEST_TEMPLATE = 16 * 1024


class Rewritten(msgspec.Struct, frozen=True):
    """A prompt that is *sent* to the backend as another text than the *original*, which the client wrote."""

    sent: str
    original: str


#: A prompt: a text to which the usual special tokens are added, or exactly these tokens.
Prompt: TypeAlias = str | Sequence[int] | Rewritten


async def prompts_of(
    model: ServedModel, prompt: str | list[str | int | list[int]], *, special: bool = True
) -> Sequence[Prompt]:
    """
    Return the prompts one by one, as the model takes them; *special* is whether special tokens are added to texts.

    A model that works on tokens takes token ids as they are. For other models the tokenizer turns them into text. The
    prompt is refused if that text has other token ids, because the model would answer another prompt. Raises
    :class:`InvalidRequest` and :class:`UnsupportedParameter`.
    """
    prompts: list[Prompt] = []
    for item in separated(prompt, "prompt"):
        if isinstance(item, str):
            prompts.append(item if special else await _alone(model, item))
        elif model.adapter.capabilities.tokens:
            prompts.append(item)
        else:
            prompts.append(await _as_text(model, item))
    return prompts


def separated(value: str | list[str | int | list[int]], param: str) -> list[Any]:
    """Return texts and lists of token ids one by one. Raises :class:`InvalidRequest` for none and too many."""
    items: list[Any] = value if isinstance(value, list) and set(map(type, value)) != {int} else [value]
    if not items:
        raise InvalidValue(f"'{param}' must not be an empty list.", param)
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(
            f"'{param}' may hold {MAX_ITEMS} items at most.", param=param, code="array_above_max_length"
        )
    if int in map(type, items):
        raise InvalidRequest(f"'{param}' must not mix token ids with lists or texts.", param=param, code="invalid_type")
    return items


async def filled(
    model: ServedModel, prompt: str | list[str | int | list[int]], suffix: str, *, echo: bool, special: bool = True
) -> Sequence[Prompt]:
    """Return the prompts that ask for the text between each of *prompt* and *suffix*. Raises :class:`ServiceError`."""
    tokenizer = (await model.prompter()).tokenizer
    form = fim_form(model.settings.fim_template, tokenizer)
    if form is None:
        known = known_fim_form(tokenizer)
        hint = f" Its tokenizer has the tokens of the form '{known}': if it does, say so with it." if known else ""
        raise UnsupportedParameter(
            f"The model is not configured to fill in the middle (fim_template).{hint}", param="suffix"
        )
    if echo:
        raise UnsupportedParameter("'echo' cannot be used with 'suffix'.", param="echo")
    items = [prompt] if isinstance(prompt, str) else prompt
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise UnsupportedParameter("'suffix' cannot be used with prompts as token ids.", param="suffix")
    return await prompts_of(model, [fill(form, text, suffix) for text in texts], special=special)


async def _alone(model: ServedModel, text: str) -> Prompt:
    """Return *text* as a prompt to which no special token is added. Raises :class:`UnsupportedParameter`."""
    hints, tokens = model.adapter.hints, model.adapter.capabilities.tokens
    if not hints.adds_bos:
        return text
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is not None:
        ids = await tokenizer.encode_async(text)
        if tokens:
            return ids
        for own in (text, tokenizer.strip_bos(text)):
            if await tokenizer.encode_async(own, True) == ids:
                return Rewritten(own, text)
    raise UnsupportedParameter(
        "The model's backend adds special tokens to every text: 'add_special_tokens' can be false only for a prompt"
        " that begins with just these.",
        param="add_special_tokens",
    )


def check_ids(ids: Sequence[int], tokenizer: Tokenizer, param: str, hint: str = "") -> None:
    """Raise :class:`InvalidRequest` for *ids* that are not in the vocabulary; *hint* is added to its message."""
    # Fast for long prompts.
    for number in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= number < tokenizer.vocab_size:
            raise InvalidValue(f"'{param}' holds {number}, which is not a token of this model.{hint}", param)


async def _as_text(model: ServedModel, ids: list[int]) -> Rewritten:
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None:
        raise UnsupportedParameter(
            "Prompts given as token ids need the model's tokenizer, which is not configured.", param="prompt"
        )
    if not ids:
        raise InvalidValue("'prompt' must not hold an empty list of token ids.", "prompt")
    adds_bos = model.adapter.hints.adds_bos and tokenizer.adds_bos
    own = ids[1:] if adds_bos and ids[0] == tokenizer.special_id("bos_token") else ids
    check_ids(ids, tokenizer, "prompt")
    text = await tokenizer.decode_async(own, skip_special_tokens=False)
    if await tokenizer.encode_async(text, adds_bos) != ids:
        raise UnsupportedParameter(
            "These token ids cannot be sent to the model as text without changing them.", param="prompt"
        )
    return Rewritten(text, tokenizer.decode(ids, skip_special_tokens=False))


def no_tokenizer(model: ServedModel) -> ConfigurationError:
    """Return the error for texts where the model takes token ids and its tokenizer is not known."""
    return ConfigurationError(
        f"The model '{model.name}' takes token ids: give its tokenizer with --tokenizer {model.triton_model}=SOURCE."
    )


def longest_prompt(model: ServedModel, tokenizer: Tokenizer) -> int | None:
    """Return the tokens that no prompt can exceed: the model's or its engine's limit, else the tokenizer's."""
    known = [limit for limit in (model.settings.max_model_len, model.hints.max_prompt_len) if limit]
    return min(known, default=tokenizer.longest_prompt)


def too_many_tokens(
    limit: int, found: str, *, tokens: int | None = None, param: str | None = None
) -> ContextLengthExceeded:
    """Return the error, in OpenAI's words, for a request in which more than *limit* tokens were *found*."""
    message = f"This model's maximum context length is {limit} tokens. However, {found}."
    return ContextLengthExceeded(message, tokens=tokens, limit=limit, param=param)


def check_size(text: str, tokenizer: Tokenizer, limit: int | None) -> None:
    """
    Raise :class:`ContextLengthExceeded` for a *text* with more bytes than *limit* of the longest tokens have.

    Such a text takes long to tokenize, and cannot fit.
    """
    longest = tokenizer.pieces.longest
    if longest is None or limit is None or len(text) * 4 <= limit * longest:
        return
    size = size_of(text)
    if size > limit * longest:
        found = f"your prompt has {size} bytes, more than that many tokens can hold"
        # There are no fewer tokens.
        raise too_many_tokens(limit, found, tokens=-(-size // longest))


def size_of(text: str) -> int:
    """Return the number of bytes of *text*. Lone surrogates count too; they are refused elsewhere."""
    return len(text.encode(errors="surrogatepass"))


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
    reasoning_effort: str | None = None,
    trust_template: bool,
) -> tuple[str, str]:
    """
    Return *messages* as the template of *model*'s *prompter*, or the request's own, renders them; and its name.

    The template gets *tools*; *images* are those in the messages; *trust_template* is whether requests may have their
    own template. Raises :class:`InvalidRequest`, :class:`UnsupportedParameter`, and :class:`ConfigurationError` if the
    model has no template.
    """
    if images and model.adapter.capabilities.images_as_turn:
        return _turn(request, messages, tools=tools, reasoning_effort=reasoning_effort), "the model's own"
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' cannot be used together with 'add_generation_prompt'.",
            param="continue_final_message",
        )
    if request.chat_template is not None:
        prompter = await _with_template(prompter, request.chat_template, trusted=trust_template)
    variables = dict(request.chat_template_kwargs or {})
    rendering = Rendering(
        tools=tools,
        documents=request.documents,
        add_generation_prompt=not request.continue_final_message and request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=variables,
    )
    template = prompter.template_for(rendering)
    if tools and "tools" not in template.variables:
        raise UnsupportedParameter("The model's chat template does not take tools.", param="tools")
    if reasoning_effort is not None:
        if "reasoning_effort" not in prompter.template_for().variables:
            raise UnsupportedParameter(
                "The model's chat template does not take a 'reasoning_effort'.", param="reasoning_effort"
            )
        variables.setdefault("reasoning_effort", reasoning_effort)
    if images:
        found = marks(template, model.settings.image_placeholder, images[0].place)
        rendering = msgspec.structs.replace(rendering, images=found)
    return await prompter.render_async(messages, rendering, template), template.name


def _turn(
    request: ChatPromptRequest,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]],
    reasoning_effort: str | None,
) -> str:
    """Return the text of the only message. Raises :class:`UnsupportedParameter` for all that the text cannot say."""
    for name, given in (
        ("tools", tools),
        ("documents", request.documents),
        ("chat_template", request.chat_template),
        ("chat_template_kwargs", request.chat_template_kwargs),
        ("reasoning_effort", reasoning_effort),
        ("continue_final_message", request.continue_final_message),
        ("add_generation_prompt", request.add_generation_prompt is False),
    ):
        if given:
            raise UnsupportedParameter(f"This model does not take '{name}' together with images.", param=name)
    first = messages[0]
    if isinstance(first, UserMessage) and len(messages) == 1:
        return text_of(first, "messages[0]")
    raise UnsupportedParameter(
        "With images, this model takes one user message alone: its own template has no place for others.",
        param=f"messages[{int(isinstance(first, UserMessage))}]",
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
        ChatTemplate,
        source,
        name="of the request",
        special_tokens=prompter.template_variables,
        param="chat_template",
    )
    return prompter.with_template(template)


def images_of(model: ServedModel, messages: Sequence[Message]) -> list[ImageReference]:
    """Return the images of *messages* in their order, not loaded yet. Raises :class:`InvalidRequest`."""
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for index, part in enumerate(message.content):
            if isinstance(part, ContentPart) and is_image(part):
                place = f"messages[{number}].content[{index}]"
                if not model.takes_images:
                    raise UnsupportedParameter(
                        f"Content of type '{part.type}' is not supported by this model; only text is.", param=place
                    )
                source = part.image_url
                if source is None:
                    raise missing(f"{place}.image_url")
                url = source if isinstance(source, str) else source.url
                found.append(ImageReference(f"{place}.image_url", url.strip()))
    return found
