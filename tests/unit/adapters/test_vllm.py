"""What is peculiar to the vLLM backend: its files, its releases, its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.cases import every_case
from triton_openai.adapters.vllm import Vllm, VllmLogprobs
from triton_openai.generation import Delta, Generation, Sampling
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
        ({}, {"generates": True, "embeds": True}),
        ({"runner": "pooling"}, {"generates": False, "embeds": True}),
        ({"task": "embed"}, {"generates": False, "embeds": True}),
        *(({name: "generate"}, {"generates": True, "embeds": False}) for name in ("runner", "task")),
    ],
)
def test_what_model_json_says(written: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """The tokenizer at its revision, limits, LoRA adapters, and what the model is for."""
    adapter = Vllm(ModelConfig(name="m"), {})
    hints = adapter.hints_with(lambda model, file: json.dumps(written).encode() if file == "model.json" else None)

    assert expected == {name: getattr(hints, name) for name in expected}


def test_the_release_without_guides() -> None:
    """24.12 has the tensors of 25.01; the server's version tells them apart."""
    for version, guides in (("2.53.0", False), ("2.54.0", True), ("", True)):
        config = ModelConfig(name="m", inputs=INPUTS, server_version=version)
        assert guides == bool(Vllm(config, {}).capabilities.guides)


def test_the_likeliest_token_alone() -> None:
    """vLLM takes no top_p of 0."""
    sampling = Sampling(max_tokens=1, top_p=0)
    request = Vllm(ModelConfig(name="m", inputs=INPUTS), {}).encode(Generation(id="1", prompt="a", sampling=sampling))
    (text,) = next(tensor.values for tensor in request.inputs if tensor.name == "sampling_parameters")

    assert {"max_tokens": 1, "top_k": 1} == json.loads(text)


def test_a_position_without_log_probabilities() -> None:
    """It has no entry."""
    delta = Delta()
    VllmLogprobs(0)(JsonResponse({"logprobs": '[{}, {"5": {"logprob": -0.5}}]'}), delta)

    assert [5] == [entry.id for entry in delta.logprobs]
