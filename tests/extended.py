"""
Chooses the tests that ``make test`` leaves to ``make test-all``, and marks them as ``extended``.

Those are the tests of clients, of the image and of the wheel, and the variants that ask the same of another transport,
store or program. Text streams use HTTP where Triton has an HTTP address and a gRPC address, so gRPC is the other
transport. The tests of ``triton/`` itself run over both. A test that is left out for another reason has the mark
itself.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

# Clients, and what is built of the package: that takes half a minute.
_BEGINNINGS = ("tests/clients/", "tests/integration/test_image.py", "tests/integration/test_wheel.py")
_FIXTURES = frozenset({"bucket", "pgbouncer", "postgresql", "s3", "shared"})
_TRANSPORTS = frozenset({"grpc", "grpcs"})
_STORES = frozenset({"postgresql", "several machines"})


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    config.addinivalue_line("markers", "extended: left to `make test-all`")
    config.addinivalue_line("markers", "face: about what an API reads and renders; one transport is enough")


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
    if not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return True
    if item.nodeid.startswith("tests/unit/"):
        return _has(item, _STORES)
    return _has(item, _STORES | _TRANSPORTS)


def _has(item: pytest.Item, variants: Collection[str]) -> bool:
    """Return whether a parameter of the test is one of *variants*."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return False
    return any(isinstance(value, str) and value in variants for value in callspec.params.values())
