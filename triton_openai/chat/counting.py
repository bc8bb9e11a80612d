"""Counts the tokens of an answer that came in pieces of text."""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.chat import offload
from triton_openai.chat.tokenizer import INLINE_CHARACTERS, Tokenizer

_REPLACEMENT = "\ufffd"
# What counting one piece costs beside its length, in characters of a long text.
_PIECE_COST = 20


async def count_pieces(tokenizer: Tokenizer, pieces: Sequence[str]) -> int:
    """
    Return how many tokens *pieces*, each what one step brought, were made of.

    Tokenized one by one, because that is how they came: a step is a token, or a few. A backend that decodes token by
    token shows each part of a split character as one U+FFFD, which is one token and not the three of its UTF-8 bytes.
    """

    def count_one(piece: str) -> int:
        broken = piece.count(_REPLACEMENT)
        return broken + tokenizer.count(piece.replace(_REPLACEMENT, "")) if broken else tokenizer.count(piece)

    size = sum(map(len, pieces)) + _PIECE_COST * len(pieces)
    return await offload.run(lambda: sum(map(count_one, pieces)), size=size, threshold=INLINE_CHARACTERS)
