# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""The tags of all formats: what a model may put around a call that it writes in another's form."""

from __future__ import annotations

import re

from triton_openai.parsers.reader import Markers

#: What opens a call, or several.
OPENINGS = (
    "<tool_call>", "<tool_calls>", "<seed:tool_call>", "<minimax:tool_call>", "<longcat_tool_call>",
    "<function_calls>", "<function_call>", "<TOOLCALL>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>",
    "<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>", "<|tool_call_start|>",
    "<|python_tag|>", "<|python_start|>", "<|tool_call>", "<start_function_call>", "<|START_ACTION|>",
    "<|action_start|>", "<|tool_call|>", "[TOOL_CALLS]", "<|tools_prefix|>", "<|function_call|>",
    "function call<|role_sep|>", "<dots_function_call>", "<tool_calls:opensource>", "<tool_call:opensource>",
    "<atem:function_calls>", "<|open|>tools<|sep|>", "]<]minimax[>[<tool_call>", "<tools>",
)  # fmt: skip
#: What ends a call, or several.
CLOSINGS = (
    "</tool_call>", "</tool_calls>", "</seed:tool_call>", "</minimax:tool_call>", "</longcat_tool_call>",
    "</function_calls>", "</function_call>", "</TOOLCALL>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜tool_calls_end｜>", "<｜tool_call_end｜>",
    "<|tool_calls_section_end|>", "<|tool_call_section_end|>", "<|tool_call_end|>", "<|python_end|>", "<tool_call|>",
    "<end_function_call>", "<|END_ACTION|>", "<|action_end|>", "<|tools_suffix|>", "<|message_sep|>",
    "</dots_function_call>", "</tool_calls:opensource>", "</tool_call:opensource>", "<end_of_tool_call:opensource>",
    "</atem:function_calls>", "<|close|>tools<|sep|>", "]<]minimax[>[</tool_call>", "</tools>",
    "<|/tool_call|>",
)  # fmt: skip
#: What opens calls of models whose own format is another: the tags that are no tokens, and those of widespread models.
COMMON_OPENINGS = (
    "<tool_call>", "<tool_calls>", "<function_call>", "<function_calls>", "<TOOLCALL>", "<function=", '<invoke name="',
    "<|python_tag|>", "<|tool_call|>", "<tools>",
)  # fmt: skip
COMMON_CLOSINGS = (
    "</tool_call>",
    "</tool_calls>",
    "</function_call>",
    "</function_calls>",
    "</TOOLCALL>",
    "</tools>",
    "<|/tool_call|>",
)
#: What models write behind a call once too often, or as the end of their turn; only there it is no text.
STRAYS_AFTER_CALLS = (
    "</function>", "</invoke>", "</tool>", "</tool_response>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>",
    "<|END_OF_TURN_TOKEN|>", "<|observation|>", "<|tool_response>",
)  # fmt: skip
#: What ends a message of gpt-oss.
MESSAGE_ENDS = ("<|call|>", "<|end|>", "<|return|>")
#: Who a message is for, in its header; the header's text, and its most characters.
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
HEADER_TEXT = re.compile(r"[^<]*")
MAX_HEADER = 400
CLOSING_MARKERS = Markers(*CLOSINGS, *MESSAGE_ENDS)
