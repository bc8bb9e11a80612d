"""Command R7B, Command A and later: ``<|START_ACTION|>[{"tool_name": "f", "parameters": {…}}, …]<|END_ACTION|>``."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class Cohere(JsonCalls):
    """
    As Cohere's chat templates write calls. The ``tool_call_id`` that the model gives is a count, which the template
    makes anew from the order of the calls; so the ids are ours.
    """

    special_tokens = True
    markers = Markers("<|START_ACTION|>")
    closing = "<|END_ACTION|>"
    name_keys = frozenset({"tool_name", "name"})
