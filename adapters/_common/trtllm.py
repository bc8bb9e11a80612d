"""
LoRA adapters of TensorRT-LLM: by number, and with weights and config when the engine does not have them yet.

Source of the facts: ``all_models/inflight_batcher_llm`` of tensorrtllm_backend 0.8 to 0.19 and of TensorRT-LLM since
0.20, and the executor's cache: what it has under a number stays, whatever weights a later request brings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from triton_openai.adapters._common.base import Adapter, BoundParameter, check_range
from triton_openai.errors import ConfigurationError, UpstreamError
from triton_openai.generation import Generation, Guide, Image, Lora, LoraFormat, Matrix, Sampling
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor

#: Sent by rules of their own, see :func:`randomness`.
RANDOMNESS = ("temperature", "top_p", "top_k")
# OpenAI's; a top_k of 0 is none.
_DEFAULTS: Mapping[str, float | int] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
#: What every model that takes token ids takes.
ENGINE_INPUTS = frozenset({"input_lengths", "request_output_len"})
_GUIDE_TYPES: Mapping[str, str] = {
    "json": "json",
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "regex",
    "grammar": "ebnf_grammar",
}
_META = re.compile(r"[\\.^$*+?()\[\]{}|]")


def truthy(value: str | None) -> bool:
    """Return a parameter of the engine's config as the engine reads flags; without a value they are off."""
    return value is not None and value.lower() in ("true", "1")


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


def samples(engine: ModelConfig | None) -> bool:
    """
    Return whether *engine* can sample by temperature, top_p and top_k alike.

    One with another ``decoding_mode`` cannot: with ``top_k`` alone it answers nothing to a request that sends top_p
    (server issues 7724 and 7868), and the speculative modes have rules of their own.
    """
    return engine is None or engine.parameter("decoding_mode") in (None, "auto", "top_k_top_p", "top_p")


def randomness(adapter: Adapter, parameters: Sequence[BoundParameter], sampling: Sampling) -> list[Tensor]:
    """
    Return temperature, top_p and top_k as the executor understands them.

    It decodes greedily when neither top_p nor top_k is there, whatever the temperature. So what the request leaves out
    is sent with OpenAI's defaults, where ``capabilities.samples``. It takes no temperature of 0 and reads a top_p of 0
    as none: either 0, which means the likeliest token alone, becomes ``top_k`` 1.
    """
    defaults: Mapping[str, float | int] = _DEFAULTS if adapter.capabilities.samples else {}
    asked = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": None if sampling.top_k is None else max(0, sampling.top_k),
    }
    values = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
    if 0 in (sampling.temperature, sampling.top_p):
        values = {"top_k": 1}
    tensors = []
    for parameter in parameters:
        value = values.get(parameter.name)
        if value is not None and parameter.target is not None:
            check_range(parameter.name, value, parameter.datatype)
            tensors.append(adapter.tensor(parameter.target, value))
    return tensors


def prompt_limit(engine: ModelConfig | None) -> int | None:
    """
    Return a number of tokens that no prompt of *engine* can exceed, where its config or its files tell one.

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
        content = msgspec.json.decode(Path(folder, "config.json").read_bytes(), type=dict) if folder else {}
    except (OSError, ValueError):
        # The path is one of the server's machine.
        return {}
    built = content.get("build_config", content.get("builder_config"))
    return built if isinstance(built, dict) else {}


def _positive(value: int | str | None) -> int | None:
    try:
        number = int(value or 0)
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None


def guides(config: ModelConfig, engine: ModelConfig | None) -> frozenset[str]:
    """
    Return the guides that the *engine* behind the model *config* is set up for.

    Without ``guided_decoding_backend`` the engine ignores a guide, and an answer that looks constrained and is not
    would be worse than a refusal.
    """
    if not {"guided_decoding_guide_type", "guided_decoding_guide"} <= config.inputs.keys():
        return frozenset()
    if engine is not None and engine.parameter("guided_decoding_backend") is None:
        return frozenset()
    return frozenset(_GUIDE_TYPES)


def guide_tensors(adapter: Adapter, guide: Guide | None) -> list[Tensor]:
    """Return the inputs that hold the answer to *guide*."""
    if guide is None:
        return []
    tensors = [adapter.tensor("guided_decoding_guide_type", _GUIDE_TYPES[guide.kind])]
    if guide.kind == "choice":
        # The engine has no choices, but a regular expression of their literal texts is the same language.
        choices = msgspec.json.decode(guide.value, type=list[str])
        pattern = "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices)
        tensors.append(adapter.tensor("guided_decoding_guide", f"({pattern})"))
    elif guide.kind != "json":
        tensors.append(adapter.tensor("guided_decoding_guide", guide.value))
    return tensors


def stop_request(engine: ModelConfig, generation_id: str) -> InferRequest | None:
    """
    Return the request that makes *engine* end the request of the same id, ``None`` where it takes none.

    Its answer is one empty final response.
    """
    if "stop" not in engine.inputs:
        return None
    values = {"input_ids": 0, "input_lengths": 0, "request_output_len": 0, "stop": True}
    return InferRequest(
        model=engine.name,
        id=generation_id,
        inputs=tuple(
            Tensor(name, spec.datatype, engine.wire_shape(spec, 1), (value,))
            for name, value in values.items()
            if (spec := engine.inputs.get(name)) is not None
        ),
        stream=engine.decoupled,
    )


class CacheReport(msgspec.Struct, frozen=True):
    """The input that asks for the use of the cache, and the output with the number of blocks that were there."""

    flag: str
    output: str


_REPORTS = (
    CacheReport("return_perf_metrics", "kv_cache_reused_blocks"),
    # 0.16 to 0.18.
    CacheReport("return_kv_cache_reuse_stats", "kv_cache_reused_blocks"),
    # The LLM API's model.
    CacheReport("sampling_param_return_perf_metrics", "kv_cache_reused_block"),
)


def cache_report(config: ModelConfig) -> CacheReport | None:
    """Return how the model tells the use of its cache, ``None`` where it does not."""
    return next((each for each in _REPORTS if each.flag in config.inputs and each.output in config.outputs), None)


class CachedTokens:
    """Reads the tokens of a prompt that came from the cache; *block_size* is how many a block holds."""

    def __init__(self, output: str, block_size: int) -> None:
        self._output = output
        self._block_size = block_size

    @classmethod
    def of(cls, report: CacheReport | None, generation: Generation) -> CachedTokens | None:
        """Return the reader for *generation*, or ``None`` where the cache's use or its block size is not known."""
        size = generation.kv_cache_block_size
        return None if report is None or size is None else cls(report.output, size)

    def __call__(self, response: InferResponse) -> int | None:
        """
        Return the tokens, ``None`` for a response that does not tell: only the last one does.

        The LLM API's model sends the number as text. A last block counts whole, however few tokens are in it.
        """
        blocks = response.numbers(self._output)
        if not blocks:
            return None
        try:
            return int(blocks[0]) * self._block_size
        except ValueError as error:
            raise UpstreamError(f"The model sent a malformed '{self._output}' output.") from error


#: The parameter by which a BLS knows its encoders; without it, its image inputs lead nowhere.
ENCODERS_NAME = "multimodal_encoders_name"
# The other two take decoded pixels. This one takes addresses too, but those the backend would fetch from anywhere.
_INPUT = "image_url_input"
_EXTRA_ID = "prompt_table_extra_id"
# The only prefix that is not taken for an address; what the file really is, is found out from the file.
_PREFIX = "data:image/jpeg;base64,"


def takes_images(config: ModelConfig) -> bool:
    """Return whether image files can be sent to the model *config*, and go anywhere."""
    return _INPUT in config.inputs and (config.platform == "ensemble" or config.parameter(ENCODERS_NAME) is not None)


def max_images(config: ModelConfig) -> int | None:
    """Return how many images a prompt can have: one where the input holds one element, else unknown."""
    spec = config.inputs.get(_INPUT)
    return 1 if spec is not None and spec.dims == (1,) else None


def image_tensors(adapter: Adapter, engine: ModelConfig | None, images: Sequence[Image]) -> list[Tensor]:
    """
    Return the inputs for *images*.

    An engine that reuses its KV cache knows a prompt by its token ids, and those of all images are the same. Unless
    the images have an id, it answers about somebody else's. (Preprocessing for Qwen2-VL and Pixtral fails when it is
    given one: those cannot be served with reuse, and a refusal is better than another's image.)
    """
    if not images:
        return []
    tensors = [adapter.tensor(_INPUT, *(_PREFIX + image.base64 for image in images))]
    reuses = engine is not None and truthy(engine.parameter("enable_kv_cache_reuse"))
    if reuses and _EXTRA_ID in adapter.config.inputs:
        digest = 0
        for image in images:
            # One id for the row: the order of the images counts.
            digest = (digest * 31 + image.digest) % 2**63
        tensors.append(adapter.tensor(_EXTRA_ID, digest))
    return tensors


_TASK, _WEIGHTS, _CONFIG = "lora_task_id", "lora_weights", "lora_config"
_CONFIG_WIDTH = 3


def lora_format(config: ModelConfig) -> LoraFormat | None:
    """Return how the model takes weights, ``None`` where it takes no LoRA adapters."""
    if not {_TASK, _WEIGHTS, _CONFIG} <= config.inputs.keys():
        return None
    weights, table = config.inputs[_WEIGHTS], config.inputs[_CONFIG]
    if weights.datatype not in ("FP16", "BF16", "FP32") or table.datatype != "INT32":
        return None
    width = table.dims[-1] if table.dims else -1
    return LoraFormat(weights.datatype, width if width > 0 else _CONFIG_WIDTH)


def lora_tensors(adapter: Adapter, lora: Lora | None) -> list[Tensor]:
    """Return the inputs that select *lora*, its weights among them if it has them."""
    if lora is None:
        return []
    if lora.number is None:
        raise ConfigurationError(f"The LoRA adapter '{lora.name}' has no task id.", param="model")
    tensors = [adapter.tensor(_TASK, lora.number)]
    if lora.weights is not None and lora.config is not None:
        tensors += [_matrix(adapter.config, _WEIGHTS, lora.weights), _matrix(adapter.config, _CONFIG, lora.config)]
    return tensors


def _matrix(config: ModelConfig, name: str, matrix: Matrix) -> Tensor:
    shape = (1, *matrix.shape) if config.batching else matrix.shape
    return Tensor(name, matrix.datatype, shape, matrix.data)
