"""The parser of a choice: which stages it has, which ids its calls get, and when a call counts as cut."""

from __future__ import annotations

from typing import Any

import pytest

from triton_openai.api.chat import make_parser
from triton_openai.api.tools import plan
from triton_openai.chat.parsers import Parsers
from triton_openai.text.answer import AnswerParser
from triton_openai.text.tools.events import Content, Event, ToolCallStart
from triton_openai.text.tools.hermes import Hermes
from triton_openai.text.tools.mistral import Mistral

TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_forced_calls_have_ids_of_the_family(choice: Any) -> None:
    """Mistral's templates take nine letters and digits, also for calls that the backend was held to."""
    wanted = plan(tools=TOOLS, tool_choice=choice, functions=None, function_call=None, parallel=None)
    text = '[{"name": "now", "parameters": {}}]' if choice == "required" else "{}"
    lengths = []
    for tools in (Mistral, Hermes, None):
        parser = make_parser(Parsers(tools=tools), wanted, "")
        assert parser is not None
        (start, *_) = parser.feed(text)
        assert isinstance(start, ToolCallStart)
        lengths.append(len(start.id))

    assert lengths == [9, 29, 29]


@pytest.mark.parametrize(
    "text,parallel,cut",
    [
        (CALL, True, False),
        (CALL[:-15], True, True),
        (CALL[:-12], True, False),
        (CALL + CALL[:-15], True, True),
        # The call that was cut is not passed on.
        (CALL + CALL[:-15], False, False),
        ("no call", True, False),
    ],
)
def test_a_cut_call(text: str, parallel: bool, cut: bool) -> None:
    """A call is cut when the text ends before its arguments do, not when only markup behind them is missing."""
    parser = AnswerParser(None, Hermes({"now": {}}), parallel=parallel)
    parser.feed(text)
    parser.flush()

    assert cut is parser.cut


def test_a_third_partys_parser() -> None:
    """A parser that knows nothing of cuts is believed to have found whole calls."""

    class Plain:
        special_tokens = False

        def feed(self, text: str) -> list[Event]:
            return [Content(text)]

        def flush(self) -> list[Event]:
            return []

    parser = AnswerParser(None, Plain())  # type: ignore[arg-type]
    parser.feed("x")
    parser.flush()

    assert not parser.cut
