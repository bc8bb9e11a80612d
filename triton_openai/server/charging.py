"""
What a request is charged against the tokens of its key: what was counted, and where nobody counts an estimate.

An estimate is better than nothing here, because a limit that never bites is none. It is charged and shown nowhere.
"""

from __future__ import annotations

from triton_openai.estimates import tokens_in_bytes
from triton_openai.generation import Usage
from triton_openai.telemetry.observation import Answering, Observation


def tokens_charged(observation: Observation, *, served: bool, cut_short: bool) -> int:
    """
    Return the tokens that a request has used. *served* is whether it was answered without an error, *cut_short* whether
    it was ended by its client before that.

    What the backend refused, or never got, has used none.
    """
    total = 0
    for number, answer in enumerate(observation.answers):
        usage = _usage(answer, cut_short)
        if usage is not None:
            total += usage.completion_tokens + (0 if number % observation.n else usage.prompt_tokens)
    if observation.input_tokens is not None:
        return total + observation.input_tokens
    if observation.operation is not None and not observation.answers and served and observation.request is not None:
        # All of a request for vectors or scores is input, but for the little that says so.
        return tokens_in_bytes(observation.request.content.total_bytes)
    return total


def _usage(answer: Answering, cut_short: bool) -> Usage | None:
    usage = answer.usage_so_far
    if usage is not None or answer.sent is None or (answer.first is None and not cut_short):
        return usage
    return answer.usage_estimate
