"""Moderation by a classifier whose labels the settings map to categories, over both transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import FormData
from openai import AsyncOpenAI

from tests.cases import every_case
from tests.conformance.calls import in_session_loop
from tests.proxy_fixture import TRANSPORTS, Proxy, proxy_settings, serving
from tests.standins.repository import CLASSES
from tests.triton_fixture import TestTriton
from triton_openai.api.moderations import CATEGORIES
from triton_openai.app import SERVICE
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import (
    AccessSettings,
    ApiSettings,
    BatchesSettings,
    FilesSettings,
    ModelSettings,
    ModerationSettings,
)
from triton_openai.errors import ConfigurationError

pytestmark = in_session_loop

PATH = "/v1/moderations"
TEXT, IDS = "text_classification", "text_classification_ids"
QUESTION, ANSWER, GREETING = CLASSES
TEXTS = ["what is the question?", "hello there, a greeting", "an answer"]


@asynccontextmanager
async def moderating(triton: TestTriton, transport: str = "http", **rules: Any) -> AsyncIterator[Proxy]:
    """Serve a classifier with *rules*, and one without labels, whose classes go by their numbers."""
    settings = proxy_settings(triton, transport)
    by_number = ModerationSettings(labels={"1": "hate"})
    models = {
        TEXT: ModelSettings(moderation=ModerationSettings(**rules)),
        IDS: ModelSettings(tokenizer=str(triton.tokenizer), moderation=by_number),
    }
    async with serving(type(settings)(triton=settings.triton, models=models)) as proxy:
        yield proxy


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_official_client(triton: TestTriton, transport: str) -> None:
    """Each text has all categories; those with a label have its probability, or that of the likeliest label."""
    rules = {
        "labels": {QUESTION: "self-harm/intent", ANSWER: "violence", GREETING: "violence"},
        "thresholds": {"violence": 0.99999},
    }
    async with moderating(triton, transport, **rules) as proxy:
        classified = await proxy.post("/v1/classify", {"model": TEXT, "input": TEXTS})
        async with AsyncOpenAI(base_url=str(proxy.client.make_url("/v1")), api_key="none") as client:
            made = await client.moderations.create(model=TEXT, input=TEXTS)
            (numbered,) = (await client.moderations.create(model=IDS, input=TEXTS[0])).results
        raw = (await proxy.post("/moderations", {"model": TEXT, "input": TEXTS})).json
    probs = [each["probs"] for each in classified.json["data"]]
    assert (TEXT, "modr-") == (made.model, made.id[:5])
    for result, values, plain in zip(made.results, probs, raw["results"], strict=True):
        violent = max(values[1:])
        assert pytest.approx([values[0], violent]) == [
            result.category_scores.self_harm_intent,
            result.category_scores.violence,
        ]
        flags = [values[0] >= 0.5, violent >= 0.99999]
        assert flags == [result.categories.self_harm_intent, result.categories.violence]
        assert any(flags) == result.flagged
        for part in ("categories", "category_scores", "category_applied_input_types"):
            assert list(CATEGORIES) == list(plain[part])
        applied = {name for name, kinds in plain["category_applied_input_types"].items() if kinds == ["text"]}
        assert {"self-harm/intent", "violence"} == applied
        rest = set(CATEGORIES) - applied
        assert {(False, 0.0)} == {(plain["categories"][name], plain["category_scores"][name]) for name in rest}
    assert [True, False] == [made.results[0].flagged, made.results[2].categories.self_harm_intent]
    assert numbered.category_scores.hate > 0


async def test_the_parts_of_one_input(triton: TestTriton) -> None:
    """Objects are parts of one input, which has one result."""
    async with moderating(triton, labels={QUESTION: "sexual"}) as proxy:
        parts = [{"type": "text", "text": text} for text in TEXTS[:2]]
        by_parts = await proxy.post(PATH, {"model": TEXT, "input": parts})
        whole = await proxy.post(PATH, {"model": TEXT, "input": "\n".join(TEXTS[:2])})
    assert whole.json["results"] == by_parts.json["results"]
    assert 1 == len(by_parts.json["results"])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_without_a_model(triton: TestTriton, transport: str) -> None:
    """Without a model, and by OpenAI's names, the only classifier that is set up for it moderates."""
    settings = proxy_settings(triton, transport)
    models = {TEXT: ModelSettings(moderation=ModerationSettings(labels={QUESTION: "sexual"}))}
    only = type(settings)(triton=settings.triton, models=models, api=ApiSettings(default_model="ensemble"))
    async with serving(only) as proxy, AsyncOpenAI(base_url=str(proxy.client.make_url("/v1")), api_key="x") as client:
        made = [await client.moderations.create(input=TEXTS[0])]
        names = ("omni-moderation-latest", "text-moderation-latest", "text-moderation-stable")
        made += [await client.moderations.create(input=TEXTS[0], model=name) for name in names]
    assert {(TEXT, True)} == {(one.model, one.results[0].flagged) for one in made}


@every_case("key, model", [("all", None), ("ids", None), ("ids", "omni-moderation-latest"), ("ids", IDS)])
async def test_lines_of_batches(triton: TestTriton, tmp_path: Path, key: str, model: str | None) -> None:
    """Lines without a model, or with OpenAI's name, ask the only classifier that their key may use, as requests do."""
    folder = tmp_path / f"{key}-{model}"
    folder.mkdir()
    keys = folder / "keys.yaml"
    keys.write_text(
        f"keys: [{{name: ids, key: sk-ids, models: [{IDS}], batch: true}}, {{name: all, key: sk-all, batch: true}}]"
    )
    keys.chmod(0o600)
    settings = proxy_settings(triton, "http")
    models = {IDS: ModelSettings(tokenizer=str(triton.tokenizer), moderation=ModerationSettings(labels={"1": "hate"}))}
    if key == "ids":
        models[TEXT] = ModelSettings(moderation=ModerationSettings(labels={QUESTION: "sexual"}))
    body = {"input": TEXTS[0]} if model is None else {"input": TEXTS[0], "model": model}
    line = {"custom_id": "a", "method": "POST", "url": PATH, "body": body}
    form = FormData({"purpose": "batch"})
    form.add_field("file", msgspec.json.encode(line), filename="input.jsonl")
    headers = {"Authorization": f"Bearer sk-{key}"}
    serves = type(settings)(
        triton=settings.triton,
        models=models,
        api=ApiSettings(default_model="ensemble"),
        access=AccessSettings(api_keys_file=keys),
        files=FilesSettings(store=f"dir:{folder / 'files'}"),
        batches=BatchesSettings(store=f"sqlite:{folder / 'db'}"),
    )
    async with serving(serves) as proxy:
        client = proxy.client
        file = await (await client.post("/v1/files", data=form, headers=headers)).json()
        made = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        batch = await (await client.post("/v1/batches", json=made, headers=headers)).json()
        async with asyncio.timeout(120):
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.02)
                batch = await (await client.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
        assert ("completed", 1) == (batch["status"], batch["request_counts"]["completed"]), batch
        assert IDS == batch["model"] or (model is not None and model == batch["model"])
        content = await client.get(f"/v1/files/{batch['output_file_id']}/content", headers=headers)
        answer = msgspec.json.decode(await content.read())["response"]["body"]
    assert answer["results"][0]["category_scores"]["hate"] > 0


async def test_which_of_several_moderates(triton: TestTriton, tmp_path: Path) -> None:
    """Of several classifiers, the default model or an alias says which is meant; else the error names them."""
    body = {"input": TEXTS[0]}
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: ids, key: sk-ids, models: [{IDS}]}}]")
    async with moderating(triton, labels={QUESTION: "sexual"}) as proxy:
        answer = await proxy.post(PATH, body)
        assert (404, "model") == (answer.status, answer.error["param"])
        assert f"name one of them: {TEXT}, {IDS}." in answer.error["message"]
        settings = proxy.client.app[SERVICE].settings
    for changed in (
        msgspec.structs.replace(settings, api=ApiSettings(default_model=IDS)),
        msgspec.structs.replace(
            settings,
            models={
                **settings.models,
                IDS: msgspec.structs.replace(settings.models[IDS], aliases=("omni-moderation-latest",)),
            },
        ),
        # Of those that the key may use.
        msgspec.structs.replace(settings, access=AccessSettings(api_keys_file=keys)),
    ):
        async with serving(changed) as proxy:
            made = (await proxy.post(PATH, body, **{"api-key": "sk-ids"})).json
            assert made["model"] in (IDS, "omni-moderation-latest")
            assert made["results"][0]["category_applied_input_types"]["hate"]
    none = msgspec.structs.replace(settings, models={})
    async with serving(none) as proxy:
        answer = await proxy.post(PATH, body)
    assert (404, "model") == (answer.status, answer.error["param"])
    assert "('moderation'): there is none" in answer.error["message"]


async def test_bad_requests(triton: TestTriton, proxy: Proxy) -> None:
    """Images, models that are not set up for it, and mistakes in the settings are refused, each by its name."""
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    cases: list[tuple[dict[str, Any], int, str, str]] = [
        ({"input": [{"type": "text", "text": "a"}, image]}, 400, "input[1].image_url", "only text"),
        ({"input": [{"type": "audio"}]}, 400, "input[0].type", "audio"),
        ({"input": ["a", {"type": "text", "text": "a"}]}, 400, "input", "either texts or parts"),
        ({"input": ["a", ""]}, 400, "input", "empty"),
        ({"input": []}, 400, "input", "length"),
        ({"input": [5]}, 400, "input[0]", "integer"),
        ({}, 400, "input", "Missing"),
        ({"input": "a", "model": "ensemble"}, 400, "model", "does not classify texts. It generates text"),
        ({"input": "a", "model": "text_embedding"}, 400, "model", "does not classify texts. It makes embeddings"),
    ]
    async with moderating(triton, labels={QUESTION: "sexual"}) as other:
        for fields, status, param, message in cases:
            answer = await other.post(PATH, {"model": TEXT, **fields})
            assert (status, param) == (answer.status, answer.error["param"]), answer.body
            assert message in answer.error["message"]
    answer = await proxy.post(PATH, {"model": TEXT, "input": "a"})
    assert (400, "model") == (answer.status, answer.error["param"])
    assert f"The model '{TEXT}' cannot moderate" in answer.error["message"]
    async with moderating(triton, labels={"a questoin": "sexual"}) as other:
        answer = await other.post(PATH, {"model": TEXT, "input": "a"})
    assert (501, "configuration_error") == (answer.status, answer.error["code"])
    assert "did you mean" in answer.error["message"].lower()


@pytest.mark.parametrize(
    "rules, message",
    [
        ("{labels: {toxic: rudeness}}", "labels"),
        ("{labels: {1: hate}}", "put it in quotes"),
        ("{labels: {toxic: hate}, thresholds: {rudeness: 0.5}}", "no label stands for this category"),
        ("{labels: {toxic: hate}, threshold: 2}", "threshold"),
        ("{labels: {toxic: hate}, thresholds: {violence: 0.5}}", "no label stands for this category"),
    ],
)
async def test_wrong_settings(tmp_path: Path, rules: str, message: str) -> None:
    """Wrong settings end the start."""
    file = tmp_path / "settings.yaml"
    file.write_text(f"models: {{m: {{moderation: {rules}}}}}")
    with pytest.raises(ConfigurationError, match=message):
        load_settings({"config": str(file)}, {})
