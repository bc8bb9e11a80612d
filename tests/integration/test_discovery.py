"""Discovery: what Triton has shows within moments, and a Triton that is away is waited for."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
import yaml
from yarl import URL

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, changed, read, serving
from tests.triton_fixture import embedded, frozen, shared
from triton_openai.cli.inspect import inspect_models, render
from triton_openai.config.tree import DefaultParameters, ModelDefaults, ModelSettings, Settings, TritonSettings
from triton_openai.demo.record import Record
from triton_openai.demo.repository import DemoRepository, build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

# vLLM's tensors, declared by an ensemble around it.
_WRAPPER = """
name: "team_wrapper"
platform: "ensemble"
max_batch_size: 0
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "vllm_model" model_version: -1
    input_map { key: "text_input" value: "text_input" }
    input_map { key: "stream" value: "stream" }
    input_map { key: "sampling_parameters" value: "sampling_parameters" }
    input_map { key: "exclude_input_in_output" value: "exclude_input_in_output" }
    output_map { key: "text_output" value: "text_output" }
  }
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> DemoRepository:
    """The models of this module's own Triton."""
    folder = tmp_path_factory.mktemp("discovery")
    return build_repository(folder / "models", models=["text_embedding", "vllm_model"], record=folder / "record.jsonl")


@pytest.fixture(scope="module")
def record(repository: DemoRepository) -> Record:
    """What its models have been asked."""
    assert repository.record is not None
    return Record(repository.record)


@pytest.fixture(scope="module")
def server(repository: DemoRepository) -> Iterator[EmbeddedTriton]:
    """A small Triton of this module's own, in which models are loaded and unloaded by hand."""
    wrapper = repository.path / "team_wrapper"
    (wrapper / "1").mkdir(parents=True)
    (wrapper / "config.pbtxt").write_text(_WRAPPER)
    server = embedded(repository, model_control_mode="explicit")
    with shared(server):
        yield server


def control(server: EmbeddedTriton, model: str, action: str) -> None:
    """Load or unload a model."""
    address = f"{server.http_url}/v2/repository/models/{model}/{action}"
    with urllib.request.urlopen(urllib.request.Request(address, b"{}"), timeout=120) as answer:
        assert 200 == answer.status


def settings_of(url: str, **parts: Any) -> Settings:
    """Return settings that look often, so that tests need not wait."""
    return Settings(triton=TritonSettings(url=(url,), refresh_interval=0.05), **parts)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for *condition*; the deadline only ends a test that has failed already."""

    async def wait() -> None:
        while not await condition():  # noqa: ASYNC110 - what happens elsewhere sets no event here
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 120)


async def listed(proxy: Proxy) -> list[str]:
    """Return the ids of the list of models."""
    return sorted(model["id"] for model in (await proxy.get("/v1/models")).json["data"])


async def ready(proxy: Proxy) -> int:
    """Return the status of the readiness check."""
    return (await proxy.get("/health/ready")).status


def url_of(server: EmbeddedTriton, transport: str) -> str:
    """Return the server's address for a transport."""
    return server.http_url if transport == "http" else server.grpc_url


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_models_come_and_go(server, transport):
    """A model that is loaded appears, one that is unloaded is unavailable and not listed, and readiness follows."""
    async with serving(settings_of(url_of(server, transport))) as proxy:
        await proxy.ready()
        assert [] == await listed(proxy)
        assert 503 == await ready(proxy)
        body = {"model": "text_embedding", "input": "one"}
        before = await proxy.post("/v1/embeddings", body)

        await asyncio.to_thread(control, server, "text_embedding", "load")
        # At once, before the next look is due: a miss looks again.
        await until(lambda: is_status(proxy, body, 200))
        await until(lambda: lists(proxy, ["text_embedding"]))
        assert 200 == await ready(proxy)

        await asyncio.to_thread(control, server, "text_embedding", "unload")
        await until(lambda: lists(proxy, []))
        after = await proxy.post("/v1/embeddings", body)
        assert 503 == await ready(proxy)

    for answer in (before, after):
        assert (404, "model_not_found", "model") == (answer.status, answer.error["code"], answer.error["param"])
        assert "The model 'text_embedding' is not loaded." == answer.error["message"]
        # The official clients try again what has one.
        assert "Retry-After" not in answer.headers


async def test_nobody_is_let_in_before_the_first_look():
    """The first answer is not that there are no models: a replaced worker would say so beside others that know them."""

    async def first_answer(url: str) -> list[str]:
        async with serving(settings_of(url)) as proxy:
            return await listed(proxy)

    async with FakeTriton(config_of("slowly_listed")) as triton:
        triton.may_list.clear()
        answer = asyncio.create_task(first_answer(triton.url))
        await until(lambda: has_listed(triton))
        triton.may_list.set()

        assert ["slowly_listed"] == await answer


async def test_a_triton_that_hangs_does_not_keep_the_service_from_starting(monkeypatch):
    """Who asks is told that it is not ready, as with one that is away."""
    monkeypatch.setattr("triton_openai.app._FIRST_LOOK_SECONDS", 0.01)
    async with FakeTriton(config_of("never_listed")) as triton:
        triton.may_list.clear()
        async with serving(settings_of(triton.url)) as proxy:
            assert 200 == (await proxy.get("/health/live")).status
            assert 503 == await ready(proxy)
        triton.may_list.set()


async def has_listed(triton: FakeTriton) -> bool:
    """Return whether somebody has asked for its models."""
    return triton.index_calls > 0


async def is_status(proxy: Proxy, body: dict[str, Any], status: int) -> bool:
    """Return whether an embeddings request gets *status*."""
    return status == (await proxy.post("/v1/embeddings", body)).status


async def lists(proxy: Proxy, names: list[str]) -> bool:
    """Return whether exactly these models are listed."""
    return names == await listed(proxy)


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_vllm_inside_an_ensemble(server, transport):
    """A model that declares vLLM's tensors is served as one, though it is an ensemble and lacks the newer tensors."""
    await asyncio.to_thread(control, server, "vllm_model", "load")
    await asyncio.to_thread(control, server, "team_wrapper", "load")
    try:
        async with serving(settings_of(url_of(server, transport))) as proxy:
            await until(lambda: lists(proxy, ["team_wrapper", "vllm_model"]))
            assert "vllm" == proxy.models.served["team_wrapper"].adapter.name
            prompt = f"Hi <<steer {json.dumps({'text': 'one two three'})}>>"
            body = {"model": "team_wrapper", "prompt": prompt, "max_tokens": 9}
            whole = await proxy.post("/v1/completions", body)
            streamed = await proxy.post("/v1/completions", {**body, "stream": True})
            cut = await proxy.post("/v1/completions", {**body, "max_tokens": 2, "stop": "ree"})
    finally:
        for name in ("team_wrapper", "vllm_model"):
            await asyncio.to_thread(control, server, name, "unload")

    assert "one two three" == whole.json["choices"][0]["text"]
    assert ["one", " two", " three"] == [c["choices"][0]["text"] for c in streamed.chunks if c["choices"][0]["text"]]
    assert ("one two", "length") == (cut.json["choices"][0]["text"], cut.json["choices"][0]["finish_reason"])
    # Nobody tells the counts through this wrapper, and no tokenizer is configured.
    assert "usage" not in whole.json


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_a_triton_that_is_down_at_the_start(server, transport):
    """The service starts without it, says that it is not ready, and serves as soon as it is there; and once more."""
    url = url_of(server, transport)
    await asyncio.to_thread(server.kill)
    async with serving(settings_of(url)) as proxy:
        await proxy.ready()
        assert 200 == (await proxy.get("/health/live")).status
        answer = await proxy.get("/health/ready")
        assert (503, "not ready") == (answer.status, answer.json["status"])
        refused = await proxy.post("/v1/embeddings", {"model": "text_embedding", "input": "one"})
        assert (503, "upstream_unavailable") == (refused.status, refused.error["code"])
        assert [] == await listed(proxy)
        assert ["name", "version"] == sorted((await proxy.get("/version")).json)

        await asyncio.to_thread(server.start)
        await asyncio.to_thread(control, server, "text_embedding", "load")
        await until(lambda: lists(proxy, ["text_embedding"]))
        assert 200 == await ready(proxy)
        triton = (await proxy.get("/version")).json["triton"]
        assert "triton" == triton["name"]
        assert re.fullmatch(r"2\.\d+\.\d+\S*", triton["version"])

        await asyncio.to_thread(server.kill)
        await until(lambda: has_status(proxy, 503))
        assert "triton" not in (await proxy.get("/version")).json
        gone = await proxy.post("/v1/embeddings", {"model": "text_embedding", "input": "one"})
        assert 503 == gone.status
        unknown = await proxy.post("/v1/embeddings", {"model": "no_such_model", "input": "one"})
        assert 503 == unknown.status

        await asyncio.to_thread(server.start)
        await asyncio.to_thread(control, server, "text_embedding", "load")
        await until(lambda: has_status(proxy, 200))
        again = await proxy.post("/v1/embeddings", {"model": "text_embedding", "input": "one"})
    await asyncio.to_thread(control, server, "text_embedding", "unload")

    assert 200 == again.status


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_a_triton_that_dies_in_the_middle(server, record, transport):
    """Streams end with an error event, whole answers with a 502, and none of them hangs or is taken for complete."""
    await asyncio.to_thread(control, server, "vllm_model", "load")
    order = {"text": "word ", "repeat": 5000, "delay_ms": 20}
    body = {"model": "vllm_model", "prompt": f"Hi <<steer {json.dumps(order)}>>", "max_tokens": 4000}
    async with serving(settings_of(url_of(server, transport))) as proxy:
        await until(lambda: lists(proxy, ["vllm_model"]))
        begun = len(record.events(event="request"))
        whole = asyncio.create_task(proxy.post("/v1/completions", body))
        await asyncio.to_thread(record.wait_for, lambda events: len(events) > begun, event="request")
        async with proxy.client.post("/v1/completions", json={**body, "stream": True}) as response:
            # By then the whole answer has tokens, too: without one, it would be asked for again.
            for _ in range(40):
                await response.content.readuntil(b"\n\n")
            # aiohttp drops what it has not yet given out when a connection breaks: read while Triton ends.
            reading = asyncio.create_task(read(response))
            await asyncio.to_thread(server.kill)
            rest = (await reading)[0].decode()
        answer = await whole
    await asyncio.to_thread(server.start)

    *_, last, end = rest.split("\n\n")
    assert "" == end
    error = json.loads(last.removeprefix("event: error\ndata: "))["error"]
    assert ("upstream_disconnected", "server_error") == (error["code"], error["type"])
    assert (502, "upstream_disconnected") == (answer.status, answer.error["code"])


async def has_status(proxy: Proxy, status: int) -> bool:
    """Return whether the readiness check has *status*."""
    return status == await ready(proxy)


# The rest is about settings, for which a Triton made of dictionaries does.


async def test_a_frozen_triton_is_not_waited_for_for_ever(server, monkeypatch):
    """A Triton that accepts connections and says nothing keeps nobody from asking whether this service lives."""
    monkeypatch.setattr("triton_openai.app._FIRST_LOOK_SECONDS", 0.01)
    with frozen(server):
        async with serving(settings_of(server.http_url)) as proxy:
            assert 200 == (await proxy.get("/health/live")).status
            assert 503 == await ready(proxy)


async def test_names_with_slashes():
    """A model may be called ``team/model``: it is listed, described and used under that name."""
    async with FakeTriton(config_of("team/m:1 é")) as triton:
        triton.responses = [{"text_output": "Hi one"}]
        async with serving(settings_of(triton.url)) as proxy:
            await proxy.ready()
            names = await listed(proxy)
            plain = await proxy.get("/v1/models/team/m:1%20%C3%A9")
            quoted = await proxy.get("/v1/models/team%2Fm:1%20%C3%A9")
            answer = await proxy.post("/v1/completions", {"model": "team/m:1 é", "prompt": "Hi"})

    assert ["team/m:1 é"] == names
    assert plain.json == quoted.json
    assert ("team/m:1 é", "model", "triton") == tuple(plain.json[key] for key in ("id", "object", "owned_by"))
    assert (200, " one") == (answer.status, answer.json["choices"][0]["text"])
    assert "team/m:1 é" == triton.asked[0][0]


async def test_aliases():
    """An alias is a model of its own for clients: listed, described, answered under its own name."""
    models = {"m": ModelSettings(aliases=("gpt-4o", "team/alias"))}
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "Hi one"}]
        async with serving(settings_of(triton.url, models=models)) as proxy:
            await proxy.ready()
            names = await listed(proxy)
            described = await proxy.get("/v1/models/team/alias")
            answer = await proxy.post("/v1/completions", {"model": "gpt-4o", "prompt": "Hi"})

    assert ["gpt-4o", "m", "team/alias"] == names
    assert "team/alias" == described.json["id"]
    assert ("gpt-4o", " one") == (answer.json["model"], answer.json["choices"][0]["text"])
    assert "m" == triton.asked[0][0]


async def test_an_alias_does_not_hide_a_model():
    """A model of Triton's own wins over an alias of the same name."""
    async with FakeTriton(config_of("a"), config_of("b")) as triton:
        triton.responses = [{"text_output": "Hi one"}]
        async with serving(settings_of(triton.url, models={"a": ModelSettings(aliases=("b",))})) as proxy:
            await proxy.ready()
            await proxy.post("/v1/completions", {"model": "b", "prompt": "Hi"})

    assert "b" == triton.asked[0][0]


async def test_an_alias_of_a_model_that_is_not_ready():
    """An alias of a model that is not ready is as little ready as its model, and does not cease to exist."""
    async with FakeTriton() as triton:
        triton.waiting = {"m": "loading"}
        async with serving(settings_of(triton.url, models={"m": ModelSettings(aliases=("gpt-4o",))})) as proxy:
            answer = await proxy.post("/v1/completions", {"model": "gpt-4o", "prompt": "Hi"})

    assert (503, "The model 'gpt-4o' is not ready.") == (answer.status, answer.error["message"])


@pytest.mark.parametrize("state, status, what", [("loading", 503, "is not ready"), ("unloaded", 404, "is not loaded")])
async def test_a_lora_adapter_of_a_model_that_is_not_ready(tmp_path, state, status, what):
    """A LoRA adapter has the state of its model, by the names of the settings and of the model's repository."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "multi_lora.json").write_text('{"beta": "/loras/beta"}')
    async with FakeTriton() as triton:
        triton.waiting = {"m": state}
        settings = settings_of(triton.url, models={"m": ModelSettings(loras=("alpha",))})
        settings = changed(settings, api={"lora_separator": ":"}, triton={"model_repository": (tmp_path,)})
        async with serving(settings) as proxy:
            names = ("m:alpha", "m:beta", "gamma", "alpha", "other:alpha")
            answers = [await proxy.post("/v1/completions", {"model": name, "prompt": "Hi"}) for name in names]

    assert [status] * 2 + [404] * 3 == [answer.status for answer in answers]
    expected = [f"The model '{name}' {what}." for name in names[:2]]
    assert expected == [answer.error["message"] for answer in answers[:2]]


PREPROCESSING = config_of(
    "preprocessing",
    inputs=("QUERY BYTES 1", "REQUEST_OUTPUT_LEN INT32 1"),
    outputs=("INPUT_ID INT32 -1",),
    backend="python",
)
ODD = config_of("odd", inputs=("IMAGE FP32 3 224 224",), outputs=("label BYTES 1",), backend="onnxruntime")


async def test_what_is_listed():
    """Helpers and models that nobody claims are neither listed nor used."""
    async with FakeTriton(config_of("m"), PREPROCESSING, ODD) as triton, serving(settings_of(triton.url)) as proxy:
        await proxy.ready()
        names = await listed(proxy)
        described = await proxy.get("/v1/models/preprocessing")
        used = await proxy.post("/v1/completions", {"model": "preprocessing", "prompt": "Hi"})

    assert ["m"] == names
    assert (404, 404) == (described.status, used.status)


async def test_an_adapter_that_is_set():
    """A model is served by the adapter that the settings name, whatever would have claimed it; helpers stay helpers."""
    async with FakeTriton(config_of("m"), PREPROCESSING) as triton:
        defaults = ModelDefaults(adapter="vllm", default_parameters=DefaultParameters(max_tokens=5))
        reports = await inspect_models(settings_of(triton.url, defaults=defaults))
        own = await inspect_models(settings_of(triton.url, models={"m": ModelSettings(adapter="embeddings")}))

    by_name = {report.name: report for report in reports}
    assert ("vllm", "set in the configuration") == (by_name["m"].adapter, by_name["m"].reason)
    assert None is by_name["preprocessing"].adapter
    (report,) = [report for report in own if report.name == "m"]
    assert None is report.adapter
    assert "which the adapter 'embeddings' needs" in report.reason


async def test_an_adapter_that_nobody_has():
    """An unknown name leaves its model unserved, says which names there are, and leaves the other models alone."""
    async with FakeTriton(config_of("a"), config_of("b")) as triton:
        reports = await inspect_models(settings_of(triton.url, models={"a": ModelSettings(adapter="vlm")}))

    by_name = {report.name: report for report in reports}
    assert "vllm" == by_name["b"].adapter
    assert None is by_name["a"].adapter
    assert (
        "There is no adapter 'vlm'. Known adapters: companion, vllm, trtllm-ensemble, trtllm, trtllm-llmapi, "
        "trtllm-bls, synthesizer, classifier, embeddings, cross-encoder, transcriber, text." == by_name["a"].reason
    )


async def test_what_nobody_claims_says_why():
    """The reason names the tensors, so that a person can see what is missing."""
    async with FakeTriton(ODD) as triton:
        (report,) = await inspect_models(settings_of(triton.url))

    assert "no adapter fits its tensors (inputs: IMAGE FP32; outputs: label BYTES)" == report.reason
    assert "" == report.settings


async def test_what_nobody_claims_can_be_described():
    """`inspect` and the error of a request print settings that serve the model, and with them it answers."""
    odd = config_of("odd", ("question BYTES 1", "num_beams INT32 1"), ("answer BYTES 1",), backend="python")
    async with FakeTriton(odd) as triton:
        settings = settings_of(triton.url)
        (report,) = await inspect_models(settings)
        async with serving(settings) as proxy:
            await proxy.finds_triton()
            answer = await proxy.post("/v1/completions", {"model": "odd", "prompt": "Hi"})
        described = msgspec.convert(yaml.safe_load(report.settings)["models"], dict[str, ModelSettings])
        (served,) = await inspect_models(msgspec.structs.replace(settings, models=described))

    assert report.settings in answer.error["message"]
    assert 404 == answer.status
    assert report.settings.splitlines()[1].strip() in render([report])
    assert "text" == served.adapter


async def test_many_misses_are_one_look(clock):
    """A flood of requests for a model that is not there costs Triton one look, and each gets its answer."""
    async with FakeTriton(config_of("m")) as triton:
        settings = Settings(triton=TritonSettings(url=(triton.url,), refresh_interval=3600))
        async with serving(settings) as proxy:
            await proxy.ready()
            before = triton.index_calls
            answers = await asyncio.gather(
                *(proxy.post("/v1/completions", {"model": f"x{number}", "prompt": "Hi"}) for number in range(50))
            )
            calls = triton.index_calls - before

    assert {404} == {answer.status for answer in answers}
    assert 1 == calls


async def test_requests_that_come_before_the_first_look():
    """Requests that arrive together with the start wait for the first look, all of them."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "Hi one"}]
        async with serving(settings_of(triton.url)) as proxy:
            answers = await asyncio.gather(
                *(proxy.post("/v1/completions", {"model": "m", "prompt": "Hi"}) for _ in range(20))
            )

    assert {200} == {answer.status for answer in answers}


async def test_a_model_whose_config_changes():
    """A model that was replaced by another under the same name is served as what it is now."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "Hi one"}]
        async with serving(settings_of(triton.url)) as proxy:
            await proxy.ready()
            assert ("generate",) == proxy.models.served["m"].tasks
            del triton.models["m"]
            await until(lambda: lists(proxy, []))
            triton.models["m"] = config_of(
                "m", inputs=("text BYTES 1",), outputs=("embedding FP32 4",), backend="python"
            )
            await until(lambda: lists(proxy, ["m"]))

            assert "embed" in proxy.models.served["m"].tasks


async def test_created_is_when_a_model_was_first_seen_loaded():
    """The time of creation stays while a model is loaded, and is another when it is loaded again."""
    started = int(time.time())
    async with FakeTriton(config_of("m"), config_of("n")) as triton, serving(settings_of(triton.url)) as proxy:
        await proxy.ready()
        first = (await proxy.get("/v1/models")).json["data"]
        assert all(started <= model["created"] <= time.time() for model in first)
        proxy.models.created = dict.fromkeys(proxy.models.created, 1)
        config = triton.models.pop("n")
        await proxy.models.fleet.reload()
        triton.models["n"] = config
        await proxy.models.fleet.reload()
        created = {model["id"]: model["created"] for model in (await proxy.get("/v1/models")).json["data"]}

    assert 1 == created["m"]
    assert started <= created["n"]


async def test_readiness_where_clients_load_the_models():
    """A service that waits for the first load is ready; one whose model is loading, or failed to load, is not."""
    async with FakeTriton() as triton:
        settings = settings_of(triton.url)
        async with serving(settings) as proxy:
            assert 503 == await ready(proxy)
        settings = changed(settings, triton={"model_control_mode": "explicit"})
        for waiting, models, status in (
            ({}, [], 200),
            ({"m": "unloaded"}, [], 200),
            ({"m": "loading"}, [], 503),
            ({"m": "Internal: it is broken"}, [], 503),
            ({}, [PREPROCESSING], 200),
            ({"m": "Internal: it is broken"}, [config_of("n")], 200),
        ):
            triton.waiting = waiting
            triton.models = {config["name"]: config for config in models}
            async with serving(settings) as proxy:
                assert status == await ready(proxy), (waiting, models)
                answer = await proxy.post("/v1/completions", {"model": "m", "prompt": "Hi"})
                if waiting == {"m": "unloaded"}:
                    assert (404, "The model 'm' is not loaded.") == (answer.status, answer.error["message"])


async def test_a_stream_without_any_response():
    """Triton says nothing about a request that it lost: here it is an error, with its own status, streamed or not."""
    async with FakeTriton(config_of("m")) as triton, serving(settings_of(triton.url)) as proxy:
        body = {"model": "m", "prompt": "Hi"}
        for answer in (
            await proxy.post("/v1/completions", body),
            await proxy.post("/v1/completions", {**body, "stream": True}),
        ):
            assert (502, "upstream_error") == (answer.status, answer.error["code"])
            assert "The model ended without an answer." == answer.error["message"]


async def test_nothing_is_made_up():
    """
    Without counts and without a tokenizer there is no usage; how an answer ended follows from the number of responses,
    which the official client's helpers need.
    """
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "Hi one"}, {"text_output": "Hi one two"}]
        async with serving(settings_of(triton.url)) as proxy:
            body = {"model": "m", "prompt": "Hi", "max_tokens": 9}
            whole = await proxy.post("/v1/completions", body)
            cut = await proxy.post("/v1/completions", {**body, "max_tokens": 2})
            options = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = await proxy.post("/v1/completions", {**body, **options})

    assert "usage" not in whole.json
    assert (" one two", "stop") == (whole.json["choices"][0]["text"], whole.json["choices"][0]["finish_reason"])
    assert "length" == cut.json["choices"][0]["finish_reason"]
    assert [None] * 3 == [chunk["usage"] for chunk in streamed.chunks]
    assert [None, None, "stop"] == [chunk["choices"][0]["finish_reason"] for chunk in streamed.chunks]


async def test_names_in_paths():
    """A name that is empty is not found, and no control character of a name comes back raw."""
    names = ["", "%20", "a%7Fb", "a%C2%85b", "a%E2%80%AEb", "a%00b", "a%1Bb", "%0D%0AX-Injected:1"]
    async with FakeTriton(config_of("m")) as triton:
        settings = changed(settings_of(triton.url), triton={"model_control_mode": "explicit"})
        async with serving(settings) as proxy:
            await proxy.ready()
            for name in names:
                for method, action in (("GET", ""), ("POST", "/load"), ("POST", "/unload")):
                    url = URL(f"/v1/models/{name}{action}", encoded=True)
                    async with proxy.client.request(method, url) as answer:
                        error = (await answer.json())["error"]
                    assert answer.status in ((400, 404) if name else (404,)), (name, action, answer.status)
                    assert error["message"].replace("\n", "").isprintable(), (name, action)


async def test_what_is_configured_wrongly():
    """The operator reads what is wrong with it; clients only that something is: it may name files of the operator."""
    models = {"m": ModelSettings(adapter="embeddings")}
    async with FakeTriton(config_of("m")) as triton, serving(settings_of(triton.url, models=models)) as proxy:
        await proxy.finds_triton()
        answer = await proxy.post("/v1/completions", {"model": "m", "prompt": "Hi"})

    assert 404 == answer.status
    assert "embeddings" not in answer.error["message"]
    assert "the service's log says why" in answer.error["message"]
