"""The documents' programs in TypeScript, and the example for JavaScript. `make clients` installs their package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.service import Service
from tests.documents import ADDRESS, ROOT, blocks
from tests.programs import found

#: Where `make clients` puts the packages.
PACKAGES = Path(sys.prefix) / "node" / "node_modules"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder from which programs find the package ``openai``."""
    if not (PACKAGES / "openai").exists():
        pytest.skip("the clients for Node.js are not installed (make clients)")
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    return tmp_path


def test_programs(demo: Service, folder: Path) -> None:
    """Each one prints what its document shows."""
    for block in blocks("ts"):
        program = folder / "program.mjs"
        program.write_text(block.code.replace(ADDRESS, demo.address))
        assert block.output.strip() == run(program).strip(), block.place


def test_the_example(demo: Service, folder: Path) -> None:
    """It prints what its README shows."""
    ((shown,),) = [[block.output] for block in blocks("sh", documents=("examples/openai-js/README.md",))]
    program = folder / "chat.mjs"
    program.write_text((ROOT / "examples/openai-js/chat.js").read_text())

    assert shown == run(program, BASE_URL=demo.base_url)


def run(program: Path, **environ: str) -> str:
    """Run a program with Node.js, and return what it prints."""
    result = subprocess.run(
        [found("Node.js"), str(program)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert 0 == result.returncode, result.stderr
    return result.stdout
