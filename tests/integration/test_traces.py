"""
Traces of the service and of a real Triton behind it, at a real collector: one request, one trace.

The Triton has OpenTelemetry's mode with a rate of 0, so that it records what a ``traceparent`` asks for and nothing
else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.clients import service
from tests.collector import CollectedSpan, Collector, collecting
from tests.conformance.calls import PATHS, ask, request, steered
from tests.proxy_fixture import TRANSPORTS, Answer, Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton, embedded, shared
from triton_openai.app import SERVICE
from triton_openai.config.tree import TracesSettings
from triton_openai.demo.record import Record
from triton_openai.demo.repository import build_repository
from triton_openai.telemetry import tracing
from triton_openai.telemetry.tracing import SCHEMA_URL

PROTOCOLS = ("grpc", "http/protobuf")
MODELS = ("ensemble", "preprocessing", "postprocessing", "tensorrt_llm", "vllm_model", "text_embedding")
CLIENTS_SPAN = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector for everything in this file."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced_triton(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[TestTriton]:
    """A Triton that sends its own spans to the collector."""
    folder = tmp_path_factory.mktemp("traced")
    record = folder / "record.jsonl"
    repository = build_repository(folder / "repository", models=MODELS, record=record)
    trace = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        "rate=0",
        f"opentelemetry,url={collector.http_url}/v1/traces",
        "opentelemetry,resource=service.name=triton",
        "opentelemetry,bsp_schedule_delay=20",
    )
    server = embedded(repository, [f"--trace-config={option}" for option in trace])
    with shared(server):
        yield TestTriton(server, repository, Record(record))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans leave at once, not after five seconds."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@asynccontextmanager
async def traced(
    triton: TestTriton, traces: TracesSettings, *, transport: str = "http", **server: Any
) -> AsyncIterator[Proxy]:
    """Run a service with these *traces* in front of *triton*."""
    settings = msgspec.structs.replace(proxy_settings(triton, transport), traces=traces)
    models = {name: value for name, value in settings.models.items() if name != "tensorrt_llm"}
    settings = changed(msgspec.structs.replace(settings, models=models), server=server)
    async with serving(settings, transport=transport) as proxy:
        await proxy.ready()
        yield proxy


def new_trace(flags: str = "01") -> tuple[str, dict[str, str]]:
    """Return the id of a client's trace, and the headers that continue it."""
    trace = secrets.token_hex(16)
    return trace, {"traceparent": f"00-{trace}-{CLIENTS_SPAN}-{flags}", "tracestate": "client=1"}


def only(spans: list[CollectedSpan], **wanted: str) -> CollectedSpan:
    """Return the one of *spans* with these fields."""
    (found,) = [span for span in spans if all(getattr(span, name) == value for name, value in wanted.items())]
    return found


async def chat(proxy: Proxy, model: str, headers: Mapping[str, str], **fields: Any) -> Answer:
    """Ask *model*."""
    fields = {"stream": True, **fields}
    prompt = fields.pop("prompt", None) or steered("a secret", text="one two three")
    return await proxy.post(PATHS["chat"], request("chat", model, prompt, **fields), **headers)


def is_complete(collector: Collector, trace: str) -> bool:
    """Say whether the service's and Triton's outermost spans of a trace have come."""
    return is_answered(collector, trace) and any(span.name == "InferRequest" for span in collector.of(trace, "triton"))


def is_answered(collector: Collector, trace: str) -> bool:
    """Say whether the service's outermost span of a trace has come, which is the last."""
    return any(span.kind == "SERVER" for span in collector.of(trace, "triton-openai"))


async def complete(
    collector: Collector, proxy: Proxy, call: Callable[[dict[str, str]], Awaitable[Answer]]
) -> tuple[str, Answer]:
    """
    Make *call* with a client's trace, and return its id and the answer once Triton's spans are there too.

    Triton 24.10 overlooks the context of a few calls in a hundred over gRPC, those of its own client as well: there it
    is one of several.
    """
    answers: dict[str, Answer] = {}
    for _ in range(6 if proxy.transport == "grpc" else 1):
        trace, headers = new_trace()
        answers[trace] = await call(headers)
    await collector.until(lambda: any(is_complete(collector, trace) for trace in answers))
    return next((trace, answer) for trace, answer in answers.items() if is_complete(collector, trace))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_trace_from_the_client_to_triton(
    collector: Collector, traced_triton: TestTriton, transport: str, protocol: Any
) -> None:
    """The service's spans are under the client's, and Triton's are under the service's."""
    settings = TracesSettings(otlp_endpoint=collector.url(protocol), otlp_protocol=protocol)
    asked = {"temperature": 0.5, "seed": 7, "stop": ["zz"], "max_tokens": 9}
    async with traced(traced_triton, settings, transport=transport) as proxy:
        trace, answer = await complete(collector, proxy, lambda headers: chat(proxy, "ensemble", headers, **asked))
        port = proxy.client.server.port

    # Triton's outermost span may come before the others.
    steps = {"preprocessing", "tensorrt_llm", "postprocessing"}
    await collector.until(lambda: {"ensemble", *steps} <= {span.name for span in collector.of(trace, "triton")})
    ours, tritons = collector.of(trace, "triton-openai"), collector.of(trace, "triton")
    server = only(ours, kind="SERVER")
    assert ("chat ensemble", CLIENTS_SPAN, "client=1", False) == (
        server.name,
        server.parent,
        server.state,
        server.failed,
    )
    usage = {name: value for name, value in server.attributes.items() if name.startswith("gen_ai.usage.")}
    assert {"gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"} == set(usage)
    assert usage["gen_ai.usage.output_tokens"] == 3 < usage["gen_ai.usage.input_tokens"]
    assert 0 < server.attributes["gen_ai.response.time_to_first_chunk"] < (server.ended - server.began) / 1e9
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "triton",
        "gen_ai.request.model": "ensemble",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["zz"],
        "gen_ai.request.stream": True,
        "gen_ai.response.id": answer.chunks[0]["id"],
        "gen_ai.response.finish_reasons": ["stop"],
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "server.port": port,
        "triton_openai.adapter": "trtllm-ensemble",
        "triton_openai.chat_template": "default",
        "triton_openai.request_id": answer.headers["x-request-id"],
    }
    assert expected == {name: server.attributes.get(name) for name in expected}
    assert {SCHEMA_URL} == server.schemas

    call = only(ours, kind="CLIENT")
    assert ("infer ensemble", server.id, ["first_token"]) == (call.name, call.parent, call.events)
    assert (transport, answer.chunks[0]["id"]) == (
        call.attributes["network.protocol.name"],
        call.attributes["triton.request_id"],
    )
    assert server.began <= call.began <= call.ended <= server.ended

    top = only(tritons, name="InferRequest")
    assert call.id == top.parent
    model = only(tritons, name="ensemble")
    assert (top.id, call.attributes["triton.request_id"]) == (model.parent, model.attributes["triton.request_id"])
    assert steps <= {span.name for span in tritons if span.parent == model.id}
    assert "secret" not in repr(ours)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_does_not_stream_is_carried_too(
    collector: Collector, traced_triton: TestTriton, transport: str
) -> None:
    """An answer in one piece is another call of Triton's; its span has no token but the same place."""
    body = {"model": "text_embedding", "input": "a secret", "encoding_format": "base64"}
    async with traced(traced_triton, TracesSettings(otlp_endpoint=collector.http_url), transport=transport) as proxy:
        trace, answer = await complete(collector, proxy, lambda headers: proxy.post("/v1/embeddings", body, **headers))

    assert 200 == answer.status
    ours = collector.of(trace, "triton-openai")
    server, call = only(ours, kind="SERVER"), only(ours, kind="CLIENT")
    assert ("embeddings text_embedding", ["base64"]) == (
        server.name,
        server.attributes["gen_ai.request.encoding_formats"],
    )
    assert call.id == only(collector.of(trace, "triton"), name="InferRequest").parent
    assert "gen_ai.usage.output_tokens" not in server.attributes


async def test_several_answers_are_several_calls(collector: Collector, traced_triton: TestTriton) -> None:
    """Each has a span, and Triton's spans are under the right one."""
    trace, headers = new_trace()
    async with traced(traced_triton, TracesSettings(otlp_endpoint=collector.http_url)) as proxy:
        await chat(proxy, "vllm_model", headers, n=2, stream=False)
        await collector.until(lambda: is_complete(collector, trace))
        await collector.until(lambda: 2 == sum(s.name == "InferRequest" for s in collector.of(trace, "triton")))

    ours = collector.of(trace, "triton-openai")
    calls = [span for span in ours if span.kind == "CLIENT"]
    tops = [span for span in collector.of(trace, "triton") if span.name == "InferRequest"]
    assert 2 == len(calls) == only(ours, kind="SERVER").attributes["gen_ai.request.choice.count"]
    assert {call.id for call in calls} == {top.parent for top in tops}


async def test_without_a_client_a_trace_begins_here(collector: Collector, traced_triton: TestTriton) -> None:
    """Without a client's trace, the service's span has no parent."""
    async with traced(traced_triton, TracesSettings(otlp_endpoint=collector.http_url)) as proxy:
        name = (await chat(proxy, "vllm_model", {})).headers["x-request-id"]

        def found() -> list[CollectedSpan]:
            return [span for span in collector.spans if span.attributes.get("triton_openai.request_id") == name]

        await collector.until(lambda: bool(found()))

    assert [""] == [span.parent for span in found()]


async def test_waiting_has_a_span(
    collector: Collector, traced_triton: TestTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for others shows for how long."""
    # This one may wait for less than a millisecond.
    monkeypatch.setattr(tracing, "SHORTEST_STAGE", 0)
    trace, headers = new_trace()
    settings = TracesSettings(otlp_endpoint=collector.http_url)
    async with traced(traced_triton, settings, max_running_requests=1) as proxy:
        admission = proxy.client.app[SERVICE].admission
        long = steered(text="a ", repeat=2000, delay_ms=20)
        body = request("chat", "vllm_model", long, stream=True, max_tokens=2000)
        async with proxy.client.post(PATHS["chat"], json=body) as running:
            await running.content.readany()
            waiting = asyncio.create_task(chat(proxy, "vllm_model", headers))
            await collector.until(lambda: bool(admission.queue))
            running.close()
        assert 200 == (await waiting).status
        await collector.until(lambda: is_complete(collector, trace))

    ours = collector.of(trace, "triton-openai")
    server, queue = only(ours, kind="SERVER"), only(ours, name="wait in queue")
    assert server.id == queue.parent
    waited = server.attributes["triton_openai.queued_seconds"]
    # One measurement, in two units.
    assert abs(waited - (queue.ended - queue.began) / 1e9) < 1e-5


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_failures_say_so(collector: Collector, traced_triton: TestTriton, transport: str) -> None:
    """A model that fails is an error; a client that asks for nonsense is none of ours; neither's words are told."""
    async with traced(traced_triton, TracesSettings(otlp_endpoint=collector.http_url), transport=transport) as proxy:
        failing, headers = new_trace()
        await chat(proxy, "vllm_model", headers, prompt=steered("a secret", text="a b c", fail_at=2, delay_ms=20))
        await collector.until(lambda: is_answered(collector, failing))
        refused, headers = new_trace()
        assert 400 == (await chat(proxy, "vllm_model", headers, temperature=9)).status
        unread, headers = new_trace()
        assert 400 == (await proxy.post(PATHS["chat"], b"{", **headers)).status
        await collector.until(lambda: is_answered(collector, unread) and is_answered(collector, refused))

    ours = collector.of(failing, "triton-openai")
    server, call = only(ours, kind="SERVER"), only(ours, kind="CLIENT")
    assert ("upstream_error", "upstream_error") == (server.attributes["error.type"], call.attributes["error.type"])
    assert (True, True, ["first_token"]) == (server.failed, call.failed, call.events)
    # Its status had left when it failed.
    assert 200 == server.attributes["http.response.status_code"]
    server = only(collector.of(refused), kind="SERVER")
    assert ("invalid_value", 400, False) == (
        server.attributes["error.type"],
        server.attributes["http.response.status_code"],
        server.failed,
    )
    # Refused before anybody knew what for
    assert "POST /v1/chat/completions" == only(collector.of(unread), kind="SERVER").name
    assert "secret" not in repr(ours)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves(collector: Collector, traced_triton: TestTriton, stream: bool) -> None:
    """The spans of a client that leaves end when the work is stopped, and say that nobody waited for the answer."""
    trace, headers = new_trace()
    async with traced(traced_triton, TracesSettings(otlp_endpoint=collector.http_url)) as proxy:
        long = steered(text="a ", repeat=2000, delay_ms=20)
        body = request("chat", "vllm_model", long, stream=stream, max_tokens=2000)
        known = len(traced_triton.record.events(event="request"))
        call = asyncio.create_task(proxy.client.post(PATHS["chat"], json=body, headers=headers))
        if stream:
            response = await call
            await response.content.readany()
            response.close()
        else:
            await collector.until(lambda: known < len(traced_triton.record.events(event="request")))
            call.cancel()
        await collector.until(lambda: is_answered(collector, trace))

    ours = collector.of(trace, "triton-openai")
    server, upstream = only(ours, kind="SERVER"), only(ours, kind="CLIENT")
    assert ("cancelled", True) == (server.attributes["error.type"], server.attributes["triton_openai.client_left"])
    assert "cancelled" == upstream.attributes["error.type"]
    assert not server.failed


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_trace_goes_through_where_none_is_made(
    collector: Collector, traced_triton: TestTriton, transport: str
) -> None:
    """Triton goes on with the client's trace, unless it is not recorded."""
    traces: list[str] = []
    unrecorded, not_sampled = new_trace("00")
    async with traced(traced_triton, TracesSettings(), transport=transport) as proxy:
        await chat(proxy, "vllm_model", not_sampled)
        # As above: over gRPC one of several is found.
        for _ in range(6 if transport == "grpc" else 1):
            trace, headers = new_trace()
            traces.append(trace)
            await chat(proxy, "vllm_model", headers)

        def tops() -> list[CollectedSpan]:
            return [span for span in collector.spans if span.trace in traces and span.name == "InferRequest"]

        await collector.until(lambda: bool(tops()))

    assert ("triton", CLIENTS_SPAN) == (tops()[0].service, tops()[0].parent)
    # Sent before it, so it would be here.
    assert [] == collector.of(unrecorded)


async def test_what_is_not_sampled(
    collector: Collector, traced_triton: TestTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK's own sampler decides, for Triton too."""
    unrecorded, headers = new_trace()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with traced(traced_triton, TracesSettings(otlp_endpoint=collector.http_url)) as proxy:
        assert 200 == (await chat(proxy, "vllm_model", headers)).status
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    trace, headers = new_trace()
    async with traced(traced_triton, TracesSettings(otlp_endpoint=collector.http_url)) as proxy:
        await chat(proxy, "vllm_model", headers)
        await collector.until(lambda: is_complete(collector, trace))

    assert [] == collector.of(unrecorded)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_without_a_collector_requests_are_answered(
    collector: Collector, traced_triton: TestTriton, caplog: pytest.LogCaptureFixture, protocol: Any
) -> None:
    """Spans that cannot be sent are lost, at the end too, and somebody is told."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        settings = TracesSettings(otlp_endpoint=f"http://127.0.0.1:{nobody.getsockname()[1]}", otlp_protocol=protocol)
        with caplog.at_level(logging.WARNING):
            async with traced(traced_triton, settings) as proxy:
                for _ in range(3):
                    assert 200 == (await ask(proxy, "chat", "vllm_model", steered(text="a"))).status
                await collector.until(lambda: "export" in caplog.text.lower())


async def test_a_collector_that_speaks_grpc(
    collector: Collector,
    traced_triton: TestTriton,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Behind an exporter over HTTP: the log says once what to set, and nothing else."""
    settings = TracesSettings(otlp_endpoint=collector.grpc_url, otlp_protocol="http/protobuf")
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        async with traced(traced_triton, settings) as proxy:
            said = ""
            async with asyncio.timeout(120):
                while "traces.otlp_protocol" not in said:
                    await chat(proxy, "vllm_model", new_trace()[1])
                    said += capsys.readouterr().out
            for _ in range(3):
                await chat(proxy, "vllm_model", new_trace()[1])
        said += capsys.readouterr().out
    assert 1 == said.count("traces.otlp_protocol")
    assert "BadStatusLine" not in said + caplog.text


async def test_a_stop_without_a_collector(traced_triton: TestTriton, capsys: pytest.CaptureFixture[str]) -> None:
    """The exporter would try for longer than an orchestrator waits."""
    settings = TracesSettings(otlp_endpoint="http://127.0.0.1:9", otlp_protocol="http/protobuf")
    async with traced(traced_triton, settings) as proxy:
        assert 200 == (await ask(proxy, "chat", "vllm_model", steered(text="a"))).status
    (said,) = re.findall(r"the last spans were not sent.*seconds=\S*?([\d.]+)", capsys.readouterr().out)
    # Not for half a minute, and not for so long either where the machine is busy.
    assert float(said) < 10


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "nonsense"},
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01-more"},
        {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "tracestate": "\u00e9=,;" * 200},
    ],
    ids=["nonsense", "zeros", "too-long", "state"],
)
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_malformed_context_is_no_error(
    collector: Collector, traced_triton: TestTriton, transport: str, on: bool, headers: dict[str, str]
) -> None:
    """The request is answered as if there were none."""
    settings = TracesSettings(otlp_endpoint=collector.http_url if on else None)
    async with traced(traced_triton, settings, transport=transport) as proxy:
        assert 200 == (await chat(proxy, "vllm_model", headers)).status


# The last spans of a service have less than a second to leave, which a busy machine may use up.
_PATIENT = """
import sys

if "-m" in sys.orig_argv and any(argument.startswith("triton_openai") for argument in sys.orig_argv):
    import triton_openai.app

    triton_openai.app._LAST_SPANS_SECONDS = 120
"""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return variables with which the processes of a service wait longer until their last spans have left."""
    folder = tmp_path_factory.mktemp("patient")
    (folder / "sitecustomize.py").write_text(_PATIENT)
    return {"PYTHONPATH": str(folder)}


@contextmanager
def process(*arguments: str, **environ: str) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """Run the service as a process; yield its address, and what stops it and returns what it has logged."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_OPENAI_", "OTEL_"))}
    with subprocess.Popen(
        [sys.executable, "-m", "triton_openai", "serve", "--port", "0", "--log-format", "json", *arguments],
        env={**inherited, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:

        def stop() -> list[Any]:
            running.send_signal(signal.SIGTERM)
            _, err = running.communicate(timeout=120)
            assert 0 == running.returncode, err
            return [json.loads(line) for line in err.splitlines()]

        try:
            assert running.stdout is not None
            yield json.loads(running.stdout.readline())["address"], stop
        finally:
            running.kill()


def fetch(address: str, headers: Mapping[str, str]) -> None:
    """Ask the service at *address*."""
    body = json.dumps(request("chat", "ensemble", steered(text="a"))).encode()
    call = urllib.request.Request(f"{address}{PATHS['chat']}", body, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(call, timeout=120) as response:
        assert 200 == response.status


def test_the_process_is_configured_by_the_standard_variables(
    collector: Collector, traced_triton: TestTriton, patient: Mapping[str, str]
) -> None:
    """
    The process takes its name and its headers from the standard variables, and sends the last spans when it stops.
    """
    environ = {
        **patient,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc_url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-token=open",
        "OTEL_SERVICE_NAME": "front",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        # Longer than the test: only the end sends them.
        "OTEL_BSP_SCHEDULE_DELAY": "3600000",
    }
    trace, headers = new_trace()
    with process("--triton-url", traced_triton.grpc_url, **environ) as (address, stop):
        fetch(address, headers)
        lines = stop()

    server = only(collector.of(trace, "front"), kind="SERVER")
    assert "test" == server.resource["deployment.environment.name"]
    assert any(given.get("x-token") == "open" for given in collector.headers)
    (line,) = [line for line in lines if line["event"] == "request" and line["path"] == PATHS["chat"]]
    assert (trace, server.id, "01") == (line["trace_id"], line["span_id"], line["trace_flags"])
    assert line["response_id"] == server.attributes["gen_ai.response.id"]


def test_a_triton_that_is_started_here_joins_in(
    collector: Collector, traced_triton: TestTriton, tmp_path: Path, patient: Mapping[str, str]
) -> None:
    """With nothing more to be said than where the collector is."""
    repository = build_repository(tmp_path, models=["ensemble", "preprocessing", "postprocessing", "tensorrt_llm"])
    # Several, for the same reason as in `complete`.
    traces = [new_trace() for _ in range(6)]
    arguments = ["--model-repository", str(repository.path), "--otlp-endpoint", collector.http_url]
    with process(*arguments, **patient) as (address, stop):
        for _, headers in traces:
            fetch(address, headers)
        stop()

    trace = next(trace for trace, _ in traces if collector.of(trace, "triton-inference-server"))
    call = only(collector.of(trace, "triton-openai"), kind="CLIENT")
    top = only(collector.of(trace, "triton-inference-server"), name="InferRequest")
    assert call.id == top.parent


def test_every_worker_sends_its_own(
    collector: Collector, traced_triton: TestTriton, tmp_path: Path, patient: Mapping[str, str]
) -> None:
    """Each is an instance of the service, and sends its last spans when they all end."""
    arguments = ["--workers", "2", "--triton-url", traced_triton.http_url]
    address = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http_url}
    environ = {**patient, **address, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
    traces: list[tuple[str, dict[str, str]]] = []
    # Its own interpreter, because OpenTelemetry reads its variables when it is imported.
    with service.serving(tmp_path, *arguments, settings=None, first=None, fork=False, **environ) as running:

        def both_have_answered() -> bool:
            # Over a connection of its own: the kernel chooses the worker, and one begins later than the other.
            traces.append(new_trace())
            fetch(running.address, traces[-1][1])
            lines = map(json.loads, running.log_lines())
            return 2 == len({line["worker"] for line in lines if line.get("path") == PATHS["chat"]})

        service.until(both_have_answered)
        running.process.terminate()
        assert 0 == running.process.wait(120)

    servers = [only(collector.of(trace, "triton-openai"), kind="SERVER") for trace, _ in traces]
    assert 2 == len({span.resource["service.instance.id"] for span in servers})
