"""
How large a request may be in itself: depth, number and size of its JSON values, and how many of what it lists.

The first three are found by looking at the bytes, before anything is made of them: a body of 64 MiB could become
gigabytes of small objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec

from triton_openai.config import LimitSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge

_BRACKETS = b"[]{}"
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_OPENS = bytes.maketrans(_BRACKETS, b"\1\0\1\0")
# Levels that are counted the quick way.
_USUAL_DEPTH = 8
# Fields of requests by the setting that bounds how many they hold.
_LISTS: Mapping[str, str] = {
    "messages": "max_messages",
    "tools": "max_tools",
    "functions": "max_tools",
    "documents": "max_prompts",
    "prompt": "max_prompts",
    "input": "max_prompts",
    # The sides of a score request.
    "queries": "max_prompts",
    "items": "max_prompts",
    "data_1": "max_prompts",
    "data_2": "max_prompts",
    "text_1": "max_prompts",
    "text_2": "max_prompts",
}


def check_json(body: bytes, limits: LimitSettings) -> None:
    """
    Raise for JSON that is too deep or has too many values or too long a string.

    Every step is a pass of compiled code over the bytes. What is no JSON is left to the decoder.
    """
    opened = body.count(b"[") + body.count(b"{")
    many = opened + body.count(b",") >= limits.max_json_values
    if (
        not many
        and opened <= min(limits.max_json_depth, limits.max_json_containers)
        and len(body) <= limits.max_json_string
    ):
        # It cannot be any of this, whatever stands in its strings.
        return
    # Without escaped characters, every second part is what stands in quotes.
    plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body
    if plain.count(b'"') > 4 * limits.max_json_values:
        # A value has two quotes, and its key two.
        raise _too_many_values(limits)
    parts = plain.split(b'"')
    longest = max(map(len, parts[1::2]), default=0)
    if longest > limits.max_json_string:
        raise PayloadTooLarge(
            f"The request has a string of {longest} bytes, more than the limit of {limits.max_json_string}.",
            code="string_above_max_length",
        )
    bare = b" ".join(parts[::2])
    # Each value but the first of a list or an object follows a comma, and the first an opening bracket.
    containers = bare.count(b"[") + bare.count(b"{")
    values = 1 + bare.count(b",") + containers
    if containers > limits.max_json_containers:
        raise PayloadTooLarge(f"The request's JSON has more than {limits.max_json_containers} lists and objects.")
    if values > limits.max_json_values:
        raise _too_many_values(limits)
    brackets = bare.translate(None, _ALL_BUT_BRACKETS)
    depth = _depth(brackets, enough=limits.max_json_depth)
    if depth > limits.max_json_depth:
        raise InvalidRequest(
            f"The request's JSON is nested too deeply: more than {limits.max_json_depth} levels.", code="invalid_json"
        )


def _depth(brackets: bytes, *, enough: int) -> int:
    """Return how deep *brackets* nest; about, where they do not match."""
    for level in range(min(_USUAL_DEPTH, enough)):
        # The innermost pairs go, level by level, which is all there is to do for almost every request.
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            return level
        brackets = inner
    deltas = map((-1, 1).__getitem__, brackets.translate(_OPENS))
    return min(_USUAL_DEPTH, enough) + max(accumulate(deltas), default=0)


def _too_many_values(limits: LimitSettings) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request's JSON has more than {limits.max_json_values} values.")


def check_counts(body: msgspec.Struct, limits: LimitSettings) -> None:
    """Raise :class:`InvalidRequest` for a request that lists more of something than it may."""
    for name, setting in _LISTS.items():
        given = getattr(body, name, None)
        if not isinstance(given, list) or (given and isinstance(given[0], int)):
            # A list of token ids is one prompt.
            continue
        most = getattr(limits, setting)
        if len(given) > most:
            raise _too_many(name, most, len(given))
    messages = getattr(body, "messages", None)
    if isinstance(messages, list):
        parts = sum([_parts(message) for message in messages])
        if parts > limits.max_content_parts:
            raise _too_many("messages", limits.max_content_parts, parts, " content parts in all")


def _parts(message: Any) -> int:
    content = getattr(message, "content", None)
    return len(content) if isinstance(content, list) else 0


def _too_many(name: str, most: int, given: int, what: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"'{name}' holds {given}{what}, and may hold {most} at most.", param=name, code="array_above_max_length"
    )
