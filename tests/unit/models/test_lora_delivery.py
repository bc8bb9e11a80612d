"""When the weights of a LoRA adapter are sent: one request of many brings them, and mends it when they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from triton_openai.errors import ConfigurationError, LoraNotLoaded, ServiceError, UpstreamTimeout
from triton_openai.generation import Lora, Matrix
from triton_openai.models.lora.delivery import LoraAnswers, LoraDelivery
from triton_openai.triton.tensors import InferResponse, JsonResponse

FULL = Lora(name="french", number=7, weights=Matrix("FP16", (1, 1), b"\0\0"), config=Matrix("INT32", (1, 3), bytes(12)))
NAMED = Lora(name="french", number=7)


class Files:
    """Loads the adapter, counts how often, and fails or waits when told to."""

    def __init__(self) -> None:
        self.loads = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> Lora:
        self.loads += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return FULL


@pytest.fixture
def files():
    return Files()


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_once_and_then_by_number(files):
    """The weights are read for the request that brings them, and not kept."""
    delivery = LoraDelivery(files)
    first = await delivery.lease()
    first.arrived()
    first.close()

    assert (FULL, NAMED, NAMED) == (first.lora, (await delivery.lease()).lora, (await delivery.lease()).lora)
    assert 1 == files.loads


async def test_others_wait_for_the_first(files):
    """They go on by number as soon as it is answered."""
    delivery = LoraDelivery(files)
    first = await delivery.lease()
    others = [asyncio.create_task(delivery.lease()) for _ in range(5)]
    await settled()
    assert not any(other.done() for other in others)

    first.arrived()

    assert [NAMED] * 5 == [(await other).lora for other in others]


async def test_the_next_one_brings_them_when_the_first_fails(files):
    """One of those that wait, and the others wait for that one."""
    delivery = LoraDelivery(files)
    first = await delivery.lease()
    others = [asyncio.create_task(delivery.lease()) for _ in range(3)]
    await settled()

    first.close()
    await settled()

    (second,) = [other.result() for other in others if other.done()]
    assert second.lora is FULL
    second.arrived()
    rest = [await other for other in others]
    assert [NAMED, NAMED] == [lease.lora for lease in rest if lease is not second]


async def test_those_who_wait_too_long_go_by_number(files):
    """Behind a full engine's queue the weights have long arrived: if not, the engine says so."""
    delivery = LoraDelivery(files, patience=0.0)
    await delivery.lease()

    assert NAMED == (await delivery.lease()).lora


async def test_nobody_has_a_number_before_the_files_are_read(files):
    """However long that takes."""
    files.gate.clear()
    delivery = LoraDelivery(files, patience=0.0)
    first, second = asyncio.create_task(delivery.lease()), asyncio.create_task(delivery.lease())
    await settled()
    assert not second.done()

    files.gate.set()
    (await first).arrived()

    assert NAMED == (await second).lora
    assert 1 == files.loads


async def test_files_that_cannot_be_read(files):
    """Everyone learns it, each from an attempt of its own; mended files are read again."""
    files.error = ConfigurationError("broken")
    delivery = LoraDelivery(files)
    results = await asyncio.gather(*(delivery.lease() for _ in range(3)), return_exceptions=True)
    assert [files.error] * 3 == results

    files.error = None
    assert FULL is (await delivery.lease()).lora


async def test_a_client_that_leaves_while_the_files_are_read(files):
    """The next one takes over."""
    files.gate.clear()
    delivery = LoraDelivery(files)
    first, second = asyncio.create_task(delivery.lease()), asyncio.create_task(delivery.lease())
    await settled()
    first.cancel()
    files.gate.set()

    assert FULL is (await second).lora


async def test_a_loss_counts_once(files):
    """Of many requests that find the weights gone one brings them; who says so late does not undo that."""
    delivery = LoraDelivery(files)
    (await delivery.lease()).arrived()
    leases = [await delivery.lease() for _ in range(3)]
    leases[0].lost()
    mending = await delivery.lease()
    mending.arrived()
    leases[1].lost()
    leases[2].lost()

    assert FULL is mending.lora
    assert NAMED == (await delivery.lease()).lora


async def test_weights_in_any_case(files):
    """Also while another request brings them."""
    delivery = LoraDelivery(files)
    first = await delivery.lease()
    second = await delivery.lease(send=True)
    first.close()
    second.arrived()

    assert FULL is second.lora
    assert NAMED == (await delivery.lease()).lora


# The stream around it

RESPONSE = JsonResponse({"text_output": "x"})
GONE = LoraNotLoaded("gone")


class Stream:
    """Answers with what it is given, one per read."""

    def __init__(self, *answers: Sequence[InferResponse] | Exception) -> None:
        self.answers = list(answers)
        self.closed = False

    async def read(self) -> Sequence[InferResponse]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def abort(self, error: ServiceError) -> None:
        self.answers = [error]

    def close(self) -> None:
        self.closed = True


class Engine:
    """Opens the given streams in turn and keeps what each was opened with."""

    def __init__(self, *streams: Stream) -> None:
        self.streams = list(streams)
        self.sent: list[Lora] = []

    async def __call__(self, lora: Lora) -> Stream:
        self.sent.append(lora)
        return self.streams[len(self.sent) - 1]


async def warm(files: Files) -> LoraDelivery:
    delivery = LoraDelivery(files)
    (await delivery.lease()).arrived()
    return delivery


async def test_a_loss_is_not_seen_by_the_reader(files):
    """The request is sent again, with the weights."""
    engine = Engine(Stream(GONE), Stream([RESPONSE], []))
    answers = LoraAnswers(await warm(files), engine)
    await answers.start()

    assert [[RESPONSE], []] == [await answers.read(), await answers.read()]
    assert [NAMED, FULL] == engine.sent
    assert engine.streams[0].closed


async def test_an_engine_that_does_not_keep_what_it_is_sent(files):
    """It is told twice at most."""
    engine = Engine(Stream(GONE), Stream(GONE))
    answers = LoraAnswers(await warm(files), engine)
    await answers.start()

    with pytest.raises(LoraNotLoaded):
        await answers.read()
    assert [NAMED, FULL] == engine.sent


async def test_a_second_loss_in_a_row(files):
    """Others' weights came and went in between: the third attempt brings its own."""
    delivery = await warm(files)
    engine = Engine(Stream(GONE), Stream(GONE), Stream([RESPONSE]))
    answers = LoraAnswers(delivery, engine)
    await answers.start()
    other = await delivery.lease()
    other.lost()
    mending = await delivery.lease()
    mending.arrived()

    assert [RESPONSE] == await answers.read()
    assert [NAMED, NAMED, FULL] == engine.sent


async def test_a_loss_after_the_first_response_is_an_error_like_others(files):
    """What has begun cannot begin again."""
    answers = LoraAnswers(await warm(files), Engine(Stream([RESPONSE], GONE)))
    await answers.start()
    await answers.read()

    with pytest.raises(LoraNotLoaded):
        await answers.read()


@pytest.mark.parametrize("end", ["close", "error", "nothing"])
async def test_a_request_that_ends_without_an_answer_leaves_it_to_the_next(files, end):
    """Nobody waits for one that is gone."""
    delivery = LoraDelivery(files)
    stream = Stream(UpstreamTimeout("late")) if end == "error" else Stream([])
    answers = LoraAnswers(delivery, Engine(stream))
    await answers.start()
    if end == "close":
        answers.close()
        assert stream.closed
    elif end == "error":
        with pytest.raises(UpstreamTimeout):
            await answers.read()
    else:
        assert [] == await answers.read()

    assert FULL is (await delivery.lease()).lora


async def test_an_abort_between_two_attempts(files):
    """Nothing more is sent for it."""
    delivery = await warm(files)
    engine = Engine(Stream(GONE), Stream([RESPONSE]))
    answers = LoraAnswers(delivery, engine)
    await answers.start()
    files.gate.clear()
    reading = asyncio.create_task(answers.read())
    await settled()
    answers.abort(UpstreamTimeout("late"))
    files.gate.set()

    with pytest.raises(UpstreamTimeout):
        await reading
    assert 1 == len(engine.sent)
    assert FULL is (await delivery.lease()).lora
