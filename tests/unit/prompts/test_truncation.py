"""Prompts cut to a number of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from tests.extended import examples
from triton_openai.demo.make_tokenizer import corpus
from triton_openai.errors import InvalidRequest
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.tokenizer_files import TokenizerFiles
from triton_openai.prompts.truncation import Truncation, cut_encoded, cut_ids, cut_text

TOKENIZER = Tokenizer.load(str(files("triton_openai.demo").joinpath("tokenizer")))
SIDES = ("left", "right")


@cache
def trained(kind: str) -> Tokenizer:
    """Return a tokenizer of a *kind*, with the special tokens and the spaces that such ones have."""
    if kind == "byte-level":
        return TOKENIZER
    special = ["<unk>", "<s>", "</s>"]
    if kind == "wordpiece":
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    elif kind == "unigram":
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=1000, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        # As Llama's: a text is one word, in which spaces are letters.
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Strip(), normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    backend.train_from_iterator(corpus(), trainer)
    if kind == "one word":
        backend.pre_tokenizer = None
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    empty: Any = {}
    named = dict.fromkeys(
        ("config", "special_tokens_map", "generation_config", "model_config", "chat_templates"), empty
    )
    return Tokenizer(backend, TokenizerFiles(tokenizer_json=Path(), **named))


# What tokenizers treat differently: words, spaces, lines, digits, marks, letters that are several bytes, a run of one.
PIECES = st.sampled_from(
    ["the", " quick", " Fox", " 12345", "\n\n", "  ", " ", "\n", ".", ", ", "_", "é", "e\u0301", "中文", " 中", "🙂",
     "<s>", "</s> ", "a" * 30, "\u2581", "-- ", "don't "]
)  # fmt: skip


@pytest.mark.parametrize("kind", ["byte-level", "one word", "unigram", "wordpiece"])
@given(
    pieces=st.lists(PIECES, min_size=40, max_size=60),
    words=st.lists(PIECES, min_size=1, max_size=40),
    tokens=st.integers(1, 60),
    side=st.sampled_from(SIDES),
    shift=st.integers(0, 9),
)
@settings(max_examples=examples(20, few=6))
def test_a_part_of_a_text_has_the_tokens_that_are_kept(
    kind: str, pieces: list[str], words: list[str], tokens: int, side: Any, shift: int
) -> None:
    """Whatever is cut off far away from them, and however the tokenizer treats the start of a text."""
    tokenizer = trained(kind)
    # The same text again and again, with words in between; where the cut is found moves with the shift.
    once = "".join(pieces) + "".join(words) + "x" * shift + " and so it goes on and on. "
    text = once * (14_000 // len(once))
    part = tokenizer.cut_roughly(text, tokens, side)

    assert text.endswith(part) if side == "left" else text.startswith(part)
    assert len(part) < len(text)
    cut = Truncation(tokens=tokens, side=side)
    for special in (True, False):
        found, expected = (list(cut_ids(tokenizer.encode(each, special), cut)) for each in (part, text))
        assert expected == found


@pytest.mark.parametrize("kind", ["byte-level", "one word", "unigram", "wordpiece"])
@given(words=st.lists(PIECES, min_size=1, max_size=40), tokens=st.integers(0, 40), side=st.sampled_from(SIDES))
@settings(max_examples=20)
async def test_ids_are_cut_as_the_library_cuts_them(kind: str, words: list[str], tokens: int, side: Any) -> None:
    """With their special tokens, which stay."""
    tokenizer, text = trained(kind), "".join(words)
    backend = tokenizer._backend
    special = backend.num_special_tokens_to_add(is_pair=False)
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(tokens, direction=side)
    expected = backend.post_process(encoding, add_special_tokens=True).ids
    assert expected == list(await cut_encoded(tokenizer, text, Truncation(tokens=tokens + special, side=side)))


@pytest.mark.parametrize("kind", ["byte-level", "one word", "unigram", "wordpiece"])
@given(
    once=st.lists(PIECES, min_size=1, max_size=40),
    tokens=st.integers(1, 3_000),
    side=st.sampled_from(SIDES),
    size=st.integers(1, 3_000),
)
@settings(max_examples=examples(20, few=6))
async def test_a_cut_is_found_piece_by_piece(kind: str, once: list[str], tokens: int, side: Any, size: int) -> None:
    """However small the pieces are in which it is looked for: what is left is the same."""
    tokenizer = trained(kind)
    text = ("".join(once) + " and so on ") * (8_000 // (11 + len("".join(once))))
    truncation = Truncation(tokens=tokens, side=side)
    whole, found = "", ""
    for pieces in (False, True):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(InvalidRequest):
            if pieces:
                patch.setattr("triton_openai.prompts.truncation._PIECE", size)
                found = await cut_text(tokenizer, text, truncation, special=False)
            else:
                whole = await cut_text(tokenizer, text, truncation, special=False)
    assert whole == found


async def test_only_what_can_be_kept_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four megabytes, a few thousand characters are tokenized; without words that show a place to cut, all of it."""
    read: list[int] = []
    tokens = Tokenizer.tokens

    def counting(self: Tokenizer, text: str) -> tokenizers.Encoding:
        read.append(len(text))
        return tokens(self, text)

    monkeypatch.setattr(Tokenizer, "tokens", counting)
    text = "the quick brown fox jumps over the lazy dog. " * 90_000
    for side in SIDES:
        assert 100 == TOKENIZER.count(await kept(text, 100, side))
        assert 100 == len(await cut_encoded(TOKENIZER, text, Truncation(tokens=100, side=side)))  # type: ignore[arg-type]
    pair = await TOKENIZER.encode_pairs_async([("a query", text)], 100)
    assert 100 == len(pair[0].ids)
    assert sum(read) < 60_000

    read.clear()
    assert 100 == TOKENIZER.count(await kept("a" * 30_000, 100))
    assert read[0] == 30_000


async def kept(text: str, tokens: int, side: str = "left", *, special: bool = False) -> str:
    """Return what is left of *text*."""
    truncation = Truncation(tokens=tokens, side=side)  # type: ignore[arg-type]
    return await cut_text(TOKENIZER, text, truncation, special=special)


def assert_is_reason(error: InvalidRequest) -> None:
    """Check that nothing could be left, or nothing could be sent."""
    assert "truncate_prompt_tokens" == error.param or "Unicode" in error.message


async def test_the_end_is_kept_and_on_request_the_start() -> None:
    """The last tokens are the ones nearest to the answer."""
    text = "one two three four five"

    assert " four five" == await kept(text, 2)
    assert "one two" == await kept(text, 2, "right")
    assert text == await kept(text, 5) == await kept(text, 100) == await kept(text, 10**30)


async def test_special_tokens_of_the_backend_count() -> None:
    """One place goes to the token that the backend puts in front."""
    added = TOKENIZER.count("", True)
    assert 0 < added

    assert " four five" == await kept("one two three four five", 2 + added, special=True)


@given(text=st.text(min_size=1), tokens=st.integers(1, 12), side=st.sampled_from(SIDES))
async def test_what_is_left_fits_and_is_a_part(text: str, tokens: int, side: str) -> None:
    """Whatever the text: the rest is its end (or start) and has no more tokens than were allowed."""
    try:
        left = await kept(text, tokens, side)
    except InvalidRequest as error:
        # A single character may be more tokens than are allowed, or there is none that could be sent.
        assert_is_reason(error)
        return
    assert TOKENIZER.count(left) <= tokens
    assert text.endswith(left) if side == "left" else text.startswith(left)


async def test_a_character_of_several_tokens_is_not_torn() -> None:
    """A character of several tokens goes as a whole, and where nothing is left that is said."""
    assert TOKENIZER.count("😀") > 2
    assert "" != await kept("a😀 b", 2)
    assert "\ufffd" not in await kept("a😀 b", 2)
    with pytest.raises(InvalidRequest) as caught:
        await kept("😀", 2)
    assert "truncate_prompt_tokens" == caught.value.param


def test_ids_are_cut_exactly() -> None:
    """Token ids are what they are."""
    ids = [5, 6, 7, 8]

    assert [7, 8] == list(cut_ids(ids, Truncation(tokens=2)))
    assert [5, 6] == list(cut_ids(ids, Truncation(tokens=2, side="right")))
    assert ids == list(cut_ids(ids, Truncation(tokens=4)))


async def test_the_special_tokens_of_a_text_stay_unless_the_side_is_asked_for() -> None:
    """As vLLM's server does it: the tokenizer cuts what it puts its special tokens around, a side cuts all of it."""
    ids = TOKENIZER.encode("one two three four", True)
    assert ids != TOKENIZER.encode("one two three four")

    async def left(tokens: int, **fields: Any) -> Sequence[int]:
        return await cut_encoded(TOKENIZER, "one two three four", Truncation(tokens=tokens, **fields))

    assert [ids[0], *ids[-2:]] == await left(3)
    assert ids[:3] == await left(3, side="right")
    assert ids[-3:] == await left(3, keeps_special=False)
    assert ids[:3] == await left(3, side="right", keeps_special=False)
    assert ids == await left(len(ids)) == await left(1000, side="right")


def test_minus_one_is_the_room_that_there_is() -> None:
    """Without a known context length it is nothing that could be meant."""
    assert Truncation(tokens=7) == Truncation(tokens=-1).within(7)
    assert Truncation(tokens=0) == Truncation(tokens=-1).within(-2)
    assert Truncation(tokens=7, param="max_tokens") == Truncation(tokens=-1).within(7, "max_tokens")
    assert Truncation(tokens=3) == Truncation(tokens=3).within(None)
    with pytest.raises(InvalidRequest):
        Truncation(tokens=-1).within(None)
