"""The tokenizers and templates of served models: kept where nothing changed, found anew where something did."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_openai.config import ModelDefaults, ModelSettings, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.cache import Prompters


def settings(template: str, **models: ModelSettings) -> Settings:
    return Settings(defaults=ModelDefaults(chat_template=template), models=models)


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text("first")
    return path


async def rendered(prompters: Prompters, given: Settings, name: str = "a") -> str:
    """Return what the model's template makes of no messages."""
    prompter = await prompters.of(name, given.model(name), None).get()
    return prompter.template_for().render([])


def test_the_same_model_keeps_its_own() -> None:
    """A second look at Triton's models reads nothing again."""
    prompters, model = Prompters(), ModelSettings(chat_template="chatml")
    first = prompters.of("a", model, "/x")

    assert first is prompters.of("a", model, "/x")
    assert first is not prompters.of("b", model, "/x")
    assert first is not prompters.of("a", model, "/y")


def test_who_is_gone_is_forgotten() -> None:
    """A model that comes back may have another tokenizer."""
    prompters, model = Prompters(), ModelSettings()
    first = prompters.of("a", model, None)
    prompters.keep({"b"})

    assert first is not prompters.of("a", model, None)


async def test_only_what_changes_is_found_anew(template: Path) -> None:
    """A model with settings of its own does not mind the defaults."""
    before = settings("chatml", b=ModelSettings(chat_template="plain"))
    after = settings(str(template), b=ModelSettings(chat_template="plain"))
    prompters = Prompters()
    old = {name: prompters.of(name, before.model(name), None) for name in "ab"}
    renewed = await prompters.renewed(after, renew=False)

    assert "first" == await rendered(renewed, after)
    assert renewed.of("b", after.model("b"), None) is old["b"]
    # Who asked before is served by what was right then.
    assert old["a"] is prompters.of("a", before.model("a"), None)


async def test_renewing_reads_the_same_file_again(template: Path) -> None:
    """Its text may be another; without being asked to, nobody looks."""
    given, prompters = settings(str(template)), Prompters()
    assert "first" == await rendered(prompters, given)
    write(template, "second")

    assert "first" == await rendered(await prompters.renewed(given, renew=False), given)
    assert "second" == await rendered(await prompters.renewed(given, renew=True), given)


async def test_what_cannot_be_renewed_stays(template: Path) -> None:
    """Nobody changed its settings, so it is no reason to refuse them."""
    given, prompters = settings(str(template)), Prompters()
    assert "first" == await rendered(prompters, given)
    write(template, "{% broken")

    assert "first" == await rendered(await prompters.renewed(given, renew=True), given)


async def test_what_was_changed_has_to_work(template: Path) -> None:
    """The message names the model and the setting."""
    given, prompters = settings(str(template)), Prompters()
    assert "first" == await rendered(prompters, given)

    with pytest.raises(ConfigurationError, match=r"a: '/nowhere\.jinja' given by --chat-template"):
        await prompters.renewed(settings("/nowhere.jinja"), renew=False)
