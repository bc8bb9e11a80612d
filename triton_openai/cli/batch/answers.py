"""The files of a run: the answers, the failed lines beside them, and the state from which a run continues."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from triton_openai.errors import ConfigurationError


class SentBatch(msgspec.Struct):
    """A batch that the run has made, or is about to make."""

    #: The number by which the run recognizes it at the service.
    number: int
    lines: int
    id: str = ""
    #: Whether its results are in the files.
    fetched: bool = False


class State(msgspec.Struct):
    """What a run needs to continue, beside its answers."""

    #: The digest of all requests.
    digest: str
    total: int
    #: A random name by which batches of the run are recognized.
    run: str
    #: The service, for batches that have not ended.
    url: str
    batches: list[SentBatch] = []
    #: Whether all lines were answered or have failed.
    finished: bool = False

    @property
    def open_batches(self) -> Sequence[SentBatch]:
        """The batches whose results are not in the files."""
        return [batch for batch in self.batches if not batch.fetched]


class _Result(msgspec.Struct):
    custom_id: str


_result = msgspec.json.Decoder(_Result).decode


def errors_path(output: Path) -> Path:
    """Return the file of the lines that failed, beside *output*."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")


def state_path(output: Path) -> Path:
    """Return the file of the state, beside *output*."""
    return output.with_name(f"{output.name}.state")


class ResultFile:
    """
    A file of results, to which whole lines are appended; *ids* are those of the lines that it has.

    What follows the last line break, where a process or a machine has ended, is cut off; what an *empty* file has is
    removed. One process may write it.
    """

    def __init__(self, path: Path, *, empty: bool = False) -> None:
        self.path = path
        self.ids: set[str] = set()
        try:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if empty:
                self.clear()
            self._read()
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise ConfigurationError(f"Another run writes {path}.") from error
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
        except ConfigurationError:
            self.close()
            raise

    def _read(self) -> None:
        end = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    self.ids.add(_result(line).custom_id)
                except msgspec.MsgspecError as error:
                    raise ConfigurationError(f"{self.path} is no file of answers: {error}.") from error
                end += len(line)
        os.ftruncate(self._descriptor, end)

    def add(self, custom_id: str, line: bytes) -> bool:
        """Append *line*, which ends with a line break; return ``False`` if there is one with its id."""
        if custom_id in self.ids:
            return False
        view = memoryview(line)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self.ids.add(custom_id)
        return True

    def sync(self) -> None:
        """Make what was written survive a failure of the machine."""
        os.fdatasync(self._descriptor)

    def clear(self) -> None:
        """Remove all lines."""
        os.ftruncate(self._descriptor, 0)
        self.ids.clear()

    def close(self) -> None:
        """Close the file; another run may write it then."""
        os.close(self._descriptor)

    def put_in_order(self, ids: Iterable[str]) -> None:
        """Write the lines in the order of *ids*, into a new file that takes the place of this one."""
        offsets: dict[str, tuple[int, int]] = {}
        temporary = self.path.with_name(f"{self.path.name}.ordered")
        with self.path.open("rb") as file, temporary.open("wb") as ordered:
            offset = 0
            for line in file:
                offsets[_result(line).custom_id] = (offset, len(line))
                offset += len(line)
            for custom_id in ids:
                if custom_id in offsets:
                    start, length = offsets[custom_id]
                    file.seek(start)
                    ordered.write(file.read(length))
            ordered.flush()
            os.fsync(ordered.fileno())
        temporary.replace(self.path)


class RunFiles:
    """The files of the run that writes *output*. ``None`` as :attr:`state`: nothing of the run is there."""

    def __init__(self, output: Path, *, overwrite: bool = False) -> None:
        self._path = state_path(output)
        self.errors_path = errors_path(output)
        self.state: State | None = None
        if not overwrite:
            self.state = self._load()
        if self.state is None and not overwrite:
            for path in (output, self.errors_path):
                if path.exists() and path.stat().st_size:
                    raise ConfigurationError(f"{path} exists. Name another output, or begin again with --overwrite.")
        new = self.state is None
        self.answers = ResultFile(output, empty=new)
        try:
            self.errors = ResultFile(self.errors_path, empty=new)
        except ConfigurationError:
            self.answers.close()
            raise

    def _load(self) -> State | None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"{self._path} cannot be read: {error.strerror}.") from error
        try:
            return msgspec.json.decode(content, type=State)
        except msgspec.MsgspecError as error:
            raise ConfigurationError(f"{self._path} is damaged. Begin again with --overwrite.") from error

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.close()
        if not self.errors.ids:
            self.errors_path.unlink(missing_ok=True)
        self.errors.close()

    def save(self) -> None:
        """Store the state. It is on the disk when this returns."""
        assert self.state is not None, "the run has begun"
        temporary = self._path.with_name(f"{self._path.name}.new")
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.state)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def has_result(self, custom_id: str) -> bool:
        """Return whether a line was answered or has failed."""
        return custom_id in self.answers.ids or custom_id in self.errors.ids

    def sync(self) -> None:
        """Make all results survive a failure of the machine."""
        self.answers.sync()
        self.errors.sync()

    def finish(self) -> None:
        """Note that all lines were answered or have failed. Without a failure, no state is kept."""
        assert self.state is not None, "the run has begun"
        self.sync()
        if self.errors.ids:
            self.state.finished = True
            self.save()
        else:
            self._path.unlink(missing_ok=True)
