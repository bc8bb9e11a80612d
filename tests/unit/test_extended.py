"""Which tests `make test` leaves to `make test-all`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.cases import every_case
from tests.extended import is_extended


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
    item: Any = SimpleNamespace(nodeid=nodeid, fixturenames=fixtures)
    if parameter is not None:
        item.callspec = SimpleNamespace(params={"any": parameter})

    assert extended is is_extended(item)
