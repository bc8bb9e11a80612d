"""What a request is charged against the tokens of its key."""

from __future__ import annotations

import pytest

from triton_openai.access.rate_limits import tokens_charged
from triton_openai.errors import ServiceError
from triton_openai.generation import FinishReason, Usage
from triton_openai.prompts.tokenizer import tokens_in, tokens_in_pieces
from triton_openai.telemetry.observation import Observation

_KNOWN = Usage(prompt_tokens=10, completion_tokens=5)
_ESTIMATE = Usage(prompt_tokens=8, completion_tokens=4)


class FakeAnswer:
    """An answer as far as it matters here."""

    ended: float | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    usage_estimate = _ESTIMATE
    steps = 1
    arrivals = ()
    cancelled = False
    text = ""
    error: ServiceError | None = None

    def __init__(self, counted: Usage | None, *, sent: bool = True, begun: bool = True) -> None:
        self.usage_so_far = counted
        self.sent = 1.0 if sent else None
        self.first = 2.0 if begun else None


@pytest.mark.parametrize(
    "answers, cut_short, tokens",
    [
        # A prompt counts once for all its answers.
        ([FakeAnswer(_KNOWN), FakeAnswer(_KNOWN)], False, 20),
        ([FakeAnswer(_KNOWN), FakeAnswer(None)], False, 19),
        ([FakeAnswer(None), FakeAnswer(None)], False, 16),
        ([FakeAnswer(None)], True, 12),
        # The backend had the prompt when its client left, and had refused it when it had not.
        ([FakeAnswer(None, begun=False)], True, 12),
        ([FakeAnswer(None, begun=False)], False, 0),
        ([FakeAnswer(None, sent=False, begun=False)], True, 0),
    ],
)
def test_answers(answers: list[FakeAnswer], cut_short: bool, tokens: int) -> None:
    """What is counted is charged, and an estimate for the rest."""
    observation = Observation(request_id="a", method="POST", path="/v1/completions")
    observation.identify("text_completion", model="m", adapter="a")
    observation.answers, observation.n = answers, 2

    assert tokens == tokens_charged(observation, served=not cut_short, cut_short=cut_short)


def test_inputs() -> None:
    """Vectors and scores cost what they were counted to, else what a body that was answered has of bytes."""
    observation = Observation(request_id="a", method="POST", path="/v1/embeddings")
    observation.identify("embeddings", model="m", adapter="a")
    assert 0 == tokens_charged(observation, served=True, cut_short=False)
    observation.body_size = 400
    assert [100, 0] == [tokens_charged(observation, served=served, cut_short=False) for served in (True, False)]
    observation.input_tokens = 7
    assert 7 == tokens_charged(observation, served=True, cut_short=False)


def test_estimates() -> None:
    """Four bytes are a token, and each piece of an answer is one at least; halves of characters are no mistake."""
    assert [0, 1, 1, 2, 1] == [tokens_in(text) for text in ("", "a", "abcd", "abcde", "\ud83d")]
    assert [0, 3, 3] == [tokens_in_pieces(pieces) for pieces in ([], ["a", "b", "c"], ["a" * 12])]
