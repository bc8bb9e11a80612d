"""What opens and what closes the thinking of each family."""

from __future__ import annotations

from triton_openai.parsers.parser_registry import REASONING_PARSERS

# Those with a message for the thinking, and another one for the answer.
_MESSAGES = {
    "openai_gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "muse_glimmer": (" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
}


def marks_of(name: str) -> tuple[str, str]:
    """Return what opens and what closes the thinking of the family *name*."""
    if name in _MESSAGES:
        return _MESSAGES[name]
    parser = REASONING_PARSERS.load(name)
    return parser.openings[0], parser.closings[0]  # type: ignore[attr-defined]
