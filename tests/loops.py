"""Tests that run in the event loop of the service."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import uvloop

P = ParamSpec("P")


def on_uvloop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run *test* on uvloop: asyncio's own loop loses a connection that it has accepted when its listener closes."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        uvloop.run(test(*arguments, **named))

    return run
