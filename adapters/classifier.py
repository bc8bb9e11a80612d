"""
Classifiers, as people deploy them from ONNX, PyTorch or Python: a text in, a number for each class out.

There is no standard for their tensor names. The text is the one required input of BYTES, or comes as the token ids of
an exported Hugging Face model, which are made here. The output shows by its name whether it has logits or
probabilities, which nothing else tells; where it does not, the operator says it in the model's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_openai.adapters._common.base import Adapter, Capabilities
from triton_openai.adapters._common.interface import (
    FLOATS,
    IDS,
    MASK,
    SEGMENTS,
    Kind,
    batch_size,
    check_named,
    constant_tensors,
    constants,
    id_batch,
    id_inputs,
    id_tensors,
    row_dims,
    text_input,
    text_tensor,
)
from triton_openai.errors import ConfigurationError, UpstreamError
from triton_openai.generation import ClassificationJob, ClassificationResult, Interface, TokenPair
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor, TensorSpec

_TEXT, _LOGITS, _PROBABILITIES = "text", "logits", "probabilities"
# In lower case: what models call their output.
_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("logits", "logit", "class_logits", "output_logits"), _LOGITS),
    **dict.fromkeys(
        ("probabilities", "probability", "probs", "prob", "class_probabilities", "class_probs", "output_probability"),
        _PROBABILITIES,
    ),
}
# What the settings can name, by what they have to; two kinds of output exclude one another.
_KINDS: Mapping[str, Mapping[str, Kind]] = {
    _TEXT: {_TEXT: "text"},
    IDS: {IDS: "integer", MASK: "integer", SEGMENTS: "integer"},
    _LOGITS: {_LOGITS: "number", _PROBABILITIES: "number"},
    _PROBABILITIES: {_PROBABILITIES: "number"},
}
# More classes than any model has: Triton gives those that there are.
_ALL_CLASSES = 1 << 20


def _inputs(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Return the inputs by their uses; none where the model needs others."""
    text = text_input(config)
    return id_inputs(config) if text is None else {_TEXT: text}


def _output(config: ModelConfig) -> TensorSpec | None:
    """Return the output with a number for each class, which has labels or a name that tells."""

    def fits(spec: TensorSpec) -> bool:
        # Without a dimension of the rows it is that of one text.
        alone = not config.batching and len(spec.dims) == 1 and (spec.dims[0] > 1 or bool(spec.label_filename))
        known = spec.label_filename or spec.name.lower() in _NAMES
        return bool(known) and spec.datatype in FLOATS and (alone or len(row_dims(config, spec)) == 1)

    return max(filter(fits, config.outputs.values()), key=lambda spec: bool(spec.label_filename), default=None)


def _has_labels(config: ModelConfig, repository: Mapping[str, ModelConfig], output: TensorSpec) -> bool:
    """Return whether Triton has labels for *output*; those of an ensemble are its step's."""
    steps = [(repository[step.model], step.output_map) for step in config.steps if step.model in repository]
    inner = [model.outputs.get(name) for model, names in steps for name in names if names[name] == output.name]
    # It gives none for FP16, nor in a stream.
    readable = output.datatype != "FP16" and not config.decoupled
    return readable and any(spec is not None and spec.label_filename for spec in (output, *inner))


class Classifier(Adapter):
    """Sends as many inputs at a time as the model batches."""

    name = "classifier"

    def __init__(
        self, config: ModelConfig, repository: Mapping[str, ModelConfig], interface: Interface | None = None
    ) -> None:
        super().__init__(config, repository)
        inputs, output, given = _inputs(config), _output(config), interface.constants if interface is not None else {}
        use = None if output is None else _NAMES.get(output.name.lower())
        if interface is not None:
            kinds = _KINDS[IDS if IDS in interface.inputs else _TEXT]
            check_named(config, "inputs", interface.inputs, kinds, required=next(iter(kinds)))
            use = _PROBABILITIES if _PROBABILITIES in interface.outputs else _LOGITS
            check_named(config, "outputs", interface.outputs, _KINDS[use], required=use)
            inputs = {each: config.inputs[name] for each, name in interface.inputs.items()}
            output = config.outputs[interface.outputs[use]]
        if not inputs or output is None or use is None:
            raise ConfigurationError(
                f"The model '{config.name}' has no single text input or token ids, or no output that is called logits "
                "or probabilities: describe its tensors with 'inputs', 'constants' and 'outputs' in its settings."
            )
        self._inputs, self._output = inputs, output
        self._constants = constants(config, given, filled=[spec.name for spec in inputs.values()])
        self._labelled = _has_labels(config, repository, output)
        # Triton numbers the classes of all texts through where the model does not batch.
        self._alone = not config.batching and (self._labelled or len(output.dims) == 1)
        ids = _TEXT not in inputs
        self.capabilities = Capabilities(
            classify=True, logits=use == _LOGITS, labels=self._labelled, encoded=ids, token_inputs=ids
        )

    @classmethod
    def described(
        cls, config: ModelConfig, repository: Mapping[str, ModelConfig], interface: Interface | None
    ) -> Adapter:
        """Return the adapter for *interface*, or for what *config* shows by itself."""
        return cls(config, repository, interface)

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models of one text, or of its token ids, with an output of classes."""
        inputs, output = _inputs(config), _output(config)
        texts = [name for name, spec in config.outputs.items() if spec.datatype == "BYTES"]
        if not inputs or output is None or any("label" not in name.lower() for name in texts):
            return None
        kind, width = _NAMES.get(output.name.lower(), "classes"), output.dims[-1]
        if _TEXT not in inputs and kind == _LOGITS and width == 1 and not output.label_filename:
            # That is how cross-encoders look.
            return None
        what = "one required BYTES input" if _TEXT in inputs else "token ids"
        names = ", ".join(spec.name for spec in inputs.values())
        labels = f", with labels in {output.label_filename}" if output.label_filename else ""
        return f"{what} ({names}) and {kind} out ({output.name}{f' [{width}]' if width > 0 else ''}{labels})"

    def encode_classes(self, job: ClassificationJob) -> Sequence[InferRequest]:
        """
        Return the inputs in batches.

        Raises :class:`ContextLengthExceeded` for what is longer than the model's fixed length, if it has one.
        """
        classes = max(self._output.dims[-1], 0) or _ALL_CLASSES
        return [
            self.request(
                f"{job.id}-{number}",
                self._tensors(job, job.inputs[places.start : places.stop]),
                [self._output.name],
                classification=classes if self._labelled else 0,
            )
            for number, places in enumerate(self._batches(job))
        ]

    def _batches(self, job: ClassificationJob) -> Sequence[range]:
        """Return the places of the inputs that share a request."""
        spec, count = next(iter(self._inputs.values())), len(job.inputs)
        size = batch_size(self.config, spec) if _TEXT in self._inputs else id_batch(self.config, spec, job.pad_id)
        size = 1 if self._alone else size
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def _tensors(self, job: ClassificationJob, given: Sequence[Any]) -> list[Tensor]:
        tensors = list(constant_tensors(self.config, self._constants, len(given)))
        if _TEXT in self._inputs:
            return [text_tensor(self.config, self._inputs[_TEXT], given), *tensors]
        sequences = [TokenPair(ids, ()) for ids in given]
        return [*id_tensors(self.config, self._inputs, sequences, job.pad_id), *tensors]

    def decode_classes(self, job: ClassificationJob, responses: Sequence[InferResponse]) -> ClassificationResult:
        """Return the numbers of each input, and the labels."""
        values: list[Sequence[float]] = []
        labels: dict[int, str] = {}
        for places, response in zip(self._batches(job), responses, strict=True):
            found = (response.texts if self._labelled else response.numbers)(self._output.name)
            width, rest = divmod(len(found), len(places))
            if rest or not width:
                raise UpstreamError(f"The model sent {len(found)} values for {len(places)} inputs.")
            rows = [found[start : start + width] for start in range(0, len(found), width)]
            values += [_in_order(row, labels) for row in rows] if self._labelled else map(list, rows)
        return ClassificationResult(values=values, labels=labels)


def _in_order(found: Sequence[str], labels: dict[int, str]) -> Sequence[float]:
    """Return the values of texts ``value:index:label`` by their indices, and add their labels to *labels*."""
    values = [0.0] * len(found)
    try:
        for text in found:
            value, index, *label = text.split(":", 2)
            values[int(index)] = float(value)
            labels.update((int(index), name) for name in label if name)
    except (ValueError, IndexError) as error:
        raise UpstreamError("Triton sent classes that cannot be read.", detail=repr(found[:3])) from error
    return values
