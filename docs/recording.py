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
import termios
import time
from pathlib import Path

_RECORDING = Path(__file__).parent / "images" / "demo.cast"
_WIDTH, _HEIGHT = 100, 30


def main() -> None:
    """Run the demo once and write what a terminal shows."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", _HEIGHT, _WIDTH, 0, 0))
    lines = [json.dumps({"version": 2, "width": _WIDTH, "height": _HEIGHT, "title": "make demo"})]
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    began = time.monotonic()
    command = [sys.executable, "-m", "triton_openai", "demo", "--once"]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.DEVNULL) as demo:
        os.close(its)
        while data := _read(ours):
            lines.append(json.dumps([round(time.monotonic() - began, 3), "o", decode(data)], ensure_ascii=False))
    if demo.returncode:
        sys.exit(f"The demo ended with status {demo.returncode}.")
    _RECORDING.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""


if __name__ == "__main__":
    main()
