"""
Builds the wheel and installs it, once per process.

Only one module should use this: pytest's workers share nothing, and each would build and install again.
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
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", "results"
)


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="wheel-under-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def build() -> tuple[Path, Path]:
    """Return the source distribution and the wheel that was built from it."""
    source, out = _scratch() / "source", _scratch() / "dist"
    # A copy, since building leaves folders behind.
    shutil.copytree(ROOT, source, symlinks=True, ignore=_NOT_SOURCE)
    _run(sys.executable, "-m", "build", "--outdir", str(out), str(source), cwd=_scratch())
    shutil.rmtree(source)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@cache
def environment() -> Path:
    """Return the Python of an environment that holds the wheel, what it needs, and nothing else."""
    folder = _scratch() / "environment"
    # Without a pip of its own, which takes longer to make than all the rest: that of the tests installs from outside.
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=_scratch())
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
    with (_scratch() / "service.log").open("w+") as log:
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
