"""One call as a model writes it with a slip, each time another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def slipping_calls(name: str, arguments: Mapping[str, Any]) -> Sequence[str]:
    """Return twenty texts in the format of Hermes, each with another slip, that all call *name* with *arguments*."""
    whole = json.dumps(arguments)
    call = f'{{"name": "{name}", "arguments": {whole}}}'
    python = repr(dict(arguments))
    unquoted = "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in arguments.items()) + "}"
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    keywords = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    return (
        f"<tool_call>\n{call}",
        f"<tool_call>\n<tool_call>\n{call}\n</tool_call>\n</tool_call>",
        f'<tool_call>\n{{"name": "{name}", "arguments": {whole[:-1]},}}}}\n</tool_call>',
        f"<tool_call>\n{{'name': '{name}', 'arguments': {python}}}\n</tool_call>",
        f"<tool_call>\n{call[:-1]}\n</tool_call>",
        f"<tool_call>\n{call}}}\n</tool_call>",
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(whole)}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "functions.{name}", "arguments": {whole}}}\n</tool_call>',
        f'<tool_call>\n{{name: "{name}", arguments: {unquoted}}}\n</tool_call>',
        f"<tool_call>\n({call[1:-1]})\n</tool_call>",
        f"<tool_call>\n```json\n{call}\n```\n</tool_call>",
        f"<think>I have to look.\n<tool_call>\n{call}\n</tool_call>",
        f"Let me look.\n<tool_call>\n{call}\n</tool_call>\nNow I wait.",
        f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        f"<tool_call>\n{{{call}}}\n</tool_call>",
        f"<tool_call>\n{name}({keywords})\n</tool_call>",
        f'<tool_call>\n{{"name": "{name}", "parameters": {whole}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "{name}" "arguments": {whole}}}\n</tool_call>',
        f'<tool_call>\n{{"function": {{"name": "{name}", "arguments": {whole}}}}}\n</tool_call>',
        f"<tool_call>\n[{call}]\n</tool_call>",
    )
