"""The stages of an answer that work on its tokens, for models whose backend does not do that work itself."""

from __future__ import annotations

from triton_openai.chat.tokenizer import Tokenizer
from triton_openai.generation import Generation
from triton_openai.models import ServedModel
from triton_openai.text.naming import TokenNames
from triton_openai.text.tokens import TokenText


def token_text(model: ServedModel, generation: Generation, tokenizer: Tokenizer | None) -> TokenText | None:
    """Return the stage that turns token ids into text, where the backend answers in them."""
    if not model.adapter.capabilities.tokens or tokenizer is None or generation.vocabulary is None:
        return None
    sampling = generation.sampling
    return TokenText(
        tokenizer.pieces,
        context=generation.prompt_ids or (),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        ends=() if sampling.ignore_eos else generation.vocabulary.end_ids,
        stops=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens or 0,
    )


def token_names(model: ServedModel, generation: Generation, tokenizer: Tokenizer | None) -> TokenNames | None:
    """Return what names the tokens of a backend that tells their ids beside the text."""
    if generation.sampling.logprobs is None or tokenizer is None or model.adapter.capabilities.tokens:
        return None
    return TokenNames(tokenizer.pieces, skip_special_tokens=generation.sampling.skip_special_tokens is not False)
