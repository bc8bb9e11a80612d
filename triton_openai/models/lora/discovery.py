"""The LoRA adapters of a model, from the settings and from its repository, and the names they are served under."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from triton_openai.config.tree import LoraSettings, ModelSettings
from triton_openai.errors import ConfigurationError
from triton_openai.generation import Lora, LoraFormat

_decode = msgspec.json.Decoder(dict[Annotated[str, msgspec.Meta(min_length=1)], str]).decode


class FoundLora(msgspec.Struct, frozen=True, kw_only=True):
    """
    An adapter that can be served: by its *name*, by a *number* that the engine knows, or with the files in *folder*.

    *root* is the folder that its files must not lead out of.
    """

    name: str
    number: int | None = None
    folder: Path | None = None
    root: Path | None = None

    def read(self, wanted: LoraFormat) -> Lora:
        """Return it with its weights. Reads files; raises :class:`ConfigurationError` that clients may see."""
        assert self.folder is not None, "an adapter without files has no weights"
        assert self.root is not None, "an adapter without files has no weights"
        from triton_openai.models.lora.files import load, number_of  # numpy: only where there are files

        try:
            weights, config = load(self.folder, self.root, wanted)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"The weights of the LoRA adapter '{self.name}' cannot be read.", param="model", detail=error.message
            ) from error
        number = number_of(weights, config) if self.number is None else self.number
        return Lora(name=self.name, number=number, weights=weights, config=config)


def find_loras(
    model: str, settings: ModelSettings, repositories: Sequence[Path], wanted: LoraFormat | None
) -> tuple[list[FoundLora], list[str]]:
    """
    Return the adapters of *model*, and in sentences why others cannot be served. Reads files.

    *wanted* is how the model takes weights, ``None`` for one that knows its adapters by name. Where the repository can
    be read here, the newest version's ``multi_lora.json`` counts too: a map of names to folders, which the server of
    the former reads itself, and NVIDIA's OpenAI frontend for the latter.
    """
    problems: list[str] = []
    listed = _listed(model, repositories, problems)
    entries = {entry.name: entry for entry in map(_entry, settings.loras)}
    folders = [settings.lora_dir] if settings.lora_dir is not None else []
    folders += [repository / model for repository in repositories if (repository / model).is_dir()]
    found = []
    for name in (*entries, *sorted(listed.keys() - entries.keys())):
        entry = entries.get(name, LoraSettings(name=name))
        try:
            if wanted is None:
                if entry.task_id is not None or entry.path is not None:
                    raise ConfigurationError("the model takes adapters by name, without task_id and path")
                found.append(FoundLora(name=name))
            elif entry.path is not None:
                found.append(_with_files(entry, entry.path, folders[:1], folders[:1], wanted))
            elif name in listed:
                path, version = listed[name]
                folder = version.parent
                # Next to the file; or, as NVIDIA's documents have it, with the names of the folders above.
                around = [version, folder, folder.parent, folder.parent.absolute().parent]
                found.append(_with_files(entry, path, [folder], around, wanted))
            elif entry.task_id is not None:
                found.append(FoundLora(name=name, number=entry.task_id))
            else:
                raise ConfigurationError(
                    "the model needs its weights: give a path, or the task_id that its engine knows"
                )
        except ConfigurationError as error:
            problems.append(f"The LoRA adapter '{name}' is not served: {error.message}.")
    return found, problems


def names_of(
    models: Iterable[str], settings: Callable[[str], ModelSettings], repositories: Sequence[Path], separator: str | None
) -> dict[str, str]:
    """Return the public names that adapters of *models* have once those are ready, each with its model. Reads files."""
    found: dict[str, str] = {}
    for model in models:
        # What is wrong with the file is told when the model is there.
        for lora in (*(_entry(entry).name for entry in settings(model).loras), *_listed(model, repositories, [])):
            found.update(dict.fromkeys(served_names(model, lora, separator), model))
    return found


def served_names(model: str, lora: str, separator: str | None) -> Iterator[str]:
    """
    Yield the public names of an adapter: ``MODEL<separator>LORA`` where there is a separator, and its own, as vLLM's
    server has it.
    """
    if separator:
        yield f"{model}{separator}{lora}"
    yield lora


def _entry(entry: str | LoraSettings) -> LoraSettings:
    return LoraSettings(name=entry) if isinstance(entry, str) else entry


def _with_files(
    entry: LoraSettings, path: str, roots: Sequence[Path], bases: Sequence[Path], wanted: LoraFormat
) -> FoundLora:
    from triton_openai.models.lora.files import check, find_folder  # numpy: only where there are files

    if not roots:
        raise ConfigurationError("its path needs a folder to be in: give the model's folder as lora_dir")
    root = roots[0]
    folder = find_folder(path, root=root, bases=bases)
    check(folder, root, wanted)
    return FoundLora(name=entry.name, number=entry.task_id, folder=folder, root=root)


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
