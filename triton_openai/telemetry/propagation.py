"""
The trace that a client continues, handed on to Triton where no spans are made here.

Source of the format: W3C Trace Context, level 1. A client's headers are not to be trusted: what is no trace context is
left out, and never an error.
"""

from __future__ import annotations

import re

from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai.telemetry.observation import Observation, Observer
from triton_openai.telemetry.upstream import Upstream

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-[!-~]*)?")
# What every receiver has to take.
_LONGEST_STATE = 512
_SAMPLED = 1


def trace_headers(headers: CIMultiDictProxy[str] | CIMultiDict[str]) -> dict[str, str]:
    """
    Return those of *headers* that continue a trace which is recorded; nothing where it is not recorded.

    Triton records whatever has a ``traceparent``, also one that says not to.
    """
    parents = headers.getall("traceparent", ())
    if len(parents) != 1:
        return {}
    parent = parents[0]
    found = _TRACEPARENT.fullmatch(parent)
    if found is None or not int(found[1], 16) & _SAMPLED or (found[2] and parent.startswith("00")):
        return {}
    state = ",".join(headers.getall("tracestate", ()))
    if not state or len(state) > _LONGEST_STATE or not (state.isascii() and state.isprintable()):
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}


class Propagation(Observer):
    """Lets the trace of a client's request go on in Triton."""

    def started(self, observation: Observation) -> None:
        """Look at the request's headers."""
        headers = trace_headers(observation.headers)
        if headers:
            observation.upstream = Upstream({**observation.upstream.headers, **headers})
