"""Looks into a process of the service; see ``tests.faults.probed``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SERVICE = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.faults import probed
from triton_openai.triton.http_stream import HttpCall

file = Path(sys.argv[1])
probed.watch(file, strict=True)

async def serve():
    begun = HttpCall.__new__(HttpCall)
    os.kill(os.getpid(), signal.SIGUSR1)
    del begun
    while not file.exists():
        await asyncio.sleep(0)

asyncio.run(serve())
"""


def test_a_look_while_an_object_is_made(tmp_path: Path) -> None:
    """A signal that comes while a call to Triton is being made does not fail the look, nor the call."""
    file = tmp_path / "probe.json"
    ended = subprocess.run([sys.executable, "-c", _SERVICE, file], capture_output=True, text=True, check=False)
    assert (0, "") == (ended.returncode, ended.stderr)
    assert file.exists()
