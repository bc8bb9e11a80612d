"""
LoRA adapters of TensorRT-LLM: by number, and with weights and config when the engine does not have them yet.

Source of the facts: ``all_models/inflight_batcher_llm`` of tensorrtllm_backend 0.8 to 0.19 and of TensorRT-LLM since
0.20, and the executor's cache: what it has under a number stays, whatever weights a later request brings.
"""

from __future__ import annotations

from triton_openai.adapters.base import Adapter
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Lora, LoraFormat, Matrix
from triton_openai.triton.tensors import ModelConfig, Tensor

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
