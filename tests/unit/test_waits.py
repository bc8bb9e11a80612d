"""A wait of a test ends only what hangs: a busy machine takes its time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.syntax_trees import nodes

ROOT = Path(__file__).resolve().parents[2]
# Seconds that a machine on which sixty processes want each processor may take for what takes one by itself.
_SHORTEST = 60
# What waits, and which of its arguments is the limit.
_WAITS = {
    "asyncio.timeout": 0,
    "asyncio.wait_for": 1,
    "communicate": None,
    "create_connection": 1,
    "join": 0,
    "result": 0,
    "run": None,
    "settimeout": 0,
    "urlopen": None,
    "until": 1,
    "wait": 0,
    "wait_for": 1,
    "wait_for_end": 1,
}
# What calls its first argument with the others.
_CALLERS = {"asyncio.to_thread", "partial", "functools.partial"}
# Waits that something else follows when they end.
_TRIED_AGAIN = {
    "tests/engine/servers.py": "the server is asked again",
    "tests/faults/batch_soak.py": "a pause",
    "tests/faults/test_companion.py": "the question is asked again",
    "tests/store_fixture.py": "the port is tried again",
    "tests/tls_fixture.py": "what is still open then is left",
}


def _dotted(node: ast.expr) -> str:
    """Return the name that *node* is; what is no name within it is left out. `ast.unparse` takes ten times longer."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _limit(call: ast.Call) -> float | None:
    """Return the limit of a wait in seconds, if *call* is one and says it as a number."""
    name = _dotted(call.func)
    arguments = call.args
    if name in _CALLERS and arguments:
        name = _dotted(arguments[0])
        arguments = arguments[1:]
    if name not in _WAITS:
        name = name.rpartition(".")[2]
    if name not in _WAITS:
        return None
    place = _WAITS[name]
    limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
    if place is not None:
        limits += arguments[place : place + 1]
    for limit in limits:
        if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float):
            return limit.value
    return None


def _short_waits() -> Iterator[tuple[str, int, float]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in nodes(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            limit = _limit(node)
            # What is shorter than a second is to end.
            if limit is not None and 1 <= limit < _SHORTEST:
                yield name, node.lineno, limit


def test_waits_are_long() -> None:
    """A limit that a busy machine passes by fails a test now and then."""
    found = list(_short_waits())
    assert [] == [wait for wait in found if wait[0] not in _TRIED_AGAIN]
    assert _TRIED_AGAIN.keys() == {name for name, _, _ in found}
