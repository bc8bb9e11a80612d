"""The HTTP/2 client against a server that sends exactly the bytes that a test says."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.config.tree import TritonAccess
from triton_openai.triton import http2_frames
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.http2 import LOST, UNREACHABLE, WINDOW, Call, Connection
from triton_openai.triton.http2_channel import Channel
from triton_openai.triton.http2_frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    frame,
    header_block,
)
from triton_openai.triton.tensors import Buffer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
OPEN = header_block([(":status", "200"), ("content-type", "application/grpc+proto")])
TRAILERS = header_block([("grpc-status", "0"), ("grpc-message", "")])
Frame = tuple[int, int, int, bytes]


def settings(**values: int) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", getattr(http2_frames, k), v) for k, v in values.items()))


def message(data: bytes) -> bytes:
    """Return a gRPC message."""
    return b"\0" + struct.pack(">I", len(data)) + data


def number(value: int) -> bytes:
    """Return *value* as frames have it."""
    return struct.pack(">I", value)


def answer(stream_id: int, *texts: bytes) -> bytes:
    """Return a whole answer, a frame for each of *texts*."""
    return b"".join([
        frame(HEADERS, END_HEADERS, stream_id, OPEN),
        *(frame(DATA, 0, stream_id, message(text)) for text in texts),
        frame(HEADERS, END_HEADERS | END_STREAM, stream_id, TRAILERS),
    ])  # fmt: skip


def frames(data: bytes) -> Iterator[Frame]:
    """Yield the frames of what a client has sent."""
    while data:
        size = int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]
        data = data[9 + size :]


class Taking(Call):
    """A call that keeps what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[Buffer]] = []
        self.end_of_call: tuple[str, str] | None = None
        self.ended = asyncio.Event()
        self.on_messages: Callable[[], object] | None = None
        self.on_end: Callable[[], object] = lambda: None

    def messages_received(self, messages: list[Buffer]) -> None:
        """Keep them."""
        assert messages
        assert self.end_of_call is None
        self.batches.append(messages)
        if self.on_messages is not None:
            self.on_messages()

    def call_ended(self, code: str, details: str) -> None:
        """Keep it."""
        assert self.end_of_call is None
        self.end_of_call = code, details
        self.ended.set()
        self.on_end()

    @property
    def texts(self) -> list[Buffer]:
        """All messages."""
        return [text for batch in self.batches for text in batch]


class Wire:
    """A connection whose other end is the test: what it sends is collected, what it is fed comes from the server."""

    def __init__(self, greeting: bytes | None = None, clock: Clock | None = None) -> None:
        self._sent = bytearray()
        self.transport = Mock()
        self.transport.write = self._sent.extend
        self.transport.is_closing = lambda: self.transport.abort.called or self.transport.close.called
        self.transport.get_extra_info.return_value = None
        self.channel = Channel("grpc://127.0.0.1:1", "/service/Method", ConnectionSettings(connect_timeout=60))
        self.connection = self.channel._current = Connection(self.channel.submit)
        if clock is not None:
            self.connection._loop = clock  # type: ignore[assignment]
        self.connection.connection_made(self.transport)
        self.greeting = bytes(self._sent)
        self._sent.clear()
        self.feed(settings() if greeting is None else greeting)
        self.sent()

    def call(self, request: bytes = b"request") -> Taking:
        """Start a call."""
        call = Taking()
        self.channel.start(call, request, {})
        return call

    def feed(self, *data: bytes) -> None:
        """Let the server send *data*, each in a packet of its own."""
        for each in data:
            self.connection.data_received(each)

    def sent(self) -> list[Frame]:
        """Return what has been sent since the last call."""
        data = bytes(self._sent)
        self._sent.clear()
        return list(frames(data))

    def lose(self, error: Exception | None = None) -> None:
        """Break the connection."""
        self.connection.connection_lost(error)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A connection that has been greeted."""
    made = Wire()
    yield made
    made.lose()
    await made.channel.close()


# What is received.


async def test_the_greeting(wire):
    """No table of headers, no pushes, one window for each call, and as much as the server likes in all."""
    assert wire.greeting.startswith(PREFACE)
    (first, second) = frames(wire.greeting.removeprefix(PREFACE))
    assert (SETTINGS, 0, 0) == first[:3]
    assert {1: 0, 2: 0, INITIAL_WINDOW_SIZE: WINDOW} == dict(struct.iter_unpack(">HI", first[3]))
    assert (WINDOW_UPDATE, 0, 0, number(2**31 - 1 - 65_535)) == second


def script(stream_id: int = 1) -> bytes:
    """Return an answer with everything in it that frames may have."""
    data = message(b"one") + message(b"") + message(b"two" * 50) + message(b"three")
    long = OPEN + header_block([("x-long", "y" * 100)])
    return b"".join([
        frame(PING, ACK, 0, bytes(8)),
        frame(HEADERS, PADDED | WITH_PRIORITY, stream_id, b"\3" + bytes(5) + long[:20] + bytes(3)),
        frame(CONTINUATION, 0, stream_id, long[20:21]),
        frame(CONTINUATION, 0, stream_id, b""),
        frame(CONTINUATION, END_HEADERS, stream_id, long[21:]),
        frame(0xFA, 0xFF, stream_id, b"unknown"),
        frame(PRIORITY, 0, stream_id, bytes(5)),
        frame(DATA, 0, stream_id, data[:3]),
        frame(DATA, PADDED, stream_id, b"\2" + data[3:4] + bytes(2)),
        frame(DATA, 0, stream_id, b""),
        frame(DATA, PADDED, stream_id, b"\0" + data[4:40]),
        frame(DATA, 0, stream_id, data[40:]),
        frame(DATA, 0, stream_id, message(b"whole")),
        frame(DATA, 0, stream_id, message(b"a") + message(b"b")),
        # What looks like a whole message is a part of one.
        frame(DATA, 0, stream_id, message(message(b"c"))[:5]),
        frame(DATA, 0, stream_id, message(b"c")),
        frame(HEADERS, END_STREAM, stream_id, TRAILERS[:4]),
        frame(CONTINUATION, END_HEADERS, stream_id, TRAILERS[4:]),
    ])  # fmt: skip


TEXTS = [b"one", b"", b"two" * 50, b"three", b"whole", b"a", b"b", message(b"c")]


async def test_bytes_cut_at_every_place():
    """However an answer falls into packets, it is the same answer."""
    data = script()
    cuts: list[Sequence[bytes]] = [[data[:cut], data[cut:]] for cut in range(1, len(data))]
    cuts.append([bytes([byte]) for byte in data])
    # The highest bit of a stream's number is reserved, and means nothing.
    cuts.append([script(1 | 1 << 31)])
    for packets in cuts:
        wire = Wire()
        call = wire.call()
        wire.feed(*packets)
        assert (TEXTS, ("OK", "")) == (call.texts, call.end_of_call)
        wire.lose()
    assert [TEXTS] == _received([data]).batches


def _received(packets: Sequence[bytes]) -> Taking:
    wire = Wire()
    call = wire.call()
    wire.feed(*packets)
    wire.lose()
    return call


@given(
    texts=st.lists(st.binary(max_size=300), max_size=8),
    places=st.lists(st.integers(0, 2000)),
    cuts=st.lists(st.integers(0, 4000)),
    padding=st.lists(st.integers(0, 20), min_size=1),
)
def test_any_frames_in_any_packets(texts: list[bytes], places: list[int], cuts: list[int], padding: list[int]) -> None:
    """Messages, frames and packets may begin and end anywhere."""
    data = b"".join(map(message, texts))
    answered = frame(HEADERS, END_HEADERS, 1, OPEN)
    for turn, part in enumerate(_parts(data, places)):
        size = padding[turn % len(padding)]
        answered += frame(DATA, PADDED, 1, bytes([size]) + part + bytes(size)) if size else frame(DATA, 0, 1, part)
    answered += frame(HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS)

    async def receive() -> Taking:
        return _received(_parts(answered, cuts))

    call = asyncio.run(receive())

    assert (texts, ("OK", "")) == (call.texts, call.end_of_call)


def _parts(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[start:end] for start, end in pairwise(ends)]


async def test_what_arrives_together_is_received_together(wire):
    """Messages of a call in one packet come in one batch, in order; calls do not mix."""
    one, two = wire.call(), wire.call()
    wire.feed(frame(HEADERS, END_HEADERS, 1, OPEN) + frame(HEADERS, END_HEADERS, 3, OPEN))
    wire.feed(b"".join(frame(DATA, 0, 1 + 2 * (n % 2), message(b"%d" % n)) for n in range(6)))
    wire.feed(frame(DATA, 0, 1, message(b"6")) + frame(HEADERS, END_HEADERS | END_STREAM, 1, TRAILERS))

    assert [[b"0", b"2", b"4"], [b"6"]] == one.batches
    assert [[b"1", b"3", b"5"]] == two.batches
    assert (("OK", ""), None) == (one.end_of_call, two.end_of_call)


async def test_a_large_message(wire):
    """A large message is put together from many frames."""
    call = wire.call()
    data = message(bytes(range(256)) * 20_000)
    wire.feed(frame(HEADERS, END_HEADERS, 1, OPEN))
    wire.feed(*(frame(DATA, 0, 1, data[start : start + 16_384]) for start in range(0, len(data), 16_384)))

    assert [data[5:]] == call.texts


# How calls end.


def ended(*headers: tuple[str, str], flags: int = END_HEADERS | END_STREAM) -> bytes:
    """Return headers that end a call."""
    return frame(HEADERS, flags, 1, header_block(headers))


BEGUN = frame(HEADERS, END_HEADERS, 1, OPEN)
GRPC = ((":status", "200"), ("content-type", "application/grpc"))


@every_case(
    "data, code, details",
    [
        # Trailers, and trailers alone.
        (BEGUN + ended(("grpc-status", "5"), ("grpc-message", "n%C3%A9 %25 fo%")), "NOT_FOUND", "né % fo%"),
        (ended(*GRPC, ("grpc-status", "14"), ("grpc-message", "later")), "UNAVAILABLE", "later"),
        (ended(*GRPC, ("grpc-status", "0")), "OK", ""),
        (BEGUN + ended(("grpc-status", "99")), "UNKNOWN", ""),
        (BEGUN + ended(("grpc-status", "x")), "UNKNOWN", ""),
        # What a status is missing in.
        (BEGUN + ended(("x", "y")), "INTERNAL", "without a status"),
        (BEGUN + frame(DATA, END_STREAM, 1, message(b"a")), "INTERNAL", "without a status"),
        (ended(*GRPC), "INTERNAL", "without a status"),
        (BEGUN + ended(("x", "y"), flags=END_HEADERS), "INTERNAL", "without a status"),
        # What is not gRPC.
        (ended((":status", "503")), "HTTP_503", "HTTP status 503"),
        (ended((":status", "404"), flags=END_HEADERS) + frame(DATA, END_STREAM, 1, b"<html>"), "HTTP_404", "404"),
        (ended((":status", "500")), "HTTP_500", "HTTP status 500"),
        (ended((":status", "103")), "HTTP_103", "HTTP status 103"),
        (ended((":status", "200"), ("content-type", "text/html"), flags=END_HEADERS), "HTTP_200", "not gRPC"),
        # A good status before the end of a message.
        (BEGUN + frame(DATA, 0, 1, message(b"abc")[:-1]) + ended(("grpc-status", "0")), "INTERNAL", "within a message"),
        # Messages that are none.
        (BEGUN + frame(DATA, 0, 1, b"\1" + message(b"abc")[1:]), "INTERNAL", "compressed message"),
        (BEGUN + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "TOO_LONG", "4294967295 bytes"),
        (BEGUN + frame(DATA, PADDED, 1, b"\4abc"), "INTERNAL", "padding"),
        # Resets.
        (frame(RST_STREAM, 0, 1, number(CANCEL)), "CANCELLED", "error 8"),
        (BEGUN + frame(RST_STREAM, 0, 1, number(REFUSED_STREAM)), "UNAVAILABLE", "error 7"),
        (BEGUN + frame(RST_STREAM, 0, 1, number(2)), "INTERNAL", "error 2"),
        (BEGUN + frame(DATA, 0, 1, message(b"a")) + frame(RST_STREAM, 0, 1, number(0)), "INTERNAL", "error 0"),
    ],
)  # fmt: skip
async def test_the_end_of_a_call(data: bytes, code: str, details: str) -> None:
    """Each call ends once, with a status of gRPC or of HTTP and a text; the connection serves on."""
    wire = Wire()
    call, other = wire.call(), wire.call()
    wire.feed(data)

    assert call.end_of_call is not None
    assert code == call.end_of_call[0]
    assert details in call.end_of_call[1]
    wire.feed(answer(3, b"fine"))
    assert ([b"fine"], ("OK", "")) == (other.texts, other.end_of_call)
    wire.lose()


async def test_headers_that_are_not_the_last_word(wire):
    """Early metadata are passed over."""
    call = wire.call()
    wire.feed(frame(HEADERS, END_HEADERS, 1, header_block([(":status", "103")])) + answer(1, b"one"))

    assert ([b"one"], ("OK", "")) == (call.texts, call.end_of_call)


async def test_headers_without_a_table(wire):
    """Servers say that they keep none, and write each header out, also in answers that nobody waits for any more."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    gone, call = wire.call(), wire.call()
    gone.cancel()
    wire.feed(
        frame(HEADERS, END_HEADERS, 1, encoder.encode([(":status", "200"), ("content-type", "application/grpc")]))
    )
    wire.feed(
        frame(HEADERS, END_HEADERS, 3, encoder.encode([(":status", "200"), ("content-type", "application/grpc")]))
    )
    wire.feed(frame(HEADERS, END_HEADERS | END_STREAM, 3, encoder.encode([("grpc-status", "0")])))

    assert (None, ("OK", "")) == (gone.end_of_call, call.end_of_call)
    assert not wire.transport.abort.called


async def test_cancelling(wire):
    """The server is told, what still comes is ignored, and the call never ends."""
    call, other = wire.call(), wire.call()
    wire.feed(BEGUN)
    wire.sent()
    call.cancel()
    call.cancel()

    assert [(RST_STREAM, 0, 1, number(CANCEL))] == wire.sent()
    wire.feed(frame(DATA, 0, 1, message(b"late")), frame(RST_STREAM, 0, 1, number(CANCEL)), answer(3, b"fine"))
    assert ([], None) == (call.texts, call.end_of_call)
    assert [b"fine"] == other.texts


async def test_cancelling_while_receiving(wire):
    """A call may be cancelled by what it receives: nothing more comes, although it is there."""
    call = wire.call()
    call.on_messages = call.cancel
    wire.feed(answer(1, b"one")[:-9])
    wire.feed(answer(1, b"one", b"two"))

    assert ([[b"one"]], None) == (call.batches, call.end_of_call)


async def test_a_call_that_fails_to_take_its_messages(wire):
    """A call that fails to take its messages ends; its connection and all other calls go on."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    call, other = wire.call(), wire.call()
    call.on_messages = lambda: 1 // 0
    wire.feed(BEGUN + frame(DATA, 0, 1, message(b"one")) + answer(3, b"fine"))

    assert LOST == (call.end_of_call or "")[0]
    assert [b"fine"] == other.texts
    assert ["ZeroDivisionError"] == [type(each["exception"]).__name__ for each in complaints]


# What ends a connection.


@every_case(
    "data, reason",
    [
        (b"\xff\xff\xff" + bytes(6), "16777215 bytes"),
        (frame(CONTINUATION, END_HEADERS, 1, OPEN), "header block"),
        (frame(HEADERS, 0, 1, OPEN) + frame(DATA, 0, 1, b""), "header block"),
        (frame(HEADERS, 0, 1, OPEN) + frame(CONTINUATION, 0, 3, b""), "header block"),
        (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, bytes(16_384)) * 5, "too many headers"),
        (frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1) * 17, "too many headers"),
        (frame(HEADERS, END_HEADERS, 1, b"\x82" * 2000), "cannot be read"),
        (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff"), "cannot be read"),
        # It refers to a table, which it was not allowed.
        (frame(HEADERS, END_HEADERS, 1, b"\x88\xbe"), "cannot be read"),
        (frame(HEADERS, END_HEADERS, 9, OPEN), "unknown stream"),
        (frame(HEADERS, END_HEADERS | PADDED, 1, b"\5abc"), "padding"),
        (frame(SETTINGS, 0, 0, b"abc"), "cannot be read"),
        (settings(MAX_FRAME_SIZE=16_383), "frames of 16383 bytes"),
        (settings(MAX_FRAME_SIZE=1 << 24), "frames of 16777216 bytes"),
        (frame(GOAWAY, 0, 0, b"abc"), "cannot be read"),
        (frame(RST_STREAM, 0, 1, b"abc"), "cannot be read"),
        (frame(WINDOW_UPDATE, 0, 0, number(0)), "window"),
        (frame(WINDOW_UPDATE, 0, 0, number(2**31 - 1)), "window"),
        (frame(PUSH_PROMISE, END_HEADERS, 1, number(2) + OPEN), "unknown stream"),
    ],
)  # fmt: skip
async def test_what_no_server_may_send(data: bytes, reason: str) -> None:
    """The server is told why, and every call is lost at once."""
    wire = Wire()
    calls = [wire.call() for _ in range(3)]
    wire.sent()
    wire.feed(data)

    (goodbye,) = wire.sent()
    assert (GOAWAY, 0, 0, number(0) + number(1)) == goodbye
    assert wire.transport.abort.called
    wire.lose()
    for call in calls:
        assert call.end_of_call is not None
        assert LOST == call.end_of_call[0]
        assert reason in call.end_of_call[1]


async def test_a_lost_connection(wire):
    """Hundreds of calls hear of it at once, each after what had come for it."""
    calls = [wire.call() for _ in range(500)]
    wire.feed(BEGUN + frame(DATA, 0, 1, message(b"one")))
    wire.lose(ConnectionResetError("reset by peer"))

    assert {(LOST, "ConnectionResetError: reset by peer")} == {call.end_of_call for call in calls}
    assert [b"one"] == calls[0].texts


# Flow control of what is received.


def windows(sent: Sequence[Frame]) -> dict[int, int]:
    """Return what is given back to each stream."""
    assert {WINDOW_UPDATE} >= {kind for kind, *_ in sent}
    return {stream_id: int.from_bytes(data, "big") for _, _, stream_id, data in sent}


@every_case("how", ["lost", "farewell", "unreachable"])
async def test_a_call_whose_end_cancels_another(how: str) -> None:
    """A call may cancel another that ends with it: the other one hears nothing more, and a third does."""
    wire = Wire()
    if how == "unreachable":
        wire.connection.drain()
        wire.channel._address = "127.0.0.1", 1
    first, second, third = wire.call(), wire.call(), wire.call()
    first.on_end = second.cancel
    if how == "lost":
        wire.lose()
    elif how == "farewell":
        opened = b"".join(frame(HEADERS, END_HEADERS, stream_id, OPEN) for stream_id in (1, 3, 5))
        wire.feed(opened, frame(GOAWAY, 0, 0, number(0) + number(2)))
    await asyncio.wait_for(third.ended.wait(), 120)

    assert [True, False, True] == [call.ended.is_set() for call in (first, second, third)]


async def test_windows_are_given_back(wire):
    """A window is given back when half of the stream's, or of the connection's, is used up."""
    wire.call()
    wire.sent()
    wire.feed(BEGUN)
    part = frame(DATA, 0, 1, message(bytes(16_379)))
    wire.feed(part * 8)
    assert {} == windows(wire.sent())
    wire.feed(part)
    assert {1: 9 * 16_384} == windows(wire.sent())
    wire.connection._unacknowledged = 2**30 - 20_000
    wire.feed(part)
    assert {} == windows(wire.sent())
    wire.feed(part)
    assert {0: 2**30 - 20_000 + 2 * 16_384} == windows(wire.sent())


async def test_a_paused_call_holds_back_itself_alone(wire):
    """
    A paused call gets nothing and gives no window back; calls beside it go on, and the connection's window comes
    back.
    """
    slow, quick = wire.call(), wire.call()
    wire.feed(BEGUN, frame(HEADERS, END_HEADERS, 3, OPEN))
    wire.sent()
    slow.pause()
    part = bytes(16_379)
    for _ in range(16):
        wire.feed(frame(DATA, 0, 1, message(part)) + frame(DATA, 0, 3, message(part)))

    assert {3: 9 * 16_384} == windows(wire.sent())
    assert (0, 16) == (len(slow.texts), len(quick.texts))
    slow.resume()
    assert {1: 16 * 16_384} == windows(wire.sent())
    assert [16] == [len(batch) for batch in slow.batches]
    slow.resume()
    assert [] == wire.sent()


async def test_the_end_waits_for_what_is_kept_back(wire):
    """A paused call ends after its messages; one that has received all ends at once."""
    call, done = wire.call(), wire.call()
    call.pause()
    done.pause()
    wire.feed(answer(1, b"one", b"two"), answer(3))
    assert ([], None, ("OK", "")) == (call.batches, call.end_of_call, done.end_of_call)
    call.on_messages = call.pause
    call.resume()

    assert ([[b"one", b"two"]], ("OK", "")) == (call.batches, call.end_of_call)


async def test_cancelling_what_is_kept_back(wire):
    """Nothing of it is received afterwards."""
    call = wire.call()
    call.pause()
    wire.feed(answer(1, b"one"))
    call.cancel()
    call.resume()

    assert ([], None) == (call.batches, call.end_of_call)


# Flow control of what is sent.


def sizes(sent: Sequence[Frame]) -> list[tuple[int, int, int]]:
    """Return the flags, the stream and the size of each DATA frame."""
    return [(flags, stream_id, len(data)) for kind, flags, stream_id, data in sent if kind == DATA]


async def test_a_small_request(wire):
    """Headers and request leave together."""
    wire.call(b"abc")

    assert [HEADERS, DATA] == [kind for kind, *_ in wire.sent()]


async def test_a_request_larger_than_the_windows(wire):
    """A request larger than the windows is sent as far as both windows reach, and on when they are extended."""
    wire.call(bytes(99_995))
    assert [(0, 1, 16_384)] * 3 + [(0, 1, 16_383)] == sizes(wire.sent())
    wire.feed(frame(WINDOW_UPDATE, 0, 1, number(20_000)))
    assert [] == sizes(wire.sent())
    wire.feed(frame(WINDOW_UPDATE, 0, 0, number(100_000)))
    assert [(0, 1, 16_384), (0, 1, 3616)] == sizes(wire.sent())
    wire.feed(settings(INITIAL_WINDOW_SIZE=65_536))
    assert [(0, 1, 1)] == sizes(wire.sent())
    wire.feed(frame(WINDOW_UPDATE, 0, 1, number(50_000)))
    assert [(END_STREAM, 1, 14_464)] == sizes(wire.sent())


async def test_windows_and_frames_of_the_server_s_size():
    """The server's settings bound what is sent; a window may even fall below zero."""
    wire = Wire(settings(INITIAL_WINDOW_SIZE=10, MAX_FRAME_SIZE=20_000))
    wire.call(bytes(49_995))
    assert [(0, 1, 10)] == sizes(wire.sent())
    wire.feed(settings(INITIAL_WINDOW_SIZE=0), frame(WINDOW_UPDATE, 0, 1, number(10)))
    assert [] == sizes(wire.sent())
    wire.feed(frame(WINDOW_UPDATE, 0, 1, number(60_000)))
    assert [(0, 1, 20_000), (0, 1, 20_000), (END_STREAM, 1, 9990)] == sizes(wire.sent())
    wire.lose()


async def test_requests_share_the_connection_s_window(wire):
    """What one leaves the next may use; each is sent to its end."""
    calls = [wire.call(bytes(39_995)) for _ in range(3)]
    sent = sizes(wire.sent())
    assert 65_535 == sum(size for *_, size in sent)
    wire.feed(frame(WINDOW_UPDATE, 0, 0, number(60_000)))
    sent += sizes(wire.sent())
    assert {1: 40_000, 3: 40_000, 5: 40_000} == {
        stream: sum(size for _, one, size in sent if one == stream) for stream in (1, 3, 5)
    }
    assert [1, 3, 5] == sorted(stream for flags, stream, _ in sent if flags)
    assert all(call.end_of_call is None for call in calls)


@every_case("how", ["cancel", "status", "reset"])
async def test_a_request_that_is_not_wanted_to_its_end(how: str) -> None:
    """What is left of it is not sent when the windows allow it, and the server knows."""
    wire = Wire(settings(INITIAL_WINDOW_SIZE=200_000))
    call = wire.call(bytes(100_000))
    wire.sent()
    if how == "cancel":
        call.cancel()
    else:
        wire.feed(ended(*GRPC, ("grpc-status", "8")) if how == "status" else frame(RST_STREAM, 0, 1, number(CANCEL)))
    assert [(RST_STREAM, 0, 1, number(CANCEL))] == wire.sent()
    wire.feed(frame(WINDOW_UPDATE, 0, 0, number(100_000)), frame(WINDOW_UPDATE, 0, 1, number(100_000)))

    assert [] == wire.sent()
    wire.lose()


# Signs of life.


async def test_pings_are_answered(wire):
    """With what was in them; answers to pings are not."""
    wire.feed(frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, b"12345678"))

    assert [(PING, ACK, 0, b"12345678")] == wire.sent()


async def test_settings_are_acknowledged(wire):
    """Acknowledgements are not; what is not known is ignored."""
    wire.feed(frame(SETTINGS, 0, 0, struct.pack(">HI", 99, 1)), frame(SETTINGS, ACK, 0))

    assert [(SETTINGS, ACK, 0, b"")] == wire.sent()


class Clock:
    """A loop's clock and timers, which a test puts forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Mock, Callable[..., object], tuple[object, ...]]] = []

    def time(self) -> float:
        """Return the seconds since the beginning."""
        return self.now

    def call_later(self, delay: float, call: Callable[..., object], *arguments: object) -> Any:
        """Set a timer."""
        handle = Mock(cancelled=False)
        handle.cancel = lambda: setattr(handle, "cancelled", True)
        self._timers.append((self.now + delay, handle, call, arguments))
        return handle

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass."""
        until = self.now + seconds
        while due := sorted((timer for timer in self._timers if timer[0] <= until), key=lambda timer: timer[0]):
            timer = due[0]
            self._timers.remove(timer)
            self.now, handle, call, arguments = timer
            if not handle.cancelled:
                call(*arguments)
        self.now = until


async def test_silence_is_asked_about() -> None:
    """A server that answers no ping is gone, and every call is lost."""
    wire = Wire(clock=(clock := Clock()))
    call = wire.call()
    wire.feed(BEGUN)
    wire.sent()
    clock.advance(19)
    assert [] == wire.sent()
    clock.advance(21)
    assert [(PING, 0, 0, bytes(8))] == wire.sent()
    clock.advance(9)
    assert not wire.transport.abort.called
    clock.advance(1)
    assert wire.transport.abort.called
    wire.lose()
    assert (LOST, "the server gave no sign of life for 10 seconds") == call.end_of_call


async def test_silence_of_the_model_alone() -> None:
    """A server that answers pings keeps its calls, and is not asked more often than servers put up with."""
    wire = Wire(clock=(clock := Clock()))
    call = wire.call()
    wire.feed(BEGUN)
    pings = 0
    for _ in range(600):
        clock.advance(1)
        for kind, *_ in wire.sent():
            pings += kind == PING
            wire.feed(frame(PING, ACK, 0, bytes(8)))
    assert 2 == pings
    assert call.end_of_call is None
    for _ in range(600):
        clock.advance(1)
        wire.feed(frame(DATA, 0, 1, message(b"token")))
    assert PING not in {kind for kind, *_ in wire.sent()}
    for _ in range(2):
        # The server has sent something in between.
        wire.feed(frame(DATA, 0, 1, message(b"token")))
        clock.advance(41)
        assert [PING] == [kind for kind, *_ in wire.sent()]


async def test_a_connection_without_calls_is_closed() -> None:
    """A connection without calls is closed before whoever is between us forgets it."""
    wire = Wire(clock=(clock := Clock()))
    clock.advance(30)
    call = wire.call()
    wire.feed(answer(1))
    clock.advance(19)
    assert not wire.transport.close.called
    clock.advance(60)
    assert wire.transport.close.called
    assert ("OK", "") == call.end_of_call


# Connections, over real sockets.


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.decoder = hpack.Decoder()

    async def greet(self, **values: int) -> None:
        """Read the client's greeting and answer it."""
        await self.greeting()
        self.writer.write(settings(**values))
        await self.frame(SETTINGS)

    async def greeting(self) -> None:
        """Read all that the client sends before it is greeted."""
        assert PREFACE == await self._reader.readexactly(len(PREFACE))
        await self.frame(SETTINGS)
        await self.frame(WINDOW_UPDATE)

    async def frame(self, kind: int) -> Frame:
        """Return the next frame, which is of this *kind*."""
        head = await asyncio.wait_for(self._reader.readexactly(9), 120)
        data = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        assert kind == head[3]
        return head[3], head[4], int.from_bytes(head[5:9], "big"), data

    async def request(self) -> tuple[int, bytes]:
        """Return the stream and the message of the next call."""
        await self.frame(HEADERS)
        _, _, stream_id, data = await self.frame(DATA)
        return stream_id, data[5:]

    async def closed(self) -> None:
        """Wait until the client has closed the connection."""
        assert b"" == await asyncio.wait_for(self._reader.read(), 120)


class Server:
    """A server whose connections the test takes one by one."""

    def __init__(self) -> None:
        self._accepted: asyncio.Queue[Peer] = asyncio.Queue()
        self._peers: list[Peer] = []

    async def start(self) -> None:
        """Listen, and make a channel to it."""
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.channel = Channel(
            f"grpc://127.0.0.1:{self.port}", "/service/Method", ConnectionSettings(connect_timeout=60)
        )

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._peers.append(Peer(reader, writer))
        self._accepted.put_nowait(self._peers[-1])

    async def peer(self, **values: int) -> Peer:
        """Return the next connection, greeted."""
        peer = await asyncio.wait_for(self._accepted.get(), 120)
        await peer.greet(**values)
        return peer

    async def stop(self) -> None:
        """Close everything."""
        await self.channel.close()
        self.server.close()
        for peer in self._peers:
            peer.writer.transport.abort()
        await self.server.wait_closed()

    def call(self, request: bytes = b"request") -> Taking:
        """Start a call."""
        call = Taking()
        self.channel.start(call, request, {})
        return call


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.stop()


async def outcome(call: Taking) -> tuple[list[Buffer], str, str]:
    """Return what a call has received, and its end."""
    await asyncio.wait_for(call.ended.wait(), 120)
    assert call.end_of_call is not None
    return call.texts, *call.end_of_call


async def test_one_connection_for_many_calls(server):
    """Calls that begin before it is there wait for it together."""
    calls = [server.call(b"%d" % number) for number in range(20)]
    peer = await server.peer()
    for _ in calls:
        stream_id, text = await peer.request()
        peer.writer.write(answer(stream_id, text))

    assert [([b"%d" % number], "OK", "") for number in range(20)] == [await outcome(call) for call in calls]


async def test_a_name_for_certificates_without_tls(server):
    """A name for certificates is for the encrypted one of two addresses."""
    settings = ConnectionSettings(connect_timeout=60, access=TritonAccess(server_name="triton.internal"))
    server.channel = Channel(f"grpc://127.0.0.1:{server.port}", "/service/Method", settings)
    call = server.call()
    peer = await server.peer()
    stream_id, _ = await peer.request()
    peer.writer.write(answer(stream_id, b"one"))

    assert ([b"one"], "OK", "") == await outcome(call)


async def test_headers(server):
    """Pseudo-headers come first; nothing is put into tables; what does not fit into a frame is continued."""
    own = {"traceparent": "00-1-2-01", **{f"x-{size}": "z" * size for size in (126, 127, 128)}, "x-long": "y" * 20_000}
    for own_headers in ({}, own):
        server.channel.start(Taking(), b"x", own_headers)
    peer = await server.peer()
    _, flags, _, first = await peer.frame(HEADERS)
    assert (END_HEADERS, b"\x20") == (flags, first[:1])
    expected = [
        (":method", "POST"), (":scheme", "http"), (":path", "/service/Method"),
        (":authority", f"127.0.0.1:{server.port}"), ("content-type", "application/grpc"), ("te", "trailers"),
    ]  # fmt: skip
    found = peer.decoder.decode(first)
    assert expected == found[:6]
    assert ["user-agent"] == [name for name, _ in found[6:]]
    await peer.frame(DATA)
    _, flags, _, block = await peer.frame(HEADERS)
    assert (0, 16_384) == (flags, len(block))
    _, flags, _, rest = await peer.frame(CONTINUATION)
    assert END_HEADERS == flags
    assert [*found, *own.items()] == peer.decoder.decode(block + rest)
    assert 0 == peer.decoder.header_table_size


async def test_a_farewell(server):
    """What the server has taken is finished on the old connection; what it has not goes to a new one, as all that
    follows."""
    kept, moved = server.call(b"kept"), server.call(b"moved")
    old = await server.peer()
    await old.request()
    await old.request()
    old.writer.write(frame(GOAWAY, 0, 0, number(1) + number(0)))
    new = await server.peer()
    assert (1, b"moved") == await new.request()
    later = server.call(b"later")
    assert (3, b"later") == await new.request()
    new.writer.write(answer(1, b"two") + answer(3, b"three"))
    assert ([b"two"], "OK", "") == await outcome(moved)
    assert ([b"three"], "OK", "") == await outcome(later)
    assert kept.end_of_call is None
    old.writer.write(answer(1, b"one"))
    assert ([b"one"], "OK", "") == await outcome(kept)
    await old.closed()


async def test_a_farewell_for_what_has_begun(server):
    """A call that was answered in part is not sent again, whatever the server says of it."""
    call = server.call()
    peer = await server.peer()
    await peer.request()
    peer.writer.write(BEGUN + frame(DATA, 0, 1, message(b"one")) + frame(GOAWAY, 0, 0, number(0) + number(2) + b"why"))

    assert ([b"one"], LOST, "the server ended the connection: error 2 why") == await outcome(call)


async def test_a_refused_call(server):
    """A refused call is sent again, but not for ever."""
    call = server.call()
    peer = await server.peer()
    for stream_id in (1, 3, 5):
        assert (stream_id, b"request") == await peer.request()
        peer.writer.write(frame(RST_STREAM, 0, stream_id, number(REFUSED_STREAM)))

    assert ([], "UNAVAILABLE", "the server reset the call: error 7") == await outcome(call)


@every_case("most", [0, 1, 2])
async def test_a_bound_on_calls(most: int) -> None:
    """A connection that takes no more calls is replaced, and ends with those that it has."""
    server = Server()
    await server.start()
    room = max(most, 1)
    calls = [server.call(b"%d" % number) for number in range(2 * room)]
    one = await server.peer(MAX_CONCURRENT_STREAMS=most)
    two = await server.peer(MAX_CONCURRENT_STREAMS=most)
    for place in range(room):
        assert b"%d" % place == (await one.request())[1]
    for place in range(room):
        assert b"%d" % (room + place) == (await two.request())[1]
    one.writer.write(answer(1))
    await outcome(calls[0])
    server.call(b"last")
    three = await server.peer()
    assert (1, b"last") == await three.request()
    for call in calls:
        call.cancel()
    for peer in (one, two):
        for _ in range(room - (peer is one)):
            await peer.frame(RST_STREAM)
        await peer.closed()
    await server.stop()


async def test_stream_ids_used_up(server):
    """A connection that has had all of them is replaced."""
    first = server.call(b"first")
    old = await server.peer()
    await old.request()
    assert server.channel._current is not None
    server.channel._current._next_id = 2**31 - 1
    second, third = server.call(b"second"), server.call(b"third")
    assert (2**31 - 1, b"second") == await old.request()
    new = await server.peer()
    assert (1, b"third") == await new.request()
    old.writer.write(answer(1) + answer(2**31 - 1))
    new.writer.write(answer(1))
    for call in (first, second, third):
        assert ([], "OK", "") == await outcome(call)
    await old.closed()


async def test_a_connection_that_breaks(server):
    """All its calls end, and the next one has a new connection."""
    calls = [server.call() for _ in range(500)]
    peer = await server.peer()
    for _ in calls:
        await peer.request()
    peer.writer.transport.abort()
    assert {LOST} == {(await outcome(call))[1] for call in calls}
    call = server.call()
    peer = await server.peer()
    await peer.request()
    peer.writer.write(answer(1, b"one"))

    assert ([b"one"], "OK", "") == await outcome(call)


async def test_doubt(server):
    """Further calls take a new connection, and the server has to show that it is there for those that run."""
    call = server.call()
    old = await server.peer()
    await old.request()
    server.channel.reconnect()
    await old.frame(PING)
    server.call(b"next")
    new = await server.peer()
    assert (1, b"next") == await new.request()
    old.writer.write(frame(PING, ACK, 0, bytes(8)) + answer(1, b"one"))

    assert ([b"one"], "OK", "") == await outcome(call)
    await old.closed()


async def test_cancelling_before_there_is_a_connection(server):
    """A call that is cancelled before there is a connection sends nothing."""
    call, other = server.call(b"cancelled"), server.call(b"other")
    call.cancel()
    call.cancel()
    peer = await server.peer()

    assert (1, b"other") == await peer.request()
    assert None is call.end_of_call is other.end_of_call


@every_case(
    "said, reason",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "frame of"),
        (b"", "the server closed the connection"),
        (frame(PING, 0, 0, bytes(8)), "does not start with HTTP/2 settings"),
        (frame(GOAWAY, 0, 0, number(0) + number(1)), "does not start with HTTP/2 settings"),
    ],
)
async def test_a_server_that_does_not_greet(said: bytes, reason: str) -> None:
    """Nothing is sent to what does not speak HTTP/2; every call that waited ends."""
    server = Server()
    await server.start()
    calls = [server.call() for _ in range(3)]
    peer = await asyncio.wait_for(server._accepted.get(), 120)
    # A connection with unread bytes would be reset when it is closed.
    await peer.greeting()
    peer.writer.write(said)
    peer.writer.close()
    for call in calls:
        texts, code, details = await outcome(call)
        assert ([], UNREACHABLE) == (texts, code)
        assert reason in details
    await server.stop()


async def test_a_server_that_only_takes_connections() -> None:
    """
    A server that only takes connections is given up in time; the next call tries again, and closing ends the
    attempt.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"grpc://127.0.0.1:{listening.getsockname()[1]}"
        channel = Channel(url, "/service/Method", ConnectionSettings(connect_timeout=0.05))
        for _ in range(2):
            call = Taking()
            channel.start(call, b"", {})
            assert ([], UNREACHABLE, "Connection timed out") == await outcome(call)
        channel.start(Taking(), b"", {})
        await asyncio.sleep(0)
        await channel.close()
        assert {asyncio.current_task()} == asyncio.all_tasks()


async def test_closing(server):
    """Calls that run, and those that wait, are cut off."""
    running = server.call()
    peer = await server.peer(MAX_CONCURRENT_STREAMS=1)
    await peer.request()
    waiting = server.call()
    await server.channel.close()

    for call in (running, waiting):
        assert ([], LOST, "the service stopped") == await outcome(call)
