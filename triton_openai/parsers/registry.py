"""The parsers by name: built-in ones in two tables, those of other packages under two entry-point groups."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from triton_openai.errors import ConfigurationError
from triton_openai.parsers.reasoning.base import ReasoningParser
from triton_openai.parsers.tools.base import ToolParser

_Parser = TypeVar("_Parser")


class Registry(Generic[_Parser]):
    """
    The parsers of one *kind* ("tool parser").

    *built_in* is name → "module:Class"; *aliases* are the names that other servers have for built-in ones. Names of
    built-in parsers are taken in any case, and with hyphens for underscores. A third party's class is derived from
    *base*; *make* makes a parser of it.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, str],
        aliases: Mapping[str, Sequence[str]],
        *,
        base: type,
        make: Callable[[type[_Parser]], _Parser],
    ) -> None:
        self._kind = kind
        self._base = base
        self._make = make
        self._group = group
        self.built_in = built_in
        self.aliases = {alias: name for name, others in aliases.items() for alias in others}

    def names(self) -> list[str]:
        """Return the names of all parsers, built-in ones first, without their aliases."""
        return [*self.built_in, *sorted({point.name for point in entry_points(group=self._group)})]

    def load(self, name: str) -> type[_Parser]:
        """
        Return the parser class called *name*.

        Raises :class:`ConfigurationError`, listing the known names, and where a third party's class is no parser.
        """
        built_in = self._resolve(name)
        if built_in is not None:
            module, _, attribute = self.built_in[built_in].partition(":")
            found: type[_Parser] = getattr(importlib.import_module(module), attribute)
            return found
        point = self._third_party().get(name)
        if point is None:
            raise ConfigurationError(f"There is no {self._kind} '{name}'. Known names: {', '.join(self.names())}.")
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"The {self._kind} '{name}' ({point.value}) cannot be loaded: {error}.") from error
        return self._checked(f"The {self._kind} '{name}' ({point.value})", loaded)

    def _checked(self, subject: str, loaded: Any) -> type[_Parser]:
        """Return the class *loaded*. Raises :class:`ConfigurationError` unless it has what a parser must have."""
        if not isinstance(loaded, type) or self._base not in loaded.__mro__:
            base = f"{self._base.__module__}.{self._base.__name__}"
            raise ConfigurationError(f"{subject} is not a class that is derived from {base}.")
        try:
            self._make(loaded)
        except Exception as error:
            raise ConfigurationError(f"{subject} cannot be made: {type(error).__name__}: {error}.") from error
        return loaded

    def _resolve(self, name: str) -> str | None:
        plain = name.lower().replace("-", "_")
        plain = self.aliases.get(plain, plain)
        return plain if plain in self.built_in else None

    def _third_party(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self._group):
            taken = self._resolve(point.name) is not None
            if taken or (point.name in found and found[point.name].value != point.value):
                raise ConfigurationError(
                    f"The name '{point.name}' of a {self._kind} is taken twice ({point.value}). "
                    f"Known names: {', '.join(self.names())}."
                )
            found[point.name] = point
        return found


_TOOLS: Mapping[str, str] = {
    "hermes": "triton_openai.parsers.tools.hermes:Hermes",
    "llama3_json": "triton_openai.parsers.tools.llama3_json:Llama3Json",
    "mistral": "triton_openai.parsers.tools.mistral:Mistral",
    "qwen3_coder": "triton_openai.parsers.tools.qwen3_coder:Qwen3Coder",
    "openai": "triton_openai.parsers.tools.harmony:Harmony",
    "deepseek_v3": "triton_openai.parsers.tools.deepseek_v3:DeepSeekV3",
    "deepseek_v32": "triton_openai.parsers.tools.deepseek_v32:DeepSeekV32",
    "glm45": "triton_openai.parsers.tools.glm45:Glm45",
    "kimi_k2": "triton_openai.parsers.tools.kimi_k2:KimiK2",
    "minimax_m2": "triton_openai.parsers.tools.minimax_m2:MiniMaxM2",
    "pythonic": "triton_openai.parsers.tools.pythonic:Pythonic",
    "lfm2": "triton_openai.parsers.tools.pythonic:Lfm2",
    "olmo3": "triton_openai.parsers.tools.pythonic:Olmo3",
    "nemotron_json": "triton_openai.parsers.tools.nemotron:Nemotron",
    "granite": "triton_openai.parsers.tools.granite:Granite",
    "granite4": "triton_openai.parsers.tools.granite:Granite4",
    "granite_20b_fc": "triton_openai.parsers.tools.granite:Granite20bFunctionCalling",
    "phi4_mini_json": "triton_openai.parsers.tools.phi4_mini:Phi4Mini",
    "gemma4": "triton_openai.parsers.tools.gemma4:Gemma4",
    "functiongemma": "triton_openai.parsers.tools.gemma4:FunctionGemma",
    "seed_oss": "triton_openai.parsers.tools.seed_oss:SeedOss",
    "cohere_command3": "triton_openai.parsers.tools.cohere:Cohere",
    "jamba": "triton_openai.parsers.tools.jamba:Jamba",
    "step3": "triton_openai.parsers.tools.step3:Step3",
    "internlm": "triton_openai.parsers.tools.internlm:InternLM",
    "longcat": "triton_openai.parsers.tools.longcat:LongCat",
    "xlam": "triton_openai.parsers.tools.xlam:Xlam",
}

# The names under which other servers know the same formats.
_TOOL_ALIASES: Mapping[str, Sequence[str]] = {
    "hermes": ("qwen", "qwen25", "qwen3", "qwen3_json", "ernie45"),
    "llama3_json": ("llama", "llama3", "llama4_json"),
    "qwen3_coder": ("qwen3_xml", "qwen_xml", "step3p5", "nemotron_nano"),
    "openai": ("gpt_oss", "harmony"),
    "deepseek_v3": ("deepseekv3", "deepseek_v31", "deepseekv31", "deepseek_v3_1"),
    "deepseek_v32": ("deepseekv32", "deepseek_v3_2", "deepseek_v4", "deepseekv4"),
    "glm45": ("glm", "glm4", "glm47"),
    "kimi_k2": ("kimik2",),
    "pythonic": ("llama4_pythonic",),
    "nemotron_json": ("nemotron", "nemotron_deci"),
    "cohere_command3": ("cohere",),
    "jamba": ("hunyuan", "hunyuan_a13b", "minimax", "minimax_m1"),
    "phi4_mini_json": ("phi4", "phi4_mini"),
}

_REASONING: Mapping[str, str] = {
    "qwen3": "triton_openai.parsers.reasoning.think:Think",
    "deepseek_r1": "triton_openai.parsers.reasoning.think:DeepSeekR1",
    "deepseek_v3": "triton_openai.parsers.reasoning.think:Think",
    "openai_gptoss": "triton_openai.parsers.reasoning.harmony:HarmonyReasoning",
    "mistral": "triton_openai.parsers.reasoning.think:Mistral",
    "glm45": "triton_openai.parsers.reasoning.think:Think",
    "granite": "triton_openai.parsers.reasoning.think:Granite",
    "nemotron_v3": "triton_openai.parsers.reasoning.think:Think",
    "kimi_k2": "triton_openai.parsers.reasoning.think:KimiK2",
    "kimi": "triton_openai.parsers.reasoning.think:Kimi",
    "minimax_m2": "triton_openai.parsers.reasoning.think:MiniMaxM2",
    "seed_oss": "triton_openai.parsers.reasoning.think:SeedOss",
    "gemma4": "triton_openai.parsers.reasoning.think:Gemma4",
    "cohere_command3": "triton_openai.parsers.reasoning.think:Cohere",
    "hunyuan_a13b": "triton_openai.parsers.reasoning.think:Hunyuan",
    "ernie45": "triton_openai.parsers.reasoning.think:Ernie45",
}

_REASONING_ALIASES: Mapping[str, Sequence[str]] = {
    "qwen3": ("think", "basic", "mimo", "step3p5", "olmo3"),
    "deepseek_r1": ("qwen3_thinking", "qwq", "step3"),
    "deepseek_v3": ("deepseek_v31", "deepseek_v32", "deepseek_v4"),
    "openai_gptoss": ("openai", "gpt_oss", "harmony"),
    "glm45": ("glm47", "glm"),
    "nemotron_v3": ("nemotron", "nemotron3", "nemotron_3", "nemotron_nano", "nemotron_deci"),
    "kimi_k2": ("kimi_k25",),
    "minimax_m2": ("minimax",),
    "granite": ("granite_thinking_parser",),
    "cohere_command3": ("cohere",),
    "hunyuan_a13b": ("hunyuan",),
}

TOOL_PARSERS: Registry[ToolParser] = Registry(
    "tool parser",
    "triton_openai.tool_parsers",
    _TOOLS,
    _TOOL_ALIASES,
    base=ToolParser,
    make=lambda parser: parser({}, new_id=ToolParser.new_id),
)
REASONING_PARSERS: Registry[ReasoningParser] = Registry(
    "reasoning parser",
    "triton_openai.reasoning_parsers",
    _REASONING,
    _REASONING_ALIASES,
    base=ReasoningParser,
    make=lambda parser: parser(inside=None),
)
