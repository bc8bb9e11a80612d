"""Holds answers of the Responses API against the types of OpenAI's package, strictly, and what else clients require."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from pydantic import BaseModel, ValidationError

Json = dict[str, Any]


class _Cancelled(BaseModel):
    """What OpenAI's package does not know as an event of a stream."""

    type: Literal["response.cancelled"]
    sequence_number: int
    response: Response


_EVENTS: Mapping[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in (*get_args(get_args(ResponseStreamEvent)[0]), _Cancelled)
}
_OBJECTS: Mapping[str, type[BaseModel]] = {"response": Response, "response.compaction": CompactedResponse}
# What Open Responses and Codex CLI have on top, by the type of the object; a function's name is in OpenAI's document.
_MORE: Mapping[str, frozenset[str]] = {
    "response": frozenset({"frequency_penalty", "presence_penalty", "store"}),
    "custom_tool_call": frozenset({"status"}),
    "response.function_call_arguments.done": frozenset({"name"}),
}
# The codes by which agents decide whether to try again.
_CODES = frozenset({"context_length_exceeded", "server_is_overloaded"})
# What is optional in OpenAI's package and required by the suite of Open Responses: null in the second set only.
_REQUIRED = frozenset({
    "background", "created_at", "frequency_penalty", "metadata", "presence_penalty", "service_tier", "status", "store",
    "temperature", "text", "top_logprobs", "top_p", "truncation",
})  # fmt: skip
_NULLABLE = frozenset({
    "completed_at", "error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "usage",
})  # fmt: skip


def check_object(found: Json) -> None:
    """Raise `AssertionError` for an answer that claims to be one of OpenAI's objects and is not."""
    kind = None if "deleted" in found else _OBJECTS.get(str(found.get("object")))
    if kind is not None:
        _valid(kind, found)


def check_events(events: Iterable[bytes]) -> None:
    """Raise `AssertionError` for events of a stream that are not OpenAI's, or whose numbers have gaps."""
    found = [json.loads(event) for event in events]
    for event in found:
        _valid(_EVENTS[event["type"]], event)
    numbers = [event["sequence_number"] for event in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _valid(kind: type[BaseModel], found: Json) -> None:
    data = json.dumps(_known(found))
    try:
        kind.model_validate_json(data, strict=True, extra="forbid")
    except ValidationError as error:
        raise AssertionError(f"{error}\n{data}") from error


def _known(found: Any) -> Any:
    """Return *found* without what OpenAI's package does not know, once that was checked."""
    if isinstance(found, list):
        return [_known(each) for each in found]
    if not isinstance(found, dict):
        return found
    kind = str(found.get("object") or found.get("type"))
    if kind == "response":
        missing = [name for name in _REQUIRED if found.get(name) is None] + sorted(_NULLABLE - found.keys())
        assert not missing, missing
    elif kind == "response.compaction":
        # Their document has the user's messages too.
        found = {**found, "output": [item for item in found["output"] if item.get("role") != "user"]}
    more = _MORE.get(kind, frozenset())
    assert more <= found.keys(), found
    if kind.startswith("response.output_text."):
        # Ours have the bytes of a token everywhere, theirs not in events.
        found = {**found, "logprobs": [_without_bytes(each) for each in found["logprobs"]]}
    if found.get("code") in _CODES:
        found = {**found, "code": "server_error"}
    return {name: _known(value) for name, value in found.items() if name not in more}


def _without_bytes(entry: Json) -> Json:
    more = [{"token": each["token"], "logprob": each["logprob"]} for each in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": more}
