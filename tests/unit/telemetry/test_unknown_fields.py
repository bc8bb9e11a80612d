"""Request fields that nobody knows: who is told of them, and that clients cannot make much of it."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import structlog

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from tests.scrape import scrape
from triton_openai.api.bodies import parse_json
from triton_openai.api.completions import CompletionRequest
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.config.worker import Worker
from triton_openai.telemetry.access_log import UnknownFields
from triton_openai.telemetry.metrics import Metrics
from triton_openai.telemetry.request_record import RequestRecord

COUNTED = "triton_openai_unknown_fields_total"


async def test_a_mistyped_parameter_is_found() -> None:
    """The log names it once, with what was meant, and every request counts; the answer is as without it."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "one"}]
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            await proxy.ready()
            body = {"model": "m", "prompt": "Hi", "repetition_penality": 1.2, "user": "me", "nobody_wants": None}
            with structlog.testing.capture_logs() as logs:
                for _ in range(3):
                    assert 200 == (await proxy.post("/v1/completions", body)).status
                nobody = await proxy.post("/v1/completions", {**body, "model": "x", "top_kk": 1})
            found = await scrape(proxy)

    assert 404 == nobody.status
    told = [line for line in logs if line["event"] == "unknown request field is ignored"]
    assert [("m", "repetition_penality", "repetition_penalty", "warning")] == [
        (line["model"], line["field"], line["similar"], line["log_level"]) for line in told
    ]
    assert 3 == found.sum(COUNTED, model="m", field="repetition_penality") == found.sum(COUNTED)


def test_names_that_clients_make_up_are_bounded() -> None:
    """Names that clients make up are bounded in number and form: they are labels of metrics and stand in the log."""
    counted: list[str] = []
    metrics = Metrics(Worker())
    metrics.child = lambda _instrument, _model, _adapter, name: Mock(inc=lambda: counted.append(name))  # type: ignore[assignment]
    unknown = UnknownFields(metrics)

    def request(*names: str) -> None:
        record = RequestRecord(request_id="1", method="POST", path="/")
        record.identify("chat", model="m", adapter="a")
        record.unknown_fields = names
        unknown.ended(record)

    with structlog.testing.capture_logs() as logs:
        request("sk-secret key", "x" * 41, "ünï", "", "1a")
        assert ["other"] == counted
        for number in range(1000):
            request(f"name_{number}")
        request("name_5")

    assert 101 == len(set(counted)) == len(logs)
    assert 1 + 1000 + 1 == len(counted)
    assert "name_5" == counted[-1]


class Body(msgspec.Struct):
    """A request with a field that has another name in JSON."""

    kind: str | None = msgspec.field(name="type", default=None)


def test_each_model_is_told_of_once() -> None:
    """With the field that has almost this name, by its name in JSON, if there is one."""
    unknown = UnknownFields(Metrics(Worker()))
    with structlog.testing.capture_logs() as logs:
        for model in ("a", "b", "a"):
            record = RequestRecord(request_id="1", method="POST", path="/", parameters=Body())
            record.identify("chat", model=model, adapter="a")
            record.unknown_fields = ("typ", "size")
            unknown.ended(record)

    assert [("a", "typ", "type"), ("a", "size", None), ("b", "typ", "type"), ("b", "size", None)] == [
        (line["model"], line["field"], line.get("similar")) for line in logs
    ]


def test_few_names_of_a_request_are_looked_at() -> None:
    """A body may hold thousands."""
    body = b'{"prompt":"a",%s}' % b",".join(b'"n%d":1' % number for number in range(5000))
    ignored: list[str] = []

    assert "a" == parse_json(body, CompletionRequest, ignored).prompt
    assert [f"n{number}" for number in range(16)] == ignored
