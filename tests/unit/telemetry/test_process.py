"""The limit of open files."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import structlog

from triton_openai.telemetry.process import DescriptorWatch

_PROGRAM = """
import resource
from triton_openai.cli.serve import raise_file_limit
for given in (128, 900), (700, 700):
    resource.setrlimit(resource.RLIMIT_NOFILE, given)
    raise_file_limit()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    """The limit of descriptors is raised as far as it may be, in a process that nobody shares it with."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=True)

    assert ["900 900", "700 700"] == done.stdout.splitlines()


@pytest.mark.parametrize(
    "limit, number, warns",
    [(1000, 949, False), (1000, 950, True), (64, 55, False), (64, 56, True), (resource.RLIM_INFINITY, 10**6, False)],
)
def test_a_word_before_there_are_none(limit: int, number: int, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning comes when few descriptors are left, and not for every client that finds it so."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    watch = DescriptorWatch()
    with structlog.testing.capture_logs() as lines:
        watch.check(3, 0.0)
        watch.check(number, 0.0)
        watch.check(number, 59.0)
        assert warns == len(lines)
        watch.check(number, 60.0)

    assert 2 * warns == len(lines)
