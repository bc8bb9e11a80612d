"""
What says the words: the one seam between the stand-ins' contracts and whatever makes the tokens.

An engine is asked for token ids and knows nothing of Triton. The one here is deterministic and says plainly what it is;
a small language model can take its place by offering the same method.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .steering import Steering
from .text import Vocabulary


@dataclass(frozen=True)
class Options:
    """What a request asks of the engine itself. Stopping at a length or at words is not the engine's work."""

    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    guide: tuple[str, str] | None = None
    greedy: bool = False
    images: int = 0


class Engine(Protocol):
    """Something that continues a prompt."""

    def generate(self, prompt_ids: Sequence[int], options: Options) -> Iterator[int]:
        """
        Yield the ids that follow *prompt_ids*, one by one.

        The end-of-sequence id is yielded where the answer ends. The iterator may end only after that; with
        ``ignore_eos`` it goes on for as long as it is asked.
        """
        ...


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


class HonestEngine:
    """Answers every prompt by saying what it is and quoting the last words of the user."""

    def __init__(self, vocabulary: Vocabulary, steering: Steering, prompt: str) -> None:
        self._vocabulary = vocabulary
        self._steering = steering
        self._prompt = prompt

    def generate(self, prompt_ids: Sequence[int], options: Options) -> Iterator[int]:
        """Yield the steered answer if there is one, else the honest one; see `Engine.generate`."""
        ids = self._planned(options)
        yielded = 0
        for token in ids:
            yield token
            yielded += 1
        filler = ids or self._vocabulary.encode(" and so on")
        while options.ignore_eos or not self._steering.eos or yielded < options.min_tokens:
            yield filler[yielded % len(filler)]
            yielded += 1
        yield self._vocabulary.eos_id

    def _planned(self, options: Options) -> list[int]:
        steering = self._steering
        if steering.tokens is not None:
            return list(steering.tokens) * steering.repeat
        if steering.text is not None:
            return self._vocabulary.encode(steering.text * steering.repeat)
        return self._vocabulary.encode(self._answer(options)) * steering.repeat

    def _answer(self, options: Options) -> str:
        if options.guide is not None:
            kind, guide = options.guide
            return json.dumps({"stand_in": True, "guide_type": kind, "guide": guide})
        variant = 0 if options.greedy else (options.seed or 0) % len(_VARIANTS)
        said = f'{_VARIANTS[variant]} You wrote: "{last_words(self._prompt)}"'
        return f"{said} You sent {options.images} images." if options.images else said


def last_words(prompt: str) -> str:
    """Return what the user said last in *prompt*, which may be a rendered chat or plain text."""
    for pattern in _TURNS:
        if turns := pattern.findall(prompt):
            words = turns[-1]
            break
    else:
        words = re.sub(r"<\|[a-z_]+\|>", "", prompt)
    words = words.strip()
    return words if len(words) <= _QUOTE_LENGTH else f"{words[:_QUOTE_LENGTH].rstrip()} ..."
