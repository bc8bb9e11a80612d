"""What becomes of a classifier's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.cases import every_case
from triton_openai.api.classify import Activation, activated
from triton_openai.errors import UpstreamError


@every_case(
    "values, activation, expected",
    [
        ([0.0, 0.0], "softmax", [0.5, 0.5]),
        ([1000.0, 0.0, -1000.0], "softmax", [1.0, 0.0, 0.0]),
        ([math.log(3), 0.0], "softmax", [0.75, 0.25]),
        ([-math.inf, 0.0], "softmax", [0.0, 1.0]),
        ([0.0], "softmax", [0.5]),
        ([0.0, 1000.0, -1000.0], "sigmoid", [0.5, 1.0, 0.0]),
        ([0.25, 7.0], "none", [0.25, 7.0]),
    ],
)
def test_activations(values: Sequence[float], activation: Activation, expected: Sequence[float]) -> None:
    """One of several classes, any number of them, or values as they are; one class alone is there or not."""
    assert pytest.approx(expected) == list(activated(values, activation))


@every_case("values, activation", [([math.nan, 0.0], "softmax"), ([math.inf, 0.0], "none"), ([math.nan], "sigmoid")])
def test_what_is_no_number(values: Sequence[float], activation: Activation) -> None:
    """JSON has neither NaN nor infinity."""
    with pytest.raises(UpstreamError):
        activated(values, activation)
