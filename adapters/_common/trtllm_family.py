"""
What the adapters of TensorRT-LLM's models share.

Source of the facts: ``all_models/inflight_batcher_llm`` of tensorrtllm_backend 0.5 to 0.19 and of TensorRT-LLM since
0.20, and the executor behind them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from triton_openai.adapters._common.base import (
    Adapter,
    Capabilities,
    ModelFiles,
    ModelMetadata,
    Parameter,
    Rule,
    check_range,
)
from triton_openai.adapters._common.decoding import CumulativeText, PromptEcho, Reader, TextStage, cumulative_logprob
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Delta, Generation, Guide, Lora, LoraFormat
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor

#: Those of the engine and of the models of text in front of it. Some have a name of their own in each.
SHARED_PARAMETERS: tuple[Parameter, ...] = (
    Parameter("max_tokens", ("max_tokens", "request_output_len")),
    Parameter("temperature", ("temperature",), note="0 is sent as top_k 1", special=True),
    Parameter("top_p", ("top_p", "runtime_top_p"), note="0 is sent as top_k 1", special=True),
    Parameter("top_k", ("top_k", "runtime_top_k"), note="-1 (off) is sent as 0", special=True),
    # The names since TensorRT-LLM 0.20, and before.
    Parameter("min_tokens", ("min_tokens", "min_length")),
    Parameter("seed", ("seed", "random_seed")),
    Parameter("frequency_penalty", ("frequency_penalty",)),
    Parameter("presence_penalty", ("presence_penalty",)),
    Parameter("repetition_penalty", ("repetition_penalty",)),
    Parameter("length_penalty", ("length_penalty", "len_penalty"), note="beam search only"),
    Parameter("ignore_eos", ("end_id",), note="sent as -1", signed=True, special=True),
    Parameter("include_stop_str_in_output", otherwise=Rule.SERVICE),
)
#: What every model that takes token ids takes.
ENGINE_INPUTS = frozenset({"input_ids", "input_lengths", "request_output_len"})
LOGPROBS = "output_log_probs"
CUMULATIVE = "cum_log_probs"
# OpenAI's; a top_k of 0 is none.
_DEFAULTS: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
_GUIDE_TYPE = "guided_decoding_guide_type"
_GUIDE = "guided_decoding_guide"
_GUIDE_TYPES: Mapping[str, str] = {
    "json": "json",
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "regex",
    "grammar": "ebnf_grammar",
}
_META = re.compile(r"[\\.^$*+?()\[\]{}|]")
# The input that asks for the use of the KV cache, and the output with the number of blocks that were there.
_CACHE_REPORTS = (
    ("return_perf_metrics", "kv_cache_reused_blocks"),
    # 0.16 to 0.18.
    ("return_kv_cache_reuse_stats", "kv_cache_reused_blocks"),
    # The LLM API's model.
    ("sampling_param_return_perf_metrics", "kv_cache_reused_block"),
)
_TASK = "lora_task_id"
_WEIGHTS = "lora_weights"
_CONFIG = "lora_config"
_CONFIG_WIDTH = 3


class TrtllmAdapter(Adapter):
    """
    Base of the adapters of TensorRT-LLM: sampling, guides, LoRA adapters and the use of the KV cache.

    :attr:`engine` is the config of the model that runs the engine, if it is known. :attr:`cumulative` is whether every
    response of a stream of text repeats it from its start.
    """

    engine: ModelConfig | None = None
    cumulative = False

    def capabilities_with(self, **more: Any) -> Capabilities:
        """Return those that the model's config and its engine's decide, and *more*."""
        config = self.config
        engine = self.engine
        # An engine without a backend for guides ignores them: a refusal is better than an answer that looks right.
        guided = {_GUIDE_TYPE, _GUIDE} <= config.inputs.keys() and (
            engine is None or engine.parameter("guided_decoding_backend") is not None
        )
        if guided:
            guides = frozenset(_GUIDE_TYPES)
        else:
            guides = frozenset()
        own: dict[str, Any] = {"streaming": config.decoupled, "guides": guides, "lora": _lora_format(config)}
        return Capabilities(**{**own, "fixed_seed": True, **more})

    @property
    def _samples(self) -> bool:
        """
        Whether the engine takes temperature, top_p and top_k together.

        With another mode and ``top_k`` alone, it answers nothing to a request that sends top_p (server issues 7724 and
        7868); the speculative modes have rules of their own.
        """
        engine = self.engine
        return engine is None or engine.parameter("decoding_mode") in (None, "auto", "top_k_top_p", "top_p")

    @property
    def default_sampling(self) -> str:
        if self._samples:
            return super().default_sampling
        return "the engine's own (decoding_mode)"

    def metadata_with(self, files: ModelFiles) -> ModelMetadata:
        """Return what the engine's config and files say of the longest prompt, too."""
        return msgspec.structs.replace(self.metadata, max_prompt_len=_prompt_limit(self.engine))

    def generation_request(
        self, generation: Generation, inputs: Sequence[Tensor], outputs: Sequence[str], *, cancellable: bool = True
    ) -> InferRequest:
        """Return the request with the inputs of parameters, guide, LoRA adapter and cache in addition to *inputs*."""
        tensors = [
            *inputs,
            *self.parameter_tensors(generation.sampling),
            *self._randomness(generation),
            *self._guide_tensors(generation.guide),
            *self.lora_tensors(generation.lora),
        ]
        cache = self._cache_report(generation)
        if cache is not None:
            tensors.append(self.tensor(cache[0], True))
            outputs = (*outputs, cache[1])
        return self.request(generation.id, tensors, outputs, cancellable=cancellable)

    def text_stage(self, generation: Generation) -> TextStage | None:
        """Return what makes new text of the responses, ``None`` where they are just that."""
        if not self.returns_whole(generation):
            if self.cumulative:
                return CumulativeText()
            return None
        if self.capabilities.echoes:
            return PromptEcho(generation.prompt, generation.prompt_echo)
        return None

    def readers(self, generation: Generation) -> list[Reader]:
        """Return what reads the use of the cache, and the log probability of the answer, where they are asked for."""
        cache = self._cache_report(generation)
        size = generation.kv_cache_block_size
        if generation.cumulative_logprob:
            readers = [cumulative_logprob(CUMULATIVE)]
        else:
            readers = []
        if cache is not None and size is not None:
            readers.append(_cached_tokens(cache[1], size))
        return readers

    def _cache_report(self, generation: Generation) -> tuple[str, str] | None:
        """Return the flag and the output where the model reports its cache and the size of a block is known."""
        inputs = self.config.inputs
        outputs = self.config.outputs
        if generation.kv_cache_block_size is None:
            return None
        return next((pair for pair in _CACHE_REPORTS if pair[0] in inputs and pair[1] in outputs), None)

    def _randomness(self, generation: Generation) -> list[Tensor]:
        """
        Return temperature, top_p and top_k as the executor understands them.

        It decodes greedily when neither top_p nor top_k is there, whatever the temperature. So what the request leaves
        out is sent with OpenAI's defaults, where the engine takes them. It takes no temperature of 0 and reads a
        top_p of 0 as none: either 0, which means the likeliest token alone, becomes ``top_k`` 1. Without any of the
        three it reports no probabilities; ``top_k`` 1 asks for the same answer.
        """
        sampling = generation.sampling
        values: dict[str, float] = dict(_DEFAULTS) if self._samples else {}
        if sampling.top_k is None:
            top_k = None
        else:
            top_k = max(0, sampling.top_k)
        asked = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k}
        values |= {name: value for name, value in asked.items() if value is not None}
        scored = generation.cumulative_logprob or sampling.logprobs is not None
        if 0 in (sampling.temperature, sampling.top_p) or (scored and not values):
            values = {"top_k": 1}
        tensors = []
        for row in self.parameters:
            if row.name in values and row.target is not None:
                check_range(row.name, values[row.name], row.datatype)
                tensors.append(self.tensor(row.target, values[row.name]))
        return tensors

    def _guide_tensors(self, guide: Guide | None) -> list[Tensor]:
        if guide is None:
            return []
        text = guide.value
        if guide.kind == "choice":
            # The engine has no choices, but a regular expression of their literal texts is the same language.
            choices = msgspec.json.decode(text, type=list[str])
            text = "(" + "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices) + ")"
        tensors = [self.tensor(_GUIDE_TYPE, _GUIDE_TYPES[guide.kind])]
        if guide.kind == "json":
            return tensors
        return [*tensors, self.tensor(_GUIDE, text)]

    def lora_tensors(self, lora: Lora | None) -> list[Tensor]:
        """Return the inputs of a LoRA adapter: its number, and its weights where they are sent."""
        if lora is None:
            return []
        if lora.number is None:
            raise ConfigurationError(f"The LoRA adapter '{lora.name}' has no task id.", param="model")
        tensors = [self.tensor(_TASK, lora.number)]
        for name, matrix in ((_WEIGHTS, lora.weights), (_CONFIG, lora.config)):
            if matrix is not None:
                shape = (1, *matrix.shape) if self.config.batching else matrix.shape
                tensors.append(Tensor(name, matrix.datatype, shape, matrix.data))
        return tensors


def truthy(value: str | None) -> bool:
    """Return a parameter of the engine's config as the engine reads flags; without a value they are off."""
    return value is not None and value.lower() in ("true", "1")


def tokenizing_metadata(steps: Iterable[ModelConfig | None]) -> ModelMetadata | None:
    """Return what the first of *steps* that tokenizes says, ``None`` where there is none."""
    step = next((candidate for candidate in steps if candidate is not None and "QUERY" in candidate.inputs), None)
    if step is None:
        return None
    return ModelMetadata(tokenizer_dir=step.parameter("tokenizer_dir"), adds_bos=adds_special_tokens(step))


def adds_special_tokens(preprocessing: ModelConfig) -> bool:
    """
    Return whether the model *preprocessing* puts special tokens around prompts.

    Releases 0.5 and 0.6, whose integers are unsigned, always do. Releases 0.7 to 0.10 do if ``add_special_tokens`` says
    so. Since 0.11, which brings the input ``DECODER_QUERY``, they do unless it says no.
    """
    limit = preprocessing.inputs.get("REQUEST_OUTPUT_LEN")
    if limit is not None and limit.datatype.startswith("UINT"):
        return True
    value = (preprocessing.parameter("add_special_tokens") or "").lower()
    if "DECODER_QUERY" in preprocessing.inputs:
        return value not in ("false", "0", "f", "n", "no")
    return value in ("true", "1", "t", "y", "yes")


def stop_request(engine: ModelConfig, generation_id: str) -> InferRequest | None:
    """
    Return the request that makes *engine* end the request of the same id, ``None`` where it takes none.

    Its answer is one empty final response.
    """
    if "stop" not in engine.inputs:
        return None
    return InferRequest(
        model=engine.name,
        id=generation_id,
        inputs=tuple(
            Tensor(name, spec.datatype, engine.wire_shape(spec, 1), (True if name == "stop" else 0,))
            for name, spec in engine.inputs.items()
            if name in {"stop", *ENGINE_INPUTS}
        ),
        stream=engine.decoupled,
    )


def newest_logprobs(response: InferResponse, *, count: int, total: int) -> Sequence[float]:
    """
    Return the log probabilities of the *count* new tokens, of *total* so far, that *response* has.

    The executor repeats those of all tokens so far, maybe with padding after them; a list that is just as long as the
    new tokens is taken for theirs. Raises :class:`InvalidAnswer` for a list that is neither.
    """
    values = response.numbers(LOGPROBS)
    if len(values) >= total:
        values = values[total - count : total]
    if len(values) != count:
        raise response.invalid("its log probabilities do not match its tokens")
    return values


def _cached_tokens(output: str, block_size: int) -> Reader:
    """Return a reader of the tokens of a prompt that came from the cache, of blocks of *block_size* tokens."""

    def read(response: InferResponse, delta: Delta) -> None:
        # Only the last response has it; from the LLM API's model, as text. A last block counts whole.
        if blocks := response.integers(output):
            delta.cached_tokens = blocks[0] * block_size

    return read


def _lora_format(config: ModelConfig) -> LoraFormat | None:
    """Return how the model takes weights, ``None`` where it takes no LoRA adapters."""
    if not {_TASK, _WEIGHTS, _CONFIG} <= config.inputs.keys():
        return None
    weights = config.inputs[_WEIGHTS]
    table = config.inputs[_CONFIG]
    if weights.datatype not in ("FP16", "BF16", "FP32") or table.datatype != "INT32":
        return None
    if table.dims:
        width = table.dims[-1]
    else:
        width = -1
    return LoraFormat(weights.datatype, width if width > 0 else _CONFIG_WIDTH)


def _prompt_limit(engine: ModelConfig | None) -> int | None:
    """
    Return a number of tokens that no prompt of *engine* can exceed, where its config or its files give one.

    ``max_seq_len`` is the limit of an engine's ``config.json``; ``max_input_len`` is one only where that is missing (up
    to 0.9), as the executor takes longer prompts when it packs inputs. A KV cache without a window has to hold the
    whole prompt. Reads the file that ``gpt_model_path`` leads to, if it is on this machine.
    """
    if engine is None:
        return None
    built = _engine_config(engine.parameter("gpt_model_path"))
    limits = [_positive(built.get("max_seq_len")) or _positive(built.get("max_input_len"))]
    limits.append(_positive(engine.parameter("max_seq_len")) or _positive(engine.parameter("max_input_len")))
    if engine.parameter("max_attention_window_size") is None:
        limits.append(_positive(engine.parameter("max_tokens_in_paged_kv_cache")))
    return min((limit for limit in limits if limit is not None), default=None)


def _engine_config(folder: str | None) -> Mapping[str, Any]:
    """Return what an engine was built with: ``build_config``, before 0.8 ``builder_config``, of its ``config.json``."""
    try:
        if folder:
            content = msgspec.json.decode(Path(folder, "config.json").read_bytes(), type=dict)
        else:
            content = {}
    except (OSError, ValueError):
        # The path is one of the server's machine.
        return {}
    built = content.get("build_config", content.get("builder_config"))
    if isinstance(built, dict):
        return built
    return {}


def _positive(value: int | str | None) -> int | None:
    try:
        number = int(value or 0)
    except (TypeError, ValueError):
        return None
    if number > 0:
        return number
    return None
