"""One run of a generation, in front of a Triton whose moments the test chooses."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.adapters._common.base import Capabilities, Hints
from triton_openai.adapters._common.decoding import CumulativeText, TextDecoder
from triton_openai.answer.run import Background, Run
from triton_openai.answer.time_limits import TimeLimits
from triton_openai.config import TritonSettings
from triton_openai.generation import Generation, Sampling
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton.tensors import JsonResponse

TOKENIZER = Tokenizer.load(str(Path(__file__).parents[3] / "triton_openai" / "demo" / "tokenizer"))
BROKEN = "\ufffd"


class SlowToOpen:
    """A client whose streams are opened when the test says so, also for who has been cancelled meanwhile."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.opens = asyncio.Event()
        self.opened = Mock()

    async def stream(self, request: Any) -> Any:
        self.asked.set()
        while not self.opens.is_set():
            # As asyncio.wait_for does in Python 3.11 where the result was there already.
            with contextlib.suppress(asyncio.CancelledError):
                await self.opens.wait()
        return self.opened


async def test_closed_while_the_stream_is_being_opened() -> None:
    """The stream is closed as soon as it is there, and nothing watches it."""
    client = SlowToOpen()
    model = MagicMock(lora_delivery=None)
    model.adapter.capabilities.tokens = False
    model.adapter.encode.return_value = MagicMock(stream=True)
    model.adapter.cancel.return_value = None
    run = Run(
        model,
        Generation(id="1", prompt="Hello", sampling=Sampling(max_tokens=5)),
        client=client,  # type: ignore[arg-type]
        settings=TritonSettings(),
        limits=TimeLimits(first_token=60, idle=60, total=60),
        background=Background(),
        tokenizer=None,
    )
    task = asyncio.create_task(run.start())
    await client.asked.wait()
    task.cancel()
    run.close()
    client.opens.set()
    await task

    client.opened.close.assert_called_once_with()
    assert run.finished
    assert run._watch is None


class Answers:
    """A client whose streams bring *texts*, one response each, and then end."""

    def __init__(self, *texts: str) -> None:
        self._responses: list[Any] = [[JsonResponse({"text_output": text})] for text in texts]

    async def stream(self, request: Any) -> Any:
        return self

    async def read(self) -> Any:
        return self._responses.pop(0) if self._responses else ()

    def close(self) -> None: ...


async def answered(*texts: str, limit: int, tokenizer: Tokenizer | None = TOKENIZER, **decoding: Any) -> Run:
    """Return the run of an answer of *texts*, one response each, whose backend tells neither counts nor reasons."""
    model = MagicMock(lora_delivery=None)
    model.settings.max_model_len = None
    model.adapter.hints, model.adapter.capabilities = Hints(), Capabilities(generate=True, streaming=True)
    model.adapter.encode.return_value = MagicMock(stream=True)
    model.adapter.decoder.return_value = TextDecoder(**decoding)
    run = Run(
        model,
        Generation(id="1", prompt="Hello", sampling=Sampling(max_tokens=limit)),
        client=Answers(*texts),  # type: ignore[arg-type]
        settings=TritonSettings(),
        limits=TimeLimits(first_token=60, idle=60, total=60),
        background=Background(),
        tokenizer=tokenizer,
    )
    await run.start()
    while not run.finished:
        await run.read()
    return run


@every_case(
    "texts, limit, reason, tokens",
    [
        # Streams: as many responses as the answer may have tokens.
        (["one", " two"], 2, "length", 2),
        (["one", "", " two"], 3, "length", 3),
        (["a", BROKEN, BROKEN], 3, "length", 3),
        # Fewer: a last one without text is the end of the sequence.
        (["one", ""], 2, "stop", 1),
        (["one", " two", ""], 4, "stop", 2),
        (["one", "", " two", ""], 9, "stop", 3),
        (["one", " two"], 9, "stop", 2),
        ([""], 9, "stop", 0),
        # Several tokens in a response: what the text tells.
        (["one two", " three"], 3, "length", 3),
        (["one two", " three", ""], 9, "stop", 3),
        # Text of which tokenizing makes more tokens than there can have been.
        (["x" * 40], 5, "length", 5),
        # Whole answers: only what is there tells it.
        (["one two three"], 3, "length", 3),
        (["one two"], 3, "stop", 2),
        ([f"a{BROKEN}"], 4, "length", 4),
        ([f"a{BROKEN}"], 9, "stop", 2),
        (["one"], 1, "length", 1),
    ],
)
async def test_how_an_answer_ended_that_nobody_counted(texts: list[str], limit: int, reason: str, tokens: int) -> None:
    """The responses count it, and else its text; never more tokens than it could have had."""
    run = await answered(*texts, limit=limit)

    assert (reason, tokens) == (run.finish_reason, run.usage and run.usage.completion_tokens)


@every_case(
    "texts, limit, reason",
    [
        (["one", " two", " three", ""], 9, "stop"),
        (["one", " two"], 2, "length"),
        # Not surely the end of the sequence: the limit can have been reached.
        (["one", ""], 2, "length"),
        ([""], 9, "stop"),
        # A whole answer of fewer bytes than tokens it may have has not reached them; of more, it may have.
        (["one two"], 9, "stop"),
        (["one two three"], 9, None),
    ],
)
async def test_how_an_answer_ended_without_a_tokenizer(texts: list[str], limit: int, reason: str | None) -> None:
    """A stream always tells; there is no usage."""
    run = await answered(*texts, limit=limit, tokenizer=None)

    assert (reason, None) == (run.finish_reason, run.usage)


async def test_half_a_character_that_is_held_back_counts() -> None:
    """Text that repeats from its start shows an incomplete character only when nothing follows."""
    run = await answered("a", f"a{BROKEN}", f"a{BROKEN}", limit=3, stage=CumulativeText())

    assert ("length", 3, f"a{BROKEN}") == (run.finish_reason, run.usage and run.usage.completion_tokens, run.text)


@given(st.lists(st.sampled_from(["", "a", " two", BROKEN, "日本"]), min_size=1, max_size=8), st.integers(1, 9))
def test_counts_are_never_beyond_the_limit(texts: list[str], limit: int) -> None:
    """Whatever the text is: neither is an answer at its limit told to have ended by itself."""
    run = asyncio.run(answered(*texts, limit=limit))

    assert run.usage is not None
    assert run.usage.completion_tokens <= limit
    assert (run.finish_reason == "length") == (run.usage.completion_tokens == limit)
