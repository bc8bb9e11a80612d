"""LoRA adapters as TensorRT-LLM's converter writes them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np


def write_lora(folder: Path, *, rows: int = 3, width: int = 8, dtype: Any = np.float16, columns: int = 3) -> Path:
    """Write an adapter of random weights into *folder*, which is made, and return that."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(secrets.randbits(64))
    np.save(folder / "model.lora_weights.npy", random.standard_normal((1, rows, width)).astype(dtype))
    config = np.zeros((1, rows, columns), np.int32)
    config[0, :, 1] = range(rows)
    config[0, :, 2] = 4
    np.save(folder / "model.lora_config.npy", config)
    return folder
