"""One worker among several, as a process: ``python -m tests.worker_process INDEX COUNT DIRECTORY TRITON_URL``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohttp import web

from triton_openai.app import create_app
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.config.worker import Worker
from triton_openai.telemetry.logging import configure_logging


async def main(index: str, count: str, directory: str, url: str) -> None:
    """Print the port, and serve until killed."""
    worker = Worker(index=int(index), count=int(count), directory=Path(directory))
    settings = Settings(triton=TritonSettings(url=(url,)))
    configure_logging(settings.server)
    runner = web.AppRunner(create_app(settings, worker=worker))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
