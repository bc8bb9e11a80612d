"""The directory that workers share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from triton_openai.config.worker import private_directory
from triton_openai.errors import ConfigurationError


def test_the_folder_goes_at_the_end(tmp_path: Path) -> None:
    """Nobody else can look into it meanwhile."""
    with private_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) as directory:
        assert [directory] == list(tmp_path.iterdir())
        assert 0o700 == directory.stat().st_mode & 0o777

    assert [] == list(tmp_path.iterdir())


def test_a_disk_that_is_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """
    A disk that is read-only ends the start with one sentence, as in a container without a folder for temporary
    files.
    """

    def refused(**_: object) -> str:
        raise OSError(30, "Read-only file system", str(tmp_path))

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(ConfigurationError, match=r"Read-only file system.*TMPDIR"), private_directory({}):
        pass


def test_nowhere_to_share_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system on which nothing can be written is said in a sentence that tells what to set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))

    with pytest.raises(ConfigurationError, match="TMPDIR"), private_directory({}):
        pass


def test_nobody_clears_the_folder_up(tmp_path: Path) -> None:
    """
    The folder is locked as systemd-tmpfiles looks for it: files that are only mapped look unused to it after days.

    Source: tmpfiles.d(5), "Age"; it takes an exclusive BSD lock and leaves alone what is locked.
    """
    with private_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) as directory:
        looking = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(looking, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(looking)

    assert not directory.exists()
