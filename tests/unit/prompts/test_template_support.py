"""What the tests of chat/ share: real tokenizers, saved as Hugging Face models ship them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def make_backend(special: Sequence[str] = ("<s>", "</s>"), *, bos: str | None = None) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer (one token for each byte) with *special* tokens; *bos* is added by itself."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def save(folder: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> str:
    """Write *backend* and JSON *files* (tokenizer_config={…}) into *folder*, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or make_backend()).save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return str(folder)


def test_tokenizers_made_here_are_byte_level() -> None:
    """The shared tokenizer has one token for each byte, so that tests can count by eye."""
    expected = len("héllo".encode())

    assert expected == len(make_backend().encode("héllo", add_special_tokens=False).ids)
