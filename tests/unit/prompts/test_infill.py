"""Filling in the middle: forms, and which of them a model is used with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.unit.prompts.test_template_support import make_backend, save
from triton_openai.app import create_app
from triton_openai.config.tree import ModelSettings, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.infill import FORMS, fill, fim_form, known_fim_form, parse, tokens_of
from triton_openai.prompts.tokenizer import Tokenizer


def tokenizer(folder: Path, *tokens: str) -> Tokenizer:
    """Return a tokenizer with these special tokens."""
    return Tokenizer.load(save(folder, make_backend(tokens or ("<s>",))))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("qwen", "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        ("starcoder", "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        ("santacoder", "<fim-prefix>a<fim-suffix>b<fim-middle>"),
        ("deepseek", "<\uff5cfim\u2581begin\uff5c>a<\uff5cfim\u2581hole\uff5c>b<\uff5cfim\u2581end\uff5c>"),
        ("codestral", "[SUFFIX]b[PREFIX]a"),
    ],
)
def test_known_forms(tmp_path: Path, name: str, expected: str) -> None:
    """Each form is what its authors publish, is found by its tokens, and needs them."""
    form = FORMS[name]
    having = tokenizer(tmp_path / "having", *tokens_of(form))
    lacking = tokenizer(tmp_path / "lacking", *tokens_of(form)[1:])

    assert expected == fill(form, "a", "b")
    assert name == known_fim_form(having)
    assert form == fim_form(name, having) == fim_form(name, None)
    assert known_fim_form(lacking) is None
    with pytest.raises(ConfigurationError, match=f"fim_template {name}"):
        fim_form(name, lacking)


def test_nothing_is_done_unasked(tmp_path: Path) -> None:
    """The tokens alone do not show that a model was trained on them."""
    assert fim_form(None, tokenizer(tmp_path, *tokens_of(FORMS["qwen"]))) is None


def test_two_forms_are_none(tmp_path: Path) -> None:
    """A vocabulary with the tokens of two forms does not say which."""
    both = tokenizer(tmp_path, *tokens_of(FORMS["qwen"]), *tokens_of(FORMS["starcoder"]))

    assert known_fim_form(both) is None
    assert FORMS["qwen"] == fim_form("qwen", both)


texts = st.text().filter(lambda text: "{prefix}" not in text and "{suffix}" not in text)


@given(texts, texts, texts, st.text(), st.text(), st.booleans())
def test_own_forms(before: str, between: str, after: str, prefix: str, suffix: str, suffix_first: bool) -> None:
    """A form that is spelt out is followed to the letter, whatever the texts hold."""
    first, second = ("{suffix}", "{prefix}") if suffix_first else ("{prefix}", "{suffix}")
    form = parse(f"{before}{first}{between}{second}{after}")

    ordered = (suffix, prefix) if suffix_first else (prefix, suffix)
    assert f"{before}{ordered[0]}{between}{ordered[1]}{after}" == fill(form, prefix, suffix)
    assert form == fim_form(f"{before}{first}{between}{second}{after}", None)


@every_case("spec", ["qwn", "auto", "{prefix}", "{suffix}", "{prefix}{prefix}", "{prefix}{suffix}{suffix}", "{}"])
def test_what_is_no_form(spec: str) -> None:
    """What is no form is an error at start."""
    with pytest.raises(ConfigurationError, match="fim_template has to be one of qwen"):
        create_app(Settings(models={"m": ModelSettings(fim_template=spec)}))
