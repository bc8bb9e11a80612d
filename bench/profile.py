"""
``python -m bench.profile``: where the service's CPU time goes, by function, for streams and for short chats.

With py-spy, which samples from outside, where it is installed and may look into processes; else with cProfile, which
makes calls dearer than they are, and which sees the start of the process too. Triton is the fake one, so that nothing
else needs the processor.
"""

from __future__ import annotations

import argparse
import pstats
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from bench.cases import Plan
from bench.figures import table, written
from bench.machine import Cores
from bench.measure import measure
from bench.messages import Target
from bench.processes import HOST, BenchError, free_port, running, wait_until_answers
from bench.repository import PACED
from bench.subjects import ours

_SAMPLES_A_SECOND = 250
# A thread that waits for work, which py-spy takes for a busy one.
_IDLE = "_worker (concurrent/futures/thread.py)"

#: What is profiled: the plan, and how often the fake Triton sends a token (0: whole answers).
LOADS: Mapping[str, tuple[Plan, float]] = MappingProxyType(
    {
        "streams": (Plan("paced", PACED, 64, 1_000_000, ramp=0.5), 0.02),
        "streamed": (Plan("short", PACED, 4, 1), 0.0),
        "whole": (Plan("short", PACED, 4, 1, form="whole"), 0.0),
    }
)
# Function, share of its own, share with what it calls; in percent.
Line = tuple[str, float, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows of each load."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description="Where the service's CPU time goes.")
    parser.add_argument("--loads", default=",".join(LOADS), help=f"some of {','.join(LOADS)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each profile (5)")
    parser.add_argument("--rows", type=int, default=10, help="how many functions are shown (10)")
    options = parser.parse_args(arguments)
    for name in options.loads.split(","):
        with tempfile.TemporaryDirectory(prefix="triton-openai-profile-") as folder:
            lines = _profile(name, Path(folder), options.seconds)[: options.rows]
        cells = [[function, written(own), written(whole)] for function, own, whole in lines]
        print(f"\n{name}\n{table(['function', '% itself', '% with callees'], cells)}", flush=True)


def _profile(name: str, folder: Path, seconds: float) -> list[Line]:
    plan, pace = LOADS[name]
    port = free_port()
    log = folder / "triton.log"
    output = folder / "profile"
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy:
        prefix = []
    else:
        prefix = [sys.executable, "-m", "cProfile", "-o", str(output)]
    with running([sys.executable, "-m", "bench.fake_triton", str(port), str(pace)], log) as triton:
        wait_until_answers(port, "/v2", log)
        with ours("ours-http", f"http://{HOST}:{port}", folder, prefix=prefix) as subject:
            plan = replace(plan, warm=2.0, seconds=seconds + 1)
            spying = None
            if spy:
                command = [spy, "record", "--pid", str(subject.relay[0]), "--duration", f"{seconds:g}"]
                command += ["--rate", str(_SAMPLES_A_SECOND), "--format", "raw", "--output", str(output)]
                spying = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            measure(plan, subject, triton, Target(protocol="generate", host=HOST, port=port), Cores())
            if spying is not None and spying.wait(30):
                errors = (spying.stderr.read() if spying.stderr else b"").decode(errors="replace")
                raise BenchError(f"py-spy may not look into the service: {errors}")
    if spy:
        return sampled(output.read_text())
    return _traced(output)


def sampled(stacks: str) -> list[Line]:
    """Return the lines of py-spy's *stacks*: on each line the frames, outermost first, and how often they were seen."""
    own = Counter[str]()
    whole = Counter[str]()
    total = 0
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        # "function (file:line)": of one function, whatever the line.
        frames = [frame.rpartition(":")[0] + ")" for frame in stack.split(";")]
        if frames[-1] == _IDLE:
            continue
        total += int(count)
        own[frames[-1]] += int(count)
        whole.update(dict.fromkeys(frames, int(count)))
    return [(name, 100 * times / total, 100 * whole[name] / total) for name, times in own.most_common()]


def _traced(file: Path) -> list[Line]:
    stats = pstats.Stats(str(file))
    functions = stats.get_stats_profile().func_profiles
    total = sum(function.tottime for function in functions.values())
    lines = [
        (
            f"{name} ({Path(function.file_name).name})",
            100 * function.tottime / total,
            100 * function.cumtime / total,
        )
        for name, function in functions.items()
    ]
    return sorted(lines, key=lambda line: -line[1])


if __name__ == "__main__":
    main()
