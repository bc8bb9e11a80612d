"""Results stand behind their calls, whatever came in between, and finding them takes linear time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.cases import every_case
from triton_openai.prompts.results import results_behind_calls
from triton_openai.prompts.turns import TurnRules, fit_turns

Messages = list[dict[str, Any]]


def said(role: str, text: str) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": text}


def call(*ids: str) -> dict[str, Any]:
    """Return a turn with calls."""
    calls = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call_id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}


ONE = said("user", "one")
TWO = said("user", "two")
NOTE = said("system", "note")
_ORDERS: dict[str, tuple[Messages, Messages]] = {
    "the user spoke while it ran": ([ONE, call("a"), TWO, result("a")], [ONE, call("a"), result("a"), TWO]),
    "a system message in between": ([ONE, call("a"), NOTE, result("a"), TWO], [ONE, call("a"), result("a"), NOTE, TWO]),
    "two turns at once": (
        [ONE, call("a"), TWO, call("b"), result("b"), result("a")],
        [ONE, call("a"), result("a"), TWO, call("b"), result("b")],
    ),
    "an id that comes again": (
        [ONE, call("a"), result("a"), TWO, call("a"), result("a")],
        [ONE, call("a"), result("a"), TWO, call("a"), result("a")],
    ),
    "a result of nobody": ([ONE, result("x"), call("a"), result("a")], [ONE, result("x"), call("a"), result("a")]),
    "a result at the beginning": ([result("x"), ONE], [result("x"), ONE]),
    "two results of one call": ([ONE, call("a"), result("a"), result("a")], [ONE, call("a"), result("a"), result("a")]),
}


@every_case("case", _ORDERS)
def test_results_follow_their_calls(case: str) -> None:
    """A result stands behind the turn that made its call, and all else keeps its order."""
    messages, ordered = _ORDERS[case]
    assert ordered == results_behind_calls(messages)


def test_results_without_ids() -> None:
    """Results without ids get those of the calls, in order."""
    nameless = said("tool", "x")
    ordered = results_behind_calls([ONE, call("a", "b"), nameless, nameless, nameless])
    assert ["a", "b", None] == [message.get("tool_call_id") for message in ordered[2:]]


class Id(str):
    """An id that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Id.comparisons += 1
        return str.__eq__(self, str(other))

    __hash__ = str.__hash__


def _split(messages: Sequence[dict[str, Any]]) -> Messages:
    return fit_turns(messages, TurnRules(splits_calls=True))


@every_case("function", [results_behind_calls, _split])
@every_case("prefix", ["", "x"])
def test_many_results(function: Callable[[Messages], Messages], prefix: str) -> None:
    """Each result is found with a few comparisons, in whatever order they come, and whether they have calls or not."""
    ids = [f"call_{number}" for number in range(500)]
    # With the prefix, they belong to no call.
    results = [result(Id(prefix + call_id)) for call_id in reversed(ids)]
    Id.comparisons = 0
    ordered = function([ONE, call(*map(Id, ids)), *results])
    assert Id.comparisons <= 10 * len(ids)
    assert len(results) == sum(message["role"] == "tool" for message in ordered)
