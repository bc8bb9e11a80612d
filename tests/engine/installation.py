"""
The environment: vLLM's build for CPUs, tritonserver from PyTriton's wheel, and the source of Triton's vLLM backend.

What is installed stays in its folder, which nothing else uses; what is there is not installed again.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.engine.weights import make_lora, make_model

#: vllm_backend's main branch in November 2025; its ``src`` is used as it is.
BACKEND_COMMIT = "8de0c148bda1da25de1e05ffaaf67116dacc7264"
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
VLLM_VERSION = _REQUIREMENTS.read_text().partition("\nvllm-cpu==")[2].partition("\n")[0]
# Names that the backend imports and that vLLM has moved since, by module.
_MOVED = {
    "inputs/data.py": "from vllm.inputs import *\nfrom vllm.inputs import TokensPrompt\n",
    "v1/metrics/loggers.py": "from vllm.v1.metrics.buckets import build_1_2_5_buckets\n",
}
_MARK = "# For Triton's vLLM backend\n"
# The stub's Python starts isolated, in the C locale whatever the environment says, and PyTorch reads UTF-8 at import.
_LOCALE = 'import locale; locale.setlocale(locale.LC_CTYPE, "C.UTF-8")\n'


@dataclass(frozen=True)
class Installation:
    """Where everything is, in *folder*."""

    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter that has vLLM."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        """Its packages."""
        return self.folder / "venv" / "lib" / "python3.11" / "site-packages"

    @property
    def server(self) -> Path:
        """What PyTriton brings of Triton."""
        return self.site / "pytriton" / "tritonserver"

    @property
    def backends(self) -> Path:
        """Triton's Python backend, and the vLLM backend."""
        return self.folder / "backends"

    @property
    def models(self) -> Path:
        """The weights: ``tiny`` with ``lora-a`` and ``lora-b``, and ``embed``."""
        return self.folder / "models"


def install(folder: Path, *, python: str, backend: str) -> Installation:
    """
    Return what is installed in *folder*, after installing what is missing.

    *python* is an interpreter of version 3.11, which tritonserver's wheel has a backend for; *backend* is the URL or
    the folder of a git repository. Raises :class:`subprocess.CalledProcessError`.
    """
    found = Installation(folder.resolve())
    make_model(found.models / "tiny", seed=1)
    make_model(found.models / "embed", seed=2)
    for seed, name in enumerate(("lora-a", "lora-b")):
        make_lora(found.models / name, base=found.models / "tiny", seed=seed)
    done = found.folder / "installed"
    wanted = BACKEND_COMMIT + "\n" + _REQUIREMENTS.read_text()
    if done.exists() and done.read_text() == wanted:
        return found
    print(f"Installing vLLM and Triton in {found.folder}: 3.6 GB, about ten minutes.", flush=True)
    if not found.python.exists():
        _run([python, "-m", "venv", str(found.folder / "venv")])
    # vLLM names CUDA's packages and more than its text models need: the list is complete without its dependencies.
    _run([str(found.python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(_REQUIREMENTS)])
    _put_names_back(found.site / "vllm")
    (found.site / "zz_locale.pth").write_text(_LOCALE)
    _install_backends(found, backend)
    done.write_text(wanted)
    return found


def _put_names_back(vllm: Path) -> None:
    for name, lines in _MOVED.items():
        path = vllm / name
        text = path.read_text() if path.exists() else ""
        if _MARK not in text:
            path.write_text(text + _MARK + lines)


def _install_backends(found: Installation, backend: str) -> None:
    shutil.rmtree(found.backends, ignore_errors=True)
    shutil.copytree(found.server / "backends" / "python", found.backends / "python")
    shutil.copy(
        found.server / "python_backend_stubs" / "3.11" / "triton_python_backend_stub", found.backends / "python"
    )
    source = found.folder / "vllm_backend"
    shutil.rmtree(source, ignore_errors=True)
    git = ["git", "-C", str(source)]
    _run(["git", "init", "--quiet", str(source)])
    _run([*git, "fetch", "--quiet", "--depth", "1", backend, BACKEND_COMMIT])
    _run([*git, "checkout", "--quiet", BACKEND_COMMIT])
    shutil.copytree(source / "src", found.backends / "vllm")


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)
