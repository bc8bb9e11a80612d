"""What publishes the project: the workflows, and the files that say who it is."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.cases import every_case
from triton_openai import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def module(name: str) -> ModuleType:
    """Return a program of `deploy/`."""
    spec = spec_from_file_location(name, ROOT / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def workflow(name: str) -> Mapping[str, Any]:
    """Return a workflow."""
    content: Mapping[str, Any] = yaml.safe_load(WORKFLOWS[name].read_text(encoding="utf-8"))
    return content


def steps(name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of all jobs of a workflow."""
    for job in workflow(name)["jobs"].values():
        yield from job.get("steps", ())


@every_case("name", WORKFLOWS)
def test_actions_are_pinned(name: str) -> None:
    """Each action of others is named by its commit, and its release stands beside it."""
    for line in WORKFLOWS[name].read_text(encoding="utf-8").splitlines():
        if "uses:" in line and "./" not in line:
            assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@every_case("name", WORKFLOWS)
def test_workflows_may_little(name: str) -> None:
    """A workflow reads, unless one of its jobs needs more; checkouts keep no token; jobs end."""
    whole = workflow(name)
    assert {"contents": "read"} == whole["permissions"]
    for job in whole["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 90
    for step in steps(name):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@every_case("name", WORKFLOWS)
def test_targets_of_workflows(name: str) -> None:
    """What a workflow makes is a target of the Makefile."""
    for step in steps(name):
        for target in re.findall(r"\bmake ([a-z.][\w./-]*)", step.get("run", "")):
            # The site brings its target with it.
            assert target in {*TARGETS, "docs"} or target.startswith(".venv/"), target


def test_every_supported_python_is_tested() -> None:
    """Units run on every Python of the classifiers, and Triton's tests where PyPI has it."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    supported = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    jobs = workflow("ci.yml")["jobs"]

    for job in ("unit", "package"):
        assert supported == jobs[job]["strategy"]["matrix"]["python"]
    assert ["3.11", "3.12"] == jobs["triton"]["strategy"]["matrix"]["python"]


def test_programs_of_ci() -> None:
    """The workflow finds the packages that .ci/run installs."""
    (command,) = (step["run"] for step in steps("ci.yml") if "packages=" in step.get("run", ""))
    line = command.splitlines()[0]
    done = subprocess.run(
        ["bash", "-ec", f'{line}\necho "$packages"'], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert {"nginx", "redis-server", "zsh"} <= set(done.stdout.split())
    assert "chromium" not in done.stdout


def test_a_release_needs_the_tests() -> None:
    """Nothing is published before the tests have passed, and only for a tag of the version in the files."""
    jobs = workflow("release.yml")["jobs"]

    for job in ("pypi", "images", "chart"):
        assert "tests" in jobs[job]["needs"]
    assert "pypi" == jobs["pypi"]["environment"]
    assert {"id-token": "write"} == jobs["pypi"]["permissions"]


def test_versions_agree() -> None:
    """The package, the chart and the citation have one version."""
    assert {__version__} == set(module("release").versions().values())


def test_notes_of_a_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The notes are the version's section of the changelog, without links that lead nowhere."""
    release = module("release")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [1.2.0] - 2026-01-01\n\n- a [guide](docs/a.md), a [page](https://b)\n"
        "\n## [1.1.0]\n\n- old\n\n[1.2.0]: https://c\n"
    )
    monkeypatch.setattr(release, "ROOT", tmp_path)

    assert "- a guide, a [page](https://b)" == release.notes("1.2.0")
    assert "- old" == release.notes("1.1.0")
    with pytest.raises(ValueError, match=r"no section for 1\.0\.0"):
        release.notes("1.0.0")


def test_the_readme_on_pypi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its links and pictures lead to the files of the version, and the release writes them before it builds."""
    release = module("release")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    (tmp_path / "README.md").write_text(
        'a [guide](docs/a.md#b), a [page](https://b), [below](#c)\n![d](docs/d.svg)\n<img src="docs/e.png" alt="[x]">\n'
        '[![badge](https://f)](LICENSE) <source srcset="docs/g.png">\n'
    )
    monkeypatch.setattr(release, "ROOT", tmp_path)
    here = "https://github.com/OWNER/triton-openai"

    assert 0 == release.main(["readme", "1.2.0"])
    assert (tmp_path / "README.md").read_text() == (
        f"a [guide]({here}/blob/v1.2.0/docs/a.md#b), a [page](https://b), [below](#c)\n"
        f"![d]({here}/raw/v1.2.0/docs/d.svg)\n"
        f'<img src="{here}/raw/v1.2.0/docs/e.png" alt="[x]">\n'
        f'[![badge](https://f)]({here}/blob/v1.2.0/LICENSE) <source srcset="{here}/raw/v1.2.0/docs/g.png">\n'
    )
    shutil.copy(ROOT / "README.md", tmp_path)
    assert not re.findall(r'(?:\]\(|src="|srcset=")(?!https:)[^)"]*', release.readme("1.2.0"))
    runs = [step["run"] for step in workflow("release.yml")["jobs"]["package"]["steps"] if "run" in step]
    assert ["make owner", "python3 deploy/release.py", "make dist"] == [" ".join(run.split()[:2]) for run in runs]


def test_a_tag_of_another_version(capsys: pytest.CaptureFixture[str]) -> None:
    """A tag that is not the version of the files is no release."""
    assert 1 == module("release").main(["check", "99.0.0"])

    assert f"triton_openai/__init__.py says {__version__}, and the tag 99.0.0." in capsys.readouterr().err


@every_case(
    "licence, accepted",
    [
        ("MIT", True),
        ("Apache-2.0 AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("BSD License, MIT License", True),
        ("ZPL-2.1", True),
        ("MIT AND GPL-2.0-only", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("", False),
        ("Custom", False),
    ],
)
def test_licences(licence: str, accepted: bool) -> None:
    """Permissive licences are accepted; of alternatives, one may be chosen."""
    assert accepted == (module("licenses").problem(licence) is None)


def test_licences_of_what_the_images_install() -> None:
    """Each package of the locks that is installed here has a licence that `make licenses` accepts."""
    locks = [(ROOT / "deploy" / name).read_text() for name in ("requirements.lock", "requirements-liquid.lock")]
    names = {name for lock in locks for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}
    licences = module("licenses")
    checked = 0
    for name in sorted(names):
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        assert licences.problem(licences.licence_of(package)) is None, name
        checked += 1
    assert checked > 20


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_one_setting_names_the_owner(tmp_path: Path) -> None:
    """`make owner` writes the account into each file that links to the repository."""
    names = subprocess.check_output(["make", "-s", "-C", str(ROOT), "print-owned"], text=True).split()
    for name in names:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "-s", "-C", str(tmp_path), "owner", "OWNER=Acme-Co"], check=True)
    texts = {name: (tmp_path / name).read_text(encoding="utf-8") for name in names}

    assert not [name for name, text in texts.items() if re.search(r"(com|io)/OWNER|OWNER\.github|name: OWNER", text)]
    assert "https://github.com/Acme-Co/triton-openai\n" in texts["setup.cfg"]
    assert "ghcr.io/acme-co/triton-openai" in texts["deploy/helm/triton-openai/README.md"]


def test_hooks_run_what_lint_runs() -> None:
    """The hooks before a commit are the commands of `make lint`."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    recipe = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0]
    linted = {re.sub(r"[ \t]--check|[ \t]\.$", "", line).strip() for line in recipe.splitlines()}

    entries = {re.sub(r" --(force-exclude|check)", "", hook["entry"]) for hook in hooks}
    assert linted == {entry.replace(".venv/bin", "$(BIN)") for entry in entries}


def test_forms_for_issues() -> None:
    """Each form is YAML with a name, a description and fields with ids of their own."""
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name == "config.yml":
            continue
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert form["name"]
        assert form["description"]
        assert len(ids) == len(set(ids))


@pytest.mark.skipif(sys.platform != "linux", reason="schemas come with a tool of the extra [test]")
@pytest.mark.parametrize(
    "schema, pattern",
    [("vendor.github-workflows", ".github/workflows/*.yml"), ("vendor.dependabot", ".github/dependabot.yml")],
)
def test_schemas(schema: str, pattern: str) -> None:
    """GitHub's own schemas accept the files."""
    program = shutil.which("check-jsonschema", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("check-jsonschema is not installed")
    files = [str(path) for path in sorted(ROOT.glob(pattern))]
    assert files
    done = subprocess.run([program, "--builtin-schema", schema, *files], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout
