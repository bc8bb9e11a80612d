"""Runs a generation whose thinking has a budget that its engine cannot keep: at the budget, another request goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from triton_openai.answer.run import Push, Run
from triton_openai.answer.thinking_budget import ThinkingBudget, ThinkingStage
from triton_openai.generation import AnswerState, Delta, FinishReason, Generation
from triton_openai.triton.leasing import Attempts
from triton_openai.triton.status import no_answer_error
from triton_openai.triton.tensors import InferResponse

# What a part of a character shows as.
_REPLACEMENT = "\ufffd"


class _Answer(AnswerState):
    """The state of an answer in two parts. The counts of its prompt are those of the first request, if it has any."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        #: The ids of the tokens, where the backend sends them.
        self.ids: list[int] = []
        self.is_continued = False
        #: The tokens of the answer in the prompt of the second request.
        self.prompted = 0

    def add(self, delta: Delta) -> None:
        if not self.is_continued:
            self.ids += delta.token_ids
        elif self.prompt_tokens is not None:
            delta.prompt_tokens = None
            delta.cached_tokens = None
        elif delta.prompt_tokens is not None:
            delta.prompt_tokens = max(0, delta.prompt_tokens - self.prompted)
        super().add(delta)


class BudgetedRun(Run):
    """
    A running generation whose thinking ends at *budget*.

    There, the request is stopped, and another one goes on: with the prompt, the text so far, and the end of the
    thinking. The tokens of that end count as the answer's, as in vLLM's server, and have no log probabilities.
    """

    progress: _Answer
    _state = _Answer

    def __init__(self, generation: Generation, *, budget: ThinkingBudget, **parts: Any) -> None:
        self._budget = budget
        self._stage = ThinkingStage(budget, generation.prompt, parts.get("tokenizer"))
        # Whether the second request was sent and has no response yet: another Triton may get it.
        self._repeatable = False
        super().__init__(generation, **parts)

    def start(self, number: int, push: Push, done: Callable[[int], None]) -> None:
        """Do as :meth:`Run.start`. Where the prompt opened the thinking and it has no tokens, the prompt ends it."""
        if self._stage is None or not self._stage.spent:
            super().start(number, push, done)
            return
        if not self._continues():
            self._number = number
            self._done = done
            self._end_at_limit()
            return
        # Those of the generation have not begun.
        self._decoder = self._adapter.decoder(self._request)
        self._pipeline = self._new_pipeline()
        super().start(number, push, done)
        self._push_ending()

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """Take the responses that arrived together, and push their deltas."""
        if self._repeatable:
            self._repeatable = False
            self._silence_limit = self._limits.idle
        super().receive(responses)

    def end(self, error: Exception | None) -> None:
        """Take the end of the stream; *error* is what the backend or the transport reported."""
        if error is None and self._repeatable:
            error = no_answer_error(self._model)
        super().end(error)

    def _finish(self, error: BaseException | None) -> None:
        if error is not None or not self._is_spent:
            super()._finish(error)
            return
        self._release(None)
        if self._logits is not None:
            self._logits.close()
        progress = self.progress
        progress.finish_reason = None
        progress.stop_reason = None
        if not self._continues():
            self._end_at_limit()
            return
        progress.ended = None
        self._repeatable = True
        try:
            self._push_ending()
            self._send(self._restart())
        except Exception as failure:  # noqa: BLE001 - the waiting task raises any error
            self._abort(failure)

    def _end_at_limit(self) -> None:
        """End the answer where its thinking ends: no tokens are left for more."""
        self.progress.finish_reason = FinishReason.LENGTH
        super()._finish(None)

    @property
    def _is_spent(self) -> bool:
        """Whether the thinking ends here. A stop string ends the whole answer."""
        if self.over or self._stage is None or isinstance(self.progress.stop_reason, str):
            return False
        return self._stage.spent

    def _push_ending(self) -> None:
        """Push the end of the thinking, which shows in no text; the parser of the answer reads it."""
        delta = Delta(self._budget.ending)
        if self.generation.token_ids:
            delta.token_ids = self._budget.ending_ids
        if self._push is not None:
            self._push(self._number, [delta])

    def _continues(self) -> bool:
        """Make the request that goes on after the end of the thinking. Return false where no tokens are left for it."""
        assert self._stage is not None, "it goes on once"
        budget = self._budget
        progress = self.progress
        first = self.generation
        used = progress.tokens
        if used is None:
            used = self._stage.tokens
        self._stage = None
        # The part of a character cannot be gone on from.
        self._half = ""
        text = progress.text.rstrip(_REPLACEMENT)
        used += len(budget.ending_ids)
        left = first.sampling.max_tokens - used
        if left <= 0:
            return False
        added = text + budget.ending
        sampling = replace(first.sampling, max_tokens=left)
        if sampling.min_tokens:
            sampling = replace(sampling, min_tokens=max(0, sampling.min_tokens - used))
        request = replace(first, id=f"{first.id}-answer", prompt=first.prompt + added, sampling=sampling)
        if first.original_prompt is not None:
            request = replace(request, original_prompt=first.original_prompt + added)
        if first.prompt_echo is not None:
            request = replace(request, prompt_echo=first.prompt_echo + added)
        if first.prompt_tokens is not None:
            request = replace(request, prompt_tokens=first.prompt_tokens + used)
        if first.prompt_ids is not None:
            request = replace(request, prompt_ids=(*first.prompt_ids, *progress.ids, *budget.ending_ids))
        self._request = request
        self._attempts = Attempts()
        progress.is_continued = True
        progress.prompted = used
        progress.add_text(budget.ending)
        if progress.tokens is not None:
            progress.tokens += len(budget.ending_ids)
        return True
