"""
The scores of the whole vocabulary, made up so that the chosen token's log probability is the one told elsewhere.

They are not normalised, as an engine's are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_SHIFT = 3.25


def log_probability(token: int) -> float:
    """Return a made-up but constant log probability of a token."""
    return -0.05 - (token * 2654435761 % 1000) / 500.0


def rows(tokens: Sequence[int], vocabulary: int) -> Any:
    """Return a row of scores for each of *tokens*, float32 of shape ``[tokens, vocabulary]``."""
    found = np.zeros((len(tokens), vocabulary), dtype=np.float32)
    others = np.arange(vocabulary, dtype=np.int64)
    for place, token in enumerate(tokens):
        chosen = math.exp(log_probability(token))
        weights = 1.0 / (1.0 + (others * 40503 + token) % 997)
        weights[token] = 0.0
        weights *= (1.0 - chosen) / weights.sum()
        weights[token] = chosen
        found[place] = np.log(weights) + _SHIFT
    return found
