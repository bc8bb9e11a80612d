"""What the workers of one service share on disk stays there as long as they run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from triton_openai.workers.directory import private_directory


def test_nobody_clears_it_up(tmp_path: Path) -> None:
    """
    It is locked as systemd-tmpfiles looks for it: files that are only mapped look unused to it after some days.

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
