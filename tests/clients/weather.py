"""The tool that tests of clients have called, and what they have said about it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

#: What a model writes to call it.
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def get_weather(city: str) -> str:
    """Tell the weather."""
    return f"fine in {city}"


class City(BaseModel):
    """What an answer has to be."""

    name: str
