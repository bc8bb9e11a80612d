"""Builds the wheel once, and installs it for every interpreter that is found, all at the same time.

Who uses this should be one module: workers of pytest share nothing, and each would build and install again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
CURRENT = f"{sys.version_info[0]}.{sys.version_info[1]}"

_NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", "results"
)


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="wheel-under-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def build() -> tuple[Path, Path]:
    """Return the source distribution and the wheel that was built from it; a build that failed is not tried again."""
    return _building().result()


@cache
def _building() -> Future[tuple[Path, Path]]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(_build)
    pool.shutdown(wait=False)
    return future


def _build() -> tuple[Path, Path]:
    source, out = _scratch() / "source", _scratch() / "dist"
    # A copy, since building leaves folders behind.
    shutil.copytree(ROOT, source, symlinks=True, ignore=_NOT_SOURCE)
    _run(sys.executable, "-m", "build", "--outdir", str(out), str(source), cwd=_scratch())
    shutil.rmtree(source)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@cache
def interpreters() -> dict[str, str]:
    """Return every supported interpreter that is installed and really runs, by its version."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")]
        if version == CURRENT:
            candidates.insert(0, sys.executable)
        # A version manager's shim may be there and fail.
        runs = (str(candidate) for candidate in candidates if candidate and _version_of(str(candidate)) == version)
        if (first := next(runs, None)) is not None:
            found[version] = first
    return found


def _version_of(executable: str) -> str | None:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([executable, "-c", code], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    return None


@cache
def _environments() -> dict[str, Future[Path]]:
    pool = ThreadPoolExecutor(len(VERSIONS))
    futures = {version: pool.submit(_install, version, executable) for version, executable in interpreters().items()}
    pool.shutdown(wait=False)
    return futures


def environment(version: str) -> Path:
    """Return the Python of an environment that holds the wheel, what it needs, and nothing else."""
    build()
    return _environments()[version].result()


def _install(version: str, executable: str) -> Path:
    folder = _scratch() / f"python{version}"
    # Without a pip of its own, which takes longer to make than all the rest: that of the tests installs from outside.
    _run(executable, "-m", "venv", "--without-pip", str(folder), cwd=_scratch())
    python = folder / "bin" / "python"
    _, wheel = build()
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install")
    _run(*pip, "--quiet", "--no-compile", str(wheel), cwd=_scratch())
    return python


def run_isolated(python: Path, code: str) -> str:
    """Run *code* with the checkout out of the way, and return what it printed."""
    return _run(str(python), "-I", "-c", code, cwd=_scratch())


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Return the variables of this process without what another Python, or settings of the service, left behind."""
    return {
        name: value for name, value in os.environ.items() if not re.match(r"PYTHON|VIRTUAL_ENV|TRITON_OPENAI_", name)
    }


@contextlib.contextmanager
def serving(python: Path, triton_url: str) -> Iterator[dict[str, Any]]:
    """Serve the Triton at *triton_url* from the installed wheel; yield the banner."""
    tokenizer = run_isolated(
        python, "from importlib.resources import files; print(files('triton_openai.demo') / 'tokenizer')"
    ).strip()
    command = [str(python), "-I", "-m", "triton_openai", "serve", "--port", "0", "--log-format", "json"]
    with (_scratch() / f"{python.parts[-3]}.log").open("w+") as log:
        process = subprocess.Popen(
            [*command, "--triton-url", triton_url, "--tokenizer", tokenizer],
            cwd=_scratch(),
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            log.seek(0)
            assert line, log.read()
            yield json.loads(line)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def chat_once(banner: dict[str, Any]) -> dict[str, Any]:
    """Ask one question and return the whole answer."""
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{banner['base_url']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer
