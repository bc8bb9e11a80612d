"""Rerank and score, for cross-encoders of every kind and for models of embeddings, over both transports."""

from __future__ import annotations

import importlib
import math
from array import array
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cases import every_case
from tests.conformance.calls import approximately, in_session_loop, inputs_asked
from tests.proxy_fixture import Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.config.tree import ModelSettings

pytestmark = in_session_loop

# Code of the stand-ins, which is written for the Python that Triton runs.
embed = importlib.import_module("triton_openai.demo.standins.vectors").embed

CROSSING = ("text_rerank", "text_rerank_pairs", "text_rerank_ids")
COMPARING = ("text_embedding", "vllm_embedding")
MODELS = (*CROSSING, *COMPARING)
RERANK, SCORE = "/v1/rerank", "/v1/score"
QUERY = "which way should i go?"
DOCUMENTS = ["a yellow wood", "which way? go this way", "and sorry i could not travel both", "é😀", "way " * 60]


@pytest.fixture(scope="module")
def tokenizer(triton):
    return Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))


def cosine(query: str, document: str) -> float:
    """Return the cosine of the stand-ins' embeddings."""
    return sum(float(a) * float(b) for a, b in zip(embed(query), embed(document), strict=True))


def expected(model: str, query: str, document: str) -> float:
    """Return the score that a stand-in gives: a cosine, or a cross-encoder's logit."""
    value = cosine(query, document)
    return value if model in COMPARING else 8.0 * (value - 0.5)


def sigmoid(value: float) -> float:
    """Return the logistic function."""
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("model", MODELS)
async def test_the_whole_answer(proxy: Proxy, model: str) -> None:
    """Every document comes back with its index, text and score, the most relevant first."""
    answer = await proxy.post(RERANK, {"model": model, "query": QUERY, "documents": DOCUMENTS})

    assert 200 == answer.status, answer.body
    results = answer.json["results"]
    scores = [expected(model, QUERY, document) for document in DOCUMENTS]
    ranked = sorted(range(len(DOCUMENTS)), key=lambda index: -scores[index])
    assert ranked == [result["index"] for result in results]
    assert [DOCUMENTS[index] for index in ranked] == [result["document"]["text"] for result in results]
    assert pytest.approx([scores[index] for index in ranked], abs=1e-4) == [r["relevance_score"] for r in results]
    assert {"id", "model", "results"} <= answer.json.keys() <= {"id", "model", "results", "usage"}
    assert model == answer.json["model"]
    assert answer.json["id"].startswith("rerank-")


@every_case("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_paths(proxy: Proxy, path: str) -> None:
    """The three paths of vLLM's server answer alike; Cohere's two clients ask the second and the third."""
    body = {"model": "text_rerank", "query": QUERY, "documents": DOCUMENTS}
    answer = await proxy.post(path, body)

    assert 200 == answer.status
    assert len(DOCUMENTS) == len(answer.json["results"])


@pytest.mark.parametrize("model", MODELS)
async def test_top_n_documents_as_objects_and_without_texts(proxy: Proxy, model: str) -> None:
    """Documents may be objects with a text; fewer results and none of the texts can be asked for."""
    documents = [{"text": text} for text in DOCUMENTS]
    body = {"model": model, "query": {"text": QUERY}, "documents": documents, "top_n": 2, "return_documents": False}
    answer = await proxy.post(RERANK, body)
    everything = await proxy.post(RERANK, {**body, "top_n": 0})
    more = await proxy.post(RERANK, {**body, "top_n": 100})

    assert 200 == answer.status, answer.body
    assert [{"index", "relevance_score"}] * 2 == [set(result) for result in answer.json["results"]]
    assert 1 == answer.json["results"][0]["index"]
    assert len(DOCUMENTS) == len(everything.json["results"]) == len(more.json["results"])


@pytest.mark.parametrize("model", MODELS)
async def test_ties_keep_their_order(proxy: Proxy, model: str) -> None:
    """Equal documents come in the order in which they were given."""
    answer = await proxy.post(RERANK, {"model": model, "query": QUERY, "documents": ["other", *["go"] * 20]})

    assert list(range(1, 21)) == [result["index"] for result in answer.json["results"] if result["index"]]


@every_case(
    "first, second", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
@pytest.mark.parametrize("model", MODELS)
async def test_scores(proxy: Proxy, model: str, first: str, second: str) -> None:
    """One text is scored against each of several, or as many against as many, under any of vLLM's names."""
    one = await proxy.post(SCORE, {"model": model, first: QUERY, second: DOCUMENTS})
    paired = await proxy.post(SCORE, {"model": model, first: list(reversed(DOCUMENTS)), second: DOCUMENTS})
    single = await proxy.post("/score", {"model": model, first: [QUERY], second: DOCUMENTS[0]})

    assert [200] * 3 == [one.status, paired.status, single.status], (one.body, paired.body, single.body)
    assert {"id", "object", "created", "model", "data"} <= one.json.keys()
    assert ("list", model) == (one.json["object"], one.json["model"])
    assert {("score", index) for index in range(len(DOCUMENTS))} == {
        (d["object"], d["index"]) for d in one.json["data"]
    }
    wanted = [expected(model, QUERY, document) for document in DOCUMENTS]
    assert pytest.approx(wanted, abs=1e-4) == [entry["score"] for entry in one.json["data"]]
    assert pytest.approx(wanted[:1], abs=1e-4) == [entry["score"] for entry in single.json["data"]]
    crossed = [expected(model, a, b) for a, b in zip(reversed(DOCUMENTS), DOCUMENTS, strict=True)]
    assert pytest.approx(crossed, abs=1e-4) == [entry["score"] for entry in paired.json["data"]]


async def test_usage(proxy: Proxy, triton: TestTriton, tokenizer: Tokenizer) -> None:
    """Tokens are the backend's, or those that were sent, or counted with the tokenizer; else there is no usage."""

    def tokens(text: str, special: bool = True) -> int:
        return len(tokenizer.encode(text, add_special_tokens=special).ids)

    pairs = sum(tokens(QUERY, False) + tokens(document, False) for document in DOCUMENTS)
    once = tokens(QUERY) + sum(map(tokens, DOCUMENTS))
    wanted = {
        "text_rerank": pairs,
        "text_rerank_ids": pairs + 2 * len(DOCUMENTS),
        "text_embedding": once,
        "vllm_embedding": once,
    }
    for model, count in wanted.items():
        answer = await proxy.post(RERANK, {"model": model, "query": QUERY, "documents": DOCUMENTS})
        assert {"prompt_tokens": count, "total_tokens": count} == answer.json["usage"], model
    uncounted = await proxy.post(RERANK, {"model": "text_rerank_pairs", "query": QUERY, "documents": DOCUMENTS})
    assert "usage" not in uncounted.json
    settings = proxy_settings(triton, proxy.transport)
    given = ModelSettings(tokenizer=str(triton.tokenizer))
    async with serving(type(settings)(triton=settings.triton, models={"text_rerank_pairs": given})) as other:
        counted = await other.post(RERANK, {"model": "text_rerank_pairs", "query": QUERY, "documents": DOCUMENTS})
    assert pairs + 2 * len(DOCUMENTS) == counted.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "model, name, batches",
    [("text_rerank", "passage", [16, 16, 8]), ("text_rerank_pairs", "INPUT_PAIRS", [8] * 5)],
)
async def test_batches(proxy: Proxy, triton: TestTriton, model: str, name: str, batches: list[int]) -> None:
    """A request holds as many pairs as the model batches, and each keeps its place."""
    documents = [f"way {number}" for number in range(40)]
    answer = await proxy.post(SCORE, {"model": model, "text_1": QUERY, "text_2": documents})

    assert 200 == answer.status, answer.body
    asked = await inputs_asked(triton, model, answer.json["id"], len(batches))
    assert batches == [inputs[name]["shape"][0] for inputs in asked]
    sent = [text for inputs in asked for text in inputs[name]["value"]]
    assert documents == (sent[1::2] if model == "text_rerank_pairs" else sent)
    wanted = [expected(model, QUERY, document) for document in documents]
    assert pytest.approx(wanted, abs=1e-4) == [entry["score"] for entry in answer.json["data"]]


async def test_token_ids(proxy: Proxy, triton: TestTriton, tokenizer: Tokenizer) -> None:
    """A model of token ids gets each pair as its tokenizer joins it, padded to the longest, with a mask."""
    documents = ["one", "two and more words"]
    answer = await proxy.post(SCORE, {"model": "text_rerank_ids", "text_1": QUERY, "text_2": documents})

    (inputs,) = await inputs_asked(triton, "text_rerank_ids", answer.json["id"], 1)
    pairs = [tokenizer.encode(QUERY, document).ids for document in documents]
    width = max(map(len, pairs))
    padding = [width - len(ids) for ids in pairs]
    pad = tokenizer.token_to_id("<|endoftext|>")
    assert {"INT64"} == {tensor["dtype"] for tensor in inputs.values()}
    assert [[2, width]] * 3 == [tensor["shape"] for tensor in inputs.values()]
    filled = [[*ids, *[pad] * missing] for ids, missing in zip(pairs, padding, strict=True)]
    assert [*filled[0], *filled[1]] == inputs["input_ids"]["value"]
    masks = [[1] * len(ids) + [0] * missing for ids, missing in zip(pairs, padding, strict=True)]
    assert [*masks[0], *masks[1]] == inputs["attention_mask"]["value"]


async def test_truncation(proxy: Proxy, triton: TestTriton) -> None:
    """Where the pairs are tokenized here, the document is cut; where they are not, cutting is refused."""
    body = {"model": "text_rerank_ids", "text_1": QUERY, "text_2": ["way " * 50, "go"]}
    whole = await proxy.post(SCORE, body)
    cut = await proxy.post(SCORE, {**body, "truncate_prompt_tokens": 20})
    longest = await proxy.post(SCORE, {**body, "truncate_prompt_tokens": -1})
    huge = await proxy.post(SCORE, {**body, "truncate_prompt_tokens": 10**30})
    too_short = await proxy.post(SCORE, {**body, "truncate_prompt_tokens": 2})
    elsewhere = await proxy.post(SCORE, {**body, "model": "text_rerank", "truncate_prompt_tokens": 20})

    assert [200] * 4 == [whole.status, cut.status, longest.status, huge.status], cut.body
    (inputs,) = await inputs_asked(triton, "text_rerank_ids", cut.json["id"], 1)
    assert [2, 20] == inputs["input_ids"]["shape"]
    uncut = approximately(whole.json["data"], "score")
    assert uncut == longest.json["data"]
    assert uncut == huge.json["data"]
    assert uncut != cut.json["data"]
    assert (400, "context_length_exceeded") == (too_short.status, too_short.error["code"])
    assert (400, "truncate_prompt_tokens") == (elsewhere.status, elsewhere.error["param"])


async def test_a_pair_that_is_too_long(proxy: Proxy, triton: TestTriton) -> None:
    """Where the limit is known, a longer pair is refused with both numbers, and not cut."""
    settings = proxy_settings(triton, proxy.transport)
    limited = ModelSettings(tokenizer=str(triton.tokenizer), max_model_len=30)
    async with serving(type(settings)(triton=settings.triton, models={"text_rerank_ids": limited})) as other:
        body = {"model": "text_rerank_ids", "query": QUERY, "documents": ["go", "way " * 50]}
        answer = await other.post(RERANK, body)
        heavy = await other.post(RERANK, {**body, "documents": ["go", "way " * 5000]})
        cut = await other.post(RERANK, {**body, "truncate_prompt_tokens": -1})

    assert (400, "context_length_exceeded", "documents") == (
        answer.status, answer.error["code"], answer.error["param"],
    )  # fmt: skip
    assert "30" in answer.error["message"]
    # It was not tokenized.
    assert (400, "documents") == (heavy.status, heavy.error["param"])
    assert "20000 bytes" in heavy.error["message"]
    assert 200 == cut.status


async def test_activation(proxy: Proxy, triton: TestTriton) -> None:
    """Scores are the model's own unless the operator says that they are logits; then the client may choose."""
    body = {"model": "text_rerank", "text_1": QUERY, "text_2": DOCUMENTS}
    refused = await proxy.post(SCORE, {**body, "use_activation": True})
    settings = proxy_settings(triton, proxy.transport)
    async with serving(changed(settings, defaults={"score_activation": "sigmoid"})) as other:
        activated = await other.post(SCORE, body)
        asked = await other.post(SCORE, {**body, "use_activation": True})
        raw = await other.post(SCORE, {**body, "use_activation": False})
        cosines = await other.post(SCORE, {**body, "model": "text_embedding", "use_activation": True})

    logits = [expected("text_rerank", QUERY, document) for document in DOCUMENTS]
    assert (400, "use_activation") == (refused.status, refused.error["param"])
    assert pytest.approx([sigmoid(value) for value in logits], abs=1e-5) == [d["score"] for d in activated.json["data"]]
    assert approximately(activated.json["data"], "score") == asked.json["data"]
    assert pytest.approx(logits, abs=1e-4) == [entry["score"] for entry in raw.json["data"]]
    wanted = [cosine(QUERY, document) for document in DOCUMENTS]
    assert pytest.approx(wanted, abs=1e-4) == [entry["score"] for entry in cosines.json["data"]]


async def test_no_text_is_embedded_twice(proxy: Proxy, triton: TestTriton) -> None:
    """A query that is compared with many documents is embedded once."""
    answer = await proxy.post(RERANK, {"model": "text_embedding", "query": "same", "documents": ["same", "b", "b"]})

    (inputs,) = await inputs_asked(triton, "text_embedding", answer.json["id"], 1)
    assert ["same", "b"] == inputs["text"]["value"]
    assert [0, 1, 2] == [result["index"] for result in answer.json["results"]]
    assert pytest.approx(1.0) == answer.json["results"][0]["relevance_score"]


BAD: list[tuple[str, dict[str, Any], str]] = [
    (RERANK, {"query": ""}, "query"),
    (RERANK, {"query": None}, "query"),
    (RERANK, {"query": [QUERY]}, "query"),
    (RERANK, {"query": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}}, "query.text"),
    (RERANK, {"documents": []}, "documents"),
    (RERANK, {"documents": ["a", 1]}, "documents[1]"),
    (RERANK, {"documents": [{"title": "a"}]}, "documents[0].text"),
    (RERANK, {"documents": [{"text": 1}]}, "documents[0].text"),
    (RERANK, {"documents": ["a", {"text": "b", "image": "x"}]}, "documents[1]"),
    (RERANK, {"documents": ["a"] * 2049}, "documents"),
    (RERANK, {"top_n": -1}, "top_n"),
    (RERANK, {"top_n": "2"}, "top_n"),
    (RERANK, {"return_documents": "yes"}, "return_documents"),
    (RERANK, {"rank_fields": ["title"]}, "rank_fields"),
    (RERANK, {"max_chunks_per_doc": 10}, "max_chunks_per_doc"),
    (RERANK, {"max_tokens_per_doc": 4096}, "max_tokens_per_doc"),
    (RERANK, {"priority": 1}, "priority"),
    (RERANK, {"model": "ensemble"}, "model"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
    (SCORE, {"text_1": [], "text_2": "a"}, "text_1"),
    (SCORE, {"text_1": "a"}, "text_1"),
    (SCORE, {}, "text_1"),
    (SCORE, {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
    (SCORE, {"text_1": "a", "documents": "b"}, "documents"),
    (SCORE, {"text_1": "a", "text_2": [["b"]]}, "text_2[0]"),
]  # fmt: skip


@every_case("path, fields, param", BAD, ids=lambda value: repr(value)[:40])
async def test_bad_requests(proxies: dict[str, Proxy], path: str, fields: dict[str, Any], param: str) -> None:
    """What is wrong is refused with its name."""
    body = {"model": "text_rerank", **({"query": QUERY, "documents": DOCUMENTS} if path == RERANK else {}), **fields}
    answer = await proxies["http"].post(path, body)

    assert (400, param) == (answer.status, answer.error["param"]), answer.body


@pytest.mark.parametrize("model", MODELS)
async def test_a_lone_surrogate(proxy: Proxy, model: str) -> None:
    """Text that is no Unicode is the client's mistake, as everywhere."""
    answer = await proxy.post(SCORE, {"model": model, "text_1": "a", "text_2": "\ud800"})

    assert 400 == answer.status, answer.body


async def test_a_query_times_many_documents(proxy: Proxy, triton: TestTriton) -> None:
    """A short body cannot make the service send a long query a thousand times."""
    settings = changed(proxy_settings(triton, proxy.transport), server={"max_body_size": 10_000})
    async with serving(settings) as other:
        body = {"model": "text_rerank", "query": "a" * 3000, "documents": ["b"] * 4}
        answer = await other.post(RERANK, body)

    assert (400, "documents") == (answer.status, answer.error["param"])


async def test_token_ids_without_a_tokenizer(proxy: Proxy, triton: TestTriton) -> None:
    """A model of token ids says that it needs its tokenizer."""
    settings = proxy_settings(triton, proxy.transport)
    async with serving(type(settings)(triton=settings.triton)) as other:
        answer = await other.post(RERANK, {"model": "text_rerank_ids", "query": "a", "documents": ["b"]})

    assert (501, "configuration_error") == (answer.status, answer.error["code"])
    assert "--tokenizer" in answer.error["message"]


async def test_both_transports_give_the_same_scores(proxies: dict[str, Proxy]) -> None:
    """The scores are the same bits over HTTP and over gRPC."""
    for model in MODELS:
        body = {"model": model, "text_1": QUERY, "text_2": DOCUMENTS}
        over_http, over_grpc = [await proxies[name].post(SCORE, body) for name in ("http", "grpc")]
        scores = [array("d", [entry["score"] for entry in answer.json["data"]]) for answer in (over_http, over_grpc)]
        assert scores[0] == scores[1]
