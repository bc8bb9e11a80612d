"""The limits of keys for lines: an owner whose key has reached a limit waits."""

from __future__ import annotations

import time

import structlog

from triton_openai.access.rate_limits import Reservation
from triton_openai.batches import timing
from triton_openai.batches.host import Host
from triton_openai.errors import ServiceError

_log = structlog.get_logger(__name__)


class KeyRefused(Exception):
    """The limits of a key do not admit another line now."""


class KeyLimits:
    """Asks the limits of keys for lines, and notes which owners have to wait."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._wait_until: dict[str, float] = {}

    def must_wait(self, owner: str) -> bool:
        """Return whether no line of *owner* may start now."""
        return self._wait_until.get(owner, 0.0) > time.monotonic()

    async def admit(self, owner: str) -> Reservation | None:
        """
        Count a line of *owner*; return ``None`` for a key without limits.

        Raises :class:`KeyRefused` if the line may not start: then *owner* waits.
        """
        try:
            reservation = await self._host.admit(owner)
        except ServiceError as error:
            seconds = error.retry_after or timing.POLL
        except Exception:  # noqa: BLE001 - the last resort: logged, and other owners are served
            _log.exception("limits of a key cannot be checked")
            seconds = timing.FAILURE_PAUSE
        else:
            if reservation is None or reservation.refusal is None:
                return reservation
            seconds = reservation.refusal.retry_after or timing.POLL
        now = time.monotonic()
        self._wait_until = {other: until for other, until in self._wait_until.items() if until > now}
        self._wait_until[owner] = now + seconds
        raise KeyRefused

    def release(self, owner: str, reservation: Reservation | None) -> None:
        """Close the *reservation* of a line of *owner*, which uses no more tokens."""
        if reservation is None:
            return
        reservation.close(0)
        # A key with a limit of concurrent requests has room for another one now.
        if self._wait_until.get(owner, 0.0) <= time.monotonic() + timing.POLL:
            self._wait_until.pop(owner, None)
