"""LoRA adapters whose weights are sent: when they are, what reaches the model, and what a client sees of it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from tests.conformance.calls import BLS, ENGINES, PATHS, id_of, in_session_loop, recorded, request, steered, text_of
from tests.lora_files import write_lora
from tests.proxy_fixture import changed, proxy_settings, serving
from triton_openai.cli.inspect import render
from triton_openai.cli.inspect import report as report_of
from triton_openai.config.tree import LoraSettings, ModelSettings
from triton_openai.models.lora.delivery import LoraDelivery

pytestmark = in_session_loop

# Model, transport, and whether its engine is asked directly.
WAYS = (
    ("ensemble", "grpc", False),
    ("ensemble", "both", False),
    ("ensemble", "both", True),
    ("tensorrt_llm_bls", "grpc", False),
    ("tensorrt_llm_bls", "both", False),
    ("ensemble_nonstreaming", "http", False),
    ("ensemble_nonstreaming", "grpc", False),
)
every_way = pytest.mark.parametrize("model, transport, direct", WAYS)


@pytest.fixture
def served(triton, tmp_path, monkeypatch):
    """Run the service with adapters of a model, each with fresh weights: their numbers are in nobody's cache."""
    # However long the first request takes, the others wait for its weights.
    monkeypatch.setitem(LoraDelivery.__init__.__kwdefaults__, "patience", 600.0)

    @asynccontextmanager
    async def run(model, transport, direct=False, *, names=("french",), entries=(), **api):
        for name in names:
            write_lora(tmp_path / name)
        loras = (*(LoraSettings(name=name, path=name) for name in names), *entries)
        settings = changed(
            proxy_settings(triton, transport), triton={"prefer_token_level": "always" if direct else "never"}, api=api
        )
        models = {**settings.models, model: ModelSettings(loras=loras, lora_dir=tmp_path)}
        async with serving(msgspec.structs.replace(settings, models=models)) as proxy:
            await proxy.ready()
            yield proxy

    return run


async def sent(triton, model, request_id, count):
    """Return the LoRA inputs of the *count* requests that the model behind *model* got under one id."""
    where = model if model in BLS else ENGINES[model]

    events = await recorded(triton, lambda found: len(found) >= count, model=where, id=request_id, event="request")
    assert count == len(events)
    return [{name: value for name, value in event["inputs"].items() if name.startswith("lora_")} for event in events]


async def ask(proxy, lora, prompt="Hello", **fields):
    answer = await proxy.post(
        PATHS["completions"], request("completions", lora, prompt, max_tokens=4, seed=1, **fields)
    )
    assert 200 == answer.status, answer.body
    assert lora == (json.loads(answer.events[0]) if fields.get("stream") else answer.json)["model"]
    return answer


@pytest.mark.parametrize("stream", [False, True])
@every_way
async def test_weights_go_once_and_again_when_they_are_lost(triton, served, tmp_path, model, transport, direct, stream):
    """The first request brings them, the next ones name their number; a loss is mended without the client's notice."""
    async with served(model, transport, direct) as proxy:
        first = await ask(proxy, "french", stream=stream)
        second = await ask(proxy, "french", stream=stream)
        await ask(proxy, "french", steered("Hello", forget_loras=True))
        after_loss = await ask(proxy, "french", stream=stream)
        last = await ask(proxy, "french", stream=stream)

        (brought,) = await sent(triton, model, id_of(first), 1)
        (named,) = await sent(triton, model, id_of(second), 1)
        missed, mended = await sent(triton, model, id_of(after_loss), 2)
        (named_again,) = await sent(triton, model, id_of(last), 1)

    assert {"lora_task_id", "lora_weights", "lora_config"} == brought.keys() == mended.keys()
    assert brought == mended
    assert {"lora_task_id": brought["lora_task_id"]} == named == missed == named_again
    weights = np.load(tmp_path / "french" / "model.lora_weights.npy")
    assert ("FP16", list(weights.shape)) == (brought["lora_weights"]["dtype"], brought["lora_weights"]["shape"])
    assert weights.reshape(-1).tolist() == brought["lora_weights"]["value"]
    assert ("INT32", [1, 3, 3]) == (brought["lora_config"]["dtype"], brought["lora_config"]["shape"])
    assert [0, 0, 4, 0, 1, 4, 0, 2, 4] == brought["lora_config"]["value"]
    assert text_of("completions", first) == text_of("completions", second) == text_of("completions", after_loss) != ""


@every_way
async def test_first_uses_at_once(triton, served, model, transport, direct):
    """One of them brings the weights; the others do without."""
    async with served(model, transport, direct) as proxy:
        answers = await asyncio.gather(*(ask(proxy, "french", stream=place % 2 == 0) for place in range(8)))
        found = [(await sent(triton, model, id_of(answer), 1))[0] for answer in answers]

    assert 1 == sum("lora_weights" in inputs for inputs in found)
    assert 1 == len({inputs["lora_task_id"]["value"][0] for inputs in found})


@every_way
async def test_a_loss_that_many_notice_at_once(triton, served, model, transport, direct):
    """A loss that many notice at once is mended for all of them, and not by sending the weights for each."""
    async with served(model, transport, direct) as proxy:
        await ask(proxy, "french", steered("Hello", forget_loras=True))
        answers = await asyncio.gather(*(ask(proxy, "french", stream=place % 2 == 0) for place in range(8)))
        where = model if model in BLS else ENGINES[model]
        ids = {id_of(answer) for answer in answers}
        events = [event for event in await recorded(triton, model=where, event="request") if event["id"] in ids]

    assert 1 <= sum("lora_weights" in event["inputs"] for event in events) <= 2


@every_way
async def test_several_answers_of_one_request(triton, served, model, transport, direct):
    """
    Several answers of one request are requests of their own to Triton, and share the weights like those of several
    clients.
    """
    async with served(model, transport, direct) as proxy:
        answer = await ask(proxy, "french", n=4)
        ids = [f"{id_of(answer)}-{number}" for number in range(4)]
        found = [(await sent(triton, model, each, 1))[0] for each in ids]

    assert 4 == len(answer.json["choices"])
    assert 1 == sum("lora_weights" in inputs for inputs in found)


@pytest.mark.parametrize("model, transport", [("ensemble", "grpc"), ("ensemble_nonstreaming", "http")])
async def test_weights_of_megabytes(triton, served, tmp_path, model, transport):
    """Weights of megabytes take another way to the connection, and arrive all the same."""
    write_lora(tmp_path / "large", rows=64, width=2**15)
    entry = LoraSettings(name="large", path="large")
    async with served(model, transport, names=(), entries=(entry,)) as proxy:
        (inputs,) = await sent(triton, model, id_of(await ask(proxy, "large")), 1)

    assert [1, 64, 2**15] == inputs["lora_weights"]["shape"]
    weights = np.load(tmp_path / "large" / "model.lora_weights.npy").reshape(-1)
    recorded_values = inputs["lora_weights"]["value"]
    assert weights[: len(recorded_values)].tolist() == recorded_values
    assert [1, 64, 3] == inputs["lora_config"]["shape"]


async def test_a_first_request_that_fails_is_followed_by_one_that_brings_the_weights(triton, served):
    """Whether they arrived with a request that failed is not known, so they are sent with the next."""
    async with served("ensemble", "both") as proxy:
        refused = steered("Hello", fail_at=0, error="something broke")
        answer = await proxy.post(PATHS["completions"], request("completions", "french", refused, max_tokens=4))
        assert 502 == answer.status
        (inputs,) = await sent(triton, "ensemble", id_of(await ask(proxy, "french")), 1)

    assert "lora_weights" in inputs


async def test_two_adapters_are_two_numbers(triton, served):
    """Each of them is sent, and named by the number that its contents make."""
    async with served("ensemble", "both", names=("french", "german")) as proxy:
        answers = [await ask(proxy, name) for name in ("french", "german", "french", "german")]
        found = [(await sent(triton, "ensemble", id_of(answer), 1))[0] for answer in answers]

    assert [True, True, False, False] == ["lora_weights" in inputs for inputs in found]
    numbers = [inputs["lora_task_id"]["value"][0] for inputs in found]
    assert numbers[:2] == numbers[2:]
    assert numbers[0] != numbers[1]


async def test_a_service_that_starts_anew_uses_the_same_number(triton, served, tmp_path):
    """What one service has sent, another finds: the number depends on the contents alone."""
    async with served("ensemble", "both") as proxy:
        (first,) = await sent(triton, "ensemble", id_of(await ask(proxy, "french")), 1)
    entry = LoraSettings(name="french", path="french")
    async with served("ensemble", "both", names=(), entries=(entry,)) as proxy:
        (second,) = await sent(triton, "ensemble", id_of(await ask(proxy, "french")), 1)

    assert first == second


async def test_numbers_of_the_settings(triton, served):
    """A number that is given is used; one without a path is what the engine has read itself, and is never sent."""
    entries = (LoraSettings(name="german", path="french", task_id=2**53 + 1), LoraSettings(name="dutch", task_id=77))
    async with served("ensemble", "both", entries=entries) as proxy:
        (german,) = await sent(triton, "ensemble", id_of(await ask(proxy, "german")), 1)
        body = request("completions", "dutch", "Hello", max_tokens=4)
        missing = await proxy.post(PATHS["completions"], body)

    assert [2**53 + 1] == german["lora_task_id"]["value"]
    assert "lora_weights" in german
    assert (404, "lora_not_loaded", "model") == (missing.status, missing.error["code"], missing.error["param"])
    assert "77" not in missing.error["message"]


async def test_models_list_names_and_parents(served):
    """An adapter is listed under the name with the separator, and belongs to its model."""
    async with served("ensemble", "both", lora_separator=":") as proxy:
        listed = {model["id"]: model for model in (await proxy.get("/v1/models")).json["data"]}
        one = (await proxy.get("/v1/models/ensemble:french")).json
        unknown = await proxy.post(PATHS["chat"], request("chat", "ensemble:spanish", "Hello"))
        with_separator = await ask(proxy, "ensemble:french")

    assert ("french", "ensemble") == (one["root"], one["parent"])
    assert listed["ensemble:french"] == one
    assert "french" not in listed
    assert {"root", "parent"}.isdisjoint(listed["ensemble"])
    assert (404, "model_not_found") == (unknown.status, unknown.error["code"])
    assert 200 == with_separator.status


async def test_what_only_http_cannot_carry_is_not_served(served):
    """A stream over HTTP has JSON inputs: the adapter is left out, and the reason is there for `inspect`."""
    async with served("ensemble", "http") as proxy:
        listed = {model["id"] for model in (await proxy.get("/v1/models")).json["data"]}
        (problem,) = proxy.models.loras.problems["ensemble"]

        (report,) = [each for each in await report_of(proxy.models) if each.name == "ensemble"]

    assert "ensemble" in listed
    assert "french" not in listed
    assert "gRPC" in problem
    assert problem in report.notes
    assert problem in render([report])


async def test_inspect_names_the_adapters(served):
    """``inspect`` names each adapter once, beside the name that clients use."""
    async with served("ensemble", "both", lora_separator=":") as proxy:
        (report,) = [each for each in await report_of(proxy.models) if each.name == "ensemble"]

    assert ["french"] == report.loras
    assert {"ensemble", "ensemble:french"} == set(report.served_as)
    assert "LoRA adapters  french" in render([report])


async def test_files_that_break_later_fail_their_requests_only(served, tmp_path):
    """A clear error without paths of the server; when they are whole again, so are the answers."""
    async with served("ensemble", "both") as proxy:
        path = tmp_path / "french" / "model.lora_weights.npy"
        whole = path.read_bytes()
        path.write_bytes(whole[:-8])
        body = request("completions", "french", "Hello", max_tokens=4)
        broken = await proxy.post(PATHS["completions"], body)
        path.write_bytes(whole)
        await ask(proxy, "french")
        base = await proxy.post(PATHS["completions"], {**body, "model": "ensemble"})

    assert (501, "configuration_error") == (broken.status, broken.error["code"])
    assert "'french'" in broken.error["message"]
    assert str(tmp_path) not in broken.error["message"]
    assert 200 == base.status


async def test_the_repository_names_adapters_with_their_folders(triton, tmp_path):
    """``multi_lora.json`` as NVIDIA's frontend reads it; what leads out of the model's folder is not served."""
    version = tmp_path / "repository" / "ensemble" / "1"
    write_lora(version / "near")
    write_lora(tmp_path / "outside")
    paths = {
        "near": "near",
        "documented": "repository/ensemble/1/near",
        "from_repository": "ensemble/1/near",
        "away": "../../../outside",
        "absolute": str(tmp_path / "outside"),
        "nowhere": "none",
    }
    (version / "multi_lora.json").write_text(json.dumps(paths))
    settings = changed(proxy_settings(triton, "both"), triton={"model_repository": (tmp_path / "repository",)})
    async with serving(settings) as proxy:
        await proxy.ready()
        listed = {model["id"] for model in (await proxy.get("/v1/models")).json["data"]}
        problems = proxy.models.loras.problems["ensemble"]
        answers = [await ask(proxy, name) for name in ("near", "documented")]
        found = [(await sent(triton, "ensemble", id_of(answer), 1))[0] for answer in answers]

    assert {"near", "documented", "from_repository"} == listed & paths.keys()
    assert ["'absolute'", "'away'", "'nowhere'"] == sorted(problem.split()[3] for problem in problems)
    assert 1 == len({inputs["lora_task_id"]["value"][0] for inputs in found})
