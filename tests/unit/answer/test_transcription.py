"""What is told of a text while a recognizer still writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tests.cases import every_case
from triton_openai.answer.transcription import _Asked, agreed
from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.jobs import Transcript
from triton_openai.media.cutting import Chunk

CHUNK = Chunk(start=0.0, end=1.0, samples=b"", silent=False)


class Recognizer:
    """Answers with what a test gives it, and counts how often an answer is decoded."""

    def __init__(self) -> None:
        self.decoded = 0
        self.tell: Callable[[Callable[[], str]], None] | None = None
        self.text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.asked = _Asked(CHUNK, self._ask, live=True)

    async def _ask(self, _: Chunk, tell: Callable[[Callable[[], str]], None] | None) -> Transcript:
        self.tell = tell
        return Transcript(text=await self.text)

    def say(self, text: str | ServiceError) -> None:
        """Answer with *text* so far, or with what cannot be read."""

        def hear() -> str:
            self.decoded += 1
            if isinstance(text, ServiceError):
                raise text
            return text

        assert self.tell is not None, "it was asked"
        self.tell(hear)


async def turns() -> None:
    """Let everything happen that can happen by now."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_nobody_reads_is_not_decoded() -> None:
    """Of a chunk whose turn has not come, only the last answer is decoded, when somebody begins to read."""
    recognizer = Recognizer()
    await turns()
    for number in range(100):
        recognizer.say(" ".join(["never"] * number))
    assert 0 == recognizer.decoded
    pieces = recognizer.asked.pieces()
    first = asyncio.ensure_future(anext(pieces))
    await turns()
    assert 1 == recognizer.decoded
    recognizer.say("never " * 100)
    assert " ".join(["never"] * 99) == await first
    recognizer.text.set_result("never " * 99 + "again")
    assert [" again"] == [piece async for piece in pieces]
    assert 2 == recognizer.decoded


@every_case(
    "answers, final, expected",
    [
        (["try", "try ag", "try again"], "try again", ["try", " again"]),
        (["try a", UpstreamError("Not text."), "try b"], "try c", ["try", " c"]),
        ([], "", []),
        (["no", "no matter"], "no", ["no"]),
    ],
)
async def test_pieces(answers: Sequence[str | ServiceError], final: str, expected: Sequence[str]) -> None:
    """What two answers agree on is told; one that cannot be read is left out until the end."""
    recognizer = Recognizer()

    async def read() -> list[str]:
        return [piece async for piece in recognizer.asked.pieces()]

    reading = asyncio.ensure_future(read())
    await turns()
    for answer in answers:
        recognizer.say(answer)
        await turns()
    recognizer.text.set_result(final)
    assert expected == await reading


async def test_a_failure_is_raised_behind_what_was_told() -> None:
    """The error of the request ends the pieces."""
    recognizer = Recognizer()
    pieces = recognizer.asked.pieces()
    first = asyncio.ensure_future(anext(pieces))
    await turns()
    recognizer.say("no matter")
    recognizer.say("no matter try")
    assert "no matter" == await first
    recognizer.text.set_exception(UpstreamError("Gone."))
    with pytest.raises(UpstreamError, match="Gone"):
        await anext(pieces)


@every_case(
    "before, text, expected",
    [
        ("never tr", "never tried", "never"),
        ("never", "never tried", "never"),
        ("never ", "never tried", "never"),
        ("", "never", ""),
        ("\u4f60\u597d", "\u4f60\u597d\u5417", "\u4f60\u597d"),
    ],
)
def test_agreement(before: str, text: str, expected: str) -> None:
    """It ends with a whole word, except where words have no blanks between them."""
    assert expected == agreed(before, text)
