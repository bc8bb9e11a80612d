"""The prompts of a completions request: texts or token ids, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton_openai.chat.infill import choose, recognise
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.models import ServedModel

# As many as OpenAI takes inputs in one embeddings request; it documents no limit for prompts.
_MAX_PROMPTS = 2048


async def prompts_of(model: ServedModel, prompt: str | list[str | int | list[int]]) -> Sequence[str | Sequence[int]]:
    """
    Return the prompts one by one, as the model takes them.

    A model that works on tokens takes token ids as they are. For the others they become text through the tokenizer, and
    only where the backend, tokenizing that text again, gets the same ids; else the prompt is refused: another prompt
    must not be answered in its place. Raises :class:`InvalidRequest` and :class:`UnsupportedParameter`.
    """
    items: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
    if items and all(isinstance(item, int) for item in items):
        items = [items]
    if not items:
        raise InvalidRequest("'prompt' must not be an empty list.", param="prompt", code="invalid_value")
    if len(items) > _MAX_PROMPTS:
        raise InvalidRequest(
            f"'prompt' takes at most {_MAX_PROMPTS} prompts.", param="prompt", code="array_above_max_length"
        )
    prompts: list[str | Sequence[int]] = []
    for item in items:
        if isinstance(item, int):
            raise InvalidRequest("'prompt' must not mix token ids with prompts.", param="prompt", code="invalid_type")
        if isinstance(item, str) or model.adapter.capabilities.tokens:
            prompts.append(item)
        else:
            prompts.append(await _as_text(model, item))
    return prompts


async def filled(
    model: ServedModel, prompt: str | list[str | int | list[int]], suffix: str, *, echo: bool
) -> Sequence[str | Sequence[int]]:
    """
    Return the prompts that ask for what stands between each of *prompt* and *suffix*.

    Raises :class:`UnsupportedParameter` where the model is not said to fill in the middle, for token ids, and for
    *echo*, and :class:`ConfigurationError` where the setting that says so cannot be followed.
    """
    tokenizer = (await model.prompter()).tokenizer
    form = choose(model.settings.fim_template, tokenizer)
    if form is None:
        known = None if tokenizer is None else recognise(tokenizer)
        hint = f" Its tokenizer has the tokens of the form '{known}': if it does, say so with it." if known else ""
        raise UnsupportedParameter(
            f"The model is not known to fill in the middle (--fim-template).{hint}", param="suffix"
        )
    if echo:
        raise UnsupportedParameter("'echo' cannot be used with 'suffix'.", param="echo")
    items = [prompt] if isinstance(prompt, str) else prompt
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise UnsupportedParameter("'suffix' cannot be used with prompts as token ids.", param="suffix")
    return await prompts_of(model, [form.render(text, suffix) for text in texts])


async def _as_text(model: ServedModel, ids: list[int]) -> str:
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None:
        raise UnsupportedParameter(
            "Prompts given as token ids need the model's tokenizer, which is not configured.", param="prompt"
        )
    if not ids:
        raise InvalidRequest("'prompt' must not hold an empty list of token ids.", param="prompt", code="invalid_value")
    adds_bos = model.adapter.hints.adds_bos and tokenizer.adds_bos
    bos = tokenizer.token_id(tokenizer.special_tokens.get("bos_token", ""))
    own = ids[1:] if adds_bos and ids[0] == bos else ids
    unknown = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if unknown is not None:
        raise InvalidRequest(
            f"'prompt' holds {unknown}, which is no token of this model.", param="prompt", code="invalid_value"
        )
    text = tokenizer.decode(own, skip_special_tokens=False)
    if await tokenizer.encode_async(text, adds_bos) != ids:
        raise UnsupportedParameter(
            "These token ids cannot be sent to the model as text without changing them.", param="prompt"
        )
    return text
