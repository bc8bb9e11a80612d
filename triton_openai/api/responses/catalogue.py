"""
The models as Codex CLI reads them from ``GET /v1/models``: without its fields it takes a window of 258,400 tokens.

Source of the fields: what codex-cli 0.169 requires, and ignores the whole list without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from triton_openai.models.served import ServedModel

_INSTRUCTIONS = (
    "You are a coding agent that works in the user's repository through a terminal. Read files before you change them, "
    "and do not guess what they contain. Make the smallest change that does what is asked, in the style of the code "
    "around it. Run commands to check your work, such as the tests that concern it. If a command fails, read what it "
    "prints and try something else. When you have finished, say in a few sentences what you changed and what you did "
    "not do."
)


# How long the output of a command may be before the agent cuts it.
_TRUNCATION: Mapping[str, str | int] = {"mode": "tokens", "limit": 10_000}


class AgentModel(msgspec.Struct, kw_only=True):
    """A model; ``context_window`` is left out where it is not known."""

    slug: str
    display_name: str
    description: str = "A model in Triton Inference Server."
    base_instructions: str = _INSTRUCTIONS
    context_window: int | msgspec.UnsetType = msgspec.UNSET
    max_context_window: int | msgspec.UnsetType = msgspec.UNSET
    effective_context_window_percent: int = 95
    input_modalities: Sequence[str]
    supported_reasoning_levels: Sequence[Mapping[str, str]] = ()
    shell_type: str = "default"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int
    support_verbosity: bool = False
    truncation_policy: Mapping[str, str | int] = msgspec.field(default_factory=lambda: _TRUNCATION)
    experimental_supported_tools: Sequence[str] = ()
    supports_search_tool: bool = False
    use_responses_lite: bool = False


def catalogue(models: Iterable[ServedModel]) -> Sequence[AgentModel]:
    """Return those of *models* that can chat."""
    able = [model for model in models if "generate" in model.tasks and model.can_chat is not False]
    return [
        AgentModel(
            slug=model.name,
            display_name=model.name,
            context_window=model.settings.max_model_len or msgspec.UNSET,
            max_context_window=model.settings.max_model_len or msgspec.UNSET,
            input_modalities=["text", "image"] if model.adapter.capabilities.images else ["text"],
            priority=place,
        )
        for place, model in enumerate(able)
    ]
