"""``python -m bench``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from bench import machine, report
from bench.cases import CASES, CROWD, Plan, Row, plans
from bench.chains import Chains, measure_chains
from bench.demo import Demo, measure_demo
from bench.footprint import Footprint, measure_footprint
from bench.measure import measure, row
from bench.messages import Measured
from bench.parsers import ParserRow, measure_parsers
from bench.path import PathRow, measure_path
from bench.processes import BenchError, make_room
from bench.repository import build_repository
from bench.subjects import SUBJECTS, Subject, can_trace, control, nginx_path
from triton_openai.errors import ConfigurationError
from triton_openai.tritonserver.embedded import EmbeddedTriton

_STREAMS = (1, 32, 128, 256)
_QUICK_STREAMS = (1, 128)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit status says whether it could be measured, not whether the aims are reached."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        measured = _run(options)
    except (BenchError, ConfigurationError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130
    if measured:
        return 0
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="What the service costs next to Triton alone.")
    parser.add_argument("--cases", type=_names(CASES), default=list(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--subjects", type=_names(tuple(SUBJECTS)), default=list(SUBJECTS),
                        help=f"some of {','.join(SUBJECTS)}")  # fmt: skip
    parser.add_argument("--streams", type=_counts, default=None, help="numbers of streams, as in 1,32,128,256")
    parser.add_argument("--seconds", type=float, default=None, help="length of a measured window (3; quick: 2)")
    parser.add_argument(
        "--rounds", type=int, default=None, help="windows for each number, taken in turns (2; quick: 1)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer streams and shorter windows: a first look")
    parser.add_argument("--json", type=Path, default=Path("bench-results.json"), help="where the numbers go")
    return parser


def _run(options: argparse.Namespace) -> bool:
    """Return whether anything was measured."""
    if "crowd" in options.cases:
        make_room(3 * CROWD)
    facts = machine.facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    cores = machine.place(machine.available())
    names = list(options.subjects)
    if "nginx" in names and nginx_path() is None:
        print("nginx is not installed, so it is left out and nothing is compared with it.")
        names.remove("nginx")
    if "ours-traced" in names and not can_trace():
        print("The extra otlp is not installed, so traces are left out.")
        names.remove("ours-traced")
    streams = options.streams or (_QUICK_STREAMS if options.quick else _STREAMS)
    seconds = options.seconds or (2.0 if options.quick else 3.0)
    rounds = options.rounds or (1 if options.quick else 2)
    rows: list[Row] = []
    parsers: list[ParserRow] = []
    paths: list[PathRow] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triton-openai-bench-")))
        with machine.pinned(cores.triton):
            triton = EmbeddedTriton(model_repository=build_repository(folder / "models"), environment=os.environ)
            stack.callback(triton.stop)
            triton.start()
        with machine.pinned(cores.relay):
            subjects = [stack.enter_context(SUBJECTS[name](name, triton, folder)) for name in names]
        stack.enter_context(_blaming(triton))
        for plan in plans(options.cases, streams, seconds, rounds, quick=options.quick):
            taking_part = [subject for subject in subjects if subject.name in plan.subjects]
            _measure_all(plan, taking_part, triton, cores, rows)
        if "path" in options.cases:
            for name, url in (("ours-http", triton.http_url), ("ours-grpc", triton.grpc_url)):
                paths += measure_path(url, name)
    for path in paths:
        print(report.path_line(path))
    chains = None
    if "chains" in options.cases:
        chains = measure_chains()
    footprint = None
    if "footprint" in options.cases:
        footprint = measure_footprint()
    if "parsers" in options.cases:
        for parser in measure_parsers(quick=options.quick):
            parsers.append(parser)
            print(report.parser_line(parser), flush=True)
    demo = None
    if "demo" in options.cases:
        demo = measure_demo()
    print(f"\n{report.render(rows, parsers, paths, footprint, demo, chains)}")
    _write(options.json, facts, cores, rows, parsers, paths, footprint, demo, chains)
    return bool(rows or parsers or paths or footprint or demo or chains)


@contextlib.contextmanager
def _blaming(triton: EmbeddedTriton) -> Iterator[None]:
    """Add what Triton has said: a relay's complaint may be only the consequence."""
    try:
        yield
    except BenchError as error:
        status = triton.poll()
        if status is None:
            state = "still runs"
        else:
            state = f"has ended with status {status}"
        raise BenchError(f"{error}\nTriton {state}; the end of its log:\n{triton.log_tail(20)}") from error


def _measure_all(
    plan: Plan, subjects: Sequence[Subject], triton: EmbeddedTriton, cores: machine.Cores, rows: list[Row]
) -> None:
    assert triton.pid is not None
    outcomes: dict[str, list[Measured]] = {subject.name: [] for subject in subjects}
    for turn in range(plan.rounds):
        # There and back again: what changes over time evens out.
        for subject in subjects if turn % 2 == 0 else reversed(subjects):
            try:
                outcome = measure(plan, subject, triton.pid, control(triton), cores)
            except BenchError as error:
                # Many minutes of measuring are not to be lost to one hiccup; a second one is no hiccup.
                print(f"{error}\n... once more", file=sys.stderr, flush=True)
                outcome = measure(plan, subject, triton.pid, control(triton), cores)
            outcomes[subject.name].append(outcome)
    for subject in subjects:
        rows.append(row(plan, subject, outcomes[subject.name]))
        print(report.line(rows[-1], rows), flush=True)


def _write(
    path: Path,
    facts: dict[str, str | int | float],
    cores: machine.Cores,
    rows: Sequence[Row],
    parsers: Sequence[ParserRow],
    paths: Sequence[PathRow],
    footprint: Footprint | None,
    demo: Demo | None,
    chains: Chains | None,
) -> None:
    aims = [
        {"aim": aim.text, "value": aim.value, "rounds": aim.rounds, "limit": aim.limit, "reached": aim.reached}
        for aim in report.aims(rows, parsers, paths, footprint, demo, chains)
    ]
    whole = {
        "machine": facts,
        "cores": {"triton": cores.triton, "relay": cores.relay, "client": cores.client},
        "aims": aims,
        "rows": list(rows),
        "parsers": list(parsers),
        "path": list(paths),
        "footprint": footprint,
        "demo": demo,
        "chains": chains,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    print(f"\nEverything is in {path}.")


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return read


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("at least one stream")
    return counts


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
