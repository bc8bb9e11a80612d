"""What a request is charged against the tokens of its key."""

from __future__ import annotations

import pytest

from triton_openai.access.rate_limits import tokens_charged
from triton_openai.generation import AnswerState, Generation, Sampling, Usage, tokens_in, tokens_in_pieces
from triton_openai.telemetry.request_record import RequestRecord

_KNOWN = Usage(prompt_tokens=10, completion_tokens=5)


def answer(counted: Usage | None, *, sent: bool = True, begun: bool = True) -> AnswerState:
    """Return an answer with *counted* tokens, else with an estimate of 8 and 4."""
    found = AnswerState(Generation(id="a", prompt="", prompt_tokens=8, sampling=Sampling(max_tokens=9)))
    found.usage, found.pieces = counted, [*"abcd"]
    found.sent = 1.0 if sent else None
    found.first = 2.0 if begun else None
    return found


@pytest.mark.parametrize(
    "answers, cut_short, tokens",
    [
        # A prompt counts once for all its answers.
        ([answer(_KNOWN), answer(_KNOWN)], False, 20),
        ([answer(_KNOWN), answer(None)], False, 19),
        ([answer(None), answer(None)], False, 16),
        ([answer(None)], True, 12),
        # The backend had the prompt when its client left, and had refused it when it had not.
        ([answer(None, begun=False)], True, 12),
        ([answer(None, begun=False)], False, 0),
        ([answer(None, sent=False, begun=False)], True, 0),
        # Two prompts with two answers each
        ([answer(_KNOWN)] * 4, False, 40),
    ],
)
def test_answers(answers: list[AnswerState], cut_short: bool, tokens: int) -> None:
    """What is counted is charged, and an estimate for the rest."""
    record = RequestRecord(request_id="a", method="POST", path="/v1/completions")
    record.identify("text_completion", model="m", adapter="a")
    record.answers, record.n, record.body_size = answers, 2, 400

    assert tokens == tokens_charged(record, served=not cut_short, cut_short=cut_short)


def test_inputs() -> None:
    """Vectors and scores cost what they were counted to, else what a body that was answered has of bytes."""
    record = RequestRecord(request_id="a", method="POST", path="/v1/embeddings")
    record.identify("embeddings", model="m", adapter="a")
    assert 0 == tokens_charged(record, served=True, cut_short=False)
    record.body_size = 400
    assert [100, 0] == [tokens_charged(record, served=served, cut_short=False) for served in (True, False)]
    record.input_tokens = 7
    assert 7 == tokens_charged(record, served=True, cut_short=False)
    # What no model answers, such as the count of a text's tokens, costs nothing.
    record = RequestRecord(request_id="a", method="POST", path="/tokenize", body_size=400)
    assert 0 == tokens_charged(record, served=True, cut_short=False)


def test_estimates() -> None:
    """Four bytes are a token, and each piece of an answer is one at least; halves of characters are no mistake."""
    assert [0, 1, 1, 2, 1] == [tokens_in(text) for text in ("", "a", "abcd", "abcde", "\ud83d")]
    assert [0, 3, 3] == [tokens_in_pieces(pieces) for pieces in ([], ["a", "b", "c"], ["a" * 12])]
