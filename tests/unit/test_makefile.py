"""The targets of ``make`` say what they need before they install anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["demo", "test", "test-all"])
def test_a_python_that_has_no_triton(target: str, tmp_path: Path) -> None:
    """A Python that has no Triton is named, with those that have one, and no environment is made."""
    python = tmp_path / "python"
    code = "import sys; sys.version_info = (3, 13, 0); exec(sys.argv[1])"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$2\"\n")
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), target, f"VENV={tmp_path / 'environment'}", f"PYTHON={python}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 2 == done.returncode
    assert "PyPI has Triton for Python 3.11 and 3.12 on Linux x86_64, and this is Python 3.13 " in done.stderr
    assert ["python"] == [path.name for path in tmp_path.iterdir()]
