"""
Reads the JSON of Triton's HTTP answers where a strict decoder refuses it, and the errors in it.

Triton's errors are JSON objects with the key ``error`` (http_server.cc).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from triton_openai.errors import InvalidAnswer, ServiceError
from triton_openai.triton.status import classify, foreign_error

#: The errors for JSON that cannot be read, or is nested too deeply.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_leniently(data: bytes, model: str = "") -> dict[str, Any]:
    """
    Return the JSON object of an event, or of a body, that a strict decoder may refuse; an empty one if there is none.

    Triton copies BYTES outputs into the JSON unchecked (invalid UTF-8 is possible) and writes ``NaN`` for a float that
    is not a number. Half a surrogate pair, which no UTF-8 can hold, becomes U+FFFD. Raises :class:`InvalidAnswer`.
    """
    start = data.find(b"{")
    if start < 0:
        return {}
    try:
        values = json.loads(data[start:].decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(data, model) from error
    if not isinstance(values, dict):
        raise _unreadable(data, model)
    return {name: _without_surrogates(value) for name, value in values.items()}


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, list):
        return [_text_without_surrogates(item) for item in value]
    return _text_without_surrogates(value)


def _text_without_surrogates(value: Any) -> Any:
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value


def _unreadable(data: bytes, model: str) -> InvalidAnswer:
    # Without the content: it may be a part of an answer, and answers are not logged.
    detail = f"An event of {len(data)} bytes is no JSON object."
    return InvalidAnswer("it is no JSON object", model=model, detail=detail)


def too_long(what: str, model: str = "") -> InvalidAnswer:
    """Return the error for an answer of *model* whose part *what* is too long."""
    return InvalidAnswer(f"its {what} is too long", model=model)


def refusal(parts: Sequence[bytes], status: int, model: str) -> ServiceError:
    """Return the error for an answer with *status* and this body: Triton's ``{"error": "…"}``, or another server's."""
    body = b"".join(parts)
    try:
        error = decode_leniently(body).get("error")
    except InvalidAnswer:
        error = None
    if error is None:
        return foreign_error(str(status), body[:500].decode("utf-8", "replace"))
    if not isinstance(error, str):
        error = json.dumps(error)
    return classify(error, model, str(status))
