"""The demo's model: where it is found, and the tokenizer that its file holds."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from triton_openai.cli.arguments import Parsed
from triton_openai.cli.demo import demo
from triton_openai.config.tree import Settings
from triton_openai.demo.weights import DemoModel, find_model, write_tokenizer
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.tokenizer import Tokenizer

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "Ġ", "ab", "11"]


def gguf(path: Path, **changes: Any) -> DemoModel:
    """Write a GGUF file that holds a tokenizer and nothing else."""
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1],
        "merges": ["a b", "1 1"],
        "eos_token_id": 2,
        **changes,
    }

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def packed(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        strings = isinstance(value[0], str)
        items = b"".join(text(item) if strings else struct.pack("<i", item) for item in value)
        return struct.pack("<IIQ", 9, 8 if strings else 5, len(value)) + items

    body = b"".join(text(f"tokenizer.ggml.{key}") + packed(value) for key, value in values.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(values)) + body)
    return DemoModel(path, "tiny", own=True)


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    """Special tokens, merges and the way in which texts are cut come from the file."""
    write_tokenizer(gguf(tmp_path / "tiny.gguf"), tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))

    # Digits stay apart, whatever the merges say.
    assert [1, 7, 5, 5, 2] == tokenizer.encode("<|im_start|>ab11<|im_end|>")
    assert 2 == tokenizer.eos_token_ids[0]
    assert "You are a helpful assistant." in str(tokenizer.chat_templates["default"])


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """Another kind of tokenizer, and another kind of file, are told in a sentence."""
    text = tmp_path / "text.gguf"
    text.write_text("no weights, though the file is long enough")
    for model, message in (
        (gguf(tmp_path / "sentencepiece.gguf", model="llama"), "has a tokenizer (llama/smollm)"),
        (gguf(tmp_path / "other.gguf", pre="unheard-of"), "has a tokenizer (gpt2/unheard-of)"),
        (DemoModel(text, "text", own=False), "cannot be read as a GGUF file"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            write_tokenizer(model, tmp_path)
        assert message in caught.value.message


def test_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of several files, the usual quantization is downloaded; a repository without one is an error."""
    files = {"org/tiny-GGUF": ["README.md", "tiny.Q8_0.gguf", "tiny.Q4_K_M.gguf"], "org/tiny": ["model.safetensors"]}
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _, name: files[name])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file: tmp_path / name / file)

    found = find_model("org/tiny-GGUF", None)

    assert DemoModel(tmp_path / "org/tiny-GGUF/tiny.Q4_K_M.gguf", "tiny-GGUF", own=False) == found
    for name, message in (("org/tiny", "has no GGUF file"), ("org/none", "cannot be downloaded")):
        with pytest.raises(ConfigurationError, match=f"--model: '{name}' {message}"):
            find_model(name, None)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    """A wrong file or name is told with its option, before anything starts."""
    for model, weights, option in (("none.gguf", None, "--model"), (None, tmp_path / "none", "--weights")):
        with pytest.raises(ConfigurationError, match=f"{option}: there is no file"):
            find_model(model, weights)
    with pytest.raises(ConfigurationError, match="--scripted has no language model"):
        demo(Settings(), {}, Parsed(command="demo", settings={}, scripted=True, model="x"))
