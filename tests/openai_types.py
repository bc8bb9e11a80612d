"""
Holds every object that leaves the service against OpenAI's types, strictly, and what else clients require.

Objects of the Responses API may have nothing else; the others have fields of vLLM and other servers besides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from openai import resources
from openai.types import Completion, Model
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionDeleted,
    ChatCompletionStoreMessage,
)
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem
from openai.types.responses import CompactedResponse, Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter, ValidationError

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


# By the name of an object, or that of the objects in a list.
_OTHERS: Mapping[str, type[BaseModel]] = {
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
    "chat.completion.deleted": ChatCompletionDeleted,
    "text_completion": Completion,
    "model": Model,
    "conversation": Conversation,
    "conversation.deleted": ConversationDeletedResource,
}
# By the end of the path: the objects in a list.
_ITEMS: Mapping[str, Any] = {
    "/input_items": ResponseItem, "/items": ConversationItem, "/messages": ChatCompletionStoreMessage,
}  # fmt: skip
# What differs from OpenAI's types on purpose: the object and the place in it, and why.
_DIFFERENT: Mapping[str, str] = {
    r"text_completion: choices\.\d+\.logprobs\.(token|top)_logprobs\.0": "Null for the first token of a prompt.",
    r"text_completion: choices\.\d+\.finish_reason": "Null before the end of a stream, as in OpenAI's own streams.",
    r"list: data\.\d+\.embedding": "Base64 where the request asks for it; OpenAI's client decodes it.",
    r"None: role": "OpenAI's type of a stored chat's message has the assistant's role only; the request has others.",
    r"file: purpose": "OpenAI's client uploads files for evals, which its type of a file does not know.",
    r"list: usage": "Where nobody counts tokens, no number is made up.",
}


@cache
def _created(path: str) -> type[BaseModel] | None:
    """Return the type of what OpenAI's client creates at *path*, if it is always the same."""
    create = getattr(getattr(resources, path.title(), None), "create", None)
    kind = None if create is None else get_type_hints(create)["return"]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def check_any(path: str, found: Json) -> None:
    """Raise `AssertionError` for an object, or one of a list, that lacks what OpenAI's types require."""
    listed, path = found.get("object") == "list" and "data" in found, path.partition("?")[0]
    kind = _created(path.rpartition("/")[2])
    named = None if kind is None else kind.model_fields.get("object")
    if kind is not None and (named is None or found.get("object") in get_args(named.annotation)):
        _complete(kind, found)
    for each in found["data"] if listed else [found]:
        if str(each.get("object")) in _OTHERS:
            _complete(_OTHERS[each["object"]], each)
        for end, item in _ITEMS.items():
            if listed and path.endswith(end):
                _complete(item, each)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # OpenAI's types are built at their first use, by each adapter for itself: that takes longer than most requests.
    return TypeAdapter(kind)


def _complete(kind: Any, found: Json) -> None:
    try:
        _adapter(kind).validate_json(json.dumps(found), strict=True)
    except ValidationError as error:
        places = [f"{found.get('object')}: {'.'.join(map(str, each['loc']))}" for each in error.errors()]
        wrong = [place for place in places if not any(re.fullmatch(known, place) for known in _DIFFERENT)]
        assert not wrong, f"{wrong}\n{json.dumps(found)[:2000]}"


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
    # A stream that goes on behind its end has none.
    first = numbers[0] if numbers else 0
    assert numbers == list(range(first, first + len(numbers)))


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
