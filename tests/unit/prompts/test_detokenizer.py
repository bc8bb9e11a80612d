"""Token ids to text, piece by piece: the same text however the ids are cut, and the exact bytes of each token."""

from __future__ import annotations

import itertools
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.cases import every_case
from triton_openai.answer.stages import TokenText
from triton_openai.generation import Delta, Generation, Sampling, TokenLogprob, Vocabulary
from triton_openai.prompts.detokenizer import Detokenizer, TokenPieces, detokenizer

TEXTS = st.text(st.sampled_from("ab  \n.é€字😀👩\u200d\u0301▁<"), max_size=24)
CUTS = st.lists(st.integers(0, 60), max_size=12)


def _demo() -> Tokenizer:
    return Tokenizer.from_str(files("triton_openai.demo").joinpath("tokenizer/tokenizer.json").read_text())


def _vocabulary() -> dict[str, int]:
    """Return a small SentencePiece vocabulary: bytes, then pieces of which some begin with a space."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        ".",
    ]
    return {piece: number for number, piece in enumerate(pieces)}


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(_vocabulary(), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return tokenizer


def _llama() -> Tokenizer:
    """Return a tokenizer that is decoded as Llama 2's is."""
    return _sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


def _gemma() -> Tokenizer:
    """Return one that keeps the space at the start."""
    return _sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def _metaspace() -> Tokenizer:
    """Return a tokenizer in the manner of T5 and XLM-R: metaspace, and no bytes."""
    pieces = ["<unk>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab", ".", "é", "€", "字", "😀"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(number)) for number, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _wordpiece() -> Tokenizer:
    """Return a tokenizer whose decoder looks at neighbours, so that no token has bytes of its own."""
    pieces = ["[UNK]", "[SEP]", "a", "b", "##a", "##b", "ab", ".", "é", "字"]
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


TOKENIZERS = {
    "byte-level": _demo(),
    "llama": _llama(),
    "gemma": _gemma(),
    "metaspace": _metaspace(),
    "wordpiece": _wordpiece(),
}
PIECES = {name: TokenPieces(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _fed(stage: Detokenizer, ids: list[int], cuts: list[int]) -> str:
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [stage.feed(ids[start:end]) for start, end in itertools.pairwise(borders)]
    return "".join(pieces) + stage.flush()


def test_which_tokens_have_bytes_of_their_own() -> None:
    """Byte-level and SentencePiece vocabularies do; a decoder that looks at neighbours is left to itself."""
    assert {"byte-level": True, "llama": True, "gemma": True, "metaspace": True, "wordpiece": False} == {
        name: pieces.exact for name, pieces in PIECES.items()
    }


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(text=TEXTS, cuts=CUTS)
def test_any_cutting_gives_the_text_of_the_whole(name: str, text: str, cuts: list[int]) -> None:
    """What `decode` says of all ids is what the pieces make together."""
    tokenizer = TOKENIZERS[name]
    ids = _ids(tokenizer, text)

    assert tokenizer.decode(ids) == _fed(detokenizer(PIECES[name]), ids, cuts)


@pytest.mark.parametrize("name", ["byte-level", "gemma"])
@settings(deadline=None)
@given(before=TEXTS.filter(bool), text=TEXTS, cuts=CUTS)
def test_behind_a_prompt_nothing_is_lost(name: str, before: str, text: str, cuts: list[int]) -> None:
    """The text is what follows the prompt's, with its leading space."""
    tokenizer = TOKENIZERS[name]
    prompt, ids = _ids(tokenizer, before), _ids(tokenizer, text)

    fed = _fed(detokenizer(PIECES[name], context=prompt), ids, cuts)

    assert tokenizer.decode([*prompt, *ids]) == tokenizer.decode(prompt) + fed


@every_case("name", ["byte-level", "gemma"])
def test_a_prompt_that_ends_inside_of_a_character(name: str) -> None:
    """The character appears when it is complete."""
    ids = _ids(TOKENIZERS[name], "😀")[-4:]
    for cut in (1, 2, 3):
        assert "😀" == _fed(detokenizer(PIECES[name], context=ids[:cut]), ids[cut:], [])


def test_what_a_token_stands_for_at_most() -> None:
    """A normalizer may have made one character of three."""
    tokenizer = _gemma()
    normalized = TokenPieces(tokenizer).longest
    tokenizer.normalizer = None
    assert (3 * len("<0x00>"), len("<0x00>")) == (normalized, TokenPieces(tokenizer).longest)


@every_case("name", ["llama", "metaspace"])
def test_the_space_at_the_start(name: str) -> None:
    """A text of its own loses it, one that continues a prompt does not."""
    tokenizer = TOKENIZERS[name]
    ids = _ids(tokenizer, "ab ab")

    assert "ab ab" == _fed(detokenizer(PIECES[name]), ids, [1])
    assert " ab ab" == _fed(detokenizer(PIECES[name], context=_ids(tokenizer, "a")), ids, [1])


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 5000), max_size=40), cuts=CUTS)
def test_any_ids_at_all(ids: list[int], cuts: list[int]) -> None:
    """Broken characters, special tokens and ids in no order: still the text of the whole."""
    tokenizer = TOKENIZERS["byte-level"]
    known = [number for number in ids if tokenizer.id_to_token(number) is not None]

    for skip in (True, False):
        stage = detokenizer(PIECES["byte-level"], skip_special_tokens=skip)
        assert tokenizer.decode(known, skip_special_tokens=skip) == _fed(stage, known, cuts)


def test_a_character_appears_when_it_is_complete() -> None:
    """A character appears when it is complete, and as one U+FFFD when it never is."""
    ids = _ids(TOKENIZERS["byte-level"], "a€")
    stage = detokenizer(PIECES["byte-level"])

    assert ["a", "", "", "€"] == [stage.feed([number]) for number in ids]
    assert ["a", "", "", "\ufffd"] == [*(stage.feed([number]) for number in ids[:-1]), stage.flush()]


def test_ids_without_text_are_passed_over() -> None:
    """However many they are, they take nothing from the text around them."""
    pieces = PIECES["wordpiece"]
    (special,) = pieces.special_ids

    assert "a b" == detokenizer(pieces).feed([2, *[special] * 5000, 3])


def test_an_id_that_does_not_exist_has_no_text() -> None:
    """An id that does not exist has no text, and does not break what is around it."""
    assert "" == detokenizer(PIECES["byte-level"]).feed([10**9, 2**40])


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma"])
@settings(deadline=None)
@given(text=TEXTS.filter(bool))
def test_the_bytes_of_the_tokens_are_those_of_the_text(name: str, text: str) -> None:
    """Each token has its part, whether or not that is a character."""
    pieces = PIECES[name]
    joined = b"".join([pieces.raw(number) or b"" for number in _ids(TOKENIZERS[name], text)])

    # SentencePiece writes a space in front of every text.
    expected = text.encode() if name == "byte-level" else f" {text}".replace("▁", " ").encode()
    assert expected == joined


def _token_text(*ends: int, **options: Any) -> TokenText:
    generation = Generation(id="", prompt="", sampling=Sampling(max_tokens=9, **options))
    return TokenText(PIECES["byte-level"], generation, Vocabulary(size=999, end_ids=ends))


def test_an_end_id_ends_the_answer() -> None:
    """What comes from it on is cut, with its count and log probabilities."""
    ids = _ids(TOKENIZERS["byte-level"], "one two three")
    stage = _token_text(ids[1])
    entries = [TokenLogprob("", -float(place), id=number) for place, number in enumerate(ids)]
    delta = Delta(token_ids=ids, tokens=3, logprobs=entries)

    stage.feed(delta)
    after = Delta(token_ids=ids, tokens=3)
    stage.feed(after)

    assert ("one", 1, [ids[0]]) == (delta.text, delta.tokens, delta.token_ids)
    assert [("one", b"one", 0.0)] == [(entry.token, entry.raw, entry.logprob) for entry in delta.logprobs]
    assert (True, "", 0) == (stage.stopped, after.text, after.tokens)


def test_stop_ids_wait_for_the_shortest_length() -> None:
    """Among the first tokens they are ordinary ones."""
    (one,) = _ids(TOKENIZERS["byte-level"], "one")
    stage = _token_text(stop_token_ids=(one,), min_tokens=2)
    delta = Delta(token_ids=[one, one, one], tokens=3)

    stage.feed(delta)

    assert ("oneone", 2, True) == (delta.text, delta.tokens, stage.stopped)
