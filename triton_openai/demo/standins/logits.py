"""
The log probabilities of an answer's tokens, and matching scores of the whole vocabulary.

Like an engine's, the scores are not normalised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

_SHIFT = 3.25


def log_probability(token: int) -> float:
    """Return the made-up, constant log probability of a token."""
    return -0.05 - (token * 2654435761 % 1000) / 500.0


class Scores(Protocol):
    """The scores of the tokens of one answer, by their place in it."""

    def logprob(self, position: int, token: int) -> float:
        """Return the log probability of the *token* at *position*."""
        ...

    def top(self, position: int, token: int, count: int, vocabulary: int) -> list[tuple[int, float, int]]:
        """Return the *token* at *position*, then the *count* likeliest ones, each with log probability and rank."""
        ...

    def rows(self, first: int, tokens: Sequence[int], vocabulary: int) -> Any:
        """Return a row of scores for each of *tokens* from *first* on, float32 of shape ``[tokens, vocabulary]``."""
        ...


class MadeUp:
    """Made-up scores: a constant log probability for each token."""

    def logprob(self, position: int, token: int) -> float:
        """Return the log probability; see `Scores.logprob`."""
        return log_probability(token)

    def top(self, position: int, token: int, count: int, vocabulary: int) -> list[tuple[int, float, int]]:
        """Return the token as the likeliest one; see `Scores.top`."""
        ids = [token, *((token + step) % vocabulary for step in range(1, count))]
        return [(token_id, log_probability(token) - rank, rank + 1) for rank, token_id in enumerate(ids)]

    def rows(self, first: int, tokens: Sequence[int], vocabulary: int) -> Any:
        """Return the scores of *tokens*, wherever they stand; see `Scores.rows`."""
        matrix = np.zeros((len(tokens), vocabulary), dtype=np.float32)
        others = np.arange(vocabulary, dtype=np.int64)
        for position, token in enumerate(tokens):
            chosen = math.exp(log_probability(token))
            weights = 1.0 / (1.0 + (others * 40503 + token) % 997)
            weights[token] = 0.0
            weights *= (1.0 - chosen) / weights.sum()
            weights[token] = chosen
            matrix[position] = np.log(weights) + _SHIFT
        return matrix
