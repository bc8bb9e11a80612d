"""
Classifiers, as people deploy them from ONNX, PyTorch or Python: a text in, a number for each class out.

There is no standard for their tensor names. The text is the only required input of BYTES, or its token ids are the
inputs of an exported Hugging Face model. The name of the output says whether it has logits or probabilities; otherwise
the operator says it in the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from triton_openai.adapters._common import tensor_mapping as tensors
from triton_openai.adapters._common.base import Capabilities
from triton_openai.adapters._common.tensor_mapping import TEXT, Kind, text_or_id_inputs
from triton_openai.errors import ConfigurationError
from triton_openai.generation import TensorMapping
from triton_openai.jobs import ClassificationJob, ClassificationResult
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, TensorSpec

_Value = TypeVar("_Value", str, float)

_LOGITS = "logits"
_PROBABILITIES = "probabilities"
# Names of outputs, in lower case.
_NAMES: Mapping[str, str] = {
    **dict.fromkeys((_LOGITS, "logit", "class_logits", "output_logits"), _LOGITS),
    **dict.fromkeys((_PROBABILITIES, "probability", "probs", "prob", "output_probability"), _PROBABILITIES),
    **dict.fromkeys(("class_probabilities", "class_probs"), _PROBABILITIES),
}
# What the settings can name beside each of these. An output is either of the two.
_BESIDE: Mapping[str, Mapping[str, Kind]] = {
    _LOGITS: {_LOGITS: "number", _PROBABILITIES: "number"},
    _PROBABILITIES: {_PROBABILITIES: "number"},
}
# More classes than any model has.
_ALL_CLASSES = 1 << 20


def _output(config: ModelConfig) -> TensorSpec | None:
    """Return the output with a number for each class: it has labels or a known name."""

    def fits(spec: TensorSpec) -> bool:
        # The output of a model that takes one text at a time may have no dimension for the rows.
        single = not config.batching and len(spec.dims) == 1 and (spec.dims[0] > 1 or spec.label_filename != "")
        known = spec.label_filename != "" or spec.name.lower() in _NAMES
        return known and spec.datatype in tensors.FLOATS and (single or len(config.row_dims(spec)) == 1)

    return max(filter(fits, config.outputs.values()), key=lambda spec: spec.label_filename != "", default=None)


def _has_labels(config: ModelConfig, repository: Mapping[str, ModelConfig], output: TensorSpec) -> bool:
    """Return whether Triton has labels for *output*; an ensemble has those of its steps."""
    # Triton has none for FP16, nor in streams.
    if output.datatype == "FP16" or config.decoupled:
        return False
    specs: list[TensorSpec | None] = [output]
    for step in config.steps:
        if step.model in repository:
            outputs = repository[step.model].outputs
            specs += [outputs.get(name) for name, target in step.output_map.items() if target == output.name]
    return any(spec is not None and spec.label_filename for spec in specs)


class Classifier(tensors.RowsAdapter):
    """Sends as many inputs at a time as the model batches."""

    name = "classifier"
    jobs = (ClassificationJob,)

    def _bind(self, mapping: TensorMapping | None) -> None:
        config = self.config
        inputs = text_or_id_inputs(config, mapping)
        output = _output(config)
        if output is None:
            use = None
        else:
            use = _NAMES.get(output.name.lower())
        if mapping is not None:
            if _PROBABILITIES in mapping.outputs:
                use = _PROBABILITIES
            else:
                use = _LOGITS
            output = tensors.named_tensors(config, mapping, "outputs", _BESIDE[use], required=use)[use]
        if not inputs or output is None or use is None:
            raise ConfigurationError(
                f"The model '{config.name}' has no single text input or token ids, or no output that is called logits "
                "or probabilities: describe its tensors with 'inputs', 'constants' and 'outputs' in its settings."
            )
        self.inputs = inputs
        self._output = output
        self.constants = tensors.constants(config, mapping, filled=[spec.name for spec in inputs.values()])
        labels = _has_labels(config, self.repository, output)
        ids = TEXT not in inputs
        self.batch = config.batch_size(next(iter(inputs.values())))
        if not config.batching and (labels or len(output.dims) == 1):
            # Without batching, Triton numbers the classes of all rows in sequence.
            self.batch = 1
        self.capabilities = Capabilities(logits=use == _LOGITS, labels=labels, tokens=ids)

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models that take one text, or its token ids, and return numbers for classes."""
        inputs = text_or_id_inputs(config)
        output = _output(config)
        texts = [name for name, spec in config.outputs.items() if spec.datatype == "BYTES"]
        if not inputs or output is None or any("label" not in name.lower() for name in texts):
            return None
        kind = _NAMES.get(output.name.lower(), "classes")
        width = output.dims[-1]
        labels = output.label_filename
        if TEXT not in inputs and kind == _LOGITS and width == 1 and not labels:
            # Cross-encoders look like this.
            return None
        if TEXT in inputs:
            what = "one required BYTES input"
        else:
            what = "token ids"
        names = ", ".join(spec.name for spec in inputs.values())
        if width > 0:
            shape = f" [{width}]"
        else:
            shape = ""
        if labels:
            file = f", with labels in {labels}"
        else:
            file = ""
        return f"{what} ({names}) and {kind} out ({output.name}{shape}{file})"

    def encode(self, job: ClassificationJob, /) -> Sequence[InferRequest]:
        """
        Return the inputs in batches.

        Raises :class:`ContextLengthExceeded` for inputs longer than the model's fixed length.
        """
        if self.capabilities.labels:
            classes = max(self._output.dims[-1], 0) or _ALL_CLASSES
        else:
            classes = 0
        requests = []
        for number, rows in enumerate(self.batches(job.inputs, job.pad_id)):
            inputs = self.row_tensors(job.inputs[rows.start : rows.stop], job.pad_id)
            requests.append(self.request(f"{job.id}-{number}", inputs, [self._output.name], classification=classes))
        return requests

    def decode(self, job: ClassificationJob, responses: Sequence[InferResponse], /) -> ClassificationResult:
        """Return the numbers of each input, and the labels."""
        values: list[Sequence[float]] = []
        labels: dict[int, str] = {}
        for part, response in zip(self.batches(job.inputs, job.pad_id), responses, strict=True):
            if self.capabilities.labels:
                texts = response.texts(self._output.name)
                values += [_in_order(row, labels, response) for row in _rows(texts, len(part), response)]
            else:
                values += map(list, _rows(response.numbers(self._output.name), len(part), response))
        return ClassificationResult(values=values, labels=labels)


def _rows(values: Sequence[_Value], count: int, response: InferResponse) -> Sequence[Sequence[_Value]]:
    """Return *values* as *count* rows of the same length. Raises :class:`InvalidAnswer` if they are none."""
    width, rest = divmod(len(values), count)
    if rest or not width:
        detail = f"{len(values)} values for {count} inputs"
        raise response.invalid("its values are no multiple of the request's inputs", detail=detail)
    return [values[start : start + width] for start in range(0, len(values), width)]


def _in_order(texts: Sequence[str], labels: dict[int, str], response: InferResponse) -> Sequence[float]:
    """
    Return the values of texts ``value:index:label`` in the order of the indices, and add the labels to *labels*.

    Raises :class:`InvalidAnswer` unless the texts of *response* have each index once.
    """
    values: dict[int, float] = {}
    try:
        for text in texts:
            value, index, *label = text.split(":", 2)
            values[int(index)] = float(value)
            labels.update((int(index), name) for name in label if name)
    except ValueError as error:
        raise response.invalid("its classes cannot be read") from error
    if values.keys() != set(range(len(texts))):
        raise response.invalid("it does not have each class once")
    return [values[index] for index in range(len(texts))]
