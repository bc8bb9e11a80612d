"""The recording of the demo in ``docs/images`` is made from what a terminal shows."""

from __future__ import annotations

import json
import sys

import pytest

from docs.recording import recorded


def test_output_is_recorded() -> None:
    """The first line describes the terminal, and the others have the output with its times."""
    head, *events = map(json.loads, recorded([sys.executable, "-c", "print('Paris')"]))

    assert {"version": 2, "title": "make demo"}.items() <= head.items()
    assert "Paris\r\n" == "".join(text for _, _, text in events)


def test_a_failure_has_its_reason() -> None:
    """A command that fails, as the demo does where its port is taken, ends the recording with what it wrote."""
    with pytest.raises(SystemExit, match=r"status 1\.\nCannot listen"):
        recorded([sys.executable, "-c", "import sys; sys.exit('Cannot listen')"])
