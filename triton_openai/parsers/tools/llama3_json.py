"""Llama 3.1 and later: a bare ``{"name": "f", "parameters": {…}}``, or several joined by ``;``."""

from __future__ import annotations

import re

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class Llama3Json(JsonCalls):
    """
    As Meta's chat templates for Llama 3.1, 3.2, 3.3 and 4 ask for calls: the answer is a call and nothing else, in
    front of which ``<|python_tag|>`` may stand. JSON further on in an answer is the answer's own.
    """

    special_tokens = True
    markers = Markers("<|python_tag|>")
    bare = "{"
    separators = re.compile(r"[\s;,]*")
