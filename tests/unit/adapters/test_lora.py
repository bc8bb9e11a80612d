"""LoRA adapters as tensors: which models take them, and in what form."""

from __future__ import annotations

import msgspec
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from tests.cases import every_case
from tests.unit.adapters.encoding import request_of
from tests.unit.adapters.test_encode import TEXT, generation, specs
from triton_openai import offload
from triton_openai.adapters.trtllm import Trtllm
from triton_openai.adapters.trtllm_ensemble import TrtllmEnsemble
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Lora, LoraFormat, Matrix, Vocabulary
from triton_openai.triton.grpc import encode_request
from triton_openai.triton.http import infer_body
from triton_openai.triton.tensors import ModelConfig

INPUTS = ("lora_task_id? UINT64 1", "lora_weights? FP16 -1 -1", "lora_config? INT32 -1 3")
WEIGHTS, CONFIG = Matrix("FP16", (2, 4), bytes(range(16))), Matrix("INT32", (2, 3), bytes(24))
FULL = Lora(name="french", number=2**63 - 1, weights=WEIGHTS, config=CONFIG)


def ensemble(*inputs: str, batch: int = 4) -> TrtllmEnsemble:
    """Return the adapter of a model with the text inputs and *inputs*."""
    config = msgspec.structs.replace(TEXT, inputs={**TEXT.inputs, **specs(*inputs)}, max_batch_size=batch)
    return TrtllmEnsemble(config, {})


def engine(*inputs: str, batch: int = 4) -> Trtllm:
    """Return the adapter of an engine with *inputs*."""
    required = specs("input_ids INT32 -1", "input_lengths INT32 1", "request_output_len INT32 1", *inputs)
    outputs = specs("output_ids INT32 -1 -1")
    return Trtllm(ModelConfig(name="e", max_batch_size=batch, decoupled=True, inputs=required, outputs=outputs), {})


@every_case("make", [ensemble, engine])
@every_case(
    "inputs, expected",
    [
        (INPUTS, LoraFormat("FP16", 3)),
        ((INPUTS[0], "lora_weights? BF16 -1 -1", "lora_config? INT32 -1 4"), LoraFormat("BF16", 4)),
        ((INPUTS[0], "lora_weights? FP32 -1 -1", "lora_config? INT32 -1 -1"), LoraFormat("FP32", 3)),
        ((INPUTS[0], "lora_weights? INT8 -1 -1", INPUTS[2]), None),
        (INPUTS[1:], None),
        (INPUTS[:2], None),
        ((), None),
    ],
)
def test_which_models_take_adapters(make, inputs, expected):
    """Those that declare all three inputs, with dtypes that weights can have."""
    capabilities = make(*inputs).capabilities

    assert expected == capabilities.lora


@every_case("make", [ensemble, engine])
@every_case("batch, first", [(0, ()), (4, (1,))])
def test_weights_go_as_they_are(make, batch, first):
    """The bytes of weights reach both transports, in the shape of the model's rank; JSON cannot say them."""
    asked = msgspec.structs.replace(generation(), prompt_ids=(1,), vocabulary=Vocabulary(size=9), lora=FULL)
    request = request_of(make(*INPUTS, batch=batch), asked)

    tensors = {tensor.name: tensor for tensor in request.inputs}
    assert [2**63 - 1] == list(tensors["lora_task_id"].values)
    assert ("FP16", (*first, 2, 4)) == (tensors["lora_weights"].datatype, tensors["lora_weights"].shape)
    assert ("INT32", (*first, 2, 3)) == (tensors["lora_config"].datatype, tensors["lora_config"].shape)
    assert not request.json_expressible
    assert WEIGHTS.data in ModelInferRequest.FromString(encode_request(request)).raw_input_contents
    assert WEIGHTS.data in infer_body(request)[0]


def test_a_number_alone():
    """A number alone needs nothing that JSON lacks; without it there is nothing to send."""
    adapter = ensemble(*INPUTS)
    asked = msgspec.structs.replace(generation(), lora=Lora(name="french", number=7))
    request = request_of(adapter, asked)

    assert {"lora_task_id"} == {tensor.name for tensor in request.inputs if tensor.name.startswith("lora_")}
    assert request.json_expressible
    with pytest.raises(ConfigurationError):
        request_of(adapter, msgspec.structs.replace(asked, lora=Lora(name="french")))


@every_case("size", [0, 1, 127, 128, 2**19, 2**20, 3 * 2**20 + 1])
def test_only_large_requests_are_encoded_in_a_thread(size):
    """A message has its weights whole, and is made in a thread if they have a megabyte."""
    weights = Matrix("FP16", (1, size // 2), bytes(number % 251 for number in range(size)))
    asked = msgspec.structs.replace(generation(), lora=msgspec.structs.replace(FULL, weights=weights))
    request = request_of(ensemble(*INPUTS), asked)

    assert weights.data in ModelInferRequest.FromString(encode_request(request)).raw_input_contents
    assert (request.cost > offload.INLINE) == (size >= 2**20)
