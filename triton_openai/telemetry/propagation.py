"""
The trace that a client continues, read from its headers, and handed on to Triton where no spans are made here.

Source of the format: W3C Trace Context. A client's headers are not to be trusted: what is no trace context is left out,
and neither an error nor a line in the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai.telemetry.observation import Observation, Observer
from triton_openai.telemetry.upstream import Upstream

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-(?P<flags>[0-9a-f]{2})(?P<rest>-[!-~]*)?"
)
_KEY = r"(?:[a-z][-_a-z0-9*/]{0,255}|[a-z0-9][-_a-z0-9*/]{0,240}@[a-z][-_a-z0-9*/]{0,13})"
_MEMBER = re.compile(rf"({_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")
# What every receiver has to take.
_LONGEST = 512
_MOST_MEMBERS = 32
_SAMPLED = 1


def trace_context(headers: CIMultiDictProxy[str] | CIMultiDict[str]) -> dict[str, str]:
    """
    Return the trace that *headers* continue, as ``traceparent`` and ``tracestate``; nothing where it is not one.

    A state that is none is left out alone.
    """
    parents = headers.getall("traceparent", ())
    if len(parents) != 1:
        return {}
    parent = parents[0]
    found = _TRACEPARENT.fullmatch(parent)
    if found is None or len(parent) > _LONGEST or (found["rest"] and parent.startswith("00")):
        return {}
    state = _state(headers.getall("tracestate", ()))
    return {"traceparent": parent, "tracestate": state} if state else {"traceparent": parent}


def _state(given: Sequence[str]) -> str:
    if not given or sum(map(len, given)) > _LONGEST:
        return ""
    members = [member.strip(" \t") for header in given for member in header.split(",")]
    found = [_MEMBER.fullmatch(member) for member in members if member]
    keys = {member[1] for member in found if member is not None}
    return ",".join(filter(None, members)) if len(keys) == len(found) <= _MOST_MEMBERS else ""


def is_recorded(context: Mapping[str, str]) -> bool:
    """Say whether the trace of a context is one that is recorded."""
    found = _TRACEPARENT.fullmatch(context.get("traceparent", ""))
    return found is not None and bool(int(found["flags"], 16) & _SAMPLED)


class Propagation(Observer):
    """Lets the trace of a client's request go on in Triton."""

    def started(self, observation: Observation) -> None:
        """Look at the request's headers."""
        context = trace_context(observation.headers)
        # Triton records whatever has a traceparent, also one that says not to.
        if is_recorded(context):
            observation.upstream = Upstream({**observation.upstream.headers, **context})
