"""What single adapters do with a model's config, and how adapters are found."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from tests.unit.adapters.encoding import request_of
from triton_openai.adapters._common import registry
from triton_openai.adapters._common.base import Adapter, ModelMetadata, Rule
from triton_openai.adapters._common.trtllm_family import adds_special_tokens
from triton_openai.adapters.embeddings import Embeddings
from triton_openai.adapters.trtllm_bls import TrtllmBls
from triton_openai.adapters.trtllm_ensemble import TrtllmEnsemble
from triton_openai.adapters.vllm import Vllm
from triton_openai.errors import ConfigurationError, InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import Delta, Generation, Sampling
from triton_openai.jobs import EmbeddingJob
from triton_openai.triton.binary_response import BinaryResponse, Layout
from triton_openai.triton.tensors import EnsembleStep, InferRequest, JsonResponse, ModelConfig, TensorSpec


def specs(*texts: str) -> dict[str, TensorSpec]:
    """Return tensors written as ``name[?] TYPE dims…``."""
    found = {}
    for text in texts:
        name, datatype, *dims = text.split()
        found[name.rstrip("?")] = TensorSpec(
            name=name.rstrip("?"), datatype=datatype, dims=tuple(map(int, dims)), optional=name.endswith("?")
        )
    return found


def generation(prompt: str = "Hi", **sampling: Any) -> Generation:
    """Return a generation."""
    return Generation(id="id-1", prompt=prompt, sampling=Sampling(**{"max_tokens": 4, **sampling}))


def values(request: InferRequest) -> dict[str, list[Any]]:
    """Return the inputs of a request by name."""
    return {tensor.name: list(tensor.values) for tensor in request.inputs}


TEXT = ModelConfig(
    name="m",
    platform="ensemble",
    max_batch_size=4,
    decoupled=True,
    inputs=specs(
        "text_input BYTES 1", "max_tokens INT32 1", "stream? BOOL 1", "temperature? FP32 1", "top_p? FP32 1",
        "top_k? INT32 1", "seed? UINT64 1", "bad_words? BYTES -1", "stop_words? BYTES -1",
    ),
    outputs=specs("text_output BYTES -1"),
    steps=(
        EnsembleStep(model="tokenize", input_map={}, output_map={}),
        EnsembleStep(model="engine", input_map={}, output_map={}),
    ),
)  # fmt: skip
TOKENIZE = ModelConfig(name="tokenize", inputs=specs("QUERY BYTES 1"), parameters={"tokenizer_dir": "/models/t"})
ENGINE = ModelConfig(
    name="engine",
    max_batch_size=4,
    decoupled=True,
    inputs=specs("input_ids INT32 -1", "input_lengths INT32 1", "request_output_len INT32 1", "stop? BOOL 1"),
)
VLLM = ModelConfig(
    name="v",
    backend="vllm",
    decoupled=True,
    inputs=specs("text_input BYTES 1", "sampling_parameters? BYTES 1", "stream? BOOL 1"),
    outputs=specs("text_output BYTES -1"),
)


SAMPLED = {"temperature": [1.0], "top_p": [1.0], "top_k": [0]}


@every_case(
    "sampling, expected",
    [
        ({}, SAMPLED),
        ({"temperature": 0.5}, {**SAMPLED, "temperature": [0.5]}),
        ({"temperature": 0.5, "top_k": 3}, {**SAMPLED, "temperature": [0.5], "top_k": [3]}),
        ({"temperature": 0.5, "top_p": 0.3}, {**SAMPLED, "temperature": [0.5], "top_p": [0.3]}),
        ({"temperature": 0}, {"top_k": [1]}),
        ({"temperature": 0, "top_k": 3, "top_p": 0.3}, {"top_k": [1]}),
        ({"top_p": 0}, {"top_k": [1]}),
        ({"top_k": -1}, SAMPLED),
        ({"top_p": 0.3}, {**SAMPLED, "top_p": [0.3]}),
    ],
)
def test_randomness_as_the_executor_understands_it(sampling, expected):
    """What is left out has OpenAI's defaults, without which the executor decodes greedily; 0 becomes a top_k of 1."""
    found = values(request_of(TrtllmEnsemble(TEXT, {}), generation(**sampling)))

    assert {"text_input": ["Hi"], "max_tokens": [4], "stream": [True], **expected} == found


@every_case("mode, samples", [
    ("", True), ("${decoding_mode}", True), ("auto", True), ("top_k_top_p", True), ("top_p", True),
    ("top_k", False), ("medusa", False), ("lookahead", False),
])  # fmt: skip
def test_an_engine_that_decodes_in_a_mode_of_its_own(mode, samples):
    """An engine with a decoding mode of its own gets what the request asks for: with a top_p, top_k answers nothing."""
    engine = msgspec.structs.replace(ENGINE, parameters={"decoding_mode": mode})
    adapter = TrtllmEnsemble(TEXT, {"engine": engine})
    names = {"temperature", "top_p", "top_k"}

    assert samples == (adapter.default_sampling == "temperature 1, top_p 1")
    assert (names if samples else set()) == names & values(request_of(adapter, generation())).keys()
    assert [0.5] == values(request_of(adapter, generation(temperature=0.5)))["temperature"]


def test_a_top_k_that_is_off_fits_an_unsigned_input():
    """The inputs of 0.5 are unsigned; -1 is sent as 0."""
    inputs = {**TEXT.inputs, **specs("top_k? UINT32 1")}
    adapter = TrtllmEnsemble(msgspec.structs.replace(TEXT, inputs=inputs), {})

    assert [0] == values(request_of(adapter, generation(top_k=-1)))["top_k"]


def test_a_temperature_without_a_top_k_to_express_it():
    """A temperature of 0 is left out without a top_k to express it: told nothing, the executor decodes greedily."""
    inputs = {name: spec for name, spec in TEXT.inputs.items() if name != "top_k"}
    found = values(
        request_of(TrtllmEnsemble(msgspec.structs.replace(TEXT, inputs=inputs), {}), generation(temperature=0))
    )

    assert {"text_input", "max_tokens", "stream"} == set(found), "also no top_p"


def test_required_word_lists_are_filled():
    """Where a release requires the word lists they are there, and empty words have no effect."""
    inputs = {**TEXT.inputs, **specs("bad_words BYTES -1", "stop_words BYTES -1")}
    adapter = TrtllmEnsemble(msgspec.structs.replace(TEXT, inputs=inputs), {})

    assert [""] == values(request_of(adapter, generation()))["bad_words"]
    assert [""] == values(request_of(adapter, generation()))["stop_words"]
    assert ["a", "b"] == values(request_of(adapter, generation(stop=("a", "b"))))["stop_words"]


@every_case("name, value", [("seed", -1), ("seed", 2**64), ("max_tokens", 2**31), ("top_k", 2**31), ("top_p", 1e39)])
def test_values_that_an_input_cannot_hold(name, value):
    """Values that an input cannot hold are refused by name."""
    with pytest.raises(InvalidRequest) as caught:
        request_of(TrtllmEnsemble(TEXT, {}), generation(**{name: value}))

    assert name == caught.value.param


@every_case(
    "excluded, echoes",
    # The engine reads no other words: "yes" is none to it.
    [("true", False), ("false", True), ("", True), ("${hole}", True), ("1", False), ("True", False), ("yes", True)],
)
def test_who_repeats_the_prompt(excluded, echoes):
    """An old ensemble that does not stream repeats the prompt, unless its engine was told not to."""
    config = msgspec.structs.replace(TEXT, decoupled=False)
    engine = msgspec.structs.replace(ENGINE, parameters={"exclude_input_in_output": excluded})
    adapter = TrtllmEnsemble(config, {"engine": engine})

    assert echoes == adapter.capabilities.echoes
    delta = adapter.decoder(generation("Hi")).feed(JsonResponse({"text_output": "Hi there" if echoes else " there"}))
    assert Delta(" there") == delta
    stream = msgspec.structs.replace(generation("Hi"), stream=True)
    delta = TrtllmEnsemble(TEXT, {"engine": engine}).decoder(stream).feed(JsonResponse({"text_output": "Hi there"}))
    assert Delta("Hi there") == delta, "a stream never does"


@every_case(
    "change, expected",
    [
        ({}, True),
        ({"stream": True}, False),
        # Those of tokens come with their text, which only a stream says.
        ({"sampling": Sampling(max_tokens=4, logprobs=0)}, False),
    ],
)
def test_an_answer_is_asked_for_as_the_client_wants_it(change, expected):
    """
    A whole answer is decoded whole; a stream loses characters. A model that does not stream is never asked for one.
    """
    inputs = {**TEXT.inputs, **specs("exclude_input_in_output? BOOL 1")}
    wanted = msgspec.structs.replace(generation(), **change)
    bls = msgspec.structs.replace(TEXT, platform="", backend="python", inputs=inputs)
    for adapter in (TrtllmEnsemble(msgspec.structs.replace(TEXT, inputs=inputs), {}), TrtllmBls(bls, {})):
        assert expected == adapter.returns_whole(wanted)
        if wanted.sampling.logprobs is None:
            assert [not expected] == values(request_of(adapter, wanted))["stream"]
    plain = TrtllmEnsemble(msgspec.structs.replace(TEXT, inputs=inputs, decoupled=False), {})
    assert plain.returns_whole(wanted)


def test_an_echo_that_cannot_be_taken_out_is_not_asked_for():
    """Without a tokenizer nobody knows how an old release writes the prompt again; a stream does not repeat it."""
    engine = msgspec.structs.replace(ENGINE, outputs=specs("output_ids INT32 -1", "sequence_length INT32 1"))
    known = msgspec.structs.replace(generation(), prompt_echo="Hi")
    old = msgspec.structs.replace(TEXT, platform="", backend="python", parameters={"accumulate_tokens": "true"})

    assert not TrtllmEnsemble(TEXT, {"engine": engine}).returns_whole(generation())
    assert TrtllmEnsemble(TEXT, {"engine": engine}).returns_whole(known)
    assert not TrtllmEnsemble(TEXT, {"engine": ENGINE}).returns_whole(known), "0.5 fills answers up with special tokens"
    assert not TrtllmBls(old, {"tensorrt_llm": engine}).returns_whole(known), "its streams have every character"


@every_case(
    "flag, output",
    [
        ("return_perf_metrics", "kv_cache_reused_blocks"),
        ("return_kv_cache_reuse_stats", "kv_cache_reused_blocks"),
    ],
)
def test_tokens_from_the_cache(flag, output):
    """Tokens from the cache are asked for where the size of a block is known, and only the last response has them."""
    inputs, outputs = {**TEXT.inputs, **specs(f"{flag}? BOOL 1")}, {**TEXT.outputs, **specs(f"{output} INT32 1")}
    adapter = TrtllmEnsemble(msgspec.structs.replace(TEXT, inputs=inputs, outputs=outputs), {})
    known = msgspec.structs.replace(generation(), kv_cache_block_size=16)
    decoder = adapter.decoder(known)

    assert [True] == values(request_of(adapter, known))[flag]
    assert output in request_of(adapter, known).outputs
    assert flag not in values(request_of(adapter, generation()))
    assert None is decoder.feed(JsonResponse({"text_output": "a"})).cached_tokens
    assert 48 == decoder.feed(JsonResponse({output: 3})).cached_tokens
    assert 48 == decoder.feed(JsonResponse({output: "3"})).cached_tokens, "the LLM API's model sends text"
    with pytest.raises(UpstreamError, match="is invalid"):
        decoder.feed(JsonResponse({output: "many"}))
    assert None is adapter.decoder(generation()).feed(JsonResponse({output: 3})).cached_tokens


@every_case(
    "model, parameters, expected",
    [
        (TrtllmEnsemble, {}, True),
        (TrtllmBls, {"accumulate_tokens": "false"}, True),
        (TrtllmBls, {"accumulate_tokens": "${accumulate_tokens}"}, True),
        (TrtllmBls, {"accumulate_tokens": "yes"}, False),
        # Not the model of the releases: nobody knows how it decodes.
        (TrtllmBls, {}, False),
    ],
)
def test_whose_streams_lose_characters(model, parameters, expected):
    """Those that decode each token alone."""
    config = msgspec.structs.replace(TEXT, parameters=parameters)

    assert expected == model(config, {}).splits_characters
    assert not model(msgspec.structs.replace(config, decoupled=False), {}).splits_characters


def test_an_engine_that_is_not_known_may_repeat_the_prompt():
    """Without the engine's config the default of the releases counts."""
    assert TrtllmEnsemble(msgspec.structs.replace(TEXT, decoupled=False), {}).capabilities.echoes


@every_case(
    "parameters, expected",
    [
        ({"tokenizer_dir": "/models/t"}, ModelMetadata(tokenizer_dir="/models/t")),
        (
            {"tokenizer_dir": "/models/t", "add_special_tokens": "False"},
            ModelMetadata(tokenizer_dir="/models/t", adds_bos=False),
        ),
        (
            {"tokenizer_dir": "${tokenizer_dir}", "add_special_tokens": "y"},
            ModelMetadata(tokenizer_dir=None, adds_bos=True),
        ),
        ({}, ModelMetadata(tokenizer_dir=None)),
    ],
)
def test_hints_come_from_the_tokenizing_step(parameters, expected):
    """Whatever the steps are called, the one that takes a query has the tokenizer; unfilled templates are nothing."""
    step = msgspec.structs.replace(TOKENIZE, parameters=parameters)

    assert expected == TrtllmEnsemble(TEXT, {"tokenize": step}).metadata
    bls = TrtllmBls(msgspec.structs.replace(TEXT, platform="", backend="python"), {"preprocessing": step})
    assert expected == bls.metadata
    assert ModelMetadata() == TrtllmEnsemble(TEXT, {}).metadata


@every_case(
    "inputs, words",
    [
        # 0.5 and 0.6 have no such parameter and always add them.
        (("QUERY BYTES -1", "REQUEST_OUTPUT_LEN UINT32 -1"), {None: True, "false": True, "x": True}),
        # 0.7 to 0.10.
        (
            ("QUERY BYTES -1", "REQUEST_OUTPUT_LEN INT32 -1"),
            {None: False, "": False, "${add_special_tokens}": False, "x": False, "n": False, "Y": True, "True": True},
        ),
        # Since 0.11.
        (
            ("QUERY BYTES 1", "DECODER_QUERY? BYTES 1", "REQUEST_OUTPUT_LEN INT32 1"),
            {None: True, "": True, "${add_special_tokens}": True, "x": True, "N": False, "False": False, "y": True},
        ),
    ],
)
def test_whether_preprocessing_adds_special_tokens(inputs, words):
    """Each release reads the flag in a way of its own."""
    for word, expected in words.items():
        parameters = {} if word is None else {"add_special_tokens": word}
        step = ModelConfig(name="preprocessing", inputs=specs(*inputs), parameters=parameters)
        assert (word, expected) == (word, adds_special_tokens(step))


def test_what_a_release_declares_and_does_not_hand_on():
    """What a release declares and does not hand on is refused, but for values that have their effect without it."""
    old = msgspec.structs.replace(TEXT, platform="", backend="python")
    new = msgspec.structs.replace(old, inputs={**old.inputs, **specs("prompt_table_extra_id? UINT64 1")})
    wired = {"request_output_len": "_LEN", "input_ids": "_IDS"}
    first = msgspec.structs.replace(TEXT, steps=(EnsembleStep(model="engine", input_map=wired, output_map={}),))
    later = EnsembleStep(model="engine", input_map={**wired, "bad_words_list": "_WORDS"}, output_map={})

    def row(adapter, name):
        (found,) = [each for each in adapter.parameters if each.name == name]
        return found

    temperature = row(TrtllmBls(old, {}), "temperature")
    assert (Rule.REFUSED, (0, 1)) == (temperature.rule, temperature.neutral)
    assert [1] == values(request_of(TrtllmBls(old, {}), generation(temperature=0)))["top_k"]
    assert row(TrtllmBls(new, {}), "temperature").rule is Rule.MAPPED
    assert row(TrtllmEnsemble(TEXT, {}), "temperature").rule is Rule.MAPPED
    assert row(TrtllmEnsemble(first, {}), "bad_words").rule is Rule.REFUSED
    assert row(TrtllmEnsemble(msgspec.structs.replace(TEXT, steps=(later,)), {}), "bad_words").rule is Rule.MAPPED


@every_case(
    "accumulate, decoupled, expected",
    [
        ("true", True, " b"),
        ("True", True, " b"),
        ("1", True, " b"),
        ("false", True, "a b"),
        ("", True, "a b"),
        ("true", False, "a b"),
    ],
)
def test_when_a_bls_accumulates(accumulate, decoupled, expected):
    """``accumulate_tokens`` makes the text cumulative, and only on a decoupled model."""
    parameters = {"accumulate_tokens": accumulate}
    inputs = {**TEXT.inputs, **specs("exclude_input_in_output? BOOL 1")}
    config = msgspec.structs.replace(
        TEXT, platform="", backend="python", parameters=parameters, decoupled=decoupled, inputs=inputs
    )
    decoder = TrtllmBls(config, {}).decoder(msgspec.structs.replace(generation(), stream=True))
    decoder.feed(JsonResponse({"text_output": "a"}))

    assert Delta(expected) == decoder.feed(JsonResponse({"text_output": "a b"}))


def test_the_stop_request_goes_to_the_step_that_takes_it():
    """Whatever the engine's step is called, it gets the stop request under the generation's id."""
    order = TrtllmEnsemble(TEXT, {"tokenize": TOKENIZE, "engine": ENGINE}).cancel(generation())

    assert order is not None
    assert ("engine", "id-1", True) == (order.model, order.id, order.stream)
    assert {(1, 1)} == {tensor.shape for tensor in order.inputs}


def test_vllm_sends_only_what_was_asked_for():
    """Keys without a value are left out, an explicit null would fail the request; the tensor itself is always there."""
    adapter = Vllm(VLLM, {})
    found = values(request_of(adapter, generation(temperature=0, seed=0, stop=("é",), top_k=-1)))

    assert {"max_tokens": 4, "temperature": 0, "seed": 0, "stop": ["é"], "top_k": -1} == json.loads(
        found["sampling_parameters"][0]
    )
    assert ["Hi"] == found["text_input"]
    assert [True] == found["stream"]


def test_old_vllm_repeats_prompt_and_text():
    """Before the prompt could be excluded every response held it and all the text so far."""
    decoder = Vllm(VLLM, {}).decoder(generation("Hi"))
    texts = ["Hi", "Hi there", "Hi there you"]

    assert ["", " there", " you"] == [
        decoder.feed(JsonResponse({"text_output": text})).text for text in texts
    ]  # fmt: skip


@every_case(
    "change, sampling, ids, logprobs",
    [
        ({"token_ids": True}, {}, [5, 6], 0),
        ({}, {"stop_token_ids": (6,)}, [5, 6], 0),
        ({"token_ids": True}, {"logprobs": 0}, [5, 6], 2),
        ({}, {"logprobs": 0}, [], 2),
        ({}, {}, [], 0),
    ],
)
def test_token_ids_of_vllm(change, sampling, ids, logprobs):
    """Token ids of vLLM are the keys of the log probabilities, which are asked for and read where either is wanted."""
    inputs = {**VLLM.inputs, **specs("return_logprobs? BOOL 1")}
    outputs = {**VLLM.outputs, **specs("logprobs BYTES -1")}
    adapter = Vllm(msgspec.structs.replace(VLLM, inputs=inputs, outputs=outputs), {})
    asked = msgspec.structs.replace(generation(**sampling), **change)
    response = {"text_output": "ab", "logprobs": '[{"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}}]'}

    request = request_of(adapter, asked)
    delta = adapter.decoder(asked).feed(JsonResponse(response))

    assert bool(ids or logprobs) == ("logprobs" in request.outputs) == ("return_logprobs" in values(request))
    assert (ids, logprobs) == (list(delta.token_ids), len(delta.logprobs))


def test_vllm_inside_an_ensemble():
    """An ensemble with vLLM's tensors is claimed by its tensors, whatever its backend."""
    wrapped = msgspec.structs.replace(VLLM, backend="", platform="ensemble")

    claim = registry.Registry().claim(wrapped)
    assert claim is not None
    assert Vllm is claim.adapter


@every_case(
    "inputs, outputs, batch, expected",
    [
        # What people deploy from ONNX, PyTorch and Python.
        (["text BYTES 1"], ["embedding FP32 64"], 8, "text → embedding"),
        (["TEXT BYTES -1"], ["sentence_embedding FP32 768"], 8, "TEXT → sentence_embedding"),
        (["text BYTES -1 1"], ["vectors FP32 -1 64"], 0, "text → vectors"),
        (["text BYTES -1"], ["vectors FP16 -1 64"], 0, "text → vectors"),
        (["text BYTES 1"], ["vector FP32 64"], 0, "text → vector"),
        (["text BYTES 1", "pooling? BYTES 1"], ["embedding FP32 64"], 8, "text → embedding"),
        (["text BYTES 1"], ["token_count INT32 1", "embedding FP32 64"], 8, "text → embedding"),
        (["text BYTES 1"], ["other FP32 3", "embedding FP32 64"], 8, "text → embedding"),
        # What cannot be one, or cannot be told apart.
        (["text BYTES 1"], ["a FP32 64", "b FP32 64"], 8, None),
        (["text BYTES 1", "more BYTES 1"], ["embedding FP32 64"], 8, None),
        (["ids INT64 -1"], ["embedding FP32 64"], 8, None),
        (["text BYTES 1"], ["label BYTES 1"], 8, None),
        (["text BYTES 1"], ["tokens FP32 -1 64"], 8, None),
        (["text BYTES 2"], ["embedding FP32 64"], 8, None),
        ([], ["embedding FP32 64"], 8, None),
        (["text_input BYTES 1"], ["text_output BYTES -1", "embedding FP32 64"], 0, None),
    ],
)  # fmt: skip
def test_which_models_make_embeddings(inputs, outputs, batch, expected):
    """One required text in, one vector per text out; everything else is left alone."""
    config = ModelConfig(name="e", max_batch_size=batch, inputs=specs(*inputs), outputs=specs(*outputs))
    reason = Embeddings.matches(config)

    if expected is None:
        assert reason is None
        return
    text, _, vector = expected.partition(" → ")
    assert f"one required BYTES input ({text}) and a vector per text out ({vector})" == reason


@every_case(
    "inputs, outputs, batch, shapes",
    [
        ("text BYTES 1", "embedding FP32 2", 2, [(2, 1), (1, 1)]),
        ("text BYTES -1", "embedding FP32 2", 8, [(3, 1)]),
        ("text BYTES -1", "embedding FP32 -1 2", 0, [(3,)]),
        ("text BYTES -1 1", "embedding FP32 -1 2", 0, [(3, 1)]),
        ("text BYTES 1", "embedding FP32 2", 0, [(1,), (1,), (1,)]),
        ("text BYTES 1", "embedding FP32 1 2", 0, [(1,), (1,), (1,)]),
    ],
)
def test_texts_are_sent_in_batches(inputs, outputs, batch, shapes):
    """Texts are sent in batches as large as the model takes, in order, and their vectors come in the same order."""
    config = ModelConfig(name="e", max_batch_size=batch, inputs=specs(inputs), outputs=specs(outputs))
    adapter = Embeddings(config, {})
    job = EmbeddingJob(id="j", inputs=["a", "b", "c"])
    requests = adapter.encode(job)

    assert shapes == [request.inputs[0].shape for request in requests]
    assert ["a", "b", "c"] == [text for request in requests for text in request.inputs[0].values]
    assert len(requests) == len({request.id for request in requests})
    answers = []
    for number, request in enumerate(requests):
        rows = len(request.inputs[0].values)
        data = array("f", [number + 0.5] * 2 * rows).tobytes()
        answers.append(BinaryResponse(Layout((("embedding", "FP32", (rows, 2)),)), (data,)))
    vectors = adapter.decode(job, answers).vectors
    expected = [number + 0.5 for number, request in enumerate(requests) for _ in request.inputs[0].values]
    assert expected == [array("f", vector)[0] for vector in vectors]


def test_too_few_vectors_are_an_error():
    """A model that answers for fewer texts than it was given is not believed."""
    config = ModelConfig(name="e", max_batch_size=8, inputs=specs("text BYTES 1"), outputs=specs("embedding FP32 2"))
    answer = BinaryResponse(Layout((("embedding", "FP32", (1, 2)),)), (b"\x00" * 8,))

    with pytest.raises(UpstreamError, match="more or fewer embeddings"):
        Embeddings(config, {}).decode(EmbeddingJob(id="j", inputs=["a", "b"]), [answer])


def test_what_a_plain_embedding_model_refuses():
    """Token ids mean nothing to it, and its vectors have the length that they have."""
    config = ModelConfig(name="e", max_batch_size=8, inputs=specs("text BYTES 1"), outputs=specs("embedding FP32 2"))
    adapter = Embeddings(config, {})

    with pytest.raises(InvalidRequest, match="token ids"):
        adapter.encode(EmbeddingJob(id="j", inputs=[[1]]))
    with pytest.raises(UnsupportedParameter, match="dimensions"):
        adapter.encode(EmbeddingJob(id="j", inputs=["a"], dimensions=3))
    assert adapter.encode(EmbeddingJob(id="j", inputs=["a"], dimensions=2))


@every_case("text", ["", "no json", "[1, ", '{"a": 1}', '["a"]', "[1e999]", "[NaN]"])
def test_an_embedding_that_cannot_be_read(text):
    """vLLM's vectors come as JSON; what is none is the upstream's fault."""
    with pytest.raises(UpstreamError, match="cannot be read"):
        Vllm(VLLM, {}).decode(EmbeddingJob(id="j", inputs=["a"]), [JsonResponse({"text_output": text})])


@every_case("ids", [[-1], [2**31], [2**70], [0, -5]])
def test_numbers_that_are_no_token_ids(ids):
    """Numbers that are no token ids are refused before vLLM trips over them."""
    inputs = {**VLLM.inputs, **specs("embedding_request? BYTES 1")}
    adapter = Vllm(msgspec.structs.replace(VLLM, inputs=inputs), {})

    with pytest.raises(InvalidRequest) as caught:
        adapter.encode(EmbeddingJob(id="j", inputs=[[1], ids]))
    assert "input" == caught.value.param


def test_the_base_refuses_everything():
    """An adapter that overrides nothing does nothing, politely."""

    class Nothing(Adapter):
        name = "nothing"

    adapter = Nothing(TEXT, {})
    with pytest.raises(InvalidRequest, match="does not generate text"):
        request_of(adapter, generation())
    with pytest.raises(InvalidRequest, match="does not make embeddings"):
        adapter.encode(EmbeddingJob(id="j", inputs=["a"]))
    assert None is adapter.cancel(generation())
    assert (ModelMetadata(), ()) == (adapter.metadata, adapter.parameters)


def test_every_built_in_adapter_is_found_by_its_name():
    """The table's names are the classes' own."""
    adapters = registry.Registry().adapters
    assert list(registry.BUILT_IN) == [adapters[name].name for name in registry.BUILT_IN]


def test_a_name_that_nobody_has():
    """The error lists the names that there are."""
    with pytest.raises(ConfigurationError) as caught:
        registry.Registry().adapter_named("trtlm")

    assert all(
        name in caught.value.message for name in ("'trtlm'", "trtllm-ensemble", "trtllm-bls", "vllm", "embeddings")
    )
