"""Embeddings, for both kinds of model over both transports."""

from __future__ import annotations

import base64
import importlib
import json
import math
import uuid
from array import array

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.cases import every_case
from tests.conformance.calls import in_session_loop, recorded
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import TRANSPORTS, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.config.tree import ModelSettings, Settings, TritonSettings

pytestmark = in_session_loop

# Code of the stand-ins, which is written for the Python that Triton runs.
embed = importlib.import_module("triton_openai.demo.standins.vectors").embed

MODELS = ("text_embedding", "vllm_embedding")
PATH = "/v1/embeddings"
TEXTS = ["one", "two, more than one word", "é😀", "\n", "a" * 300]


@pytest.fixture(scope="module")
def tokenizer(triton):
    return Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))


def vector(text: str, dimensions: int = 64) -> list[float]:
    """
    Return the vector that the stand-ins have for a text.

    It is the same to the last bit on every processor: whole numbers are summed, and then divided by the root of a sum.
    """
    return [float(value) for value in embed(text, dimensions)]


def decoded(text: str) -> list[float]:
    """Return the numbers of a base64 embedding, as the official client reads it."""
    return array("f", base64.b64decode(text, validate=True)).tolist()


async def asked(triton: TestTriton, model: str, mark: str, name: str) -> list[list[str]]:
    """Return the values of the input *name* of all requests to *model* that hold *mark*, in the order they came."""

    def marked(events):
        return [e["inputs"][name] for e in events if any(mark in value for value in e["inputs"][name]["value"])]

    events = await recorded(triton, lambda found: bool(marked(found)), model=model, event="request")
    return [tensor["value"] for tensor in marked(events)]


@pytest.mark.parametrize("model", MODELS)
async def test_the_whole_answer(proxy, model, tokenizer):
    """One text gives a list of one embedding, and the usage of its tokens."""
    answer = await proxy.post(PATH, {"model": model, "input": "one two"})

    tokens = len(tokenizer.encode("one two").ids)
    assert 200 == answer.status
    assert ["object", "data", "model", "usage"] == list(answer.json)
    assert {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": vector("one two")}],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    } == answer.json
    assert ["object", "index", "embedding"] == list(answer.json["data"][0])


@every_case("encoding", [None, "float", "base64"])
@every_case("texts", [["one"], TEXTS, [f"text number {n}" for n in range(150)]], ids=lambda inputs: str(len(inputs)))
@pytest.mark.parametrize("model", MODELS)
async def test_lists_keep_their_order(proxy, model, texts, encoding):
    """Every text has its embedding at its own index, as numbers or as base64, also beyond one batch of the model."""
    body = {"model": model, "input": texts, **({"encoding_format": encoding} if encoding else {})}
    answer = await proxy.post(PATH, body)

    assert 200 == answer.status, answer.body
    data = answer.json["data"]
    found = [decoded(each["embedding"]) if encoding == "base64" else each["embedding"] for each in data]
    assert list(range(len(texts))) == [each["index"] for each in data]
    assert [vector(text) for text in texts] == found


@every_case("count, batches", [(1, [1]), (64, [64]), (65, [1, 64]), (150, [22, 64, 64])])
async def test_batches_are_sent_as_batches(proxy, triton, count, batches):
    """A model that batches gets as many texts at a time as it takes."""
    mark = f"{uuid.uuid4().hex}-marked"
    answer = await proxy.post(PATH, {"model": "text_embedding", "input": [f"{mark} {n}" for n in range(count)]})

    assert 200 == answer.status
    requests = await asked(triton, "text_embedding", mark, "text")
    assert batches == sorted(map(len, requests))
    assert {f"{mark} {n}" for n in range(count)} == {text for texts in requests for text in texts}


async def test_the_tensors_of_a_batch(proxy, triton):
    """The texts are BYTES of shape ``[n, 1]``."""
    mark = f"{uuid.uuid4().hex} shape of texts é"
    await proxy.post(PATH, {"model": "text_embedding", "input": [mark, mark + " two"]})

    def found(events):
        return [event["inputs"] for event in events if mark in event["inputs"]["text"]["value"]]

    events = await recorded(triton, lambda each: bool(found(each)), model="text_embedding", event="request")
    expected = {"text": {"dtype": "BYTES", "shape": [2, 1], "value": [mark, mark + " two"]}}
    assert expected == found(events)[-1]


async def test_the_tensors_of_vllm(proxy, triton):
    """vLLM gets one request per text, as JSON, with the unused text that its config requires."""
    mark = f"{uuid.uuid4().hex} vllm é"
    await proxy.post(PATH, {"model": "vllm_embedding", "input": [mark, mark], "dimensions": 8})

    def found(events):
        return [each["inputs"] for each in events if mark in json.dumps(each["inputs"], ensure_ascii=False)]

    events = await recorded(triton, lambda each: len(found(each)) == 2, model="vllm_embedding", event="request")
    for inputs in found(events):
        assert {"text_input", "embedding_request", "return_num_input_tokens"} == set(inputs)
        assert {"dtype": "BYTES", "shape": [1], "value": [""]} == inputs["text_input"]
        assert {"dtype": "BOOL", "shape": [1], "value": [True]} == inputs["return_num_input_tokens"]
        request = json.loads(inputs["embedding_request"]["value"][0])
        assert {"input": mark, "pooling_params": {"dimensions": [8]}} == request


async def test_ids_without_text(proxy):
    """A model that takes text cannot embed tokens that stand for none, such as special ones; the error says so."""
    answer = await proxy.post(PATH, {"model": "text_embedding", "input": [[356], [1, 1]]})

    assert (400, "input") == (answer.status, answer.error["param"])
    assert "'input[1]' holds only tokens that stand for no text" in answer.error["message"]


async def test_dimensions_where_the_model_can(proxy):
    """vLLM shortens vectors itself, and they stay unit vectors."""
    answer = await proxy.post(PATH, {"model": "vllm_embedding", "input": "one", "dimensions": 8})

    found = answer.json["data"][0]["embedding"]
    assert vector("one", 8) == found
    assert math.isclose(1.0, math.hypot(*found), rel_tol=1e-5)


async def test_dimensions_out_of_range(proxy):
    """A number that no engine can have does not reach it."""
    for dimensions in (2**31, 2**63, 10**30):
        answer = await proxy.post(PATH, {"model": "vllm_embedding", "input": "one", "dimensions": dimensions})
        assert (400, "dimensions") == (answer.status, answer.error["param"])


async def test_dimensions_that_the_engine_refuses():
    """What vLLM says of them is the request's fault, whichever status Triton gives it."""
    inputs = ("text_input BYTES 1", "sampling_parameters? BYTES 1", "embedding_request? BYTES 1", "stream? BOOL 1")
    async with FakeTriton(config_of("m", inputs, ("text_output BYTES -1",))) as triton:
        triton.failing = math.inf
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            await proxy.ready()
            for text in (
                "Error generating stream: Model 'm' only supports [8] matryoshka dimensions, use other ones will fail.",
                "Error generating stream: Dimensions must be greater than 0",
            ):
                triton.failure = text
                answer = await proxy.post(PATH, {"model": "m", "input": "one", "dimensions": 9})
                assert (400, "dimensions") == (answer.status, answer.error["param"])
                assert text.partition(": ")[2] in answer.error["message"]


async def test_dimensions_where_the_model_cannot(proxy):
    """A plain model's own number of dimensions may be asked for, any other is refused by name."""
    own = await proxy.post(PATH, {"model": "text_embedding", "input": "one", "dimensions": 64})
    other = await proxy.post(PATH, {"model": "text_embedding", "input": "one", "dimensions": 32})

    assert 200 == own.status
    assert (400, "dimensions", "unsupported_parameter") == (other.status, other.error["param"], other.error["code"])


@every_case("many", [False, True])
async def test_token_ids_where_the_model_takes_them(proxy, tokenizer, many):
    """Token ids go to vLLM as they are; one list is one input, lists in a list are several."""
    ids = tokenizer.encode("one two", add_special_tokens=False).ids
    answer = await proxy.post(PATH, {"model": "vllm_embedding", "input": [ids, ids[:1]] if many else ids})

    assert 200 == answer.status, answer.body
    expected = [vector("one two"), vector("one")] if many else [vector("one two")]
    assert expected == [each["embedding"] for each in answer.json["data"]]
    assert (len(ids) + 1 if many else len(ids)) == answer.json["usage"]["prompt_tokens"]


async def test_token_ids_where_the_model_takes_text(proxy, tokenizer):
    """
    Token ids become text for a model of text, without the special tokens that it adds itself, and count with them.
    """
    first, second = tokenizer.encode("one two").ids, tokenizer.encode("é😀", add_special_tokens=False).ids
    answer = await proxy.post(PATH, {"model": "text_embedding", "input": [first, second]})

    assert 200 == answer.status, answer.body
    assert [vector("one two"), vector("é😀")] == [each["embedding"] for each in answer.json["data"]]
    assert len(first) + len(second) + 1 == answer.json["usage"]["prompt_tokens"]


@every_case("value", [[5000], [[75], [5000]], [0], [-1]])
async def test_token_ids_that_are_no_text(proxy, value):
    """Ids of another vocabulary, and special tokens alone; LangChain's users learn what to set."""
    answer = await proxy.post(PATH, {"model": "text_embedding", "input": value})

    assert (400, "input") == (answer.status, answer.error["param"])
    assert value == [0] or "check_embedding_ctx_length=False" in answer.error["message"]


async def test_token_ids_without_a_tokenizer(triton):
    """A model that takes text refuses token ids, and says how LangChain is told not to send them."""
    settings = proxy_settings(triton, "http")
    async with serving(type(settings)(triton=settings.triton)) as proxy:
        answer = await proxy.post(PATH, {"model": "text_embedding", "input": [[1, 2], [3]]})
        cut = await proxy.post(PATH, {"model": "text_embedding", "input": "one", "truncate_prompt_tokens": 1})

    assert (400, "input") == (answer.status, answer.error["param"])
    assert "check_embedding_ctx_length=False" in answer.error["message"]
    assert (400, "truncate_prompt_tokens") == (cut.status, cut.error["param"])


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=TRANSPORTS)
async def cutting(request, triton):
    """A service that knows the tokenizer of vLLM's model."""
    known = ModelSettings(tokenizer=str(triton.tokenizer))
    settings = proxy_settings(triton, request.param)
    models = {**settings.models, "vllm_embedding": known}
    async with serving(msgspec.structs.replace(settings, models=models), transport=request.param) as running:
        await running.ready()
        yield running


async def test_inputs_are_cut(cutting, tokenizer):
    """Inputs are cut at their end unless told otherwise; special tokens count, and stay unless the side is given."""
    proxy = cutting
    ids = tokenizer.encode("one two three four").ids
    for model, fields, expected in (
        ("vllm_embedding", {"truncate_prompt_tokens": 3}, "one two"),
        ("text_embedding", {"truncate_prompt_tokens": 3}, "one two"),
        ("vllm_embedding", {"truncate_prompt_tokens": 3, "truncation_side": "left"}, " two three four"),
        ("text_embedding", {"truncate_prompt_tokens": 3, "truncation_side": "left"}, " three four"),
        ("vllm_embedding", {"truncate_prompt_tokens": 100}, "one two three four"),
        ("vllm_embedding", {"truncate_prompt_tokens": 2, "input": ids[1:]}, "one two"),
        ("text_embedding", {"truncate_prompt_tokens": 2, "input": [ids[1:]]}, "one two"),
    ):
        answer = await proxy.post(PATH, {"model": model, "input": "one two three four", **fields})
        assert 200 == answer.status, answer.body
        assert vector(expected) == answer.json["data"][0]["embedding"], (model, fields)
    longest = await proxy.post(PATH, {"model": "vllm_embedding", "input": "word " * 2100, "truncate_prompt_tokens": -1})
    assert (200, 2048) == (longest.status, longest.json["usage"]["prompt_tokens"])


async def test_cuts_that_make_no_sense(cutting):
    """With the name of what is wrong."""
    proxy = cutting
    for fields, param in (
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 100_000}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
    ):
        answer = await proxy.post(PATH, {"model": "vllm_embedding", "input": "one", **fields})
        assert (400, param) == (answer.status, answer.error["param"]), fields


BAD_INPUTS: list[object] = [
    "", [], [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, "a"], [[1], "a"], [1.5], [True], None, 1, {"a": 1},
    ["a"] * 2049, [-1], [2**70],
]  # fmt: skip


@every_case("value", BAD_INPUTS, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("model", MODELS)
async def test_inputs_that_are_none(proxies, model, value):
    """Empty, mixed and foreign inputs are refused with the parameter's name."""
    answer = await proxies["http"].post(PATH, {"model": model, "input": value})

    assert 400 == answer.status, answer.body
    assert "input" == answer.error["param"].partition("[")[0]


@every_case("name, value", [("encoding_format", "hex"), ("dimensions", 0), ("dimensions", "8"), ("model", "")])
async def test_bad_fields(proxies, name, value):
    """Other fields are checked as well."""
    answer = await proxies["http"].post(PATH, {"model": "text_embedding", "input": "one", name: value})

    assert (400, name) == (answer.status, answer.error["param"])


async def test_a_model_without_embeddings(proxy):
    """A model that generates text is refused by name."""
    answer = await proxy.post(PATH, {"model": "ensemble", "input": "one"})

    assert (400, "model") == (answer.status, answer.error["param"])


async def test_a_generating_vllm_model_says_so(proxy):
    """A generating vLLM model has the tensors of any, so it is the backend that refuses to embed."""
    answer = await proxy.post(PATH, {"model": "vllm_model", "input": "one"})

    assert 400 == answer.status
    assert "does not support 'embed' request" in answer.error["message"]


async def test_a_text_that_is_too_long(proxy):
    """Too long a text is refused as too long, and one of many fails them all."""
    answer = await proxy.post(PATH, {"model": "vllm_embedding", "input": ["one", "word " * 2100, "two"]})

    assert (400, "context_length_exceeded", "input") == (answer.status, answer.error["code"], answer.error["param"])


async def test_usage_is_left_out_where_nobody_counts(triton):
    """A plain model without a tokenizer gives vectors and no made-up counts."""
    settings = proxy_settings(triton, "http")
    async with serving(type(settings)(triton=settings.triton)) as proxy:
        answer = await proxy.post(PATH, {"model": "text_embedding", "input": "one"})

    assert 200 == answer.status
    assert ["object", "data", "model"] == list(answer.json)


@pytest.mark.parametrize("model", MODELS)
async def test_both_transports_give_the_same_bytes(proxies, model):
    """The whole answer is the same over HTTP and over gRPC."""
    body = {"model": model, "input": TEXTS, "encoding_format": "base64"}
    over_http, over_grpc = [await proxies[name].post(PATH, body) for name in ("http", "grpc")]

    assert over_http.body == over_grpc.body
