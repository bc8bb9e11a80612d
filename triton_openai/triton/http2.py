"""
HTTP/2 for gRPC calls of one request and many answers: all calls share a connection, on asyncio's protocols.

This is the hot path over gRPC: once per token a DATA frame is parsed here. grpc.aio takes several times the CPU time
for the same stream (`make bench` measures it), so streams do not go through it; all other calls do.

Source of the facts: RFC 9113 (HTTP/2), RFC 7541 (HPACK, through hpack) and gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import unquote

import grpc
import hpack

from triton_openai.config.tls import PERHAPS_REFUSED, failure_reason
from triton_openai.triton.http2_frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_SIZE,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADERS,
    MESSAGE,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTING,
    SETTINGS,
    UINT31,
    UINT32,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    decode_headers,
    frame,
    unpadded,
)
from triton_openai.triton.tensors import LARGE, Buffer

# The most that a stream of a slow client keeps in memory. The connection's window does not limit streams.
WINDOW = 256 * 1024
_HALF_WINDOW = WINDOW // 2
# Frames of one header block after its first: each copies what came before.
_MAX_CONTINUATIONS = 16
# The longest message that protobuf reads.
_MAX_MESSAGE = UINT31
# The attempts of a call that the server has certainly not begun.
_ATTEMPTS = 3
# After this silence, a connection with open calls is pinged and one without is closed.
SILENCE_SECONDS = 20.0
PING_SECONDS = 10.0
# Servers end a connection for pings that follow closer than 5 minutes, unless they have sent something in between.
_NEXT_PING_SECONDS = 310.0

_CODES = {str(code.value[0]).encode(): code.name for code in grpc.StatusCode}
_BY_RESET = {REFUSED_STREAM: "UNAVAILABLE", CANCEL: "CANCELLED"}
#: Codes of our own: no connection could be made, the connection broke, and a message was longer than the call takes.
#: All others are gRPC's.
UNREACHABLE = "UNREACHABLE"
LOST = "LOST"
TOO_LONG = "TOO_LONG"
#: The prefix of our own codes for an HTTP status of an answer that is not gRPC's.
FOREIGN = "HTTP_"


class _TooLong(ValueError):
    """A message is longer than the call takes."""


class Call:
    """
    One call. Subclasses implement :meth:`messages_received` and :meth:`call_ended`.

    Neither is called before the method that starts the call has returned, or after :meth:`cancel`.
    """

    def __init__(self) -> None:
        #: The most bytes of a message that is received.
        self.max_message = _MAX_MESSAGE
        # Encoded; known from the start on.
        self.headers = b""
        # Forgets the call while it waits for a connection.
        self.withdraw: Callable[[Call], None] | None = None
        # The connection while the call runs.
        self.connection: Connection | None = None
        self.stream_id = 0
        # The whole request, kept until the server begins to answer, and the part of it that is not sent yet.
        self.request: bytes | None = None
        self.unsent = memoryview(b"")
        self.window = 0
        self.attempts = 0
        # The received part of a message, and the number of bytes without a window update.
        self.partial = bytearray()
        self.messages: list[Buffer] = []
        self.outcome: tuple[str, str] | None = None
        self.paused = False
        self.unacknowledged = 0

    def messages_received(self, messages: list[Buffer]) -> None:
        """Take the messages that arrived together, at least one; one of more than LARGE bytes may be a view."""
        raise NotImplementedError

    def call_ended(self, code: str, details: str) -> None:
        """Take the end: gRPC's status, or a code of our own, and its text."""
        raise NotImplementedError

    def pause(self) -> None:
        """Receive nothing until :meth:`resume`; the server may send one window more."""
        self.paused = True

    def resume(self) -> None:
        """Receive again, beginning with what arrived in the meantime."""
        if self.paused:
            self.paused = False
            if self.connection is not None:
                self.connection.acknowledge(self)
            self.deliver()

    def cancel(self) -> None:
        """Receive nothing more, and make the server cancel the call unless it has ended."""
        self.messages = []
        self.outcome = None
        if self.connection is not None:
            self.connection.reset(self)
        elif self.withdraw is not None:
            self.withdraw(self)

    def end(self, code: str, details: str) -> None:
        """Pass on the end, after the messages before it."""
        self.withdraw = None
        self.outcome = code, details
        self.deliver()

    def deliver(self) -> None:
        """Pass on the received messages and the end, unless paused."""
        if self.paused and self.messages:
            return
        if self.messages:
            messages = self.messages
            self.messages = []
            try:
                self.messages_received(messages)
            except Exception as error:  # noqa: BLE001 - one call's mistake must not end all others of the connection
                asyncio.get_running_loop().call_exception_handler({"message": "a call failed", "exception": error})
                self.cancel()
                self.outcome = LOST, "an answer could not be handled"
        # It may be paused or cancelled by now.
        if self.outcome is not None and not self.messages:
            outcome = self.outcome
            self.outcome = None
            self.call_ended(*outcome)

    def feed(self, data: bytes) -> None:
        """Collect the messages that *data* completes. Raises :class:`ValueError` for an invalid message."""
        partial = self.partial
        partial += data
        while len(partial) >= MESSAGE.size:
            compressed, size = MESSAGE.unpack_from(partial)
            if compressed:
                raise ValueError("the server sent a compressed message, which was not offered")
            if size > self.max_message:
                raise _TooLong(f"the server sent a message of {size} bytes")
            end = MESSAGE.size + size
            if len(partial) < end:
                return
            if size > LARGE and len(partial) == end:
                # Not copied: that would hold the event loop.
                self.messages.append(memoryview(partial)[MESSAGE.size :])
                self.partial = bytearray()
                return
            with memoryview(partial) as view:
                self.messages.append(bytes(view[MESSAGE.size : end]))
            del partial[:end]


class Connection(asyncio.Protocol):
    """
    One HTTP/2 connection. *resubmit* sends a call that the server has not begun over another connection.

    It has more than 20 methods: asyncio calls three, each type of frame has one, and a call and its channel need the
    rest.
    """

    def __init__(self, resubmit: Callable[[Call], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._resubmit = resubmit
        self._transport: asyncio.Transport | None = None
        #: Done when the server has sent its settings; fails with :class:`ConnectionError`.
        self.ready: asyncio.Future[None] = self._loop.create_future()
        # Accepts no new calls, and closes after the last one.
        self._draining = False
        self._reason = ""
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._max_calls = UINT31
        # The received part of a frame, and of a header block with its stream and flags.
        self._rest = b""
        self._block: tuple[int, int, bytes] | None = None
        self._continuations = 0
        self._unacknowledged = 0
        # Sending
        self._max_frame = FRAME_SIZE
        self._initial_window = DEFAULT_WINDOW
        self._window = DEFAULT_WINDOW
        self._blocked: dict[int, Call] = {}
        # Keepalive
        self._active = True
        self._next_ping = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pong: asyncio.TimerHandle | None = None

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._timer = self._loop.call_later(SILENCE_SECONDS, self._check_silence)
        # Without a table, a header block means the same on every connection.
        wanted = (HEADER_TABLE_SIZE, 0), (ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, WINDOW)
        settings = b"".join([SETTING.pack(*setting) for setting in wanted])
        window = frame(WINDOW_UPDATE, 0, 0, UINT32.pack(UINT31 - DEFAULT_WINDOW))
        self._write(PREFACE + frame(SETTINGS, 0, 0, settings) + window)

    def data_received(self, data: bytes) -> None:
        """Parse all whole frames, then pass each call its messages in one piece."""
        if self._pong is not None:
            self._pong.cancel()
            self._pong = None
        if self._rest:
            data = self._rest + data
        received: list[Call] = []
        calls = self._calls
        position = 0
        available = len(data)
        try:
            while available - position >= 9:
                upper, lower, kind, flags, stream_id = FRAME.unpack_from(data, position)
                size = upper << 8 | lower
                if size > FRAME_SIZE:
                    raise ValueError(f"the server sent a frame of {size} bytes")
                start = position + 9
                end = position + 9 + size
                if end > available:
                    break
                position = end
                if kind != DATA or self._block is not None:
                    self._frame_received(kind, flags, stream_id & UINT31, data[start:end])
                    continue
                self._unacknowledged += size
                # The highest bit is reserved. No server sets it, so it is masked only if no call matches.
                call = calls.get(stream_id) or calls.get(stream_id & UINT31)
                if call is None:
                    continue
                call.unacknowledged += size
                if not call.messages:
                    received.append(call)
                # The usual frame holds one whole message.
                if size > 5 and not (flags or call.partial) and MESSAGE.unpack_from(data, start) == (0, size - 5):
                    call.messages.append(data[start + 5 : end])
                else:
                    self._on_data(call, flags, data[start:end])
                if call.unacknowledged > _HALF_WINDOW:
                    self.acknowledge(call)
        except (ValueError, hpack.HPACKError, struct.error, IndexError) as error:
            self._write(frame(GOAWAY, 0, 0, struct.pack(">II", 0, PROTOCOL_ERROR)))
            reason = f"the server sent what cannot be read: {error}"
            if type(error) is ValueError:
                reason = str(error)
            self.close(reason)
        self._rest = data[position:]
        if self._unacknowledged > 2**30:
            self._write(frame(WINDOW_UPDATE, 0, 0, UINT32.pack(self._unacknowledged)))
            self._unacknowledged = 0
        if received:
            self._active = True
            for call in received:
                call.deliver()

    def connection_lost(self, error: Exception | None) -> None:
        assert self._transport is not None
        for timer in (self._timer, self._pong):
            if timer is not None:
                timer.cancel()
        self._draining = True
        reason = self._reason
        if not reason and error is None:
            reason = "the server closed the connection"
        elif not reason and error is not None:
            reason = failure_reason(error)
        if not self.ready.done():
            if self._transport.get_extra_info("sslcontext") and not (self._reason or isinstance(error, ssl.SSLError)):
                reason = PERHAPS_REFUSED
            self.ready.set_exception(ConnectionError(reason))
            # Retrieved, because maybe no task waits for it any more.
            self.ready.exception()
        # The end of one may cancel others, here and wherever several end together.
        while self._calls:
            call = next(iter(self._calls.values()))
            self._forget(call)
            call.end(LOST, reason)

    # Frames

    def _frame_received(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self.ready.done() and kind != SETTINGS:
            raise ValueError("the server does not start with HTTP/2 settings")
        if (self._block is None) is (kind == CONTINUATION):
            raise ValueError("the server broke off a header block")
        if stream_id >= self._next_id or kind == PUSH_PROMISE:
            raise ValueError("the server sent a frame for an unknown stream")
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, flags, stream_id, payload)

    def _on_data(self, call: Call, flags: int, payload: bytes) -> None:
        try:
            call.feed(unpadded(flags, payload))
        except _TooLong as problem:
            self._finish(call, TOO_LONG, str(problem))
        except ValueError as problem:
            self._finish(call, "INTERNAL", str(problem))
        else:
            if flags & END_STREAM:
                self._finish(call, "INTERNAL", "the server ended the call without a status", ended=True)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None:
            first_id, first_flags, block = self._block
            if stream_id != first_id:
                raise ValueError("the server broke off a header block")
            flags |= first_flags
            payload = block + payload
            self._block = None
            self._continuations += 1
        else:
            payload = unpadded(flags, payload)
            if flags & WITH_PRIORITY:
                payload = payload[5:]
            self._continuations = 0
        if len(payload) > MAX_HEADERS or self._continuations > _MAX_CONTINUATIONS:
            raise ValueError("the server sent too many headers")
        if flags & END_HEADERS:
            fields = decode_headers(payload)
            call = self._calls.get(stream_id)
            if call is not None:
                self._active = True
                self._headers_received(call, fields, ended=bool(flags & END_STREAM))
        else:
            self._block = stream_id, flags, payload

    def _headers_received(self, call: Call, fields: Mapping[bytes, bytes], *, ended: bool) -> None:
        call.request = None
        code = fields.get(b"grpc-status")
        status = fields.get(b":status")
        if code is not None:
            details = unquote(fields.get(b"grpc-message", b"").decode("latin-1"))
            self._finish(call, _CODES.get(code, "UNKNOWN"), details, ended=ended)
        elif status is not None and status.startswith(b"1") and not ended:
            pass
        elif status is not None and status != b"200":
            details = f"the server answered with HTTP status {status.decode('latin-1')}"
            self._finish(call, f"{FOREIGN}{status.decode('latin-1')}", details, ended=ended)
        elif status is not None and not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            self._finish(call, f"{FOREIGN}200", "the server's answer is not gRPC", ended=ended)
        elif ended or status is None:
            self._finish(call, "INTERNAL", "the server ended the call without a status", ended=ended)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        call = self._calls.get(stream_id)
        (code,) = UINT32.unpack(payload)
        if call is not None and not (code == REFUSED_STREAM and self._retry(call)):
            self._finish(call, _BY_RESET.get(code, "INTERNAL"), f"the server reset the call: error {code}", ended=True)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & ACK:
            return
        for setting, value in SETTING.iter_unpack(payload):
            if setting == MAX_CONCURRENT_STREAMS:
                # A server that takes none refuses each call itself.
                self._max_calls = max(value, 1)
            elif setting == MAX_FRAME_SIZE:
                if not FRAME_SIZE <= value < 1 << 24:
                    raise ValueError(f"the server takes frames of {value} bytes, which HTTP/2 does not have")
                self._max_frame = value
            elif setting == INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self._initial_window
                self._initial_window = value
        self._write(frame(SETTINGS, ACK, 0))
        if not self.ready.done():
            self.ready.set_result(None)
        self._send_blocked()

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & ACK:
            self._write(frame(PING, ACK, 0, payload))

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        last, code = struct.unpack_from(">II", payload)
        self._reason = f"the server ended the connection: error {code} {payload[8:200].decode('utf-8', 'replace')}"
        self._draining = True
        for call in [call for call in self._calls.values() if call.stream_id > last & UINT31]:
            if call.connection is self and not self._retry(call):
                self._finish(call, LOST, self._reason, ended=True)
        self._end_if_unused()

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        increment = UINT32.unpack(payload)[0] & UINT31
        call = self._calls.get(stream_id)
        if not stream_id:
            self._window += increment
        elif call is not None:
            call.window += increment
        if self._window > UINT31 or not increment:
            raise ValueError("the server extended a window by nothing or beyond its limit")
        self._send_blocked()

    # Called by calls and the channel

    @property
    def has_capacity(self) -> bool:
        """Whether it accepts another call."""
        return not self._draining and len(self._calls) < self._max_calls

    def open(self, call: Call) -> None:
        """Send *call*, if the connection :attr:`has_capacity`."""
        assert call.request is not None
        call.withdraw = None
        call.connection = self
        call.stream_id = self._next_id
        call.attempts += 1
        call.window = self._initial_window
        call.unsent = memoryview(call.request)
        self._calls[call.stream_id] = call
        # HPACK: the table of sent headers stays empty, whatever size the server allows.
        if call.stream_id == 1:
            block = b"\x20" + call.headers
        else:
            block = call.headers
        self._next_id += 2
        self._draining = self._draining or self._next_id > UINT31
        frames = []
        for start in range(0, len(block), FRAME_SIZE):
            part = block[start : start + FRAME_SIZE]
            kind = CONTINUATION
            if start == 0:
                kind = HEADERS
            flags = 0
            if start + FRAME_SIZE >= len(block):
                flags = END_HEADERS
            frames.append(frame(kind, flags, call.stream_id, part))
        self._send(call, frames)

    def acknowledge(self, call: Call) -> None:
        """Extend the window of *call* by what it has used, unless it is paused."""
        if not call.paused and call.unacknowledged:
            self._write(frame(WINDOW_UPDATE, 0, call.stream_id, UINT32.pack(call.unacknowledged)))
            call.unacknowledged = 0

    def reset(self, call: Call) -> None:
        """Make the server cancel the call."""
        self._write(frame(RST_STREAM, 0, call.stream_id, UINT32.pack(CANCEL)))
        self._forget(call)
        self._end_if_unused()

    def drain(self) -> None:
        """Accept no new calls, and close after the last one."""
        self._draining = True
        self._end_if_unused()

    def ping(self) -> None:
        """Ping the server, and close the connection if it sends nothing for :data:`PING_SECONDS`."""
        now = self._loop.time()
        if self._pong is None and now >= self._next_ping:
            self._next_ping = now + _NEXT_PING_SECONDS
            self._write(frame(PING, 0, 0, bytes(8)))
            reason = f"the server gave no sign of life for {PING_SECONDS:g} seconds"
            self._pong = self._loop.call_later(PING_SECONDS, self.close, reason)

    def close(self, reason: str = "") -> None:
        """End it with all its calls."""
        self._reason = self._reason or reason
        self._draining = True
        if self._transport is not None:
            self._transport.abort()

    # Internal

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _send(self, call: Call, frames: list[bytes]) -> None:
        """Send *frames*, then as much of the request of *call* as the windows allow."""
        while call.unsent:
            size = min(len(call.unsent), self._max_frame, self._window, call.window)
            if size <= 0:
                self._blocked[call.stream_id] = call
                break
            # An empty slice would keep the whole request in memory.
            data = call.unsent[:size]
            call.unsent = call.unsent[size:] or memoryview(b"")
            self._window -= size
            call.window -= size
            flags = END_STREAM
            if call.unsent:
                flags = 0
            frames.append(frame(DATA, flags, call.stream_id, data))
        self._write(b"".join(frames))

    def _send_blocked(self) -> None:
        blocked = self._blocked
        self._blocked = {}
        for call in blocked.values():
            self._send(call, [])

    def _finish(self, call: Call, code: str, details: str, *, ended: bool = False) -> None:
        """End *call*, and reset it unless the server has *ended* it."""
        if call.unsent or not ended:
            self.reset(call)
        else:
            self._forget(call)
        if call.partial and code == "OK":
            code = "INTERNAL"
            details = "the server ended the call within a message"
        call.end(code, details)
        self._end_if_unused()

    def _forget(self, call: Call) -> None:
        del self._calls[call.stream_id]
        self._blocked.pop(call.stream_id, None)
        call.connection = None

    def _end_if_unused(self) -> None:
        if self._draining and not self._calls and self._transport is not None:
            self._transport.close()

    def _retry(self, call: Call) -> bool:
        """Send *call* again, if the server has not begun it and attempts are left; return whether it was sent."""
        if call.request is None or call.attempts >= _ATTEMPTS:
            return False
        self._forget(call)
        self._resubmit(call)
        return True

    def _check_silence(self) -> None:
        self._timer = self._loop.call_later(SILENCE_SECONDS, self._check_silence)
        if self._active:
            self._active = False
            self._next_ping = 0.0
        elif self._calls:
            self.ping()
        else:
            # A load balancer in between may drop it without notice.
            self.drain()


# Frames of other types are ignored.
_HANDLERS: Mapping[int, Callable[[Connection, int, int, bytes], None]] = {
    HEADERS: Connection._on_headers,
    RST_STREAM: Connection._on_reset,
    SETTINGS: Connection._on_settings,
    PING: Connection._on_ping,
    GOAWAY: Connection._on_goaway,
    WINDOW_UPDATE: Connection._on_window_update,
    CONTINUATION: Connection._on_headers,
}
