"""Tests that run on a table of cases fail with every case that fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cases import every_case


def failures(error: ExceptionGroup[Exception]) -> list[str]:
    """Return the cases that failed."""
    return [each.__notes__[-1] for each in error.exceptions]


def test_all_failures_are_reported() -> None:
    """Each failing case is named, whatever it raises; the others pass, with the fixtures of all."""
    seen = []

    @every_case("number, word", [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
    def check(fixture: str, number: int, word: str) -> None:
        seen.append((fixture, number))
        if number == 2:
            pytest.fail("no")
        if number == 4:
            raise KeyError(word)
        with pytest.raises(ValueError):
            int(word)

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed\ncase: \\(2, 'two'\\)\ncase:") as caught:
        check(fixture="f")

    assert ["case: (2, 'two')", "case: (4, 'four')"] == failures(caught.value)
    assert [("f", number) for number in (1, 2, 3, 4)] == seen


def test_an_async_test() -> None:
    """Coroutines are awaited, and several tables make a product."""
    seen: list[Any] = []

    @every_case("a", [1, 2])
    @every_case("b", "xy", ids=lambda letter: f"letter {letter}")
    async def check(a: int, b: str) -> None:
        seen.append((a, b))
        assert (a, b) != (2, "y")

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(check())

    assert [(1, "x"), (1, "y"), (2, "x"), (2, "y")] == seen
    assert "letter y" in str(caught.value.exceptions[0])
    assert ["case: 2"] == failures(caught.value)


def test_a_table_without_cases() -> None:
    """A test that would run on nothing is a mistake."""
    with pytest.raises(ValueError, match="no cases"):
        every_case("a", [])
