"""
Log lines on stderr: readable ones for people, or one JSON object per line.

Prompts, answers and credentials are never logged. That is a rule for whoever writes a log line; ``withhold`` is the net
under it.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from triton_openai.config import ServerSettings

# Field names whose values belong to a client or open a door.
_WITHHELD = frozenset(
    {
        "api_key",
        "authorization",
        "body",
        "completion",
        "content",
        "input",
        "messages",
        "password",
        "prompt",
        "text",
        "token",
        "tokens",
    }
)


def get_logger(name: str) -> FilteringBoundLogger:
    """Return the logger of the module *name*; made at import it works too, since it is configured at its first line."""
    return cast("FilteringBoundLogger", structlog.stdlib.get_logger(name))


def _is_own_fault(record: logging.LogRecord) -> bool:
    """
    Say whether a line of the HTTP server is about more than a client that does not speak HTTP, as port scans do not.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def configure_logging(settings: ServerSettings, *, worker: int | None = None) -> None:
    """
    Send every log line, those of libraries included, to stderr in the format that *settings* ask for.

    Where several processes write there, each line has the number of its *worker*.
    """
    level = logging.getLevelName(settings.log_level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        *([] if worker is None else [partial(_add_worker, worker)]),
        withhold,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    logging.getLogger("aiohttp.server").addFilter(_is_own_fault)
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


def _add_worker(worker: int, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event.setdefault("worker", worker)
    return event


def withhold(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace the values of fields that could hold a client's text or a credential."""
    for name in _WITHHELD.intersection(event):
        event[name] = "<withheld>"
    return event


def _renderers(log_format: str) -> list[Processor]:
    # Tracebacks without the values of local variables: those could be prompts.
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=_as_text)]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
    ]


def _as_text(value: Any) -> str:
    return str(value)
