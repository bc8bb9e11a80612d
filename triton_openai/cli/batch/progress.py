"""What a run shows while it runs, on standard error: a bar on a terminal, else lines from time to time."""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple, TextIO, TypeAlias

# Seconds between the first lines where there is no terminal; later ones come up to the second number apart.
_FIRST_INTERVAL = 5.0
_MAX_INTERVAL = 60.0


class Counts(NamedTuple):
    """What has been done so far."""

    #: The lines that were answered or have failed.
    done: int = 0
    #: The lines that have failed.
    failed: int = 0
    #: The tokens that went in, and those that came out.
    input_tokens: int = 0
    output_tokens: int = 0


class Bar:
    """A progress bar with rate, tokens and the estimated end. *done* of *total* lines have results already."""

    def __init__(self, total: int, done: int, stream: TextIO) -> None:
        # Imported only for terminals.
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, initial=done, unit=" lines", file=stream, dynamic_ncols=True, smoothing=0.05)

    def update(self, counts: Counts) -> None:
        """Show *counts*; it may be called often."""
        self._bar.set_postfix_str(_tokens_and_failures(counts), refresh=False)
        self._bar.update(counts.done - self._bar.n)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._bar.write(text, file=self._bar.fp)

    def close(self) -> None:
        """Show the last counts, and end."""
        self._bar.refresh()
        self._bar.close()


class Lines:
    """A line with the same from time to time, for logs."""

    def __init__(self, total: int, done: int, stream: TextIO) -> None:
        self._total = total
        self._first = done
        self._stream = stream
        self._began = time.monotonic()
        self._interval = _FIRST_INTERVAL
        self._next = self._began + self._interval

    def update(self, counts: Counts) -> None:
        """Show *counts* if it is time; it may be called often."""
        now = time.monotonic()
        if now < self._next:
            return
        self._interval = min(2 * self._interval, _MAX_INTERVAL)
        self._next = now + self._interval
        rate = (counts.done - self._first) / (now - self._began)
        left = ""
        if rate:
            left = f", {duration((self._total - counts.done) / rate)} left"
        more = _tokens_and_failures(counts)
        self.note(f"{counts.done:,} of {self._total:,} lines, {rate:.1f} lines/s{left}, {more}")

    def note(self, text: str) -> None:
        """Show a line that stays."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: the summary follows."""


#: Shows how a run goes on.
Progress: TypeAlias = Bar | Lines


def progress_for(total: int, done: int, stream: TextIO | None = None) -> Progress:
    """Return what shows the progress of *total* lines, *done* of which have results, on standard error."""
    stream = stream or sys.stderr
    if stream.isatty():
        return Bar(total, done, stream)
    return Lines(total, done, stream)


def _tokens_and_failures(counts: Counts) -> str:
    text = f"{short(counts.input_tokens)} tokens in, {short(counts.output_tokens)} out"
    if counts.failed:
        text += f", {counts.failed:,} failed"
    return text


def short(number: int) -> str:
    """Return a number with three digits and a unit, such as ``1.23M``."""
    value = float(number)
    for unit in ("", "k", "M"):
        if value < 999.5:
            if unit:
                return f"{value:.3g}{unit}"
            return str(number)
        value /= 1000
    return f"{value:.3g}G"


def duration(seconds: float) -> str:
    """Return a time for people, such as ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def lines_text(number: int) -> str:
    """Return a number of lines for people."""
    if number == 1:
        return "1 line"
    return f"{number:,} lines"
