"""``logit_bias`` for backends that take it as texts: each token id said by a text that is that token alone."""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.chat.tokenizer import Tokenizer
from triton_openai.errors import InvalidRequest, UnsupportedParameter

# Finding a text for a token takes some ten microseconds.
_MOST_WORDS = 1024


def bias_words(tokenizer: Tokenizer | None, biases: Sequence[tuple[int, float]]) -> tuple[tuple[str, float], ...]:
    """
    Return texts and weights with which a backend biases just the tokens of *biases*.

    The backend tokenizes each text with its special tokens and adds the weight to every token it gets. Those special
    tokens get the whole sum taken off again, by an empty text, which consists of nothing else.

    Raises :class:`UnsupportedParameter` for a token that no text gives, and without a tokenizer, and
    :class:`InvalidRequest` for very many.
    """
    if not biases:
        return ()
    if tokenizer is None:
        raise UnsupportedParameter(
            "'logit_bias' needs the model's tokenizer, which is not configured (--tokenizer).", param="logit_bias"
        )
    if len(biases) > _MOST_WORDS:
        raise InvalidRequest(
            f"'logit_bias' holds {len(biases)} tokens, and may hold {_MOST_WORDS} at most on this model, which takes "
            "biases as texts.",
            param="logit_bias",
            code="array_above_max_length",
        )
    frame = tokenizer.encode("", add_special_tokens=True)
    words = []
    for number, weight in biases:
        if number >= tokenizer.vocab_size:
            raise InvalidRequest(
                f"'logit_bias' names the token {number}, and the model has {tokenizer.vocab_size} tokens.",
                param="logit_bias",
                code="invalid_value",
            )
        text = tokenizer.decode([number], skip_special_tokens=False)
        if not text or sorted(tokenizer.encode(text, add_special_tokens=True)) != sorted([*frame, number]):
            raise UnsupportedParameter(
                f"'logit_bias' cannot name the token {number} ({text!r}) on this model, which takes biases as texts:"
                " as a text it becomes other tokens.",
                param="logit_bias",
            )
        words.append((text, weight))
    if frame:
        words.append(("", -sum(weight for _, weight in words)))
    return tuple(words)
