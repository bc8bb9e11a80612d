"""Objects of JSON whose end was cut."""

from __future__ import annotations

from typing import Any

from tests.cases import every_case
from triton_openai.api.cut_json import CutObject, read_cut_object

CASES = [
    ("", {}, ""),
    (' {"a', {}, ""),
    ('{"a": ', {}, ""),
    ('{"a": "b', {}, "b"),
    ('{"a": "b"', {}, "b"),
    ('{"a": "b", ', {"a": "b"}, None),
    ('{"a": 1, "b": "c\\n\\u00', {"a": 1}, "c\n"),
    ('{"a": 12', {}, None),
    ('{"a": {"b": 1}, "c": [1, 2', {"a": {"b": 1}}, None),
    ('{"a": "\\ud83d\\ude00\\ud83d', {}, "😀"),
    ('{"a": "\\ude00b', {}, None),
    ('{"a": "\\ude00b"}', {"a": "\ufffdb"}, None),
    ('{"\\ud83d": [{"b": "\\ud83d\\ude00\\ud83d"}], "c": 1', {"\ufffd": [{"b": "😀\ufffd"}]}, None),
    ('{"a": 1, "b": NaN, "c": -Infinity}', {"a": 1}, None),
    ('{"a": "b\x00', {}, None),
    ("[1, 2", {}, None),
    ("text", {}, None),
    ("{" * 5000, {}, ""),
    ('{"a": ' * 5000, {}, None),
]


@every_case("arguments, members, text", CASES)
def test_what_is_left_of_an_object(arguments: str, members: dict[str, Any], text: str | None) -> None:
    """Members that are whole, and the text behind them as far as it came."""
    assert CutObject(members, text) == read_cut_object(arguments)
