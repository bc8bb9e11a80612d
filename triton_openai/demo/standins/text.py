"""The stand-ins' tokenizer, and vLLM's incremental decoding."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

# Byte-level BPE writes a printable byte as itself, and the other bytes, in order, as the characters from 256 on.
_ALPHABET = ByteLevel.alphabet()
_OTHERS = [byte for byte in range(256) if chr(byte) not in _ALPHABET]
_BYTES = {letter: ord(letter) if ord(letter) < 256 else _OTHERS[ord(letter) - 256] for letter in _ALPHABET}


class Vocabulary:
    """A tokenizer folder as Hugging Face models ship it, with byte-level access to single tokens."""

    def __init__(self, folder: str | Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        added = config["added_tokens_decoder"].items()
        self.special_ids = frozenset(int(key) for key, token in added if token["special"])
        self.eos_id = self._id(config, "eos_token")
        self.pad_id = self._id(config, "pad_token")
        self._ids: dict[bytes, int] | None = None
        # The answers of one request share its prompt.
        self._encoded = functools.lru_cache(maxsize=16)(self._encode)
        self.token_bytes = functools.cache(self._token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of *text*."""
        return list(self._encoded(text, add_special_tokens))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of exactly these ids; incomplete characters become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """Return the text of one token alone."""
        return self.decode([token_id], skip_special_tokens=False)

    def _token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for."""
        piece = self._tokenizer.id_to_token(token_id) or ""
        if token_id in self.special_ids:
            return piece.encode()
        return bytes(_BYTES[character] for character in piece)

    def of_bytes(self, data: bytes) -> int | None:
        """Return the token that stands for exactly these bytes, None if there is none."""
        if self._ids is None:
            self._ids = {self.token_bytes(number): number for number in range(len(self))}
        return self._ids.get(data)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def _id(self, config: dict[str, object], name: str) -> int:
        token_id = self._tokenizer.token_to_id(str(config[name]))
        if token_id is None:
            raise ValueError(f"{name} {config[name]!r} is not in the vocabulary")
        return int(token_id)


class IncrementalText:
    """Text that grows token by token. As in vLLM, characters appear only when they are complete."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, which may be empty."""
        if self._skip and token_id in self._vocabulary.special_ids:
            return ""
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))
