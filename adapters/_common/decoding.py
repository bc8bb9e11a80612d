"""Decoders of text streams, shared by the adapters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from triton_openai.errors import InvalidAnswer, UpstreamError
from triton_openai.generation import Delta, FinishReason
from triton_openai.triton.tensors import MAX_COUNT, InferResponse

#: Adds to the delta of a response what a request asked for beside the text.
Reader: TypeAlias = Callable[[InferResponse, Delta], None]


class TextStage(ABC):
    """Turns the texts of a stream's responses into what each adds."""

    @abstractmethod
    def feed(self, text: str) -> str:
        """Return what *text*, that of a response, adds."""

    def flush(self) -> str:
        """Return what was kept until the end of the stream."""
        return ""


class TextDecoder:
    """
    The common decoder of text streams: text, counts, and the backend's finish reason.

    *stage* is for backends whose responses are not simply the new text. The others are names of outputs: that of the
    text, that with the count of the prompt's tokens and that with the count of a step's (``None`` where there are
    none), and that of the finish reason, which is "stop" or "length" in the last response of every answer and absent or
    "None" before that. *prompt_tokens* is the count of the prompt's tokens where it is known without an output.
    *readers* add the rest.
    """

    def __init__(
        self,
        stage: TextStage | None = None,
        *,
        text: str = "text_output",
        prompt_count: str | None = None,
        prompt_tokens: int | None = None,
        token_count: str | None = None,
        finish: str | None = None,
        readers: Sequence[Reader] = (),
    ) -> None:
        self._stage = stage
        # An output without a name is absent.
        self._outputs = (text, token_count or "", finish or "")
        # Each is None once the count is known.
        self._prompt_tokens = prompt_tokens
        self._prompt_count = None
        if prompt_tokens is None:
            self._prompt_count = prompt_count
        self._ended = finish is None
        self._readers = readers

    def feed(self, response: InferResponse) -> Delta:
        text, tokens, reason = response.first(self._outputs)
        if not text:
            text = ""
        elif type(text) is not str:
            raise response.invalid(f"the output '{self._outputs[0]}' has something else where a text is needed")
        if self._stage is not None:
            text = self._stage.feed(text)
        if tokens is not None and (type(tokens) is not int or not 0 <= tokens <= MAX_COUNT):
            tokens = self._count(response)
        delta = Delta(text, tokens)
        if self._prompt_count is not None and (counts := response.integers(self._prompt_count)):
            delta.prompt_tokens = counts[0]
            self._prompt_count = None
        elif self._prompt_tokens is not None:
            delta.prompt_tokens = self._prompt_tokens
            self._prompt_tokens = None
        if reason is not None and reason != "None":
            delta.finish_reason = _finish_reason(reason)
            self._ended = True
        for read in self._readers:
            read(response, delta)
        return delta

    def _count(self, response: InferResponse) -> int:
        """Return the number of a step's tokens, which some backends send as text. Raises :class:`InvalidAnswer`."""
        name = self._outputs[1]
        counts = response.integers(name)
        if len(counts) != 1:
            raise response.invalid(f"the output '{name}' has several numbers")
        return counts[0]

    def flush(self) -> str:
        """Return the text that was still held back. Raises :class:`UpstreamError` if the last response is missing."""
        if not self._ended:
            # Triton's HTTP threads drop responses when they fall behind, and then end the stream in good order.
            raise UpstreamError("Triton ended the answer before it was complete.", code="upstream_disconnected")
        if self._stage is None:
            return ""
        return self._stage.flush()


_FINISH_REASONS = {reason.value: reason for reason in FinishReason}


def _finish_reason(reason: Any) -> FinishReason:
    known = None
    if isinstance(reason, str):
        known = _FINISH_REASONS.get(reason)
    if known is None:
        # "abort" and the like: the generation did not end by itself, so there is no reason to report.
        raise UpstreamError(f"The backend ended the generation with '{str(reason)[:50]}'.", code="generation_aborted")
    return known


def checked_vectors(vectors: Sequence[bytes], count: int, model: str) -> Sequence[bytes]:
    """
    Return *vectors* of *model*.

    Raises :class:`InvalidAnswer` unless they are *count*, equally long and not empty.
    """
    if len(vectors) != count:
        detail = f"{len(vectors)} embeddings for {count} inputs"
        raise InvalidAnswer("it has more or fewer embeddings than the request has inputs", model=model, detail=detail)
    lengths = set(map(len, vectors))
    if len(lengths) > 1 or 0 in lengths:
        raise InvalidAnswer("its embeddings have different lengths, or none", model=model)
    return vectors


def cumulative_logprob(output: str) -> Reader:
    """Return a reader of the log probability of the answer so far from *output*."""

    def read(response: InferResponse, delta: Delta) -> None:
        values = response.numbers(output)
        if values and not math.isnan(value := float(values[0])):
            delta.cumulative_logprob = value

    return read


class PromptEcho(TextStage):
    """
    Removes the prompt from the start of an answer that repeats it and comes in one response.

    *forms* are the ways in which it may appear: as it was sent, or as the backend's tokenizer decodes it.
    """

    def __init__(self, *forms: str | None) -> None:
        self._forms = sorted((form for form in forms if form is not None), key=len, reverse=True)

    def feed(self, text: str) -> str:
        """Return *text* without the prompt. Raises :class:`UpstreamError` where it is not found."""
        for form in self._forms:
            if text.startswith(form):
                return text[len(form) :]
        raise UpstreamError(
            "The model repeats the prompt in its answer, in a form that cannot be removed. Set the model's parameter "
            "'exclude_input_in_output' to true, or configure its tokenizer."
        )


class CumulativeText(TextStage):
    """
    Turns text that repeats from its start at every step into deltas, without its first *skip* characters.

    U+FFFD at the end may stand for a character that is still incomplete, and is held back until the text goes on after
    it or ends. Only the new part is looked at: the cost is that of the new text.
    """

    def __init__(self, skip: int = 0) -> None:
        self._sent = skip
        self._held = ""

    def feed(self, text: str) -> str:
        """Return what *text*, the whole text so far, adds."""
        end = len(text)
        while end > self._sent and text[end - 1] == "\ufffd":
            end -= 1
        delta = text[self._sent : end]
        self._held = text[end:]
        self._sent = max(self._sent, end)
        return delta

    def flush(self) -> str:
        """Return the held back end: now it is known to stay."""
        rest = self._held
        self._held = ""
        return rest
