"""What the server from PyPI needs around it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from triton_openai.errors import ConfigurationError
from triton_openai.tritonserver import _runtime
from triton_openai.tritonserver.embedded import EmbeddedTriton

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose server fits this Python."""
    server, libraries = tmp_path / "server", tmp_path / "libs"
    for folder in (server / "python_backend_stubs" / VERSION, server / "backends" / "python", libraries):
        folder.mkdir(parents=True)
    (server / "python_backend_stubs" / VERSION / "triton_python_backend_stub").touch()
    (server / "backends" / "python" / "triton_python_backend_stub").touch()
    (server / "backends" / "python" / "libtriton_python.so").touch()
    (libraries / f"libpython3-0a1b2c.{sys.version_info[1]}.so.1.0").touch()
    monkeypatch.setattr(_runtime, "_package", lambda: (server, libraries))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.26.4")
    return tmp_path


def test_a_runtime(package: Path) -> None:
    """The models run in this Python, with its packages, and backends stand beside those of the package."""
    (package / "extra" / "own").mkdir(parents=True)
    environment = {"PYTHONHOME": "/elsewhere", "PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "A": "b"}
    runtime = _runtime.packaged_runtime(environment, package / "work", package / "extra")

    assert runtime.backends is not None
    assert {"own", "python"} == {path.name for path in runtime.backends.iterdir()}
    stub = runtime.backends / "python" / "triton_python_backend_stub"
    assert package / "server" / "python_backend_stubs" / VERSION / stub.name == stub.readlink()
    python = Path(runtime.environment["PATH"].split(":")[0], "python3")
    program = f"import sys, msgspec; print(sys.version_info[:2] == {sys.version_info[:2]})"
    done = subprocess.run([python, "-c", program], env=runtime.environment, capture_output=True, text=True, check=True)
    assert "True\n" == done.stdout
    libraries = runtime.environment["LD_LIBRARY_PATH"].split(":")
    assert (str(package / "libs"), "/lib", "b") == (libraries[0], libraries[-1], runtime.environment["A"])


@pytest.mark.parametrize(
    "name, value, problem",
    [
        ("importlib.metadata.version", lambda name: "2.1.0", "NumPy is 2.1.0, and not 'numpy<2'"),
        ("sys.version_info", (3, 99), "no stub for Python 3.99"),
        ("platform.machine", lambda: "arm64", "x86_64 only"),
        ("sys.platform", "darwin", "x86_64 only"),
    ],
)
def test_what_does_not_fit(
    package: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str | Callable[..., str], problem: str
) -> None:
    """A sentence says what does not fit, and what to do, before anything is laid out."""
    monkeypatch.setattr(name, value)
    with pytest.raises(ConfigurationError) as caught:
        _runtime.packaged_runtime(os.environ, package / "work")

    assert problem in caught.value.message
    assert not (package / "work").exists()


def test_no_shared_library(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub embeds Python, which not every installation has as a library."""
    for library in (package / "libs").iterdir():
        library.unlink()
    monkeypatch.setattr(_runtime, "_libpython", lambda version: [])
    with pytest.raises(ConfigurationError, match=f"Python {VERSION} has no libpython{VERSION}.so.1.0"):
        _runtime.packaged_runtime(os.environ, package / "work")


def test_what_is_laid_out_in_vain_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is laid out in vain is removed, however often the start is tried."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "models").mkdir()
    server = EmbeddedTriton(model_repository=tmp_path / "models", environment={})
    for _ in range(2):
        with pytest.raises(ConfigurationError):
            server.start()
        assert ["models"] == [path.name for path in tmp_path.iterdir()]


def test_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-pytriton a sentence says how to get one, or what to do without."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="nvidia-pytriton, which is not installed"):
        _runtime.packaged_runtime(os.environ, tmp_path)
