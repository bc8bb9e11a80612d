"""Settings that would serve a model whose tensors no adapter recognizes, for the operator to paste."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from msgspec.structs import replace

from triton_openai.adapters._common.base import Adapter
from triton_openai.adapters._common.media_names import is_media
from triton_openai.adapters._common.registry import Registry
from triton_openai.adapters._common.tensor_mapping import FLOATS
from triton_openai.errors import ServiceError
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.triton.tensors import INTEGER_RANGES, ModelConfig, TensorSpec

#: What models call a prompt or a text to work on, the most telling names first.
_PROMPTS = (
    "prompt", "text_input", "input_text", "prompts", "text", "texts", "query", "question", "messages", "message",
    "chat", "user_prompt", "user", "sentence", "sentences", "instruction", "input", "inputs", "input0", "input_0",
    "document", "content", "target_text", "text_to_speak",
)  # fmt: skip
#: What they call an answer.
_ANSWERS = (
    "text_output", "output_text", "generated_text", "text", "answer", "response", "completion", "generation", "result",
    "output", "outputs", "output0", "output_0", "predicted_text", "transcripts", "transcript", "transcription",
    "translation", "summary",
)  # fmt: skip
_GUESS = "# A guess: check it with the model's author."
#: The most usual rate of synthesizers.
_SAMPLE_RATE = 24_000
_AUDIO = re.compile(r"audio|wav|speech|pcm|samples|signal|sound|voice_data", re.IGNORECASE)
_VECTOR = re.compile(r"embed|vector|hidden|pool|sentence|feature|dense", re.IGNORECASE)
#: What models call the settings of a generation, by the parameter of a request.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "max_tokens": (
        "max_tokens", "max_new_tokens", "request_output_len", "max_length", "max_output_tokens", "output_len",
        "max_output_len", "maximum_tokens", "generate_length", "num_tokens", "length",
    ),
    "min_tokens": ("min_tokens", "min_new_tokens", "min_length"),
    "temperature": ("temperature", "temp"),
    "top_p": ("top_p", "topp", "runtime_top_p"),
    "top_k": ("top_k", "topk", "runtime_top_k"),
    "seed": ("seed", "random_seed"),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty", "rep_penalty"),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "stop": ("stop", "stop_words", "stop_strings", "stop_sequences"),
    "stream": ("stream", "streaming"),
}  # fmt: skip
#: The inputs of models of token ids.
_IDS = ("input_ids", "attention_mask", "token_type_ids")
# Numbers in a constant that somebody would check and write.
_MAX_NUMBERS = 16
#: Values of inputs by parts of their names, where nothing else says what they need.
_USUAL_NUMBERS = (("beam", 1), ("num_return", 1), ("temperature", 1), ("top_p", 1), ("penalty", 1), ("rate", 16_000))


def suggested_settings(config: ModelConfig, registry: Registry) -> str:
    """Return settings in YAML with which an adapter takes the model *config*; nothing if none are found."""
    for adapter, mapping in _candidates(config):
        if _takes(registry, adapter, config, mapping):
            return _written(config.name, adapter, mapping)
    return ""


def _takes(registry: Registry, adapter: str, config: ModelConfig, mapping: TensorMapping) -> bool:
    try:
        bound: Adapter = registry.adapter_named(adapter).adapter.described(config, {}, mapping)
    except ServiceError:
        return False
    return bool(bound.jobs)


def _written(name: str, adapter: str, mapping: TensorMapping) -> str:
    settings: dict[str, Any] = {"adapter": adapter}
    for field in ("inputs", "constants", "outputs"):
        value = getattr(mapping, field)
        if value:
            settings[field] = dict(value)
    if mapping.audio is not None:
        settings["audio"] = {"sample_rate": mapping.audio.sample_rate}
    written = yaml.safe_dump({"models": {name: settings}}, sort_keys=False, allow_unicode=True, width=200)
    for field in ("constants", "audio"):
        written = written.replace(f"\n    {field}:", f"\n    {_GUESS}\n    {field}:")
    return written


def _candidates(config: ModelConfig) -> Iterator[tuple[str, TensorMapping]]:
    """Yield adapters with the tensors that they may use, the likeliest first."""
    required = config.required
    # Where a model requires inputs, its text is one of them.
    texts = _ordered([spec for spec in required or config.inputs.values() if _is_text(spec)], _PROMPTS)
    answers = _ordered([spec for spec in config.outputs.values() if _is_text(spec)], _ANSWERS)
    sounds = [spec for spec in required if _AUDIO.search(spec.name) and _holds_audio(spec)]
    heard = [spec for spec in config.outputs.values() if _AUDIO.search(spec.name) and _holds_audio(spec)]
    vectors = [spec for spec in config.outputs.values() if spec.datatype in FLOATS and _VECTOR.search(spec.name)]
    # An image, or what only another program can make, is none of these.
    unusable = [spec for spec in required if is_media(spec.name) and spec not in sounds]
    large = [spec for spec in required if _size(spec) > _MAX_NUMBERS and spec not in sounds and spec.name not in _IDS]
    if unusable or large:
        return
    for answer in answers:
        for sound in sounds:
            yield "transcriber", _mapping(config, {"audio": sound.name}, {"text": answer.name})
    if sounds:
        return
    for text in texts:
        for sound in heard:
            mapping = _mapping(config, {"text": text.name}, {"audio": sound.name})
            yield "synthesizer", replace(mapping, audio=AudioFormat(sample_rate=_SAMPLE_RATE))
    if heard:
        return
    for text in texts:
        for answer in answers:
            inputs = {"prompt": text.name, **_parameters(config, text.name)}
            yield "text", _mapping(config, inputs, {"text": answer.name})
    for text in texts:
        for vector in vectors:
            yield "embeddings", _mapping(config, {"text": text.name}, {"embedding": vector.name})
    if "input_ids" in config.inputs and "attention_mask" in config.inputs:
        ids = {name: name for name in _IDS if name in config.inputs}
        for vector in vectors:
            for use in ("hidden_states", "embedding"):
                yield "embeddings", _mapping(config, ids, {use: vector.name})


def _ordered(specs: Sequence[TensorSpec], names: Sequence[str]) -> Sequence[TensorSpec]:
    """Return *specs* by the position of their name in *names*."""

    def rank(spec: TensorSpec) -> int:
        name = spec.name.lower().strip("_")
        if name in names:
            return names.index(name)
        return len(names)

    return sorted(specs, key=rank)


def _is_text(spec: TensorSpec) -> bool:
    return spec.datatype == "BYTES" and not is_media(spec.name)


def _holds_audio(spec: TensorSpec) -> bool:
    return spec.datatype in (*FLOATS, "INT16", "UINT8", "BYTES")


def _parameters(config: ModelConfig, prompt: str) -> dict[str, str]:
    """Return the inputs of *config* that are parameters of a request, beside that of the *prompt*."""
    by_name = {name.lower(): name for name in config.inputs if name != prompt}
    inputs = {}
    for parameter, names in _PARAMETERS.items():
        known = next((by_name[name] for name in names if name in by_name), None)
        if known is not None and _fits(parameter, config.inputs[known].datatype):
            inputs[parameter] = known
    return inputs


def _fits(parameter: str, datatype: str) -> bool:
    if parameter == "stream":
        return datatype == "BOOL"
    if parameter == "stop":
        return datatype == "BYTES"
    if parameter in ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        return datatype in FLOATS
    return datatype in INTEGER_RANGES


def _mapping(config: ModelConfig, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> TensorMapping:
    """Return the mapping, with values for the required inputs that it does not use."""
    always = {inputs.get(use) for use in ("prompt", "text", "audio", "stream", "max_tokens", *_IDS)}
    constants = {spec.name: _constant(spec) for spec in config.required if spec.name not in always}
    return TensorMapping(inputs=inputs, outputs=outputs, constants=constants)


def _constant(spec: TensorSpec) -> Any:
    """Return a value that the input *spec* holds: the usual one by its name, or a neutral one."""
    value: Any = 0
    if spec.datatype == "BYTES":
        value = ""
    elif spec.datatype == "BOOL":
        value = False
    else:
        name = spec.name.lower()
        value = next((number for part, number in _USUAL_NUMBERS if part in name), 0)
        if value and spec.datatype in FLOATS:
            value = float(value)
    if _size(spec) == 1:
        return value
    return [value] * _size(spec)


def _size(spec: TensorSpec) -> int:
    """Return the least numbers that the tensor *spec* holds."""
    return math.prod([max(dim, 1) for dim in spec.dims])
