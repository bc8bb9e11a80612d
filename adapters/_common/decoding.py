"""Decoders of text streams, shared by the adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.generation import Delta, FinishReason, TokenLogprob
from triton_openai.triton.tensors import InferResponse

# Of a character of four bytes whose last one is still to come.
_MAX_PARTS = 3


class TextDecoder:
    """
    The common decoder of text streams: deltas or cumulative text, counts, and the backend's finish reason.

    *splits_characters* is whether the backend decodes each step alone.
    *skip* is the number of characters at the start of a cumulative text that are not part of the answer. The
    counts are the outputs with the prompt's tokens and with the tokens of each step, ``None`` where there are none.
    *logprobs* reads the entries of a step; of their ids alone where *ids_only*. *cumulative_logprob* is the output with
    the log probability of the answer so far.
    """

    def __init__(
        self,
        *,
        text: str = "text_output",
        cumulative: bool = False,
        splits_characters: bool = False,
        skip: int = 0,
        prompt_count: str | None = None,
        token_count: str | None = None,
        finish: str | None = None,
        echo: PromptEcho | None = None,
        logprobs: Callable[[InferResponse, Delta], Sequence[TokenLogprob]] | None = None,
        token_ids: bool = False,
        ids_only: bool = False,
        cumulative_logprob: str | None = None,
        cached_tokens: Callable[[InferResponse], int | None] | None = None,
    ) -> None:
        # What to read
        self._text = text
        self._prompt_count = prompt_count
        self._token_count = token_count
        self._finish = finish
        self._cached_tokens = cached_tokens
        # Stream state
        self._stage = CumulativeText(skip) if cumulative else SplitText() if splits_characters else None
        self._prompt_known = False
        self._echo = echo
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._ids_only = ids_only
        self._cumulative_logprob = cumulative_logprob

    def feed(self, response: InferResponse) -> Sequence[Delta]:
        """Return the delta of one response."""
        texts = response.texts(self._text)
        text = texts[0] if texts else ""
        if self._echo is not None:
            text = self._echo.strip(text)
        if self._stage is not None:
            text = self._stage.feed(text)
        delta = Delta(text)
        if self._token_count is not None:
            counts = response.numbers(self._token_count)
            if counts:
                delta.tokens = int(counts[0])
        if self._prompt_count is not None and not self._prompt_known:
            counts = response.numbers(self._prompt_count)
            if counts:
                delta.prompt_tokens = int(counts[0])
                self._prompt_known = True
        if self._finish is not None:
            reasons = response.texts(self._finish)
            if reasons and reasons[0] != "None":
                delta.finish_reason = self._finish_reason(reasons[0])
        if self._logprobs is not None:
            entries = self._logprobs(response, delta)
            if self._token_ids:
                delta.token_ids = [entry.id for entry in entries if entry.id is not None]
            if not self._ids_only:
                delta.logprobs = entries
        if self._cumulative_logprob is not None:
            delta.cumulative_logprob = cumulative_logprob(response, self._cumulative_logprob)
        if self._cached_tokens is not None:
            delta.cached_tokens = self._cached_tokens(response)
        return (delta,)

    def flush(self) -> Sequence[Delta]:
        """Return the text that was still held back."""
        if self._stage is not None:
            rest = self._stage.flush()
            if rest:
                return (Delta(rest),)
        return ()

    @staticmethod
    def _finish_reason(reason: str) -> FinishReason | None:
        try:
            return FinishReason(reason)
        except ValueError:
            # "abort" and the like: the generation did not end by itself, so there is no reason to report.
            raise aborted(reason) from None


class PromptEcho:
    """
    Removes the prompt from the start of a text that repeats it.

    *forms* are the ways in which it may appear: as it was sent, or as the backend's tokenizer gives it back (without
    its special tokens).
    """

    def __init__(self, *forms: str) -> None:
        self._forms = sorted(forms, key=len, reverse=True)

    def strip(self, text: str) -> str:
        """
        Return *text* without the prompt. Raises :class:`UpstreamError` where it is not found: it must not be shown.
        """
        for form in self._forms:
            if text.startswith(form):
                return text[len(form) :]
        raise UpstreamError(
            "The model repeats the prompt in its answer, in a form that cannot be taken out. Set the model's parameter "
            "'exclude_input_in_output' to true, or configure its tokenizer."
        )


class CumulativeText:
    """
    Turns text that repeats from its start at every step into deltas.

    An incomplete character shows as U+FFFD at the end and is replaced when it is complete, so a trailing run of them
    is held back until the text goes on behind it or ends. Only the new part is looked at: the cost is that of the new
    text.
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
        held, self._held = self._held, ""
        return held


class SplitText:
    """
    Holds back what may be parts of one character at the end of deltas that the backend decodes one by one.

    Its parts show as U+FFFD and cannot be put together again; held back, they come in one piece.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return what *text*, the new text, and what was held back are now certain to be."""
        text = self._held + text
        end = len(text)
        while end > max(0, len(text) - _MAX_PARTS) and text[end - 1] == "\ufffd":
            end -= 1
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the held back end."""
        held, self._held = self._held, ""
        return held


def cumulative_logprob(response: InferResponse, output: str) -> float | None:
    """Return the log probability of the answer so far, ``None`` where *response* does not tell it."""
    values = response.numbers(output)
    return float(values[0]) if len(values) and not math.isnan(float(values[0])) else None


def aborted(reason: str) -> ServiceError:
    """Return the error for a generation that the backend broke off, which is neither a stop nor a length."""
    return UpstreamError(f"The backend ended the generation with '{reason[:50]}'.", code="generation_aborted")
