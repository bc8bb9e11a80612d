"""Tiny Llama models with random weights, in the files of Hugging Face, with the demo's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VOCABULARY, _HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _INNER, _CONTEXT = 3072, 128, 4, 4, 2, 384, 2048
_HEAD = _HIDDEN // _HEADS
# Gives distributions that are neither flat nor one token.
_OUTPUT_SCALE = 0.25
_TOKENIZER = Path(__file__).parents[2] / "triton_openai" / "demo" / "tokenizer"

# With tool calls as the parser "hermes" reads them.
_TEMPLATE = """
{%- if not without_bos %}{{- bos_token }}{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- elif message.content %}{%- for part in message.content %}{{- part.text }}{%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- set function = {'name': call.function.name, 'arguments': call.function.arguments} %}
        {{- '<tool_call>\\n' + function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

Tensors = dict[str, NDArray[np.float32]]


def make_model(folder: Path, *, seed: int) -> None:
    """Write a model that generates text, or makes embeddings, by how it is served."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "max_position_embeddings": _CONTEXT,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        **special,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Without sampling defaults, which vLLM's server would take from here.
    (folder / "generation_config.json").write_text(json.dumps(special))
    _save(folder / "model.safetensors", _model(np.random.default_rng(seed)))
    for file in _TOKENIZER.iterdir():
        shutil.copy(file, folder)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "chat_template": _TEMPLATE.strip()}))


def make_lora(folder: Path, *, base: Path, seed: int) -> None:
    """Write a LoRA adapter of rank 8 of the model *base*."""
    folder.mkdir(parents=True, exist_ok=True)
    random, rank = np.random.default_rng(seed), 8
    tensors = {}
    for layer in range(_LAYERS):
        for name, width in (("q_proj", _HEADS * _HEAD), ("v_proj", _KV_HEADS * _HEAD)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _normal(random, rank, _HIDDEN, scale=0.2)
            tensors[f"{prefix}.lora_B.weight"] = _normal(random, width, rank, scale=0.5)
    _save(folder / "adapter_model.safetensors", tensors)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _model(random: np.random.Generator) -> Tensors:
    scale = _HIDDEN**-0.5
    tensors = {
        "model.embed_tokens.weight": _normal(random, _VOCABULARY, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": _normal(random, _VOCABULARY, _HIDDEN, scale=_OUTPUT_SCALE),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q_proj", _HEADS), ("k_proj", _KV_HEADS), ("v_proj", _KV_HEADS)):
            tensors[f"{prefix}.self_attn.{name}.weight"] = _normal(random, heads * _HEAD, _HIDDEN, scale=scale)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = _normal(random, _HIDDEN, _HEADS * _HEAD, scale=scale)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}.mlp.{name}.weight"] = _normal(random, _INNER, _HIDDEN, scale=scale)
        tensors[f"{prefix}.mlp.down_proj.weight"] = _normal(random, _HIDDEN, _INNER, scale=_INNER**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.ones(_HIDDEN, np.float32)
    return tensors


def _normal(random: np.random.Generator, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _save(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file: the length of a JSON header, the header, and the numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [place, place + tensor.nbytes]}
        place += tensor.nbytes
    head = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
