"""Prompts cut to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_openai.errors import InvalidRequest
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_encoded, cut_ids, cut_text

TOKENIZER = Tokenizer.load(str(files("triton_openai.demo").joinpath("tokenizer")))
SIDES = ("left", "right")


async def kept(text: str, tokens: int, side: str = "left", *, special: bool = False) -> str:
    """Return what is left of *text*."""
    truncation = Truncation(tokens=tokens, side=side)  # type: ignore[arg-type]
    return await cut_text(TOKENIZER, text, truncation, special=special)


def assert_is_reason(error: InvalidRequest) -> None:
    """Check that nothing could be left, or nothing could be sent."""
    assert "truncate_prompt_tokens" == error.param or "Unicode" in error.message


async def test_the_end_is_kept_and_on_request_the_start() -> None:
    """The last tokens are the ones nearest to the answer."""
    text = "one two three four five"

    assert " four five" == await kept(text, 2)
    assert "one two" == await kept(text, 2, "right")
    assert text == await kept(text, 5) == await kept(text, 100) == await kept(text, 10**30)


async def test_special_tokens_of_the_backend_count() -> None:
    """One place goes to the token that the backend puts in front."""
    added = TOKENIZER.count("", True)
    assert 0 < added

    assert " four five" == await kept("one two three four five", 2 + added, special=True)


@given(text=st.text(min_size=1), tokens=st.integers(1, 12), side=st.sampled_from(SIDES))
async def test_what_is_left_fits_and_is_a_part(text: str, tokens: int, side: str) -> None:
    """Whatever the text: the rest is its end (or start) and has no more tokens than were allowed."""
    try:
        left = await kept(text, tokens, side)
    except InvalidRequest as error:
        # A single character may be more tokens than are allowed, or there is none that could be sent.
        assert_is_reason(error)
        return
    assert TOKENIZER.count(left) <= tokens
    assert text.endswith(left) if side == "left" else text.startswith(left)


async def test_a_character_of_several_tokens_is_not_torn() -> None:
    """It goes as a whole, and where nothing is left that is said."""
    assert TOKENIZER.count("😀") > 2
    assert "" != await kept("a😀 b", 2)
    assert "\ufffd" not in await kept("a😀 b", 2)
    with pytest.raises(InvalidRequest) as caught:
        await kept("😀", 2)
    assert "truncate_prompt_tokens" == caught.value.param


def test_ids_are_cut_exactly() -> None:
    """Token ids are what they are."""
    ids = [5, 6, 7, 8]

    assert [7, 8] == list(cut_ids(ids, Truncation(tokens=2)))
    assert [5, 6] == list(cut_ids(ids, Truncation(tokens=2, side="right")))
    assert ids == list(cut_ids(ids, Truncation(tokens=4)))


async def test_the_special_tokens_of_a_text_stay_unless_the_side_is_asked_for() -> None:
    """As vLLM's server does it: the tokenizer cuts what it puts its special tokens around, a side cuts all of it."""
    ids = TOKENIZER.encode("one two three four", True)
    assert ids != TOKENIZER.encode("one two three four")

    async def left(tokens: int, **fields: Any) -> Sequence[int]:
        return await cut_encoded(TOKENIZER, "one two three four", Truncation(tokens=tokens, **fields))

    assert [ids[0], *ids[-2:]] == await left(3)
    assert ids[:3] == await left(3, side="right")
    assert ids[-3:] == await left(3, keeps_special=False)
    assert ids[:3] == await left(3, side="right", keeps_special=False)
    assert ids == await left(len(ids)) == await left(1000, side="right")


def test_minus_one_is_the_room_that_there_is() -> None:
    """Without a known context length it is nothing that could be meant."""
    assert Truncation(tokens=7) == Truncation(tokens=-1).within(7)
    assert Truncation(tokens=0) == Truncation(tokens=-1).within(-2)
    assert Truncation(tokens=3) == Truncation(tokens=3).within(None)
    with pytest.raises(InvalidRequest):
        Truncation(tokens=-1).within(None)
