"""
The interface between the stand-ins and the engines that generate their tokens.

An engine generates token ids and does not know Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .batcher import Batcher, Threads
from .logits import Scores
from .steering import Steering

# An engine yields these instead of a token: no token yet, and the answer has reached the engine's limit.
WAITING = -1
LIMIT = -2


class EngineFailure(Exception):
    """The engine failed while it generated."""


@dataclass(frozen=True)
class Options:
    """A request's options for the engine. Stopping at a length or at words is the stand-in's work."""

    seed: int | None = None
    #: The largest number of tokens needed.
    max_tokens: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    guide: tuple[str, str] | None = None
    greedy: bool = False
    images: int = 0
    #: The number of alternatives to each token; None for no log probabilities.
    logprobs: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Added to the logits of single tokens.
    bias: Mapping[int, float] = field(default_factory=dict)
    #: Texts that must not occur.
    bad_words: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    """
    The ids of one answer as they are made, how it was steered, and the scores of the tokens so far.

    The iterator yields the end-of-sequence id where the answer ends, and may end only after that. With ``ignore_eos``,
    it is endless.
    """

    ids: Iterator[int]
    scores: Scores
    steering: Steering = field(default_factory=Steering)


class Engine(Protocol):
    """Something that continues a prompt."""

    def batcher(self) -> Batcher | Threads:
        """Return the batcher for the requests of one model."""
        ...

    def answer(self, prompt: str, prompt_ids: Sequence[int], options: Options) -> Answer:
        """Begin an answer to *prompt*, tokenized as *prompt_ids*. Raises `ValueError` for unsupported options."""
        ...
