"""
Prompts cut to a number of tokens: vLLM's ``truncate_prompt_tokens``.

A text is cut at a token's boundary and stays text. The backend tokenizes it again, so it is cut until it has no more
tokens than allowed. Special tokens that a backend puts around every text stay, and count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import tokenizers

from triton_openai import offload
from triton_openai.errors import InvalidRequest, InvalidValue
from triton_openai.prompts.tokenizer import Tokenizer

_PARAM = "truncate_prompt_tokens"


class Truncation(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt is cut."""

    #: Most tokens that stay; -1 stands for as many as the context has room for.
    tokens: int
    #: Where it is cut: "left" keeps the last ones.
    side: Literal["left", "right"] = "left"
    #: Whether special tokens around a text stay, and count: vLLM keeps them in a completion's prompt without a side,
    #: and cuts them in a chat.
    keeps_special: bool = True

    def within(self, room: int | None) -> Truncation:
        """Return this with -1 replaced by *room*. Raises :class:`InvalidRequest` if that is unknown."""
        if self.tokens >= 0:
            return self
        if room is None:
            raise InvalidRequest(
                f"'{_PARAM}' can be -1 only where the model's context length is known (--max-model-len).", param=_PARAM
            )
        return msgspec.structs.replace(self, tokens=max(room, 0))

    def checked(self, longest: int | None) -> Truncation:
        """Return this. Raises :class:`InvalidRequest` for more tokens than the *longest* input has."""
        if longest is not None and self.tokens > longest:
            raise InvalidRequest(
                f"'{_PARAM}' must not be greater than the model's context length of {longest} tokens, got"
                f" {self.tokens}.",
                param=_PARAM,
                code="integer_above_max_value",
            )
        return self


def cut_ids(ids: Sequence[int], truncation: Truncation) -> Sequence[int]:
    """Return *ids*, cut."""
    if len(ids) <= truncation.tokens:
        return ids
    return ids[len(ids) - truncation.tokens :] if truncation.side == "left" else ids[: truncation.tokens]


async def cut_encoded(tokenizer: Tokenizer, text: str, truncation: Truncation) -> Sequence[int]:
    """Return the ids of *text*, cut, with the tokenizer's special tokens."""

    def cut() -> Sequence[int]:
        if truncation.keeps_special:
            ids = tokenizer.encode_cut(text, truncation.tokens, truncation.side)
        else:
            ids = tokenizer.encode(text, True)
        return cut_ids(ids, truncation)

    text = await tokenizer.part_async(text, truncation.tokens, truncation.side)
    return await offload.run(cut, cost=offload.TOKEN_PLACES * len(text), refusable=True)


async def cut_text(tokenizer: Tokenizer, text: str, truncation: Truncation, *, special: bool) -> str:
    """
    Return *text*, cut; *special* is whether the backend adds the tokenizer's special tokens to it.

    Raises :class:`InvalidRequest` if nothing is left.
    """
    text = await tokenizer.part_async(text, truncation.tokens, truncation.side)
    cost = offload.TOKEN_PLACES * len(text)
    return await offload.run(_cut, tokenizer, text, truncation, special, cost=cost, refusable=True)


def _cut(tokenizer: Tokenizer, text: str, truncation: Truncation, special: bool) -> str:
    allowed = truncation.tokens - tokenizer.count("", special)
    # The rest may be tokenized differently, with more tokens.
    while allowed > 0 and len(tokens := tokenizer.tokens(text)) > allowed:
        # Tokens that share a character with a cut one are cut as well.
        last = len(tokens) - 1
        if truncation.side == "left":
            text = text[max(_place(tokens, last - allowed)[1], _place(tokens, 0)[0] + 1) :]
        else:
            text = text[: min(_place(tokens, allowed)[0], _place(tokens, last)[1] - 1)]
    if allowed <= 0 or not text:
        raise InvalidValue(f"'{_PARAM}' leaves nothing of the prompt.", _PARAM)
    return text


def _place(tokens: tokenizers.Encoding, index: int) -> tuple[int, int]:
    place = tokens.token_to_chars(index)
    # Only special tokens have none.
    assert place is not None
    return place
