"""The line of a request: what it has, and at which level; that of its content, where that is wanted."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from tests.cases import every_case
from tests.unit.telemetry.fake_answer import FakeAnswer
from triton_openai.api.completions import CompletionRequest
from triton_openai.errors import ServiceError
from triton_openai.generation import FinishReason, Usage
from triton_openai.telemetry.access_log import AccessLog, ContentLog
from triton_openai.telemetry.request_record import RequestRecord


def observed(method: str = "POST", **fields: Any) -> RequestRecord:
    """Return a request that took a little over a tenth of a second."""
    fields = {"request_id": "1", "path": "/x", "began": 100.0, "status": 200, **fields}
    record = RequestRecord(method=method, **fields)
    record.end(100.12346)
    return record


@every_case(
    "method, fields, level, told",
    [
        ("GET", {}, "debug", {}),
        ("HEAD", {}, "debug", {}),
        ("OPTIONS", {}, "debug", {}),
        ("GET", {"error": ServiceError("x", code="broken"), "status": 500}, "info", {"error": "broken"}),
        ("GET", {"client_left": True}, "info", {"client_left": True}),
        ("POST", {"key": "team"}, "info", {"key": "team"}),
        # Not HTTP
        ("", {}, "info", {}),
    ],
)
def test_a_request_for_no_model(method: str, fields: dict[str, Any], level: str, told: dict[str, Any]) -> None:
    """Reads that go well are for those who debug."""
    with capture_logs() as lines:
        AccessLog().ended(observed(method, **fields))

    where = {"method": method, "path": "/x"} if method else {}
    status = fields.get("status", 200)
    expected = {"request_id": "1", "status": status, "seconds": 0.1235, "event": "request", "log_level": level}
    assert [{**expected, **where, **told}] == lines


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USAGE = Usage(prompt_tokens=5, completion_tokens=2)


@every_case(
    "answers, fields, told",
    [
        ([], {}, {}),
        ([FakeAnswer()], {}, {}),
        ([], {"response_id": "r", "queued_seconds": 0.25}, {"response_id": "r", "queued_seconds": 0.25}),
        (
            [FakeAnswer(usage=USAGE, first=100.05, finish_reason=reason) for reason in (STOP, LENGTH, STOP)],
            {"n": 3},
            {"input_tokens": 5, "output_tokens": 6, "first_token_seconds": 0.05, "finish_reason": "stop,length"},
        ),
    ],
)
def test_a_request_for_a_model(answers: list[FakeAnswer], fields: dict[str, Any], told: dict[str, Any]) -> None:
    """The line of a request has the model, and of the answers what is known."""
    record = observed(answers=answers, **fields)
    record.identify("chat", model="m", adapter="a", stream=True)
    with capture_logs() as lines:
        AccessLog().ended(record)

    (line,) = lines
    assert {"model": "m", "adapter": "a", "stream": True, **told} == {
        name: value
        for name, value in line.items()
        if name not in ("request_id", "method", "path", "status", "seconds", "event", "log_level")
    }


def test_the_content_of_a_request() -> None:
    """Only a request for a model has one; each text is cut."""
    record = observed(parameters=CompletionRequest(prompt="Hello"), answers=[FakeAnswer(text="Hi!")])
    with capture_logs() as lines:
        ContentLog(2).ended(record)
        record.identify("text_completion", model="m", adapter="a")
        ContentLog(2).ended(record)

    (line,) = lines
    assert ("content", "1", "m") == (line["event"], line["request_id"], line["model"])
    assert ["He…(+3 characters)", "Hi…(+1 characters)"] == [
        line[f"{side}_messages"][0]["parts"][0]["content"] for side in ("input", "output")
    ]
