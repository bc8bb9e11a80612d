"""
The encodings of ``tensorrt_llm``: word lists and dense biases on the way in, token ids and log probabilities on the way
out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

from triton_openai.adapters.decoding import cumulative_logprob
from triton_openai.adapters.trtllm_logits import GENERATION, read
from triton_openai.adapters.trtllm_logprobs import CUMULATIVE, LOGPROBS, newest
from triton_openai.errors import InvalidRequest
from triton_openai.generation import Delta, TokenLogprob
from triton_openai.triton.tensors import InferResponse, ModelConfig, Tensor


def word_list(config: ModelConfig, name: str, words: Sequence[Sequence[int]]) -> Tensor:
    """
    Return the input *name* that holds *words*: one row with their ids, one with the offsets of their ends.

    Both rows are as long as the longer one, the first filled up with 0 and the second with -1.
    """
    ids = [number for word in words for number in word]
    ends = list(accumulate(len(word) for word in words))
    width = max(len(ids), len(ends))
    values = [*ids, *[0] * (width - len(ids)), *ends, *[-1] * (width - len(ends))]
    shape = (1, 2, width) if config.batching else (2, width)
    return Tensor(name, config.inputs[name].datatype, shape, values)


def dense_bias(bias: Sequence[tuple[int, float]], size: int) -> list[float]:
    """Return the bias of every id. Raises :class:`InvalidRequest` for ids that the vocabulary of *size* lacks."""
    dense = [0.0] * size
    for number, value in bias:
        if not 0 <= number < size:
            raise InvalidRequest(
                f"'logit_bias' names the token {number}, and the model has {size} tokens.",
                param="logit_bias",
                code="invalid_value",
            )
        dense[number] = value
    return dense


class TokenDecoder:
    """
    Reads the ids of each response: those that are new when it streams, all of them when it does not.

    *repeats* is whether the prompt may come first, *padding* the ids that fill up where no length says how many count,
    *logprobs* whether the log probabilities of the chosen tokens were asked for, *alternatives* whether those of others
    too, which come as logits, *scored* whether the whole answer's was.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        repeats: bool = False,
        padding: Collection[int | None] = (),
        logprobs: bool = False,
        alternatives: bool = False,
        scored: bool = False,
        cached_tokens: Callable[[InferResponse], int | None] | None = None,
    ) -> None:
        # What to read
        self._prompt_ids = list(prompt_ids)
        self._repeats = repeats
        self._padding = padding
        self._logprobs = logprobs
        self._cached_tokens = cached_tokens
        self._alternatives = alternatives
        self._scored = scored
        # Stream state
        self._count = 0
        self._counted_prompt = False

    def feed(self, response: InferResponse) -> Sequence[Delta]:
        """Return the delta of one response; the last one often has no ids."""
        ids = response.numbers("output_ids")
        lengths = response.numbers("sequence_length")
        if lengths:
            # One beam, so what is behind the length is padding.
            ids = ids[: int(lengths[0])]
        if self._repeats and list(ids[: len(self._prompt_ids)]) == self._prompt_ids:
            ids = ids[len(self._prompt_ids) :]
        if self._padding:
            ids = self._without_padding(ids)
        self._count += len(ids)
        delta = Delta(token_ids=ids, tokens=len(ids))
        if not self._counted_prompt:
            delta.prompt_tokens = len(self._prompt_ids)
            self._counted_prompt = True
        if self._alternatives and len(ids):
            delta.logits = read(response, GENERATION, count=len(ids), total=self._count)
        elif self._logprobs and len(ids):
            values = newest(response.numbers(LOGPROBS), count=len(ids), total=self._count)
            # Names are added where the tokenizer is.
            delta.logprobs = [TokenLogprob("", value, id=number) for number, value in zip(ids, values, strict=True)]
        if self._scored:
            delta.cumulative_logprob = cumulative_logprob(response, CUMULATIVE)
        if self._cached_tokens is not None:
            delta.cached_tokens = self._cached_tokens(response)
        return (delta,)

    def flush(self) -> Sequence[Delta]:
        """Return nothing: ids are never held back."""
        return ()

    def _without_padding(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[: next((place for place, number in enumerate(ids) if number in self._padding), len(ids))]
