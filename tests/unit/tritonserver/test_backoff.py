"""Pauses between starts."""

from __future__ import annotations

from triton_openai.tritonserver.backoff import Pauses


def test_they_grow_up_to_the_longest() -> None:
    """Each is twice the one before."""
    pauses = Pauses(first=1, longest=5, stable_after=60)

    assert [1, 2, 4, 5, 5] == [pauses.after(lived) for lived in (0, 10, 59, 0, 0)]


def test_a_long_life_makes_them_short_again() -> None:
    """What has lived long enough is started again soon, and the pauses grow from there."""
    pauses = Pauses(first=1, longest=5, stable_after=60)
    for _ in range(4):
        pauses.after(0)

    assert [1, 2] == [pauses.after(60), pauses.after(0)]
