"""Log probabilities: made from logits, read from text-level models, named, held back beside stop strings, rendered."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from tests.cases import every_case
from tests.extended import examples
from triton_openai.adapters.trtllm import GENERATION, check_size, read_logits
from triton_openai.adapters.trtllm_ensemble import StepLogprobs
from triton_openai.adapters.vllm import token_logprobs
from triton_openai.answer.logits_reader import log_probabilities
from triton_openai.answer.prepare import bias_words
from triton_openai.answer.stages import LogprobsStage, StopStrings, TokenNames
from triton_openai.api.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from triton_openai.errors import InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import IMPOSSIBLE, Alternative, Delta, Logits, TokenLogprob, Vocabulary
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton.binary_response import BinaryResponse, Layout
from triton_openai.triton.tensors import JsonResponse, ModelConfig, TensorSpec

SCORES = st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo's: byte-level, with nothing put in front of a text."""
    return Tokenizer.load(str(files("triton_openai.demo").joinpath("tokenizer")))


def logits(rows: Sequence[Sequence[float]], *, datatype: str = "FP32", first: int = 0) -> Logits:
    """Return *rows* as a backend would send them."""
    flat = [score for row in rows for score in row]
    if datatype == "BF16":
        data = b"".join(struct.pack("<f", score)[2:] for score in flat)
    else:
        data = struct.pack(f"<{len(flat)}{'f' if datatype == 'FP32' else 'e'}", *flat)
    return Logits(data=data, datatype=datatype, width=len(rows[0]), first=first)


@given(SCORES, st.data())
def test_log_probabilities_are_the_log_softmax(scores: list[float], data: st.DataObject) -> None:
    """
    The chosen token and the most likely ones have log probabilities, in their order, as the plain formula gives them.

    Of equal scores the lowest id comes first, as it does where a backend chooses the likeliest token.
    """
    chosen = data.draw(st.integers(0, len(scores) - 1))
    count = data.draw(st.integers(0, len(scores) + 2))
    highest = max(scores)
    total = highest + math.log(sum(math.exp(score - highest) for score in scores))

    (entry,) = log_probabilities(logits([scores]), [chosen], count)

    assert entry.logprob == pytest.approx(scores[chosen] - total, abs=1e-5)
    assert 1 + sum(score > scores[chosen] for score in scores) == entry.rank
    assert sorted(range(len(scores)), key=lambda id: -scores[id])[:count] == [item.id for item in entry.top]
    assert [item.logprob for item in entry.top] == pytest.approx(
        [scores[item.id or 0] - total for item in entry.top], abs=1e-5
    )
    # A client that looks whether the likeliest token was chosen compares the numbers.
    assert all(item.logprob == entry.logprob for item in entry.top if item.id == chosen)


@every_case("datatype", ["FP32", "FP16", "BF16"])
def test_every_type_of_logits(datatype: str) -> None:
    """Half precision, and the upper half of a single."""
    first, second = log_probabilities(logits([[0.0, 1.0], [2.0, 2.0]], datatype=datatype), [1, 0], 1)

    assert first.logprob == pytest.approx(-math.log1p(math.exp(-1.0)))
    assert second.logprob == pytest.approx(-math.log(2.0))


def test_rows_are_counted_from_the_first_new_one() -> None:
    """What is before belongs to other tokens, and what is behind to none."""
    (entry,) = log_probabilities(logits([[5.0, 0.0], [0.0, 0.0], [9.0, 0.0]], first=1), [0], 0)

    assert entry.logprob == pytest.approx(-math.log(2.0))


def test_a_token_that_cannot_be_has_a_number_all_the_same() -> None:
    """JSON has no minus infinity: a guide forbids tokens that way."""
    (entry,) = log_probabilities(logits([[0.0, -math.inf]]), [1], 2)

    assert [IMPOSSIBLE, 0.0, IMPOSSIBLE] == [entry.logprob, *(item.logprob for item in entry.top)]


@every_case(
    "given_logits, chosen",
    [
        (logits([[0.0, 1.0]]), [0, 1]),
        (logits([[0.0, 1.0]]), [2]),
        (logits([[math.nan, 1.0]]), [1]),
        (logits([[-math.inf, -math.inf]]), [1]),
        (Logits(data=b"12345678", datatype="INT32", width=2), [1]),
    ],
)
def test_logits_that_say_nothing_are_an_error(given_logits: Logits, chosen: list[int]) -> None:
    """Another token's number would be worse."""
    with pytest.raises(UpstreamError):
        log_probabilities(given_logits, chosen, 1)


def response(shape: Sequence[int], datatype: str = "FP32") -> BinaryResponse:
    """Return a response with logits of *shape*."""
    kind = np.float32 if datatype == "FP32" else np.float16
    data = np.arange(math.prod(shape), dtype=kind).tobytes()
    return BinaryResponse(Layout(((GENERATION, datatype, tuple(shape)),)), (data,))


@every_case(
    "shape, count, total, first",
    [
        # A stream: the new tokens' rows.
        ((1, 1, 1, 7), 1, 5, 0),
        ((1, 2, 1, 7), 2, 5, 0),
        # A whole answer, with rows to spare; and all tokens so far.
        ((1, 1, 9, 7), 5, 5, 0),
        ((1, 1, 5, 7), 1, 5, 4),
    ],
)
def test_the_new_tokens_rows_are_found(shape: Sequence[int], count: int, total: int, first: int) -> None:
    """The new tokens' rows are found, whether they come alone or among others."""
    found = read_logits(response(shape), GENERATION, count=count, total=total)

    assert (7, first) == (found.width, found.first)


def test_logits_that_are_missing_or_malformed() -> None:
    """An engine that does not gather them sends none; the text tells what to do."""
    with pytest.raises(UnsupportedParameter, match="gather_generation_logits"):
        read_logits(BinaryResponse(Layout(()), ()), GENERATION, count=1, total=1)
    with pytest.raises(UnsupportedParameter):
        read_logits(JsonResponse({GENERATION: [1.0, 2.0]}), GENERATION, count=1, total=1)
    with pytest.raises(UpstreamError):
        read_logits(response((1, 1, 2, 7)), GENERATION, count=3, total=4)
    broken = BinaryResponse(Layout(((GENERATION, "FP32", (1, 1, 1, 7)),)), (b"1234",))
    with pytest.raises(UpstreamError):
        read_logits(broken, GENERATION, count=1, total=1)


def test_a_response_has_a_limit() -> None:
    """A gigabyte; half as many tokens fit in single precision as in half."""
    most = {}
    for datatype in ("FP32", "FP16"):
        spec = TensorSpec(name=GENERATION, datatype=datatype, dims=(-1, -1, -1))
        config = ModelConfig(name="m", outputs={GENERATION: spec})
        most[datatype] = 2**30 // (100_000 * (4 if datatype == "FP32" else 2))
        check_size(config, GENERATION, most[datatype], Vocabulary(size=100_000), param="max_tokens")
        with pytest.raises(InvalidRequest, match=str(most[datatype])) as caught:
            check_size(config, GENERATION, most[datatype] + 1, Vocabulary(size=100_000), param="max_tokens")
        assert "max_tokens" == caught.value.param
    assert 2 * most["FP32"] == most["FP16"]


def steps(*responses: tuple[str, int | None, Any]) -> list[TokenLogprob]:
    """Return what is read from text, count of new tokens, and list of each response."""
    reader = StepLogprobs()
    deltas = [(Delta(text, tokens=tokens), values) for text, tokens, values in responses]
    for delta, values in deltas:
        reader(JsonResponse({"output_log_probs": values}), delta)
    return [entry for delta, _ in deltas for entry in delta.logprobs]


@every_case(
    "responses",
    [
        [("a", 1, -0.1), (" b", 1, [-0.1, -0.2]), ("", 0, [-0.1, -0.2])],
        [("a", 1, -0.1), (" b", 1, -0.2), ("", 0, [])],
        [("a", None, -0.1), (" b", None, [-0.1, -0.2]), ("", None, [-0.1, -0.2])],
        [("a", None, -0.1), (" b", None, -0.2), ("", None, -0.2)],
    ],
)
def test_a_step_of_text_is_a_token(responses: list[tuple[str, int | None, Any]]) -> None:
    """The text of a step is a token, in either form of the list, with or without counts."""
    assert [("a", -0.1, b"a"), (" b", -0.2, b" b")] == [
        (entry.token, entry.logprob, entry.raw) for entry in steps(*responses)
    ]


def test_bytes_that_the_backend_lost_are_not_told() -> None:
    """A part of a character, in both ways in which it shows, and what completes it."""
    entries = steps(("\ufffd", 1, -0.1), ("", 1, [-0.1, -0.2]), ("é", 1, [-0.1, -0.2, -0.3]), ("a", 1, [0, 0, 0, -0.4]))

    assert [None, None, None, b"a"] == [entry.raw for entry in entries]


def test_a_step_of_several_tokens_is_an_error() -> None:
    """Which text is whose cannot be seen; the text tells what to do."""
    with pytest.raises(UpstreamError, match="--prefer-token-level"):
        steps(("a b", 2, [-0.1, -0.2]))


def vllm_entries(count: int, response: JsonResponse) -> Sequence[TokenLogprob]:
    """Return what is read from *response* where *count* alternatives were asked for."""
    delta = Delta()
    token_logprobs(count)(response, delta)
    return delta.logprobs


def test_ids_come_with_the_log_probabilities_of_vllm(tokenizer: Tokenizer) -> None:
    """The keys are ids, by which a part of a character gets its true bytes."""
    ids = tokenizer.encode("€")
    positions = [
        {str(number): {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"}, "7": {"logprob": -0.5, "rank": 1}}
        for number in ids
    ]
    told = vllm_entries(1, JsonResponse({"logprobs": json.dumps(positions)}))
    names = TokenNames(tokenizer.pieces)

    named = [names.named(entry) for entry in told]

    assert ids == [entry.id for entry in named]
    assert "€".encode() == b"".join(entry.raw or b"" for entry in named)
    assert {("\ufffd", 2)} == {(entry.token, entry.rank) for entry in named}
    assert [7] * len(ids) == [entry.top[0].id for entry in named]


def test_masked_tokens_of_vllm() -> None:
    """Guided decoding masks tokens: Python's JSON calls their log probability -Infinity, vLLM's server -9999."""
    position = {"3": {"logprob": 0.0, "rank": 1, "decoded_token": "{"}} | {
        str(number): {"logprob": -math.inf, "rank": number, "decoded_token": "-Infinity"} for number in (8, 9)
    }
    text = json.dumps([position])
    assert text.count(": -Infinity") == 2

    told = vllm_entries(3, JsonResponse({"logprobs": text}))

    (entry,) = chat_logprobs(told).content
    assert [("{", 0.0), ("-Infinity", IMPOSSIBLE), ("-Infinity", IMPOSSIBLE)] == [
        (top.token, top.logprob) for top in entry.top_logprobs
    ]
    rendered, _ = completion_logprobs(told, offset=0)
    assert [{"{": 0.0, "-Infinity": IMPOSSIBLE}] == rendered.top_logprobs
    assert [3, 8, 9] == [int(number) for number in (prompt_logprobs(told)[0] or {})]


@every_case("text", ["[{", '[{"3": {"logprob": "much"}}]', '[{"3": 1}]', "[[]]", "-Infinity"])
def test_log_probabilities_of_vllm_that_cannot_be_read(text: str) -> None:
    """Broken JSON, and JSON of another shape."""
    with pytest.raises(UpstreamError, match="cannot be read"):
        token_logprobs(1)(JsonResponse({"logprobs": text}), Delta())


def test_impossible_tokens_and_those_without_a_number() -> None:
    """JSON has neither: the one is told as vLLM does, the other is the model's failure."""
    entry = TokenLogprob("a", -math.inf, top=(Alternative("b", -math.inf),), id=3)
    for rendered in (chat_logprobs([entry]), completion_logprobs([entry], offset=0), prompt_logprobs([entry])):
        assert b"null" not in msgspec.json.encode(rendered).replace(b'"bytes":null', b"").replace(
            b'"refusal":null', b""
        ).replace(b'"rank":null', b"")
    for broken in (TokenLogprob("a", math.nan), TokenLogprob("a", -1.0, top=(Alternative("b", math.nan),))):
        with pytest.raises(UpstreamError, match="not numbers"):
            chat_logprobs([broken])


def test_a_name_that_is_another_tokens_is_kept(tokenizer: Tokenizer) -> None:
    """The tokenizer that was configured may not be the backend's: then what the backend says holds."""
    (number,) = tokenizer.encode(" one")
    names = TokenNames(tokenizer.pieces)

    same = names.named(TokenLogprob("one", -1.0, b"one", id=number))
    other = names.named(TokenLogprob("two", -1.0, b"two", id=number))

    assert (" one", b" one") == (same.token, same.raw)
    assert ("two", b"two") == (other.token, other.raw)


PIECES = st.lists(st.sampled_from(["a", "b", "ab", "ba", "", "é", "\xc3", "\xa9"]), max_size=14)


@settings(max_examples=examples(300))
@given(PIECES, st.lists(st.sampled_from(["ab", "b", "aba", "bb", "é", "éa"]), min_size=1, max_size=3), st.randoms())
def test_entries_end_where_the_text_does(pieces: list[str], stops: list[str], chance: random.Random) -> None:
    """Entries of tokens before the stop string come once and in order, however they arrive; others never do."""
    # A lone "\xc3" or "\xa9" stands for one byte of the two.
    raws = [piece.encode("latin-1") if piece in ("\xc3", "\xa9") else piece.encode() for piece in pieces]
    entries = [TokenLogprob("x", -1.0, raw, id=place) for place, raw in enumerate(raws)]
    whole = b"".join(raws)
    for include in (False, True):
        found = [(at + len(stop.encode()), at) for stop in stops if (at := whole.find(stop.encode())) >= 0]
        end, start = min(found) if found else (None, None)
        border = None if end is None else (end if include else start)
        held = LogprobsStage(stops, include=include)
        told: list[TokenLogprob] = []
        position = place = 0
        while place < len(entries):
            some = entries[place : place + chance.randint(1, 3)]
            told += passed(held, some)
            place += len(some)
            position += sum(len(entry.raw or b"") for entry in some)
            if end is not None and position >= end:
                break
        told += held.end()

        starts = [sum(map(len, raws[:number])) for number in range(len(raws))]
        expected = [n for n in range(len(raws)) if border is None or starts[n] < border]
        assert expected == [entry.id for entry in told]


def passed(held: LogprobsStage, entries: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Return what *held* passes on with *entries*."""
    delta = Delta(logprobs=entries)
    held.feed(delta)
    return delta.logprobs


def test_hidden_tokens_have_no_part_in_stop_strings() -> None:
    """A special token that is skipped stands between the two halves of one."""
    held = LogprobsStage(["bc"])
    entries = [
        TokenLogprob("ab", -1.0, b"ab"), TokenLogprob("<x>", -1.0, b"<x>", hidden=True), TokenLogprob("c", -1.0, b"c")
    ]  # fmt: skip

    assert ["ab"] == [entry.token for entry in [*passed(held, entries), *held.end()]]


@given(st.text("ab", max_size=12), st.integers(1, 4))
def test_what_is_held_is_what_the_text_stage_holds(text: str, size: int) -> None:
    """With a character per token, the entries told are those of the text shown."""
    stops, held = StopStrings(["aab"]), LogprobsStage(["aab"])
    shown = ""
    told: list[TokenLogprob] = []
    for place in range(0, len(text), size):
        piece = text[place : place + size]
        shown += stops.feed(piece)
        told += passed(held, [TokenLogprob(each, -1.0, each.encode()) for each in piece])
        assert len(told) <= len(shown)
        if stops.matched:
            break
    shown += stops.flush()
    told += held.end()

    assert shown == "".join(entry.token for entry in told)


@given(st.data())
def test_a_bias_reaches_just_its_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """What a backend makes of the texts is the bias that was asked for; tokens without a text are refused by number."""
    numbers = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=5, unique=True))
    biases = [(number, float(data.draw(st.integers(-100, 100)))) for number in numbers]
    said = {number: tokenizer.decode([number], skip_special_tokens=False) for number in numbers}
    unsayable = [number for number, text in said.items() if not text or tokenizer.encode(text) != [number]]
    if unsayable:
        with pytest.raises(UnsupportedParameter, match=f"token {unsayable[0]} "):
            bias_words(tokenizer, biases)
    else:
        words = bias_words(tokenizer, biases)
        assert {number: weight for number, weight in biases if weight} == as_the_backend_does(tokenizer, words)


def test_very_many_biases_are_refused(tokenizer: Tokenizer) -> None:
    """A text has to be found for each of them, on the event loop."""
    with pytest.raises(InvalidRequest, match="2000 tokens, and may hold 1024") as caught:
        bias_words(tokenizer, [(number, 1.0) for number in range(2000)])
    assert "logit_bias" == caught.value.param


def as_the_backend_does(tokenizer: Tokenizer, words: Sequence[tuple[str, float]]) -> Mapping[int, float]:
    """Return the bias of each token, as ``preprocessing`` adds them up."""
    bias: dict[int, float] = {}
    for word, weight in words:
        for number in tokenizer.encode(word, add_special_tokens=True):
            bias[number] = bias.get(number, 0.0) + weight
    return {number: weight for number, weight in bias.items() if weight}


def test_tokens_that_are_always_added_get_no_bias(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A tokenizer that begins every text with a token would bias that one too."""
    backend = tokenizer._backend.from_str(tokenizer._backend.to_str())
    begin, number = "<|im_start|>", tokenizer.token_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)])
    backend.save(str(tmp_path / "tokenizer.json"))
    adding = Tokenizer.load(str(tmp_path))
    ids = [adding.encode(word)[0] for word in (" one", " two")]

    words = bias_words(adding, [(ids[0], 2.0), (ids[1], -5.0)])

    assert ("", 3.0) == words[-1]
    assert {ids[0]: 2.0, ids[1]: -5.0} == as_the_backend_does(adding, words)


def test_a_bias_without_a_tokenizer_is_refused() -> None:
    """Nobody knows the texts of the ids."""
    with pytest.raises(UnsupportedParameter, match="--tokenizer"):
        bias_words(None, [(5, 1.0)])


def test_offsets_leave_out_what_is_hidden() -> None:
    """A token that shows in no text has no length there."""
    entries = [
        TokenLogprob("a", None, b"a"),
        TokenLogprob("<x>", -1.0, b"<x>", hidden=True),
        TokenLogprob("b", -1.0, b"b"),
    ]

    told, end = completion_logprobs(entries, offset=3)

    assert ([3, 4, 4], 5) == (told.text_offset, end)
    assert (None, None) == (told.token_logprobs[0], told.top_logprobs[0])


def test_offsets_of_the_parts_of_a_character() -> None:
    """All tokens of a character stand where it begins, also those that come with a later event."""
    parts = [TokenLogprob("\ufffd", -1.0, bytes((byte,))) for byte in "€".encode()]
    first, offset = completion_logprobs([TokenLogprob("a", -1.0, b"a"), *parts[:1]], offset=3)
    then, end = completion_logprobs([*parts[1:], TokenLogprob("b", -1.0, b"b")], offset=offset)

    assert ([3, 4, 4, 4, 5], 6) == ([*first.text_offset, *then.text_offset], end)


def test_prompt_log_probabilities_by_id() -> None:
    """The prompt's own token first, with its rank, and none for the first token."""
    entry = TokenLogprob("b", -2.0, id=5, rank=3, top=(Alternative("a", -1.0, id=4), Alternative("b", -2.0, id=5)))

    told = prompt_logprobs([TokenLogprob("<s>", None, id=1), entry])

    assert told[0] is None
    assert told[1] is not None
    assert [("5", -2.0, 3, "b"), ("4", -1.0, 1, "a")] == [
        (key, each.logprob, each.rank, each.decoded_token) for key, each in told[1].items()
    ]
