"""``triton-openai model-repository``: the models that it writes, converts and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.cli import main
from triton_openai.cli.model_repository import engine_arguments
from triton_openai.companion.repository import model_code
from triton_openai.errors import ConfigurationError

_FLAGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a number": (["--max-model-len", "8192"], {"max_model_len": 8192}),
    "a number for people": (["--max-model-len", "32k"], {"max_model_len": 32000}),
    "a number in binary": (["--max-model-len", "1.5K"], {"max_model_len": 1536}),
    "an equals sign": (["--dtype=bfloat16"], {"dtype": "bfloat16"}),
    "a switch": (["--enable-lora"], {"enable_lora": True}),
    "a switch that is off": (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
    "a switch before another flag": (["--enforce-eager", "--seed", "-1"], {"enforce_eager": True, "seed": -1}),
    "JSON": (["--hf-overrides", '{"a": [1]}'], {"hf_overrides": {"a": [1]}}),
    "a short name": (["-tp", "2"], {"tensor_parallel_size": 2}),
    "a path": (["--download-dir", "/models"], {"download_dir": "/models"}),
}


@every_case("name", list(_FLAGS))
def test_flags_of_the_engine(name: str) -> None:
    """They become the engine's arguments, by the names that vLLM gives them."""
    flags, expected = _FLAGS[name]

    assert expected == engine_arguments(flags)


def test_a_model_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configuration, code, arguments and LoRA adapters lie where Triton and the model look for them."""
    command = ["model-repository", "vllm", "--model", "org/some-model", "--to", str(tmp_path), "--max-model-len", "99"]
    assert 0 == main([*command, "--lora-modules", "a=/loras/a", "b=/loras/b"])

    version = tmp_path / "some-model" / "1"
    assert model_code() == (version / "model.py").read_text()
    engine = json.loads((version / "engine.json").read_text())
    assert {"model": "org/some-model", "max_model_len": 99, "enable_lora": True} == engine
    assert {"a": "/loras/a", "b": "/loras/b"} == json.loads((version / "multi_lora.json").read_text())
    assert "triton_openai_contract" in (version.parent / "config.pbtxt").read_text()
    assert "--model-control-mode=explicit --load-model=some-model --backend-config" in capsys.readouterr().out


def test_the_model_may_be_written_as_for_vllm_serve(tmp_path: Path) -> None:
    """The command line of `vllm serve` needs no other order."""
    assert 0 == main(["model-repository", "vllm", "org/m", "--max-model-len", "32k", "-tp", "2", "--to", str(tmp_path)])

    engine = json.loads((tmp_path / "m" / "1" / "engine.json").read_text())
    assert {"model": "org/m", "max_model_len": 32000, "tensor_parallel_size": 2} == engine


def test_the_name_of_vllm_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--served-model-name` is refused with its counterparts."""
    assert 2 == main(["model-repository", "vllm", "m", "--to", str(tmp_path), "--served-model-name", "x"])
    assert "Write --name for the name in Triton." in capsys.readouterr().err


@pytest.mark.parametrize("config", ['backend: "vllm"\n', None])
def test_a_model_is_converted_and_back(tmp_path: Path, config: str | None) -> None:
    """The arguments stay as they are, and the configuration comes back."""
    version = tmp_path / "1"
    version.mkdir()
    arguments = '{"model": "org/some-model", "max_model_len": 99}'
    (version / "model.json").write_text(arguments)
    if config is not None:
        (tmp_path / "config.pbtxt").write_text(config)

    assert 0 == main(["model-repository", "vllm", "--from", str(tmp_path)])
    assert arguments == (version / "engine.json").read_text()
    assert 'backend: "python"' in (tmp_path / "config.pbtxt").read_text()
    assert 0 == main(["model-repository", "vllm", "--from", str(tmp_path)])
    assert {"1", "config.pbtxt"} == {path.name for path in tmp_path.iterdir()}
    assert ["model.json"] == [path.name for path in version.iterdir()]
    assert arguments == (version / "model.json").read_text()
    assert 'backend: "vllm"\n' == (tmp_path / "config.pbtxt").read_text()


_REFUSED = {
    "a flag of the server": (["--model", "m", "--to", "{to}", "--port", "80"], "flag of vLLM's server"),
    "no flag": (["--model", "m", "--to", "{to}", "stray"], "'stray' is no flag"),
    "no model": (["--to", "{to}"], "Write the model and --to"),
    "nowhere": (["--model", "m"], "Write the model and --to"),
    "no name": (["--model", "m", "--name", "a/b", "--to", "{to}"], "no name for a model"),
    "a LoRA adapter without a path": (["--model", "m", "--to", "{to}", "--lora-modules", "a"], "NAME=PATH"),
    "a folder that is no model": (["--from", "{to}"], "no folder with a version"),
    "a conversion with flags": (["--from", "{to}", "--seed", "1"], "takes no other flags"),
}


@every_case("name", list(_REFUSED))
def test_what_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command ends with one sentence and status 2, and writes nothing."""
    arguments, expected = _REFUSED[name]
    given = [argument.format(to=tmp_path) for argument in arguments]

    assert 2 == main(["model-repository", "vllm", *given])
    assert expected in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())


def test_a_model_is_not_overwritten(tmp_path: Path) -> None:
    """What is there may have been changed by hand."""
    (tmp_path / "m").mkdir()

    assert 2 == main(["model-repository", "vllm", "--model", "m", "--to", str(tmp_path)])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """The folder stays as it is."""
    version = tmp_path / "1"
    version.mkdir()
    (version / "model.json").write_text("{")

    assert 2 == main(["model-repository", "vllm", "--from", str(tmp_path)])
    assert ["model.json"] == [path.name for path in version.iterdir()]
    with pytest.raises(ConfigurationError):
        engine_arguments(["x"])
