# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""
The parsers by name: built-in ones in two tables, those of other packages under two entry-point groups.

A model's answers are read by those that the operator names, else by those that its own chat template shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, NamedTuple, TypeVar

import msgspec

from triton_openai.config.tree import AUTO, NONE
from triton_openai.errors import ConfigurationError
from triton_openai.parsers.reasoning import ReasoningParser
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
    #: For each built-in one its class, as "module:Class" in the package, and then aliases.
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
        if (built_in := self._built_in(name)) is not None:
            found: type[_Parser] = built_in.load()
            return found
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

    def _built_in(self, name: str) -> EntryPoint | None:
        plain = name.lower().replace("-", "_")
        places = (place for own, (place, *aliases) in self.table.items() if plain in (own, *aliases))
        place = next(places, None)
        if place is None:
            return None
        return EntryPoint(name, f"{self.package}.{place}", self.group)

    def _third_party(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            if self._built_in(point.name) is not None or found.get(point.name, point).value != point.value:
                raise ConfigurationError(
                    f"The name '{point.name}' of a {self.kind} is taken twice ({point.value}). "
                    f"Known names: {', '.join(self.names())}."
                )
            found[point.name] = point
        return found


# Each with its class and the names that other servers have for the same format.
_TOOLS: Mapping[str, Sequence[str]] = {
    "hermes": ("json_calls:Hermes", "qwen", "qwen25", "qwen3", "qwen3_json", "ernie45"),
    "llama3_json": ("json_calls:Llama3Json", "llama", "llama3", "llama4_json"),
    "mistral": ("json_calls:Mistral",),
    "qwen3_coder": ("tagged_calls:Qwen3Coder", "qwen3_xml", "qwen_xml", "step3p5", "nemotron_nano"),
    "openai": ("harmony:Harmony", "gpt_oss", "harmony"),
    "deepseek_v3": ("sections:DeepSeekV3", "deepseekv3", "deepseek_v31", "deepseekv31", "deepseek_v3_1"),
    "deepseek_v32": ("sections:DeepSeekV32", "deepseekv32", "deepseek_v3_2", "deepseek_v4", "deepseekv4"),
    "glm45": ("tagged_calls:Glm45", "glm", "glm4", "glm47"),
    "kimi_k2": ("sections:KimiK2", "kimik2"),
    "minimax_m2": ("sections:MiniMaxM2",),
    "pythonic": ("pythonic:Pythonic", "llama4_pythonic"),
    "lfm2": ("pythonic:Lfm2",),
    "olmo3": ("pythonic:Olmo3",),
    "nemotron_json": ("json_calls:Nemotron", "nemotron", "nemotron_deci"),
    "granite": ("json_calls:Granite",),
    "granite4": ("json_calls:Granite4",),
    "granite_20b_fc": ("json_calls:Granite20bFunctionCalling",),
    "phi4_mini_json": ("json_calls:Phi4Mini", "phi4", "phi4_mini"),
    "gemma4": ("gemma4:Gemma4",),
    "functiongemma": ("gemma4:FunctionGemma",),
    "seed_oss": ("tagged_calls:SeedOss",),
    "cohere_command3": ("json_calls:Cohere", "cohere"),
    "jamba": ("json_calls:Jamba", "hunyuan", "hunyuan_a13b", "minimax", "minimax_m1"),
    "step3": ("sections:Step3",),
    "internlm": ("json_calls:InternLM",),
    "longcat": ("json_calls:LongCat",),
    "xlam": ("json_calls:Xlam",),
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
    # MiniMax M3 writes a nested markup of its own inside of that tag.
    DetectionRule("hermes", ("<tool_call>",), lacks=("]<]minimax[>[",)),
    DetectionRule("pythonic", ("[func_name1(",)),
    # Functionary, which has Llama's marker too, writes ``<function=f>{…}</function>``.
    DetectionRule("llama3_json", ("<|python_tag|>",), lacks=("<function=",)),
    DetectionRule("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    DetectionRule("llama3_json", ("<|header_start|>", '"parameters": ')),
)

_REASONING_RULES = (
    DetectionRule("openai_gptoss", ("<|channel|>", "<|message|>")),
    DetectionRule("mistral", ("[THINK]",)),
    DetectionRule("seed_oss", ("<seed:think>",)),
    DetectionRule("gemma4", ("<|channel>thought",)),
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


def detect(template: str) -> tuple[str | None, str | None]:
    """Return the names of the tool parser and the reasoning parser for a chat template's source, where it shows any."""
    tools, reasoning = (detected(rules, template.__contains__) for rules in (_TOOL_RULES, _REASONING_RULES))
    return tools and tools.name, reasoning and reasoning.name


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
    if tools in (None, AUTO):
        tool_name = found_tools
    else:
        tool_name = tools
    if reasoning in (None, AUTO):
        reasoning_name = found_reasoning
    else:
        reasoning_name = reasoning
    return Parsers(
        tools=None if tool_name in (None, NONE) else TOOL_PARSERS.load(tool_name),
        reasoning=None if reasoning_name in (None, NONE) else REASONING_PARSERS.load(reasoning_name),
    )
