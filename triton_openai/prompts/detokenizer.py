"""
Decodes a stream of token ids into text.

A character whose bytes are spread over tokens appears when it is complete. If the bytes of single tokens are known,
they are joined, which is fast. Otherwise the tokenizers library decodes the stream.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import tokenizers
from tokenizers import pre_tokenizers
from tokenizers.decoders import DecodeStream

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What decoders differ in: spaces, several bytes per character, a character that few vocabularies have.
_PROBE = "a b  Zo\u00eb \u20ac5 \U0001f600 \u0950"


class TokenPieces:
    """
    The bytes of single tokens. Immutable to its users; safe in threads.

    ``exact`` is whether joining them gives the text; if not, :meth:`raw` knows added tokens only.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._added = {number: token.content.encode() for number, token in added.items()}
        self._known: dict[int, bytes | None] = dict(self._added)
        self._read, self._drops = _way_of_writing(_decoders(backend))
        self.exact = self._read is not None and self._proves()

    def skipped_ids(self, skip_special_tokens: bool) -> Collection[int]:
        """Return the ids of tokens that a text omits."""
        if skip_special_tokens:
            return self.special_ids
        return ()

    def raw(self, token_id: int) -> bytes | None:
        """Return the bytes of a token: ``None`` if unknown, empty for an id that does not exist."""
        if token_id not in self._known:
            self._known[token_id] = self._find(token_id)
        return self._known[token_id]

    @cached_property
    def longest(self) -> int | None:
        """The largest number of bytes that one token can stand for; ``None`` if unknown."""
        if not self.exact:
            return None
        pieces = self.backend.get_vocab(with_added_tokens=False)
        most = max((len(piece if self._read is _byte_level else piece.encode()) for piece in pieces), default=0)
        most = max(most, *map(len, self._added.values()), 1)
        # A normalizer composes characters: three decomposed ones of Hangul become one.
        if self.backend.normalizer is None:
            return most
        return 3 * most

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token at the start of a text, where some tokenizers drop the space that they add."""
        raw = self.raw(token_id) or b""
        if token_id not in self._added:
            return self._drops(raw)
        return raw

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of *ids*, as the tokenizer decodes it."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _find(self, token_id: int) -> bytes | None:
        try:
            piece = self.backend.id_to_token(token_id)
        except OverflowError:
            piece = None
        if piece is None:
            return b""
        if self._read is None:
            return None
        return self._read(piece)

    def _proves(self) -> bool:
        ids = self.backend.encode(_PROBE, add_special_tokens=False).ids
        joined = b"".join([*map(self.first, ids[:1]), *(self.raw(number) or b"" for number in ids[1:])])
        return joined.decode("utf-8", "replace") == self.decode(ids, False)


# Returns the bytes of a token; None if they are unknown.
_Read: TypeAlias = Callable[[str], bytes] | None
# Removes what a text loses at its start.
_Drop: TypeAlias = Callable[[bytes], bytes]


def _decoders(backend: tokenizers.Tokenizer) -> list[Mapping[str, Any]]:
    """Return the parts of the decoder; its pickled state is its JSON, without the vocabulary around it."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    if state["type"] == "Sequence":
        return list(state["decoders"])
    return [state]


def _way_of_writing(decoders: Sequence[Mapping[str, Any]]) -> tuple[_Read, _Drop]:
    kinds = [decoder["type"] for decoder in decoders]
    if kinds == ["ByteLevel"]:
        return _byte_level, bytes
    space = ""
    drops: _Drop = bytes
    for kind, decoder in zip(kinds, decoders, strict=True):
        if kind == "Metaspace":
            space = decoder["replacement"]
            if decoder.get("prepend_scheme") != "never":
                drops = lambda raw: raw.replace(b" ", b"")  # noqa: E731
        elif kind == "Replace" and decoder["content"] == " ":
            space = decoder["pattern"].get("String", "")
        elif kind == "Strip" and (decoder["content"], decoder["start"], decoder["stop"]) == (" ", 1, 0):
            drops = lambda raw: raw.removeprefix(b" ")  # noqa: E731
        elif kind not in ("ByteFallback", "Fuse"):
            return None, bytes
    if len(space) != 1:
        return None, bytes

    def read(piece: str) -> bytes:
        byte = None
        if "ByteFallback" in kinds:
            byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace(space, " ").encode()

    return read, drops


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:
        # Like an added token, it is not written byte by byte but stands for itself.
        return piece.encode()


# GPT-2 writes a printable byte as itself, and the other bytes, in order, as the characters from 256 on.
_ALPHABET = pre_tokenizers.ByteLevel.alphabet()
_OTHERS = [byte for byte in range(256) if chr(byte) not in _ALPHABET]
_BYTES = {letter: ord(letter) if ord(letter) < 256 else _OTHERS[ord(letter) - 256] for letter in _ALPHABET}


# The number of preceding ids with which the first one is decoded: a character has at most four bytes.
_CONTEXT = 4


class ByteDetokenizer:
    """Joins the bytes of the tokens. Holds the state of one stream."""

    def __init__(self, pieces: TokenPieces, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._skipped = pieces.skipped_ids(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = bool(context)
        # A prompt of token ids may end inside a character.
        self._decoder.decode(b"".join([pieces.raw(number) or b"" for number in context[-_CONTEXT:]]))

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that *ids* complete."""
        raw = self._pieces.raw
        data = b""
        for number in ids:
            if number in self._skipped:
                continue
            if self._begun:
                data += raw(number) or b""
            else:
                data += self._pieces.first(number)
                self._begun = True
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return the delayed part of a character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """Decodes with the tokenizer's own decoder, for tokens whose bytes are not known. Holds the state of one stream."""

    def __init__(self, pieces: TokenPieces, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend = pieces.backend
        self._stream = DecodeStream(list(context[-_CONTEXT:]), skip_special_tokens=skip_special_tokens)
        # The library's stream would keep the ids that have no text.
        self._skipped = pieces.skipped_ids(skip_special_tokens)

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that *ids* complete."""
        step = self._stream.step
        shown = [number for number in ids if number not in self._skipped]
        return "".join([step(self._backend, number) or "" for number in shown])

    def flush(self) -> str:
        """Return an empty text: an incomplete character is dropped."""
        return ""


Detokenizer: TypeAlias = ByteDetokenizer | StreamDetokenizer


def detokenizer(pieces: TokenPieces, *, context: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
    """
    Return a detokenizer for the text after *context*, the ids of the prompt.

    Without *context*, the ids are decoded like the start of a text, where many tokenizers drop a space.
    """
    if pieces.exact:
        return ByteDetokenizer(pieces, context, skip_special_tokens)
    return StreamDetokenizer(pieces, context, skip_special_tokens)
