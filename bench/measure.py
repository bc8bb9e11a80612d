"""Runs the load generator and turns what it saw into rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from bench.cases import Plan, Row
from bench.machine import Cores
from bench.messages import Load, Measured, Target
from bench.processes import BenchError, die_with_parent
from bench.subjects import Subject
from bench.tally import FIRST_TOKEN_SECONDS, SLOWEST
from triton_openai.load.tally import percentile

_MARGIN_SECONDS = 90.0
_STALL_SECONDS = 1.0
_MIB = 1024 * 1024


def measure(plan: Plan, subject: Subject, triton: int, control: Target, cores: Cores) -> Measured:
    """Put the load of *plan* on *subject*. Raises `BenchError` when the load generator has not ended well."""
    until_measured = FIRST_TOKEN_SECONDS
    if plan.answers:
        until_measured += plan.tokens / SLOWEST
    load = Load(
        target=subject.target,
        model=plan.model,
        streams=plan.streams,
        tokens=plan.tokens,
        form=plan.form,
        ramp=plan.ramp,
        warm=plan.warm,
        seconds=plan.seconds,
        answers=plan.answers,
        settled=plan.settled,
        limit=until_measured,
        control=control,
        relay=subject.relay,
        triton=(triton,),
        cores=cores.client,
    )
    limit = plan.ramp + plan.warm + plan.seconds + _MARGIN_SECONDS
    if plan.answers:
        limit += plan.tokens / SLOWEST
    try:
        # Killed by `run` when this process is interrupted.
        done = subprocess.run(
            [sys.executable, "-m", "bench.client"],
            input=msgspec.json.encode(load),
            capture_output=True,
            timeout=limit,
            check=False,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{subject.name}: the load generator had not ended after {limit:g} s") from error
    if done.returncode:
        raise BenchError(f"{subject.name}: the load generator failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    outcome = msgspec.json.decode(done.stdout, type=Measured)
    if outcome.errors:
        if subject.log is not None:
            log = subject.log.read_text(errors="replace")[-2000:]
        else:
            log = ""
        raise BenchError(f"{plan.case}, {plan.streams} streams, {subject.name}: {outcome.errors[0]}\n{log}")
    return outcome


def row(plan: Plan, subject: Subject, outcomes: Sequence[Measured]) -> Row:
    """Return the row of one subject, over all rounds."""
    round_cpu: list[float | None] = [None] * len(outcomes)
    if subject.relay:
        round_cpu = [_per(outcome.relay_cpu, outcome.tokens) for outcome in outcomes]
    seconds = sum(outcome.seconds for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    answers = sum(outcome.answers for outcome in outcomes)
    first = [waited for outcome in outcomes for waited in outcome.first]
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    relay = None
    if subject.relay:
        relay = sum(outcome.relay_cpu for outcome in outcomes)
    last = outcomes[-1]
    return Row(
        case=plan.case,
        streams=plan.streams,
        subject=subject.name,
        form=plan.form,
        tokens=plan.tokens,
        tokens_per_second=tokens / seconds,
        first_p50_ms=_scaled(percentile(first, 0.5), 1e3),
        first_p99_ms=_scaled(percentile(first, 0.99), 1e3),
        first_max_ms=max(first, default=0.0) * 1e3,
        stalls=sum(waited >= _STALL_SECONDS for waited in first),
        gap_p50_ms=_scaled(percentile(gaps, 0.5), 1e-3),
        gap_p99_ms=_scaled(percentile(gaps, 0.99), 1e-3),
        cpu_us_per_token=_per(relay, tokens),
        triton_us_per_token=_per(sum(outcome.triton_cpu for outcome in outcomes), tokens),
        cpu_us_per_answer=_per(relay, answers) if plan.answers else None,
        relay_busy=None if relay is None else relay / 1e9 / seconds,
        client_busy=sum(outcome.client_cpu for outcome in outcomes) / 1e9 / seconds,
        resident_mib=last.resident / _MIB if subject.relay else None,
        peak_mib=last.peak / _MIB if subject.relay else None,
        round_tokens_per_second=[outcome.tokens / outcome.seconds for outcome in outcomes],
        round_cpu_us_per_token=round_cpu,
    )


def _scaled(value: float | None, factor: float) -> float | None:
    if value is None:
        return None
    return value * factor


def _per(nanoseconds: int | None, count: int) -> float | None:
    if nanoseconds is None or not count:
        return None
    return nanoseconds / 1000 / count
