"""Spans from the records of requests, and what of a client's trace goes on to Triton."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import HttpVersion11
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from tests.unit.telemetry.fake_answer import FakeAnswer
from triton_openai.api.chat import ChatRequest
from triton_openai.api.completions import CompletionRequest
from triton_openai.api.embeddings import EmbeddingsRequest
from triton_openai.api.guides import JsonObjectFormat, JsonSchemaFormat, NamedSchema, StructuralTagFormat, TextFormat
from triton_openai.app import create_app
from triton_openai.config.tree import ServerSettings, Settings, TracesSettings
from triton_openai.errors import ConfigurationError, InvalidRequest, UpstreamError
from triton_openai.generation import FinishReason, Usage
from triton_openai.telemetry import otlp
from triton_openai.telemetry.logging import configure_logging
from triton_openai.telemetry.request_record import CLIENT_CLOSED_REQUEST, RequestRecord, Stage
from triton_openai.telemetry.tracing import SHORTEST_STAGE, Tracing
from triton_openai.triton.tensors import InferRequest

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
REQUEST = InferRequest(model="engine", id="chatcmpl-1", inputs=())
_HEADER_VALUE = re.compile(r"[ -~]*")


class Triton:
    """Where requests go."""

    name = None

    def address_of(self, request: Any) -> str:
        return "grpc://triton:8001"


TRITON = Triton()


class Recorder:
    """Tracing with its spans at hand."""

    def __init__(self, sampler: Sampler | None = None, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.lost: list[int] = []
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.tracing = Tracing(**options)
        self.tracing.spans = otlp.SdkSpans(provider, self.exporter, SimpleSpanProcessor, self.lost.append)

    def begin(self, *, method: str = "POST", headers: Any = None) -> RequestRecord:
        """Let a request come."""
        observation = RequestRecord(
            request_id="r", method=method, path="/v1/chat/completions", request=_request(headers)
        )
        self.tracing.started(observation)
        return observation

    def identify(self, observation: RequestRecord, body: object = None, *, operation: str = "chat") -> None:
        """Say what it asks for."""
        observation.identify(operation, model="m", adapter="a", stream=True)
        self.tracing.identified(observation)
        observation.parameters = body

    def end(self, observation: RequestRecord, **fields: Any) -> dict[str, ReadableSpan]:
        """End it, and return its spans by their names."""
        for name, value in {"status": 200, **fields}.items():
            setattr(observation, name, value)
        observation.end(time.monotonic())
        self.tracing.ended(observation)
        # What cannot be encoded would take its whole batch with it.
        encode_spans(self.exporter.get_finished_spans()).SerializeToString()
        return {span.name: span for span in self.exporter.get_finished_spans()}


def _request(headers: Mapping[str, str] | None) -> Any:
    """Return what the record keeps of a request: a real one cannot be made with headers that are no text."""
    head = CIMultiDictProxy(CIMultiDict(headers or {}))
    return SimpleNamespace(headers=head, scheme="http", version=HttpVersion11)


@pytest.fixture
def recorder() -> Recorder:
    """Tracing that records everything."""
    return Recorder()


def values(span: ReadableSpan) -> dict[str, Any]:
    """Return the attributes of *span*."""
    return dict(span.attributes or {})


def test_what_was_asked_and_answered(recorder: Recorder) -> None:
    """Everything that the record tells, in the names of the conventions."""
    observation = recorder.begin(headers={"Host": "api.example.com:8443", "User-Agent": "curl"})
    body = ChatRequest(
        model="m",
        messages=[],
        temperature=0,
        top_p=0.5,
        top_k=3,
        frequency_penalty=1,
        presence_penalty=-1,
        seed=5,
        stop=["a", "b"],
        n=2,
        max_tokens=3,
        max_completion_tokens=4,
        response_format=JsonObjectFormat(),
    )
    recorder.identify(observation, body)
    usage = Usage(prompt_tokens=7, completion_tokens=11, cached_tokens=5)
    answer = FakeAnswer(first=observation.began + 0.25, finish_reason=FinishReason.STOP, usage=usage)
    spans = recorder.end(
        observation,
        answers=[answer, answer],
        n=2,
        response_id="chatcmpl-1",
        response_model="behind-the-alias",
        reasoning_tokens=lambda: 6,
        queued_seconds=0.5,
    )

    span = spans["chat m"]
    assert (SpanKind.SERVER, None, StatusCode.UNSET) == (span.kind, span.parent, span.status.status_code)
    assert {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "network.protocol.version": "1.1",
        "server.address": "api.example.com",
        "server.port": 8443,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "user_agent.original": "curl",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "triton",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": 3.0,
        "gen_ai.request.frequency_penalty": 1.0,
        "gen_ai.request.presence_penalty": -1.0,
        "gen_ai.request.seed": 5,
        "gen_ai.request.stop_sequences": ("a", "b"),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.output.type": "json",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "behind-the-alias",
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.25),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 22,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.reasoning.output_tokens": 6,
        "triton_openai.adapter": "a",
        "triton_openai.queued_seconds": 0.5,
        "triton_openai.request_id": "r",
    } == values(span)


def test_what_was_not_said_is_not_there(recorder: Recorder) -> None:
    """Defaults of ours or of a backend are nothing that a client asked for."""
    observation = recorder.begin()
    recorder.identify(
        observation, CompletionRequest(model="m", prompt="secret", stop="zz"), operation="text_completion"
    )
    found = values(recorder.end(observation)["text_completion m"])

    asked = {name for name in found if name.startswith("gen_ai.request.")}
    assert {"gen_ai.request.model", "gen_ai.request.stop_sequences", "gen_ai.request.stream"} == asked
    assert ("zz",) == found["gen_ai.request.stop_sequences"]
    assert not {name for name in found if name.startswith(("gen_ai.response.", "gen_ai.usage."))}
    assert "secret" not in str(found)


def test_output_types() -> None:
    """What the client wants to get, where the conventions have a word for it."""
    for form, kind in (
        (TextFormat(), "text"),
        (JsonSchemaFormat(json_schema=NamedSchema(schema={})), "json"),
        (StructuralTagFormat(), None),
        (None, None),
    ):
        recorder = Recorder()
        observation = recorder.begin()
        recorder.identify(observation, ChatRequest(model="m", messages=[], response_format=form))
        found = values(recorder.end(observation)["chat m"])

        assert kind == found.get("gen_ai.output.type")
        assert isinstance(found["gen_ai.request.model"], str)


def test_content_that_was_asked_for() -> None:
    """Prompts and answers are there as JSON, cut; and by default they are not."""
    body = msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "secret"}]}, ChatRequest)
    wanted = (None, None), ('[{"role":"user","parts":[{"type":"text","content":"secr…(+2 characters)"}]}]', "yes")
    for characters, (asked, answered) in zip((None, 4), wanted, strict=True):
        recorder = Recorder(content=characters)
        observation = recorder.begin()
        recorder.identify(observation, body)
        found = values(recorder.end(observation, answers=[FakeAnswer(text="yes")])["chat m"])

        assert asked == found.get("gen_ai.input.messages")
        assert (answered or "None") in str(found.get("gen_ai.output.messages"))
        assert characters is not None or "secr" not in str(found)


def test_embeddings(recorder: Recorder) -> None:
    """Embeddings have a dimension and no output."""
    observation = recorder.begin()
    body = EmbeddingsRequest(model="m", input="secret", encoding_format="base64", dimensions=64)
    recorder.identify(observation, body, operation="embeddings")
    found = values(recorder.end(observation, input_tokens=3)["embeddings m"])

    assert (("base64",), 64, 3) == (
        found["gen_ai.request.encoding_formats"],
        found["gen_ai.embeddings.dimension.count"],
        found["gen_ai.usage.input_tokens"],
    )
    assert "gen_ai.usage.output_tokens" not in found


def test_lines_of_batches_are_linked(recorder: Recorder) -> None:
    """A line has a trace of its own, and a link to the span of the request that made its batch."""
    for made_by, links in ((PARENT, [("a" * 32, "b" * 16)]), ("", [])):
        record = RequestRecord(request_id="r", method="POST", path="/v1/x", batch="batch_1", batch_trace=made_by)
        recorder.tracing.started(record)
        recorder.tracing.ended(record)
        span = recorder.exporter.get_finished_spans()[-1]
        assert span.attributes is not None
        assert "batch_1" == span.attributes["triton_openai.batch"]
        assert span.parent is None
        assert links == [(f"{one.context.trace_id:x}", f"{one.context.span_id:x}") for one in span.links]
        encode_spans([span])


def test_numbers_beyond_64_bits_cost_no_batch(recorder: Recorder) -> None:
    """OTLP has no place for them."""
    observation = recorder.begin()
    body = ChatRequest(model="m", messages=[], seed=2**64 - 1, max_tokens=2**63, temperature=0.5)
    recorder.identify(observation, body)
    found = values(recorder.end(observation)["chat m"])

    assert {"gen_ai.request.temperature": 0.5} == {
        name: value for name, value in found.items() if name in ("gen_ai.request.seed", "gen_ai.request.temperature")
    }


def test_stages_and_calls_lie_under_the_request(recorder: Recorder) -> None:
    """With their own times, and Triton is told the call's span as its parent. A stage of no time has none."""
    observation = recorder.begin(headers={"traceparent": PARENT, "tracestate": "x=1"})
    recorder.identify(observation)
    began = observation.began
    observation.stages += [
        Stage("load images", began, began + SHORTEST_STAGE / 2),
        Stage("render prompt", began, began + SHORTEST_STAGE * 2),
    ]
    with pytest.raises(InvalidRequest), observation.stage("tokenize prompt"):
        raise InvalidRequest("no")
    observation.stages.append(Stage("wait in queue", began - 1))
    answer = FakeAnswer()
    sent = observation.call_tracer.begin(REQUEST, answer, TRITON, lora="sql")
    # Later than the call begins, however long that takes here.
    answer.first = observation.began + 1000
    answer.ended = observation.began + 2000
    spans = recorder.end(observation, answers=[answer])

    server, call = spans["chat m"], spans["infer engine"]
    assert {"chat m", "render prompt", "tokenize prompt", "wait in queue", "infer engine"} == set(spans)
    assert server.parent is not None
    assert ("b" * 16, "a" * 32) == (f"{server.parent.span_id:016x}", f"{server.context.trace_id:032x}")
    assert {server.context.span_id} == {
        span.parent.span_id for span in spans.values() if span is not server and span.parent is not None
    }
    assert StatusCode.ERROR is spans["tokenize prompt"].status.status_code
    assert ({"x-request-id", "traceparent", "tracestate"}, "x=1") == (set(sent.headers), sent.headers["tracestate"])
    assert f"00-{'a' * 32}-{call.context.span_id:016x}-01" == sent.headers["traceparent"]
    assert {
        "triton.model_name": "engine",
        "triton.request_id": "chatcmpl-1",
        "network.protocol.name": "grpc",
        "server.address": "triton",
        "server.port": 8001,
        "triton_openai.lora": "sql",
    } == values(call)
    (event,) = call.events
    assert call.end_time is not None
    assert server.start_time is not None
    assert "first_token" == event.name
    assert abs(event.timestamp - server.start_time - 1000e9) < 1e8
    assert abs(call.end_time - server.start_time - 2000e9) < 1e8


def test_a_traced_request_is_no_garbage(recorder: Recorder) -> None:
    """The last reference frees its prompt and its answer, without the garbage collector."""
    record = recorder.begin()
    recorder.identify(record)
    answer = FakeAnswer()
    record.call_tracer.begin(REQUEST, answer, TRITON)
    recorder.end(record, answers=[answer])
    record.release()
    freed = weakref.ref(answer)
    gc.disable()
    del record, answer
    gc.enable()

    assert freed() is None


def test_a_span_begins_with_its_request(recorder: Recorder) -> None:
    """A span begins with its request, however late it is made: all times of the record lie within it."""
    observation = RequestRecord(request_id="r", method="POST", path="/", began=time.monotonic() - 5)
    recorder.tracing.started(observation)
    (span,) = recorder.end(observation).values()

    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time >= 5e9


def test_an_answer_that_was_asked_for_twice(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt ends where the second begins."""
    observation = recorder.begin()
    recorder.identify(observation)
    answer = FakeAnswer(first=time.monotonic(), ended=time.monotonic())
    began = time.time_ns()
    moments = [began, began + 5_000_000_000]
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", iter(moments).__next__)
        for _ in moments:
            observation.call_tracer.begin(REQUEST, answer, TRITON)
    recorder.end(observation, answers=[answer])

    first, second = (span for span in recorder.exporter.get_finished_spans() if span.kind is SpanKind.CLIENT)
    assert moments[1] == first.end_time
    assert ([], 1, StatusCode.ERROR) == (list(first.events), len(second.events), first.status.status_code)


def test_how_it_ended() -> None:
    """An error of the service, one of the client's, a client that left: a word from a list, and no message."""
    cases: list[tuple[dict[str, Any], tuple[str | None, bool]]] = [
        ({"error": UpstreamError("secret"), "status": 200}, ("upstream_error", True)),
        ({"error": InvalidRequest("secret"), "status": 400}, ("invalid_request", False)),
        ({"client_left": True, "status": 200}, ("cancelled", False)),
        ({"client_left": True, "status": CLIENT_CLOSED_REQUEST, "error": UpstreamError("")}, ("cancelled", False)),
        ({}, (None, False)),
    ]
    for fields, found in cases:
        recorder = Recorder()
        observation = recorder.begin()
        recorder.identify(observation)
        span = recorder.end(observation, **fields)["chat m"]

        assert found == (values(span).get("error.type"), span.status.status_code is StatusCode.ERROR)
        assert (fields.get("status") == CLIENT_CLOSED_REQUEST) is ("http.response.status_code" not in values(span))
        assert "secret" not in span.to_json()


def test_how_a_call_ended() -> None:
    """Each request to Triton has its own end."""
    for answer, error in (
        (FakeAnswer(error=UpstreamError("secret")), ("upstream_error", True)),
        (FakeAnswer(cancelled=True), ("cancelled", False)),
        (FakeAnswer(), (None, False)),
    ):
        recorder = Recorder()
        observation = recorder.begin()
        recorder.identify(observation)
        observation.call_tracer.begin(REQUEST, answer, TRITON)
        span = recorder.end(observation, answers=[answer])["infer engine"]

        assert error == (values(span).get("error.type"), span.status.status_code is StatusCode.ERROR)
        assert "secret" not in span.to_json()


def test_how_a_call_without_a_stream_ended() -> None:
    """The span of a call without a stream has the error with which its block ended."""
    for error, word in ((UpstreamError("secret"), "upstream_error"), (TimeoutError(), "cancelled")):
        recorder = Recorder()
        observation = recorder.begin()
        with pytest.raises(type(error)), observation.call_tracer.call(REQUEST, TRITON):
            raise error
        span = recorder.end(observation)["infer engine"]

        assert word == values(span)["error.type"]


def test_reads_have_no_spans(recorder: Recorder) -> None:
    """Health checks, lists and metrics ask for no work."""
    assert {} == recorder.end(recorder.begin(method="GET"))


def test_what_is_not_recorded_is_not_carried() -> None:
    """Triton would record it all the same."""
    recorder = Recorder(ALWAYS_OFF)
    observation = recorder.begin(headers={"traceparent": PARENT})
    recorder.identify(observation)
    sent = observation.call_tracer.begin(REQUEST, FakeAnswer(), TRITON)

    assert {} == recorder.end(observation)
    assert {"x-request-id": "r"} == sent.headers
    # Other services of the trace may have recorded theirs.
    assert ("a" * 32, "00") == (observation.log_fields["trace_id"], observation.log_fields["trace_flags"])


def test_headers_are_handed_on() -> None:
    """Triton gets the headers of a trace that is recorded, and the request's id always."""
    observation = RequestRecord(
        request_id="r",
        method="POST",
        path="/",
        request=_request({"traceparent": PARENT, "tracestate": "x=1"}),
    )
    assert {"x-request-id": "r"} == observation.call_tracer.begin(REQUEST, FakeAnswer(), TRITON).headers
    Tracing().started(observation)

    with observation.call_tracer.call(REQUEST, TRITON) as sent:
        assert {"x-request-id": "r", "traceparent": PARENT, "tracestate": "x=1"} == sent.headers


def passed_on(headers: Any) -> dict[str, str]:
    """Return the trace context that goes to Triton where no spans are made."""
    observation = RequestRecord(request_id="r", method="POST", path="/", request=_request(headers))
    Tracing().started(observation)
    sent = observation.call_tracer.begin(REQUEST, FakeAnswer(), TRITON).headers
    return {name: value for name, value in sent.items() if name != "x-request-id"}


def test_what_continues_a_trace() -> None:
    """A trace that is recorded is continued, by W3C's recommendation, and no other."""
    for parent, sent in (
        (PARENT, PARENT),
        (PARENT[:-2] + "03", PARENT[:-2] + "03"),
        # A version of the future goes on as the one that is known.
        (f"cc{PARENT[2:]}-more", PARENT),
        (PARENT[:-2] + "00", None),
        (f"{PARENT}-more", None),
        (f"ff{PARENT[2:]}", None),
        (PARENT.upper(), None),
        (f"00-{'0' * 32}-{'b' * 16}-01", None),
        (f"00-{'a' * 32}-{'0' * 16}-01", None),
        ("", None),
    ):
        assert ({} if sent is None else {"traceparent": sent}) == passed_on({"traceparent": parent}), parent
    # Nobody can say which of two it is.
    assert {} == passed_on([("traceparent", PARENT), ("Traceparent", PARENT)])


def test_states() -> None:
    """A state that is no list of names and values is left out, and the trace goes on without it."""
    for states, found in (
        (["a=1"], "a=1"),
        (["a=1,,  b=2 ,"], "a=1,b=2"),
        (["a=1", "1@b=x y"], "a=1,1@b=x y"),
        (["a=1,a=2"], None),
        (["a"], None),
        (["A=1"], None),
        (["a=\u00e9"], None),
        ([f"a={'1' * 512}"], None),
        ([",".join(f"a{number}=1" for number in range(33))], None),
    ):
        headers = [("traceparent", PARENT), *(("TraceState", state) for state in states)]
        assert {"traceparent": PARENT, **({} if found is None else {"tracestate": found})} == passed_on(headers), states


def test_invalid_headers_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid headers are not logged: they may hold anything, and clients could fill the log with them."""
    configure_logging(ServerSettings())
    for state in ("a secret", f"a={'1' * 600}"):
        assert {"traceparent": PARENT} == passed_on({"traceparent": PARENT, "tracestate": state})
    assert {} == passed_on({"traceparent": f"cc{PARENT[2:]}-{'x' * 512}"})

    assert "" == capsys.readouterr().err


_hex = st.text("0123456789abcdefABCDEFg", max_size=40)
_parents = st.one_of(
    st.text(max_size=80),
    st.builds("{}-{}-{}-{}".format, _hex, _hex, _hex, _hex),
    st.builds(f"{{}}-{'a' * 32}-{'b' * 16}-{{}}".format, _hex, _hex),
)
# What aiohttp makes of the bytes of a header.
_header = st.binary(max_size=60).map(lambda data: data.decode("utf-8", "surrogateescape"))


_states = st.one_of(st.text("a1=, @;", max_size=20), st.text(max_size=80), _header)


@settings(deadline=None)
@given(parent=st.one_of(st.just(PARENT), _parents, _header), state=_states, agent=_header, host=_header)
def test_no_header_fails_a_request(parent: str, state: str, agent: str, host: str) -> None:
    """Whatever stands in them: the request goes on, what goes to Triton is a header, and the spans can be sent."""
    headers = {"traceparent": parent, "tracestate": state, "User-Agent": agent, "Host": host}
    recorder = Recorder()
    observation = recorder.begin(headers=headers)
    recorder.identify(observation, SimpleNamespace(stop=[agent]))
    traced = observation.call_tracer.begin(REQUEST, FakeAnswer(), TRITON).headers
    recorder.end(observation)

    for sent in (traced, passed_on(headers)):
        assert all(_HEADER_VALUE.fullmatch(value) for value in sent.values())
        # Both transports have to take them.
        "".join(sent.values()).encode("ascii")


def test_a_missing_exporter_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing exporter is an error at the start, which says how to install it, or to do without."""
    for protocol in ("grpc", "http"):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter", None)
    for port in (4317, 4318):
        settings = Settings(traces=TracesSettings(otlp_endpoint=f"http://127.0.0.1:{port}"))
        with pytest.raises(ConfigurationError, match=r"triton-openai\[otlp\]"):
            create_app(settings)


@pytest.mark.parametrize(
    "port, variable, value",
    [(4318, "OTEL_BSP_MAX_QUEUE_SIZE", "10"), (4317, "OTEL_EXPORTER_OTLP_COMPRESSION", "zstd")],
)
async def test_what_the_sdk_does_not_take_is_said_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, port: int, variable: str, value: str
) -> None:
    """A variable that the SDK does not take is named without a traceback, as settings of the service are."""
    monkeypatch.setenv(variable, value)
    settings = TracesSettings(otlp_endpoint=f"http://127.0.0.1:{port}")
    lost: list[int] = []
    with pytest.raises(ConfigurationError, match="OTEL_"):
        async with otlp.spans(settings, flush_timeout=1, lost=lost.append):
            pass


def test_what_the_sdk_does_not_take_when_it_is_imported_is_said() -> None:
    """A limit that the SDK does not take when it is imported is named too."""
    program = (
        "from triton_openai.app import create_app; from triton_openai.config.tree import Settings; "
        "from triton_openai.config.tree import TracesSettings; "
        "from triton_openai.errors import ConfigurationError\n"
        "try: create_app(Settings(traces=TracesSettings(otlp_endpoint='http://127.0.0.1:4318')))\n"
        "except ConfigurationError as error: print(error.message)"
    )
    environ = {**os.environ, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-1"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT" in done.stdout


def test_names_of_the_environment_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's own name is for who has not chosen one."""
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    assert "triton-openai" == otlp.resource().attributes["service.name"]
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,service.version=7")
    assert ("mine", "7") == tuple(otlp.resource().attributes[name] for name in ("service.name", "service.version"))
