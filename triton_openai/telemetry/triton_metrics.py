"""Triton's own metrics: as text, and the use of an engine's KV cache."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import aiohttp
import structlog
from prometheus_client.parser import text_string_to_metric_families

_log = structlog.get_logger(__name__)

# Prometheus waits for 10 seconds; our own metrics must arrive also when Triton does not answer.
_TIMEOUT = 2.0
_MAX_BYTES = 32 * 1024 * 1024
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{(?:{_LABEL}(?:,{_LABEL})*)?,?\}})? (\S+)(?: -?[0-9]+)?")
_COMMENT = re.compile(r"# (?:HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?= |$)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")
# The name under which an engine reports its cache: blocks, by kind.
_KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"


def parse(text: str) -> Mapping[str, Sequence[str]]:
    """
    Return the lines of each metric of an exposition in Prometheus's text format 0.0.4.

    They stay as Triton wrote them: its counters have no ``_total``, which every library would add. Raises
    ``ValueError`` for any other text, and for an exposition that is cut off.
    """
    families: dict[str, list[str]] = {}
    comments: set[str] = set()
    for line in filter(str.strip, text.split("\n")):
        if line.startswith("#"):
            comment = _COMMENT.match(line)
            # Each may stand there once only.
            if comment is not None and comment[0] not in comments:
                comments.add(comment[0])
                families.setdefault(comment[1], []).append(line)
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"no line of an exposition: {line[:80]!r}")
        float(sample[2])
        name = _SUFFIX.sub("", sample[1])
        families.setdefault(name if name in families else sample[1], []).append(line)
    return families


def cache_blocks(families: Mapping[str, Sequence[str]]) -> Mapping[str, Mapping[str, float]]:
    """Return, by the engine's name in Triton, the blocks of its KV cache by kind; of engines that report their use."""
    blocks: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for metric in text_string_to_metric_families("\n".join([*families.get(_KV_BLOCKS, ()), ""])):
        for sample in metric.samples:
            blocks[sample.labels.get("model", "")][sample.labels.get("kv_cache_block_type", "")] = sample.value
    return {model: kinds for model, kinds in blocks.items() if "used" in kinds and kinds.get("max", 0) > 0}


class TritonMetrics:
    """Reads Triton's own metrics at *url*. A reader that is *quiet* logs no failures: nobody set the address."""

    def __init__(self, url: str, *, quiet: bool = False) -> None:
        self._url = url
        self._failing = quiet
        self._quiet = quiet

    async def read(self) -> Mapping[str, Sequence[str]] | None:
        """Return them as :func:`parse` does, or ``None`` when Triton does not send them in time, which is logged."""
        headers = {"Accept": "text/plain;version=0.0.4"}
        body = bytearray()
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT)) as session,
                session.get(self._url, headers=headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise ValueError(f"HTTP status {response.status}")
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_BYTES:
                        raise ValueError(f"more than {_MAX_BYTES} bytes")
            # Hundreds of models have thousands of lines.
            families = await asyncio.to_thread(parse, body.decode())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            if not self._failing:
                reason = f"{type(error).__name__}: {error}"
                _log.warning("Triton's metrics cannot be read", url=self._url, reason=reason)
            self._failing = True
            return None
        self._failing = self._quiet
        return families
