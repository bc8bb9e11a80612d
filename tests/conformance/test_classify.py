"""Classification, of texts and of token ids, over both transports."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.conformance.calls import approximately, in_session_loop, inputs_asked
from tests.proxy_fixture import Proxy, proxy_settings, serving
from tests.standins.repository import CLASSES
from tests.triton_fixture import TestTriton
from triton_openai.cli.inspect import inspect_models, render
from triton_openai.config.tree import ModelSettings

pytestmark = in_session_loop

# Code of the stand-ins, which is written for the Python that Triton runs.
embed = importlib.import_module("triton_openai.demo.standins.vectors").embed

PATH = "/v1/classify"
TEXT, IDS = "text_classification", "text_classification_ids"
TEXTS = ["what is the question?", "hello there, a greeting", "é😀", *(f"an answer {number}" for number in range(30))]


def logits(text: str) -> list[float]:
    """Return what the stand-ins have for a text."""
    return [8.0 * float(np.dot(embed(text), embed(label))) for label in CLASSES]


def softmax(values: list[float]) -> list[float]:
    """Return the probabilities of logits."""
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


async def test_the_whole_answer(proxies: dict[str, Proxy], triton: TestTriton) -> None:
    """Each text has its probabilities and its label, over both transports the same, in batches of the model's size."""
    tokenizer = Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))
    tokens = sum(len(tokenizer.encode(text).ids) for text in TEXTS)
    expected = [softmax(logits(text)) for text in TEXTS]
    for model, sizes, spec in ((TEXT, [16, 16, 1], "text"), (IDS, [33], "input_ids")):
        over_both = [await proxies[name].post(PATH, {"model": model, "input": TEXTS}) for name in ("http", "grpc")]
        for answer in over_both:
            assert 200 == answer.status, answer.body
            body = answer.json
            assert ("list", model, "classify-") == (body["object"], body["model"], body["id"][:9])
            assert [(index, len(CLASSES)) for index in range(len(TEXTS))] == [
                (each["index"], each["num_classes"]) for each in body["data"]
            ]
            assert np.allclose(expected, [each["probs"] for each in body["data"]], atol=1e-5)
            # Triton has labels for the first, and the tokenizer none for the second.
            best = [CLASSES[int(np.argmax(row))] if model == TEXT else None for row in expected]
            assert best == [each["label"] for each in body["data"]]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens} if model == IDS else None
            assert usage == body.get("usage")
            asked = await inputs_asked(triton, model, body["id"], len(sizes))
            assert sizes == [inputs[spec]["shape"][0] for inputs in asked]
        assert approximately(over_both[0].json["data"], "probs") == over_both[1].json["data"]


async def test_token_ids_truncation_and_logits(proxy: Proxy, triton: TestTriton, tmp_path: Path) -> None:
    """Token ids and cut texts are classified as texts are; logits come as they are, where the model has them."""
    tokenizer = Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS[:2]]
    forms: list[Any] = [TEXTS[:2], ids, ids[0]]
    answers = [await proxy.post("/classify", {"model": IDS, "input": given}) for given in forms]
    one, by_ids, flat = [answer.json["data"] for answer in answers]
    assert approximately(one, "probs") == by_ids
    assert approximately(one[:1], "probs") == flat
    cut = await proxy.post(PATH, {"model": IDS, "input": TEXTS[0], "truncate_prompt_tokens": 4})
    assert 4 == cut.json["usage"]["prompt_tokens"]
    raw = await proxy.post(PATH, {"model": TEXT, "input": TEXTS[1], "use_activation": False})
    assert np.allclose(logits(TEXTS[1]), raw.json["data"][0]["probs"], atol=1e-5)
    folder = tmp_path / "tokenizer"
    shutil.copytree(triton.tokenizer, folder)
    config = {"id2label": {"0": "why", "2": "hi"}, "problem_type": "multi_label_classification"}
    (folder / "config.json").write_text(json.dumps(config))
    settings = proxy_settings(triton, proxy.transport)
    given = ModelSettings(tokenizer=str(folder), max_model_len=20)
    settings = type(settings)(triton=settings.triton, models={IDS: given, TEXT: given})
    async with serving(settings) as other:
        sigmoid = await other.post(PATH, {"model": TEXT, "input": ids[0]})
        labelled = await other.post(PATH, {"model": IDS, "input": [TEXTS[0], "a"]})
        for text in ("a " * 30, list(range(300, 330)), "a" * 100_000):
            long = await other.post(PATH, {"model": IDS, "input": text})
            assert (400, "context_length_exceeded", "input") == (long.status, long.error["code"], long.error["param"])
    wanted = [1 / (1 + math.exp(-value)) for value in logits(TEXTS[0])]
    assert np.allclose(wanted, sigmoid.json["data"][0]["probs"], atol=1e-5)
    assert CLASSES[0] == sigmoid.json["data"][0]["label"]
    assert "why" == labelled.json["data"][0]["label"]
    shown = render([each for each in await inspect_models(settings) if each.name in (TEXT, IDS)])
    assert "the sigmoid of its logits (problem_type); labels from Triton" in shown
    assert "the model's numbers; labels from the tokenizer's config.json" in shown
    assert 2 == shown.count("tasks          classify")


async def test_bad_requests(proxies: dict[str, Proxy], triton: TestTriton) -> None:
    """What is wrong is refused with its name."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "messages": 5}, "messages"),
        ({"input": "a", "softmax": True}, "softmax"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "truncate_prompt_tokens": 5, "model": TEXT}, "truncate_prompt_tokens"),
        ({"input": [5], "model": TEXT}, "input"),
        ({"input": [10**30]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "use_activation": False}, "use_activation"),
        ({"input": "a", "model": "text_embedding"}, "model"),
    ]
    for fields, param in cases:
        answer = await proxies["http"].post(PATH, {"model": IDS, **fields})
        assert (400, param) == (answer.status, answer.error["param"]), (fields, answer.body)
    settings = proxy_settings(triton, "http")
    async with serving(type(settings)(triton=settings.triton)) as other:
        answer = await other.post(PATH, {"model": IDS, "input": [5]})
    assert (501, "configuration_error") == (answer.status, answer.error["code"])
