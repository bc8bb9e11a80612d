"""About how many tokens a text has, for limits alone: nobody is ever told such a number as a count."""

from __future__ import annotations

from collections.abc import Sequence

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
