"""
What a parent and its workers say to each other, over a pair of sockets that nobody else holds.

Each message is its length in four bytes and then JSON. A worker whose parent has gone finds the connection closed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from triton_openai.access.rate_limits import Decision, RateLimit
from triton_openai.config import Settings
from triton_openai.config.worker import Worker
from triton_openai.models.draining import ModelChange

_LENGTH = struct.Struct(">I")


# From the parent


class HandOver(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: which worker it is, its settings, the numbers of its listening sockets, and their address."""

    worker: Worker
    settings: Settings
    sockets: tuple[int, ...]
    address: str


class Greet(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Say what is served; *launched* is whether the Triton was started with the service, and is known to be ready."""

    launched: bool


class NewSettings(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Use these settings from now on; the answer carries the same *id*."""

    id: int
    settings: Settings
    renew: bool


class End(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End in order; with *notice*, give load balancers time to notice first."""

    notice: bool


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """End now: what still runs is told so."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """
    The answer to the message *id* of the worker.

    *decision* is that to :class:`Admit`, *taken* the model that was not free for :class:`Claim`. All other workers have
    made the change of :class:`ChangeGates`.
    """

    id: int
    decision: Decision | None = None
    taken: str | None = None


# From the worker


class Listening(msgspec.Struct, frozen=True, tag=True):
    """It accepts connections."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Its event loop turns."""


class Greeting(msgspec.Struct, frozen=True, tag=True):
    """What is served, as it is to be printed."""

    text: str


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The worker uses the settings of the message *id*."""

    id: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """
    The settings of the message *id* cannot be used: those before hold.

    Without an id, these were the first settings, and the worker ends.
    """

    reason: str
    id: int | None = None


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Count a request of the key *name* in, if *limit* allows it."""

    id: int
    name: str
    limit: RateLimit


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Count a request of the key *name* out, and the *tokens* that it used in."""

    name: str
    tokens: int


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Let no other request load or unload *models* until :class:`Unclaim`: all of them, or none."""

    id: int
    models: tuple[str, ...]


class Unclaim(msgspec.Struct, frozen=True, tag=True):
    """Give the claim of *models* back."""

    models: tuple[str, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The change *id* is made."""

    id: int


# From a worker, and from the parent to the others


class ChangeGates(msgspec.Struct, frozen=True, tag=True):
    """Make a change of *models* in the other processes, see :class:`triton_openai.models.draining.Peers`."""

    id: int
    action: ModelChange
    models: tuple[str, ...]


FromParent = HandOver | Greet | NewSettings | End | Hurry | Answer | ChangeGates
FromWorker = Listening | Alive | Greeting | Taken | Refused | Admit | Leave | Claim | Unclaim | Done | ChangeGates
Message = FromParent | FromWorker


def _decode_value(target: type, value: Any) -> Any:
    if target is Path:
        return Path(value)
    raise NotImplementedError(target)


def encode(message: Message) -> bytes:
    """Return *message* as it is sent."""
    body = msgspec.json.encode(message, enc_hook=str)
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes) -> Message:
    message: Message = msgspec.json.decode(body, type=Message, dec_hook=_decode_value)
    return message


def receive_first(connection: socket.socket) -> HandOver:
    """Wait for the hand-over on *connection*; blocks. Raises :class:`EOFError` when the parent has gone."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    message = _decode(_receive(connection, length))
    if not isinstance(message, HandOver):
        raise TypeError(f"A worker was told {type(message).__name__} first.")
    return message


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


class Channel:
    """One end of the connection. Made by :meth:`open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: socket.socket) -> Channel:
        """Talk over *connection*, which then belongs to the channel."""
        connection.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def send(self, message: Message) -> None:
        """Send *message*; one to who has gone is lost."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Message | None:
        """Return the next message, None once the other side has gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return _decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
