"""Which LoRA adapters a model has, by the settings and by its repository, and which of them can be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases import every_case
from tests.lora_files import write_lora
from triton_openai.config.tree import LoraSettings, ModelSettings
from triton_openai.generation import LoraFormat
from triton_openai.models.lora.discovery import find_loras, served_names

FORMAT = LoraFormat("FP16", 3)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose model has two versions with lists of their own."""
    repository = tmp_path / "models"
    for version, names in (("2", ["old"]), ("10", ["french", "german"])):
        folder = repository / "m" / version
        for name in names:
            write_lora(folder / name)
        (folder / "multi_lora.json").write_text(json.dumps({name: name for name in names}))
    return repository


def entry(name: str, task_id: int | None = None, path: str | None = None) -> LoraSettings:
    """Return an adapter of the settings file."""
    return LoraSettings(name=name, task_id=task_id, path=path)


def test_the_newest_version_counts(repository):
    """Ten is more than two."""
    found, problems = find_loras("m", ModelSettings(), [repository], FORMAT)

    assert ["french", "german"] == [lora.name for lora in found]
    assert [(repository / "m" / "10" / "french").resolve(), None] == [found[0].folder, found[0].number]
    assert [] == problems


def test_by_name(repository):
    """A model that knows its adapters itself needs no files, and its list may name any."""
    (repository / "m" / "10" / "multi_lora.json").write_text(json.dumps({"french": "/anywhere", "german": "hub/name"}))
    settings = ModelSettings(loras=("dutch", "french"))
    found, problems = find_loras("m", settings, [repository], None)

    assert ["dutch", "french", "german"] == [lora.name for lora in found]
    assert {None} == {lora.folder for lora in found}
    assert [] == problems


def test_settings_come_first(repository, tmp_path):
    """A name alone, or a number, takes its folder from the repository; a path is looked for in lora_dir."""
    write_lora(tmp_path / "shared" / "dutch")
    loras = ("french", entry("german", task_id=5), entry("dutch", path="dutch"), entry("known", task_id=6))
    found, problems = find_loras("m", ModelSettings(loras=loras, lora_dir=tmp_path / "shared"), [repository], FORMAT)

    assert [("french", None), ("german", 5), ("dutch", None), ("known", 6)] == [(it.name, it.number) for it in found]
    assert [True, True, True, False] == [lora.folder is not None for lora in found]
    assert [] == problems


def test_paths_of_the_settings_lie_in_the_models_folder(repository):
    """Where no other folder is given."""
    loras = (entry("inside", path="2/old"), entry("outside", path=".."))
    found, problems = find_loras("m", ModelSettings(loras=loras), [repository.parent, repository], FORMAT)

    assert ["inside", "french", "german"] == [lora.name for lora in found]
    (problem,) = problems
    assert "'outside'" in problem
    assert "lies outside of" in problem


@every_case(
    "lora, wanted, reason",
    [
        ("french", FORMAT, "needs its weights"),
        (entry("french", path="french"), FORMAT, "lora_dir"),
        (entry("french", path="french"), None, "by name"),
        (entry("french", task_id=3), None, "by name"),
    ],
)
def test_what_is_missing_is_said(lora, wanted, reason):
    """The adapter is not served, and the sentence names it."""
    found, problems = find_loras("m", ModelSettings(loras=(lora,)), [], wanted)

    assert [] == found
    (problem,) = problems
    assert "'french'" in problem
    assert reason in problem


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b'{"": "a"}', b"\xff", b'{"a": "b"'])
def test_a_list_that_cannot_be_read(repository, content):
    """It counts as none, and says why."""
    (repository / "m" / "10" / "multi_lora.json").write_bytes(content)
    found, problems = find_loras("m", ModelSettings(), [repository], FORMAT)

    assert [] == found
    assert 1 == len(problems)
    assert "multi_lora.json" in problems[0]


def test_public_names():
    """Its own, and with a separator the model's too."""
    assert ["french"] == list(served_names("m", "french", None))
    assert ["m_lora_french", "french"] == list(served_names("m", "french", "_lora_"))
