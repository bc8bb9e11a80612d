"""Reads the stand-ins' records of their requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_POLL_SECONDS = 0.01


class Record:
    """
    The record file of one repository.

    Each line is read and parsed once, because tests search a long record thousands of times. Thread-safe; callers must
    not modify events.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._read = 0
        self._events: list[Event] = []
        self._of: dict[str, list[Event]] = {}

    def events(self, *, id: str | None = None, model: str | None = None, event: str | None = None) -> list[Event]:
        """Return the events so far, oldest first, filtered by request id, model and kind of event."""
        with self._lock:
            self._read_on()
            if id is None:
                events = self._events
            else:
                events = self._of.get(id, [])
            return [entry for entry in events if model in (None, entry["model"]) and event in (None, entry["event"])]

    def _read_on(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        # A last line without a line break is still being written.
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        for entry in map(json.loads, data.splitlines()):
            self._events.append(entry)
            self._of.setdefault(entry["id"], []).append(entry)

    def wait_for(
        self,
        condition: Callable[[list[Event]], bool] | None = None,
        timeout: float = 120.0,
        *,
        id: str | None = None,
        model: str | None = None,
        event: str | None = None,
    ) -> list[Event]:
        """
        Wait until *condition* holds for the filtered events (by default: until there is one) and return them.

        Raises `TimeoutError`, with the events so far.
        """
        deadline = time.monotonic() + timeout
        while True:
            events = self.events(id=id, model=model, event=event)
            if condition(events) if condition is not None else events:
                return events
            if time.monotonic() >= deadline:
                raise TimeoutError(f"not within {timeout} s; there is {events}")
            time.sleep(_POLL_SECONDS)
