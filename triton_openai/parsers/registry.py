"""The parsers by name: built-in ones in two tables, those of other packages under two entry-point groups."""

from __future__ import annotations

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

    *built_in* has for each name the class, as "module:Class" in this package, and then aliases. Names of built-in
    parsers are taken in any case, and with hyphens for underscores. A third party's class is derived from *base*;
    *make* makes a parser of it.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        built_in: Mapping[str, Sequence[str]],
        *,
        base: type,
        make: Callable[[type[_Parser]], _Parser],
    ) -> None:
        self._kind = kind
        self._base = base
        self._make = make
        self._group = group
        self.built_in = {
            name: EntryPoint(name, f"triton_openai.parsers.{place}", group) for name, (place, *_) in built_in.items()
        }
        self.aliases = {alias: name for name, (_, *others) in built_in.items() for alias in others}

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
            found: type[_Parser] = self.built_in[built_in].load()
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


# Each with its class and the names that other servers have for the same format.
_TOOLS: Mapping[str, Sequence[str]] = {
    "hermes": ("tools.json_calls:Hermes", "qwen", "qwen25", "qwen3", "qwen3_json", "ernie45"),
    "llama3_json": ("tools.json_calls:Llama3Json", "llama", "llama3", "llama4_json"),
    "mistral": ("tools.json_calls:Mistral",),
    "qwen3_coder": ("tools.tagged_calls:Qwen3Coder", "qwen3_xml", "qwen_xml", "step3p5", "nemotron_nano"),
    "openai": ("tools.harmony:Harmony", "gpt_oss", "harmony"),
    "deepseek_v3": ("tools.sections:DeepSeekV3", "deepseekv3", "deepseek_v31", "deepseekv31", "deepseek_v3_1"),
    "deepseek_v32": ("tools.invokes:DeepSeekV32", "deepseekv32", "deepseek_v3_2", "deepseek_v4", "deepseekv4"),
    "glm45": ("tools.tagged_calls:Glm45", "glm", "glm4", "glm47"),
    "kimi_k2": ("tools.sections:KimiK2", "kimik2"),
    "minimax_m2": ("tools.invokes:MiniMaxM2",),
    "pythonic": ("tools.pythonic:Pythonic", "llama4_pythonic"),
    "lfm2": ("tools.pythonic:Lfm2",),
    "olmo3": ("tools.pythonic:Olmo3",),
    "nemotron_json": ("tools.json_calls:Nemotron", "nemotron", "nemotron_deci"),
    "granite": ("tools.json_calls:Granite",),
    "granite4": ("tools.json_calls:Granite4",),
    "granite_20b_fc": ("tools.json_calls:Granite20bFunctionCalling",),
    "phi4_mini_json": ("tools.json_calls:Phi4Mini", "phi4", "phi4_mini"),
    "gemma4": ("tools.gemma4:Gemma4",),
    "functiongemma": ("tools.gemma4:FunctionGemma",),
    "seed_oss": ("tools.tagged_calls:SeedOss",),
    "cohere_command3": ("tools.json_calls:Cohere", "cohere"),
    "jamba": ("tools.json_calls:Jamba", "hunyuan", "hunyuan_a13b", "minimax", "minimax_m1"),
    "step3": ("tools.invokes:Step3",),
    "internlm": ("tools.json_calls:InternLM",),
    "longcat": ("tools.json_calls:LongCat",),
    "xlam": ("tools.json_calls:Xlam",),
}
_REASONING: Mapping[str, Sequence[str]] = {
    "qwen3": ("reasoning.think:Think", "think", "basic", "mimo", "step3p5", "olmo3"),
    "deepseek_r1": ("reasoning.think:DeepSeekR1", "qwen3_thinking", "qwq", "step3"),
    "deepseek_v3": ("reasoning.think:Think", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    "openai_gptoss": ("reasoning.harmony:HarmonyReasoning", "openai", "gpt_oss", "harmony"),
    "mistral": ("reasoning.think:Mistral",),
    "glm45": ("reasoning.think:Think", "glm47", "glm"),
    "granite": ("reasoning.think:Granite", "granite_thinking_parser"),
    "nemotron_v3": ("reasoning.think:Think", "nemotron", "nemotron3", "nemotron_3", "nemotron_nano", "nemotron_deci"),
    "kimi_k2": ("reasoning.think:KimiK2", "kimi_k25"),
    "kimi": ("reasoning.think:Kimi",),
    "minimax_m2": ("reasoning.think:MiniMaxM2", "minimax"),
    "seed_oss": ("reasoning.think:SeedOss",),
    "gemma4": ("reasoning.think:Gemma4",),
    "cohere_command3": ("reasoning.think:Cohere", "cohere"),
    "hunyuan_a13b": ("reasoning.think:Hunyuan", "hunyuan"),
    "ernie45": ("reasoning.think:Ernie45",),
}

TOOL_PARSERS: Registry[ToolParser] = Registry(
    "tool parser",
    "triton_openai.tool_parsers",
    _TOOLS,
    base=ToolParser,
    make=lambda parser: parser({}, new_id=ToolParser.new_id),
)
REASONING_PARSERS: Registry[ReasoningParser] = Registry(
    "reasoning parser",
    "triton_openai.reasoning_parsers",
    _REASONING,
    base=ReasoningParser,
    make=lambda parser: parser(inside=None),
)
