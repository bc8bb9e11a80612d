"""Counts what happens among several Tritons, each under a label."""

from __future__ import annotations

from collections import Counter
from typing import Literal, Protocol

from triton_openai.triton.member import Member

# The number of Tritons that are labels of metrics at a time. The others share a label.
_MAX_LABELS = 64
_OTHERS = "other"

#: What is counted, with the labels after it: the names of Tritons in the settings, models, and the outcome or the code
#: of an error. The labels of ``endpoints`` are the names of all Tritons.
Event = Literal[
    "up", "running", "ended", "ejected", "ejections", "panics", "failovers", "budget_exhausted", "lookup_failures",
    "endpoints",
]  # fmt: skip


class CountEvent(Protocol):
    """Counts an event."""

    def __call__(self, event: Event, *labels: str, by: int = 1) -> None:
        """Count *event*, *by* times."""


def ignore_event(event: Event, *labels: str, by: int = 1) -> None:
    """Ignore events (metrics are off, or there is one Triton)."""


class FleetMetrics:
    """The events of a fleet, and the labels of its members. *count* counts an event that concerns no single Triton."""

    def __init__(self, count: CountEvent) -> None:
        self.count = count
        # By label, the number of Tritons in the list, and of those whose last requests still run.
        self._labels: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()

    def count_at(self, member: Member, event: Event, *labels: str, by: int = 1) -> None:
        """Count an event of *member*, unless its series are dropped."""
        if member.label is not None:
            self.count(event, member.label, *labels, by=by)

    def join(self, member: Member) -> None:
        """Give *member* its label."""
        label = _OTHERS
        if member.name in self._labels or len(self._labels) < _MAX_LABELS:
            label = member.name
        member.label = label
        self._labels[label] += 1

    def leave(self, member: Member) -> None:
        """Take *member* off the list. Its label stays until :meth:`drop`, for its last requests."""
        assert member.label is not None, "it leaves once"
        self._labels -= Counter([member.label])
        self._leaving[member.label] += 1

    def drop(self, member: Member) -> None:
        """Drop the series of *member*, unless another Triton has the same label."""
        label = member.label
        member.label = None
        assert label is not None, "it leaves once"
        for lease in member.leases:
            self.count("running", label, lease.model, by=-1)
        self._leaving -= Counter([label])
        if label not in self._labels and label not in self._leaving:
            self.publish_labels()

    def publish_labels(self) -> None:
        """Publish the labels of all Tritons: the series of others are dropped."""
        self.count("endpoints", *sorted(self._labels.keys() | self._leaving.keys()))
