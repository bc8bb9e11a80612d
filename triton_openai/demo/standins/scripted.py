"""The engine without a language model: deterministic, and its answers say what it is. And the choice of an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from . import steering
from .batcher import Batcher
from .engine import Answer, Engine, Options
from .logits import MadeUp
from .settings import Settings
from .steering import Steering
from .text import Vocabulary


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
    if options.greedy:
        variant = 0
    else:
        variant = (options.seed or 0) % len(_VARIANTS)
    text = f'{_VARIANTS[variant]} You wrote: "{last_words(prompt)}"'
    if options.images:
        return f"{text} You sent {options.images} images."
    return text


def last_words(prompt: str) -> str:
    """Return the user's last message in *prompt*, which may be a rendered chat or plain text."""
    words: str = re.sub(r"<\|[a-z_]+\|>", "", prompt)
    for pattern in _TURNS:
        if turns := pattern.findall(prompt):
            words = str(turns[-1])
            break
    words = words.strip()
    if len(words) <= _QUOTE_LENGTH:
        return words
    return f"{words[:_QUOTE_LENGTH].rstrip()} ..."
