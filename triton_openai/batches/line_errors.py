"""What follows from the error of a line: the line is wrong, or the service or Triton is in a bad state."""

from __future__ import annotations

from enum import Enum

from triton_openai import errors
from triton_openai.errors import ServiceError


class Verdict(Enum):
    """What follows from the error of a line."""

    #: The line is wrong: the error is its result.
    ENDS = "ends"
    #: Something has no capacity or does not answer at the moment: the line waits.
    BUSY = "busy"
    #: The model or its Triton is away: all lines for the model wait until it is back.
    AWAY = "away"
    #: The model or its Triton ended while the line ran, perhaps because of it.
    DIED = "died"
    #: The line or the model is to blame: whether the model answers a small request shows which.
    DOUBTFUL = "doubtful"


# Errors of this service and of Triton's queue.
_BUSY = (
    errors.Overloaded,
    errors.ServiceOverloaded,
    errors.StoreUnavailable,
    errors.StorageFull,
    errors.ConversationBusy,
    # The batch itself ends when its key is gone.
    errors.InvalidApiKey,
)


def verdict_on(error: ServiceError) -> Verdict:
    """Return what follows from *error* of a line whose model was served when the batch was validated."""
    if isinstance(error, errors.ProxyFailed):
        # A proxy also answers so while Triton starts: then the line has not reached one.
        return Verdict.AWAY
    if isinstance(error, errors.UpstreamLost | errors.ModelCrashed):
        return Verdict.DIED
    if isinstance(error, errors.ModelNotFound):
        # A key that has lost the right to use the model does not get it back by waiting.
        if error.hidden:
            return Verdict.ENDS
        return Verdict.AWAY
    if isinstance(error, errors.UpstreamUnavailable):
        return Verdict.AWAY
    if isinstance(error, _BUSY):
        return Verdict.BUSY
    if isinstance(error, errors.InvalidRequest) and not isinstance(error, errors.LoraNotLoaded):
        return Verdict.ENDS
    return Verdict.DOUBTFUL


def may_hang(error: ServiceError) -> bool:
    """Return whether a model that stopped answering may hang because of the line that failed with *error*."""
    return isinstance(error, errors.UpstreamTimeout) and not isinstance(error, errors.ProxyTimeout)


def lacks_capacity(error: ServiceError) -> bool:
    """Return whether *error* shows that Triton has more requests than it can answer."""
    if isinstance(error, errors.RateLimited):
        return False
    return isinstance(error, errors.Overloaded | errors.UpstreamTimeout | errors.UpstreamUnavailable)
