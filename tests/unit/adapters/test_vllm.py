"""What is peculiar to the vLLM backend: its files, its releases, its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from tests.unit.adapters.encoding import request_of
from triton_openai.adapters.vllm import Vllm, token_logprobs
from triton_openai.errors import InvalidRequest
from triton_openai.generation import Delta, Generation, Guide, Image, Lora, Sampling
from triton_openai.jobs import EmbeddingJob
from triton_openai.triton.tensors import JsonResponse, ModelConfig, TensorSpec

INPUTS = {
    name: TensorSpec(name=name, datatype=datatype, dims=(1,))
    for name, datatype in (("text_input", "BYTES"), ("sampling_parameters", "BYTES"), ("return_finish_reason", "BOOL"))
}


@every_case(
    "written, expected",
    [
        ({"model": "org/m"}, {"tokenizer": "org/m", "max_model_len": None, "loras": False, "max_loras": 1}),
        ({"model": "org/m", "revision": "v1"}, {"tokenizer": "org/m@v1"}),
        ({"model": "org/m", "tokenizer_revision": "v2", "revision": "v1"}, {"tokenizer": "org/m@v2"}),
        ({"model": "org/m", "tokenizer": "org/t", "revision": "v1"}, {"tokenizer": "org/t"}),
        ({"model": str(Path(__file__).parent), "revision": "v1"}, {"tokenizer": str(Path(__file__).parent)}),
        ({"max_model_len": 4096}, {"max_model_len": 4096, "tokenizer": None}),
        *(({"max_model_len": given}, {"max_model_len": None}) for given in (-1, "auto", True)),
        ({"enable_lora": "true", "max_loras": 3}, {"loras": True, "max_loras": 3}),
        ({"max_loras": "3"}, {"max_loras": None}),
        ({}, {"lacks": set()}),
        ({"runner": "pooling"}, {"lacks": {Generation}}),
        ({"task": "embed"}, {"lacks": {Generation}}),
        *(({name: "generate"}, {"lacks": {EmbeddingJob}}) for name in ("runner", "task")),
    ],
)
def test_what_model_json_says(written: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """The tokenizer at its revision, limits, LoRA adapters, and what the model is for."""
    adapter = Vllm(ModelConfig(name="m"), {})
    metadata = adapter.metadata_with(lambda model, file: json.dumps(written).encode() if file == "model.json" else None)

    assert expected == {name: getattr(metadata, name) for name in expected}


def test_the_release_without_guides() -> None:
    """24.12 has the tensors of 25.01; the server's version tells them apart."""
    for version, guides in (("2.53.0", False), ("2.54.0", True), ("", True)):
        config = ModelConfig(name="m", inputs=INPUTS, server_version=version)
        assert guides == bool(Vllm(config, {}).capabilities.guides)


def test_the_likeliest_token_alone() -> None:
    """vLLM takes no top_p of 0."""
    sampling = Sampling(max_tokens=1, top_p=0)
    request = request_of(
        Vllm(ModelConfig(name="m", inputs=INPUTS), {}), Generation(id="1", prompt="a", sampling=sampling)
    )
    (text,) = next(tensor.values for tensor in request.inputs if tensor.name == "sampling_parameters")

    assert {"max_tokens": 1, "top_k": 1} == json.loads(text)


def test_a_position_without_log_probabilities() -> None:
    """A position without log probabilities has no entry."""
    delta = Delta()
    token_logprobs(0)(JsonResponse({"logprobs": '[{}, {"5": {"logprob": -0.5}}]'}), delta)

    assert [5] == [entry.id for entry in delta.logprobs]


NEWEST = ModelConfig(
    name="m",
    inputs=INPUTS
    | {
        name: TensorSpec(name=name, datatype="BOOL", dims=(1,), optional=True)
        for name in ("embedding_request", "return_logprobs", "return_num_output_tokens")
    },
    outputs={
        name: TensorSpec(name=name, datatype="BYTES", dims=(1,))
        for name in ("text_output", "finish_reason", "logprobs", "num_output_tokens")
    },
)


def test_what_goes_as_json() -> None:
    """The guide is JSON within the JSON; log probabilities that are asked for are not fewer for the sake of ids."""
    generation = Generation(
        id="1",
        prompt="a",
        sampling=Sampling(max_tokens=1, logprobs=3),
        token_ids=True,
        guide=Guide(kind="choice", value='["a"]'),
        lora=Lora(name="french"),
    )
    request = request_of(Vllm(NEWEST, {}), generation)
    (text,) = next(tensor.values for tensor in request.inputs if tensor.name == "sampling_parameters")
    expected = {"max_tokens": 1, "logprobs": 3, "structured_outputs": '{"choice":["a"]}', "lora_name": "french"}

    assert expected == json.loads(text)
    with pytest.raises(InvalidRequest) as caught:
        request_of(Vllm(NEWEST, {}), Generation(id="1", prompt="a", sampling=Sampling(max_tokens=1, seed=2**63)))
    assert "seed" == caught.value.param


def test_log_probabilities() -> None:
    """Log probabilities are ordered by rank, may be minus infinity, and a part of a character has no bytes."""
    delta = Delta()
    text = (
        '[{"7": {"logprob": -Infinity, "rank": 9, "decoded_token": "\ufffd"},'
        ' "6": {"logprob": -2.0, "rank": 2, "decoded_token": "b"}, "5": {"logprob": -1.0, "rank": 1}}]'
    )
    token_logprobs(2)(JsonResponse({"logprobs": text}), delta)
    (entry,) = delta.logprobs

    assert (7, -math.inf, None, [5, 6]) == (entry.id, entry.logprob, entry.raw, [other.id for other in entry.top])


def test_embeddings_that_are_not_all_counted() -> None:
    """The sum of embeddings that are not all counted is unknown."""
    job = EmbeddingJob(id="1", inputs=["a", "b"])
    uncounted = JsonResponse({"text_output": "[1.0]"})
    counted = JsonResponse({"text_output": "[1.0]", "num_input_tokens": 2})
    for answers, tokens in (([counted, counted], 4), ([counted, uncounted], None)):
        assert tokens == Vllm(NEWEST, {}).decode(job, answers).prompt_tokens


OPTIONAL_OUTPUTS = ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs", "cumulative_logprob")
RELEASE = ModelConfig(
    name="m",
    decoupled=True,
    inputs={
        name: TensorSpec(name=name, datatype=datatype, dims=(1,), optional=name != "text_input")
        for name, datatype in (
            ("text_input", "BYTES"),
            ("sampling_parameters", "BYTES"),
            ("image", "BYTES"),
            *((f"return_{output}", "BOOL") for output in OPTIONAL_OUTPUTS),
            ("stream", "BOOL"),
            ("exclude_input_in_output", "BOOL"),
        )
    },
    outputs={name: TensorSpec(name=name, datatype="BYTES", dims=(-1,)) for name in ("text_output", *OPTIONAL_OUTPUTS)},
)
LONG = 100_000
PICTURE = Image(media_type="image/png", base64="", size=0, digest=0)


def asked(*, max_tokens: int = 16, **fields: Any) -> Generation:
    """Return a generation; fields of its sampling are passed as such."""
    own = {name: fields.pop(name) for name in list(fields) if name in Sampling.__struct_fields__}
    return Generation(id="1", prompt="a", sampling=Sampling(max_tokens=max_tokens, **own), **fields)


@every_case(
    "fields, whole",
    [
        ({}, True),
        ({"stream": True}, False),
        ({"stream": True, "over_grpc": True}, False),
        # A client that sets a limit between two tokens would wait for the whole answer.
        ({"times_tokens": True, "over_grpc": True}, False),
        # Without gRPC a cancellation does not reach the engine: only what ends soon.
        ({"max_tokens": 1024}, True),
        ({"max_tokens": 1025}, False),
        ({"max_tokens": LONG, "over_grpc": True}, True),
        ({"stop": ("x",), "min_tokens": 3, "over_grpc": True}, True),
        ({"guide": Guide(kind="json"), "cumulative_logprob": True}, True),
        # The event loop reads log probabilities of a whole answer at once.
        ({"max_tokens": 195, "logprobs": 20}, True),
        ({"max_tokens": 196, "logprobs": 20, "over_grpc": True}, False),
        ({"max_tokens": 4096, "token_ids": True, "over_grpc": True}, True),
        ({"max_tokens": 4097, "token_ids": True, "over_grpc": True}, False),
        ({"max_tokens": 4097, "stop_token_ids": (5,), "over_grpc": True}, False),
    ],
)
def test_which_answers_come_whole(fields: Mapping[str, Any], whole: bool) -> None:
    """An answer comes in one response where that costs nobody anything, and over gRPC, where it can be cancelled."""
    adapter = Vllm(RELEASE, {})
    generation = asked(**fields)
    request = request_of(adapter, generation)
    (stream,) = next(tensor.values for tensor in request.inputs if tensor.name == "stream")

    assert whole == adapter.returns_whole(generation)
    assert (not whole, whole) == (stream, request.prefers_grpc)


@every_case("lacking", ["stream", "return_finish_reason", "return_num_output_tokens"])
def test_releases_whose_answers_do_not_come_whole(lacking: str) -> None:
    """Where the backend does not say how long an answer is and why it ended, the number of its responses does."""
    inputs = {name: spec for name, spec in RELEASE.inputs.items() if name != lacking}
    adapter = Vllm(msgspec.structs.replace(RELEASE, inputs=inputs), {})

    assert not adapter.returns_whole(asked())
    assert Vllm(msgspec.structs.replace(RELEASE, decoupled=False), {}).returns_whole(asked(stream=True))


COUNTS = {"num_input_tokens", "num_output_tokens"}


@every_case(
    "fields, outputs",
    [
        ({"stream": True}, COUNTS),
        ({"stream": True, "prompt_tokens": 7}, {"num_output_tokens"}),
        ({"stream": True, "prompt_ids": (1, 2)}, {"num_output_tokens"}),
        # The engine alone knows how many tokens an image has.
        ({"stream": True, "prompt_tokens": 7, "images": (PICTURE,)}, COUNTS),
        ({"stream": True, "prompt_tokens": 7, "logprobs": 1}, {"logprobs"}),
        ({"stream": True, "prompt_tokens": 7, "token_ids": True}, {"logprobs"}),
        ({"stream": True, "cumulative_logprob": True}, {*COUNTS, "cumulative_logprob"}),
        ({}, COUNTS),
    ],
)
def test_outputs_that_are_known_here_are_not_asked_for(fields: Mapping[str, Any], outputs: Set[str]) -> None:
    """Each output is a tensor with every token, so a stream has no count that is known without it."""
    request = request_of(Vllm(RELEASE, {}), asked(**fields))
    flags = {tensor.name for tensor in request.inputs if tensor.name.startswith("return_")}

    assert {"text_output", "finish_reason", *outputs} == set(request.outputs)
    assert {f"return_{name}" for name in {"finish_reason", *outputs}} == flags


def test_counts_that_no_output_has() -> None:
    """The prompt's count is reported once, and log probabilities count the tokens: they say what a step has."""
    decoder = Vllm(RELEASE, {}).decoder(asked(stream=True, prompt_tokens=7, logprobs=0))
    text = '[{"5": {"logprob": -0.5}}, {"6": {"logprob": -0.5}}]'
    steps = [
        decoder.feed(JsonResponse({"text_output": "a", "finish_reason": "None", "logprobs": text})),
        decoder.feed(JsonResponse({"text_output": "", "finish_reason": "stop", "logprobs": "[]"})),
    ]

    assert [(7, 2), (None, 0)] == [(step.prompt_tokens, step.tokens) for step in steps]


def test_flags_that_a_config_requires() -> None:
    """A flag that the model's own config does not call optional is always sent."""
    name = "return_num_input_tokens"
    required = msgspec.structs.replace(RELEASE.inputs[name], optional=False)
    config = msgspec.structs.replace(RELEASE, inputs={**RELEASE.inputs, name: required})
    request = request_of(Vllm(config, {}), asked(stream=True, prompt_tokens=7))

    assert Vllm.matches(config) is not None
    assert [False] == [value for tensor in request.inputs if tensor.name == name for value in tensor.values]
