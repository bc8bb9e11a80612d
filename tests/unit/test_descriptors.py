"""The limit of open files."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, {given})
from triton_openai.cli.descriptors import raise_limit
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("given, found", [((128, 900), "900 900"), ((700, 700), "700 700")])
def test_the_limit_is_raised_as_far_as_it_may_be(given: tuple[int, int], found: str) -> None:
    """In a process of its own, which nobody else shares the limit with."""
    program = _PROGRAM.format(given=given)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert found == done.stdout.strip()
