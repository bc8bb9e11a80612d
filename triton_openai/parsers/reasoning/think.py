# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""``<think>…</think>`` and similar markers: one class for each family that differs in more than its name."""

from __future__ import annotations

from triton_openai.parsers.reasoning.delimited import Delimited

#: Special tokens, which stand in no thought: R1's template has no end of the thinking in front of them.
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")


class Think(Delimited):
    """
    Qwen 3, DeepSeek V3.1 and later, GLM 4.5 and later, Nemotron 3, Step, MiMo and many more.

    Qwen 3.5 at times calls a function without closing its thinking.
    """

    implied = ("<tool_call>\n<function=", "<tool_call><function=", *_DEEPSEEK_CALLS)


class DeepSeekR1(Delimited):
    """DeepSeek R1 and what was distilled from it, QwQ: the answer begins inside of the thinking."""

    begins_inside = True
    implied = _DEEPSEEK_CALLS


class KimiK2(Delimited):
    """Kimi K2 Thinking and K2.5, which may go on to their tool calls without closing the thinking."""

    implied = ("<|tool_calls_section_begin|>",)


class Kimi(Delimited):
    """The first Kimi models that think."""

    openings = ("◁think▷",)
    closings = ("◁/think▷",)


class MiniMaxM2(Delimited):
    """MiniMax M2: its template opens the thinking; calls may follow at once."""

    begins_inside = True
    implied = ("<minimax:tool_call>",)


class Mistral(Delimited):
    """Magistral and the Ministral models that think."""

    special_tokens = True
    openings = ("[THINK]",)
    closings = ("[/THINK]",)


class SeedOss(Delimited):
    """ByteDance's Seed OSS."""

    openings = ("<seed:think>",)
    closings = ("</seed:think>",)


class Granite(Delimited):
    """IBM's Granite 3.2, which says it in words; some quantised copies contract them. Granite 3.3 has tags."""

    openings = ("Here is my thought process:", "Here's my thought process:", "<think>")
    closings = ("Here is my response:", "Here's my response:", "</think>")


class Gemma4(Delimited):
    """Google's Gemma 4."""

    special_tokens = True
    openings = ("<|channel>thought",)
    closings = ("<channel|>",)
    implied = ("<|tool_call>",)


class Cohere(Delimited):
    """Cohere's Command models that think, with what they put round the answer."""

    special_tokens = True
    openings = ("<|START_THINKING|>",)
    closings = ("<|END_THINKING|>",)
    implied = ("<|START_ACTION|>",)
    frame = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class Hunyuan(Delimited):
    """Tencent's Hunyuan A13B."""

    frame = ("<answer>", "</answer>")


class Ernie45(Delimited):
    """Baidu's ERNIE 4.5 Thinking, whose template opens the thinking."""

    begins_inside = True
    frame = ("<response>", "</response>")
