"""
The files in which the workers of a service keep their metrics, so that each can answer a scrape for all.

They have the format of ``prometheus_client``'s multiprocess mode; the worker that answers a scrape adds them up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import mark_process_dead

from triton_openai.errors import ConfigurationError

_log = structlog.get_logger(__name__)

# Room for the series of 64 Tritons with three models each, in either file.
_ENDPOINT_BYTES = 256 * 1024
# The position of the labels in the key of a number: JSON of the metric, the sample, the labels and the help text.
_LABELS_POSITION = 2


def prepare_files(folder: Path, index: int) -> bool:
    """
    Make the files in *folder* in which worker *index* keeps its numbers; return whether it had files already.

    The workers' parent sets ``PROMETHEUS_MULTIPROC_DIR`` to this folder, for ``prometheus_client``. Files belong to a
    worker's index, not to its process id: the process that replaces a dead worker goes on with its counters. Raises
    :class:`ConfigurationError`.
    """
    files = [folder / f"{kind}_{index}.db" for kind in ("counter", "gauge_livesum", "histogram")]
    replaces = files[0].exists()
    try:
        forget_worker(folder, index)
        for path in files:
            # Room for some hundred histograms.
            _allocate(path, 1024 * 1024)
        for path in endpoint_files(folder, index).values():
            _allocate(path, _ENDPOINT_BYTES)
    except OSError as error:
        raise ConfigurationError(f"Metrics cannot be kept in {folder}: {error.strerror or error}.") from error
    return replaces


def forget_worker(folder: Path, index: int) -> None:
    """Drop the gauges of a dead worker; its counters stay. Called by the process that supervises it."""
    mark_process_dead(index, str(folder))
    mark_process_dead(f"endpoints_{index}", str(folder))


def endpoint_files(folder: Path, index: int) -> Mapping[str, Path]:
    """Return where worker *index* keeps the series of Tritons, by the kind of metric."""
    return {
        "counter": folder / f"counter_endpoints_{index}.db",
        "gauge": folder / f"gauge_livesum_endpoints_{index}.db",
    }


def _allocate(path: Path, size: int) -> None:
    """
    Make a file of *size* bytes at least. On a full disk, a write into a sparse file would kill the process.

    Other processes read the file, and ``prometheus_client`` reads none that is empty: they see it when it has its size.
    """
    target = path
    if not path.exists():
        target = path.with_suffix(".new")
        target.unlink(missing_ok=True)
    with target.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    target.replace(path)


class EndpointFile:
    """A file with the series of Tritons. It can drop series, which the files of ``prometheus_client`` cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = MmapedDict(str(path))

    def __del__(self) -> None:
        self._numbers.close()

    def get(self, key: str) -> float:
        """Return the number of *key*, 0 for a new one."""
        return float(self._numbers.read_value(key)[0])

    def set(self, key: str, number: float) -> None:
        """Set the number of *key*."""
        self._numbers.write_value(key, number, 0.0)

    def keep_endpoints(self, endpoints: Collection[str]) -> None:
        """Drop the series of all Tritons but *endpoints*, in one step for other processes that read the file."""
        entries = [(key, value) for key, value, _ in self._numbers.read_all_values()]
        kept = [entry for entry in entries if json.loads(entry[0])[_LABELS_POSITION]["endpoint"] in endpoints]
        if len(kept) == len(entries):
            return
        new = self._path.with_suffix(".new")
        try:
            new.unlink(missing_ok=True)
            _allocate(new, _ENDPOINT_BYTES)
        except OSError as error:
            _log.warning("series of Tritons that have left stay in the metrics", reason=str(error))
            return
        numbers = MmapedDict(str(new))
        for key, value in kept:
            numbers.write_value(key, value, 0.0)
        new.replace(self._path)
        self._numbers.close()
        self._numbers = numbers


class EndpointCell(NamedTuple):
    """One number in a file."""

    file: EndpointFile
    key: str

    def get(self) -> float:
        return self.file.get(self.key)

    def set(self, number: float) -> None:
        self.file.set(self.key, number)


class SharedNumbers(list[float]):
    """Numbers that are also in *cells* of the files that all workers read."""

    def __init__(self, cells: Sequence[Any]) -> None:
        super().__init__(cell.get() for cell in cells)
        self._cells = cells

    def __setitem__(self, index: Any, number: Any) -> None:
        super().__setitem__(index, number)
        self._cells[index].set(number)
