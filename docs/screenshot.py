"""
Takes the pictures of the page for the documents: ``python -m docs.screenshot``.

It starts the demo, asks one question in a headless Chromium, and writes ``docs/images/page.png`` and ``page-dark.png``.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import chromium

_IMAGES = Path(__file__).parent / "images"
_PICTURES = {"light": "page.png", "dark": "page-dark.png"}
_QUESTION = "What is the capital of France?"


async def _take(address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with chromium.tab(Path(folder)) as tab:
            await tab.open(address)
            await tab.until("document.querySelector('#model').options.length")
            # The demo's model is a small one: sampled, it wanders.
            await tab.type("#temperature", "0")
            await tab.type("#prompt", _QUESTION)
            await tab.click("#send")
            await tab.until("document.querySelector('.bubble.assistant .note')?.textContent.includes('stop')")
            # The figures need two readings.
            await tab.until("/[0-9]/.test(document.querySelector('#first').textContent)")
            for theme, name in _PICTURES.items():
                media = [{"name": "prefers-color-scheme", "value": theme}]
                await tab.call("Emulation.setEmulatedMedia", features=media)
                picture = await tab.picture(1200, 860)
                await asyncio.to_thread((_IMAGES / name).write_bytes, picture)


def main() -> None:
    """Write the pictures."""
    command = [sys.executable, "-m", "triton_openai", "demo", "--port", "0"]
    with (
        # Without the files and batches of other demos.
        tempfile.TemporaryDirectory() as state,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "XDG_STATE_HOME": state}
        ) as demo,
    ):
        assert demo.stdout is not None
        try:
            printed = ""
            while "Ctrl-C" not in printed:
                line = demo.stdout.readline()
                if not line:
                    # Its standard error is this process's: the reason stands there.
                    sys.exit(f"The demo ended with status {demo.wait()}.")
                printed += line
            address = re.search(r"http://[\d.]+:\d+", printed)
            assert address is not None
            asyncio.run(_take(f"{address[0]}/"))
        finally:
            demo.terminate()


if __name__ == "__main__":
    main()
