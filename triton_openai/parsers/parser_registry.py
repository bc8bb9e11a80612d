# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""
The parsers by name: built-in ones in two tables, those of other packages under two entry-point groups.

A model's answers are read by those that the operator names, else by those that its own chat template shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec

from triton_openai.config.tree import AUTO, NONE
from triton_openai.errors import ConfigurationError
from triton_openai.parsers.reasoning import ReasoningParser
from triton_openai.parsers.tools.format import ToolFormat, built_in_formats, built_in_parser
from triton_openai.parsers.tools.tool_parser import ToolParser

_Parser = TypeVar("_Parser")


@dataclass
class Registry(Generic[_Parser]):
    """
    The parsers of one kind.

    Names of built-in parsers are taken in any case, and with hyphens for underscores.
    """

    #: What messages call one ("tool parser").
    kind: str
    group: str
    #: Where the built-in ones are.
    package: str
    #: For each built-in one its class, as "module:Class" in the package, or that it is data; and then aliases.
    table: Mapping[str, Sequence[str]]
    #: What a third party's class is derived from.
    base: type
    #: Makes a parser of a class.
    make: Callable[[type[_Parser]], _Parser]

    def names(self) -> list[str]:
        """Return the names of all parsers, built-in ones first, without their aliases."""
        return [*self.table, *sorted({point.name for point in entry_points(group=self.group)})]

    def load(self, name: str) -> type[_Parser]:
        """
        Return the parser class called *name*.

        Raises :class:`ConfigurationError`, listing the known names, and where a third party's class is no parser.
        """
        own = self._own_name(name)
        if own is not None:
            return self._built_in(own)
        if (point := self._third_party().get(name)) is None:
            raise ConfigurationError(f"There is no {self.kind} '{name}'. Known names: {', '.join(self.names())}.")
        subject = f"The {self.kind} '{name}' ({point.value})"
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"{subject} cannot be loaded: {error}.") from error
        if not isinstance(loaded, type) or self.base not in loaded.__mro__:
            base = f"{self.base.__module__}.{self.base.__name__}"
            raise ConfigurationError(f"{subject} is not a class that is derived from {base}.")
        try:
            self.make(loaded)
        except Exception as error:
            raise ConfigurationError(f"{subject} cannot be made: {type(error).__name__}: {error}.") from error
        return loaded

    def _own_name(self, name: str) -> str | None:
        """Return the name of the built-in parser that *name* means; ``None`` if it means none."""
        plain = name.lower().replace("-", "_")
        for own, (_, *aliases) in self.table.items():
            if plain in (own, *aliases):
                return own
        return None

    def _built_in(self, name: str) -> type[_Parser]:
        """Return the class of the built-in parser *name*."""
        location = self.table[name][0]
        if location == _DATA:
            return cast("type[_Parser]", built_in_parser(name))
        loaded: type[_Parser] = EntryPoint(name, f"{self.package}.{location}", self.group).load()
        return loaded

    def _third_party(self) -> dict[str, EntryPoint]:
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if self._own_name(point.name) is not None or points.get(point.name, point).value != point.value:
                raise ConfigurationError(
                    f"The name '{point.name}' of a {self.kind} is taken twice ({point.value}). "
                    f"Known names: {', '.join(self.names())}."
                )
            points[point.name] = point
        return points


#: Stands for the class of a format that data describes.
_DATA = "formats.yaml"
# The formats with the names that other servers have for them. Those that data cannot describe have a class.
_TOOLS: Mapping[str, Sequence[str]] = {
    **{name: (_DATA, *format.aliases) for name, format in built_in_formats().items()},
    "mistral": ("json_calls:Mistral",),
    "openai": ("harmony:Harmony", "gpt_oss", "harmony"),
    "deepseek_v3": ("sections:DeepSeekV3", "deepseekv3", "deepseek_v31", "deepseekv31", "deepseek_v3_1"),
    "kimi_k2": ("sections:KimiK2", "kimik2"),
}
_REASONING: Mapping[str, Sequence[str]] = {
    "qwen3": ("reasoning:Think", "think", "basic", "mimo", "step3p5", "olmo3"),
    "deepseek_r1": ("reasoning:DeepSeekR1", "qwen3_thinking", "qwq", "step3"),
    "deepseek_v3": ("reasoning:Think", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    "openai_gptoss": ("tools.harmony:HarmonyReasoning", "openai", "gpt_oss", "harmony"),
    "mistral": ("reasoning:Mistral",),
    "glm45": ("reasoning:Think", "glm47", "glm"),
    "granite": ("reasoning:Granite", "granite_thinking_parser"),
    "nemotron_v3": ("reasoning:Think", "nemotron", "nemotron3", "nemotron_3", "nemotron_nano", "nemotron_deci"),
    "kimi_k2": ("reasoning:KimiK2", "kimi_k25"),
    "kimi": ("reasoning:Kimi",),
    "minimax_m2": ("reasoning:MiniMaxM2", "minimax"),
    "seed_oss": ("reasoning:SeedOss",),
    "gemma4": ("reasoning:Gemma4",),
    "cohere_command3": ("reasoning:Cohere", "cohere"),
    "hunyuan_a13b": ("reasoning:Hunyuan", "hunyuan"),
    "ernie45": ("reasoning:Ernie45",),
    "kimi_k3": ("reasoning:KimiK3", "kimik3"),
    "minimax_m3": ("reasoning:MiniMaxM3",),
    "apertus": ("reasoning:Apertus", "apertus2509"),
    "apriel": ("reasoning:Apriel",),
    "hy_v3_opensource": ("reasoning:Hy3OpenSource", "hy3_opensource"),
    "muse_glimmer": ("channels:MuseGlimmer", "muse", "museglimmer"),
}

TOOL_PARSERS: Registry[ToolParser] = Registry(
    "tool parser",
    "triton_openai.tool_parsers",
    "triton_openai.parsers.tools",
    _TOOLS,
    base=ToolParser,
    make=lambda parser: parser({}, new_id=ToolParser.new_id),
)
REASONING_PARSERS: Registry[ReasoningParser] = Registry(
    "reasoning parser",
    "triton_openai.reasoning_parsers",
    "triton_openai.parsers",
    _REASONING,
    base=ReasoningParser,
    make=lambda parser: parser(inside=None),
)


class DetectionRule(NamedTuple):
    """Recognises a format by texts."""

    name: str
    #: Texts that are all there.
    has: tuple[str, ...]
    #: Texts of which none is there.
    lacks: tuple[str, ...] = ()


def detected(rules: Sequence[DetectionRule], has: Callable[[str], bool]) -> DetectionRule | None:
    """Return the first of *rules* that is met; *has* says whether a text is there."""
    return next((rule for rule in rules if all(map(has, rule.has)) and not any(map(has, rule.lacks))), None)


#: By the text of a chat template, which shows the model how to write a call, or writes past calls back. The rules were
#: read off the templates that the model families publish. The most specific come first: several families write
#: ``<tool_call>`` and mean different things.
_TOOL_RULES = (
    DetectionRule("openai", ("<|channel|>", "<|message|>")),
    DetectionRule("deepseek_v32", ("｜DSML｜",)),
    DetectionRule("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    DetectionRule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    # Kimi K2's first template writes no calls back, but declares tools in its own way.
    DetectionRule("kimi_k2", ("<|im_middle|>", "tool_declare")),
    DetectionRule("minimax_m2", ("<minimax:tool_call>",)),
    DetectionRule("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    DetectionRule("minimax_m3", ("]<]minimax[>[",)),
    DetectionRule("apertus", ("<|tools_prefix|>",)),
    DetectionRule("gigachat3", ("function call", "<|role_sep|>")),
    DetectionRule("gigachat3", ("<|function_call|>",)),
    DetectionRule("dots", ("<dots_function_call>",)),
    DetectionRule("hy_v3_opensource", (":opensource", "tool_sep")),
    DetectionRule("muse_glimmer", ("<atem:",)),
    DetectionRule("hy_v3", ("<tool_sep>", "<arg_key>")),
    DetectionRule("glm45", ("<arg_key>", "<arg_value>")),
    DetectionRule("seed_oss", ("<seed:tool_call>",)),
    DetectionRule("qwen3_coder", ("<function=", "<parameter=")),
    DetectionRule("nemotron_json", ("<TOOLCALL>",)),
    DetectionRule("mistral", ("[TOOL_CALLS]",)),
    DetectionRule("lfm2", ("<|tool_call_start|>",)),
    # Liquid's first template has the list of tools only.
    DetectionRule("lfm2", ("<|tool_list_start|>",)),
    DetectionRule("lfm2", ("<|im_start|>", "List of tools: ")),
    DetectionRule("gemma4", ("<|tool_call>",)),
    # Edits of Gemma 4's template may write its calls in another way; its turns have tokens of their own.
    DetectionRule("gemma4", ("<|turn>", "<turn|>")),
    DetectionRule("functiongemma", ("<start_function_call>",)),
    DetectionRule("cohere_command3", ("<|START_ACTION|>",)),
    DetectionRule("step3", ("<steptml:invoke",)),
    DetectionRule("internlm", ("<|action_start|>", "<|plugin|>")),
    DetectionRule("longcat", ("<longcat_tool_call>",)),
    DetectionRule("granite_20b_fc", ("<function_call>",)),
    DetectionRule("phi4_mini_json", ("functools[",)),
    # Microsoft's own template for Phi 4 mini names no marker.
    DetectionRule("phi4_mini_json", ("<|tool|>", "<|/tool|>")),
    DetectionRule("granite", ("<|tool_call|>",)),
    DetectionRule("granite", ("<|start_of_role|>", "available_tools"), lacks=("<tool_call>",)),
    DetectionRule("granite4", ("<|start_of_role|>", "<tool_call>")),
    DetectionRule("olmo3", ("<function_calls>",)),
    DetectionRule("jamba", ("<tool_calls>",)),
    DetectionRule("hermes", ("<tool_call>",)),
    DetectionRule("pythonic", ("[func_name1(",)),
    # Functionary, which has Llama's marker too, writes ``<function=f>{…}</function>``.
    DetectionRule("llama3_json", ("<|python_tag|>",), lacks=("<function=",)),
    DetectionRule("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    DetectionRule("llama3_json", ("<|header_start|>", '"parameters": ')),
)

_REASONING_RULES = (
    DetectionRule("openai_gptoss", ("<|channel|>", "<|message|>")),
    DetectionRule("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    DetectionRule("hy_v3_opensource", (":opensource", "think")),
    DetectionRule("muse_glimmer", ("<atem:", "<|message|>")),
    DetectionRule("minimax_m3", ("<mm:think>",)),
    DetectionRule("apertus", ("<|inner_prefix|>",)),
    DetectionRule("apriel", ("[BEGIN FINAL RESPONSE]",)),
    DetectionRule("mistral", ("[THINK]",)),
    DetectionRule("seed_oss", ("<seed:think>",)),
    DetectionRule("gemma4", ("<|channel>thought",)),
    DetectionRule("gemma4", ("<|turn>", "<turn|>", "<channel|>")),
    DetectionRule("cohere_command3", ("<|START_THINKING|>",)),
    DetectionRule("kimi", ("◁think▷",)),
    DetectionRule("granite", ("Here is my thought process:",)),
    DetectionRule("granite", ("<|start_of_role|>", "<think>")),
    DetectionRule("deepseek_v3", ("｜DSML｜", "</think>")),
    DetectionRule("deepseek_v3", ("<｜Assistant｜>", "</think>", "thinking")),
    DetectionRule("deepseek_r1", ("<｜Assistant｜>", "</think>")),
    DetectionRule("kimi_k2", ("<|im_middle|>", "<think>")),
    DetectionRule("minimax_m2", ("<minimax:tool_call>", "<think>")),
    DetectionRule("glm45", ("<arg_key>", "<think>")),
    DetectionRule("qwen3", ("</think>",)),
    DetectionRule("qwen3", ("<think>",)),
)


class Parsers(msgspec.Struct, frozen=True, kw_only=True):
    """The parser classes of a model; ``None`` where its text stays as it is."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    #: Why each was chosen, for operators.
    tools_reason: str = ""
    reasoning_reason: str = ""

    @property
    def special_tokens(self) -> bool:
        """Whether their markup is lost when the backend leaves special tokens out of the text."""
        return any(parser is not None and parser.special_tokens for parser in (self.tools, self.reasoning))


def choose(
    template: str, *, tools: str | None, reasoning: str | None, tool_format: ToolFormat | None = None
) -> Parsers:
    """
    Return the parsers called *tools* and *reasoning* (``auto`` or ``None``: by the text of the chat *template*;
    ``none``: no parser). *tool_format* describes the format of tool calls in place of a name.

    Raises :class:`ConfigurationError` for names that do not exist.
    """
    tool_parser = None
    tool_name, tools_reason = _chosen(tools, _TOOL_RULES, template)
    if tool_format is not None and tools in (None, AUTO):
        tools_reason = "tool_format"
        tool_parser = tool_format.parser("tool_format")
    elif tool_name is not None:
        tool_parser = TOOL_PARSERS.load(tool_name)
    reasoning_parser = None
    reasoning_name, reasoning_reason = _chosen(reasoning, _REASONING_RULES, template)
    if reasoning_name is not None:
        reasoning_parser = REASONING_PARSERS.load(reasoning_name)
    return Parsers(
        tools=tool_parser, reasoning=reasoning_parser, tools_reason=tools_reason, reasoning_reason=reasoning_reason
    )


def _chosen(setting: str | None, rules: Sequence[DetectionRule], template: str) -> tuple[str | None, str]:
    """Return the name of the parser that *setting*, or the text of the chat *template*, names; and why."""
    if setting == NONE:
        return None, "setting"
    if setting not in (None, AUTO):
        return setting, "setting"
    rule = detected(rules, template.__contains__)
    if rule is None:
        return None, ""
    return rule.name, f"the chat template has {' and '.join(rule.has)}"
