"""What servers answer, in a form that can be compared, and in what two answers differ."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Of log probabilities and embeddings: the engine's batches differ, and Triton's embeddings are text.
_TOLERANCE = 2e-3
_TIMEOUT = 300.0
# Different for every answer or server.
_OWN = frozenset({"id", "created", "system_fingerprint"})


@dataclass(frozen=True)
class Answer:
    """A status and a JSON body; that of a stream is the answer that its chunks make."""

    status: int
    body: Any


def ask(url: str, path: str, body: Mapping[str, Any]) -> Answer:
    """Return what the server at *url* answers."""
    request = urllib.request.Request(
        url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
            data = reply.read()
            if "event-stream" in reply.headers["Content-Type"]:
                return Answer(reply.status, _joined(data.decode()))
            return Answer(reply.status, json.loads(data))
    except urllib.error.HTTPError as error:
        return Answer(error.code, json.loads(error.read() or b"null"))


def differences(ours: Answer, theirs: Answer) -> Iterator[tuple[str, str]]:
    """
    Yield the place of each difference with what stands there in both; errors are compared by their status.

    A null is what a missing field is. Numbers are equal within a tolerance. Of the items of a list, the first that
    differs stands for all.
    """
    if ours.status != theirs.status or ours.status != 200:
        if ours.status != theirs.status:
            yield "status", f"{ours.status} {_short(ours.body)} | {theirs.status} {_short(theirs.body)}"
        return
    told = set()
    for place, both in _compared("", ours.body, theirs.body):
        general = re.sub(r"\[\d+\]|(?<=choices)\.\d+", "[]", place)
        if general not in told:
            told.add(general)
            yield general, both


def _compared(place: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted((ours.keys() | theirs.keys()) - _OWN):
            yield from _compared(f"{place}.{name}".lstrip("."), ours.get(name), theirs.get(name))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _compared(f"{place}[{index}]", *pair)
    elif not _same(ours, theirs):
        yield place, f"{_short(ours)} | {_short(theirs)}"


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float) and type(ours) is not bool:
        return math.isclose(ours, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(ours == theirs)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "…"


def _joined(events: str) -> Any:
    """Return the answer that the chunks of a stream make: texts are joined, lists continued, the rest is the last."""
    whole: dict[str, Any] = {"choices": {}, "ends": events.rstrip().endswith("data: [DONE]")}
    for line in events.splitlines():
        data = line.removeprefix("data: ")
        if not line.startswith("data: ") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        for choice in chunk.pop("choices", ()):
            _add(whole["choices"].setdefault(str(choice["index"]), {}), choice)
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
            known += value
        elif isinstance(value, str) and isinstance(known, str) and name in ("content", "text", "arguments"):
            whole[name] = known + value
        elif value is not None or known is None:
            whole[name] = value
