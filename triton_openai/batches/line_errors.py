"""What the error of a line says: whether the line is to blame, or the state of the service or of Triton."""

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
    #: The model or its Triton is not there: all lines for the model wait until it is.
    AWAY = "away"
    #: The model or its Triton ended while the line ran, perhaps because of it.
    DIED = "died"
    #: The line or the model is to blame: whether the model answers a small request shows which.
    DOUBTFUL = "doubtful"


# Those of this service and of Triton's queue.
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
    """Return what follows from *error*, by which a line failed whose model was there when the batch was made."""
    if isinstance(error, errors.ProxyFailed):
        # A proxy says so as well while it cannot connect to a Triton that starts: the line may not have reached one.
        return Verdict.AWAY
    if isinstance(error, errors.UpstreamLost | errors.ModelCrashed):
        return Verdict.DIED
    if isinstance(error, errors.ModelNotFound):
        # A key that may not use the model any more is no matter of time.
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
    """Return whether a model that answers nothing more may hang because of the line that failed by *error*."""
    return isinstance(error, errors.UpstreamTimeout) and not isinstance(error, errors.ProxyTimeout)


def lacks_capacity(error: ServiceError) -> bool:
    """Return whether *error* says that Triton has more requests than it can answer."""
    if isinstance(error, errors.RateLimited):
        return False
    return isinstance(error, errors.Overloaded | errors.UpstreamTimeout | errors.UpstreamUnavailable)
