"""
Records the demo in a terminal: ``python -m docs.recording`` writes ``docs/images/demo.cast``.

The file has the form of asciinema (version 2): ``asciinema play docs/images/demo.cast`` shows it.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

_RECORDING = Path(__file__).parent / "images" / "demo.cast"
_WIDTH, _HEIGHT = 100, 30


def main() -> None:
    """Run the demo once, on the port of ``make demo``, and write what a terminal shows."""
    lines = recorded([sys.executable, "-m", "triton_openai", "demo", "--once"])
    _RECORDING.write_text("\n".join(lines) + "\n", encoding="utf-8")


def recorded(command: Sequence[str]) -> list[str]:
    """
    Return the lines of a recording of *command*.

    The recording has its output, but not what it writes to standard error. A command that fails ends this process with
    that text, which has the reason.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", _HEIGHT, _WIDTH, 0, 0))
    lines = [json.dumps({"version": 2, "width": _WIDTH, "height": _HEIGHT, "title": "make demo"})]
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, stdin=its, stdout=its, stderr=errors) as process,
    ):
        os.close(its)
        while data := _read(ours):
            lines.append(json.dumps([round(time.monotonic() - began, 3), "o", decode(data)], ensure_ascii=False))
        status = process.wait()
        errors.seek(0)
        reason = errors.read().strip()
    os.close(ours)
    if status:
        sys.exit(f"The demo ended with status {status}.\n{reason}")
    return lines


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""


if __name__ == "__main__":
    main()
