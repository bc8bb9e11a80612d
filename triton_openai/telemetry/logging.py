"""
Log lines on stderr: readable ones for people, or one JSON object per line.

No log line has prompts, answers or credentials. The callers ensure that; ``_REDACTED`` is a safety net.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from structlog.dev import plain_traceback
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from triton_openai.config.tree import ServerSettings
from triton_openai.errors import ServiceError
from triton_openai.json_bytes import escape_line_breaks
from triton_openai.telemetry.streams import (
    BackgroundWriter,
    background_writer,
    redirect_native_output,
    write_in_background,
)

# Fields that could hold a client's text or a credential: their values are not shown.
_REDACTED = frozenset((
    "api_key", "authorization", "body", "completion", "content", "input", "messages", "password", "prompt", "text",
    "token", "tokens",
))  # fmt: skip
# A value with one of these is quoted, so that its end is visible.
_QUOTED = re.compile(r"[ =\"']")


def warn(log: FilteringBoundLogger, event: str, error: ServiceError, /, **fields: Any) -> None:
    """Log *error* in one line at "warning"; a backend's traceback follows at "debug"."""
    log.warning(event, **fields, reason=error.reason)
    if error.trace is not None:
        log.debug(event, **fields, trace=error.trace)


def _is_not_http_noise(record: logging.LogRecord) -> bool:
    """Return false for the HTTP server's lines about clients that do not speak HTTP, such as port scans."""
    error = None
    if record.exc_info:
        error = record.exc_info[1]
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


#: Fields of every line that is written on behalf of the current request, by work that outlives it too. What writes a
#: line may have no request, such as a connection to Triton, so no argument can carry them.
LOG_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default={})  # noqa: B039 - it never changes


class _Logger:
    """Passes events to *processors*. structlog's own loggers copy the fields four times, which takes the most time."""

    def __init__(self, name: str, processors: Sequence[Processor], context: Mapping[str, Any]) -> None:
        self._name = name
        self._processors = processors
        self._context = context

    def bind(self, **values: Any) -> _Logger:
        """Return a logger whose events have *values* too. An adapter of a third party may use it."""
        return type(self)(self._name, self._processors, {**self._context, **values})

    def log(self, level: str, event: str, fields: EventDict) -> None:
        """Log *event* with *fields*, to which it may add."""
        fields["event"] = event
        result: Any = {**self._context, **fields} if self._context else fields
        try:
            for process in self._processors:
                result = process(self._name, level, result)
        except structlog.DropEvent:
            return

    def exception(self, event: str, /, **fields: Any) -> None:
        """Log *event* as an error, with the exception that is being handled."""
        self.log("error", event, {"exc_info": True, **fields})


def _logger_class(least: int) -> type:
    """Return the class of loggers that leave out what is below the level *least*."""

    def method(level: str) -> Callable[..., None]:
        return lambda self, event, /, **fields: self.log(level, event, fields)

    levels = {level: method(level) for level in ("debug", "info", "warning", "error", "critical")}
    skipped = [level for level in levels if logging.getLevelNamesMapping()[level.upper()] < least]
    return type("Logger", (_Logger,), levels | dict.fromkeys(skipped, lambda *_, **__: None))


def _write(output: BackgroundWriter, _name: str, _level: str, line: Any) -> bytes:
    """Write *line*, which has no end, in one piece."""
    output.write(line + b"\n")
    return b""


def configure_logging(settings: ServerSettings, *, worker: int | None = None, colours: bool = False) -> None:
    """
    Send every log line, also those of libraries, to stderr as *settings* say, with the number of the *worker*.

    Lines for people have *colours* if stderr is a terminal that shows them.

    From now on, writes to ``sys.stderr`` never block or fail.
    """
    level = logging.getLevelName(settings.log_level.upper())
    stderr = write_in_background("stderr")
    if settings.log_format == "json":
        render = _json
    else:
        render = _plain
    if render is _plain and colours:
        render = partial(_console, structlog.dev.ConsoleRenderer(exception_formatter=plain_traceback, pad_event_to=0))
    line = partial(_line, {} if worker is None else {"worker": worker}, render)

    def restored(lost: int, reason: str) -> bytes:
        return line(__name__, "error", {"event": "log lines were lost", "lines": lost, "reason": reason}) + b"\n"

    stderr.restored = restored
    # Not through the standard library's logging, which takes longer than all the rest.
    structlog.configure(
        processors=[line, partial(_write, stderr)],
        wrapper_class=_logger_class(level),
        logger_factory=str,
        cache_logger_on_first_use=True,
    )
    logging.getLogger("aiohttp.server").addFilter(_is_not_http_noise)
    # They log clients' invalid trace headers, whatever is in them.
    for name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
        logging.getLogger(name).setLevel(logging.ERROR)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        # The standard library's handlers write text.
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder()], processors=[line, lambda *event: event[-1].decode()]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def log_native_output() -> None:
    """
    Log what native libraries print, see :func:`redirect_native_output`. Only for a process that is a service.

    Call it after :func:`configure_logging`.
    """
    log = structlog.get_logger(__name__)
    redirect_native_output(lambda line: log.warning("a native library printed a line", line=line))


def count_lost_lines(count: Callable[[int], object]) -> None:
    """Call *count* with the number of this process's log lines that were lost, and again for those that will be."""
    stderr = background_writer(sys.stderr)
    if stderr is not None:
        count(stderr.total)
        stderr.lost = lambda lines, _reason: count(lines)


def _line(
    process: EventDict, render: Callable[[EventDict], bytes], logger: str | None, level: str, event: EventDict
) -> bytes:
    """Return *event* as a line, with the fields of its request and of the *process*, its logger, level and time."""
    if not _REDACTED.isdisjoint(event):
        event.update(dict.fromkeys(_REDACTED & event.keys(), "<redacted>"))
    if logger is None:
        # A library's, which the standard library's logging passes on.
        logger = event.pop("_record").name
        del event["_from_structlog"]
    fields = {**process, **LOG_FIELDS.get(), **event, "logger": logger, "level": level, "timestamp": timestamp()}
    # Without the values of local variables: those could be prompts.
    return render(structlog.processors.format_exc_info(logger, level, fields) if "exc_info" in event else fields)


def timestamp() -> str:
    """Return the time in the form of log lines."""
    nanoseconds = str(time.time_ns())
    return f"{_second(nanoseconds[:-9])}.{nanoseconds[-9:-3]}Z"


@lru_cache(1)
def _second(seconds: str) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%S")


_encode = msgspec.json.Encoder(enc_hook=str).encode


def _json(event: EventDict) -> bytes:
    try:
        return escape_line_breaks(_encode(event))
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(event, default=str).encode()


def _plain(event: EventDict) -> bytes:
    """Return a line as the console has it, without its colours, and without fields that have no value."""
    head = f"{event.pop('timestamp')} [{event.pop('level'):<9}] {event.pop('event')} [{event.pop('logger')}]"
    trace = event.pop("exception", None)
    line = " ".join([head, *[f"{name}={_shown(str(value))}" for name, value in event.items() if value is not None]])
    return (line if trace is None else f"{line}\n{trace}").encode("utf-8", "backslashreplace")


def _console(renderer: structlog.dev.ConsoleRenderer, event: EventDict) -> bytes:
    shown = {name: value for name, value in event.items() if value is not None}
    return str(renderer(None, "", shown)).encode("utf-8", "backslashreplace")


def _shown(text: str) -> str:
    if text.isprintable() and _QUOTED.search(text) is None:
        return text
    return repr(text)
