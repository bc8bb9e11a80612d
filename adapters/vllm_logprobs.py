"""
The log probabilities of Triton's vLLM backend: JSON text in ``logprobs``, one object per new token.

Each object maps token ids to ``{"logprob", "rank", "decoded_token"}``, the chosen token first and then the most
likely ones (vllm_backend's ``src/model.py`` and vLLM's ``Logprob``). ``decoded_token`` is null for a token without a
text of its own. The ids that an answer is made of are told nowhere else. Those of the prompt's tokens are not returned.
"""

from __future__ import annotations

import msgspec

from triton_openai.errors import UpstreamError
from triton_openai.generation import Alternative, Delta, TokenLogprob
from triton_openai.triton.tensors import InferResponse

_REPLACEMENT = "\ufffd"
#: vLLM's ``max_logprobs`` where the engine's arguments do not set it, and as much as OpenAI allows.
MOST = 20


class _Entry(msgspec.Struct, frozen=True):
    logprob: float | None
    rank: int | None = None
    decoded_token: str | None = None


_decode = msgspec.json.Decoder(list[dict[str, _Entry]] | None).decode


class VllmLogprobs:
    """Reads the log probabilities of one request, which asked for *count* alternatives per token."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, response: InferResponse, delta: Delta) -> tuple[TokenLogprob, ...]:
        """Return one entry per new token. Raises :class:`UpstreamError` for JSON of another shape."""
        texts = response.texts("logprobs")
        if not texts:
            return ()
        try:
            positions = _decode(texts[0])
        except msgspec.MsgspecError as error:
            raise UpstreamError("The model sent log probabilities that cannot be read.", detail=str(error)) from error
        return tuple(self._position(entries) for entries in positions or () if entries)

    def _position(self, entries: dict[str, _Entry]) -> TokenLogprob:
        alternatives = [_alternative(key, entry) for key, entry in entries.items()]
        chosen = alternatives[0]
        rank = next(iter(entries.values())).rank
        # The chosen token comes on top of the most likely ones unless it is one of them: rank says which those are.
        ranked = sorted(
            (entry.rank if entry.rank is not None else index, index) for index, entry in enumerate(entries.values())
        )
        top = tuple(alternatives[index] for _, index in ranked[: self._count])
        return TokenLogprob(
            token=chosen.token, logprob=chosen.logprob, raw=chosen.raw, top=top, id=chosen.id, rank=rank
        )


def _alternative(key: str, entry: _Entry) -> Alternative:
    token = entry.decoded_token or ""
    # A part of a character shows as U+FFFD: its bytes are not known here. Where there is a tokenizer, it has them.
    raw = None if _REPLACEMENT in token else token.encode()
    number = int(key) if key.isdecimal() else None
    # OpenAI's way of saying "practically impossible"; JSON has no minus infinity.
    return Alternative(token=token, logprob=-9999.0 if entry.logprob is None else entry.logprob, raw=raw, id=number)
