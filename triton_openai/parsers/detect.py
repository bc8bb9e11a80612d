# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""
Which parsers read a model's answers: those that the operator names, else those that its own chat template shows.

A template shows the model how to write a call, or writes past calls back; either way the marker stands in it. The
rules were read off the templates that the model families publish.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from triton_openai.config.tree import AUTO, NONE
from triton_openai.parsers.reasoning.base import ReasoningParser
from triton_openai.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.parsers.tools.base import ToolParser


class _Rule(NamedTuple):
    """A parser, and what a template for it holds: all of ``has``, none of ``lacks``."""

    parser: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()


#: The most specific first: several families write ``<tool_call>`` and mean different things.
_TOOLS = (
    _Rule("openai", ("<|channel|>", "<|message|>")),
    _Rule("deepseek_v32", ("｜DSML｜",)),
    _Rule("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    # Kimi K2's first template writes no calls back, but declares tools in its own way.
    _Rule("kimi_k2", ("<|im_middle|>", "tool_declare")),
    _Rule("minimax_m2", ("<minimax:tool_call>",)),
    _Rule("glm45", ("<arg_key>", "<arg_value>")),
    _Rule("seed_oss", ("<seed:tool_call>",)),
    _Rule("qwen3_coder", ("<function=", "<parameter=")),
    _Rule("nemotron_json", ("<TOOLCALL>",)),
    _Rule("mistral", ("[TOOL_CALLS]",)),
    _Rule("lfm2", ("<|tool_call_start|>",)),
    # Liquid's first template has the list of tools only.
    _Rule("lfm2", ("<|tool_list_start|>",)),
    _Rule("lfm2", ("<|im_start|>", "List of tools: ")),
    _Rule("gemma4", ("<|tool_call>",)),
    _Rule("functiongemma", ("<start_function_call>",)),
    _Rule("cohere_command3", ("<|START_ACTION|>",)),
    _Rule("step3", ("<steptml:invoke",)),
    _Rule("internlm", ("<|action_start|>", "<|plugin|>")),
    _Rule("longcat", ("<longcat_tool_call>",)),
    _Rule("granite_20b_fc", ("<function_call>",)),
    _Rule("phi4_mini_json", ("functools[",)),
    # Microsoft's own template for Phi 4 mini names no marker.
    _Rule("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    _Rule("granite", ("<|tool_call|>",)),
    _Rule("granite", ("<|start_of_role|>", "available_tools"), lacks=("<tool_call>",)),
    _Rule("granite4", ("<|start_of_role|>", "<tool_call>")),
    _Rule("olmo3", ("<function_calls>",)),
    _Rule("jamba", ("<tool_calls>",)),
    # MiniMax M3 writes a nested markup of its own inside of that tag.
    _Rule("hermes", ("<tool_call>",), lacks=("]<]minimax[>[",)),
    _Rule("pythonic", ("[func_name1(",)),
    # Functionary, which has Llama's marker too, writes ``<function=f>{…}</function>``.
    _Rule("llama3_json", ("<|python_tag|>",), lacks=("<function=",)),
    _Rule("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    _Rule("llama3_json", ("<|header_start|>", '"parameters": ')),
)

_REASONING = (
    _Rule("openai_gptoss", ("<|channel|>", "<|message|>")),
    _Rule("mistral", ("[THINK]",)),
    _Rule("seed_oss", ("<seed:think>",)),
    _Rule("gemma4", ("<|channel>thought",)),
    _Rule("cohere_command3", ("<|START_THINKING|>",)),
    _Rule("kimi", ("◁think▷",)),
    _Rule("granite", ("Here is my thought process:",)),
    _Rule("granite", ("<|start_of_role|>", "<think>")),
    _Rule("deepseek_v3", ("｜DSML｜", "</think>")),
    _Rule("deepseek_v3", ("<｜Assistant｜>", "</think>", "thinking")),
    _Rule("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    _Rule("kimi_k2", ("<|im_middle|>", "<think>")),
    _Rule("minimax_m2", ("<minimax:tool_call>", "<think>")),
    _Rule("glm45", ("<arg_key>", "<think>")),
    _Rule("qwen3", ("</think>",)),
    _Rule("qwen3", ("<think>",)),
)


def detect(template: str) -> tuple[str | None, str | None]:
    """Return the names of the tool parser and the reasoning parser for a chat template's source, where it shows any."""
    return _first(_TOOLS, template), _first(_REASONING, template)


def _first(rules: tuple[_Rule, ...], template: str) -> str | None:
    for rule in rules:
        if all(mark in template for mark in rule.has) and not any(mark in template for mark in rule.lacks):
            return rule.parser
    return None


class Parsers(msgspec.Struct, frozen=True, kw_only=True):
    """The parser classes of a model; ``None`` where its text stays as it is."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @property
    def special_tokens(self) -> bool:
        """Whether their markup is lost when the backend leaves special tokens out of the text."""
        return any(parser is not None and parser.special_tokens for parser in (self.tools, self.reasoning))


def choose(template: str, *, tools: str | None, reasoning: str | None) -> Parsers:
    """
    Return the parsers called *tools* and *reasoning* (``auto`` or ``None``: by the text of the chat *template*;
    ``none``: no parser).

    Raises :class:`ConfigurationError` for names that do not exist.
    """
    found_tools, found_reasoning = detect(template)
    tool_name = found_tools if tools in (None, AUTO) else tools
    reasoning_name = found_reasoning if reasoning in (None, AUTO) else reasoning
    return Parsers(
        tools=None if tool_name in (None, NONE) else TOOL_PARSERS.load(tool_name),
        reasoning=None if reasoning_name in (None, NONE) else REASONING_PARSERS.load(reasoning_name),
    )
