"""
``python -m tests.engine``: ask the service and vLLM's own server the same, and say in what their answers differ.

The answers are kept in the folder, and the differences with their reasons in ``docs/reference/vllm-differences.md``.
The exit status is 1 if a difference has no known reason, or a reason no difference.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.engine.answers import Answer, ask, differences
from tests.engine.cases import Case, cases
from tests.engine.installation import install
from tests.engine.page import PAGE, written
from tests.engine.reasons import COMPANION, REASONS, Reason, reason_of
from tests.engine.servers import Servers, started

#: By the request's name and the server's: ``vllm``, and the service by the protocol that it speaks to Triton, or by the
#: model behind it.
Recorded = Mapping[str, Mapping[str, Answer]]


def main() -> int:
    """Run it. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("environment"))
    parser.add_argument("--python", default="python3.11", help="an interpreter of version 3.11 (%(default)s)")
    parser.add_argument(
        "--backend",
        default="https://github.com/triton-inference-server/vllm_backend",
        help="URL or folder of the vLLM backend's git repository (%(default)s)",
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="the requests whose name matches this alone")
    parser.add_argument(
        "--behind",
        nargs="+",
        choices=["backend", COMPANION],
        default=["backend", COMPANION],
        help="what the service is in front of (%(default)s)",
    )
    parser.add_argument("--hold", action="store_true", help="keep the servers until Enter is pressed")
    parser.add_argument("--again", action="store_true", help="compare the answers of the last run, without servers")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if re.search(arguments.only, case.name)]
    kept: Path = arguments.folder / "answers.json"
    answers: Recorded = {}
    if kept.exists():
        answers = msgspec.json.decode(kept.read_bytes(), type=dict[str, dict[str, Answer]])
    if arguments.again and (missing := [case.name for case in chosen if case.name not in answers]):
        parser.error(f"The last run has no answers to: {', '.join(missing)}")
    if not arguments.again:
        found = install(arguments.folder, python=arguments.python, backend=arguments.backend)
        logs = found.folder / "run"
        logs.mkdir(exist_ok=True)
        with started(found, logs, arguments.behind) as servers:
            asked = {case.name: _asked(case, servers) for case in chosen}
            answers = {**answers, **{name: {**answers.get(name, {}), **each} for name, each in asked.items()}}
            kept.write_bytes(msgspec.json.encode(answers))
            if arguments.hold:
                input(f"{servers}\nPress Enter to end.")
    return _compare(chosen, answers, whole=not arguments.only)


def _asked(case: Case, servers: Servers) -> Mapping[str, Answer]:
    embeds = isinstance(case.body, Mapping) and case.body.get("model") == "embed"
    print(case.name, flush=True)
    urls = {"vllm": servers.vllm["embed" if embeds else "tiny"], **servers.ours}
    return {name: ask(url, case) for name, url in urls.items()}


def _compare(chosen: Sequence[Case], answers: Recorded, *, whole: bool) -> int:
    """Print the differences, and write the page for a *whole* run. Return the exit status."""
    differing: dict[Reason | None, set[str]] = {}
    for case in chosen:
        theirs = answers[case.name]["vllm"]
        ours = {name: answer for name, answer in answers[case.name].items() if name != "vllm"}
        found: dict[str, dict[str, str]] = {}
        for protocol, answer in ours.items():
            for place, both in differences(answer, theirs):
                found.setdefault(place, {})[protocol] = both
        for place, over in found.items():
            reasons = {name: reason_of(case.name, place, name) for name in over}
            for reason in dict.fromkeys(reasons.values()):
                names = [name for name, own in reasons.items() if own is reason]
                differing.setdefault(reason, set()).add(case.name)
                said = over[names[0]] if reason is None else reason.why
                verdict = "FAILS" if reason is None else "known"
                print(f"{verdict} {case.name} over {' and '.join(names)}: {place}: {said}")
    servers = {name for case in chosen for name in answers[case.name]} - {"vllm"}
    concerning = [reason for reason in REASONS if any(map(reason.concerns, servers))]
    stale = [reason for reason in concerning if reason not in differing] if whole else []
    for reason in stale:
        print(f"STALE {reason}")
    counts = {reason: len(names) for reason, names in differing.items()}
    equal = len(chosen) - len(set().union(*differing.values()))
    # The page tells of all servers.
    if whole and {"http", "grpc", COMPANION} <= servers:
        PAGE.write_text(written(len(chosen), equal, counts), encoding="utf-8")
    print(f"{len(chosen)} requests, {equal} with equal answers, {counts.get(None, 0)} with unknown differences")
    return 1 if None in counts or stale else 0


if __name__ == "__main__":
    sys.exit(main())
