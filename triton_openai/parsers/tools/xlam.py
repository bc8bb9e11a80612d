"""xLAM: ``[{"name": "f", "arguments": {…}}, …]`` and nothing else."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class Xlam(JsonCalls):
    """
    As Salesforce's xLAM 2 writes calls: the answer is an array of them. Only the name of a tool shows that it is no
    other array. What is tuned from models with a marker of their own may write that.
    """

    markers = Markers("<tool_call>")
    bare = "["
