"""
Log probabilities made from logits: the log-softmax of a row, its most likely tokens, and the rank of the chosen one.

They are those of the model itself, before temperature, penalties and biases, as vLLM reports them by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from triton_openai.errors import UpstreamError
from triton_openai.generation import Alternative, Logits, TokenLogprob

if TYPE_CHECKING:
    import numpy as np

#: More numbers than this are worked on in a thread. Measured: 0.2 ms for a row of 32,000 tokens and 20 alternatives,
#: 1.4 ms for one of 128,000.
INLINE_NUMBERS = 32_000

#: OpenAI's way of saying "practically impossible"; JSON has no minus infinity.
IMPOSSIBLE = -9999.0


def log_probabilities(logits: Logits, chosen: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """
    Return an entry for each of the *chosen* ids, a row each, with the *count* most likely tokens; names are not added.

    Raises :class:`UpstreamError` for fewer rows than ids, and for what has no log probabilities.
    """
    rows = _rows(logits)[logits.first : logits.first + len(chosen)]
    if len(rows) != len(chosen) or not all(0 <= number < logits.width for number in chosen):
        raise UpstreamError("The model sent logits that do not match its tokens.")
    return tuple([_entry(row, number, count) for row, number in zip(rows, chosen, strict=True)])


def _entry(scores: Any, chosen: int, count: int) -> TokenLogprob:
    # Imported where logits are read: most deployments never send any.
    import numpy as np

    row = np.asarray(scores, dtype=np.float32)
    highest = float(row.max())
    if not np.isfinite(highest):
        raise UpstreamError("The model sent logits that are no numbers.")
    # Shifted by the highest, so that nothing overflows; summed in double precision.
    total = highest + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))
    count = min(count, len(row))
    likeliest = np.argpartition(row, len(row) - count)[len(row) - count :] if count else ()
    ordered = sorted((-float(row[number]), int(number)) for number in likeliest)
    return TokenLogprob(
        token="",
        logprob=_finite(float(row[chosen]) - total),
        id=chosen,
        rank=int((row > row[chosen]).sum()) + 1,
        top=tuple([Alternative("", _finite(-score - total), id=number) for score, number in ordered]),
    )


def _finite(value: float) -> float:
    return max(value, IMPOSSIBLE)


def _rows(logits: Logits) -> np.ndarray[Any, Any]:
    import numpy as np

    if logits.datatype == "BF16":
        # The upper half of a float32.
        values = (np.frombuffer(logits.data, dtype="<u2").astype("<u4") << 16).view("<f4")
    elif logits.datatype in ("FP32", "FP16"):
        values = np.frombuffer(logits.data, dtype="<f4" if logits.datatype == "FP32" else "<f2")
    else:
        raise UpstreamError(f"The model sent logits as {logits.datatype}, which cannot be read.")
    return values.reshape(-1, logits.width)
