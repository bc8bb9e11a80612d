"""The file that the workers of one service have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_openai.errors import ConfigurationError
from triton_openai.server.places import vacate
from triton_openai.server.shared_table import SharedTable


def test_all_of_it_has_its_place(tmp_path: Path) -> None:
    """Who writes to a hole in a mapped file is killed by the system (SIGBUS) when the disk is full by then."""
    file = tmp_path / "table"
    table = SharedTable(file, index=0, workers=2, width=10)
    table.words[table.find("a")] = 7
    again = SharedTable(file, index=1, workers=2, width=10)

    assert 7 == again.words[next(iter(again.starts()))]
    found = file.stat()
    assert 512 * found.st_blocks >= found.st_size
    table.close()
    again.close()


def test_without_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told in words, and keeps nobody from replacing a worker that has ended."""
    with pytest.raises(ConfigurationError, match=r"cannot be kept in .*gone: No such file or directory"):
        SharedTable(tmp_path / "gone" / "table", index=0, workers=2, width=10)

    vacate(tmp_path / "gone", 0, 2)
    assert "is not cleared" in capsys.readouterr().out
