"""Cross-encoders: which models are taken for one, what they are sent, and what is made of their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from tests.cases import every_case
from tests.unit.adapters.test_encode import TEXT, specs
from tests.unit.prompts.test_template_support import save
from triton_openai.adapters._common.registry import Registry
from triton_openai.adapters._common.tensor_mapping import id_batches
from triton_openai.adapters.cross_encoder import CrossEncoder
from triton_openai.errors import ConfigurationError, ContextLengthExceeded, UpstreamError
from triton_openai.jobs import ScoreJob, TokenPair
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton.tensors import InferRequest, JsonResponse, ModelConfig

REGISTRY = Registry()


def config(inputs: list[str], outputs: list[str], batch: int = 8) -> ModelConfig:
    """Return a model's config."""
    return ModelConfig(name="m", max_batch_size=batch, inputs=specs(*inputs), outputs=specs(*outputs))


NIM = config(["query BYTES 1", "passage BYTES 1"], ["index INT32 1", "logit FP32 1", "token_count INT32 1"], 4)
PAIRS = config(["INPUT_PAIRS BYTES 2"], ["SCORES FP32 -1"], 4)
MANY = config(["QUERY BYTES 1", "PASSAGES BYTES -1", "TRUNCATE? INT32 1"], ["SCORES FP32 -1"], 4)
IDS = ["input_ids INT64 -1", "attention_mask INT64 -1"]
BERT = config([*IDS, "token_type_ids INT64 -1"], ["logits FP32 1"], 4)
ROBERTA = config(["input_ids INT32 -1 -1", "attention_mask INT32 -1 -1"], ["logits FP16 -1 1"], 0)


@every_case(
    "model, reason",
    [
        (NIM, "two texts (query, passage) and a score per pair out (logit)"),
        (PAIRS, "pairs of texts (INPUT_PAIRS) and a score per pair out (SCORES)"),
        (MANY, "two texts (QUERY, PASSAGES) and a score per pair out (SCORES)"),
        (BERT, "token ids (input_ids, attention_mask, token_type_ids) and a score per pair out (logits)"),
        (ROBERTA, "token ids (input_ids, attention_mask) and a score per pair out (logits)"),
        (config(["text BYTES 1", "text_pair BYTES 1"], ["score FP64 1"], 0), "two texts (text, text_pair)"),
        (config(["document BYTES -1", "query BYTES -1"], ["score FP32 -1"], 0), "two texts (query, document)"),
        (config(["query BYTES 1", "documents BYTES -1"], ["scores FP32 -1"], 0), "two texts (query, documents)"),
        (config(["anything BYTES -1 2"], ["similarity FP32 -1 1"], 0), "pairs of texts (anything)"),
        (config(["text_1 BYTES 1", "text_2 BYTES 1"], ["x FP32 1", "scores FP32 1"]), "out (scores)"),
    ],
)
def test_claimed(model: ModelConfig, reason: str) -> None:
    """Models are claimed by two texts, a pair, or token ids, with a score out."""
    claim = REGISTRY.claim(model)

    assert claim is not None
    assert claim.adapter is CrossEncoder
    assert reason in claim.reason
    assert (ScoreJob,) == CrossEncoder(model, {}).jobs
    assert ("token ids" in claim.reason) == CrossEncoder(model, {}).capabilities.tokens


@every_case(
    "inputs, outputs, batch",
    [
        (["text BYTES 1", "text_pair BYTES 1"], ["embedding FP32 64"], 8),
        (["text BYTES 1", "text_pair BYTES 1"], ["logits FP32 3"], 8),
        (["text BYTES 1", "text_pair BYTES 1"], ["other FP32 1"], 8),
        (["text BYTES 1", "text_pair BYTES 1"], ["score BYTES 1"], 8),
        (["text BYTES 1", "language BYTES 1"], ["score FP32 1"], 8),
        (["query BYTES 1", "passage BYTES 1", "top_k INT32 1"], ["score FP32 1"], 8),
        (["query BYTES 1", "question BYTES 1"], ["score FP32 1"], 8),
        (["input_ids INT64 -1"], ["logits FP32 1"], 8),
        ([*IDS, "pixel_values FP32 3 224 224"], ["logits FP32 1"], 8),
        (IDS, ["logits FP32 -1"], 8),
        (IDS, ["logits FP32 2"], 8),
        (IDS, ["logits FP32 -1 32000"], 8),
        (IDS, ["output FP32 1"], 8),
        (["input_ids FP32 -1", "attention_mask INT64 -1"], ["logits FP32 1"], 8),
        (["input_ids INT64 -1 -1", "attention_mask INT64 -1 -1"], ["last_hidden_state FP32 -1 -1 384"], 0),
        (["x FP32 -1"], ["score FP32 1"], 8),
        ([], ["score FP32 1"], 8),
    ],
)
def test_not_claimed(inputs: list[str], outputs: list[str], batch: int) -> None:
    """What is not called a score, has several per pair, or needs what is not known, is left alone."""
    assert CrossEncoder.matches(config(inputs, outputs, batch)) is None


def test_others_keep_theirs() -> None:
    """Models of text and of embeddings stay with their adapters."""
    embedding = config(["query BYTES 1"], ["score FP32 1"])

    assert ["trtllm-ensemble", "embeddings"] == [
        claim.adapter.name for claim in map(REGISTRY.claim, (TEXT, embedding)) if claim is not None
    ]


def test_forced() -> None:
    """Asked for by name, an output of any name will do, but not of any shape."""
    CrossEncoder(config(IDS, ["output FP32 1"]), {})
    with pytest.raises(ConfigurationError, match="'cross-encoder' needs"):
        CrossEncoder(TEXT, {})


def job(*pairs: tuple[str, str], **fields: Any) -> ScoreJob:
    """Return a job."""
    return ScoreJob(id="score-1", pairs=pairs, **fields)


def tensors(request: InferRequest) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    """Return shapes and values of a request's inputs."""
    return {tensor.name: (tensor.shape, list(tensor.values)) for tensor in request.inputs}


FIVE = [("q", f"d{number}") for number in range(5)]


@every_case(
    "model, expected",
    [
        (
            NIM,
            [
                {"query": ((4, 1), ["q"] * 4), "passage": ((4, 1), ["d0", "d1", "d2", "d3"])},
                {"query": ((1, 1), ["q"]), "passage": ((1, 1), ["d4"])},
            ],
        ),
        (
            PAIRS,
            [
                {"INPUT_PAIRS": ((4, 2), ["q", "d0", "q", "d1", "q", "d2", "q", "d3"])},
                {"INPUT_PAIRS": ((1, 2), ["q", "d4"])},
            ],
        ),
        (MANY, [{"QUERY": ((1, 1), ["q"]), "PASSAGES": ((1, 5), ["d0", "d1", "d2", "d3", "d4"])}]),
        (
            config(["query BYTES -1", "doc BYTES -1"], ["score FP32 -1"], 0),
            [{"query": ((5,), ["q"] * 5), "doc": ((5,), ["d0", "d1", "d2", "d3", "d4"])}],
        ),
        (
            config(["query BYTES 1", "docs BYTES -1"], ["score FP32 -1"], 0),
            [{"query": ((1,), ["q"]), "docs": ((5,), ["d0", "d1", "d2", "d3", "d4"])}],
        ),
        (
            config(["query BYTES 1", "doc BYTES 1"], ["score FP32 1"], 0),
            [{"query": ((1,), ["q"]), "doc": ((1,), [f"d{number}"])} for number in range(5)],
        ),
    ],
)
def test_texts(model: ModelConfig, expected: list[Any]) -> None:
    """Texts are sent in the shapes that the config declares, as many as the model batches."""
    requests = CrossEncoder(model, {}).encode(job(*FIVE))

    assert expected == [tensors(request) for request in requests]
    assert len(requests) == len({request.id for request in requests})


def test_several_queries_for_a_model_that_takes_one() -> None:
    """Where a row has one query, pairs with another go into another request."""
    requests = CrossEncoder(MANY, {}).encode(job(("a", "1"), ("a", "2"), ("b", "3"), ("a", "4")))

    assert [["1", "2"], ["3"], ["4"]] == [tensors(request)["PASSAGES"][1] for request in requests]
    assert [["a"], ["b"], ["a"]] == [tensors(request)["QUERY"][1] for request in requests]


ENCODED = [TokenPair([1, 2, 3], [0, 0, 1]), TokenPair([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])]


def test_padding() -> None:
    """Pairs of one request are filled up to the longest."""
    (request,) = CrossEncoder(BERT, {}).encode(job(("q", "a"), ("q", "b"), encoded=ENCODED, pad_id=9))

    assert {
        "input_ids": ((2, 5), [1, 2, 3, 9, 9, 1, 2, 3, 4, 5]),
        "attention_mask": ((2, 5), [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]),
        "token_type_ids": ((2, 5), [0, 0, 1, 0, 0, 0, 0, 0, 1, 1]),
    } == tensors(request)
    assert ("logits",) == request.outputs


@given(lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=80), batch=st.integers(1, 40))
def test_a_long_text_among_short_ones_is_not_padded_to_gigabytes(lengths: list[int], batch: int) -> None:
    """Each pair is in one request; the requests are not more than they need be, and not mostly padding."""
    model = config(IDS, ["logits FP32 1"], batch)
    found = id_batches(model, model.inputs["input_ids"], lengths, 0)
    assert list(range(len(lengths))) == [place for places in found for place in places]
    for number, places in enumerate(found):
        padded, held = len(places) * max(lengths[n] for n in places), sum(lengths[n] for n in places)
        assert len(places) <= batch
        assert len(places) == 1 or padded <= max(65_536, 2 * held)
        if number + 1 < len(found):
            longer = [*places, places.stop]
            padded, held = len(longer) * max(lengths[n] for n in longer), sum(lengths[n] for n in longer)
            assert len(longer) > batch or padded > max(65_536, 2 * held)


def test_without_a_pad_token() -> None:
    """Without a pad token, nothing is padded: every pair is a request of its own."""
    requests = CrossEncoder(ROBERTA, {}).encode(job(("q", "a"), ("q", "b"), encoded=ENCODED))

    assert [[1, 2, 3], [1, 2, 3, 4, 5]] == [tensors(request)["input_ids"][1] for request in requests]


def test_a_fixed_length() -> None:
    """A model of one length gets it; a longer pair is refused with both numbers, and padding needs a pad token."""
    fixed = CrossEncoder(config(["input_ids INT32 4", "attention_mask INT32 4"], ["logits FP32 1"]), {})
    (request,) = fixed.encode(job(("q", "a"), encoded=ENCODED[:1], pad_id=0))

    assert ((1, 4), [1, 2, 3, 0]) == tensors(request)["input_ids"]
    with pytest.raises(ContextLengthExceeded, match=r"4 tokens\. .* 5 tokens"):
        fixed.encode(job(("q", "a"), ("q", "b"), encoded=ENCODED, pad_id=0))
    with pytest.raises(ConfigurationError, match="no pad token"):
        fixed.encode(job(("q", "a"), encoded=ENCODED[:1]))


@given(st.integers(1, 40), st.sampled_from([NIM, PAIRS, MANY, BERT, ROBERTA]), st.randoms(use_true_random=False))
def test_every_score_finds_its_pair(count: int, model: ModelConfig, random: Any) -> None:
    """However pairs are batched, and in whatever order a request's scores come, each is its own pair's."""
    scores = [random.random() for _ in range(count)]
    encoded = [TokenPair([1] * random.randint(2, 9), []) for _ in range(count)]
    pairs = job(*((random.choice("ab"), f"d{n}") for n in range(count)), encoded=encoded, pad_id=0)
    adapter = CrossEncoder(model, {})
    responses = []
    place = 0
    for request in adapter.encode(pairs):
        shape = request.inputs[-1].shape
        size = shape[1] if model is MANY else shape[0]
        own = scores[place : place + size]
        place += size
        order = list(range(size))
        if model is NIM:
            order.sort(key=lambda index, own=own: -own[index])  # type: ignore[misc]
        values = [own[index] for index in order]
        (name,) = {"logit", "logits", "SCORES"} & model.outputs.keys()
        responses.append(JsonResponse({name: values, "index": order, "token_count": [3] * size}))

    result = adapter.decode(pairs, responses)

    assert place == count
    assert scores == list(result.scores)
    assert (3 * count if model is NIM else None) == result.prompt_tokens


@every_case(
    "answer",
    [{}, {"logit": [0.5]}, {"logit": [0.5, 0.1, 0.2]}, {"logit": [0.5, 0.1]}, {"logit": [0.5, 0.1], "index": [0, 0]}],
)
def test_answers_that_do_not_fit(answer: dict[str, Any]) -> None:
    """Too few scores, too many, and scores of nobody knows which pair are the model's failure."""
    with pytest.raises(UpstreamError):
        CrossEncoder(NIM, {}).decode(job(("q", "a"), ("q", "b")), [JsonResponse(answer)])


def test_counts_that_are_not_for_all() -> None:
    """Counts for some of the pairs are no usage."""
    answer = JsonResponse({"logit": [0.5, 0.1], "index": [0, 1], "token_count": [5]})

    assert CrossEncoder(NIM, {}).decode(job(("q", "a"), ("q", "b")), [answer]).prompt_tokens is None


def bert_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer of single words that joins pairs as BERT does."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "one", "two", "three", "four"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return Tokenizer.load(save(folder, backend))


def test_pairs_as_the_tokenizer_joins_them(tmp_path: Path) -> None:
    """Ids and segments are those of the tokenizer's own pair; with a limit the document is cut."""
    tokenizer = bert_tokenizer(tmp_path)
    pairs = [("one two", "three four"), ("one", ""), ("one two", "four")]

    assert [
        TokenPair([1, 4, 5, 2, 6, 7, 2], [0, 0, 0, 0, 1, 1, 1]),
        TokenPair([1, 4, 2, 2], [0, 0, 0, 1]),
        TokenPair([1, 4, 5, 2, 7, 2], [0, 0, 0, 0, 1, 1]),
    ] == tokenizer.encode_pairs(pairs)
    assert [[1, 4, 5, 2, 6, 2], [1, 4, 2, 2]] == [pair.ids for pair in tokenizer.encode_pairs(pairs[:2], 6)]
    assert [[1, 4, 5, 2, 2]] == [pair.ids for pair in tokenizer.encode_pairs(pairs[:1], 5)]
    with pytest.raises(ContextLengthExceeded, match="4 tokens"):
        tokenizer.encode_pairs(pairs, 4)


words = st.lists(st.sampled_from(["one", "two", "three", "odd"]), max_size=6).map(" ".join)


@given(pairs=st.lists(st.tuples(words, words), min_size=1, max_size=5), limit=st.integers(10, 20))
def test_pairs_are_what_the_library_makes(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], limit: int
) -> None:
    """Joined and cut one by one, by the library itself, they are the same."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = bert_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = [backend.encode(*pair) for pair in pairs]
    backend.enable_truncation(limit, strategy="only_second")

    assert [TokenPair(each.ids, each.type_ids) for each in plain] == tokenizer.encode_pairs(pairs)
    cut = []
    for pair, whole in zip(pairs, plain, strict=True):
        # The library looks whether it may cut before it looks whether it has to.
        each = backend.encode(*pair) if len(whole.ids) > limit else whole
        cut.append(TokenPair(each.ids, each.type_ids))
    assert cut == tokenizer.encode_pairs(pairs, limit)
