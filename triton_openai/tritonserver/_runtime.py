"""Where a ``tritonserver`` comes from, and what it needs around it: the one from PyPI, or one that is installed."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_openai.errors import ConfigurationError
from triton_openai.tritonserver._interpreter import model_python


@dataclass(frozen=True, slots=True)
class Runtime:
    """A server that can be started: its binary, its environment, and its backends (None: the binary's own)."""

    binary: Path
    environment: Mapping[str, str]
    backends: Path | None


def installed_runtime(
    binary: Path, environment: Mapping[str, str], work_dir: Path, backends: Path | None = None
) -> Runtime:
    """Return the runtime of a ``tritonserver`` that stands on this machine; *backends* are added to its own."""
    if not binary.is_file():
        raise ConfigurationError(f"There is no tritonserver at {binary}.")
    if backends is None:
        return Runtime(binary, environment, None)
    folder = _fresh(work_dir / "backends")
    for source in (binary.resolve().parent.parent / "backends", backends):
        _link_children(source, folder)
    return Runtime(binary, environment, folder)


def packaged_runtime(environment: Mapping[str, str], work_dir: Path, backends: Path | None = None) -> Runtime:
    """
    Return the runtime of the server inside the ``nvidia-pytriton`` package, laid out under *work_dir*.

    Nothing is written into site-packages. Raises `ConfigurationError` when the
    package, the platform or a Python for the models is missing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigurationError(
            "The embedded Triton runs on Linux on x86_64 only. Start a Triton elsewhere and use --triton-url."
        )
    server, libraries = _package()
    stubs = server / "python_backend_stubs"
    bundled = [
        f"3.{path.name.split('.')[1]}" for path in libraries.glob("libpython3-*.so.1.0") if path.name.count(".") > 1
    ]
    python = model_python(stubs, environment, work_dir, bundled)
    folder = _fresh(work_dir / "backends")
    backend = folder / "python"
    # Copied: Triton refuses a backend's library that is a link to somewhere outside the backend's folder.
    shutil.copytree(server / "backends" / "python", backend, ignore=shutil.ignore_patterns("__pycache__"))
    (backend / "triton_python_backend_stub").unlink(missing_ok=True)
    (backend / "triton_python_backend_stub").symlink_to(stubs / python.version / "triton_python_backend_stub")
    if backends is not None:
        _link_children(backends, folder)
    inherited = {key: value for key, value in environment.items() if key not in ("PYTHONHOME", "PYTHONPATH")}
    return Runtime(
        binary=server / "bin" / "tritonserver",
        environment={
            **inherited,
            "PATH": _joined(python.bin, environment.get("PATH", "")),
            # The backend is a copy in another place, from where it does not find the libraries that lie beside it.
            "LD_LIBRARY_PATH": _joined(libraries, *python.library_path, environment.get("LD_LIBRARY_PATH", "")),
            # Models are read from folders that may not be writable, and leave nothing behind in those that are.
            "PYTHONDONTWRITEBYTECODE": "1",
            # One process per model instance: a thread pool in each of them would only fight over the cores.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        backends=folder,
    )


def _package() -> tuple[Path, Path]:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        own = f"{sys.version_info[0]}.{sys.version_info[1]}"
        newer = (
            "" if sys.version_info < (3, 13) else f" in Python 3.11 or 3.12 (this is {own}, which it has no wheel for)"
        )
        raise ConfigurationError(
            "The embedded Triton comes with the package nvidia-pytriton, which is not installed:"
            f" pip install 'triton-openai[demo]'{newer}, or put a tritonserver on PATH, or use --triton-url."
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    server = package / "tritonserver"
    if not (server / "bin" / "tritonserver").is_file():
        raise ConfigurationError(
            f"The package nvidia-pytriton in {package.parent} carries no tritonserver; install its Linux wheel:"
            " pip install --force-reinstall --only-binary :all: nvidia-pytriton"
        )
    return server, package.parent / "nvidia_pytriton.libs"


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _link_children(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ConfigurationError(f"There is no folder of backends at {source}.")
    for child in source.iterdir():
        if child.name != "__pycache__":
            (target / child.name).unlink(missing_ok=True)
            (target / child.name).symlink_to(child.resolve())


def _joined(*parts: Path | str) -> str:
    return ":".join(str(part) for part in parts if str(part))
