"""
Log lines about requests: one for each, one with its content if the settings ask for it, and warnings of unknown fields.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import structlog

from triton_openai.errors import InvalidAnswer, ModelNotFound, printable
from triton_openai.generation import AnswerState
from triton_openai.telemetry.instruments import UNKNOWN_FIELDS
from triton_openai.telemetry.metrics import Metrics
from triton_openai.telemetry.request_record import Observer, RequestRecord

Part: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]

# The last messages of a chat and the last texts of a list are shown, and as much text in all as this many that are cut.
_MAX_ITEMS = 64
# JSON, such as the arguments of a tool call, may have a backslash before a slash.
_DATA_URL = re.compile(r"data:(?:[\w.+-]+\\?/[\w.+-]+(?:;[\w.+=-]*)*|;base64),[^\s\"')>]*", re.IGNORECASE)
# Request fields with texts, in the order in which they are shown.
_TEXTS = (
    "prompt", "suffix", "input", "query", "queries", "items", "data_1", "text_1", "documents", "data_2", "text_2",
)  # fmt: skip


def input_messages(body: object, max_chars: int, messages: Sequence[Any] | None = None) -> list[Message]:
    """Return *messages*, or else the input in a request's *body*, each text cut to *max_chars* characters."""
    cut = _Cut(max_chars)
    if messages is None:
        messages = getattr(body, "messages", None)
    if messages is not None:
        return cut.last(messages, cut.message, role="omitted", parts=[])
    texts: list[str] = []
    for field in _TEXTS:
        texts += _texts(getattr(body, field, None))
    if texts:
        return [{"role": "user", "parts": cut.last(texts, cut.part, type="omitted")}]
    return []


def output_messages(answers: Sequence[AnswerState], max_chars: int) -> list[Message]:
    """Return the texts of *answers* up to now, each cut to *max_chars* characters."""
    cut = _Cut(max_chars)
    return cut.last(answers, cut.answer, role="omitted", parts=[])


class _Cut:
    """Cuts the texts of one log line to *max_chars* characters each, and drops texts once their sum is too large."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._left = _MAX_ITEMS * max_chars

    def text(self, text: str) -> str:
        """Return *text* with its end and its data URLs replaced by marks."""
        # Cut first, so that the search for data URLs stays short.
        kept = text[: min(self._max_chars, self._left)]
        self._left -= len(kept)
        missing = len(text) - len(kept)
        # Lone surrogates could not be sent.
        shown = _DATA_URL.sub("<data URL>", kept).encode("utf-8", "replace").decode("utf-8")
        if missing:
            return f"{shown}…(+{missing} characters)"
        return shown

    def last(self, items: Sequence[Any], make: Callable[[Any], Part], **omitted: Any) -> list[Part]:
        """Return the last of *items*, each converted by *make*, after *omitted* with the number of the others."""
        missing = len(items) - _MAX_ITEMS
        kept = [make(item) for item in items[-_MAX_ITEMS:]]
        if missing > 0:
            return [{**omitted, "count": missing}, *kept]
        return kept

    def message(self, message: Any) -> Message:
        """Return a message of a chat."""
        role = message.__struct_config__.tag
        content = message.content
        parts: list[Part] = []
        thoughts = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        if thoughts:
            parts.append({"type": "reasoning", "content": self.text(thoughts)})
        if role in ("tool", "function"):
            call_id = getattr(message, "tool_call_id", None) or message.name
            if call_id is not None:
                call_id = self.text(call_id)
            parts.append({"type": "tool_call_response", "id": call_id, "response": self.text(_joined(content))})
        elif isinstance(content, str):
            parts.append(self.part(content))
        else:
            parts += self.last(content or (), self.part, type="omitted")
        refusal = getattr(message, "refusal", None)
        if refusal:
            parts.append(self.part(refusal))
        calls = [*(getattr(message, "tool_calls", None) or ())]
        function_call = getattr(message, "function_call", None)
        if function_call:
            calls.append(function_call)
        parts += self.last(calls, self.call, type="omitted")
        return {"role": role, "parts": parts}

    def part(self, part: Any) -> Part:
        """Return a text, or a part of a message."""
        if isinstance(part, str):
            return {"type": "text", "content": self.text(part)}
        if part.text is not None:
            return {"type": "text", "content": self.text(part.text)}
        if part.refusal is not None:
            return {"type": "text", "content": self.text(part.refusal)}
        return {"type": self.text(part.type or "image_url")}

    def call(self, call: Any) -> Part:
        """Return the call of a tool, or of a function, which has no id."""
        function = getattr(call, "function", call)
        name = getattr(call, "id", None)
        part: Part = {"type": "tool_call", "id": None if name is None else self.text(name)}
        if function is not None:
            arguments = function.arguments
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
            part |= {"name": self.text(function.name), "arguments": self.text(arguments)}
        return part

    def answer(self, answer: AnswerState) -> Message:
        """Return an answer as a message."""
        message: Message = {"role": "assistant", "parts": [self.part(answer.text)]}
        if answer.finish_reason is None:
            return message
        return {**message, "finish_reason": answer.finish_reason.value}


def _joined(content: Any) -> str:
    """Return the *content* of a tool's message, a text or a list of parts, as one text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        if isinstance(part, str):
            texts.append(part)
        else:
            texts.append(part.text or "")
    return "".join(texts)


def _texts(value: Any) -> Iterable[str]:
    """Yield the texts of a field: one, several, or objects with a ``text``; token ids only as their number."""
    text = getattr(value, "text", None)
    if isinstance(value, str):
        yield value
    elif isinstance(text, str):
        yield text
    elif isinstance(value, list):
        if value and all(isinstance(item, int) for item in value):
            yield f"<{len(value)} token ids>"
        else:
            for item in value:
                yield from _texts(item)


_log = structlog.get_logger("triton_openai.access")
# Loggers of their own, so that their lines can be sent elsewhere.
_content_log = structlog.get_logger("triton_openai.content")
_fields_log = structlog.get_logger("triton_openai.telemetry.unknown_fields")
_answers_log = structlog.get_logger("triton_openai.telemetry.invalid_answers")
# Longest part of an unknown model's name that is logged.
_MAX_NAME_CHARS = 64


class AccessLog(Observer):
    """Writes a line for each request: at "info", or at "debug" for successful reads, such as health checks."""

    def ended(self, record: RequestRecord) -> None:
        error = record.error
        left = record.client_left
        fields: dict[str, Any] = {"request_id": record.request_id}
        if record.method:
            fields["method"] = record.method
            fields["path"] = record.path
        fields["status"] = record.status
        fields["seconds"] = _rounded(record.duration)
        if record.client is not None:
            fields["client"] = record.client
        if record.key is not None:
            fields["key"] = record.key
        if record.batch is not None:
            fields["batch"] = record.batch
            fields["custom_id"] = printable(record.custom_id or "", _MAX_NAME_CHARS)
        if error is not None:
            fields["error"] = error.code
        if left:
            fields["client_left"] = True
        if record.operation is None:
            if isinstance(error, ModelNotFound):
                fields["model"] = printable(error.name, _MAX_NAME_CHARS)
            if record.method in ("GET", "HEAD", "OPTIONS") and error is None and not left:
                _log.debug("request", **fields)
            else:
                _log.info("request", **fields)
            return
        fields["model"] = record.model
        fields["adapter"] = record.adapter
        fields["stream"] = record.stream
        route = record.route
        if route is not None and route.name is not None:
            fields["endpoint"] = route.name
            fields["attempts"] = route.attempts
        if record.response_id is not None:
            fields["response_id"] = record.response_id
        usage = record.usage
        first = record.time_to_first_token
        reasons = {answer.finish_reason: None for answer in record.answers if answer.finish_reason is not None}
        if usage is not None:
            fields["input_tokens"] = usage.prompt_tokens
            fields["output_tokens"] = usage.completion_tokens
        for direction, seconds in record.audio_seconds.items():
            fields[f"{direction}_audio_seconds"] = _rounded(seconds)
        if first is not None:
            fields["first_token_seconds"] = _rounded(first)
        if record.queued_seconds:
            fields["queued_seconds"] = _rounded(record.queued_seconds)
        if reasons:
            fields["finish_reason"] = ",".join(reasons)
        # Bound: else structlog first looks for "info" in the wrong place, and catches its own exception.
        _log.bind().info("request", **fields)


def _rounded(seconds: float) -> float:
    """Return *seconds* with four digits after the point; ``round`` takes ten times as long."""
    return int(seconds * 10_000 + 0.5) / 10_000


class ContentLog(Observer):
    """Writes the content of inference requests whose body could be read, each text cut to *max_chars* characters."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars

    def ended(self, record: RequestRecord) -> None:
        if record.operation is not None:
            _content_log.info(
                "content",
                request_id=record.request_id,
                model=record.model,
                input_messages=input_messages(record.parameters, self._max_chars, record.messages),
                output_messages=output_messages(record.answers, self._max_chars),
            )


# Clients choose names. This one replaces those above the limit, and what does not look like a name.
_OTHER_NAMES = "other"
_MAX_NAMES = 100
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")


class UnknownFields(Observer):
    """Warns once for each model and unknown request field, such as a mistyped parameter; *metrics* count them all."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._names: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def ended(self, record: RequestRecord) -> None:
        """Look at the fields of a request for a served model."""
        model = record.model
        adapter = record.adapter
        if not record.unknown_fields or model is None or adapter is None:
            return
        for name in dict.fromkeys(map(self._bounded, record.unknown_fields)):
            self._metrics.child(UNKNOWN_FIELDS, model, adapter, name).inc()
            if (model, name) not in self._warned:
                self._warned.add((model, name))
                similar = _similar(name, record.parameters)
                _fields_log.warning("unknown request field is ignored", model=model, field=name, **similar)

    def _bounded(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= _MAX_NAMES or not _NAME.fullmatch(name):
                return _OTHER_NAMES
            self._names.add(name)
        return name


# Models and problems that are remembered.
_MAX_PROBLEMS = 1000


class InvalidAnswers(Observer):
    """Warns once for each model and each problem of Triton's answers, which only the operator can fix."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def ended(self, record: RequestRecord) -> None:
        """Look at the error of a request."""
        error = record.error
        if not isinstance(error, InvalidAnswer):
            return
        model = record.model or ""
        if (model, error.problem) in self._warned or len(self._warned) >= _MAX_PROBLEMS:
            return
        self._warned.add((model, error.problem))
        _answers_log.warning("Triton's answer is invalid", model=model, problem=error.problem, reason=error.reason)


def _similar(name: str, body: object) -> dict[str, str]:
    """Return the field of the endpoint that has almost this *name*, for the log."""
    if isinstance(body, msgspec.Struct):
        known = [field.encode_name for field in msgspec.structs.fields(body)]
    else:
        known = []
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if close:
        return {"similar": close[0]}
    return {}
