"""Calls of tools by what became of them: in the metrics, and the first repair of each kind in the log."""

from __future__ import annotations

import structlog

from triton_openai.config.worker import Worker
from triton_openai.telemetry.instruments import TOOL_CALLS
from triton_openai.telemetry.metrics import Metrics
from triton_openai.telemetry.request_record import RequestRecord


def test_calls_are_counted_and_repairs_logged_once() -> None:
    """Every call counts; the log names each repair of a model once, without anything that the model wrote."""
    metrics = Metrics(Worker())
    with structlog.testing.capture_logs() as logs:
        for model in ("a", "a", "b"):
            record = RequestRecord(request_id="1", method="POST", path="/")
            record.identify("chat", model=model, adapter="vllm")
            record.tool_calls = lambda: [("strict", ""), ("repaired", "quotes"), ("cut", "")]
            metrics.ended(record)
        # One that is no request for a model
        metrics.ended(RequestRecord(request_id="1", method="GET", path="/"))

    assert [("a", "quotes"), ("b", "quotes")] == [(line["model"], line["repair"]) for line in logs]
    for model, count in (("a", 2), ("b", 1)):
        for outcome, repair in (("strict", ""), ("repaired", "quotes"), ("cut", "")):
            assert [count] == metrics.child(TOOL_CALLS, model, "vllm", outcome, repair).numbers
