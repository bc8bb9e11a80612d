"""Models are loaded and unloaded through the service, on a real Triton in explicit mode."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import pytest_asyncio
import yarl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.extended import examples
from tests.integration.test_discovery import listed as all_listed
from tests.integration.test_discovery import until
from tests.proxy_fixture import Answer, Proxy, serving
from tests.triton_fixture import embedded, shared
from triton_openai.app import SERVICE
from triton_openai.config.tree import ApiSettings, LoraSettings, ModelSettings, ServerSettings, Settings, TritonSettings
from triton_openai.demo.repository import build_repository
from triton_openai.errors import InvalidRequest
from triton_openai.triton.client import check_name
from triton_openai.tritonserver.embedded import EmbeddedTriton

TRANSPORTS = ["http", "grpc"]
BROKEN = """
name: "broken"
backend: "python"
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "label" data_type: TYPE_INT32 dims: [ 1 ] }
"""
ODD = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


# Python's processes take a second to come, and one to go. Most of what is loaded here are ensembles of one step, which
# come and go at once, over models that stay.
# What runs on an ensemble is not cancelled in its steps, so what streams is loaded itself.
STEPS = {
    "text_embedding": ("step_embedding", 64, "text STRING [1]", "embedding FP32 [64]"),
    "second_embedding": ("step_embedding", 64, "text STRING [1]", "embedding FP32 [64]"),
    "odd": ("step_odd", 0, "text STRING [1]", "label INT32 [1]"),
}


def ensemble(name: str) -> str:
    """Return the configuration of an ensemble of one step."""
    step, batch, *sides = STEPS[name]
    lines = [f'name: "{name}" platform: "ensemble" max_batch_size: {batch}']
    maps = []
    for side, (tensor, kind, dims) in zip(("input", "output"), map(str.split, sides), strict=True):
        lines.append(f'{side} {{ name: "{tensor}" data_type: TYPE_{kind} dims: {dims} }}')
        maps.append(f'{side}_map {{ key: "{tensor}" value: "{tensor}" }}')
    lines.append(f'ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1 {" ".join(maps)} }} }}')
    return "\n".join(lines)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """A Triton of this module's own that starts with the steps alone."""
    models = ["text_embedding", "vllm_model", "ensemble", "tensorrt_llm_bls"]
    repository = build_repository(tmp_path_factory.mktemp("control"), models=models)
    for name, code in (("broken", "raise RuntimeError('it is broken')\n"), ("odd", ODD)):
        version = repository.path / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        (version.parent / "config.pbtxt").write_text(BROKEN.replace("broken", name))
    for name, step in (("text_embedding", "step_embedding"), ("odd", "step_odd")):
        config = (repository.path / name).rename(repository.path / step) / "config.pbtxt"
        config.write_text(config.read_text().replace(f'name: "{name}"', f'name: "{step}"'))
    for name in STEPS:
        (repository.path / name / "1").mkdir(parents=True)
        (repository.path / name / "config.pbtxt").write_text(ensemble(name))
    steps = sorted({step for step, *_ in STEPS.values()})
    server = embedded(repository, model_control_mode="explicit", load_models=steps)
    with shared(server):
        yield server


async def listed(proxy: Proxy) -> list[str]:
    """Return the names of the served models, without the steps: while nothing uses them they are models, too."""
    return [name for name in await all_listed(proxy) if not name.startswith("step_")]


def settings_of(server: EmbeddedTriton, transport: str = "http", grace: float = 300.0, **triton: Any) -> Settings:
    """Return settings in explicit mode that look seldom: what a call changes must show at once."""
    url = server.http_url if transport == "http" else server.grpc_url
    fields = {"model_control_mode": "explicit", "refresh_interval": 600.0, **triton}
    return Settings(
        server=ServerSettings(shutdown_grace=grace),
        triton=TritonSettings(url=(url,), **fields),
        models={
            "text_embedding": ModelSettings(aliases=("org/embedder",)),
            "vllm_model": ModelSettings(aliases=("chat/small",), loras=(LoraSettings(name="alpha"),)),
        },
    )


@asynccontextmanager
async def controlled(settings: Settings) -> AsyncIterator[Proxy]:
    """Run the service, and leave Triton without a model."""
    async with serving(settings) as proxy:
        await proxy.ready()
        try:
            yield proxy
        finally:
            names = ["ensemble", "tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing", "vllm_model"]
            for name in (*names, *STEPS):
                await unload(proxy, name)


@pytest_asyncio.fixture(params=TRANSPORTS)
async def proxy(request: pytest.FixtureRequest, server: EmbeddedTriton) -> AsyncIterator[Proxy]:
    """The service over each transport in turn."""
    async with controlled(settings_of(server, request.param)) as proxy:
        yield proxy


async def load(proxy: Proxy, name: str, body: bytes = b"") -> Answer:
    """Load a model."""
    return await proxy.post(f"/v1/models/{name}/load", body)


async def unload(proxy: Proxy, name: str, **body: Any) -> Answer:
    """Unload a model."""
    return await proxy.post(f"/v1/models/{name}/unload", json.dumps(body).encode() if body else b"")


async def embed(proxy: Proxy, model: str = "text_embedding") -> int:
    """Return the status of an embeddings request."""
    return (await proxy.post("/v1/embeddings", {"model": model, "input": "one"})).status


def told(answer: Answer) -> tuple[int, str]:
    """Return status and code of an error."""
    return answer.status, answer.error["code"]


def prompt(**steer: Any) -> dict[str, Any]:
    """Return a streamed completion that a stand-in of vLLM answers as it is told."""
    return {"model": "vllm_model", "prompt": f"<<steer {json.dumps(steer)}>>", "stream": True, "max_tokens": 2000}


@asynccontextmanager
async def streaming(proxy: Proxy, **steer: Any) -> AsyncIterator[Any]:
    """Begin a stream, and wait for its first bytes."""
    async with proxy.client.post("/v1/completions", json=prompt(**steer)) as response:
        assert 200 == response.status
        await response.content.readany()
        yield response


async def test_loading_and_unloading(proxy):
    """A model is served when the load returns, and gone when the unload does, without a look in between."""
    loaded = await load(proxy, "text_embedding")
    assert (200, "text_embedding", "model") == (loaded.status, loaded.json["id"], loaded.json["object"])
    assert loaded.json["served"]
    assert ["org/embedder", "text_embedding"] == await listed(proxy)
    assert 200 == await embed(proxy)

    again = await load(proxy, "text_embedding")
    assert (409, "model_already_loaded") == told(again)
    assert "The model 'text_embedding' is already loaded." == again.error["message"]
    assert "false" == again.headers["x-should-retry"]

    gone = await unload(proxy, "text_embedding")
    assert (200, {"status": "success", "model": "text_embedding"}) == (gone.status, gone.json)
    assert [] == await listed(proxy)
    assert 404 == await embed(proxy)
    assert (409, "model_not_loaded") == told(await unload(proxy, "text_embedding"))


async def test_unknown_models(proxy):
    """A model that is in no repository is not found, whatever Triton would say."""
    for answer in (await load(proxy, "nobody"), await unload(proxy, "nobody")):
        assert (404, "model_not_found") == told(answer)


async def test_a_model_that_does_not_load(proxy):
    """What Triton says of a failed load is no secret as far as it names no paths, and the next load tries again."""
    for _ in range(2):
        answer = await load(proxy, "broken")
        assert (502, "model_load_failed") == told(answer)
        assert answer.error["message"].startswith("Triton could not load the model 'broken': ")
        assert answer.error["message"].endswith("RuntimeError: it is broken")
        assert "/" not in answer.error["message"]


async def test_a_model_that_no_adapter_knows(proxy):
    """A load of a model that no adapter takes succeeds, and the answer says why the model is not served."""
    answer = await load(proxy, "odd")

    assert (200, False) == (answer.status, answer.json["served"])
    assert answer.json["reason"].startswith("no adapter fits its tensors")
    assert 200 == (await unload(proxy, "odd")).status


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_aliases_and_loras(proxy):
    """An alias loads its model, slashes and all; a LoRA adapter comes with its model."""
    assert "text_embedding" == (await load(proxy, "org/embedder")).json["id"]
    assert 200 == await embed(proxy, "org/embedder")
    assert 200 == (await load(proxy, quote("chat/small", safe=""))).status
    assert {"alpha", "chat/small"} <= set(await listed(proxy))

    refused = await unload(proxy, "alpha")
    assert 400 == refused.status
    assert "'alpha' is a LoRA adapter of the model 'vllm_model'" in refused.error["message"]
    assert "vllm_model" == (await unload(proxy, "chat/small")).json["model"]
    assert ["org/embedder", "text_embedding"] == await listed(proxy)


@pytest.mark.parametrize("proxy", ["grpc"], indirect=True)
async def test_ensembles(proxy):
    """Triton loads what an ensemble needs; what others use stays, and the parts go with the ensemble when asked to."""
    assert 200 == (await load(proxy, "ensemble")).status
    assert ["ensemble"] == await listed(proxy)
    used = await unload(proxy, "tensorrt_llm")
    assert (409, "model_in_use") == told(used)
    assert "The model 'tensorrt_llm' is used by 'ensemble', to be unloaded first." == used.error["message"]

    assert 200 == (await load(proxy, "tensorrt_llm_bls")).status
    shared = await unload(proxy, "ensemble", unload_dependents=True)
    assert (409, "model_in_use") == told(shared)
    assert "'tensorrt_llm_bls'" in shared.error["message"]
    assert 200 == (await unload(proxy, "tensorrt_llm_bls")).status

    assert 200 == (await unload(proxy, "ensemble", unload_dependents=True)).status
    for part in ("preprocessing", "tensorrt_llm", "postprocessing"):
        assert (409, "model_not_loaded") == told(await unload(proxy, part))
    # A script may load the steps of an ensemble one by one.
    for part in ("preprocessing", "postprocessing", "tensorrt_llm"):
        answer = await load(proxy, part)
        assert (200, part == "tensorrt_llm") == (answer.status, answer.json["served"]), part
    assert 200 == (await load(proxy, "ensemble")).status
    assert ["ensemble"] == await listed(proxy)


async def test_parallel_calls_have_one_winner(proxy):
    """Of many calls for one model one is done; the others are told that it is being changed, or has been."""
    for action, late in ((load, "model_already_loaded"), (unload, "model_not_loaded")):
        answers = await asyncio.gather(*(action(proxy, "text_embedding") for _ in range(20)))
        assert {200: 1, 409: 19} == Counter(answer.status for answer in answers)
        assert {answer.error["code"] for answer in answers if answer.status == 409} <= {"model_busy", late}


async def test_a_storm_of_calls(proxy):
    """Loads and unloads of several models, all at once, over and over: each call has a clear end."""
    names = ["text_embedding", "second_embedding"]

    async def storm(number: int) -> list[int]:
        actions = (load, unload, load)
        return [(await actions[(number + turn) % 3](proxy, names[number % 2])).status for turn in range(4)]

    async def asked() -> list[int]:
        return [await embed(proxy) for _ in range(20)]

    *statuses, requests = await asyncio.gather(*map(storm, range(12)), asked())
    assert {200, 409} >= {status for one in statuses for status in one}
    assert {200, 404, 503} >= set(requests)
    for name in names:
        assert {200, 409} >= {(await unload(proxy, name)).status}
        assert 200 == (await load(proxy, name)).status
    assert 200 == await embed(proxy)


@pytest.mark.parametrize("proxy", ["grpc"], indirect=True)
async def test_running_requests_end_first(proxy):
    """A stream that runs is answered to its end while new requests are refused; then the model goes."""
    await load(proxy, "vllm_model")
    # It has to last until a request has been refused, also on a busy machine.
    async with streaming(proxy, text="one two three", repeat=80, delay_ms=20) as response:
        unloading = asyncio.create_task(unload(proxy, "vllm_model"))
        await until(lambda: is_closed(proxy))
        refused = await proxy.post("/v1/completions", {**prompt(text="no"), "stream": False})
        assert (503, "model_unloading") == told(refused)
        assert refused.headers["Retry-After"]
        assert not unloading.done()
        rest = (await response.read()).decode()

    assert rest.endswith("data: [DONE]\n\n")
    assert "error" not in rest
    assert 200 == (await unloading).status
    assert [] == await listed(proxy)


async def is_closed(proxy: Proxy) -> bool:
    """Return whether vLLM's model takes no requests."""
    return 503 == (await proxy.post("/v1/completions", {**prompt(text="no"), "stream": False})).status


@pytest.mark.parametrize("transport, stream", [("http", True), ("grpc", False)])
async def test_what_runs_too_long_is_told(server, transport, stream):
    """After the grace a stream ends with an error event, and a request for a whole answer with an error."""
    async with controlled(settings_of(server, transport, grace=0.2)) as proxy:
        await load(proxy, "vllm_model")
        body = {**prompt(text="one two three", repeat=500, delay_ms=20), "stream": stream}
        asking = asyncio.create_task(proxy.post("/v1/completions", body))
        await until(lambda: runs(proxy, "vllm_model"))
        gone = await unload(proxy, "vllm_model")
        answer = await asking

    assert 200 == gone.status
    if stream and answer.status == 200:
        error = json.loads(answer.events[-1])["error"]
    else:
        assert 503 == answer.status
        error = answer.error
    assert ("model_unloading", "The model 'vllm_model' is being unloaded.") == (error["code"], error["message"])


async def runs(proxy: Proxy, model: str) -> bool:
    """Return whether a request runs on *model*."""
    assert proxy.client.app is not None
    return model in proxy.client.app[SERVICE].admission.running


@pytest.mark.parametrize("proxy", ["http"], indirect=True)
async def test_a_client_that_leaves(proxy):
    """What a client began goes on without it, and nobody else can begin the same meanwhile."""
    await load(proxy, "vllm_model")
    async with streaming(proxy, text="one two three", repeat=600, delay_ms=20) as response:
        unloading = asyncio.create_task(unload(proxy, "vllm_model"))
        await until(lambda: is_closed(proxy))
        unloading.cancel()
        assert (409, "model_busy") == told(await unload(proxy, "vllm_model"))
        response.close()
    await until(lambda: nothing(proxy))
    await until(lambda: can_load(proxy, "vllm_model"))


async def nothing(proxy: Proxy) -> bool:
    """Return whether no model is served."""
    return [] == await listed(proxy)


async def can_load(proxy: Proxy, model: str) -> bool:
    """Return whether a model could be loaded."""
    return 200 == (await load(proxy, model)).status


async def serves(proxy: Proxy, names: list[str]) -> bool:
    """Return whether exactly these models are listed."""
    return names == await listed(proxy)


# Names


async def test_names_that_leave_the_repository(proxy):
    """What is no name of a folder is refused before Triton sees it, however it is written."""
    for name in ("..", ".", "../..", "a/b", "/etc", "..\\..", "a\0b", "a\nb", "n" * 256, "\ud800"):
        for action in ("load", "unload"):
            path = quote(name, safe="", errors="surrogatepass")
            answer = await raw(proxy, f"/v1/models/{path}/{action}")
            assert answer in ((400, "invalid_value"), (404, "not_found"), (404, "model_not_found")), (name, answer)


async def test_names_are_shown_without_control_characters(proxy):
    """An answer shows no control character of a name in its path, and an empty name is a 404."""
    for name in ("", "a\nb", "a\x1b[31mb", "\x7f\x00", "a\u202eb"):
        for method, action in (("POST", "/load"), ("POST", "/unload"), ("GET", "")):
            path = f"/v1/models/{quote(name)}{action}"
            async with proxy.client.request(method, yarl.URL(path, encoded=True)) as answer:
                error = (await answer.json())["error"]
            assert answer.status == 404 or (name and answer.status == 400), (path, error)
            assert all(value is None or str(value).isprintable() for value in error.values()), (path, error)


async def raw(proxy: Proxy, path: str) -> tuple[int, str | None]:
    """Post to *path* exactly as it is written; return status and code."""
    reader, writer = await asyncio.open_connection(proxy.client.host, proxy.client.port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
    )
    answer = await asyncio.wait_for(reader.read(), 120)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    try:
        code = json.loads(body)["error"]["code"]
    except ValueError:
        code = None
    return int(head.split()[1]), code


@given(
    name=st.text(min_size=1, max_size=20)
    | st.lists(
        st.sampled_from(["..", ".", "/", "%2e", "%2F", "%00", "a", "\\", ";", "?", "#"]), min_size=1, max_size=6
    ).map("".join)
)
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_hostile_names(name):
    """No name gets past the check that is more than one folder's."""
    try:
        check_name(name)
    except InvalidRequest:
        return
    assert Path("/repository", name).parent == Path("/repository")
    assert Path("/repository", name).resolve() == Path("/repository", name)
    assert "\0" not in name.encode().decode()


# Modes


async def test_model_control_is_off_unless_enabled(server):
    """Without the setting nothing is loaded, and the answer names the flag."""
    async with serving(settings_of(server, model_control_mode="none")) as proxy:
        await proxy.ready()
        for answer in (await load(proxy, "text_embedding"), await unload(proxy, "..%2F"), await load(proxy, "no")):
            assert (403, "management_disabled") == told(answer)
            assert "--model-control-mode explicit" in answer.error["message"]
        assert [] == await listed(proxy)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_triton_that_does_not_take_part(triton, transport):
    """What a Triton in another mode answers is put into words that help."""
    url = triton.http_url if transport == "http" else triton.grpc_url
    async with serving(Settings(triton=TritonSettings(url=(url,), model_control_mode="explicit"))) as proxy:
        await proxy.ready()
        answer = await unload(proxy, "text_embedding")

    assert (501, "not_supported") == told(answer)
    assert "it was not started with --model-control-mode=explicit" in answer.error["message"]


@pytest.mark.parametrize(
    "body, code",
    [
        (b"[]", "invalid_type"),
        (b"{", "invalid_json"),
        (b'{"parameters": {"config": "{}"}}', "unknown_parameter"),
        (b'{"unload_dependents": 1}', "invalid_type"),
    ],
)
async def test_bodies(server, body, code):
    """A body that says something else is refused: nothing of it would be done."""
    async with serving(settings_of(server)) as proxy:
        await proxy.ready()
        answer = await proxy.post("/v1/models/text_embedding/unload", body)

    assert (400, code) == told(answer)


# The default model


async def test_a_default_model(proxy, server):
    """A default model answers requests that name none, and no others: a name that is wrong stays wrong."""
    await load(proxy, "text_embedding")
    fields = settings_of(server)
    settings = msgspec.structs.replace(fields, api=ApiSettings(default_model="org/embedder"))
    async with serving(settings) as with_default:
        await with_default.ready()
        for body in ({"input": "one"}, {"model": "", "input": "one"}, {"model": "default", "input": "one"}):
            answer = await with_default.post("/v1/embeddings", body)
            assert (200, "org/embedder") == (answer.status, answer.json["model"])
        wrong = await with_default.post("/v1/embeddings", {"model": "nobody", "input": "one"})
        assert (404, "model_not_found") == told(wrong)

    assert (400, "missing_required_parameter") == told(await proxy.post("/v1/embeddings", {"input": "one"}))
    assert (404, "model_not_found") == told(await proxy.post("/v1/embeddings", {"model": "default", "input": "one"}))
