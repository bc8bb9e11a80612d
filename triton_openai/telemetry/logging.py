"""
Log lines on stderr: readable ones for people, or one JSON object per line.

No log line has prompts, answers or credentials. Whoever writes one sees to that; ``redact`` is a safety net.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from triton_openai.config import ServerSettings
from triton_openai.errors import ServiceError

# Fields that could hold a client's text or a credential.
_REDACTED = frozenset((
    "api_key", "authorization", "body", "completion", "content", "input", "messages", "password", "prompt", "text",
    "token", "tokens",
))  # fmt: skip


def warn(log: FilteringBoundLogger, event: str, error: ServiceError, /, **fields: Any) -> None:
    """Log *error* in one line at "warning"; a backend's traceback follows at "debug"."""
    log.warning(event, **fields, reason=error.reason)
    if error.trace is not None:
        log.debug(event, **fields, trace=error.trace)


def _is_not_http_noise(record: logging.LogRecord) -> bool:
    """Return false for the HTTP server's lines about clients that do not speak HTTP, such as port scans."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def configure_logging(settings: ServerSettings, *, worker: int | None = None) -> None:
    """Send every log line, also those of libraries, to stderr as *settings* say, with the number of the *worker*."""
    level = logging.getLevelName(settings.log_level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        partial(_add_worker, worker),
        redact,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    logging.getLogger("aiohttp.server").addFilter(_is_not_http_noise)
    # They log clients' invalid trace headers, which may hold anything.
    for name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
        logging.getLogger(name).setLevel(logging.ERROR)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(settings.log_format)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _add_worker(worker: int | None, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return event if worker is None else {"worker": worker, **event}


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace the values of fields that could hold a client's text or a credential."""
    return {name: "<redacted>" if name in _REDACTED else value for name, value in event.items()}


def _renderers(log_format: str) -> list[Processor]:
    # Tracebacks without the values of local variables: those could be prompts.
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain, pad_event_to=0)]
