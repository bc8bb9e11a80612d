"""Limits of a whole batch: the input tokens that its key has in batches, and the inputs of embedding requests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from triton_openai.batches.host import Host
from triton_openai.batches.inputs import InputReader
from triton_openai.config.tree import BatchesSettings
from triton_openai.storage.batch_records import Batch, BatchError
from triton_openai.storage.enqueued_table import EnqueuedTable

_EMBEDDINGS = "/v1/embeddings"


def max_inputs_of(batch: Batch, settings: BatchesSettings) -> int | None:
    """Return how many inputs the requests of *batch* may have together; ``None`` for any number."""
    if batch.endpoint == _EMBEDDINGS:
        return settings.max_embedding_inputs
    return None


def fail_with_results(batch: Batch, refused: Sequence[BatchError]) -> None:
    """
    Decide that *batch* fails, with a result for each line: a batch of Anthropic's API has no errors of its own.

    None of its lines has run.
    """
    batch.outcome = "failed"
    batch.problems = list(refused)
    batch.output = f"file-{os.urandom(16).hex()}"
    if batch.status != "cancelling":
        batch.set_status("finalizing")


async def enqueue(
    table: EnqueuedTable, host: Host, batch: Batch, reader: InputReader, names: Mapping[str, str]
) -> Sequence[BatchError]:
    """
    Count the input tokens of *batch* until it ends; return why it may not run, if it has too many of them.

    *names* are the names by which the host finds the models that the lines name. The code of the error is OpenAI's.
    """
    tokens: Counter[str] = Counter()
    limits: dict[str, int] = {}
    for asked, number in reader.tokens.items():
        limited = host.max_enqueued_tokens(names.get(asked, asked))
        if limited is not None:
            model, limit = limited
            tokens[model] += number
            limits[model] = limit
    if not limits:
        return ()
    exceeded = await table.add(batch, tokens, limits)
    return [
        BatchError(
            code="token_limit_exceeded",
            message=(
                f"Enqueued token limit reached for {model}. Limit: {limits[model]:,} input tokens in all batches of a "
                f"key that have not ended. This one has about {tokens[model]:,}. Wait for others, or make it smaller."
            ),
        )
        for model in exceeded
    ]
