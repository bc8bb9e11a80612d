"""Answers in token ids of an engine that ends them by itself: their text, and stop strings after ``min_tokens``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.adapters._common.base import Capabilities
from triton_openai.answer.stages import Pipeline
from triton_openai.demo import standins
from triton_openai.generation import AnswerState, Delta, FinishReason, Generation, Sampling, Vocabulary
from triton_openai.prompts.tokenizer import Tokenizer

ENGINE = Capabilities(tokens=True, ends_itself=True, usage=True, finish_reason=True)


class Flat:
    """A decoder that keeps nothing back."""

    def flush(self) -> str:
        """Return nothing."""
        return ""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo's tokenizer."""
    (folder,) = standins.__path__
    return Tokenizer.load(f"{folder}/../tokenizer")


def run(tokenizer: Tokenizer, ids: list[int], finish: FinishReason | None, **sampling: Any) -> tuple[str, AnswerState]:
    """Pass *ids* through the stages, one at a time; return the text up to where it ends, and the state."""
    generation = Generation(
        id="x",
        prompt="Hi",
        prompt_ids=(5,),
        sampling=Sampling(max_tokens=99, **sampling),
        vocabulary=Vocabulary(size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids),
    )
    progress = AnswerState(generation)
    pipeline = Pipeline(ENGINE, generation, tokenizer, progress)
    text = ""
    for place, number in enumerate(ids):
        delta = Delta(token_ids=[number], tokens=1)
        if place == len(ids) - 1:
            delta.finish_reason = finish
        pipeline.feed(delta)
        text += delta.text
        if pipeline.ended:
            break
    shown: list[Delta] = []
    pipeline.flush(Flat(), shown)  # type: ignore[arg-type]
    return text + "".join(delta.text for delta in shown), progress


def test_the_end_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    """As in vLLM's server, of which the last token is one of the answer's."""
    (end,) = tokenizer.eos_token_ids[:1]
    ids = [*tokenizer.encode("one two"), end]
    text, progress = run(tokenizer, ids, FinishReason.STOP, skip_special_tokens=False)

    assert ("one two", len(ids), None) == (text, progress.tokens, progress.stop_reason)


def test_an_end_of_text_in_the_middle(tokenizer: Tokenizer) -> None:
    """With ``ignore_eos`` the engine goes on, and so does the text."""
    (end,) = tokenizer.eos_token_ids[:1]
    ids = [*tokenizer.encode("one"), end, *tokenizer.encode(" two")]
    text, progress = run(tokenizer, ids, FinishReason.LENGTH, ignore_eos=True)

    assert ("one two", len(ids)) == (text, progress.tokens)


def test_a_stop_token(tokenizer: Tokenizer) -> None:
    """It ended the answer, is reported, and is shown only where the client wants it."""
    ids = tokenizer.encode("one two")
    hidden, progress = run(tokenizer, ids, FinishReason.STOP, stop_token_ids=(ids[-1],))
    shown, _ = run(tokenizer, ids, FinishReason.STOP, stop_token_ids=(ids[-1],), include_stop_str_in_output=True)

    assert ("one two", ids[-1]) == (shown, progress.stop_reason)
    assert hidden == tokenizer.decode(ids[:-1])


_STOPS = {
    "none": (0, "one ", 2),
    "fewer than the stop string has": (1, "one ", 2),
    "as many": (2, "one two one ", 4),
    "more than the first has": (3, "one two one ", 4),
    "all of them": (4, "one two one two", 4),
}


@every_case("name", list(_STOPS))
def test_a_stop_string_after_so_many_tokens(tokenizer: Tokenizer, name: str) -> None:
    """One that ends within the first ``min_tokens`` tokens does not count."""
    least, expected, tokens = _STOPS[name]
    ids = tokenizer.encode("one two one two")
    assert 4 == len(ids)
    text, progress = run(tokenizer, ids, FinishReason.LENGTH, stop=("two",), min_tokens=least)

    assert (expected, tokens) == (text, progress.tokens)
