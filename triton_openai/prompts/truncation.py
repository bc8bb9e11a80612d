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
# Characters whose tokens are looked at together: the places of many tokens take long to free. And the tokens at the end
# of such a piece that may be others than those of the whole text, and those by which the rest may differ.
_PIECE = 50_000
_MARGIN = 64
_SLACK = 16


class Truncation(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt is cut."""

    #: Most tokens that stay; -1 stands for as many as the context has room for.
    tokens: int
    #: Where it is cut: "left" keeps the last ones.
    side: Literal["left", "right"] = "left"
    #: Whether special tokens around a text stay, and count: vLLM keeps them in a completion's prompt without a side,
    #: and cuts them in a chat.
    keeps_special: bool = True
    #: The client's name of what determines the number of tokens.
    param: str = _PARAM

    def within(self, room: int | None, param: str = _PARAM) -> Truncation:
        """
        Return this with -1 replaced by *room*, which the client's *param* leaves.

        Raises :class:`InvalidRequest` if the room is unknown.
        """
        if self.tokens >= 0:
            return self
        if room is None:
            raise InvalidRequest(
                f"'{_PARAM}' can be -1 only where the model's context length is known (--max-model-len).", param=_PARAM
            )
        return msgspec.structs.replace(self, tokens=max(room, 0), param=param)

    def checked(self, longest: int | None) -> Truncation:
        """Return this. Raises :class:`InvalidRequest` for more tokens than the *longest* input has."""
        if longest is not None and self.tokens > longest:
            raise InvalidRequest(
                f"'{_PARAM}' ({self.tokens}) must not be greater than the model's context length of {longest} tokens.",
                param=_PARAM,
                code="integer_above_max_value",
            )
        return self


def cut_ids(ids: Sequence[int], truncation: Truncation) -> Sequence[int]:
    """Return *ids*, cut."""
    if len(ids) <= truncation.tokens:
        return ids
    if truncation.side == "left":
        return ids[len(ids) - truncation.tokens :]
    return ids[: truncation.tokens]


async def cut_encoded(tokenizer: Tokenizer, text: str, truncation: Truncation) -> Sequence[int]:
    """Return the ids of *text*, cut, with the tokenizer's special tokens."""

    def cut() -> Sequence[int]:
        if truncation.keeps_special:
            room = max(truncation.tokens - tokenizer.count("", True), 0)
            ids = tokenizer.joined(cut_ids(tokenizer.encode(text), Truncation(tokens=room, side=truncation.side))).ids
        else:
            ids = tokenizer.encode(text, True)
        # There may be less room than for the special tokens.
        return cut_ids(ids, truncation)

    text = await tokenizer.cut_roughly_async(text, truncation.tokens, truncation.side)
    return await offload.run(cut, cost=offload.CHARACTER * len(text), refusable=True)


async def cut_text(tokenizer: Tokenizer, text: str, truncation: Truncation, *, special: bool) -> str:
    """
    Return *text*, cut; *special* is whether the backend adds the tokenizer's special tokens to it.

    Raises :class:`InvalidRequest` if nothing is left.
    """
    text = await tokenizer.cut_roughly_async(text, truncation.tokens, truncation.side)
    cost = 3 * offload.CHARACTER * len(text)
    return await offload.run(_cut, tokenizer, text, truncation, special, cost=cost, refusable=True)


def _cut(tokenizer: Tokenizer, text: str, truncation: Truncation, special: bool) -> str:
    allowed = truncation.tokens - tokenizer.count("", special)
    surplus = 0
    size = _PIECE
    # The rest may be tokenized differently, with more tokens.
    while allowed > 0 and (surplus or (surplus := max(tokenizer.count(text) - allowed, 0))):
        if truncation.side == "left":
            piece = text[:size]
        else:
            piece = text[-size:]
        tokens = tokenizer.tokens(piece)
        # Where a piece ends, its tokens may be others than those of the whole text.
        dropped = min(surplus, len(tokens) - (_MARGIN if len(piece) < len(text) else 0))
        if dropped <= 0:
            surplus = 0
            size = 2 * size
            continue
        # What is dropped may have been more of the tokens of the whole text. In the end, they are counted again.
        surplus = max(surplus - dropped - _SLACK, 0)
        # Tokens that share a character with a cut one are cut as well.
        if truncation.side == "left":
            text = text[max(_place(tokens, dropped - 1)[1], _place(tokens, 0)[0] + 1) :]
        else:
            last = len(tokens) - 1
            end = min(_place(tokens, last + 1 - dropped)[0], _place(tokens, last)[1] - 1)
            text = text[: len(text) - len(piece) + end]
    if allowed <= 0 or not text:
        raise InvalidValue(f"'{truncation.param}' leaves nothing of the prompt.", truncation.param)
    return text


def _place(tokens: tokenizers.Encoding, index: int) -> tuple[int, int]:
    place = tokens.token_to_chars(index)
    # Only special tokens have none.
    assert place is not None
    return place
