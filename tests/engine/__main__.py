"""
``python -m tests.engine``: ask the service and vLLM's own server the same, and say in what their answers differ.

The exit status is 1 if a difference has no known reason.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tests.engine.answers import ask, differences
from tests.engine.cases import Case, cases, reason
from tests.engine.installation import install
from tests.engine.servers import Servers, started


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
    parser.add_argument("--hold", action="store_true", help="keep the servers until Enter is pressed")
    arguments = parser.parse_args()
    found = install(arguments.folder, python=arguments.python, backend=arguments.backend)
    logs = found.folder / "run"
    logs.mkdir(exist_ok=True)
    with started(found, logs) as servers:
        chosen = [case for case in cases() if re.search(arguments.only, case.name)]
        failed = sum([_compare(case, servers) for case in chosen])
        print(f"{len(chosen)} requests over {' and '.join(servers.ours)}; {failed} with unknown differences")
        if arguments.hold:
            input(f"{servers}\nPress Enter to end.")
    return 1 if failed else 0


def _compare(case: Case, servers: Servers) -> bool:
    """Print in what the answers to *case* differ. Return whether one does without a known reason."""
    theirs = ask(servers.vllm["embed" if case.body["model"] == "embed" else "tiny"], case.path, case.body)
    found: dict[tuple[str, str], list[str]] = {}
    for protocol, url in servers.ours.items():
        for difference in differences(ask(url, case.path, case.body), theirs):
            found.setdefault(difference, []).append(protocol)
    unknown = False
    for (place, both), protocols in found.items():
        why = reason(case, place)
        unknown |= why is None
        over = "" if len(protocols) == len(servers.ours) else f" over {' and '.join(protocols)}"
        print(f"{'known' if why else 'FAILS'} {case.name}{over}: {place}: {why or both}", flush=True)
    return unknown


if __name__ == "__main__":
    sys.exit(main())
