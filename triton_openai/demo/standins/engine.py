"""
The interface between the stand-ins and the engines that generate their tokens.

An engine generates token ids and does not know Triton. The scripted engine in this module is deterministic, and its
answers say what it is. `llama.LlamaEngine` runs a language model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from . import steering
from .batcher import Batcher, Threads
from .logits import MadeUp, Scores
from .settings import Settings
from .steering import Steering
from .text import Vocabulary

# An engine yields these instead of a token: no token yet, and the answer has reached the engine's limit.
WAITING = -1
LIMIT = -2


class EngineFailure(Exception):
    """The engine failed while it generated."""


@dataclass(frozen=True)
class Options:
    """
    A request's options for the engine. Stopping at a length or at words is the stand-in's work.

    *max_tokens* is the largest number of tokens needed, *logprobs* the number of alternatives to each token (None: no
    log probabilities), *bias* is added to the logits of single tokens, and *bad_words* are texts that must not occur.
    """

    seed: int | None = None
    max_tokens: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    guide: tuple[str, str] | None = None
    greedy: bool = False
    images: int = 0
    logprobs: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
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


def engine_for(settings: Settings, vocabulary: Vocabulary) -> Engine:
    """Return the engine that the demo was started with."""
    if settings.engine is None:
        return ScriptedEngine(vocabulary)
    from .llama import LlamaEngine

    return LlamaEngine(settings.engine, vocabulary)


_VARIANTS = (
    "I am a stand-in for a language model, running inside a real Triton server.",
    "This is a stand-in and not a language model; the Triton server around it is a real one.",
    "There is no language model here, only a stand-in inside a real Triton server.",
)
_QUOTE_LENGTH = 400
_TURNS = (
    re.compile(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>user<\|end_header_id\|>\s*(.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
    re.compile(r"<start_of_turn>user\n(.*?)(?:<end_of_turn>|\Z)", re.DOTALL),
    re.compile(r"\[INST\](.*?)(?:\[/INST\]|\Z)", re.DOTALL),
)


class ScriptedEngine:
    """Answers as the steering in the prompt says, else describes itself and quotes the user."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def batcher(self) -> Batcher:
        """Return a batcher with a few threads, because there is little work."""
        return Batcher()

    def answer(self, prompt: str, prompt_ids: Sequence[int], options: Options) -> Answer:
        """Begin the steered answer if there is one, else the default one."""
        steered, rest = steering.find(prompt)
        return Answer(self._generate(rest, steered, options), MadeUp(), steered)

    def _generate(self, prompt: str, steered: Steering, options: Options) -> Iterator[int]:
        if steered.tokens is not None:
            ids = list(steered.tokens) * steered.repeat
        elif steered.text is not None:
            ids = self._vocabulary.encode(steered.text * steered.repeat)
        else:
            ids = self._vocabulary.encode(_default_answer(prompt, options)) * steered.repeat
        yield from ids
        yielded = len(ids)
        filler = ids or self._vocabulary.encode(" and so on")
        while options.ignore_eos or not steered.eos or yielded < options.min_tokens:
            yield filler[yielded % len(filler)]
            yielded += 1
        yield self._vocabulary.eos_id


def _default_answer(prompt: str, options: Options) -> str:
    if options.guide is not None:
        kind, guide = options.guide
        return json.dumps({"stand_in": True, "guide_type": kind, "guide": guide})
    variant = 0 if options.greedy else (options.seed or 0) % len(_VARIANTS)
    said = f'{_VARIANTS[variant]} You wrote: "{last_words(prompt)}"'
    return f"{said} You sent {options.images} images." if options.images else said


def last_words(prompt: str) -> str:
    """Return the user's last message in *prompt*, which may be a rendered chat or plain text."""
    for pattern in _TURNS:
        if turns := pattern.findall(prompt):
            words = turns[-1]
            break
    else:
        words = re.sub(r"<\|[a-z_]+\|>", "", prompt)
    words = words.strip()
    return words if len(words) <= _QUOTE_LENGTH else f"{words[:_QUOTE_LENGTH].rstrip()} ..."
