"""
The image without a container engine: its build and install lines in an empty folder, and what they install, running,
with the checkout out of the way: with all packages, and with those alone that the wheel needs.

What needs root or another base (users, folders, the entry point of NVIDIA's image) is not run here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy_files import IMAGES, ROOT, dockerfile, image_environment, of_stage, triton_flags
from tests.ports import free_port
from tests.triton_fixture import TestTriton

# Building and installing take longer than a test usually may.
pytestmark = pytest.mark.timeout(400)

_IMPORT_EVERYTHING = """
import importlib, pkgutil, triton_openai
skipped = ("triton_openai.demo.", "triton_openai.__main__", "triton_openai.triton._")
# It runs in Triton.
skipped += ("triton_openai.companion.model",)
# They are for extras.
skipped += ("triton_openai.storage.postgresql", "triton_openai.batches.bucket")
for module in pkgutil.walk_packages(triton_openai.__path__, "triton_openai."):
    if not module.name.startswith(skipped):
        importlib.import_module(module.name)
print("imported")
"""
_RESOURCES = """
from importlib.resources import files
import triton_openai, triton_openai.adapters as adapters
print(triton_openai.__file__, adapters.__file__)
print(sum(each.name.endswith(".jinja") for each in files("triton_openai.templates").iterdir()))
print((files("triton_openai.demo") / "tokenizer" / "tokenizer.json").is_file())
print((files("triton_openai") / "py.typed").is_file())
"""
PREFIX = "/opt/triton-openai"
NEEDS_ROOT = ("useradd", "ln -s", "apt-get")
(LOCK,) = (one.text.partition("=")[2] for one in dockerfile() if one.word == "ARG" and one.text.startswith("LOCK="))


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
            "LOCK": LOCK,
        }
        done = subprocess.run(
            ["/bin/sh", "-ec", line], cwd=self.source, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def packages(self) -> Path:
        """Where the packages are installed."""
        (found,) = self.prefix.glob("lib/python3*/site-packages")
        return found

    @contextmanager
    def running(self, triton: TestTriton, *program: str, **variables: str) -> Iterator[dict[str, str]]:
        """
        Run what the image starts, or *program*, with its variables and *variables*, in front of *triton*.

        Yield its environment when it serves; in the end, SIGTERM ends it with status 0.
        """
        (entry_point,), (command,) = of_stage("sidecar", "ENTRYPOINT"), of_stage("sidecar", "CMD")
        inside = image_environment("sidecar")
        port = str(free_port())
        environment = {
            **clean_environment(),
            **{name: value for name, value in inside.items() if name != "PATH"},
            "PATH": inside["PATH"].replace(PREFIX, str(self.prefix)).replace("${PATH}", os.environ["PATH"]),
            "HF_HOME": str(self.root / "cache"),
            # Tests listen on the loopback only, the image on every interface.
            "TRITON_OPENAI_HOST": "127.0.0.1",
            "TRITON_OPENAI_PORT": port,
            "TRITON_OPENAI_TRITON_URL": triton.http_url,
            **variables,
        }
        found = shutil.which(json.loads(entry_point)[0], path=environment["PATH"])
        assert str(self.prefix / "bin/triton-openai") == found
        process = subprocess.Popen(
            [*(program or [found]), *json.loads(command)],
            env=environment,
            cwd=self.root,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield environment
            process.send_signal(signal.SIGTERM)
            assert 0 == process.wait(120)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def without_extras(self, folder: Path) -> Path:
        """Return the Python of an environment in *folder* that has the wheel, what that needs, and nothing else."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = folder / self.packages.relative_to(self.prefix)
        for name in needed("triton-openai", self.packages):
            for file in distribution(name, self.packages).files or ():
                # The image has no tests of packages.
                if ".." not in file.parts and "tests" not in file.parts:
                    (packages / file).parent.mkdir(parents=True, exist_ok=True)
                    os.link(self.packages / file, packages / file)
        return folder / "bin" / "python"


def clean_environment() -> dict[str, str]:
    """Return the variables of this process without what another Python, or settings of the service, left behind."""
    return {
        name: value for name, value in os.environ.items() if not re.match(r"PYTHON|VIRTUAL_ENV|TRITON_OPENAI_", name)
    }


def distribution(name: str, packages: Path) -> Distribution:
    """Return the distribution *name* among *packages*."""
    (found,) = Distribution.discover(name=name, path=[str(packages)])
    return found


def needed(requirement: str, packages: Path) -> set[str]:
    """Return the names of the distributions that fulfil *requirement*, those that they require included."""
    wanted, found = [Requirement(requirement)], dict[str, set[str]]()
    while wanted:
        one = wanted.pop()
        known = found.setdefault(canonicalize_name(one.name), set())
        extras = {"", *one.extras} - known
        known |= extras
        for line in distribution(one.name, packages).requires or () if extras else ():
            other = Requirement(line)
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(other)
    return set(found)


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
    packages = image.packages

    assert ["--require-hashes" in line and "--no-deps" in line for line in image.ran] == [False, True]
    assert not [line for line in image.ran if "compile" in line.lower()]
    assert not [name for stage in IMAGES.values() for name in image_environment(stage) if name.startswith("PIP_")]
    assert (packages / "opentelemetry" / "exporter" / "otlp").is_dir()
    # What belongs to an image of its own, and what nothing loads.
    for name in ("liquid", "babel", "numpy/_core/tests"):
        assert not (packages / name).exists()
    assert not (packages / "pip").exists()
    assert (image.prefix / "healthcheck.py").is_file()


def test_the_image_runs(image: Image, triton: TestTriton) -> None:
    """With nothing but variables it serves, is found healthy, and ends on SIGTERM with status 0."""
    (line,) = of_stage("sidecar", "HEALTHCHECK")
    command = [part.replace(PREFIX, str(image.prefix)) for part in json.loads(line.partition(" CMD ")[2])]

    def healthy(environment: dict[str, str]) -> bool:
        return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120).returncode == 0

    with image.running(triton) as environment:
        assert healthy(environment)
        models = ask(environment, "models")
    assert not healthy(environment)

    assert "ensemble" in {model["id"] for model in models["data"]}


def test_without_the_extras(image: Image, triton: TestTriton, tmp_path: Path) -> None:
    """
    With what the wheel needs alone, every module imports, and a chat request is answered.

    Templates, adapters and the demo's data are read through the package, from where it is installed.
    """
    python = image.without_extras(tmp_path / "environment")

    def run(code: str) -> str:
        return subprocess.check_output([python, "-I", "-c", code], cwd=tmp_path, env=clean_environment(), text=True)

    assert "imported\n" == run(_IMPORT_EVERYTHING)
    package, adapters, templates, *there = run(_RESOURCES).split()
    assert tmp_path in Path(package).parents
    assert Path(package).parent / "adapters" / "__init__.py" == Path(adapters)
    assert len(list((ROOT / "templates").glob("*.jinja"))) == int(templates)
    assert ["True", "True"] == there
    tokenizer = str(Path(package).parent / "demo" / "tokenizer")
    program = (str(python), "-I", "-m", "triton_openai")
    with image.running(triton, *program, TRITON_OPENAI_TOKENIZER=tokenizer) as environment:
        body = {"model": "ensemble", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        answer = ask(environment, "chat/completions", body)

    assert "chat.completion" == answer["object"]
    assert answer["choices"][0]["message"]["content"]


def ask(environment: Mapping[str, str], path: str, body: Any = None) -> Any:
    """Return what the service that runs with *environment* answers."""
    url = f"http://127.0.0.1:{environment['TRITON_OPENAI_PORT']}/v1/{path}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=120) as response:
        return json.load(response)


def test_flags_for_triton(triton: TestTriton) -> None:
    """What the files in `deploy/` give to tritonserver are flags that it has."""
    pid = triton.server.pid
    binary = Path(f"/proc/{pid}/exe").resolve()
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environment = dict(one.decode().split("=", 1) for one in variables if b"=" in one)
    shown = subprocess.run(
        [binary, "--help"], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    known = set(re.findall(r"^\s*(--[a-z][a-z-]+)", shown.stdout + shown.stderr, re.MULTILINE))

    assert "--model-repository" in known
    assert set() == triton_flags() - known
