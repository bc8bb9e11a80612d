"""How long a request may take: the operator's limits, and a client's shorter ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from triton_openai.config.tree import TritonSettings
from triton_openai.errors import InvalidRequest

_Limit = TypeVar("_Limit", float, float | None)
# What remains for a request that has waited until its limit.
_LEAST_SECONDS = 0.001


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """
    Seconds until the first token, between two tokens, and for the whole answer (``None``: no limit). The wait for
    admission counts.

    Clients give theirs in the headers ``x-first-token-timeout``, ``x-idle-timeout`` and ``x-request-timeout``.
    """

    first_token: float
    idle: float
    total: float | None

    @classmethod
    def of(cls, settings: TritonSettings, headers: Mapping[str, str], *, stream: bool) -> TimeLimits:
        """Return the limits of a request; a *stream* has another total. Raises :class:`InvalidRequest`."""
        total = settings.stream_timeout if stream else settings.request_timeout
        return cls(
            first_token=_shorter("x-first-token-timeout", headers, settings.first_token_timeout),
            idle=_shorter("x-idle-timeout", headers, settings.idle_timeout),
            total=_shorter("x-request-timeout", headers, total),
        )

    @property
    def patience(self) -> float:
        """The longest time that a request may wait for admission."""
        return self.first_token if self.total is None else min(self.first_token, self.total)

    def after(self, seconds: float) -> TimeLimits:
        """Return the limits that remain after a wait of *seconds*, less than :attr:`patience`."""
        if not seconds:
            return self
        total = None if self.total is None else max(self.total - seconds, _LEAST_SECONDS)
        first_token = max(self.first_token - seconds, _LEAST_SECONDS)
        return msgspec.structs.replace(self, first_token=first_token, total=total)


def _shorter(header: str, headers: Mapping[str, str], allowed: _Limit) -> _Limit:
    """Return the seconds in *header*, *allowed* without it. Raises :class:`InvalidRequest` for more than *allowed*."""
    given = headers.get(header)
    if given is None:
        return allowed
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"The header '{header}' must be a number of seconds greater than 0.", param=header)
    if seconds > (allowed or math.inf):
        raise InvalidRequest(
            f"The header '{header}' asks for {seconds:g} seconds; this service allows {allowed:g} at most.",
            param=header,
        )
    return seconds
