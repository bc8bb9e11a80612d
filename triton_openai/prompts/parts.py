"""Prepared content: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

#: A text, or parts.
Prepared: TypeAlias = str | list[dict[str, Any]]


def text_part(text: str) -> dict[str, str]:
    """Return *text* as a part of content."""
    return {"type": "text", "text": text}


def joined(contents: Sequence[Prepared]) -> Prepared:
    """Return *contents* as one: texts with an empty line between them, and parts."""
    parts: list[dict[str, Any]] = []
    texts: list[str] = []
    for content in contents:
        if isinstance(content, str):
            texts.append(content)
            continue
        if texts:
            parts.append(text_part("\n\n".join(texts)))
            texts = []
        parts += content
    text = "\n\n".join(texts)
    if not parts:
        return text
    if texts:
        parts.append(text_part(text))
    return parts
