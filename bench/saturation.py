"""
``python -m bench.saturation``: how much the service does when it is the limit, in front of the fake Triton.

Triton, the service and the load generator share the machine's cores, so the number of cores that the service got stands
beside each figure: 0.95 and more per process is saturation. At half of the first load, it also measures
the time to first token, with the service and without it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.cases import Plan, Row
from bench.fake_triton import EMBEDDINGS
from bench.figures import table, written
from bench.machine import Cores
from bench.measure import measure, row
from bench.messages import Target
from bench.processes import HOST, free_port, running, wait_until_answers
from bench.repository import PACED, PACED_CALL
from bench.subjects import Subject, ours

# Seconds between the tokens of a stream.
_PACE = 0.02
#: What is done: the plan, how often the fake Triton sends a token (0: whole answers), and what is counted.
LOADS: Mapping[str, tuple[Plan, float, str]] = MappingProxyType(
    {
        "streams": (Plan("paced", PACED, 640, 1_000_000, ramp=2.0), _PACE, "tokens/s"),
        "streams of a tool call": (
            Plan("tools", PACED_CALL, 512, 1_000_000, ramp=2.0, form="tools"),
            _PACE,
            "tokens/s",
        ),
        "streamed chats of one token": (Plan("short", PACED, 16, 1, ramp=0.5), 0.0, "requests/s"),
        "whole chats of one token": (Plan("short", PACED, 16, 1, ramp=0.5, form="whole"), 0.0, "requests/s"),
        "embeddings": (Plan("short", EMBEDDINGS, 16, 1, ramp=0.5, form="embeddings"), 0.0, "requests/s"),
    }
)
#: Half of the first load, in tokens per second: streams, not in step, that begin anew after 100 tokens.
HALF = Plan("paced", PACED, 320, 100, ramp=2.0, settled=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each load and number of workers."""
    parser = argparse.ArgumentParser(prog="python -m bench.saturation", description="What the service does at most.")
    parser.add_argument("--workers", default="1,2", help="numbers of processes (1,2)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each window (4)")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.workers.split(",")]
    cells = []
    for name, (plan, pace, unit) in LOADS.items():
        for count in counts:
            row = _measured(plan, pace, count, options.seconds)
            done = f"{row.tokens_per_second:,.0f}"
            cells.append([name, str(count), done, unit, written(row.relay_busy), written(row.cpu_us_per_token)])
    print(table(["load", "workers", "", "", "cores", "us each"], cells))
    cells = []
    for name, count in (("through the service", 1), ("without it", 0)):
        row = _measured(HALF, _PACE, count, 2 * options.seconds)
        first = (written(row.first_p50_ms), written(row.first_p99_ms))
        cells.append([name, written(row.relay_busy), *first])
    print(table([f"first tokens of {HALF.streams} streams", "cores", "p50 ms", "p99 ms"], cells))


def _measured(plan: Plan, pace: float, workers: int, seconds: float) -> Row:
    """
    Return what *plan* gives in front of a fake Triton that sends a token every *pace* seconds.

    Without *workers*, the load goes to the fake Triton itself.
    """
    plan = dataclasses.replace(plan, warm=1.0, seconds=seconds)
    port = free_port()
    direct = Target(protocol="generate", host=HOST, port=port)
    with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as folder:
        log = Path(folder) / "triton.log"
        with running([sys.executable, "-m", "bench.fake_triton", str(port), str(pace)], log) as triton:
            wait_until_answers(port, "/v2", log)
            environment = {"TRITON_OPENAI_WORKERS": str(workers)}
            with (
                ours("ours-http", f"http://{HOST}:{port}", Path(folder), environment)
                if workers
                else contextlib.nullcontext(Subject("triton-http", direct))
            ) as subject:
                return row(plan, subject, [measure(plan, subject, triton, direct, Cores())])


if __name__ == "__main__":
    main()
