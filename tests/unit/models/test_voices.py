"""The voices of models: recordings in a folder that changes, and names that models know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.cases import every_case
from triton_openai.adapters._common.base import Synthesis
from triton_openai.config.tree import AudioSettings
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.models import voices as voices_module
from triton_openai.models.voices import Voices

IMITATES = Synthesis(rate=24_000, max_seconds=10, reference_rate=16_000)
NAMES = Synthesis(rate=24_000, max_seconds=10, voice_type=str)
NUMBERS = Synthesis(rate=24_000, max_seconds=10, voice_type=int)
ALONE = Synthesis(rate=24_000, max_seconds=10, has_own_voice=True)


def record(folder: Path, name: str, text: str | None, *, seconds: float = 1.0, rate: int = 16_000) -> None:
    """Record a voice."""
    soundfile.write(folder / name, np.full(round(seconds * rate), 0.25), rate, subtype="PCM_16")
    if text is not None:
        (folder / name).with_suffix(".txt").write_text(text)


def voices_of(folder: Path, synthesis: Synthesis = IMITATES, **settings: Any) -> Voices:
    """Return the voices in *folder*."""
    return Voices("tts", AudioSettings(voices=str(folder), **settings), synthesis)


def test_recordings(tmp_path: Path) -> None:
    """A recording has a text beside it, and the rate that the model takes; its file's name is the voice's."""
    record(tmp_path, "ada.wav", " I am Ada.\n")
    record(tmp_path, "bob.flac", "I am Bob.", rate=48_000)
    (tmp_path / "README.md").write_text("About the voices.")
    voices = voices_of(tmp_path, voice_aliases={"alloy": "ada"})
    assert ["ada", "alloy", "bob"] == voices.names()
    for name, text in (("ada", "I am Ada."), ("alloy", "I am Ada."), ("bob", "I am Bob.")):
        voice, only = voices.find(name)
        assert voice is not None
        assert (text, 1.0, 4 * 16_000, False) == (voice.text, voice.seconds, len(voice.samples), only)


async def test_a_folder_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new voice is found once its files stay as they are; a mistake changes nothing, and is tried again."""
    monkeypatch.setattr(voices_module, "LOOK_SECONDS", 0.0)
    record(tmp_path, "ada.wav", "I am Ada.")
    voices = voices_of(tmp_path)
    record(tmp_path, "bob.wav", None)
    for _ in range(3):
        await voices.reload()
    assert ["ada"] == voices.names()
    (tmp_path / "bob.txt").write_text("I am Bob.")
    for _ in range(3):
        await voices.reload()
    assert ["ada", "bob"] == voices.names()
    (tmp_path / "ada.txt").write_text("I was Ada.")
    os.utime(tmp_path / "ada.txt", (1, 1))
    for _ in range(3):
        await voices.reload()
    voice, _ = voices.find("ada")
    assert voice is not None
    assert "I was Ada." == voice.text


@every_case(
    "files, synthesis, message",
    [
        ({}, IMITATES, "has no recordings"),
        ({"ada.wav": None}, IMITATES, "No such file"),
        ({"ada.wav": "  "}, IMITATES, "its text is empty"),
        ({"ada.wav": "a", "ada.flac": "a"}, IMITATES, "two recordings of the voice 'ada'"),
        ({"ada.wav": "a"}, Synthesis(rate=1, max_seconds=1, with_reference=True, reference_rate=16_000), "is as long"),
        ({"ada.wav": "a", "bob.wav": "a"},
         Synthesis(rate=1, max_seconds=9, voices_by_transcript=True, reference_rate=16_000), "'bob' are the same"),
    ],
)  # fmt: skip
def test_wrong_folders(
    files: dict[str, str | None], synthesis: Synthesis, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A mistake ends the start, or the model is not served; it says which file is wrong."""
    folder = tmp_path_factory.mktemp("voices")
    for name, text in files.items():
        record(folder, name, text)
    with pytest.raises(ConfigurationError, match=message):
        voices_of(folder, synthesis)


def test_files_that_are_no_audio(tmp_path: Path) -> None:
    """An error names files that are no audio, and a folder that is not there."""
    (tmp_path / "ada.mp3").write_bytes(b"hello")
    (tmp_path / "ada.txt").write_text("Hello.")
    with pytest.raises(ConfigurationError, match=r"ada\.mp3.*not audio"):
        voices_of(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        voices_of(tmp_path / "nowhere")


@every_case(
    "settings, synthesis, message",
    [
        ({"voices": ("ada",)}, IMITATES, "must be a folder"),
        ({}, IMITATES, "imitates recordings and has none"),
        ({"voices": ("ada",)}, ALONE, "has one voice"),
        ({"voices": "/voices"}, NAMES, "must list the names"),
        ({"voices": ("ada",)}, NUMBERS, "takes voices as numbers"),
        ({"voices": {"ada": 5}}, NAMES, "takes voices as texts"),
        ({}, NUMBERS, "give them names"),
        ({"voices": ("ada",), "voice_aliases": {"alloy": "eve"}}, NAMES, "has no voice 'eve'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], synthesis: Synthesis, message: str) -> None:
    """What the model cannot do is told by name."""
    with pytest.raises(ConfigurationError, match=message):
        Voices("tts", AudioSettings(**settings), synthesis)


@every_case(
    "settings, synthesis, name, expected",
    [
        ({"voices": {"ada": 3, "bob": 4}}, NUMBERS, "bob", (4, False)),
        ({"voices": ("ada", "bob"), "voice_aliases": {"alloy": "ada"}}, NAMES, "alloy", ("ada", False)),
        # One voice is taken whatever its name.
        ({"voices": ("ada",)}, NAMES, "eve", ("ada", True)),
        ({"voices": ("ada",)}, NAMES, None, ("ada", True)),
        ({}, ALONE, "eve", (None, True)),
        # Without a list the model knows its voices, and some blend them.
        ({}, NAMES, "af_bella+af_sky", ("af_bella+af_sky", False)),
        ({"voice_aliases": {"alloy": "af_bella"}}, NAMES, "alloy", ("af_bella", False)),
    ],
)
def test_found(settings: dict[str, Any], synthesis: Synthesis, name: str | None, expected: tuple[Any, bool]) -> None:
    """A voice is what the model calls it, and whether it is the only one."""
    voice, only = Voices("tts", AudioSettings(**settings), synthesis).find(name)

    assert expected == (None if voice is None else voice.known_as, only)


@every_case("settings, name, message", [
    ({"voices": ("ada", "bob")}, "eve", "It has: ada, bob"),
    ({"voices": ("ada", "bob")}, None, "Missing"),
    ({}, "../etc/passwd", "letters"), ({}, ".hidden", "letters"), ({}, "a\\b", "letters"), ({}, "a" * 101, "letters"),
    ({}, "a\x00b", "letters"), ({}, "", "letters"), ({}, None, "Missing"),
])  # fmt: skip
def test_not_found(settings: dict[str, Any], name: str | None, message: str) -> None:
    """An unknown name is refused with those that there are, and what could be a path with what is allowed."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        Voices("tts", AudioSettings(**settings), NAMES).find(name)
    assert "voice" == caught.value.param
