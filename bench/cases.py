"""The measurements: which load each case puts on each subject."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from bench.messages import CHOICES, Form
from bench.parsers import QUICK_SIZES, SIZES
from bench.repository import FLOOD, FLOOD_CALL, PACED, PACED_CALL, SLOW, TOKEN

CASES = (
    "paced", "flood", "latency", "short", "burst", "crowd", "tools", "choices", "responses", "messages", "agents",
    "long", "traces", "path", "chains", "footprint", "parsers", "demo",
)  # fmt: skip

# More than any measured window has time for.
_ENDLESS = 1_000_000
# Long enough that requests do not count, short enough that Triton's queues stay small when its client is slower.
_FLOOD_TOKENS = 1000
_BURST_CLIENTS = 256
CROWD = 2000
# The service writes an access log: only the second one does so too.
FLOORS = ("floor", "floor-logged")
_OURS = ("ours-http", "ours-grpc")
_ALL = ("triton-http", "triton-grpc", "nginx", *_OURS)
_TRACED = ("ours-http", "ours-traced")
# Few enough that they do not wait for each other, enough that the processes do not wait for them.
_SHORT_CLIENTS = 4
# Where a case is compared with text, it is at this number of streams.
COMPARED = 128
_SHORT_FORMS: tuple[Form, ...] = ("text", "whole")
AGENTS: tuple[Form, ...] = ("agent-responses", "agent-messages")


@dataclass(frozen=True)
class Plan:
    """One measurement of one case; the same for every subject."""

    case: str
    model: str
    streams: int
    tokens: int
    ramp: float = 0.0
    warm: float = 0.0
    seconds: float = 0.0
    answers: int | None = None
    settled: bool = False
    rounds: int = 1
    form: Form = "text"
    # Who takes part
    subjects: tuple[str, ...] = _ALL


class Row(msgspec.Struct, kw_only=True):
    """What one measurement of one subject gave, in the units of the report."""

    case: str
    streams: int
    subject: str
    form: Form = "text"
    # Of each answer.
    tokens: int = 0
    tokens_per_second: float
    first_p50_ms: float | None
    first_p99_ms: float | None
    first_max_ms: float | None
    # Requests whose first token took a second or more.
    stalls: int
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    # CPU time of the relay (nothing for a direct connection) and of Triton, in microseconds.
    cpu_us_per_token: float | None
    triton_us_per_token: float | None
    cpu_us_per_answer: float | None
    # Share of one core.
    relay_busy: float | None
    client_busy: float
    resident_mib: float | None
    peak_mib: float | None
    # The same of each round, in order: how far they lie apart says how quiet the machine was.
    round_tokens_per_second: list[float] = []
    round_cpu_us_per_token: list[float | None] = []


def plans(cases: Sequence[str], streams: Sequence[int], seconds: float, rounds: int, *, quick: bool) -> Iterator[Plan]:
    """
    Return what is to be measured, in order.

    In each of the *rounds* the subjects take turns, so that a noisy minute is everybody's.
    """
    for case in cases:
        if case == "paced":
            # They start one after the other over a second, as users do; the burst case is for the other thing.
            for count in streams:
                yield Plan(case, PACED, count, _ENDLESS, min(1.0, count / 64), 1.0, seconds, rounds=rounds)
        elif case == "flood":
            for count in streams:
                yield Plan(case, FLOOD, count, _FLOOD_TOKENS, warm=0.5, seconds=seconds, rounds=rounds)
        elif case == "latency":
            yield Plan(case, FLOOD, 1, 1, answers=20 if quick else 100, rounds=2 * rounds)
        elif case == "short":
            for form in _SHORT_FORMS:
                yield Plan(
                    case,
                    FLOOD,
                    _SHORT_CLIENTS,
                    1,
                    answers=300 if quick else 2000,
                    rounds=rounds,
                    form=form,
                    # Passed on as it is, an answer is streamed.
                    subjects=(*FLOORS, *_OURS) if form == "whole" else (*FLOORS, "nginx", *_OURS),
                )
        elif case == "burst":
            yield Plan(case, FLOOD, _BURST_CLIENTS, 4, answers=_BURST_CLIENTS, rounds=rounds)
        elif case == "crowd":
            # Four tokens a second each, so that one process can: what is asked is what many open streams cost.
            subjects = ("nginx", *_OURS)
            yield Plan(case, SLOW, CROWD, _ENDLESS, 5.0, 1.0, max(seconds, 3.0), rounds=1, subjects=subjects)
        elif case == "tools":
            # What the direct connections take is in `paced`: for them a call is text.
            yield _compared(case, PACED_CALL, COMPARED, seconds, rounds, form="tools", subjects=("nginx", *_OURS))
        elif case == "choices":
            yield _compared(case, PACED, COMPARED // CHOICES, seconds, rounds, form="choices", subjects=_OURS)
        elif case in ("responses", "messages"):
            if case == "responses":
                form = "responses"
            else:
                form = "messages"
            yield _compared(case, PACED, COMPARED, seconds, rounds, form=form, subjects=_OURS)
        elif case == "agents":
            for form in AGENTS:
                if quick:
                    answers = 100
                else:
                    answers = 500
                yield Plan(
                    case, FLOOD_CALL, _SHORT_CLIENTS, 1, answers=answers, rounds=rounds, form=form, subjects=_OURS
                )
        elif case == "long":
            for size in QUICK_SIZES if quick else SIZES:
                tokens = size // len(TOKEN)
                yield Plan(case, FLOOD_CALL, 1, tokens, answers=1, rounds=rounds, form="tools", subjects=_OURS)
        elif case == "traces":
            # Once more without them, in turns: what is added to a request is less than what a noisy minute adds.
            if quick:
                answers = 100
            else:
                answers = 500
            yield Plan(case, FLOOD, 1, 1, answers=answers, rounds=2 * rounds, subjects=_TRACED)
            yield _compared(case, PACED, COMPARED, seconds, rounds, form="text", subjects=_TRACED)


def _compared(
    case: str, model: str, streams: int, seconds: float, rounds: int, *, form: Form, subjects: tuple[str, ...]
) -> Plan:
    """Return what is the same as in `paced`, but for the form of the request."""
    return Plan(case, model, streams, _ENDLESS, 1.0, 1.0, seconds, rounds=rounds, form=form, subjects=subjects)
