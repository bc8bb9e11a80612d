"""A relay of TCP connections that can stop relaying without closing anything, as a way that is cut does."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

_PIECE = 65536


class Relay:
    """Listens on ``port`` and carries bytes to and from *target*, a thread for each direction of each connection."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._frozen: set[socket.socket] = set()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """Carry nothing more over the connections that there are; they stay open. New ones are carried."""
        with self._lock:
            self._frozen |= self._open

    def reset(self) -> None:
        """End the connections that carry nothing."""
        with self._lock:
            for one in self._frozen:
                _end(one)
            self._frozen.clear()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Woken up by that, the thread that accepts ends.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
            for one in self._open:
                _end(one)
        for thread in threads:
            thread.join(120)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
                for one, other in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._carry, args=(one, other), daemon=True))
                    self._threads[-1].start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(_PIECE):
                with self._lock:
                    frozen = one in self._frozen
                if not frozen:
                    other.sendall(data)
        with self._lock:
            frozen = one in self._frozen
            self._open.discard(one)
        if not frozen:
            _end(other)
        # Nobody else reads from it, and who writes to it hears of it.
        one.close()


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
