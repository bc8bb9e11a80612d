"""Which process of pytest-xdist runs which tests."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Files that share processes, which one of several workers starts for all of them: by how their names begin.
_TOGETHER = (
    ("tests/clients/",),
    ("tests/fleet/",),
    # Those that leave the services as they were, and those that run services of their own. Together they would be the
    # last to end.
    ("tests/faults/test_clients.py", "tests/faults/test_connections.py", "tests/faults/test_triton.py"),
    tuple(f"tests/faults/test_{name}.py" for name in ("batches", "log", "responses", "workers")),
    # A Triton with recognizers of speech.
    tuple(f"tests/conformance/test_{name}.py" for name in ("realtime", "realtime_state", "transcriptions")),
    # PostgreSQL, and an S3 server for the first two.
    ("tests/unit/api/test_uploaded_files.py", "tests/unit/batches/"),
    ("tests/unit/api/test_stored_chats.py", "tests/unit/storage/"),
)


class _Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives each file to one worker, and files that share processes to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        shared = next(filter(nodeid.startswith, _TOGETHER), None)
        return str(super()._split_scope(nodeid)) if shared is None else shared[0]

    def remove_node(self, node: Any) -> str | None:
        """
        Give what *node* has not run to others, and return the test that has ended its process, if one has.

        xdist would run that test again and again, in one process after the other.
        """
        workload = self.assigned_work.pop(node)
        pending = [(unit, name) for unit in workload.values() for name, completed in unit.items() if not completed]
        if not pending:
            return None
        crashed: str
        unit, crashed = pending[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Give *node* more to run. One that was started in place of another first has to collect the tests."""
        if node in self.registered_collections:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Let files that share processes run together."""
    return _Scheduling(config, log)
