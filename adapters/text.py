"""
Any model that takes a text and gives a text, such as those that people write for Triton's Python backend.

There is no standard for their tensors. A model with one required BYTES input and one BYTES output is taken as it is,
and its optional inputs by the names that are in common use. Whatever else a model needs, the operator describes in the
settings (:class:`TensorMapping`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_openai.adapters._common.base import Capabilities, Parameter, Rule, bind
from triton_openai.adapters._common.decoding import CumulativeText, Reader, TextDecoder, TextStage
from triton_openai.adapters._common.media_names import is_media
from triton_openai.adapters._common.tensor_mapping import (
    DescribedAdapter,
    Kind,
    constants,
    fits,
    listed_uses,
    named_tensors,
)
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Delta, FinishReason, Generation, TensorMapping
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor, TensorSpec

_PROMPT = "prompt"
_STREAM = "stream"
_TEXT = "text"
_FINISH = "finish_reason"
_COMPLETION = "completion_tokens"
_PROMPT_TOKENS = "prompt_tokens"
#: What the settings can name, with the kind of its values.
INPUTS: Mapping[str, Kind] = {
    _PROMPT: "text", _STREAM: "flag", "max_tokens": "integer", "min_tokens": "integer", "temperature": "number",
    "top_p": "number", "top_k": "integer", "min_p": "number", "seed": "integer", "stop": "text", "bad_words": "text",
    "frequency_penalty": "number", "presence_penalty": "number", "repetition_penalty": "number",
    "length_penalty": "number", "ignore_eos": "flag", "skip_special_tokens": "flag",
}  # fmt: skip
OUTPUTS: Mapping[str, Kind] = {_TEXT: "text", _FINISH: "text", _COMPLETION: "integer", _PROMPT_TOKENS: "integer"}
# What models call them beside these names; in lower case.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    _STREAM: ("streaming",),
    "max_tokens": ("max_new_tokens", "request_output_len"),
    "min_tokens": ("min_new_tokens",),
    "seed": ("random_seed",),
    "stop": ("stop_words", "stop_strings", "stop_sequences"),
    _COMPLETION: ("num_output_tokens",),
    _PROMPT_TOKENS: ("num_input_tokens",),
}
_REASONS: Mapping[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end", "stop_sequence"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "max_length"), FinishReason.LENGTH),
}


def _known(specs: Mapping[str, TensorSpec], kinds: Mapping[str, Kind], *but: str) -> dict[str, str]:
    """Return the tensors of *specs* by their uses, as far as their names show them."""
    names = {name.lower(): name for name in specs}
    tensors = {}
    for use, kind in kinds.items():
        if use in but:
            continue
        # The first name that fits counts.
        for known in (use, *_OTHER_NAMES.get(use, ())):
            if known in names and fits(kind, specs[names[known]].datatype):
                tensors[use] = names[known]
                break
    return tensors


def _found(config: ModelConfig) -> TensorMapping | None:
    """Return what *config* shows by itself; ``None`` where it is no text model, or more has to be known."""
    inputs = _known(config.inputs, INPUTS, _PROMPT)
    outputs = _known(config.outputs, OUTPUTS, _TEXT)
    required = [spec for name, spec in config.inputs.items() if not spec.optional and name != inputs.get(_STREAM)]
    texts = [name for name, spec in config.outputs.items() if spec.datatype == "BYTES" and name != outputs.get(_FINISH)]
    if len(required) != 1 or required[0].datatype != "BYTES" or len(texts) != 1:
        return None
    if is_media(required[0].name) or is_media(texts[0]):
        # Bytes of a file, and no text
        return None
    return TensorMapping(inputs={_PROMPT: required[0].name, **inputs}, outputs={_TEXT: texts[0], **outputs})


class Text(DescribedAdapter):
    """Text in and text out, in one response or in several."""

    name = "text"

    def _bind(self, mapping: TensorMapping | None) -> None:
        config = self.config
        tensors = mapping or _found(config)
        if tensors is None:
            raise ConfigurationError(
                f"The model '{config.name}' has no single required BYTES input and single BYTES output: describe its "
                "tensors with 'inputs', 'constants' and 'outputs' in its settings."
            )
        self._inputs = tensors.inputs
        self._outputs = tensors.outputs
        named_tensors(config, tensors, "inputs", INPUTS, required=_PROMPT)
        named_tensors(config, tensors, "outputs", OUTPUTS, required=_TEXT)
        always = [self._inputs[use] for use in (_PROMPT, _STREAM, "max_tokens") if use in self._inputs]
        constant_values = constants(config, tensors, filled=always)
        self._constants = [self.tensor(name, *values) for name, values in constant_values.items()]
        self._text = tensors.text or ("delta" if config.decoupled else "final")
        rows = [Parameter(use, (name,)) for use, name in self._inputs.items() if use not in (_PROMPT, _STREAM, "stop")]
        # The model may leave stop strings in the text, or ignore them.
        note = "matched and removed here"
        stop = Parameter("stop", (self._inputs.get("stop", ""),), Rule.SERVICE, note=note, special=True)
        self.parameters = bind((*rows, stop, Parameter("include_stop_str_in_output", otherwise=Rule.SERVICE)), config)
        self.capabilities = Capabilities(
            streaming=config.decoupled,
            usage=_COMPLETION in self._outputs,
            finish_reason=_FINISH in self._outputs,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with one required BYTES input and one BYTES output."""
        tensors = _found(config)
        if tensors is None:
            return None
        return f"one required BYTES input and one BYTES output ({listed_uses(tensors)})"

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        """Return the request; a parameter takes the place of a constant for the same input."""
        inputs = [self.tensor(self._inputs[_PROMPT], generation.prompt)]
        if _STREAM in self._inputs:
            inputs.append(self.tensor(self._inputs[_STREAM], generation.stream and self.config.decoupled))
        inputs += self.parameter_tensors(generation.sampling)
        inputs += self._stop_words(generation.sampling.stop)
        return [self.described_request(generation.id, inputs, self._constants, tuple(self._outputs.values()))]

    def _stop_words(self, stop: tuple[str, ...]) -> list[Tensor]:
        name = self._inputs.get("stop")
        if name is None or not stop or (len(stop) > 1 and -1 not in self.config.inputs[name].dims):
            return []
        return [self.tensor(name, *stop)]

    def decoder(self, generation: Generation) -> TextDecoder:
        stages: Mapping[str, type[TextStage]] = {"cumulative": CumulativeText, "final": _LastText}
        stage = None
        if self._text in stages:
            stage = stages[self._text]()
        return TextDecoder(
            stage,
            text=self._outputs[_TEXT],
            prompt_count=self._outputs.get(_PROMPT_TOKENS),
            readers=[self._ending(total=stage is not None)],
        )

    def _ending(self, *, total: bool) -> Reader:
        """Return a reader of the finish reason and the tokens, which a response counts in *total* or for itself."""
        counted = 0

        def read(response: InferResponse, delta: Delta) -> None:
            nonlocal counted
            finish = self._outputs.get(_FINISH)
            completion = self._outputs.get(_COMPLETION)
            if completion is not None:
                tokens = next(iter(response.integers(completion)), counted if total else 0)
                # A count that falls would be no tokens.
                if total:
                    delta.tokens = max(0, tokens - counted)
                else:
                    delta.tokens = tokens
                counted = tokens
            if finish is not None:
                word = next(iter(response.texts(finish)), "")
                # Other words have no known meaning: then the reason is derived as if there were none.
                delta.finish_reason = _REASONS.get(word.lower())

        return read


class _LastText(TextStage):
    """Keeps the last text until the end."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> str:
        self._text = text or self._text
        return ""

    def flush(self) -> str:
        text = self._text
        self._text = ""
        return text
