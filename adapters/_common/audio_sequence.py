"""A recording as a sequence of small requests, made while its audio comes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from triton_openai.triton.tensors import InferRequest


class MakePart(Protocol):
    """Makes the request with a part of the audio."""

    def __call__(self, samples: Any, number: int, *, first: bool, last: bool) -> InferRequest:
        """Return the request of the sequence *number* with an array of *samples*."""
        ...


def sequence_number() -> int:
    """Return the number of a new sequence. Its lower 32 bits are random, too: some models get only these."""
    return 1 + secrets.randbits(62)


class AudioSequence:
    """
    The requests of a sequence, each made by *make_part*.

    The first has *first* samples and each of the others *further* ones. See :class:`LiveEncoder`.
    """

    def __init__(self, make_part: MakePart, first: int, further: int) -> None:
        import numpy as np

        self._make_part = make_part
        self._first = first
        self._further = further
        self._number = sequence_number()
        self._begun = False
        self._rest = np.zeros(0, "<f4")
        self.closing = make_part(np.zeros(further, "<f4"), self._number, first=False, last=True)

    def feed(self, samples: bytes) -> Sequence[InferRequest]:
        import numpy as np

        self._rest = np.concatenate([self._rest, np.frombuffer(samples, "<f4")])
        requests = []
        while len(self._rest) >= self._size:
            requests.append(self._next(last=False))
        return requests

    def fill(self) -> Sequence[InferRequest]:
        self._pad()
        return [self._next(last=False)]

    def finish(self) -> InferRequest:
        # This silence counts: models recognize an end by what follows.
        self._pad()
        return self._next(last=True)

    @property
    def _size(self) -> int:
        """The samples of the next request."""
        if self._begun:
            return self._further
        return self._first

    def _pad(self) -> None:
        import numpy as np

        self._rest = np.pad(self._rest, (0, self._size - len(self._rest)))

    def _next(self, *, last: bool) -> InferRequest:
        size = self._size
        samples = self._rest[:size]
        self._rest = self._rest[size:]
        request = self._make_part(samples, self._number, first=not self._begun, last=last)
        self._begun = True
        return request
