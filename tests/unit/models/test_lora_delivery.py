"""When the weights of a LoRA adapter are sent: one request of many brings them, and mends it when they are gone."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock, call

import pytest

from triton_openai.errors import ConfigurationError, LoraNotLoaded, UpstreamTimeout
from triton_openai.generation import Lora, Matrix
from triton_openai.models.lora.delivery import LoraAnswers, LoraDelivery
from triton_openai.triton.client import Receiver
from triton_openai.triton.tensors import JsonResponse

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
    """Requests that wait for the first one go on by number as soon as it is answered."""
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
    """No request goes by number before the files are read, however long that takes."""
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
    """A request may want the weights in any case, also while another one brings them."""
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


class Engine:
    """Opens streams, keeps what each was opened with, and has them end as the test says."""

    def __init__(self) -> None:
        self.sent: list[Lora] = []
        self.receivers: list[Receiver] = []
        self.streams: list[Mock] = []

    def __call__(self, lora: Lora, receiver: Receiver) -> Mock:
        self.sent.append(lora)
        self.receivers.append(receiver)
        self.streams.append(Mock())
        return self.streams[-1]


class Opened:
    """A stream of a warm adapter, or of *delivery*, and the mock that receives its answers."""

    def __init__(self, delivery: LoraDelivery) -> None:
        self.engine = Engine()
        self.receiver = Mock()
        self.answers = LoraAnswers(delivery, self.engine, self.receiver)


async def opened(delivery: LoraDelivery) -> Opened:
    found = Opened(delivery)
    await settled()
    return found


async def warm(files: Files) -> LoraDelivery:
    delivery = LoraDelivery(files)
    (await delivery.lease()).arrived()
    return delivery


async def test_a_loss_is_not_seen_by_the_receiver(files):
    """The request is sent again, with the weights."""
    found = await opened(await warm(files))
    found.engine.receivers[0].end(GONE)
    await settled()
    found.engine.receivers[1].receive([RESPONSE])
    found.engine.receivers[1].end(None)

    assert [call.receive([RESPONSE]), call.end(None)] == found.receiver.mock_calls
    assert [NAMED, FULL] == found.engine.sent


async def test_an_engine_that_does_not_keep_what_it_is_sent(files):
    """An engine that does not keep what it is sent is told twice at most."""
    found = await opened(await warm(files))
    for number in range(2):
        found.engine.receivers[number].end(GONE)
        await settled()

    assert [call.end(GONE)] == found.receiver.mock_calls
    assert [NAMED, FULL] == found.engine.sent


async def test_a_second_loss_in_a_row(files):
    """Others' weights came and went in between: the third attempt brings its own."""
    delivery = await warm(files)
    found = await opened(delivery)
    other = await delivery.lease()
    other.lost()
    mending = await delivery.lease()
    mending.arrived()
    for number in range(2):
        found.engine.receivers[number].end(GONE)
        await settled()

    assert [NAMED, NAMED, FULL] == found.engine.sent
    assert not found.receiver.mock_calls
    found.answers.close()


async def test_a_loss_after_the_first_response_is_an_error_like_others(files):
    """What has begun cannot begin again."""
    found = await opened(await warm(files))
    found.engine.receivers[0].receive([RESPONSE])
    found.engine.receivers[0].end(GONE)

    assert call.end(GONE) == found.receiver.mock_calls[-1]


@pytest.mark.parametrize("end", ["close", "error", "nothing", "unsent"])
async def test_a_request_that_ends_without_an_answer_leaves_it_to_the_next(files, end):
    """Nobody waits for one that is gone."""
    delivery = LoraDelivery(files)
    found = Opened(delivery)
    if end != "unsent":
        await settled()
    if end in ("close", "unsent"):
        found.answers.close()
        assert all(stream.close.called for stream in found.engine.streams)
    else:
        found.engine.receivers[0].end(UpstreamTimeout("late") if end == "error" else None)
        assert 1 == len(found.receiver.mock_calls)
    await settled()

    assert FULL is (await delivery.lease()).lora


async def test_files_that_cannot_be_read_end_the_stream(files):
    """Files that cannot be read end the stream as any failure does."""
    files.error = ConfigurationError("broken")
    found = await opened(LoraDelivery(files))

    assert [call.end(files.error)] == found.receiver.mock_calls


async def test_closed_and_paused_between_two_attempts(files):
    """Nothing more is sent for what is closed; what is paused stays so."""
    delivery = await warm(files)
    found, other = await opened(delivery), await opened(delivery)
    files.gate.clear()
    found.engine.receivers[0].end(GONE)
    other.engine.receivers[0].end(GONE)
    await settled()
    found.answers.close()
    other.answers.pause()
    files.gate.set()
    await settled()

    assert 1 == len(found.engine.sent)
    assert not found.receiver.mock_calls
    other.engine.streams[1].pause.assert_called_once_with()
    other.answers.close()
