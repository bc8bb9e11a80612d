"""
The files of a LoRA adapter whose weights go with requests: where they may lie, and what they must hold.

``hf_lora_convert.py``, whose format this is, writes ``model.lora_weights.npy`` (float16, float32, or bfloat16 as
two-byte void) of shape ``[1, rows, width]`` and ``model.lora_config.npy`` (int32) of shape ``[1, rows, 3]``: module,
layer and rank of each row, and in newer releases a fourth column that marks DoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from triton_openai.errors import ConfigurationError
from triton_openai.generation import LoraFormat, Matrix

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"

_SIZES = {"FP16": 2, "BF16": 2, "FP32": 4}
# A message of gRPC ends at 2 GiB; the rest of the request is far smaller than this margin.
_MAX_BYTES = 2**31 - 2**24
_BF16_INFINITE = 0x7F80


def find_folder(path: str, *, root: Path, bases: Sequence[Path]) -> Path:
    """
    Return the folder that *path* means: absolute, or relative to the first of *bases* where there is one.

    Raises :class:`ConfigurationError` when there is none, or when it lies outside of *root* once every link and ``..``
    is resolved.
    """
    outside = False
    try:
        inside = root.resolve(strict=True)
        for base in bases:
            folder = (base / path).resolve()
            if not folder.is_dir():
                continue
            if folder.is_relative_to(inside):
                return folder
            outside = True
    # A loop of links is a RuntimeError before Python 3.13, a NUL a ValueError.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"its folder {path!r} cannot be looked at: {error}") from error
    if outside:
        raise ConfigurationError(f"its folder {path!r} lies outside of {root}")
    raise ConfigurationError(f"there is no folder {path!r} in {root}")


def check(folder: Path, root: Path, wanted: LoraFormat) -> None:
    """Look at the headers of the files in *folder*. Raises :class:`ConfigurationError` for what cannot be sent."""
    _arrays(folder, root, wanted, _mapped)


def load(folder: Path, root: Path, wanted: LoraFormat) -> tuple[Matrix, Matrix]:
    """
    Return weights and config as the model wants them; reads all of both files, so not for the event loop.

    Raises :class:`ConfigurationError` for files that are broken, or that hold numbers which the model's dtype does not.
    """
    # The headers first: a wrong one must not make room for what is not there.
    check(folder, root, wanted)
    weights, config = _arrays(folder, root, wanted, _contents)
    rows = _config_rows(config, wanted)
    return (
        Matrix(wanted.weights, (weights.shape[0], weights.shape[1]), _weight_bytes(weights, wanted.weights)),
        Matrix("INT32", (rows.shape[0], rows.shape[1]), rows.astype("<i4").tobytes()),
    )


def number_of(weights: Matrix, config: Matrix) -> int:
    """
    Return a number, from 1 to 2**63 - 1, that stands for these matrices and no others.

    An engine keeps what it was sent first under a number: one that is made from the contents never names other weights,
    whichever process sends them and however the list of adapters changes.
    """
    digest = blake2b(digest_size=8)
    for matrix in (weights, config):
        digest.update(f"{matrix.datatype} {matrix.shape}".encode())
        digest.update(matrix.data)
    return int.from_bytes(digest.digest(), "little") % (2**63 - 1) + 1


def _arrays(folder: Path, root: Path, wanted: LoraFormat, read: Callable[[Path], Any]) -> tuple[Any, Any]:
    """Return both arrays, two-dimensional."""
    weights, config = _array(folder / WEIGHTS, root, read), _array(folder / CONFIG, root, read)
    if not (_is_bf16(weights.dtype) or (weights.dtype.kind == "f" and weights.dtype.itemsize in (2, 4))):
        raise ConfigurationError(f"{WEIGHTS} holds {weights.dtype} and not float16, bfloat16 or float32")
    if config.dtype.kind not in "iu":
        raise ConfigurationError(f"{CONFIG} holds {config.dtype} and not int32")
    if weights.shape[0] != config.shape[0]:
        raise ConfigurationError(f"{WEIGHTS} has {weights.shape[0]} rows and {CONFIG} has {config.shape[0]}")
    if config.shape[1] not in (wanted.config_width, wanted.config_width + 1):
        raise ConfigurationError(f"{CONFIG} has {config.shape[1]} columns where the model takes {wanted.config_width}")
    if weights.size * _SIZES[wanted.weights] > _MAX_BYTES:
        raise ConfigurationError(
            f"{WEIGHTS} is larger than a message to Triton can be; have the engine read it itself (lora_prefetch_dir)"
        )
    return weights, config


def _array(path: Path, root: Path, read: Callable[[Path], Any]) -> Any:
    try:
        real = path.resolve()
        if not real.is_relative_to(root.resolve()):
            raise ConfigurationError(f"{path.name} is a link that leads out of {root}")
        if not real.is_file():
            raise ConfigurationError(f"there is no file {path.name} in {path.parent}")
        array = read(real)
    except ConfigurationError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{path} is no array that can be read: {reason}") from error
    shape = array.shape[1:] if array.ndim == 3 and array.shape[0] == 1 else array.shape
    if len(shape) != 2 or not all(shape):
        raise ConfigurationError(f"{path.name} has the shape {list(array.shape)} and not [rows, columns]")
    return array.reshape(shape)


def _mapped(path: Path) -> Any:
    """Return the array without reading it; its file is as long as its header says."""
    # Never a pickle: what would have to be unpickled cannot be mapped.
    return np.lib.format.open_memmap(path, mode="r")  # type: ignore[no-untyped-call]


def _contents(path: Path) -> Any:
    """Return the array, read: a mapped one would take the process with it when somebody shortens the file."""
    with path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[no-untyped-call]


def _is_bf16(dtype: Any) -> bool:
    # numpy has no such type: it is written as two bytes without a meaning.
    return bool(dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None)


def _config_rows(config: Any, wanted: LoraFormat) -> Any:
    if config.shape[1] > wanted.config_width:
        if np.any(config[:, wanted.config_width :]):
            raise ConfigurationError("it is a DoRA adapter, and the model's lora_config has no column for that")
        config = config[:, : wanted.config_width]
    if np.any(config < 0) or np.any(config > 2**31 - 1):
        raise ConfigurationError(f"{CONFIG} holds numbers that are none of a module, layer or rank")
    return config


def _weight_bytes(weights: Any, datatype: str) -> bytes:
    """Return the numbers as *datatype*, rounded to the nearest; none may become infinite."""
    bits = np.ascontiguousarray(weights).view("<u2") if _is_bf16(weights.dtype) else None
    if datatype == "BF16":
        if bits is None:
            wide = weights.astype("<f4").view("<u4")
            _only_finite(np.isfinite(weights), datatype)
            bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")
        _only_finite((bits & _BF16_INFINITE) != _BF16_INFINITE, datatype)
        return bytes(bits.tobytes())
    numbers = weights if bits is None else (bits.astype("<u4") << 16).view("<f4")
    with np.errstate(over="ignore"):
        converted = numbers.astype("<f2" if datatype == "FP16" else "<f4")
    _only_finite(np.isfinite(converted), datatype)
    return bytes(converted.tobytes())


def _only_finite(finite: Any, datatype: str) -> None:
    if not finite.all():
        raise ConfigurationError(f"{WEIGHTS} holds values that are infinite or no number as {datatype}")
