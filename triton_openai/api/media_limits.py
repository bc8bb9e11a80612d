"""
The limits of requests with media: seconds of audio for each key, and memory for files that arrive and are decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from triton_openai.access.rate_limits import RateLimit
from triton_openai.api.bodies import ModelRequest, read_form
from triton_openai.api.service import Service
from triton_openai.byte_budget import Reservation
from triton_openai.config.tree import Settings
from triton_openai.errors import PayloadTooLarge, RateLimited
from triton_openai.operations import Call, Form
from triton_openai.shares import SHARING_KEY

# The accounts of seconds of audio: no key has such a name.
_AUDIO = "audio\n"
# Bytes of a form beside its file.
_FIELDS = 1024 * 1024
# Seconds after which a file that has not arrived is counted by what has arrived of it.
_FAST_UPLOAD_SECONDS = 5.0
_Request = TypeVar("_Request", bound=ModelRequest)


@contextlib.asynccontextmanager
async def counting_audio(service: Service, call: Call[Any]) -> AsyncIterator[None]:
    """
    Charge the key of *call* with the seconds of audio that its record has at the end.

    Raises :class:`RateLimited` where the key has none left in this minute.
    """
    key = call.key
    record = call.record
    limits = service.authorizer.limits
    max_seconds = key.limit.audio_seconds_per_minute
    account = _AUDIO + key.name
    if max_seconds is None:
        yield
        return
    decision = await limits.admit(account, RateLimit(tokens_per_minute=max_seconds))
    told = {name.replace("tokens", "audio-seconds"): value for name, value in decision.headers.items()}
    record.headers = {**record.headers, **told}
    if decision.refusal is not None:
        wait = decision.refusal.wait
        raise RateLimited(
            f"Rate limit reached for '{key.name}' on seconds of audio per minute: limit {max_seconds}. "
            f"Please try again in {math.ceil(wait)}s.",
            kind="audio_seconds",
            wait=wait,
        )
    try:
        yield
    finally:
        limits.leave(account, math.ceil(sum(record.audio_seconds.values())))


class Upload:
    """
    The memory for a file of audio that is uploaded.

    The whole file is reserved at first, so that those that arrive quickly do not wait for each other half-way. What
    takes longer has only what has arrived: slow clients do not keep others out with what they promise to send.
    """

    def __init__(self, form: Form, reservation: Reservation) -> None:
        #: The bytes of the file, and what is decoded of it.
        self.reservation = reservation
        self._form = form
        self._slow = False
        self._timer = asyncio.get_running_loop().call_later(_FAST_UPLOAD_SECONDS, self._count_arrived)

    def _count_arrived(self) -> None:
        """Give back what has not arrived yet."""
        self._slow = True
        self.reservation.shrink(self._form.size)

    async def arrived(self, size: int) -> None:
        """Wait until *size* bytes that have arrived are reserved. Raises :class:`ServiceOverloaded`."""
        if self._slow:
            await self.reservation.grow(size)

    def end(self) -> None:
        """Note that no more arrives, and give back what was reserved beyond it."""
        self._timer.cancel()
        self.reservation.shrink(self._form.size)

    async def reserve_decoded(self, size: int) -> None:
        """Reserve *size* bytes for what is decoded at the same time. Raises :class:`ServiceOverloaded`."""
        await self.reservation.finish(size)

    def decoded(self, size: int) -> None:
        """Note that all that is decoded has *size* bytes, which may be less than was reserved."""
        self.reservation.shrink(self._form.size + size)


@contextlib.asynccontextmanager
async def receiving_audio(service: Service, call: Call[Form]) -> AsyncIterator[Upload]:
    """
    Count the audio that *call* brings, as :func:`counting_audio` does, and wait until there is memory for it.

    Raises also :class:`PayloadTooLarge`, before anything is read, and :class:`ServiceOverloaded`.
    """
    limits = service.settings.audio
    max_size = max_form_size(service.settings)
    # Unless a client says how much it sends.
    if call.body.declared_size is None:
        size = max_size
    else:
        size = call.body.declared_size
    if size > max_size:
        raise audio_too_large(limits.max_file_size)
    async with counting_audio(service, call):
        with media_reservation(service) as reservation:
            await reservation.grow(size)
            upload = Upload(call.body, reservation)
            try:
                yield upload
            finally:
                upload.end()


async def form_of(
    service: Service, call: Call[Form], kind: type[_Request], *, max_size: int, upload: Upload | None = None
) -> _Request:
    """
    Return the form of *call*, of *max_size* bytes at most, as *kind*; *upload* counts what arrives.

    Raises as :func:`read_form`.
    """
    settings = service.settings
    on_arrival = None
    if upload is not None:
        on_arrival = upload.arrived
    body = await read_form(
        call.body,
        kind,
        call.record,
        settings.limits,
        strict=settings.api.strict_parameters,
        max_size=max_size,
        on_arrival=on_arrival,
    )
    if upload is not None:
        upload.end()
    return body


def media_reservation(service: Service) -> Reservation:
    """Return a reservation for media of the current request; nothing is reserved yet."""
    return service.media.open(
        SHARING_KEY.get(),
        max_total=service.settings.audio.max_total_size,
        max_wait=service.settings.server.queue_timeout,
    )


def audio_too_large(max_size: int) -> PayloadTooLarge:
    """Return the error for a file of more than *max_size* bytes."""
    return PayloadTooLarge(f"The file is larger than the limit of {max_size} bytes.", param="file")


def max_form_size(settings: Settings) -> int:
    """Return the most bytes of a form with a recording."""
    return settings.audio.max_file_size + _FIELDS
