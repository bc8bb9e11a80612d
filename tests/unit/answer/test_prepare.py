"""From what a request wants to the runs that answer it, without a Triton."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from triton_openai.adapters._common.base import Adapter, Capabilities, ModelMetadata
from triton_openai.adapters._common.decoding import TextDecoder
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.prepare import GenerationSpec, Prompt, nth_seed, prepare
from triton_openai.answer.run import Run
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.config.tree import ModelSettings, TritonSettings
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from triton_openai.generation import Generation, Sampling
from triton_openai.models.loading import LazyPrompter
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import CallTracer
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.route import Route
from triton_openai.triton.tensors import ModelConfig

TOKENIZER = Tokenizer.load(str(Path(__file__).parents[3] / "triton_openai" / "demo" / "tokenizer"))
LIMITS = TimeLimits(first_token=60, idle=60, total=60)


class Texts(Adapter):
    """The adapter of a model that takes texts, and puts special tokens around them if it *adds_bos*."""

    name = "texts"

    def __init__(self, *, adds_bos: bool = False, **able: Any) -> None:
        super().__init__(ModelConfig(name="m"), {})
        self.capabilities = Capabilities(**able)
        self.metadata = ModelMetadata(adds_bos=adds_bos)

    def decoder(self, generation: Generation) -> TextDecoder:
        return TextDecoder()


async def prepared(
    adapter: Adapter,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer | None = TOKENIZER,
    limit: TokenLimit = TokenLimit(tokens=9),  # noqa: B008 - immutable
    seed: int | None = None,
    **wanted: Any,
) -> list[Run]:
    """Return the runs of a request."""
    settings = ModelSettings()
    model = ServedModel(
        name="m",
        triton_model="m",
        adapter=adapter,
        reason="",
        settings=settings,
        lazy_prompter=LazyPrompter(settings, None),
    )
    template = Generation(id="one", prompt="", sampling=Sampling(max_tokens=limit.tokens, seed=seed))
    upstream = UpstreamClient(Route(Fleet(TritonSettings()).leasing, "m"), CallTracer(), Background())
    spec = GenerationSpec(template=template, limit=limit, **wanted)
    return await prepare(model, tokenizer, prompts, spec, upstream, LIMITS)


@every_case("first", [0, 7, 2**63 - 1, 2**64 - 1, -5])
def test_seeds_of_further_answers(first: int) -> None:
    """The first is the client's; the others differ, are the same every time, and never leave what backends take."""
    seeds = [nth_seed(first, number) for number in range(5)]

    assert first == seeds[0]
    assert 5 == len(set(seeds))
    assert all(0 <= seed < 2**31 for seed in seeds[1:])


async def test_answers_are_numbered_prompt_by_prompt() -> None:
    """Each answer to a prompt has a seed of its own, which follows from the client's."""
    runs = [run.generation for run in await prepared(Texts(), ["a", "b"], n=2, seed=5)]

    assert [("one-0", "a", 5), ("one-1", "a", 6), ("one-2", "b", 5), ("one-3", "b", 6)] == [
        (run.id, run.prompt, run.sampling.seed) for run in runs
    ]
    (alone,) = await prepared(Texts(), ["a"])
    assert ("one", None) == (alone.generation.id, alone.generation.sampling.seed)
    with pytest.raises(InvalidRequest, match="2048 answers at most"):
        await prepared(Texts(), ["a"] * 1025, n=2)


async def test_seeds_are_random_where_the_backend_has_the_same_for_every_request() -> None:
    """Else all clients would get the same answer."""
    runs = [await prepared(Texts(fixed_seed=True), ["a"]) for _ in range(4)]

    assert len({run.generation.sampling.seed for (run,) in runs}) > 1


async def test_an_open_answer_gets_the_room_behind_its_prompt() -> None:
    """The backend is asked for no more; a prompt that fills the context alone is refused."""
    limit = TokenLimit(tokens=9, open=True, unbounded=True, context=30, longest_prompt=30)
    (run,) = await prepared(Texts(), ["one two three"], limit=limit)
    count = TOKENIZER.count("one two three")

    assert (30 - count, count) == (run.generation.sampling.max_tokens, run.generation.prompt_tokens)
    with pytest.raises(ContextLengthExceeded, match="your prompt has 30 tokens"):
        await prepared(Texts(), ["a" + " one" * 29], limit=limit)


async def test_token_ids_reach_a_model_that_takes_texts_as_one_or_not_at_all() -> None:
    """A text that has other token ids would be another prompt."""
    ids = TOKENIZER.encode("one two")
    (run,) = await prepared(Texts(), [ids])
    assert "one two" == run.generation.prompt
    split = [number for letter in "one" for number in TOKENIZER.encode(letter)]
    for prompt, tokenizer in ((split, TOKENIZER), (ids, None)):
        with pytest.raises(UnsupportedParameter):
            await prepared(Texts(), [prompt], tokenizer=tokenizer)


async def test_a_model_of_token_ids_gets_them() -> None:
    """A model of token ids gets those of a text, and those of the client as they are."""
    ids = tuple(TOKENIZER.encode("one two"))
    text, given = await prepared(Texts(tokens=True), ["one two", ids])

    assert ids == text.generation.prompt_ids == given.generation.prompt_ids
    assert "one two" == given.generation.prompt
    with pytest.raises(InvalidRequest, match="not a token"):
        await prepared(Texts(tokens=True), [[1, 10**8]])


async def test_a_text_without_special_tokens_for_a_backend_that_adds_them() -> None:
    """
    A text without special tokens for a backend that adds them is sent without those that the backend adds; a text
    that lacks them cannot be sent.
    """
    (run,) = await prepared(Texts(adds_bos=True), ["<|startoftext|>one"], adds_special=False)

    assert ("one", "<|startoftext|>one") == (run.generation.prompt, run.generation.shown_prompt)
    for prompt, tokenizer in (("one", TOKENIZER), ("<|startoftext|>one", None)):
        with pytest.raises(UnsupportedParameter, match="add_special_tokens"):
            await prepared(Texts(adds_bos=True), [prompt], tokenizer=tokenizer, adds_special=False)
