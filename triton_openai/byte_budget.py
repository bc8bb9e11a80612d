"""A budget of bytes of memory, which requests share: each owner has a fair part of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType

from triton_openai.errors import ServiceOverloaded


class ByteBudget:
    """
    A budget of bytes.

    An owner takes at most as many bytes as stay free, so that there are always some for another owner: one owner gets
    half of the budget, two get a third each, and so on. This is the dynamic threshold of shared packet buffers
    (Choudhury and Hahne, 1998). An owner that has none may take any number that is free, and so may a reservation
    without an owner: it shares with no owner.

    A reservation that does not fit waits, and those that fit pass it. Reservations that grow come before new ones.
    A reservation larger than the whole budget waits until nothing else is reserved.
    """

    #: The part of the budget that only :meth:`Reservation.finish` takes, so that running requests can end.
    FINISHING_PART = 1 / 8

    def __init__(self) -> None:
        #: The bytes that are reserved.
        self.reserved = 0
        self._by_owner: Counter[str | None] = Counter()
        self._waiting: list[_Waiter] = []

    def open(self, owner: str | None, *, max_total: int, max_wait: float) -> Reservation:
        """
        Return a reservation of *owner*, if there is one, that has no bytes yet.

        All reservations together have *max_total* bytes.

        Use it as a context manager, which gives its bytes back, or call :meth:`Reservation.shrink`. What it cannot get
        within *max_wait* seconds raises :class:`ServiceOverloaded`.
        """
        return Reservation(self, owner, max_total, max_wait)

    async def take(self, reservation: Reservation, size: int, *, finishing: bool) -> None:
        """Add *size* bytes to *reservation* when they fit. Raises :class:`ServiceOverloaded`."""
        waiter = _Waiter(reservation, size, finishing, new=reservation.size == 0)
        if self._fits(waiter):
            self._add(reservation, size)
            return
        self._waiting.append(waiter)
        # Stable: within a kind, those that came first are the first.
        self._waiting.sort(key=lambda waiting: waiting.new)
        try:
            async with asyncio.timeout(reservation.max_wait):
                await waiter.granted.wait()
        except TimeoutError:
            if not waiter.granted.is_set():
                reason = f"The request waited {reservation.max_wait:g} seconds for others to end."
                raise ServiceOverloaded(reason, retry_after=reservation.max_wait) from None
        finally:
            if not waiter.granted.is_set():
                self._waiting.remove(waiter)

    def give_back(self, reservation: Reservation, size: int) -> None:
        """Take *size* bytes from *reservation*, and grant what fits now."""
        self._add(reservation, -size)
        for waiter in list(self._waiting):
            if self._fits(waiter):
                self._waiting.remove(waiter)
                self._add(waiter.reservation, waiter.size)
                waiter.granted.set()

    def _add(self, reservation: Reservation, size: int) -> None:
        reservation.size += size
        self.reserved += size
        self._by_owner[reservation.owner] += size
        if not self._by_owner[reservation.owner]:
            del self._by_owner[reservation.owner]

    def _fits(self, waiter: _Waiter) -> bool:
        reservation = waiter.reservation
        if self.reserved == reservation.size:
            # Nothing else is reserved.
            return True
        left = reservation.max_total - self.reserved - waiter.size
        if waiter.finishing:
            return left >= 0
        if left < reservation.max_total * self.FINISHING_PART:
            return False
        if reservation.owner is None:
            return True
        owned = self._by_owner[reservation.owner]
        return owned == 0 or owned + waiter.size <= left


class Reservation:
    """Bytes of a budget that are reserved, for *owner* if there is one."""

    def __init__(self, budget: ByteBudget, owner: str | None, max_total: int, max_wait: float) -> None:
        #: The number of bytes.
        self.size = 0
        self.owner = owner
        self.max_total = max_total
        self.max_wait = max_wait
        self._budget = budget
        self._finishing = False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shrink(0)

    async def grow(self, size: int) -> None:
        """Wait until it has *size* bytes, unless it has more. Raises :class:`ServiceOverloaded`."""
        if size > self.size:
            await self._budget.take(self, size - self.size, finishing=False)

    async def finish(self, size: int) -> None:
        """
        Add *size* bytes that are needed to end; further calls add none. Raises :class:`ServiceOverloaded`.

        A part of the budget is only for this, and no more than that part is added.
        """
        if self._finishing:
            return
        self._finishing = True
        size = min(size, int(self.max_total * self._budget.FINISHING_PART))
        await self._budget.take(self, size, finishing=True)

    def shrink(self, size: int) -> None:
        """Give back what it has beyond *size* bytes."""
        if size < self.size:
            self._budget.give_back(self, self.size - size)


class _Waiter:
    """A part of a reservation that waits."""

    def __init__(self, reservation: Reservation, size: int, finishing: bool, *, new: bool) -> None:
        self.reservation = reservation
        self.size = size
        self.finishing = finishing
        self.new = new
        self.granted = asyncio.Event()
