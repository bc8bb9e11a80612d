# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""
The tool parsers by themselves, in this process: what a character of a call's arguments costs, in short and long calls.

Through the stage that the service has for a chat's answer, in pieces of the size of a token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from bench.processes import BenchError
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import ToolCallArguments
from triton_openai.parsers.parser_registry import TOOL_PARSERS

KB = 1000
#: Characters of the arguments.
SIZES = (64 * KB, 256 * KB, 1000 * KB)
QUICK_SIZES = SIZES[:2]
# As long as an average token of English.
_PIECE = "word"
# The shortest takes some milliseconds, in which much may come between: the best of several turns counts.
_TURNS = 3
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}

#: For each parser, what stands before and behind the one long argument of a call.
CALLS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "apertus": ('<|tools_prefix|>[{"f": {"city": "', '"}}]<|tools_suffix|>'),
        "gigachat3": ('function call<|role_sep|>\n{"name": "f", "arguments": {"city": "', '"}}'),
        "hy_v3": (
            "<tool_calls><tool_call>f<tool_sep><arg_key>city</arg_key><arg_value>",
            "</arg_value></tool_call></tool_calls>",
        ),
        "hy_v3_opensource": (
            "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource>"
            "<arg_key:opensource>city</arg_key:opensource><arg_value:opensource>",
            "</arg_value:opensource></tool_call:opensource></tool_calls:opensource>",
        ),
        "muse_glimmer": (
            '<atem:function_calls><atem:invoke name="f"><atem:parameter name="city">',
            "</atem:parameter></atem:invoke></atem:function_calls>",
        ),
        "kimi_k3": (
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
            '<|open|>argument key="city" type="string"<|sep|>',
            "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        "minimax_m3": (
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">\n]<]minimax[>[<city>',
            "]<]minimax[>[</city>\n]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        ),
        "dots": ('<dots_function_call>{"name": "f", "arguments": {"city": "', '"}}</dots_function_call>'),
        "hermes": ('<tool_call>{"name": "f", "arguments": {"city": "', '"}}</tool_call>'),
        "llama3_json": ('{"name": "f", "parameters": {"city": "', '"}}'),
        "mistral": ('[TOOL_CALLS]f[ARGS]{"city": "', '"}'),
        "qwen3_coder": ("<tool_call><function=f><parameter=city>", "</parameter></function></tool_call>"),
        "openai": ('<|channel|>commentary to=functions.f<|message|>{"city": "', '"}<|call|>'),
        "deepseek_v3": ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "', '"}<｜tool▁call▁end｜>'),
        "deepseek_v32": (
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="city" string="true">',
            "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        ),
        "glm45": ("<tool_call>f\n<arg_key>city</arg_key><arg_value>", "</arg_value></tool_call>"),
        "kimi_k2": (
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"city": "',
            '"}<|tool_call_end|>',
        ),
        "minimax_m2": ('<minimax:tool_call><invoke name="f"><parameter name="city">', "</parameter></invoke>"),
        "pythonic": ("[f(city='", "')]"),
        "lfm2": ("<|tool_call_start|>[f(city='", "')]"),
        "olmo3": ("<function_calls>f(city='", "')</function_calls>"),
        "nemotron_json": ('<TOOLCALL>[{"name": "f", "arguments": {"city": "', '"}}]</TOOLCALL>'),
        "granite": ('<|tool_call|>[{"name": "f", "arguments": {"city": "', '"}}]'),
        "phi4_mini_json": ('functools[{"name": "f", "arguments": {"city": "', '"}}]'),
        "granite4": ('<tool_call>{"name": "f", "arguments": {"city": "', '"}}</tool_call>'),
        "granite_20b_fc": ('<function_call> {"name": "f", "arguments": {"city": "', '"}}'),
        "gemma4": ('<|tool_call>call:f{city:<|"|>', '<|"|>}<tool_call|>'),
        "functiongemma": ("<start_function_call>call:f{city:<escape>", "<escape>}<end_function_call>"),
        "seed_oss": ("<seed:tool_call><function=f><parameter=city>", "</parameter></function></seed:tool_call>"),
        "cohere_command3": ('<|START_ACTION|>[{"tool_name": "f", "parameters": {"city": "', '"}}]<|END_ACTION|>'),
        "jamba": ('<tool_calls>[{"name": "f", "arguments": {"city": "', '"}}]</tool_calls>'),
        "step3": (
            "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="f"><steptml:parameter name="city">',
            "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        ),
        "internlm": ('<|action_start|><|plugin|>{"name": "f", "parameters": {"city": "', '"}}<|action_end|>'),
        "longcat": ('<longcat_tool_call>{"name": "f", "arguments": {"city": "', '"}}</longcat_tool_call>'),
        "xlam": ('[{"name": "f", "arguments": {"city": "', '"}}]'),
    }
)


class ParserRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one parser takes: nanoseconds of CPU time per character, for each number of characters."""

    parser: str
    characters: Sequence[int]
    ns_per_character: Sequence[float]

    @property
    def growth(self) -> float:
        """What a character costs in the longest call, as a multiple of what it costs in the shortest."""
        return self.ns_per_character[-1] / self.ns_per_character[0]


def measure_parsers(*, quick: bool) -> Iterator[ParserRow]:
    """
    Measure every registered parser that has a text in `CALLS`: all but a third party's.

    Raises :class:`BenchError` for one that makes no call of its text, whose numbers would mean nothing.
    """
    sizes = QUICK_SIZES if quick else SIZES
    for name in TOOL_PARSERS.names():
        if name in CALLS:
            turns = [[_measure(name, size) / size for size in sizes] for _ in range(_TURNS)]
            costs = [min(of_size) for of_size in zip(*turns, strict=True)]
            yield ParserRow(parser=name, characters=sizes, ns_per_character=costs)


def _measure(name: str, size: int) -> int:
    """Return the nanoseconds that *size* characters of arguments take."""
    front, behind = CALLS[name]
    pieces = [front, *[_PIECE] * (size // len(_PIECE)), behind]
    parser = AnswerParser(None, TOOL_PARSERS.load(name)({"f": _SCHEMA}))
    seen = 0
    begun = time.process_time_ns()
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, ToolCallArguments):
                seen += len(event.text)
    parser.flush()
    spent = time.process_time_ns() - begun
    if parser.calls != 1 or seen < size:
        raise BenchError(f"The parser {name} made {parser.calls} calls with {seen} characters of its text.")
    return spent
