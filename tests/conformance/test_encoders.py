"""Embeddings of encoders that take token ids and return a vector for each token, over both transports."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.conformance.calls import in_session_loop, inputs_asked
from tests.proxy_fixture import Proxy, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.config.tree import ModelSettings

pytestmark = in_session_loop

PATH = "/v1/embeddings"
MODEL = "text_encoder"
TEXTS = ["what is the question?", "hello there, a greeting of many words", "é😀"]


def tokens_of(triton: TestTriton, text: str) -> Any:
    """Return the vectors that the stand-in has for the tokens of *text*."""
    ids = Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json")).encode(text).ids
    return np.array([(number, 1, place) for place, number in enumerate(ids)], dtype=float)


def vectors(answer: Any) -> Any:
    """Return the vectors of an answer."""
    assert 200 == answer.status, answer.body
    return [each["embedding"] for each in answer.json["data"]]


async def test_the_mean(proxy: Proxy, triton: TestTriton) -> None:
    """By default a text has the mean of its tokens' vectors, with the length 1; padding does not count."""
    answer = await proxy.post(PATH, {"model": MODEL, "input": TEXTS})

    means = [tokens_of(triton, text).mean(axis=0) for text in TEXTS]
    assert np.allclose([mean / np.linalg.norm(mean) for mean in means], vectors(answer), atol=1e-5)
    assert sum(len(tokens_of(triton, text)) for text in TEXTS) == answer.json["usage"]["prompt_tokens"]
    (inputs,) = await inputs_asked(triton, MODEL, answer.json["id"], 1) if "id" in answer.json else [None]
    assert inputs is None or len(TEXTS) == inputs["input_ids"]["shape"][0]
    packed = await proxy.post(PATH, {"model": MODEL, "input": TEXTS[0], "encoding_format": "base64"})
    data = base64.b64decode(packed.json["data"][0]["embedding"])
    assert np.allclose(vectors(answer)[0], np.frombuffer(data, "<f4"), atol=1e-5)


async def test_token_ids(proxy: Proxy, triton: TestTriton) -> None:
    """Token ids are embedded as their text is, and one that does not exist is refused."""
    ids = [int(row[0]) for row in tokens_of(triton, TEXTS[0])]
    by_text = await proxy.post(PATH, {"model": MODEL, "input": TEXTS[0]})
    by_ids = await proxy.post(PATH, {"model": MODEL, "input": ids})
    assert np.allclose(vectors(by_text), vectors(by_ids))
    for wrong, param in (({"input": [10**6]}, "input"), ({"input": "x", "dimensions": 2}, "dimensions")):
        answer = await proxy.post(PATH, {"model": MODEL, **wrong})
        assert (400, param) == (answer.status, answer.error["param"].partition("[")[0])


@pytest.mark.parametrize("mode", ["mean", "cls", "last"])
async def test_the_files_of_a_model(triton: TestTriton, tmp_path: Path, mode: str) -> None:
    """The files of sentence-transformers say how vectors are pooled; the settings come first."""
    folder = tmp_path / "model"
    shutil.copytree(triton.tokenizer, folder)
    (folder / "1_Pooling").mkdir()
    flag = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}[mode]
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 3, flag: True}))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "type": "sentence_transformers.models.Transformer"}]))
    tokens = tokens_of(triton, "query: " + TEXTS[0])
    pooled = {"mean": tokens.mean(axis=0), "cls": tokens[0], "last": tokens[-1]}[mode]
    settings = proxy_settings(triton, "http")
    own = ModelSettings(tokenizer=str(folder))
    async with serving(type(settings)(triton=settings.triton, models={MODEL: own})) as other:
        assert np.allclose([pooled], vectors(await other.post(PATH, {"model": MODEL, "input": TEXTS[0]})), atol=1e-3)
    told = ModelSettings(tokenizer=str(folder), pooling="cls", normalize_embeddings=True, embedding_prefix="")
    first = tokens_of(triton, TEXTS[0])[0]
    async with serving(type(settings)(triton=settings.triton, models={MODEL: told})) as other:
        found = vectors(await other.post(PATH, {"model": MODEL, "input": TEXTS[0]}))
        assert np.allclose([first / np.linalg.norm(first)], found, atol=1e-5)


async def test_ranking(proxy: Proxy) -> None:
    """Texts are ranked by the vectors of an encoder, as by those of any model."""
    answer = await proxy.post("/v1/rerank", {"model": MODEL, "query": TEXTS[0], "documents": TEXTS})
    assert 200 == answer.status
    assert 0 == answer.json["results"][0]["index"]
