"""
How much of a prompt came out of TensorRT-LLM's KV cache.

The engine counts blocks, and how many tokens one holds is fixed when it is built: ``tokens_per_block``, which no config
tells. Source of the facts: ``all_models/inflight_batcher_llm`` since tensorrtllm_backend 0.16 and ``all_models/llmapi``
since TensorRT-LLM 1.0.
"""

from __future__ import annotations

import msgspec

from triton_openai.errors import UpstreamError
from triton_openai.generation import Generation
from triton_openai.triton.tensors import InferResponse, ModelConfig


class CacheReport(msgspec.Struct, frozen=True):
    """The input that asks for the use of the cache, and the output with the number of blocks that were there."""

    flag: str
    output: str


_REPORTS = (
    CacheReport("return_perf_metrics", "kv_cache_reused_blocks"),
    # 0.16 to 0.18.
    CacheReport("return_kv_cache_reuse_stats", "kv_cache_reused_blocks"),
    # The LLM API's model.
    CacheReport("sampling_param_return_perf_metrics", "kv_cache_reused_block"),
)


def cache_report(config: ModelConfig) -> CacheReport | None:
    """Return how the model tells the use of its cache, ``None`` where it does not."""
    return next((each for each in _REPORTS if each.flag in config.inputs and each.output in config.outputs), None)


class CachedTokens:
    """Reads the tokens of a prompt that came from the cache; *block_size* is how many a block holds."""

    def __init__(self, output: str, block_size: int) -> None:
        self._output = output
        self._block_size = block_size

    @classmethod
    def of(cls, report: CacheReport | None, generation: Generation) -> CachedTokens | None:
        """Return the reader for *generation*, or ``None`` where the cache's use or its block size is not known."""
        size = generation.kv_cache_block_size
        return None if report is None or size is None else cls(report.output, size)

    def __call__(self, response: InferResponse) -> int | None:
        """
        Return the tokens, ``None`` for a response that does not tell: only the last one does.

        The LLM API's model sends the number as text. A last block counts whole, however few tokens are in it.
        """
        blocks = response.numbers(self._output)
        if not blocks:
            return None
        try:
            return int(blocks[0]) * self._block_size
        except ValueError as error:
            raise UpstreamError(f"The model sent a malformed '{self._output}' output.") from error
