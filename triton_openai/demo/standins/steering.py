"""Orders in a prompt, with which a test controls a stand-in; see docs/reference/scripted-models.md."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

MARKER = "<<steer"
END = ">>"


@dataclass(frozen=True)
class Steering:
    """The orders. Every field is optional in the JSON object."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    delay_ms: float = 0.0
    first_delay_ms: float = 0.0
    fail_at: int | None = None
    error: str = "the stand-in was told to fail"
    tokens_per_response: int = 1
    eos: bool = True
    hang_at: int | None = None
    repeat: int = 1
    forget_loras: bool = False

    @property
    def scripted(self) -> bool:
        """Whether the orders contain the answer, not only how it is sent."""
        return self.text is not None or self.tokens is not None


def find(prompt: str) -> tuple[Steering, str]:
    """Return the last steering in *prompt* (the default one if there is none) and the prompt without any."""
    steering = Steering()
    rest = []
    position = 0
    while True:
        start = prompt.find(MARKER, position)
        if start < 0:
            break
        parsed = _parse(prompt, start + len(MARKER))
        if parsed is None:
            rest.append(prompt[position : start + len(MARKER)])
            position = start + len(MARKER)
            continue
        rest.append(prompt[position:start])
        steering, position = parsed
    rest.append(prompt[position:])
    return steering, "".join(rest)


def _parse(prompt: str, start: int) -> tuple[Steering, int] | None:
    brace = start + len(prompt[start:]) - len(prompt[start:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(prompt, brace)
    except ValueError:
        return None
    tail = end + len(prompt[end:]) - len(prompt[end:].lstrip())
    if not isinstance(value, dict) or not prompt.startswith(END, tail):
        return None
    known = {field.name for field in fields(Steering)}
    if unknown := set(value) - known:
        # With a misspelt key, a test could pass for the wrong reason.
        raise ValueError(f"unknown steering {sorted(unknown)}; known are {sorted(known)}")
    if value.get("tokens") is not None:
        value["tokens"] = tuple(value["tokens"])
    return Steering(**value), tail + len(END)
