"""
The encodings of ``tensorrt_llm``: word lists and dense biases on the way in, token ids and log probabilities on the way
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

from triton_openai.adapters._common.decoding import cumulative_logprob
from triton_openai.errors import InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import Delta, Logits, TokenLogprob
from triton_openai.triton.tensors import InferResponse, ModelConfig, Tensor

GENERATION = "generation_logits"
CONTEXT = "context_logits"
#: As many alternatives as OpenAI allows: any number could be made from logits.
MOST_ALTERNATIVES = 20
# Protocol buffers end at 2 GiB, and this process has to hold it.
_MOST_BYTES = 2**30
_SIZES = {"FP32": 4, "FP16": 2, "BF16": 2}


def available(config: ModelConfig, name: str) -> bool:
    """Return whether the model *config* can be asked for the logits *name*."""
    return f"return_{name}" in config.inputs and name in config.outputs


def check_size(config: ModelConfig, name: str, *, tokens: int, vocabulary: int, param: str | None) -> None:
    """Raise :class:`InvalidRequest` for more *tokens* than one response should hold the logits of."""
    most = _MOST_BYTES // (vocabulary * _SIZES.get(config.outputs[name].datatype, 4))
    if tokens > most:
        raise InvalidRequest(
            f"The model sends {vocabulary} numbers for each token, and for {most} tokens at once at most;"
            f" this request has {tokens}.",
            param=param,
            code="invalid_value",
        )


def read(response: InferResponse, name: str, *, count: int, total: int) -> Logits:
    """
    Return the logits of the *count* new tokens, of *total* so far.

    Raises :class:`UnsupportedParameter` where there are none, :class:`UpstreamError` where they do not fit.
    """
    tensor = response.tensor(name)
    if tensor is None or not tensor.data:
        raise UnsupportedParameter(
            f"The model's engine sends no {name.replace('_', ' ')}, which this needs: it has to be built with"
            f" gather_{name}.",
            param="logprobs",
        )
    width = tensor.shape[-1] if tensor.shape else 0
    rows = math.prod(tensor.shape[:-1])
    if width < 2 or len(tensor.data) != rows * width * _SIZES.get(tensor.datatype, 0):
        raise UpstreamError(f"The model sent malformed {name.replace('_', ' ')}.")
    if rows == count:
        first = 0
    elif rows >= total:
        first = total - count
    else:
        raise UpstreamError("The model sent logits that do not match its tokens.")
    return Logits(data=tensor.data, datatype=tensor.datatype, width=width, first=first)


LOGPROBS = "output_log_probs"
CUMULATIVE = "cum_log_probs"
#: What a client whose request is refused can do.
TOKEN_BY_TOKEN = "its engine can do it, answered token by token with --prefer-token-level always"

_REPLACEMENT = "\ufffd"


def newest(values: Sequence[float], *, count: int, total: int) -> Sequence[float]:
    """
    Return the values of the *count* new tokens, of *total* so far.

    The executor repeats those of all tokens so far, maybe with padding behind them; a list that is just as long as the
    new tokens is taken for theirs. Raises :class:`UpstreamError` for a list that is neither.
    """
    if len(values) >= total:
        values = values[total - count : total]
    if len(values) != count:
        raise UpstreamError("The model sent log probabilities that do not match its tokens.")
    return values


class StepLogprobs:
    """Reads the log probabilities of one stream of text."""

    def __init__(self) -> None:
        # How many tokens there were, and whether a list holds the new ones alone where nobody counts them.
        self._total = 0
        self._only_new = False
        # Whether bytes of the last token may still be to come.
        self._open = False

    def __call__(self, response: InferResponse, delta: Delta) -> Sequence[TokenLogprob]:
        """Return the entry of *delta*'s token. Raises :class:`UpstreamError` for a step of several."""
        new = self._new(response.numbers(LOGPROBS), delta)
        if not len(new):
            return ()
        if len(new) > 1:
            raise UpstreamError(
                "The model sent several tokens in one step, whose log probabilities cannot be told apart by its text:"
                f" {TOKEN_BY_TOKEN}."
            )
        text = delta.text
        whole = bool(text) and not self._open and _REPLACEMENT not in text
        self._open = not text
        return (TokenLogprob(text, float(new[0]), raw=text.encode() if whole else None),)

    def _new(self, values: Sequence[float], delta: Delta) -> Sequence[float]:
        count = delta.tokens
        if count is None:
            return self._uncounted(values, delta.text)
        self._total += count
        return newest(values, count=count, total=self._total) if count else ()

    def _uncounted(self, values: Sequence[float], text: str) -> Sequence[float]:
        """Return the new values of a release that does not count tokens: the list grows, or shows that it does not."""
        if not self._only_new and len(values) > self._total:
            new, self._total = values[self._total :], len(values)
            return new
        # As long as before although there is new text: these are the new token's, and so were those before.
        self._only_new = self._only_new or bool(text)
        return values if text else ()


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
        self._prompt_ids = tuple(prompt_ids)
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
        if self._repeats and tuple(ids[: len(self._prompt_ids)]) == self._prompt_ids:
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
