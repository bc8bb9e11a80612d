"""The tensors in a response of ``tensorrt_llm``: which ones, when, and in what shape."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from .logits import MadeUp
from .tensors import scalar

# Tokens in a block of the cache of each engine.
TOKENS_PER_BLOCK = 64
# The cache keeps this many blocks, the latest ones.
_CACHE_SIZE = 4096

# Versions without this output send placeholders for all outputs that were not requested.
_FIRST_WITHOUT_PLACEHOLDERS = "sequence_index"

_SWITCHES = (
    "log_probs", "context_logits", "generation_logits", "perf_metrics", "num_input_tokens", "num_output_tokens",
)  # fmt: skip


class Writer:
    """Builds the responses of one request."""

    def __init__(
        self,
        request: Any,
        declared: set[str],
        *,
        stream: bool,
        exclude_input: bool,
        several: bool,
        indexed: bool,
        vocabulary: int,
        end_id: int,
    ) -> None:
        self._requested = set(request.requested_output_names()) or declared
        self._stream = stream
        self._exclude_input = exclude_input
        self._several = several
        self._indexed = indexed
        self._placeholders = _FIRST_WITHOUT_PLACEHOLDERS not in declared
        self._vocabulary = vocabulary
        self._end_id = end_id
        self._wants = {name for name in _SWITCHES if scalar(request, f"return_{name}", False)}
        self._arrived = time.monotonic_ns()
        self._first = 0

    def response(self, sequence: Any, new: list[int], *, last: bool) -> Any:
        """Return the response that carries *new* ids (streaming) or the whole *sequence* (otherwise)."""
        self._first = self._first or time.monotonic_ns()
        if self._stream:
            ids = new
        elif self._exclude_input:
            ids = sequence.generation.ids
        else:
            ids = sequence.prompt + sequence.generation.ids
        values = {
            "output_ids": np.array(ids, dtype=np.int32).reshape(1, 1, len(ids)),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
            **self._probabilities(sequence),
            **self._logits(sequence, new),
        }
        if self._several:
            values["batch_index"] = np.array([[sequence.row]], dtype=np.int32)
        if self._indexed:
            values["sequence_index"] = np.array([[sequence.index]], dtype=np.int32)
        if "num_input_tokens" in self._wants:
            values["num_input_tokens"] = np.array([[len(sequence.prompt)]], dtype=np.int32)
        if "num_output_tokens" in self._wants:
            values["num_output_tokens"] = np.array([[len(ids)]], dtype=np.int32)
        if "perf_metrics" in self._wants and last:
            values |= self._metrics(sequence)
        return pb.InferenceResponse(
            [pb.Tensor(name, value) for name, value in values.items() if name in self._requested]
        )

    def _probabilities(self, sequence: Any) -> dict[str, Any]:
        produced = sequence.generation.ids
        if "log_probs" in self._wants:
            # Every response has those of all tokens so far.
            log_probs = np.array(
                list(map(sequence.generation.scores.logprob, itertools.count(), produced)), dtype=np.float32
            )
            return {
                "cum_log_probs": np.array([[log_probs.sum()]], dtype=np.float32),
                "output_log_probs": log_probs.reshape(1, 1, len(produced)),
            }
        if not self._placeholders:
            return {}
        return {
            "cum_log_probs": np.zeros((1, 1), dtype=np.float32),
            "output_log_probs": np.zeros((1, 1, len(sequence.prompt)), dtype=np.float32),
            "context_logits": np.zeros((1, 1, 1), dtype=np.float32),
            "generation_logits": np.zeros((1, 1, 1, 1), dtype=np.float32),
        }

    def _logits(self, sequence: Any, new: list[int]) -> dict[str, Any]:
        """Return the scores: the prompt's in every response, and the new tokens', with a spare row if not streamed."""
        outputs = {}
        # The language model has none, like an engine that was built without them.
        if "context_logits" in self._wants and isinstance(sequence.generation.scores, MadeUp):
            following = [*sequence.prompt[1:], *(sequence.generation.ids[:1] or [self._end_id])]
            scores = sequence.generation.scores.rows(0, following, self._vocabulary)
            outputs["context_logits"] = scores[np.newaxis]
        if "generation_logits" in self._wants and self._stream:
            # Without a new token, those of the end.
            generated = new or [self._end_id]
            first = len(sequence.generation.ids) - len(new)
            scores = sequence.generation.scores.rows(first, generated, self._vocabulary)
            outputs["generation_logits"] = scores[np.newaxis, :, np.newaxis]
        elif "generation_logits" in self._wants:
            scores = sequence.generation.scores.rows(0, sequence.generation.ids, self._vocabulary)
            outputs["generation_logits"] = np.pad(scores, ((0, 1), (0, 0)))[np.newaxis, np.newaxis]
        return outputs

    def _metrics(self, sequence: Any) -> dict[str, Any]:
        blocks = len(sequence.prompt) // TOKENS_PER_BLOCK + 1
        counts = {
            "kv_cache_alloc_new_blocks": blocks - sequence.reused_blocks,
            "kv_cache_reused_blocks": sequence.reused_blocks,
            "kv_cache_alloc_total_blocks": blocks - sequence.reused_blocks,
            "total_accepted_draft_tokens": 0,
            "total_draft_tokens": 0,
        }
        times = {
            "arrival_time_ns": self._arrived,
            "first_scheduled_time_ns": self._arrived,
            "first_token_time_ns": self._first,
            "last_token_time_ns": time.monotonic_ns(),
        }
        return {
            **{name: np.array([[value]], dtype=np.int32) for name, value in counts.items()},
            **{name: np.array([[value]], dtype=np.int64) for name, value in times.items()},
            "acceptance_rate": np.zeros((1, 1), dtype=np.float32),
        }


class PrefixCache:
    """The full blocks of earlier prompts that an engine still has, each with all blocks before it."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def reuse(self, prompt: list[int]) -> int:
        """Return the number of *prompt*'s full blocks in the cache, and add all of them."""
        keys: list[int] = []
        for start in range(0, len(prompt) - TOKENS_PER_BLOCK + 1, TOKENS_PER_BLOCK):
            keys.append(hash((*keys[-1:], *prompt[start : start + TOKENS_PER_BLOCK])))
        reused = next((index for index, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in keys:
            self._blocks.pop(key, None)
            self._blocks[key] = None
        while len(self._blocks) > _CACHE_SIZE:
            del self._blocks[next(iter(self._blocks))]
        return reused
