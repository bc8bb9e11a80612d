"""What is computed of the answers to jobs: probabilities from logits, and scores from vectors."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest

from tests.cases import every_case
from triton_openai.answer.job_run import Activation, _cosines, apply_activation, sigmoid
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
    assert pytest.approx(expected) == list(apply_activation(values, activation))


@every_case("values, activation", [([math.nan, 0.0], "softmax"), ([math.inf, 0.0], "none"), ([math.nan], "sigmoid")])
def test_what_is_no_number(values: Sequence[float], activation: Activation) -> None:
    """JSON has neither NaN nor infinity."""
    with pytest.raises(UpstreamError):
        apply_activation(values, activation)


def test_activation() -> None:
    """The logistic function, at both ends too."""
    assert [0.0, 0.5, 1.0] == [sigmoid(value) for value in (-1e6, 0.0, 1e6)]
    assert math.isclose(1 / (1 + math.exp(2.5)), sigmoid(-2.5))
    assert math.isclose(1, sigmoid(2.5) + sigmoid(-2.5))


def test_cosines() -> None:
    """The length of a vector is of no account, and one without a direction is like nothing."""
    vectors = {"a": (3, 4), "b": (30, 40), "c": (-4, 3), "d": (0, 0)}
    raw = {name: array("f", values).tobytes() for name, values in vectors.items()}
    found = _cosines(raw, [("a", "b"), ("a", "c"), ("a", "d")])

    assert [1, 0, 0] == pytest.approx(found, abs=1e-6)
