"""Classifiers: which models are taken for one, what they are sent, and what is made of their answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.cases import every_case
from tests.unit.adapters.test_cross_encoder import IDS, config
from triton_openai.adapters._common.registry import Registry
from triton_openai.adapters.classifier import Classifier
from triton_openai.errors import ConfigurationError, ContextLengthExceeded, UpstreamError
from triton_openai.generation import TensorMapping
from triton_openai.jobs import ClassificationJob
from triton_openai.triton.tensors import EnsembleStep, JsonResponse, ModelConfig

REGISTRY = Registry()
TEXT = ["text BYTES 1"]


def labelled(model: ModelConfig) -> ModelConfig:
    """Return *model* with labels for its first output."""
    name, spec = next(iter(model.outputs.items()))
    outputs = {**model.outputs, name: msgspec.structs.replace(spec, label_filename="labels.txt")}
    return msgspec.structs.replace(model, outputs=outputs)


def job(*inputs: Any, pad_id: int | None = None) -> ClassificationJob:
    """Return a job."""
    return ClassificationJob(id="classify-1", inputs=inputs, pad_id=pad_id)


@every_case(
    "model, reason, capabilities",
    [
        (config(TEXT, ["logits FP32 3"]), "BYTES input (text) and logits out (logits [3])", {"logits"}),
        (config(["text BYTES -1 1"], ["LOGITS FP16 -1 -1"], 0), "and logits out (LOGITS)", {"logits"}),
        (config(TEXT, ["output_label BYTES 1", "output_probability FP32 2"]), "and probabilities out", set()),
        (config(TEXT, ["probs FP32 1"]), "and probabilities out (probs [1])", set()),
        (config(["text BYTES 1"], ["logits FP32 3"], 0), "and logits out (logits [3])", {"logits"}),
        (config(IDS, ["logits FP32 2"]), "token ids (input_ids, attention_mask) and logits", {"logits", "tokens"}),
        (config(["input_ids INT32 -1 -1", "attention_mask INT32 -1 -1"], ["logits FP32 -1 -1"], 0),
         "token ids (input_ids, attention_mask) and logits out (logits)", {"logits", "tokens"}),
        (labelled(config(IDS, ["logits FP32 1"])), "[1], with labels in", {"logits", "tokens", "labels"}),
        (labelled(config(TEXT, ["logits FP16 3"])), "with labels in labels.txt", {"logits"}),
    ],
)  # fmt: skip
def test_claimed(model: ModelConfig, reason: str, capabilities: set[str]) -> None:
    """Models are claimed by a text or token ids, and an output whose name says what it has."""
    claim = REGISTRY.claim(model)

    assert claim is not None
    assert claim.adapter is Classifier
    assert reason in claim.reason
    found = claim.adapter(model, {})
    assert (ClassificationJob,) == found.jobs
    assert capabilities == {name for name in ("logits", "labels", "tokens") if getattr(found.capabilities, name)}


@every_case(
    "inputs, outputs, batch",
    [
        (TEXT, ["embedding FP32 3"], 8),
        (TEXT, ["scores FP32 3"], 8),
        (TEXT, ["logits INT32 3"], 8),
        (TEXT, ["logits FP32 -1 3"], 8),
        (TEXT, ["logits FP32 -1"], 0),
        (TEXT, ["text_output BYTES 1", "probabilities FP32 -1"], 8),
        (["text BYTES 2"], ["logits FP32 3"], 8),
        (IDS, ["logits FP32 1"], 8),
        (IDS, ["logits FP32 -1 32000"], 8),
        (["input_ids INT64 -1"], ["logits FP32 3"], 8),
        (["x FP32 -1"], ["probabilities FP32 3"], 8),
    ],
)
def test_not_claimed(inputs: list[str], outputs: list[str], batch: int) -> None:
    """Embeddings, cross-encoders and models that generate are left alone."""
    assert Classifier.matches(config(inputs, outputs, batch)) is None


def test_described() -> None:
    """The settings name the tensors, and say what the output has; labels alone do not."""
    model = config(["T BYTES 1", "LANG BYTES 1"], ["OUT FP32 3"])
    inputs = {"text": "T"}
    adapter = Classifier(
        model, {}, TensorMapping(inputs=inputs, constants={"LANG": "en"}, outputs={"probabilities": "OUT"})
    )
    (request,) = adapter.encode(job("a", "b"))
    assert not adapter.capabilities.logits
    assert [("T", (2, 1), ("a", "b")), ("LANG", (2, 1), ["en", "en"])] == [
        (tensor.name, tensor.shape, tensor.values) for tensor in request.inputs
    ]
    ids = config(["a INT32 -1", "b INT32 -1"], ["OUT FP32 3"])
    by_ids = Classifier(
        ids, {}, TensorMapping(inputs={"input_ids": "a", "attention_mask": "b"}, outputs={"logits": "OUT"})
    )
    (request,) = by_ids.encode(job([5, 6], [7], pad_id=9))
    assert [("a", [5, 6, 7, 9]), ("b", [1, 1, 1, 0])] == [(tensor.name, tensor.values) for tensor in request.inputs]
    wrong: list[tuple[TensorMapping | None, str]] = [
        (TensorMapping(inputs=inputs, outputs={"logits": "OUT"}), "requires the input 'LANG'"),
        (TensorMapping(inputs=inputs, outputs={"scores": "OUT"}), "'outputs.scores', which is unknown"),
        (
            TensorMapping(inputs=inputs, outputs={"logits": "OUT", "probabilities": "OUT"}),
            "'outputs.logits', which is unk",
        ),
        (
            TensorMapping(inputs={"text": "T", "input_ids": "T"}, outputs={"logits": "OUT"}),
            "'inputs.text', which is unkn",
        ),
        (None, "describe its tensors"),
    ]
    for given, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            Classifier(model, {}, given)
    unnamed = labelled(config(TEXT, ["OUT FP32 3"]))
    assert REGISTRY.claim(unnamed) is not None
    with pytest.raises(ConfigurationError, match="describe its tensors"):
        Classifier(unnamed, {})


@every_case(
    "model, given, pad_id, shapes",
    [
        (config(TEXT, ["logits FP32 3"], 2), ["a", "b", "c"], None, [(2, 1), (1, 1)]),
        (config(["text BYTES -1"], ["logits FP32 -1 3"], 0), ["a"] * 65, None, [(64,), (1,)]),
        (config(["text BYTES 1"], ["logits FP32 3"], 0), ["a", "b"], None, [(1,), (1,)]),
        (labelled(config(["text BYTES -1"], ["logits FP32 -1 3"], 0)), ["a", "b"], None, [(1,), (1,)]),
        (config(IDS, ["logits FP32 3"]), [[1], [2, 3]], 0, [(2, 2)]),
        (config(IDS, ["logits FP32 3"]), [[1], [2, 3]], None, [(1, 1), (1, 2)]),
    ],
)
def test_batches(model: ModelConfig, given: list[Any], pad_id: int | None, shapes: list[tuple[int, ...]]) -> None:
    """A request holds as many as the model takes, and one where the answer could not be told apart or padded."""
    requests = Classifier(model, {}).encode(job(*given, pad_id=pad_id))

    assert shapes == [request.inputs[0].shape for request in requests]


def test_fixed_length() -> None:
    """What does not fit is refused."""
    adapter = Classifier(config(["input_ids INT64 2", "attention_mask INT64 2"], ["logits FP32 3"]), {})
    with pytest.raises(ContextLengthExceeded, match="has 3 tokens"):
        adapter.encode(job([1, 2, 3]))


def test_labels() -> None:
    """Triton's classes come in the order of their values, with the labels that the file has; an ensemble's too."""
    model = labelled(config(TEXT, ["logits FP32 -1"], 4))
    adapter = Classifier(model, {})
    (request,) = adapter.encode(job("a", "b"))
    texts = ["2.5:1:b:c", "-1.000000:0:a", "inf:2", "3:0:a", "2:2", "1:1:b:c"]
    result = adapter.decode(job("a", "b"), [JsonResponse({"logits": texts})])
    assert request.classification >= 1000
    assert [[-1.0, 2.5, float("inf")], [3.0, 1.0, 2.0]] == result.values
    assert {0: "a", 1: "b:c"} == result.labels
    step = EnsembleStep(model="m", input_map={"text": "text"}, output_map={"logits": "probs"})
    ensemble = msgspec.structs.replace(config(TEXT, ["probs FP32 3"]), steps=(step,))
    assert [False, True] == [Classifier(ensemble, known).capabilities.labels for known in ({}, {"m": model})]
    for bad in (["x:0"], ["1"], ["1:9"], ["1:x"], []):
        with pytest.raises(UpstreamError):
            adapter.decode(job("a"), [JsonResponse({"logits": bad})])
    with pytest.raises(UpstreamError, match="no multiple"):
        Classifier(config(TEXT, ["logits FP32 3"]), {}).decode(job("a", "b"), [JsonResponse({"logits": [1, 2, 3]})])
