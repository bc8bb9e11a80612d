"""Which tests `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from tests.cases import every_case
from tests.extended import FEW, is_extended

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.Pytester]:
    """Tests that are chosen as those of this suite are; the profile of this run is set again afterwards."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    profile = hypothesis.settings.get_current_profile_name()
    pytester.makeconftest('pytest_plugins = ["tests.extended"]')
    clients = pytester.mkdir("tests") / "clients"
    clients.mkdir()
    (clients / "test_client.py").write_text("def test_client():\n    pass\n")
    pytester.makepyfile(
        """
        import pytest
        from hypothesis import given, strategies

        from tests.extended import examples, sample

        tried = []

        def test_other():
            pass

        @given(strategies.integers())
        def test_property(number):
            tried.append(number)

        def test_how_often():
            print(f"tried {len(tried)}")

        @pytest.mark.sampled
        def test_sampled():
            print(f"sampled {examples(300)} {examples(300, few=7)} {examples(5)} {len(sample(range(300), few=7))}")
        """
    )
    yield pytester
    hypothesis.settings.load_profile(profile)


def _run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    result = suite.runpytest_inprocess("-p", "no:cacheprovider", "--import-mode=importlib", "-s", *arguments)
    assert result.ret == pytest.ExitCode.OK
    return result


@every_case(
    "nodeid, fixtures, parameter, extended",
    [
        ("tests/clients/test_openai.py::test_a", (), None, True),
        ("tests/integration/test_image.py::test_a", (), None, True),
        ("tests/conformance/test_answers.py::test_a", ("proxy",), "http", False),
        ("tests/conformance/test_errors.py::test_a", ("proxy",), "grpc", True),
        ("tests/integration/test_tls.py::test_a", (), "grpcs", True),
        # What is tested there is the transport.
        ("tests/unit/triton/test_connection.py::test_a", (), "grpc", False),
        ("tests/unit/storage/test_store.py::test_a", ("store_url",), "file", False),
        ("tests/unit/storage/test_store.py::test_a", ("store_url",), "postgresql", True),
        ("tests/unit/batches/test_batch_runner.py::test_a", ("place",), "several machines", True),
        ("tests/unit/batches/test_batch_runner.py::test_a", ("postgresql",), None, True),
        ("tests/unit/test_docs.py::test_a", (), None, False),
    ],
)
def test_what_is_left_out(nodeid: str, fixtures: tuple[str, ...], parameter: str | None, extended: bool) -> None:
    """Clients, the other transport and the stores of several machines are left out, and nothing else."""
    item: Any = SimpleNamespace(nodeid=nodeid, fixturenames=fixtures, get_closest_marker=lambda name: None)
    if parameter is not None:
        item.callspec = SimpleNamespace(params={"any": parameter})

    assert extended is is_extended(item)


def test_make_test_tries_a_few_examples(suite: pytest.Pytester) -> None:
    """Without the extended tests, property tests try a few examples, and clients are not even imported."""
    result = _run(suite, "-m", "not extended")

    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines([f"*tried {FEW}*", f"*sampled {FEW} 7 5 7*"])


def test_the_rest_tries_all_examples(suite: pytest.Pytester) -> None:
    """What runs beside `make test` tries all examples again, so that both together are all tests."""
    result = _run(suite, "-m", "extended")

    # Of the two others, neither is extended.
    result.assert_outcomes(passed=3, deselected=2)
    result.stdout.fnmatch_lines(["*sampled 300 300 5 300*"])


def test_all_tests_try_all_examples(suite: pytest.Pytester) -> None:
    """Where nothing is left out, all tests and all examples run."""
    result = _run(suite)

    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["*tried 100*", "*sampled 300 300 5 300*"])
