"""
Which Python runs the models of the embedded Triton.

Triton's Python backend has one stub per Python version. The stub *embeds* Python: it needs ``libpythonX.Y.so`` and
finds its packages through the ``python3`` that stands first on ``PATH``. It was built against NumPy 1 and crashes on
text with NumPy 2. The service's own interpreter runs the models if it fits, else another one on ``PATH`` that does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton_openai.errors import ConfigurationError

# Looked for on PATH, in this order, when the service's own interpreter does not fit. NumPy 1 has no build for 3.13.
_VERSIONS = ("3.12", "3.11")

_PROBE = """
import importlib.metadata, importlib.util, json, os, sys, sysconfig
lib = sysconfig.get_config_var("LIBDIR") or ""
# Debian keeps libraries in a folder of the architecture below the one it names.
multiarch = os.path.join(lib, sysconfig.get_config_var("MULTIARCH") or "")
try:
    numpy = importlib.metadata.version("numpy")
except importlib.metadata.PackageNotFoundError:
    numpy = None
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "executable": sys.executable,
    "base": os.path.join(sys.base_prefix, "bin"),
    "libraries": [d for d in (lib, multiarch, os.path.join(sys.base_prefix, "lib")) if d],
    "packages": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
    "numpy": numpy,
    "tokenizers": importlib.util.find_spec("tokenizers") is not None,
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python installation as the stub needs to know it."""

    version: str
    executable: Path
    base: Path
    libraries: tuple[Path, ...]
    packages: tuple[Path, ...]
    numpy: str | None
    tokenizers: bool

    def library_path(self) -> tuple[Path, ...]:
        """Return the folders that hold this interpreter's shared library, none when it has none."""
        name = f"libpython{self.version}.so.1.0"
        return tuple(dict.fromkeys(folder for folder in self.libraries if (folder / name).is_file()))


@dataclass(frozen=True, slots=True)
class ModelPython:
    """What the stub is given: its version, the folder of its ``python3``, and where ``libpython`` lies."""

    version: str
    bin: Path
    library_path: tuple[Path, ...]


def model_python(
    stubs: Path, environment: Mapping[str, str], scratch: Path, bundled: Sequence[str] = ()
) -> ModelPython:
    """
    Return the Python that Triton's stub shall embed.

    *stubs* is the folder with one stub per Python version, *scratch* a folder of the caller's own, *bundled* the
    versions whose ``libpython`` comes with the server. Raises `ConfigurationError`, which says what to install, when
    no interpreter fits.
    """
    problems: list[str] = []
    path = environment.get("PATH", "")
    for executable in (sys.executable, *(shutil.which(f"python{version}", path=path) for version in _VERSIONS)):
        found = probe(Path(executable), environment) if executable is not None else None
        if found is None:
            continue
        problem = _misfit(found, stubs, bundled)
        if problem is None:
            return ModelPython(found.version, _linked_environment(found, scratch), found.library_path())
        problems.append(f"{problem} ({found.executable})")
    raise ConfigurationError(
        "The embedded Triton found no Python for its models: "
        + "; ".join(dict.fromkeys(problems) or ["no interpreter could be started"])
        + ". Install this service in Python 3.11 or 3.12 with a shared library (Debian: libpython3.11):"
        " pip install 'triton-openai[demo]'. It brings 'numpy<2'."
    )


def probe(executable: Path, environment: Mapping[str, str]) -> Interpreter | None:
    """Ask *executable* what it is; None when it cannot be run."""
    try:
        answer = subprocess.run(
            [str(executable), "-c", _PROBE],
            env={**environment, "PYTHONPATH": "", "PYTHONHOME": ""},
            capture_output=True,
            timeout=30,
            check=True,
        )
        facts = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Interpreter(
        version=facts["version"],
        executable=Path(facts["executable"]),
        base=Path(facts["base"]),
        libraries=tuple(Path(folder) for folder in facts["libraries"]),
        packages=tuple(Path(folder) for folder in facts["packages"]),
        numpy=facts["numpy"],
        tokenizers=facts["tokenizers"],
    )


def _linked_environment(interpreter: Interpreter, scratch: Path) -> Path:
    """
    Make a virtual environment of links that lends the stub the service's own packages, and return its ``bin``.

    Putting the interpreter's own folder on ``PATH`` would be simpler, but ``python3`` in it may be another version.
    """
    folder = scratch / "python"
    packages = folder / "lib" / f"python{interpreter.version}" / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "service.pth").write_text("".join(f"{path}\n" for path in interpreter.packages))
    (folder / "pyvenv.cfg").write_text(
        f"home = {interpreter.base}\ninclude-system-site-packages = false\nversion = {interpreter.version}\n"
    )
    (folder / "bin").mkdir(exist_ok=True)
    link = folder / "bin" / "python3"
    link.unlink(missing_ok=True)
    exact = interpreter.base / f"python{interpreter.version}"
    link.symlink_to(exact if exact.exists() else interpreter.executable.resolve())
    return folder / "bin"


def _misfit(interpreter: Interpreter, stubs: Path, bundled: Sequence[str]) -> str | None:
    """Return why the stub cannot embed *interpreter*, None if it can."""
    version = interpreter.version
    if not (stubs / version / "triton_python_backend_stub").is_file():
        return f"nvidia-pytriton has no stub for Python {version}"
    if version not in bundled and not interpreter.library_path():
        return f"Python {version} has no libpython{version}.so.1.0"
    if interpreter.numpy is None or int(interpreter.numpy.partition(".")[0]) >= 2:
        return (
            f"Python {version} has {f'NumPy {interpreter.numpy}' if interpreter.numpy else 'no NumPy'}, not 'numpy<2'"
        )
    if not interpreter.tokenizers:
        return f"Python {version} has no package tokenizers"
    return None
