"""
The LoRA adapters of a model, from the settings and from its repository: their names, and their files.

Files are in the format of ``hf_lora_convert.py``: ``model.lora_weights.npy`` (float16, float32, or bfloat16 as two-byte
void) of shape ``[1, rows, width]`` and ``model.lora_config.npy`` (int32) of shape ``[1, rows, 3]``: module, layer and
rank of each row, and in newer releases a fourth column that marks DoRA. numpy is imported only where there are files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from triton_openai.config.tree import LoraSettings, ModelSettings
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Lora, LoraFormat, Matrix

WEIGHTS = "model.lora_weights.npy"
CONFIG = "model.lora_config.npy"

_SIZES = {"FP16": 2, "BF16": 2, "FP32": 4}
# A message of gRPC ends at 2 GiB; the rest of the request is far smaller than this margin.
_MAX_BYTES = 2**31 - 2**24
_BF16_INFINITE = 0x7F80
_decode = msgspec.json.Decoder(dict[Annotated[str, msgspec.Meta(min_length=1)], str]).decode


class FoundLora(Lora, frozen=True, kw_only=True):
    """An adapter that can be served: by its name, by its number in the engine, or with files."""

    #: The folder with its files.
    folder: Path | None = None
    #: The folder that its files must not lead out of.
    root: Path | None = None

    def read(self, form: LoraFormat) -> Lora:
        """Return the adapter with its weights from its files. Raises :class:`ConfigurationError` for clients to see."""
        assert self.folder is not None and self.root is not None, "an adapter without files has no weights"  # noqa: PT018
        try:
            weights, config = load(self.folder, self.root, form)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"The weights of the LoRA adapter '{self.name}' cannot be read.", param="model", detail=error.message
            ) from error
        if self.number is None:
            number = number_of(weights, config)
        else:
            number = self.number
        return Lora(name=self.name, number=number, weights=weights, config=config)


def find_loras(
    model: str,
    settings: ModelSettings,
    repositories: Sequence[Path],
    takes: LoraFormat | Literal["name", "path"] | None,
    *,
    local: bool = False,
) -> tuple[list[FoundLora], list[str]]:
    """
    Return the adapters of *model*, and in sentences why others cannot be served. Reads files.

    *takes* is how the model takes them: by its name, by the path of files that it reads itself, or with
    weights in a format. *local* is whether Triton runs on this machine. Where the repository can be read here, the
    newest version's ``multi_lora.json`` counts too: a map of names to folders, which a server that takes names reads
    itself, and NVIDIA's OpenAI frontend for one that takes paths.
    """
    problems: list[str] = []
    listed = _listed(model, repositories, problems)
    entries = {entry.name: entry for entry in map(_entry, settings.loras)}
    base = settings.lora_dir or next(
        (repository / model for repository in repositories if (repository / model).is_dir()), None
    )

    def located(entry: LoraSettings) -> FoundLora:
        if takes == "path":
            return _on_server(entry, listed[entry.name][0] if entry.name in listed else None, local=local)
        if entry.ckpt_source is not None:
            raise ConfigurationError("the model does not read adapters itself, so it takes no ckpt_source")
        if not isinstance(takes, LoraFormat):
            if entry.task_id is not None or entry.path is not None:
                raise ConfigurationError("the model takes adapters by name, without task_id and path")
            return FoundLora(name=entry.name)
        if entry.path is not None:
            if base is None:
                raise ConfigurationError("its path needs a base: set lora_dir to the model's folder")
            path = entry.path
            root = base
            bases = [base]
        elif entry.name in listed:
            path, version = listed[entry.name]
            root = version.parent
            # Next to the file; or, as NVIDIA's documents have it, with the names of the folders above.
            bases = [version, root, root.parent, root.parent.absolute().parent]
        elif entry.task_id is not None:
            return FoundLora(name=entry.name, number=entry.task_id)
        else:
            raise ConfigurationError("the model needs its weights: give a path, or its task_id in the engine")
        folder = find_folder(path, root=root, bases=bases)
        check(folder, root, takes)
        return FoundLora(name=entry.name, number=entry.task_id, folder=folder, root=root)

    loras = []
    for name in (*entries, *sorted(listed.keys() - entries.keys())):
        try:
            loras.append(located(entries.get(name) or LoraSettings(name=name)))
        except ConfigurationError as error:
            problems.append(f"The LoRA adapter '{name}' is not served: {error.message}.")
    return loras, problems


def _on_server(entry: LoraSettings, listed: str | None, *, local: bool) -> FoundLora:
    """Return an adapter that the model reads itself. Raises :class:`ConfigurationError`."""
    path = entry.path or listed
    if path is None:
        raise ConfigurationError("the model reads it itself: give its path on Triton's machine")
    if not path.startswith("/"):
        raise ConfigurationError(f"its path {path!r} on Triton's machine has to be absolute")
    if local and not Path(path).exists():
        raise ConfigurationError(f"there is no folder {path!r}")
    if entry.task_id is None:
        number = _number(f"{entry.name} {path}".encode())
    else:
        number = entry.task_id
    return FoundLora(name=entry.name, number=number, path=path, ckpt_source=entry.ckpt_source)


def names_of(
    models: Iterable[str], settings: Callable[[str], ModelSettings], repositories: Sequence[Path], separator: str | None
) -> dict[str, str]:
    """Return the public names that adapters of *models* have once those are ready, each with its model. Reads files."""
    names: dict[str, str] = {}
    for model in models:
        # What is wrong with the file is reported when the model is there.
        for lora in (*(_entry(entry).name for entry in settings(model).loras), *_listed(model, repositories, [])):
            names[served_name(model, lora, separator)] = model
    return names


def served_name(model: str, lora: str, separator: str | None) -> str:
    """Return the public name of an adapter: ``MODEL<separator>LORA`` if there is a separator, else its own."""
    if separator:
        return f"{model}{separator}{lora}"
    return lora


def _entry(entry: str | LoraSettings) -> LoraSettings:
    if isinstance(entry, str):
        return LoraSettings(name=entry)
    return entry


def _listed(model: str, repositories: Sequence[Path], problems: list[str]) -> dict[str, tuple[str, Path]]:
    """Return path by name, and the folder of the version, of the newest ``multi_lora.json``."""
    for repository in repositories:
        versions = [path for path in (repository / model).glob("*/multi_lora.json") if path.parent.name.isdecimal()]
        if versions:
            newest = max(versions, key=lambda path: int(path.parent.name))
            try:
                return {name: (path, newest.parent) for name, path in _decode(newest.read_bytes()).items()}
            except (OSError, msgspec.MsgspecError) as error:
                problems.append(f"{newest} cannot be read: {error}.")
    return {}


def find_folder(path: str, *, root: Path, bases: Sequence[Path]) -> Path:
    """
    Return the folder that *path* means: absolute, or relative to the first of *bases* where there is one.

    Raises :class:`ConfigurationError` when there is none, or when it lies outside of *root*, links and ``..`` resolved.
    """
    try:
        inside = root.resolve(strict=True)
        folders = [folder for folder in ((base / path).resolve() for base in bases) if folder.is_dir()]
    # A loop of links is a RuntimeError before Python 3.13, a NUL a ValueError.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"its folder {path!r} cannot be read: {error}") from error
    for folder in folders:
        if folder.is_relative_to(inside):
            return folder
    if folders:
        raise ConfigurationError(f"its folder {path!r} lies outside of {root}")
    raise ConfigurationError(f"there is no folder {path!r} in {root}")


def check(folder: Path, root: Path, form: LoraFormat) -> None:
    """Look at the headers of the files in *folder*. Raises :class:`ConfigurationError` for what cannot be sent."""
    # A file that is mapped is as long as its header says.
    _arrays(folder, root, form, "r")


def load(folder: Path, root: Path, form: LoraFormat) -> tuple[Matrix, Matrix]:
    """
    Return weights and config in the format of the model. Blocks: it reads both files.

    Raises :class:`ConfigurationError` for files that are broken, or that hold numbers which the model's dtype does not.
    """
    # The headers first: a wrong one must not make room for what is not there. Then the contents, read: a mapped file
    # would end the process when the file becomes shorter.
    check(folder, root, form)
    weights, config = _arrays(folder, root, form, None)
    if config[:, form.config_width :].any():
        raise ConfigurationError("it is a DoRA adapter, and the model's lora_config has no column for that")
    config = config[:, : form.config_width]
    if (config < 0).any() or (config > 2**31 - 1).any():
        raise ConfigurationError(f"{CONFIG} holds numbers that are none of a module, layer or rank")
    return (
        Matrix(form.weights, weights.shape, _weight_bytes(weights, form.weights)),
        Matrix("INT32", config.shape, config.astype("<i4").tobytes()),
    )


def number_of(weights: Matrix, config: Matrix) -> int:
    """
    Return a number, from 1 to 2**63 - 1, that stands for these matrices and no others.

    An engine keeps what it was sent first under a number: one that is made from the contents never names other weights,
    whichever process sends them and however the list of adapters changes.
    """
    parts = []
    for matrix in (weights, config):
        parts += [f"{matrix.datatype} {matrix.shape}".encode(), matrix.data]
    return _number(*parts)


def _number(*parts: bytes) -> int:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") % (2**63 - 1) + 1


def _arrays(folder: Path, root: Path, form: LoraFormat, mode: Literal["r"] | None) -> tuple[Any, Any]:
    """Return both arrays, two-dimensional."""
    weights = _array(folder / WEIGHTS, root, mode)
    config = _array(folder / CONFIG, root, mode)
    if not (_is_bf16(weights.dtype) or (weights.dtype.kind == "f" and weights.dtype.itemsize in (2, 4))):
        raise ConfigurationError(f"{WEIGHTS} holds {weights.dtype} and not float16, bfloat16 or float32")
    if config.dtype.kind not in "iu":
        raise ConfigurationError(f"{CONFIG} holds {config.dtype} and not int32")
    if weights.shape[0] != config.shape[0]:
        raise ConfigurationError(f"{WEIGHTS} has {weights.shape[0]} rows and {CONFIG} has {config.shape[0]}")
    if config.shape[1] not in (form.config_width, form.config_width + 1):
        raise ConfigurationError(f"{CONFIG} has {config.shape[1]} columns where the model takes {form.config_width}")
    if weights.size * _SIZES[form.weights] > _MAX_BYTES:
        raise ConfigurationError(
            f"{WEIGHTS} is larger than a message to Triton can be; let the engine load it (lora_prefetch_dir)"
        )
    return weights, config


def _array(path: Path, root: Path, mode: Literal["r"] | None) -> Any:
    import numpy as np

    try:
        real = path.resolve()
        if not real.is_relative_to(root.resolve()):
            raise ConfigurationError(f"{path.name} is a link that leads out of {root}")
        if not real.is_file():
            raise ConfigurationError(f"there is no file {path.name} in {path.parent}")
        array = np.load(real, mmap_mode=mode, allow_pickle=False)
        if array.ndim == 3 and array.shape[0] == 1:
            shape = array.shape[1:]
        else:
            shape = array.shape
    except ConfigurationError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{path} is not an array that can be read: {reason}") from error
    if len(shape) != 2 or not all(shape):
        raise ConfigurationError(f"{path.name} has the shape {list(array.shape)} and not [rows, columns]")
    return array.reshape(shape)


def _is_bf16(dtype: Any) -> bool:
    # numpy has no such type: it is written as two bytes without a meaning.
    return bool(dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None)


def _weight_bytes(weights: Any, datatype: str) -> bytes:
    """Return the numbers as *datatype*, rounded to the nearest; none may become infinite."""
    import numpy as np

    bits = None
    if _is_bf16(weights.dtype):
        bits = np.ascontiguousarray(weights).view("<u2")
    if datatype == "BF16":
        finite = True
        if bits is None:
            wide = weights.astype("<f4").view("<u4")
            finite = np.isfinite(weights).all()
            bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")
        converted = bits
        finite = finite and ((bits & _BF16_INFINITE) != _BF16_INFINITE).all()
    else:
        if bits is None:
            numbers = weights
        else:
            numbers = (bits.astype("<u4") << 16).view("<f4")
        with np.errstate(over="ignore"):
            converted = numbers.astype("<f2" if datatype == "FP16" else "<f4")
        finite = np.isfinite(converted).all()
    if not finite:
        raise ConfigurationError(f"{WEIGHTS} holds values that are infinite or not a number as {datatype}")
    return bytes(converted.tobytes())
