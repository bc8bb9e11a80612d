"""About how many tokens a text has, for limits alone: nobody is ever told such a number as a count."""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.prompts import offload
from triton_openai.prompts.tokenizer import INLINE_CHARACTERS, Tokenizer

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


# Of English text today's vocabularies make a token of four to five bytes, of other languages and code one of two to
# four. (OpenAI's rule of thumb is four characters.)
_BYTES_PER_TOKEN = 4


def tokens_in(text: str) -> int:
    """Return an estimate of the tokens in *text*."""
    return tokens_in_bytes(len(text.encode("utf-8", "surrogatepass")))


def tokens_in_bytes(number: int) -> int:
    """Return an estimate of the tokens in a text of so many bytes of UTF-8."""
    return -(-number // _BYTES_PER_TOKEN)


def tokens_in_pieces(pieces: Sequence[str]) -> int:
    """Return an estimate of the tokens in an answer that came in *pieces*: one each at least."""
    return max(len(pieces), tokens_in("".join(pieces)))
