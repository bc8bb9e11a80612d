"""What users install: the source distribution and the wheel hold every file of the package once."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv
from pyproject_hooks import quiet_subprocess_runner

# Building takes longer than a test usually may.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
_NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis", "results"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution and the wheel that is built from it, as ``python -m build`` makes them."""
    folder = tmp_path_factory.mktemp("build")
    # A copy, since building leaves folders behind.
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=_NOT_SOURCE)
    # One environment for both, because pip takes longer than all the rest.
    with DefaultIsolatedEnv() as environment:

        def build(source: Path, kind: Literal["sdist", "wheel"]) -> Path:
            builder = ProjectBuilder.from_isolated_env(environment, source, quiet_subprocess_runner)
            if kind == "sdist":
                environment.install(builder.build_system_requires)
            assert set() == builder.get_requires_for_build(kind) - builder.build_system_requires
            return Path(builder.build(kind, folder))

        sdist = build(source, "sdist")
        shutil.unpack_archive(sdist, folder, filter="data")
        return sdist, build(folder / sdist.name.removesuffix(".tar.gz"), "wheel")


def _package_files() -> set[str]:
    """Return the files of the package in the checkout, its two links followed."""
    files = set()
    for folder in (ROOT / "triton_openai", *(path for path in (ROOT / "triton_openai").iterdir() if path.is_symlink())):
        for path in folder.rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_file() and "__pycache__" not in relative.parts:
                files.add(relative.as_posix())
    return files


def test_the_wheel_holds_every_file_once(built: tuple[Path, Path]) -> None:
    """The wheel's files are the package's files, no more and no fewer: a package missing in setup.cfg shows here."""
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = Counter(name for name in archive.namelist() if ".dist-info/" not in name)

    assert _package_files() == set(names)
    assert {1} == set(names.values())


def test_the_source_distribution_holds_every_file_once(built: tuple[Path, Path]) -> None:
    """Adapters and templates are in it under their own folders only, since the links do not travel."""
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = Counter(member.name.partition("/")[2] for member in archive.getmembers() if member.isfile())

    for expected in _package_files():
        plain = expected.removeprefix("triton_openai/")
        name = plain if plain.startswith(("adapters/", "templates/")) else expected
        assert (name, 1) == (name, names[name])
    assert not [name for name in names if name.startswith(("triton_openai/adapters", "triton_openai/templates"))]
    assert names["LICENSE"] == 1
