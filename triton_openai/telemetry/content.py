"""
What a request asked and what it was answered, for operators who want to see it; by default nobody makes it.

It has the form of ``gen_ai.input.messages`` and ``gen_ai.output.messages`` in OpenTelemetry's conventions for
generative AI: messages with a role and parts. Every text is cut to a limit, with a mark of how much is missing, and the
whole is bounded too, since a request may have any number of texts. Images and data URLs are named and never shown.
Answers are what the backend sent: reasoning and calls of tools are in their text, as is what a stop string cut off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from triton_openai.telemetry.observation import Answering

Part: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]

# Of a long chat the last messages, of a long list the last texts; and as much text in all as so many that are cut.
_MOST = 64
# In arguments of calls, which are JSON as their writer likes it, a slash may have a backslash before it.
_DATA_URL = re.compile(r"data:(?:[\w.+-]+\\?/[\w.+-]+(?:;[\w.+=-]*)*|;base64),[^\s\"')>]*", re.IGNORECASE)
# Fields of requests that hold texts, in the order in which they are shown.
_TEXTS = (
    "prompt", "suffix", "input", "query", "queries", "items", "data_1", "text_1", "documents", "data_2", "text_2",
)  # fmt: skip


def input_messages(body: object, longest: int) -> list[Message]:
    """Return what the request *body* asks, each text cut to *longest* characters."""
    cut = _Cut(longest)
    given = getattr(body, "messages", None)
    if given is not None:
        return cut.last(given, _message, {"role": "omitted", "parts": []})
    texts = [text for field in _TEXTS for text in _texts(getattr(body, field, None))]
    return [{"role": "user", "parts": cut.last(texts, _text_part, {"type": "omitted"})}] if texts else []


def output_messages(answers: Sequence[Answering], longest: int) -> list[Message]:
    """Return what was answered, as far as it came, each text cut to *longest* characters."""
    return _Cut(longest).last(answers, _answer, {"role": "omitted", "parts": []})


class _Cut:
    """Cuts the texts of one line to *longest* characters, and to nothing when there were too many of them."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._left = _MOST * longest

    def text(self, text: str) -> str:
        """Return *text* with its end, and what is no text in it, replaced by marks."""
        # Cut first: what is looked through is never long.
        kept = text[: max(0, min(self._longest, self._left))]
        # A thing of no length costs something too, since there may be any number of them.
        self._left -= max(1, len(kept))
        missing = len(text) - len(kept)
        # What is no Unicode could not be sent.
        shown = _DATA_URL.sub("<data URL>", kept).encode("utf-8", "replace").decode("utf-8")
        return f"{shown}…(+{missing} characters)" if missing else shown

    def last(
        self, items: Sequence[Any], make: Callable[[Any, _Cut], dict[str, Any]], omitted: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return what *make* makes of the last of *items*, after *omitted* with the number of those before."""
        missing = len(items) - _MOST
        found = [make(item, self) for item in items[-_MOST:]]
        return [{**omitted, "count": missing}, *found] if missing > 0 else found


def _message(message: Any, cut: _Cut) -> Message:
    role = message.__struct_config__.tag
    parts: list[Part] = []
    thoughts = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    if thoughts:
        parts.append({"type": "reasoning", "content": cut.text(thoughts)})
    content = message.content
    if role in ("tool", "function"):
        if not isinstance(content, str):
            content = "".join([part if isinstance(part, str) else part.text or "" for part in content or ()])
        called = getattr(message, "tool_call_id", None) or message.name
        name = None if called is None else cut.text(called)
        parts.append({"type": "tool_call_response", "id": name, "response": cut.text(content)})
    else:
        given = [content] if isinstance(content, str) else content or ()
        parts += cut.last(given, _content_part, {"type": "omitted"})
    calls = list(getattr(message, "tool_calls", None) or ())
    parts += cut.last(calls, _call, {"type": "omitted"})
    return {"role": role, "parts": parts}


def _content_part(part: Any, cut: _Cut) -> Part:
    if isinstance(part, str):
        return _text_part(part, cut)
    text = part.text if part.text is not None else part.refusal
    if text is not None:
        return _text_part(text, cut)
    return {"type": cut.text(part.type or "image_url")}


def _call(call: Any, cut: _Cut) -> Part:
    function = call.function
    found: Part = {"type": "tool_call", "id": None if call.id is None else cut.text(call.id)}
    if function is not None:
        arguments = function.arguments
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        found |= {"name": cut.text(function.name), "arguments": cut.text(arguments)}
    return found


def _text_part(text: str, cut: _Cut) -> Part:
    return {"type": "text", "content": cut.text(text)}


def _answer(answer: Answering, cut: _Cut) -> Message:
    reason = answer.finish_reason
    found: Message = {"role": "assistant", "parts": [_text_part(answer.text, cut)]}
    return found if reason is None else {**found, "finish_reason": reason.value}


def _texts(value: Any) -> Iterable[str]:
    """Yield the texts of a field: one, several, or objects with a ``text``; token ids are only counted."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(value.get("text"))
    elif isinstance(value, list):
        if value and all(isinstance(item, int) for item in value):
            yield f"<{len(value)} token ids>"
        else:
            for item in value:
                yield from _texts(item)
