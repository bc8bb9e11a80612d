"""A histogram that takes in what was counted elsewhere."""

from __future__ import annotations

from prometheus_client import Histogram

from triton_openai.telemetry.gaps import Gaps


class Tallied(Histogram):
    """
    A histogram of ``prometheus_client`` into which many observations can go at once.

    The library has no public way to do it, and :meth:`observe` costs about a microsecond, for several workers more: too
    much for every token. Its parts that are used here have been the same since its first release.
    """

    def add(self, gaps: Gaps) -> None:
        """Observe all *gaps*; the bounds of this histogram's buckets must be theirs."""
        for bucket, count in zip(self._buckets, gaps.counts):  # noqa: B905 - none of them where there was no gap
            if count:
                bucket.inc(count)
        if gaps.counts:
            self._sum.inc(gaps.seconds)
