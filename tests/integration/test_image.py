"""
The image without a container engine: its build and install lines in an empty folder, and what they install, running.

What needs root or another base (users, folders, the entry point of NVIDIA's image) is not run here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy_files import IMAGES, ROOT, dockerfile, image_environment, of_stage, triton_flags
from tests.integration.wheel_building import clean_environment
from tests.triton_fixture import TestTriton

# Building and installing take longer than a test usually may.
pytestmark = pytest.mark.timeout(400)

PREFIX = "/opt/triton-openai"
NEEDS_ROOT = ("useradd", "ln -s")


class Image:
    """A folder in which the Dockerfile's stages have run, as far as they can."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source = root / "source"
        self.prefix = root / PREFIX[1:]
        self.ran: list[str] = []

    def build(self) -> None:
        """Copy and run what the stages copy and run, one after the other, each line once."""
        for one in dockerfile():
            if one.word == "COPY" and not one.text.startswith("--from"):
                self._copy(*one.text.split())
            if one.word == "RUN" and one.text not in self.ran and not any(word in one.text for word in NEEDS_ROOT):
                self.ran.append(one.text)
                self._run(re.sub(r"(?<![\w.])/(opt/triton-openai|wheels)", rf"{self.root}/\1", one.text))

    def _copy(self, *paths: str) -> None:
        *sources, target = paths
        folder = self.source if not target.startswith("/") else None
        for source in sources:
            aim = folder / Path(source).name if folder else self.root / target[1:]
            aim.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                # Links stay links, as in a build; see Dockerfile.dockerignore.
                shutil.copytree(
                    ROOT / source, aim, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
                )
            else:
                shutil.copy(ROOT / source, aim)

    def _run(self, line: str) -> None:
        environment = {
            **clean_environment(),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # A third of the time. It is not done where this is false; see test_what_is_installed.
            "PIP_NO_COMPILE": "false",
        }
        done = subprocess.run(
            ["/bin/sh", "-ec", line], cwd=self.source, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @contextmanager
    def running(self, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
        """Start what the image starts, with its variables and *variables*; yield the process and its environment."""
        (entry_point,), (command,) = of_stage("sidecar", "ENTRYPOINT"), of_stage("sidecar", "CMD")
        inside = image_environment("sidecar")
        environment = {
            **clean_environment(),
            **{name: value for name, value in inside.items() if name != "PATH"},
            "PATH": inside["PATH"].replace(PREFIX, str(self.prefix)).replace("${PATH}", os.environ["PATH"]),
            "HF_HOME": str(self.root / "cache"),
            **variables,
        }
        program = shutil.which(json.loads(entry_point)[0], path=environment["PATH"])
        assert str(self.prefix / "bin/triton-openai") == program
        process = subprocess.Popen(
            [program, *json.loads(command)], env=environment, cwd=self.root, stdout=subprocess.PIPE, text=True
        )
        try:
            yield process, environment
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image, built once."""
    built = Image(tmp_path_factory.mktemp("image"))
    built.build()
    return built


def test_what_is_built(image: Image) -> None:
    """One wheel with each file once, although the checkout has links; and every line that can be run was."""
    (wheel,) = (image.root / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = Counter(archive.namelist())

    assert {1} == set(names.values())
    assert "triton_openai/adapters/_common/base.py" in names
    assert "triton_openai/templates/chatml.jinja" in names
    # Building, and installing: the same line in both images.
    assert 2 == len(image.ran)


def test_what_is_installed(image: Image) -> None:
    """The locked packages, the health check, and no pip; modules are compiled, because nobody may write them later."""
    (packages,) = image.prefix.glob("lib/python3*/site-packages")

    assert ["--require-hashes" in line and "--no-deps" in line for line in image.ran] == [False, True]
    assert not [line for line in image.ran if "compile" in line.lower()]
    assert not [name for stage in IMAGES.values() for name in image_environment(stage) if name.startswith("PIP_")]
    assert (packages / "liquid").is_dir()
    assert (packages / "opentelemetry" / "exporter" / "otlp").is_dir()
    assert not (packages / "pip").exists()
    assert (image.prefix / "healthcheck.py").is_file()


def test_it_runs(image: Image, triton: TestTriton) -> None:
    """With nothing but variables it serves, is found healthy, and ends on SIGTERM with status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # Tests listen on the loopback only, the image on every interface.
    variables = {"TRITON_OPENAI_HOST": "127.0.0.1", "TRITON_OPENAI_PORT": port}
    variables["TRITON_OPENAI_TRITON_URL"] = triton.http_url
    (line,) = of_stage("sidecar", "HEALTHCHECK")
    command = [part.replace(PREFIX, str(image.prefix)) for part in json.loads(line.partition(" CMD ")[2])]

    def healthy(environment: dict[str, str]) -> bool:
        return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30).returncode == 0

    with image.running(**variables) as (process, environment):
        assert process.stdout is not None
        process.stdout.readline()
        assert healthy(environment)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as response:
            models: dict[str, Any] = json.load(response)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(30)
        assert not healthy(environment)

    assert "ensemble" in {model["id"] for model in models["data"]}


def test_flags_for_triton(triton: TestTriton) -> None:
    """What the files in `deploy/` give to tritonserver are flags that it has."""
    pid = triton.server.pid
    binary = Path(f"/proc/{pid}/exe").resolve()
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environment = dict(one.decode().split("=", 1) for one in variables if b"=" in one)
    shown = subprocess.run([binary, "--help"], env=environment, capture_output=True, text=True, check=False, timeout=60)
    known = set(re.findall(r"^\s*(--[a-z][a-z-]+)", shown.stdout + shown.stderr, re.MULTILINE))

    assert "--model-repository" in known
    assert set() == triton_flags() - known
