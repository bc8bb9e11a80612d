"""
Triton's own metrics, as its metrics port gives them: Prometheus's text format 0.0.4.

They are passed on as they were written and not written anew: Triton's counters have no ``_total`` in their names, which
every library would put there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import aiohttp
import msgspec
import structlog
from prometheus_client.parser import text_string_to_metric_families

_log = structlog.get_logger(__name__)

# Prometheus gives up after 10 seconds, and our own metrics must reach it all the same.
_TIMEOUT = 2.0
_MAX_BYTES = 32 * 1024 * 1024
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{(?:{_LABEL}(?:,{_LABEL})*)?,?\}})? (\S+)(?: -?[0-9]+)?")
_COMMENT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: .*)?")
_SUFFIXES = ("_bucket", "_sum", "_count")
# TensorRT-LLM's backend reports its cache under this name: blocks, by kind.
_KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"


class Family(msgspec.Struct):
    """One metric: what is said of it, by ``HELP`` and ``TYPE``, and the lines of its samples in their order."""

    comments: dict[str, str] = msgspec.field(default_factory=dict)
    samples: list[str] = msgspec.field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """All of its lines."""
        return [*self.comments.values(), *self.samples]


def parse(text: str) -> Mapping[str, Family]:
    """
    Return the metrics of an exposition by name, each with all of its lines together.

    Raises ``ValueError`` for a text that is no exposition: half of one, or a page that says something else.
    """
    families: dict[str, Family] = {}
    current = ""
    for line in text.split("\n"):
        if not line.strip():
            continue
        if line.startswith("#"):
            comment = _COMMENT.fullmatch(line)
            if comment is not None:
                current = comment[2]
                # Each may be said once only.
                families.setdefault(current, Family()).comments.setdefault(comment[1], line)
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"no line of an exposition: {line[:80]!r}")
        float(sample[2])
        if sample[1] != current and not any(sample[1] == current + suffix for suffix in _SUFFIXES):
            current = sample[1]
        families.setdefault(current, Family()).samples.append(line)
    return families


def cache_usage(families: Mapping[str, Family]) -> Mapping[str, float]:
    """Return, by the engine's name in Triton, how full its KV cache is, from 0 to 1; of engines that report it."""
    family = families.get(_KV_BLOCKS)
    if family is None:
        return {}
    blocks: dict[str, dict[str, float]] = {}
    for metric in text_string_to_metric_families("\n".join(family.lines) + "\n"):
        for sample in metric.samples:
            kind = sample.labels.get("kv_cache_block_type", "")
            blocks.setdefault(sample.labels.get("model", ""), {})[kind] = sample.value
    return {
        model: kinds["used"] / kinds["max"]
        for model, kinds in blocks.items()
        if "used" in kinds and kinds.get("max", 0) > 0
    }


class TritonMetrics:
    """Reads the metrics at *url*. Whoever makes it must :meth:`close` it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None
        self._failing = False

    async def read(self) -> Mapping[str, Family] | None:
        """Return them by name, or ``None`` when Triton does not give them in time, which is logged once."""
        try:
            # Hundreds of models have thousands of lines.
            families = await asyncio.to_thread(parse, await self._fetch())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            if not self._failing:
                _log.warning(
                    "Triton's metrics cannot be read", url=self._url, reason=f"{type(error).__name__}: {error}"
                )
            self._failing = True
            return None
        self._failing = False
        return families

    async def _fetch(self) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT))
        headers = {"Accept": "text/plain;version=0.0.4"}
        async with self._session.get(self._url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"HTTP status {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ValueError(f"more than {_MAX_BYTES} bytes")
        return body.decode("utf-8")

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()
