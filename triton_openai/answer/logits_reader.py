"""Log probabilities made from logits: of an answer's tokens, and of a prompt's in a request of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from msgspec.structs import replace

from triton_openai import offload
from triton_openai.adapters._common.base import Adapter, Decoder
from triton_openai.answer.stages import TokenNames
from triton_openai.errors import InvalidAnswer, InvalidRequest, UpstreamTimeout
from triton_openai.generation import IMPOSSIBLE, Alternative, Delta, Generation, Logits, TokenLogprob
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.tasks import cancel
from triton_openai.triton.client import Receiver
from triton_openai.triton.tensors import InferRequest, InferResponse

if TYPE_CHECKING:
    import numpy as np


def log_probabilities(logits: Logits, chosen: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """
    Return an entry for each of the *chosen* ids, a row each, with the *count* most likely tokens; names are not added.

    Raises :class:`InvalidAnswer` for fewer rows than ids, and for logits that are not numbers.
    """
    rows = _rows(logits)[logits.first : logits.first + len(chosen)]
    if len(rows) != len(chosen) or not all(0 <= number < logits.width for number in chosen):
        raise InvalidAnswer("its logits do not match its tokens")
    return tuple([_entry(row, number, count) for row, number in zip(rows, chosen, strict=True)])


def _entry(scores: Any, chosen: int, count: int) -> TokenLogprob:
    # Imported where logits are read: most deployments never send any.
    import numpy as np

    row = np.asarray(scores, dtype=np.float32)
    highest = float(row.max())
    if not np.isfinite(highest):
        raise InvalidAnswer("its logits are not numbers")
    # Shifted by the highest, so that nothing overflows; summed in double precision.
    total = highest + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
    count = min(count, len(row))
    ordered = sorted((-float(row[number]), number) for number in _likeliest(row, count))
    return TokenLogprob(
        token="",
        logprob=_finite(float(row[chosen]) - total),
        id=chosen,
        rank=int((row > row[chosen]).sum()) + 1,
        top=tuple([Alternative("", _finite(-score - total), id=number) for score, number in ordered]),
    )


def _likeliest(row: np.ndarray[Any, Any], count: int) -> list[int]:
    """Return *count* ids. Of equal scores the lowest ids count: which ones argpartition takes differs by machine."""
    import numpy as np

    if not count:
        return []
    lowest = np.partition(row, -count)[-count]
    above = np.flatnonzero(row > lowest)
    return [*above.tolist(), *np.flatnonzero(row == lowest)[: count - len(above)].tolist()]


def _finite(value: float) -> float:
    return max(value, IMPOSSIBLE)


def _rows(logits: Logits) -> np.ndarray[Any, Any]:
    import numpy as np

    if logits.datatype == "BF16":
        # The upper half of a float32.
        values = (np.frombuffer(logits.data, dtype="<u2").astype("<u4") << 16).view("<f4")
    elif logits.datatype in ("FP32", "FP16"):
        dtype = "<f4"
        if logits.datatype == "FP16":
            dtype = "<f2"
        values = np.frombuffer(logits.data, dtype=dtype)
    else:
        raise InvalidAnswer(f"its logits are {logits.datatype}, which cannot be read")
    return values.reshape(-1, logits.width)


class PausableReceiver(Receiver, Protocol):
    """What takes the deltas of an answer, and can hold the backend back."""

    def pause(self) -> None:
        """Pause the backend until :meth:`resume`."""

    def resume(self) -> None:
        """Resume the backend."""


class LogitsReader:
    """
    Decodes the responses of a stream for its *run*, and makes log probabilities of their logits.

    The work may need a thread, so a task does it, in the order of the responses, while the run is paused. The run uses
    this reader as its decoder: it receives deltas instead of responses, and :meth:`feed` returns them unchanged.
    """

    def __init__(self, run: PausableReceiver, decoder: Decoder, generation: Generation) -> None:
        self._run: PausableReceiver | None = run
        self._decoder = decoder
        self._count = generation.sampling.logprobs or 0
        self._waiting: deque[InferResponse] = deque()
        self._end: tuple[Exception | None] | None = None
        self._task: asyncio.Task[None] | None = None

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """Take the responses that arrived together."""
        self._waiting += responses
        self._go_on()

    def end(self, error: Exception | None) -> None:
        """Take the end of the stream."""
        self._end = (error,)
        self._go_on()

    def feed(self, delta: Any) -> Delta:
        """Return the *delta* that this has made."""
        return cast(Delta, delta)

    def flush(self) -> str:
        """Return the text that the decoder delayed."""
        return self._decoder.flush()

    def close(self) -> None:
        """Stop, and drop the reference to the run."""
        self._run = None
        if self._task is not None:
            self._task.cancel()

    def _go_on(self) -> None:
        if self._task is None and self._run is not None:
            self._task = asyncio.create_task(self._work(self._run))

    async def _work(self, run: PausableReceiver) -> None:
        run.pause()
        try:
            # Once closed, the run may have gone on with another request.
            while self._waiting and self._run is not None:
                delta: Any = self._decoder.feed(self._waiting.popleft())
                logits = delta.logits
                delta.logits = None
                if logits is not None:
                    ids = delta.token_ids
                    cost = _cost(logits, delta.token_ids)
                    delta.logprobs = await offload.run(log_probabilities, logits, ids, self._count, cost=cost)
                run.receive((delta,))
        except Exception as error:  # noqa: BLE001 - the run ends with any error
            self._end = (error,)
        finally:
            # Also when closed: the run may go on at another Triton.
            self._task = None
            run.resume()
        if self._end is not None and self._run is not None:
            run.end(*self._end)


def _cost(logits: Logits, chosen: Sequence[int]) -> float:
    return offload.BYTE * len(chosen) * logits.width


# A prompt's scores may be hundreds of megabytes.
_PARALLEL = 2
# Log probabilities of one request's prompts, alternatives counted; each takes about 150 bytes.
_MAX_SCORES = 1_000_000


class PromptScoring(msgspec.Struct, frozen=True, kw_only=True):
    """How the log probabilities of the tokens of prompts are made."""

    #: The alternatives to each token.
    count: int
    #: The request's parameter that asks for it.
    param: str
    #: In seconds.
    timeout: float


async def score_prompts(
    adapter: Adapter,
    tokenizer: Tokenizer,
    generations: Sequence[Generation],
    scoring: PromptScoring,
    ask: Callable[[InferRequest], Awaitable[Sequence[InferResponse]]],
) -> list[tuple[TokenLogprob, ...]]:
    """
    Return an entry for each token of each prompt, the first without a number. *ask* returns the answers of Triton.

    Raises :class:`ServiceError`.
    """
    wanted = sum(len(generation.prompt_ids or ()) for generation in generations) * (1 + scoring.count)
    if wanted > _MAX_SCORES:
        raise InvalidRequest(
            f"The prompts have {wanted} log probabilities, alternatives counted, and a request {_MAX_SCORES} at most.",
            param=scoring.param,
        )
    gate = asyncio.Semaphore(_PARALLEL)

    async def score(generation: Generation) -> tuple[TokenLogprob, ...]:
        following = (generation.prompt_ids or ())[1:]
        if not following:
            return _named(tokenizer, generation, ())
        async with gate:
            request = adapter.encode_prompt_logits(generation)
            responses = await ask(replace(request, needed_for=scoring.param))
            for response in responses:
                entries = adapter.decode_prompt_logprobs(response, scoring.count)
                if entries is not None:
                    return _named(tokenizer, generation, tuple(entries))
            logits = next(filter(None, map(adapter.decode_prompt_logits, responses)), None)
            if logits is None:
                raise InvalidAnswer("it has no log probabilities of the prompt", model=request.model)

            def scored() -> tuple[TokenLogprob, ...]:
                return _named(tokenizer, generation, log_probabilities(logits, following, scoring.count))

            cost = _cost(logits, following) + offload.ITEM * len(following) * (1 + scoring.count)
            return await offload.run(scored, cost=cost)

    tasks = [asyncio.create_task(score(generation)) for generation in generations]
    try:
        async with asyncio.timeout(scoring.timeout):
            return await asyncio.gather(*tasks)
    except TimeoutError as error:
        raise UpstreamTimeout(f"The prompt was not scored within {scoring.timeout:g} seconds.") from error
    except InvalidRequest as error:
        error.param = error.param or scoring.param
        raise
    finally:
        await cancel(*tasks)


def _named(tokenizer: Tokenizer, generation: Generation, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """
    Return *entries* with the names of their tokens, after the prompt's first token, which has no log probability.

    Special tokens in the prompt's text have entries; those that the tokenizer put in front of it have none.
    """
    pieces = tokenizer.pieces
    prompt = generation.prompt
    names = TokenNames(pieces, skip_special_tokens=False)
    ids = generation.prompt_ids or ()
    named = [names.named(entry) for entry in (*(TokenLogprob("", None, id=number) for number in ids[:1]), *entries)]
    for index, number in enumerate(ids):
        entry = named[index]
        if number in pieces.special_ids and not prompt.startswith(entry.token):
            named[index] = replace(entry, hidden=True)
            continue
        if number not in pieces.special_ids and pieces.exact:
            # Some tokenizers add a space in front of a text.
            first = pieces.first(number)
            named[index] = replace(entry, token=first.decode("utf-8", "replace"), raw=first)
        break
    return tuple(named)
