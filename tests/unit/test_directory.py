"""The directory that workers share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from triton_openai.errors import ConfigurationError
from triton_openai.workers.directory import private_directory


def test_it_goes_at_the_end(tmp_path: Path) -> None:
    """Nobody else can look into it meanwhile."""
    with private_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) as directory:
        assert [directory] == list(tmp_path.iterdir())
        assert 0o700 == directory.stat().st_mode & 0o777

    assert [] == list(tmp_path.iterdir())


def test_a_disk_that_is_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is one sentence, as in a container without a folder for temporary files."""

    def refused(**_: object) -> str:
        raise OSError(30, "Read-only file system", str(tmp_path))

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(ConfigurationError, match=r"Read-only file system.*TMPDIR"), private_directory({}):
        pass
