"""What the adapters for token ids and for the LLM API send, and what they read, release by release."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from tests.standins import repository
from tests.unit.adapters.encoding import request_of
from triton_openai.adapters._common.base import Adapter
from triton_openai.adapters._common.registry import Registry, helper_role
from triton_openai.adapters.trtllm import dense_bias, word_list
from triton_openai.adapters.trtllm_ensemble import TrtllmEnsemble
from triton_openai.answer.limits import TokenLimit
from triton_openai.answer.prepare import GenerationSpec, generation_of
from triton_openai.config.tree import ModelSettings
from triton_openai.demo.configs import contracts
from triton_openai.errors import ConfigurationError, InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import Delta, Generation, Guide, Sampling, Vocabulary
from triton_openai.models.loading import LazyPrompter
from triton_openai.models.served import ServedModel
from triton_openai.triton.tensors import EnsembleStep, InferRequest, JsonResponse, ModelConfig, TensorSpec


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


_TENSOR = re.compile(r"(\w+)(\??) (\w+) \[([-\d,]*)\].*")
_CONTRACTS = {**contracts(), **repository.contracts()}
# As tensorrtllm_backend v0.5.0 ships them; the newer releases are the demo's contracts.
_P05 = """
input_ids INT32 [-1]; input_lengths INT32 [1] r; request_output_len UINT32 [1]; end_id? UINT32 [1] r;
pad_id? UINT32 [1] r; beam_width? UINT32 [1] r; temperature? FP32 [1] r; runtime_top_k? UINT32 [1] r;
runtime_top_p? FP32 [1] r; len_penalty? FP32 [1] r; repetition_penalty? FP32 [1] r; min_length? UINT32 [1] r;
presence_penalty? FP32 [1] r; random_seed? UINT64 [1] r; stop? BOOL [1]; streaming? BOOL [1]
"""
_GPT = """
input_ids INT32 [-1]; input_lengths INT32 [1] r; request_output_len UINT32 [-1]; end_id UINT32 [1] r;
pad_id UINT32 [1] r; beam_width? UINT32 [1] r; temperature? FP32 [1] r; runtime_top_k? UINT32 [1] r;
runtime_top_p? FP32 [1] r; min_length? UINT32 [1] r; random_seed? UINT64 [1] r; output_log_probs? BOOL [1] r
"""
# As tensorrtllm_backend v0.19.0 ships the model in front of disaggregated engines.
_DISAGGREGATED = """
input_ids INT32 [-1] g; input_lengths INT32 [1]; request_output_len INT32 [1]; num_return_sequences? INT32 [1];
end_id? INT32 [1]; pad_id? INT32 [1]; bad_words_list? INT32 [2,-1] g; embedding_bias? FP32 [-1] g;
temperature? FP32 [1]; runtime_top_k? INT32 [1]; runtime_top_p? FP32 [1]; min_length? INT32 [1];
random_seed? UINT64 [1]; return_log_probs? BOOL [1]; exclude_input_in_output? BOOL [1]; stop? BOOL [1];
streaming? BOOL [1]; guided_decoding_guide_type? STRING [1] g; guided_decoding_guide? STRING [1] g
"""
# As 0.19's llmapi declares what later releases renamed.
_LLMAPI_P19 = [
    text.replace("best_of", "beam_width")
    for text in _CONTRACTS["tensorrt_llm_llmapi_r1_0"].inputs
    if "perf" not in text and not text.startswith("stop")
]
PROFILES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "engine 0.5": (_split(_P05), ["output_ids INT32 [-1,-1]"]),
    "gpt 0.5": (_split(_GPT), ["output_ids INT32 [-1,-1]", "log_probs FP32 [-1,-1]"]),
    "disaggregated": (_split(_DISAGGREGATED), ["output_ids INT32 [-1,-1]", "sequence_length INT32 [-1]"]),
    **{
        name: (contract.inputs, contract.outputs)
        for name, contract in _CONTRACTS.items()
        if name in ("tensorrt_llm", "tensorrt_llm_legacy", "tensorrt_llm_llmapi", "tensorrt_llm_llmapi_r1_0")
    },
    "llmapi 0.19": (_LLMAPI_P19, _CONTRACTS["tensorrt_llm_llmapi_r1_0"].outputs[:4]),
}
ENGINES = tuple(name for name in PROFILES if "llmapi" not in name)
LLMAPIS = tuple(name for name in PROFILES if "llmapi" in name)


def _spec(text: str) -> TensorSpec:
    match = _TENSOR.fullmatch(text)
    assert match is not None
    dims = tuple(int(dim) for dim in match[4].split(",") if dim)
    datatype = "BYTES" if match[3] == "STRING" else match[3]
    return TensorSpec(name=match[1], datatype=datatype, dims=dims, optional=bool(match[2]))


def config(profile: str, *, name: str = "engine", decoupled: bool = True, **parameters: str) -> ModelConfig:
    """Return the config of a model with the tensors of *profile*."""
    inputs, outputs = PROFILES[profile]
    return ModelConfig(
        name=name,
        backend="python",
        max_batch_size=0 if "llmapi" in profile else 8,
        decoupled=decoupled,
        inputs={spec.name: spec for spec in map(_spec, inputs)},
        outputs={spec.name: spec for spec in map(_spec, outputs)},
        parameters=parameters,
    )


def adapter(profile: str, *, decoupled: bool = True, **parameters: str) -> Adapter:
    """Return the adapter that claims such a model."""
    model = config(profile, decoupled=decoupled, **parameters)
    claim = Registry().claim(model)
    assert claim is not None
    return claim.adapter(model, {model.name: model})


def generation(guide: Guide | None = None, bad: Sequence[Sequence[int]] = (), **sampling: Any) -> Generation:
    """Return a prompt of three ids of a vocabulary of ten."""
    return Generation(
        id="one",
        prompt="a b c",
        prompt_ids=(4, 5, 6),
        vocabulary=Vocabulary(size=10, end_ids=(2, 3), pad_id=0),
        bad_word_ids=tuple(map(tuple, bad)),
        sampling=Sampling(**{"max_tokens": 7, **sampling}),
        guide=guide,
    )


def sent(request: InferRequest) -> dict[str, tuple[Any, ...]]:
    """Return type, shape and values of every input."""
    return {tensor.name: (tensor.datatype, tensor.shape, *tensor.values) for tensor in request.inputs}


@every_case("profile", PROFILES)
@every_case("decoupled", [True, False])
def test_every_release_gets_what_it_requires_and_nothing_else(profile: str, decoupled: bool) -> None:
    """With the types that it declares; the values fit them."""
    model = config(profile, decoupled=decoupled)
    found = adapter(profile, decoupled=decoupled)

    request = request_of(found, generation(temperature=0.5, seed=3))

    names = {tensor.name for tensor in request.inputs}
    assert names <= model.inputs.keys()
    assert names >= {spec.name for spec in model.inputs.values() if not spec.optional}
    assert all(tensor.raw() and tensor.datatype == model.inputs[tensor.name].datatype for tensor in request.inputs)
    assert set(request.outputs) <= model.outputs.keys()
    assert decoupled is request.stream
    # The LLM API's model streams since it takes LoRA adapters.
    assert found.capabilities.streaming is (decoupled and (profile not in LLMAPIS or "lora_id" in model.inputs))
    assert ("trtllm-llmapi" if profile in LLMAPIS else "trtllm") == found.name


@every_case("profile", ["tensorrt_llm", "tensorrt_llm_legacy"])
def test_both_main_outputs_are_asked_for(profile: str) -> None:
    """The C++ flavour refuses a choice without one of them."""
    assert ("output_ids", "sequence_length") == request_of(adapter(profile), generation()).outputs


def test_a_request_to_the_engine() -> None:
    """Ids, their number, where to end; the prompt is never repeated."""
    assert {
        "input_ids": ("INT32", (1, 3), 4, 5, 6),
        "input_lengths": ("INT32", (1, 1), 3),
        "request_output_len": ("INT32", (1, 1), 7),
        "end_id": ("INT32", (1, 1), 2),
        "pad_id": ("INT32", (1, 1), 0),
        "streaming": ("BOOL", (1, 1), True),
        "exclude_input_in_output": ("BOOL", (1, 1), True),
        "temperature": ("FP32", (1, 1), 1.0),
        "runtime_top_p": ("FP32", (1, 1), 1.0),
        "runtime_top_k": ("INT32", (1, 1), 0),
    } == sent(request_of(adapter("tensorrt_llm"), generation()))


@every_case("profile, value", [("tensorrt_llm", -1), ("engine 0.5", 2**32 - 1)])
def test_ignoring_the_end(profile: str, value: int) -> None:
    """An id that is never generated, also where ids are unsigned."""
    assert value == sent(request_of(adapter(profile), generation(ignore_eos=True)))["end_id"][-1]


def test_bad_words_have_their_own_encoding() -> None:
    """One row of ids, one of the ends of the words; more than JSON can say."""
    request = request_of(adapter("tensorrt_llm"), generation(bad=[[7], [8, 9]]))

    assert ("INT32", (1, 2, 3), 7, 8, 9, 1, 3, -1) == sent(request)["bad_words_list"]
    assert not request.json_expressible


def test_the_longer_row_of_a_word_list_wins() -> None:
    """Single ids have as many ends as ids."""
    tensor = word_list(config("tensorrt_llm"), "bad_words_list", [[7], [8]])

    assert ((1, 2, 2), [7, 8, 1, 2]) == (tensor.shape, tensor.values)


def test_a_logit_bias_is_dense() -> None:
    """One value for every id of the vocabulary."""
    bias = sent(request_of(adapter("tensorrt_llm"), generation(logit_bias=((1, 2.0), (9, -3.0)))))["embedding_bias"]

    assert ("FP32", (1, 10), 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -3.0) == bias


def test_a_bias_of_an_unknown_token_is_refused() -> None:
    """A bias of an unknown token is refused, because it does not fit."""
    with pytest.raises(InvalidRequest, match="the token 10"):
        dense_bias([(10, 1.0)], 10)


@every_case(
    "sampling, expected",
    [
        ({}, {"runtime_top_k": 1}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_k": 5}, {"runtime_top_k": 5}),
    ],
)
def test_log_probabilities_need_a_sampling_input(sampling: dict[str, Any], expected: dict[str, Any]) -> None:
    """An engine that is not told how to sample by default decodes greedily without any, which is what is sent then."""
    request = request_of(adapter("tensorrt_llm", decoding_mode="medusa"), generation(logprobs=0, **sampling))

    inputs = sent(request)
    assert ("BOOL", (1, 1), True) == inputs["return_log_probs"]
    assert "output_log_probs" in request.outputs
    random = ("temperature", "runtime_top_k", "runtime_top_p")
    assert expected == {name: inputs[name][-1] for name in random if name in inputs}


def test_alternatives_come_as_logits() -> None:
    """Alternatives come as logits of the new tokens, in place of the chosen ones' log probabilities; never as JSON."""
    request = request_of(adapter("tensorrt_llm"), generation(logprobs=2))

    inputs = sent(request)
    assert ("BOOL", (1, 1), True) == inputs["return_generation_logits"]
    assert "return_log_probs" not in inputs
    assert ("output_ids", "sequence_length", "generation_logits") == request.outputs
    assert (False, "logprobs") == (request.json_expressible, request.needed_for)


def test_alternatives_are_refused_without_logits() -> None:
    """Such an engine tells of the chosen tokens only."""
    found = adapter("disaggregated")

    assert 0 == found.capabilities.top_logprobs
    with pytest.raises(UnsupportedParameter):
        request_of(found, generation(logprobs=2))


def test_whole_answers_have_room_for_so_many_logits() -> None:
    """A model that does not stream sends them all at once."""
    big = msgspec.structs.replace(generation(logprobs=2, max_tokens=3000), vocabulary=Vocabulary(size=128_000))

    request_of(adapter("tensorrt_llm"), big)
    with pytest.raises(InvalidRequest, match="2097 tokens") as caught:
        request_of(adapter("tensorrt_llm", decoupled=False), big)
    assert "max_tokens" == caught.value.param


def test_the_prompt_is_scored_by_itself() -> None:
    """One token, no stream, without what the answer was asked for; the prompt's logits with it."""
    request = adapter("tensorrt_llm").encode_prompt_logits(generation(logprobs=2, temperature=0.5, stop=("x",)))

    inputs = sent(request)
    assert "one-prompt" == request.id
    assert not request.json_expressible
    assert "context_logits" in request.outputs
    assert {"request_output_len": 1, "streaming": False, "return_context_logits": True, "runtime_top_k": 1}.items() <= {
        name: values[-1] for name, values in inputs.items()
    }.items()
    assert not {"temperature", "return_generation_logits", "return_log_probs"} & inputs.keys()


def test_a_prompt_too_long_to_be_scored_is_refused() -> None:
    """A prompt is refused where its scores would not fit into one response."""
    long = msgspec.structs.replace(generation(), prompt_ids=(4,) * 2098, vocabulary=Vocabulary(size=128_000))

    with pytest.raises(InvalidRequest, match="2097 tokens"):
        adapter("tensorrt_llm").encode_prompt_logits(long)


def test_guides_need_a_backend_for_them() -> None:
    """The engine says whether it has one; a disaggregated model's engine is the one that generates."""
    assert not adapter("tensorrt_llm").capabilities.guides
    ready = adapter("tensorrt_llm", guided_decoding_backend="xgrammar")
    inputs = sent(request_of(ready, generation(Guide(kind="choice", value='["a.b","c"]'))))
    assert ("BYTES", (1, 1), "regex") == inputs["guided_decoding_guide_type"]
    assert ("BYTES", (1, 1), "(a\\.b|c)") == inputs["guided_decoding_guide"]

    engine = config("tensorrt_llm", name="generation", guided_decoding_backend="xgrammar")
    front = config("tensorrt_llm", name="front", context_model_name="context", generation_model_name="generation")
    claim = Registry().claim(front)
    assert claim is not None
    assert "json_schema" in claim.adapter(front, {"front": front, "generation": engine}).capabilities.guides
    assert claim.reason.startswith("disaggregated")


def test_the_stop_request_is_for_answers_that_come_at_once() -> None:
    """A stream that is closed is seen; a call that is dropped is not."""
    assert adapter("tensorrt_llm").cancel(generation()) is None
    order = adapter("tensorrt_llm", decoupled=False).cancel(generation())
    assert order is not None
    assert ("one", True) == (order.id, sent(order)["stop"][-1])


def fed(profile: str, *responses: dict[str, Any], decoupled: bool = True, **sampling: Any) -> list[Delta]:
    """Return what a decoder makes of *responses*."""
    decoder = adapter(profile, decoupled=decoupled).decoder(generation(**sampling))
    return [decoder.feed(JsonResponse(response)) for response in responses]


def test_a_stream_brings_new_ids() -> None:
    """A stream brings as many new ids as the length says, often none in the last response; JSON has no lists of one."""
    deltas = fed(
        "tensorrt_llm",
        {"output_ids": 7, "sequence_length": 1},
        {"output_ids": [8, 9, -1], "sequence_length": 2},
        {"output_ids": [], "sequence_length": 0},
    )

    assert [([7], 1, 3), ([8, 9], 2, None), ([], 0, None)] == [
        (list(delta.token_ids), delta.tokens, delta.prompt_tokens) for delta in deltas
    ]


@every_case(
    "profile, response",
    [
        # Without lengths the ids are filled up behind the end.
        ("engine 0.5", {"output_ids": [4, 5, 6, 7, 8, 2, 2]}),
        ("engine 0.5", {"output_ids": [4, 5, 6, 7, 8, -1, -1]}),
        ("tensorrt_llm_legacy", {"output_ids": [4, 5, 6, 7, 8], "sequence_length": 5}),
        ("tensorrt_llm_legacy", {"output_ids": [7, 8], "sequence_length": 2}),
    ],
)
def test_a_repeated_prompt_is_taken_off(profile: str, response: dict[str, Any]) -> None:
    """
    A prompt that releases repeat where they do not stream is taken off, unless a config parameter has excluded it.
    """
    (delta,) = fed(profile, response, decoupled=False)

    assert ([7, 8], 2) == (list(delta.token_ids), delta.tokens)


@every_case(
    "lists",
    [[[-0.1], [-0.1, -0.2, -0.3]], [[-0.1], [-0.2, -0.3]], [[-0.1, -1.0], [-0.1, -0.2, -0.3, -1.0]]],
)
def test_log_probabilities_of_new_ids(lists: list[list[float]]) -> None:
    """The new ids have their log probabilities, whether the list repeats from its start or holds the new ones alone."""
    deltas = fed(
        "tensorrt_llm",
        {"output_ids": [7], "sequence_length": 1, "output_log_probs": lists[0]},
        {"output_ids": [8, 9], "sequence_length": 2, "output_log_probs": lists[1]},
        logprobs=0,
    )

    assert [[-0.1], [-0.2, -0.3]] == [[entry.logprob for entry in delta.logprobs] for delta in deltas]


def test_log_probabilities_that_do_not_fit_are_an_error() -> None:
    """Log probabilities that do not fit are an error: they would be another token's."""
    with pytest.raises(UpstreamError):
        fed("tensorrt_llm", {"output_ids": [7, 8], "sequence_length": 2, "output_log_probs": [-0.1]}, logprobs=0)


def test_engines_are_helpers_of_those_who_use_them() -> None:
    """An ensemble's step, a model that a parameter names, the name that a BLS falls back to; else none."""
    engine = config("tensorrt_llm", name="tensorrt_llm")
    step = EnsembleStep(model="tensorrt_llm", input_map={}, output_map={})
    ensemble = ModelConfig(name="ensemble", platform="ensemble", steps=(step,))
    texts = {name: _spec(f"{name} STRING [1]") for name in ("text_input", "max_tokens")}
    bls = ModelConfig(name="bls", inputs=texts)
    other = ModelConfig(name="bls", inputs=texts, parameters={"tensorrt_llm_model_name": "another"})
    front = ModelConfig(name="front", parameters={"context_model_name": "tensorrt_llm"})

    roles = [
        helper_role(engine, {"tensorrt_llm": engine, **({user.name: user} if user else {})})
        for user in (ensemble, bls, front, other, None)
    ]

    assert [True, True, True, False, False] == [role is not None for role in roles]


def _ensemble(*steps: EnsembleStep) -> ModelConfig:
    contract = _CONTRACTS["ensemble"]
    return ModelConfig(
        name="ensemble",
        platform="ensemble",
        max_batch_size=8,
        decoupled=True,
        inputs={spec.name: spec for spec in map(_spec, contract.inputs)},
        outputs={spec.name: spec for spec in map(_spec, contract.outputs)},
        steps=steps,
    )


def test_which_text_models_an_engine_can_answer_for() -> None:
    """
    An engine answers for models that only tokenize: not for encoders of images, a decoder's prompt, or steps of
    their own.
    """
    step = EnsembleStep(model="engine", input_map={}, output_map={})
    filters = EnsembleStep(model="filter", input_map={}, output_map={})
    encoders = EnsembleStep(model="encoders", input_map={}, output_map={"OUT_PROMPT_EMBEDDING_TABLE": "table"})
    plain = config("tensorrt_llm")
    two_sided = config("tensorrt_llm", encoder_model_path="/engines/encoder")

    found = [
        TrtllmEnsemble(_ensemble(*steps), {"engine": engine}).token_level
        for steps, engine in (
            ((step,), plain),
            ((step, encoders), plain),
            ((step,), two_sided),
            ((step, filters), plain),
        )
    ]

    assert [plain, None, None, None] == found
    assert Registry().claim(two_sided) is None


async def test_without_a_tokenizer_the_flag_is_named() -> None:
    """Token ids cannot be made without one, which is configured under Triton's name of the model."""
    model = ServedModel(
        name="alias",
        triton_model="engine",
        adapter=adapter("tensorrt_llm"),
        reason="",
        settings=ModelSettings(),
        lazy_prompter=LazyPrompter(ModelSettings(), None),
    )

    with pytest.raises(ConfigurationError, match="--tokenizer engine="):
        await generation_of(model, None, "Hello", GenerationSpec(template=generation(), limit=TokenLimit(tokens=7)))


@every_case("reason", ["timeout", "cancelled"])
def test_llmapi_generations_that_were_broken_off(reason: str) -> None:
    """LLM API generations that were broken off are errors: neither a stop nor a length."""
    decoder = adapter("tensorrt_llm_llmapi").decoder(generation())

    with pytest.raises(UpstreamError):
        decoder.feed(JsonResponse({"text_output": "a", "finish_reason": reason}))


def test_llmapi_text_is_cumulative() -> None:
    """A character that is incomplete is waited for; the last response has the reason."""
    decoder = adapter("tensorrt_llm_llmapi").decoder(generation())
    responses = [("a", "None"), ("a\ufffd", "None"), ("aé", "None"), ("aé", "stop")]

    deltas = [decoder.feed(JsonResponse({"text_output": text, "finish_reason": reason})) for text, reason in responses]

    assert ["a", "", "é", ""] == [delta.text for delta in deltas]
    assert "stop" == deltas[-1].finish_reason
