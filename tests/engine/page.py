"""The document that lists the differences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.engine.installation import VLLM_VERSION
from tests.engine.reasons import REASONS, Kind, Reason

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "vllm-differences.md"
_HEAD = """# Differences from vLLM's server

<!-- Written by `make engine`. -->

`make engine` sends the same {requests} requests to vLLM {version}'s own server and to this service in front of Triton's
vLLM backend, over HTTP and over gRPC, and in front of the companion model, with the same weights. It compares the
status and every field of the answers, streams included. Ids, times and the messages of errors may differ, and a null
counts as a missing field. Of these requests, {equal} have equal answers, and {unknown} differ in something that has no
known reason. The others differ only in what follows.

Not part of this comparison, which has models of texts alone: transcriptions (Whisper, Voxtral, Qwen3-ASR and others)
and vectors of each token (`/pooling`), which the companion model has; and video, which the service does not read:
`video_url` is a 400.
"""


def written(requests: int, equal: int, found: Mapping[Reason | None, int]) -> str:
    """Return the document: so many *requests*, of them *equal*, and how many differ for each reason, or for none."""
    lines = [_HEAD.format(requests=requests, version=VLLM_VERSION, equal=equal, unknown=found.get(None, 0))]
    for kind in Kind:
        if kind not in {one.kind for one in REASONS}:
            continue
        lines += [f"## {kind.value}\n", "| Where | What differs, and why | Requests |", "| --- | --- | --- |"]
        lines += [f"| {one.where} | {one.why} | {found.get(one, 0)} |" for one in REASONS if one.kind is kind]
        lines.append("")
    return "\n".join(lines)
