"""System messages after other messages, for templates that take none there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton_openai.prompts.parts import Prepared, joined

SYSTEM_ROLES = ("system", "developer")


def merged_system_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return prepared *messages* with system messages only at the beginning.

    The leading ones become one message, later ones become the user's, and consecutive user messages become one.
    """
    merged: list[dict[str, Any]] = []
    # All contents of a message are joined at once: joining pair by pair copies the first ones again and again.
    contents: list[list[Prepared]] = []
    for message in messages:
        last = None
        if merged:
            last = merged[-1]["role"]
        role = message["role"]
        is_leading = role in SYSTEM_ROLES and last in (None, *SYSTEM_ROLES)
        if role in SYSTEM_ROLES and not is_leading:
            role = "user"
        if merged and (is_leading or role == last == "user"):
            contents[-1].append(message["content"])
        else:
            merged.append({**message, "role": role})
            contents.append([message["content"]])
    for message, parts in zip(merged, contents, strict=True):
        if len(parts) > 1:
            message["content"] = joined(parts)
    return merged
