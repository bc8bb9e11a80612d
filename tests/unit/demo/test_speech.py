"""The demo's models that hear and speak: what is missing is named, and only the published weights are taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from triton_openai.demo import speech
from triton_openai.errors import ConfigurationError


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo says which packages it lacks, and what installs them."""
    monkeypatch.setattr(speech, "find_spec", lambda name: None if name == "ctranslate2" else name)
    with pytest.raises(ConfigurationError, match=r"\(ctranslate2\): make demo ARGS=--speech"):
        speech.check_installed()


def test_other_weights(tmp_path: Path) -> None:
    """Parts that make another file than the published one are refused."""
    parts = [tmp_path / name for name in ("a", "b")]
    for part in parts:
        part.write_bytes(b"weights")
    with pytest.raises(ConfigurationError, match=r"another model\.bin"):
        speech._join(parts, tmp_path / "model.bin")


def test_every_package_is_pinned() -> None:
    """The list has the version and the hash of every package that the demo looks for."""
    listed = Path(speech.__file__).with_suffix(".txt").read_text()
    pinned = {
        name.replace("-", "_") for name in re.findall(r"^([\w-]+)==[\d.]+ \\\n +--hash=sha256:", listed, re.MULTILINE)
    }
    assert set(speech._NEEDED) - {"soundfile", "soxr"} == pinned
