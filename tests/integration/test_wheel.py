"""
What users install: the wheel holds every file of the package once, and serves with the checkout out of the way.

`make pythons` runs the unit tests on each supported Python.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.wheel_building import (
    ROOT,
    build,
    chat_once,
    environment,
    run_isolated,
    serving,
)
from tests.triton_fixture import TestTriton

# Building and installing take longer than a test usually may.
pytestmark = pytest.mark.timeout(400)


_IMPORT_EVERYTHING = """
import importlib, pkgutil, triton_openai
skipped = ("triton_openai.demo.", "triton_openai.__main__", "triton_openai.triton._")
for module in pkgutil.walk_packages(triton_openai.__path__, "triton_openai."):
    if not module.name.startswith(skipped):
        importlib.import_module(module.name)
print("imported")
"""


def _package_files() -> set[str]:
    """Return the files of the package in the checkout, its two links followed."""
    files = set()
    for folder in (ROOT / "triton_openai", *(path for path in (ROOT / "triton_openai").iterdir() if path.is_symlink())):
        for path in folder.rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_file() and "__pycache__" not in relative.parts:
                files.add(relative.as_posix())
    return files


def test_the_wheel_holds_every_file_once() -> None:
    """The wheel's files are the package's files, no more and no fewer: a package missing in setup.cfg shows here."""
    _, wheel = build()
    with zipfile.ZipFile(wheel) as archive:
        names = Counter(name for name in archive.namelist() if ".dist-info/" not in name)

    assert _package_files() == set(names)
    assert {1} == set(names.values())


def test_the_source_distribution_holds_every_file_once() -> None:
    """Adapters and templates are in it under their own folders only, since the links do not travel."""
    sdist, _ = build()
    with tarfile.open(sdist) as archive:
        names = Counter(member.name.partition("/")[2] for member in archive.getmembers() if member.isfile())

    for expected in _package_files():
        plain = expected.removeprefix("triton_openai/")
        name = plain if plain.startswith(("adapters/", "templates/")) else expected
        assert (name, 1) == (name, names[name])
    assert not [name for name in names if name.startswith(("triton_openai/adapters", "triton_openai/templates"))]
    assert names["LICENSE"] == 1


def test_resources_are_found_in_the_installed_package() -> None:
    """Templates, adapters and the demo's data are read through the package, from where it is installed."""
    code = (
        "from importlib.resources import files; import triton_openai, triton_openai.adapters as adapters\n"
        "print(triton_openai.__file__); print(adapters.__file__)\n"
        "print(sum(1 for x in files('triton_openai.templates').iterdir() if x.name.endswith('.jinja')))\n"
        "print((files('triton_openai.demo') / 'tokenizer' / 'tokenizer.json').is_file())\n"
        "print((files('triton_openai') / 'py.typed').is_file())\n"
    )
    package, adapters, templates, *there = run_isolated(environment(), code).split()

    assert ROOT not in Path(package).parents
    assert Path(package).parent / "adapters" / "__init__.py" == Path(adapters)
    assert len(list((ROOT / "templates").glob("*.jinja"))) == int(templates)
    assert ["True", "True"] == there


def test_the_installed_command_runs() -> None:
    """The console script is installed."""
    script = environment().parent / "triton-openai"

    assert "triton-openai 0." in run_isolated(
        environment(),
        f"import subprocess; print(subprocess.check_output([{str(script)!r}, '--version'], text=True))",
    )


def test_it_serves(triton: TestTriton) -> None:
    """Every module imports, without the extras; a chat request is answered; SIGTERM ends the process with status 0."""
    python = environment()

    assert "imported\n" == run_isolated(python, _IMPORT_EVERYTHING)
    with serving(python, triton.http_url) as banner:
        answer = chat_once(banner)

    assert "serving" == banner["event"]
    assert "chat.completion" == answer["object"]
    assert answer["choices"][0]["message"]["content"]
