"""Which sampling parameters the stand-in of vLLM takes: those that the engine's constructor takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.demo.standins.vllm_parameters import Rejected, parse


def guided(**guide: Any) -> dict[str, str]:
    """Return a guide as the backend reads it."""
    return {"structured_outputs": json.dumps(guide)}


@every_case(
    "values, taken",
    [
        ({"top_p": 0}, False),
        ({"top_p": 1}, True),
        ({"min_p": 0, "temperature": 0}, True),
        (guided(regex="a"), True),
        (guided(), False),
        (guided(regex="a", choice=["b"]), False),
    ],
)
def test_values(values: dict[str, Any], taken: bool) -> None:
    """Bounds that belong to a range, and guides of exactly one kind."""
    if taken:
        parse(values, "r25.11")
    else:
        with pytest.raises(Rejected):
            parse(values, "r25.11")
