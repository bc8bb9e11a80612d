"""
Chooses the tests that ``make test`` leaves to ``make test-all``, and marks them as ``extended``.

Those are the tests of clients, of the image and of the wheel, and the variants that ask the same of another transport,
store or program. Text streams use HTTP where Triton has an HTTP address and a gRPC address, so gRPC is the other
transport. The tests of ``triton/`` itself run over both. A test that is left out for another reason has the mark
itself.

Property tests, and tests with the mark ``sampled``, run in both: in ``make test`` with a few of their examples, and
in ``make test-all`` with all. See :func:`examples`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

T = TypeVar("T")

# Clients, and what is built of the package: that takes half a minute.
_BEGINNINGS = ("tests/clients/", "tests/integration/test_image.py", "tests/integration/test_wheel.py")
#: How many examples of a property `make test` tries.
FEW = 20
_ALL = "suite"
_SAMPLE = "sample"
# A slow machine fails no test, and each run tries the same examples.
hypothesis.settings.register_profile(
    _ALL, deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(_SAMPLE, hypothesis.settings.get_profile(_ALL), max_examples=FEW)
_FIXTURES = frozenset({"bucket", "pgbouncer", "postgresql", "s3", "shared"})
_TRANSPORTS = frozenset({"grpc", "grpcs"})
_STORES = frozenset({"postgresql", "several machines"})


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known, and choose how many examples the property tests try."""
    config.addinivalue_line("markers", "extended: left to `make test-all`")
    config.addinivalue_line("markers", "sampled: runs a few of its examples in `make test`, all in `make test-all`")
    config.addinivalue_line("markers", "face: about what an API reads and renders; one transport is enough")
    profile = _ALL
    if config.option.markexpr == "not extended":
        profile = _SAMPLE
    hypothesis.settings.load_profile(profile)


def is_sample() -> bool:
    """Return whether this run tries only a few examples: `make test` does, which leaves the extended tests out."""
    return hypothesis.settings.get_current_profile_name() == _SAMPLE


def examples(count: int, few: int = FEW) -> int:
    """
    Return how many of *count* examples a test tries in this run: all of them, or *few* in `make test`.

    A test that is no property test needs the mark ``sampled`` too.
    """
    if is_sample():
        return min(count, few)
    return count


def sample(items: Sequence[T], few: int = FEW) -> Sequence[T]:
    """Return *items*, or in `make test` at most *few* of them from all parts. The test needs the mark ``sampled``."""
    count = examples(len(items), few)
    if count == len(items):
        return items
    return items[:: math.ceil(len(items) / count)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """
    Leave files out that have extended tests only.

    To import the clients takes a second of CPU time, in each of pytest's processes.
    """
    if not is_sample() or not collection_path.is_relative_to(config.rootpath):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    if f"{path}/".startswith(_BEGINNINGS) or path.startswith(_BEGINNINGS):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Mark tests before pytest selects by marks.

    A face is asked over one transport: `tests/conformance/test_answers.py` compares the bytes of both.
    """
    repeated = [item for item in items if item.get_closest_marker("face") and _has(item, _TRANSPORTS)]
    if repeated:
        config.hook.pytest_deselected(items=repeated)
        left_out = set(repeated)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if is_extended(item):
            item.add_marker(pytest.mark.extended)


def is_extended(item: pytest.Item) -> bool:
    """Return whether `make test` leaves the test out."""
    if item.nodeid.startswith(_BEGINNINGS):
        return True
    if not is_sample() and _is_sampled(item):
        return True
    if not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return True
    if item.nodeid.startswith("tests/unit/"):
        return _has(item, _STORES)
    return _has(item, _STORES | _TRANSPORTS)


def _is_sampled(item: pytest.Item) -> bool:
    """Return whether `make test` tries only a few examples of the test."""
    if item.get_closest_marker("sampled") is not None:
        return True
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def _has(item: pytest.Item, variants: Collection[str]) -> bool:
    """Return whether a parameter of the test is one of *variants*."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return False
    return any(isinstance(value, str) and value in variants for value in callspec.params.values())
