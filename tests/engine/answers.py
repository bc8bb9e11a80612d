"""What servers answer, in a form that can be compared, and in what two answers differ."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tests.engine.cases import Case

# Of log probabilities and embeddings: the engine's batches differ, and Triton's embeddings are text.
_TOLERANCE = 2e-3
_TIMEOUT = 300.0
# Different for every answer or server; a stream's events are as many as the pieces of its text.
_OWN = frozenset({
    "id", "created", "created_at", "completed_at", "system_fingerprint", "call_id", "item_id", "request_id",
    "sequence_number",
})  # fmt: skip
_CACHED = frozenset({"prompt_tokens_details", "cache_read_input_tokens"})
_JOINED = frozenset({"content", "text", "arguments", "delta", "partial_json", "thinking"})


class Answer(msgspec.Struct, frozen=True):
    """A status, a content type and a body, as a server sent them."""

    status: int
    kind: str
    text: str

    @property
    def body(self) -> Any:
        """The JSON; that of a stream is what its events make together."""
        if "event-stream" in self.kind:
            return _joined(self.text)
        return json.loads(self.text) if "json" in self.kind and self.text else self.text


def ask(url: str, case: Case) -> Answer:
    """Return what the server at *url* answers."""
    data = json.dumps(case.body).encode() if isinstance(case.body, Mapping) else case.body
    request = urllib.request.Request(url + case.path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
            return Answer(reply.status, reply.headers.get("Content-Type", ""), reply.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers.get("Content-Type", ""), error.read().decode())


def differences(ours: Answer, theirs: Answer) -> Iterator[tuple[str, str]]:
    """
    Yield the place of each difference with what stands there in both.

    A null is what a missing field is, and so is a count of no cached tokens; the messages of errors may differ, and
    numbers are equal within a tolerance. Of the items of a list, the first that differs stands for all.
    """
    if ours.status != theirs.status:
        yield "status", f"{ours.status} {_short(ours.body)} | {theirs.status} {_short(theirs.body)}"
        return
    told = set()
    for place, both in _compared("", ours.body, theirs.body):
        general = re.sub(r"\[\d+\]|(?<=choices)\.\d+", "[]", place)
        if general not in told and general != "error.message":
            told.add(general)
            yield general, both


def _compared(place: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted((ours.keys() | theirs.keys()) - _OWN):
            yield from _compared(f"{place}.{name}".lstrip("."), _counted(name, ours), _counted(name, theirs))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _compared(f"{place}[{index}]", *pair)
    elif place.endswith(".arguments") and isinstance(ours, str) and isinstance(theirs, str):
        # The engine's grammars take any space between values.
        yield from _compared(f"{place} as JSON", _read(ours), _read(theirs))
    elif not _same(ours, theirs):
        yield place, f"{_short(ours)} | {_short(theirs)}"


def _counted(name: str, values: Mapping[str, Any]) -> Any:
    """Return the value *name*, None for a count of no tokens from a cache: vLLM's server leaves that out."""
    value = values.get(name)
    if name in _CACHED and value in (0, {"cached_tokens": 0}):
        return None
    return value


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [text]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float) and type(ours) is not bool:
        return math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(ours == theirs)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


def _joined(text: str) -> Any:
    """
    Return the answer that the events of a stream make: texts are joined, lists continued, the rest is the last.

    Events with a type are joined by it, and ``events`` has their order.
    """
    whole: dict[str, Any] = {"ends": text.rstrip().endswith("data: [DONE]")}
    for line in text.splitlines():
        data = line.removeprefix("data: ")
        if not line.startswith("data: ") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        kind = chunk.pop("type", None)
        if kind == "ping":
            continue
        if kind is not None:
            events = whole.setdefault("events", [])
            if kind not in events[-1:]:
                events.append(kind)
            kind = re.sub("incomplete|completed", "ended", kind)
            place = ".".join(str(chunk[name]) for name in ("index", "output_index", "content_index") if name in chunk)
            _add(whole.setdefault(f"{kind} {place}".rstrip(), {}), chunk)
            continue
        for choice in chunk.pop("choices", ()):
            _add(whole.setdefault("choices", {}).setdefault(str(choice["index"]), {}), choice)
        _add(whole, {name: value for name, value in chunk.items() if value is not None})
    return whole


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        known = whole.get(name)
        if isinstance(value, dict):
            whole[name] = known or {}
            _add(whole[name], value)
        elif name == "tool_calls" and value:
            calls = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(str(call["index"]), {}), call)
        elif isinstance(value, list) and isinstance(known, list):
            whole[name] = [*known, *value]
        elif isinstance(value, str) and isinstance(known, str) and name in _JOINED:
            whole[name] = known + value
        elif value is not None or known is None:
            whole[name] = value
