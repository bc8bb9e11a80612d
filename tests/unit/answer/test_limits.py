"""How long an answer may take, and how many tokens it may have."""

from __future__ import annotations

import pytest

from tests.cases import every_case
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.config.tree import TritonSettings
from triton_openai.errors import ContextLengthExceeded, InvalidRequest


def test_time_limits() -> None:
    """A client's limit replaces a longer one of the operator, or none; the wait for admission counts."""
    settings = TritonSettings(first_token_timeout=8, idle_timeout=7, request_timeout=6, stream_timeout=None)
    whole = TimeLimits.of(settings, {}, stream=False)
    assert TimeLimits(first_token=8, idle=7, total=6) == whole
    assert 6 == whole.patience
    assert TimeLimits(first_token=5, idle=7, total=3) == whole.after(3)
    asked = TimeLimits.of(settings, {"x-first-token-timeout": "2", "x-request-timeout": "100"}, stream=True)
    assert TimeLimits(first_token=2, idle=7, total=100, times_tokens=True) == asked
    assert 2 == asked.patience
    for header, value in (("x-idle-timeout", "7.5"), ("x-request-timeout", "0"), ("x-first-token-timeout", "nan")):
        with pytest.raises(InvalidRequest) as refused:
            TimeLimits.of(settings, {header: value}, stream=False)
        assert header == refused.value.param


@every_case(
    "limit, room, expected",
    [
        # An answer of so many tokens, or an error
        (TokenLimit(tokens=9), None, 9),
        (TokenLimit(tokens=9, open=True, unbounded=True), None, 9),
        (TokenLimit(tokens=9, context=14), 5, 9),
        (TokenLimit(tokens=9, context=20), 11, 9),
        (TokenLimit(tokens=9, context=13), 4, "you requested 14 tokens (5 in the prompt, 9 in the completion)"),
        (TokenLimit(tokens=9, open=True, context=13), 12, 8),
        (TokenLimit(tokens=9, open=True, context=20), 19, 9),
        (TokenLimit(tokens=9, open=True, unbounded=True, context=20), 19, 15),
        (TokenLimit(tokens=9, longest_prompt=4), None, "your prompt has 5 tokens"),
        (TokenLimit(tokens=0, context=5, longest_prompt=5), 5, "your prompt has 5 tokens"),
        (TokenLimit(tokens=9, open=True, context=5, longest_prompt=5), 4, "your prompt has 5 tokens"),
        (TokenLimit(tokens=9, context=14, longest_prompt=5), 5, 9),
    ],
)
def test_what_fits_behind_a_prompt_of_five_tokens(limit: TokenLimit, room: int | None, expected: int | str) -> None:
    """An open answer is cut to the room that there is; another is refused, as is a prompt that leaves no room."""
    assert room == limit.room_for_prompt()
    if isinstance(expected, int):
        assert expected == limit.max_tokens_for(5)
    else:
        with pytest.raises(ContextLengthExceeded) as caught:
            limit.max_tokens_for(5)
        assert expected in caught.value.message


def test_where_a_backend_ends_an_answer() -> None:
    """At the limit that it was sent, or before that at the end of the context."""
    limit = TokenLimit(tokens=9, open=True, context=13)

    assert [8, 6, 8] == [limit.effective(8, prompt) for prompt in (None, 7, 2)]
    assert 8 == TokenLimit(tokens=9).effective(8, 100)


@every_case("tokens", [14, 15, 10**9])
def test_an_answer_that_leaves_no_room_for_a_prompt(tokens: int) -> None:
    """The error is about what the client asked of the answer."""
    limit = TokenLimit(tokens=tokens, context=14, param="max_completion_tokens")
    with pytest.raises(ContextLengthExceeded) as caught:
        limit.room_for_prompt()
    assert "max_completion_tokens" == caught.value.param
