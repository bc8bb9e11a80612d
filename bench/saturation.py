"""
``python -m bench.saturation``: how much the service does when it is the limit, in front of the fake Triton.

Triton, the service and the load generator share the machine's cores, so the number of cores that the service got stands
beside each figure: 0.95 and more per process is saturation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench.cases import Plan
from bench.fake_triton import EMBEDDINGS
from bench.figures import table, written
from bench.machine import Cores
from bench.measure import measure, row
from bench.messages import Target
from bench.processes import HOST, free_port, running, wait_until_answers
from bench.repository import PACED, PACED_CALL
from bench.subjects import ours

#: What is done: the plan, how often the fake Triton sends a token (0: whole answers), and what is counted.
LOADS: Mapping[str, tuple[Plan, float, str]] = MappingProxyType(
    {
        "streams": (Plan("paced", PACED, 128, 1_000_000, ramp=0.5), 0.002, "tokens/s"),
        "streams of a tool call": (
            Plan("tools", PACED_CALL, 128, 1_000_000, ramp=0.5, form="tools"),
            0.002,
            "tokens/s",
        ),
        "streamed chats of one token": (Plan("short", PACED, 16, 1), 0.0, "requests/s"),
        "whole chats of one token": (Plan("short", PACED, 16, 1, form="whole"), 0.0, "requests/s"),
        "embeddings": (Plan("short", EMBEDDINGS, 16, 1, form="embeddings"), 0.0, "requests/s"),
    }
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each load and number of workers."""
    parser = argparse.ArgumentParser(prog="python -m bench.saturation", description="What the service does at most.")
    parser.add_argument("--workers", default="1,2", help="numbers of processes (1,2)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each window (4)")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.workers.split(",")]
    cells = [[name, str(count), *_measured(name, count, options.seconds)] for name in LOADS for count in counts]
    print(table(["load", "workers", "", "", "cores", "us each"], cells))


def _measured(name: str, workers: int, seconds: float) -> list[str]:
    plan, pace, unit = LOADS[name]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as folder:
        log = Path(folder) / "triton.log"
        with running([sys.executable, "-m", "bench.fake_triton", str(port), str(pace)], log) as triton:
            wait_until_answers(port, "/v2", log)
            environment = {"TRITON_OPENAI_WORKERS": str(workers)}
            with ours("ours-http", f"http://{HOST}:{port}", Path(folder), environment) as subject:
                timed = Plan(plan.case, plan.model, plan.streams, plan.tokens, plan.ramp, 1.0, seconds, form=plan.form)
                outcome = measure(timed, subject, triton, Target(protocol="generate", host=HOST, port=port), Cores())
                found = row(timed, subject, [outcome])
    return [
        f"{found.tokens_per_second:,.0f}",
        unit,
        written(found.relay_busy),
        written(found.cpu_us_per_token),
    ]


if __name__ == "__main__":
    main()
