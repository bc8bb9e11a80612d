"""
The load generator: a process of its own that takes one `Load` on standard input and prints one `Measured`.

It also reads the clocks of the processes it loads, so that both ends of the measured window are its own.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from bench.machine import pin
from bench.messages import Load, Measured
from bench.tally import BenchTally
from bench.wire import AnswerReader, http_request
from triton_openai.load import streams


def main() -> None:
    """Run one measurement."""
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    pin(load.cores)
    # Nothing here makes cycles, and a pause of the collector would be seen as one of the service.
    gc.disable()
    sys.stdout.buffer.write(msgspec.json.encode(_runner()(_run(load))))


def _runner() -> Callable[[Coroutine[Any, Any, Measured]], Measured]:
    try:
        import uvloop  # there is none for some platforms
    except ImportError:
        return asyncio.run
    run: Callable[[Coroutine[Any, Any, Measured]], Measured] = uvloop.run
    return run


async def _run(load: Load) -> Measured:
    tally = BenchTally(load)
    if load.target.protocol == "grpc":
        from bench.grpc_load import run_grpc  # slow to import, and most measurements do without

        await run_grpc(load, tally)
    else:
        request = http_request(load.target, load.model, load.tokens, load.form)
        target = streams.Target(
            host=load.target.host, port=load.target.port, request=lambda: request, reader=AnswerReader
        )
        await streams.run_streams(target, load, tally)
    return tally.measured


if __name__ == "__main__":
    main()
