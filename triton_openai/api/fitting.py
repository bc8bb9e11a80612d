"""Answers that ask for more tokens than the model's context has room for, and get fewer."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from triton_openai.answer.run import Run
from triton_openai.telemetry.request_record import RequestRecord

_log = structlog.get_logger(__name__)

#: The header of an answer that may have fewer tokens than its request asks for: the most that fit the context.
LIMITED_HEADER = "x-max-tokens"


def report_limited(record: RequestRecord, asked: int, runs: Sequence[Run]) -> None:
    """Report to the client and to the log if *runs* may have fewer tokens than *asked*, because no more fit."""
    max_tokens = min([run.generation.sampling.max_tokens for run in runs])
    if max_tokens < asked:
        record.headers = {**record.headers, LIMITED_HEADER: str(max_tokens)}
        _log.info("max_tokens is limited to what fits the context", asked=asked, max_tokens=max_tokens)
