"""The ``tritonserver`` to start, from PyPI or installed on this machine, and the environment that it needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_openai.errors import ConfigurationError, install_advice

_STUB = "triton_python_backend_stub"


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
    folder = work_dir / "backends"
    for source in (binary.resolve().parent.parent / "backends", backends):
        _link_children(source, folder)
    return Runtime(binary, environment, folder)


def packaged_runtime(environment: Mapping[str, str], work_dir: Path, backends: Path | None = None) -> Runtime:
    """
    Return the runtime of the server inside the ``nvidia-pytriton`` package, laid out under the empty *work_dir*.

    Nothing is written into site-packages. The service's own Python runs the models: Triton's stub embeds it. Raises
    :class:`ConfigurationError` when the package, the platform or that Python does not fit.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigurationError(
            "The embedded Triton runs on Linux on x86_64 only. Start a Triton elsewhere and use --triton-url."
        )
    server, libraries = _package()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = server / "python_backend_stubs" / version / _STUB
    library_path = [libraries, *_libpython(version)]
    problem = _misfit(version, stub, library_path)
    if problem is not None:
        raise ConfigurationError(
            f"The embedded Triton cannot run its models: {problem} ({sys.executable}). Install this service in Python "
            f"3.11 or 3.12 with a shared library (Debian: libpython3.11): {install_advice('demo')}. "
            "It brings 'numpy<2'."
        )
    folder = work_dir / "backends"
    backend = folder / "python"
    # Copied: Triton refuses a backend's library that is a link to somewhere outside the backend's folder.
    shutil.copytree(server / "backends" / "python", backend, ignore=shutil.ignore_patterns(_STUB))
    (backend / _STUB).symlink_to(stub)
    if backends is not None:
        _link_children(backends, folder)
    # The stub finds its packages through the python3 that stands first on PATH, and ignores Python's variables.
    python = work_dir / "python"
    venv.create(python, symlinks=True)
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (python / "lib" / f"python{version}" / "site-packages" / "service.pth").write_text("\n".join(packages))
    return Runtime(
        binary=server / "bin" / "tritonserver",
        environment={
            **{key: value for key, value in environment.items() if key not in ("PYTHONHOME", "PYTHONPATH")},
            "PATH": _joined(python / "bin", environment.get("PATH", "")),
            # The backend is a copy in another place, from where it does not find the libraries that lie beside it.
            "LD_LIBRARY_PATH": _joined(*library_path, environment.get("LD_LIBRARY_PATH", "")),
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
    """Return the folder of the server in its package, and that of the libraries beside it."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        advice = install_advice("demo")
        if sys.version_info >= (3, 13):
            own = f"{sys.version_info[0]}.{sys.version_info[1]}"
            advice += f" in Python 3.11 or 3.12 (this is {own}, for which it has no wheel)"
        raise ConfigurationError(
            "The embedded Triton comes with the package nvidia-pytriton, which is not installed:"
            f" {advice}, or put a tritonserver on PATH, or use --triton-url."
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    server = package / "tritonserver"
    if not (server / "bin" / "tritonserver").is_file():
        raise ConfigurationError(
            f"The package nvidia-pytriton in {package.parent} carries no tritonserver; install its Linux wheel:"
            " pip install --force-reinstall --only-binary :all: nvidia-pytriton"
        )
    return server, package.parent / "nvidia_pytriton.libs"


def _libpython(version: str) -> list[Path]:
    """Return the folders that may hold this interpreter's shared library."""
    folder = Path(sysconfig.get_config_var("LIBDIR") or "")
    # Debian keeps libraries in a folder of the architecture below the one it names.
    folders = (folder, folder / (sysconfig.get_config_var("MULTIARCH") or ""), Path(sys.base_prefix, "lib"))
    return [folder for folder in dict.fromkeys(folders) if (folder / f"libpython{version}.so.1.0").is_file()]


def _misfit(version: str, stub: Path, library_path: list[Path]) -> str | None:
    """Return why Triton's stub cannot embed this Python, None if it can."""
    if not stub.is_file():
        return f"nvidia-pytriton has no stub for Python {version}"
    # The package brings one library itself: libpython3-<hash>.13.so.1.0.
    bundled = any(library_path[0].glob(f"libpython3-*.{version.partition('.')[2]}.so.1.0"))
    if len(library_path) == 1 and not bundled:
        return f"Python {version} has no libpython{version}.so.1.0"
    # The stub was built against NumPy 1 and crashes on text with NumPy 2.
    numpy = importlib.metadata.version("numpy")
    if int(numpy.partition(".")[0]) >= 2:
        return f"NumPy is {numpy}, and not 'numpy<2'"
    return None


def _link_children(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ConfigurationError(f"There is no folder of backends at {source}.")
    target.mkdir(parents=True, exist_ok=True)
    for child in source.iterdir():
        if child.name != "__pycache__":
            (target / child.name).unlink(missing_ok=True)
            (target / child.name).symlink_to(child.resolve())


def _joined(*parts: Path | str) -> str:
    return ":".join(str(part) for part in parts if str(part))
