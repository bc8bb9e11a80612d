"""Garbage is collected at quiet moments."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from triton_openai.serving import garbage
from triton_openai.tasks import cancel


class Cycle:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.me = self


def old_garbage() -> weakref.ref[Cycle]:
    """Make garbage that is older than what young collections look at."""
    made = Cycle()
    reference = weakref.ref(made)
    gc.collect()
    return reference


def test_garbage_waits_for_a_quiet_moment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old garbage is collected when enough has come together and few objects are alive."""
    # Only what the test calls collects garbage.
    gc.disable()
    request.addfinalizer(gc.enable)
    found = old_garbage()
    monkeypatch.setattr(garbage, "_WORTHWHILE", 0)
    monkeypatch.setattr(garbage, "_FEW", 0)
    garbage.collect_if_few()
    assert found() is not None
    monkeypatch.setattr(garbage, "_FEW", 10**9)
    monkeypatch.setattr(garbage, "_WORTHWHILE", 10**9)
    garbage.collect_if_few()
    assert found() is not None
    monkeypatch.setattr(garbage, "_WORTHWHILE", 0)
    garbage.collect_if_few()
    assert found() is None


async def test_the_collector_is_set_up_and_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exists at the beginning is never looked at again; Python collects everything only as a last resort."""
    monkeypatch.setattr(garbage, "_INTERVAL", 0.0)
    looks: asyncio.Queue[None] = asyncio.Queue()
    monkeypatch.setattr(garbage, "collect_if_few", lambda: looks.put_nowait(None))
    threshold = gc.get_threshold()
    try:
        task = asyncio.create_task(garbage.collect_garbage())
        for _ in range(2):
            await looks.get()
        assert gc.get_freeze_count() > 0
        assert (*threshold[:2], 1000) == gc.get_threshold()
        await cancel(task)
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
