"""What is peculiar to the vLLM backend: its files, its releases, its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cases import every_case
from tests.unit.adapters.encoding import request_of
from triton_openai.adapters.vllm import Vllm, token_logprobs
from triton_openai.errors import InvalidRequest
from triton_openai.generation import Delta, Generation, Guide, Lora, Sampling
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
