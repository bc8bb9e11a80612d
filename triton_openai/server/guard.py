"""
The door: restricted APIs first, then the API key, then what the key may still use.

It stands before every handler, so nothing of a body is read for who is not let in. What is not asked for costs a look
at an empty table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from triton_openai.api.access import KEY
from triton_openai.api.groups import COUNTED, group_of
from triton_openai.config import AccessSettings
from triton_openai.server.charging import tokens_charged
from triton_openai.server.credentials import identify
from triton_openai.server.key_source import Keys
from triton_openai.server.ratelimits import RateLimits, Ticket, open_limits
from triton_openai.server.restrictions import Restrictions
from triton_openai.telemetry.observation import OBSERVATION
from triton_openai.worker import WORKER

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_TICKET: web.RequestKey[Ticket] = web.RequestKey("ticket", Ticket)


class Guard:
    """
    Who is let in; *directory* is what the processes of the service share, if there are several.

    Raises :class:`ConfigurationError` for keys that cannot be used.
    """

    def __init__(self, settings: AccessSettings, *, directory: Path | None = None) -> None:
        self.keys = Keys(settings, directory=directory)
        self.restrictions = Restrictions(settings.openai_restricted_api)
        self.limits: RateLimits | None = None

    def prepare(self, settings: AccessSettings) -> Callable[[], None]:
        """Return what puts new *settings* of keys and restrictions in force. Raises :class:`ConfigurationError`."""
        take_keys = self.keys.prepare(settings)

        def take() -> None:
            take_keys()
            self.restrictions.replace(settings.openai_restricted_api)

        return take

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Count with the other workers and watch the file of keys while *app* runs."""
        self.limits = open_limits(app[WORKER])
        watching = asyncio.create_task(self.keys.watch())
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self.limits.close()


GUARD: web.AppKey[Guard] = web.AppKey("guard", Guard)


@web.middleware
async def let_in(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request through to its handler, or raise :class:`ServiceError`."""
    guard, group = request.app[GUARD], group_of(request)
    if group is not None:
        guard.restrictions.check(group, request.headers)
    ring = guard.keys.ring
    if ring is None or group == "health":
        return await handler(request)
    # A path that is not there needs a key as well: whoever has none learns nothing.
    key = identify(request.headers, ring)
    observation = request[OBSERVATION]
    request[KEY] = key
    observation.key = key.name
    if guard.limits is None or not key.limit.any or group not in COUNTED:
        return await handler(request)
    ticket = request[_TICKET] = guard.limits.admit(key.name, key.limit)
    if ticket.refusal is not None:
        raise ticket.refusal
    served = cut_short = False
    try:
        response = await handler(request)
        served = True
        return response
    except (asyncio.CancelledError, ConnectionError):
        cut_short = True
        raise
    finally:
        cut_short |= observation.client_left
        counts = key.limit.tokens_per_minute is not None
        ticket.close(tokens_charged(observation, served=served, cut_short=cut_short) if counts else 0)


async def add_limit_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say in every answer, streams and errors included, what the key may still use."""
    ticket = request.get(_TICKET)
    if ticket is not None:
        response.headers.update(ticket.headers)
