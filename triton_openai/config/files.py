"""Files that others replace while the service runs: certificates, keys, tokens and the settings themselves."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IROTH, S_ISFIFO
from typing import Any, Generic, TypeVar

import structlog
import yaml

from triton_openai.errors import ConfigurationError

_log = structlog.get_logger(__name__)

_Value = TypeVar("_Value")

#: How often files are checked for changes, in seconds.
LOOK_SECONDS = 1.0


def state_folder() -> Path:
    """Return the folder for data that outlives the service, which may not exist yet."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "triton-openai"


class FileWatch:
    """
    Finds out when to read *paths* again: after each change, and until a reading succeeds.

    They are read in :meth:`reading`; else the reader reports its result with :meth:`used` or :meth:`failed`. *problem*
    is the event that the log gets for a failure, with *fields*. Make a watch before the first reading, so that no
    change in between is missed.
    """

    def __init__(self, paths: Sequence[Path | None], *, problem: str, **fields: Any) -> None:
        self.paths = [path for path in paths if path is not None]
        self._event = problem
        self._fields = fields
        self._reason: str | None = None
        # The state of the files when they were last read, and when they were last checked.
        self._read = self._signatures()
        self._looked = self._read

    def due(self, *, settled: bool = False) -> bool:
        """Return whether to read the files; if *settled*, once they look the same twice: their writer has finished."""
        signatures = self._signatures()
        steady = signatures == self._looked
        self._looked = signatures
        if signatures == self._read:
            return self._reason is not None
        if settled and not steady:
            return False
        self._read = signatures
        self._reason = None
        return True

    async def due_in_thread(self, *, settled: bool) -> bool:
        """Call :meth:`due` in a thread if there are files: their disk may be slow."""
        if self.paths:
            return await asyncio.to_thread(self.due, settled=settled)
        return self.due(settled=settled)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note how the block ends, which reads the files and takes over what they hold. Raises nothing."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the next change has to be noticed
            self.failed(error)
        else:
            self.used()

    def used(self) -> None:
        """Note that the files are in use."""
        self._reason = None

    def failed(self, error: Exception) -> None:
        """Log that the files cannot be used, once for each state of the files and each reason."""
        if isinstance(error, ConfigurationError):
            reason = error.message
        else:
            reason = str(error) or repr(error)
        if reason != self._reason:
            expected = isinstance(error, (ConfigurationError, OSError))
            _log.error(self._event, reason=reason, exc_info=None if expected else error, **self._fields)
        self._reason = reason

    def check(self, what: str = "file") -> None:
        """Raise :class:`ConfigurationError` if one of the files, each a *what*, is a pipe: it can be read only once."""
        for path in self.paths:
            with suppress(OSError):
                if S_ISFIFO(path.stat().st_mode):
                    raise ConfigurationError(f"The {what} {path} is a pipe, which is read at the start only.")

    def _signatures(self) -> list[tuple[int, ...] | None]:
        return list(map(_signature, self.paths))


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return numbers that differ when the file has changed: another file (also behind a link), contents, or rights."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


class FromFiles(Generic[_Value]):
    """
    The value that *read* makes of *paths*, made again when one of them has changed.

    The first reading happens here, and raises what *read* raises. A later reading that fails is logged as *what*, and
    the value stays: a certificate is often replaced before its key.
    """

    def __init__(self, read: Callable[[], _Value], paths: Sequence[Path | None], *, what: str) -> None:
        self._read = read
        self._what = what
        self._files = FileWatch(paths, problem="changed files not used", what=what)
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._value = read()

    def current(self) -> _Value:
        """Return the newest value that could be read."""
        now = time.monotonic()
        if now < self._next_look:
            return self._value
        self._next_look = now + LOOK_SECONDS
        if self._files.due():
            with self._files.reading():
                self._files.check()
                self._value = self._read()
                _log.info("changed files in use", what=self._what)
        return self._value


def warn_if_readable_by_all(path: Path | None, what: str) -> None:
    """Log a warning if every user of this machine can read *path*, which is a *what* and holds secrets."""
    if readable_by_all(path):
        _log.warning(f"every user of this machine can read the {what}", file=str(path), advice=f"chmod o-rwx {path}")


def readable_by_all(path: Path | None) -> bool:
    """Return whether every user of this machine can read *path*, if there is such a file."""
    if path is None:
        return False
    try:
        return bool(path.stat().st_mode & S_IROTH)
    except OSError:
        return False


def read_file(path: Path, origin: str) -> bytes:
    """Return the contents of the file that the setting *origin* names. Raises :class:`ConfigurationError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The file {path} given by {origin} cannot be read: {error.strerror or error}."
        ) from error


def read_secret(path: Path, origin: str) -> str:
    """Return the first line of the file that the setting *origin* names. Raises :class:`ConfigurationError`."""
    try:
        secret = read_file(path, origin).decode("utf-8").partition("\n")[0].strip()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The file {path} given by {origin} is not text.") from error
    if not secret:
        raise ConfigurationError(f"The file {path} given by {origin} has nothing in its first line.")
    return secret


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping. Raises ``ConstructorError`` for a key that is there twice."""
        seen = set[str]()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(file: Path, what: str, *, secret: bool = False) -> Any:
    """Return what is in *file*, a *what*. Raises :class:`ConfigurationError`, which shows nothing of a *secret* one."""
    try:
        with file.open("rb") as stream:
            return yaml.load(stream, _Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigurationError(f"The {what} {file} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        problem = f"The {what} {file} is not valid YAML"
        if not secret:
            words = " ".join(str(error).split())
            raise ConfigurationError(f"{problem}: {words}.") from error
        # The message of YAML shows lines of the file, and so does the cause of an exception.
        mark = getattr(error, "problem_mark", None)
        if mark is not None:
            problem += f" in line {mark.line + 1}"
        raise ConfigurationError(f"{problem}.") from None
