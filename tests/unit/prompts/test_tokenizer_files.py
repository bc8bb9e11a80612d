"""What a model's generation_config.json recommends, and for which requests it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triton_openai.adapters._common.base import Adapter, Parameter
from triton_openai.config.tree import DefaultParameters, ModelSettings, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.models.loading import LazyPrompter
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.tokenizer_files import recommended_sampling
from triton_openai.triton.tensors import ModelConfig

DEMO = Path(__file__).parents[3] / "triton_openai" / "demo" / "tokenizer"
QWEN = {
    "bos_token_id": 1,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}
RECOMMENDED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_tokens": 2048,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tokenizer's folder with a generation_config.json."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    return tmp_path


def served(settings: ModelSettings, *refused: str) -> ServedModel:
    """Return a served model that takes all parameters but those *refused*."""
    adapter = Adapter(ModelConfig(name="m"), {})
    adapter.parameters = [
        Parameter(name, target=None if name in refused else name) for name in DefaultParameters.__struct_fields__
    ]
    return ServedModel(
        name="m", triton_model="m", adapter=adapter, reason="", settings=settings,
        lazy_prompter=LazyPrompter(settings, None),
    )  # fmt: skip


async def defaults(model: ServedModel) -> dict[str, Any]:
    """Return what holds for *model* where a request leaves parameters out."""
    return model.default_parameters(await model.prompter()).explicit()


@pytest.mark.parametrize("source", [None, "auto"])
def test_generation_config_is_read_beside_the_tokenizer(folder, source):
    """Of its keys, those count that vLLM's server takes, under the names of a request."""
    notes: list[str] = []
    found, origin = recommended_sampling(source, Tokenizer.load(str(folder)).generation_config, notes)

    assert (RECOMMENDED, "the tokenizer's generation_config.json", []) == (found, origin, notes)


def test_generation_config_can_be_switched_off_and_named(folder):
    """`none` reads nothing; a file or its folder can be named, also without a tokenizer."""
    assert ({}, None) == recommended_sampling("none", QWEN, [])
    assert ({}, None) == recommended_sampling("auto", {}, [])
    for source in (folder, folder / "generation_config.json"):
        found, origin = recommended_sampling(str(source), {}, [])
        assert (RECOMMENDED, f"{source} (generation_config)") == (found, origin)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_file_that_is_named_has_to_be_usable(tmp_path, content):
    """The operator named it, so the operator hears of it."""
    path = tmp_path / "generation_config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match="given by generation_config"):
        recommended_sampling(str(path), {}, [])


def test_values_that_no_request_can_have_are_left_out(tmp_path):
    """Each with a note; the others hold."""
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": "hot", "top_p": 7, "top_k": None, "min_p": 0.1}))
    notes: list[str] = []
    found, _ = recommended_sampling(str(path), {}, notes)

    assert {"min_p": 0.1} == found
    assert ["temperature", "top_p"] == [note.split()[0] for note in notes]


async def test_what_the_operator_says_comes_first(folder):
    """What the operator says comes before recommended values, without those that the model cannot honour."""
    own = DefaultParameters(temperature=0.2)
    settings = ModelSettings(tokenizer=str(folder), default_parameters=own)
    expected: dict[str, Any] = {**RECOMMENDED, "temperature": 0.2}
    assert expected == await defaults(served(settings))

    del expected["min_p"], expected["repetition_penalty"]
    assert expected == await defaults(served(settings, "min_p", "repetition_penalty"))

    settings = ModelSettings(tokenizer=str(folder), generation_config="none", default_parameters=own)
    assert {"temperature": 0.2} == await defaults(served(settings))


def test_the_setting_of_one_model_takes_the_place_of_that_of_all():
    """The setting of one model takes the place of that of all, as every setting of models does."""
    settings = Settings(models={"m": ModelSettings(generation_config="none")})

    assert ("none", None) == (settings.model("m").generation_config, settings.model("other").generation_config)
