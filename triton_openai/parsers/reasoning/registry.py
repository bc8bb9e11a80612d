"""The reasoning parsers by name."""

from __future__ import annotations

from collections.abc import Mapping

from triton_openai.parsers.reasoning.base import ReasoningParser
from triton_openai.parsers.tools.registry import Registry

BUILT_IN: Mapping[str, str] = {
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

#: The names under which other servers know the same formats.
ALIASES: Mapping[str, str] = {
    "think": "qwen3",
    "basic": "qwen3",
    "qwen3_thinking": "deepseek_r1",
    "qwq": "deepseek_r1",
    "step3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v4": "deepseek_v3",
    "openai": "openai_gptoss",
    "gpt_oss": "openai_gptoss",
    "harmony": "openai_gptoss",
    "glm47": "glm45",
    "glm": "glm45",
    "mimo": "qwen3",
    "step3p5": "qwen3",
    "nemotron": "nemotron_v3",
    "nemotron3": "nemotron_v3",
    "nemotron_3": "nemotron_v3",
    "nemotron_nano": "nemotron_v3",
    "nemotron_deci": "nemotron_v3",
    "kimi_k25": "kimi_k2",
    "minimax": "minimax_m2",
    "granite_thinking_parser": "granite",
    "cohere": "cohere_command3",
    "hunyuan": "hunyuan_a13b",
    "olmo3": "qwen3",
}

REASONING_PARSERS: Registry[ReasoningParser] = Registry(
    "reasoning parser",
    "triton_openai.reasoning_parsers",
    BUILT_IN,
    ALIASES,
    base=ReasoningParser,
    make=lambda parser: parser(inside=None),
)


def load(name: str) -> type[ReasoningParser]:
    """Return the reasoning parser called *name*. Raises :class:`ConfigurationError` listing the known names."""
    return REASONING_PARSERS.load(name)


def names() -> list[str]:
    """Return the names of all reasoning parsers, without their aliases."""
    return REASONING_PARSERS.names()
