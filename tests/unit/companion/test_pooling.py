"""Vectors by the companion's model file: of a whole input, and of each of its tokens."""

from __future__ import annotations

import base64
import types
from typing import Any

import numpy as np
import pytest

from tests.cases import every_case


class Tensor:
    """Numbers as PyTorch has them on a GPU."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def float(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self._values


class Engine:
    """vLLM's engine, with the vectors that a test says."""

    def __init__(self, values: Any) -> None:
        self.asked: list[Any] = []
        self._values = values

    async def encode(self, prompt: Any, params: Any, request_id: str, lora_request: Any = None) -> Any:
        self.asked.append(params)
        outputs = types.SimpleNamespace(data=Tensor(self._values))
        yield types.SimpleNamespace(outputs=outputs, prompt_token_ids=[5, 6, 7])


def pooling(model: Any, values: Any) -> tuple[Any, Engine]:
    """Return an engine of the model file over vLLM's, and that one."""
    vllm = Engine(values)
    made = model.Engine.__new__(model.Engine)
    made._engine = vllm
    made._library = types.SimpleNamespace(PoolingParams=lambda **values: values)
    made._arguments = {}
    made._vocabulary = 100
    made._encodes = False
    made._pooling = 0
    return made, vllm


def numbers(part: dict[str, Any]) -> list[float]:
    """Return the numbers of a response."""
    return list(np.frombuffer(base64.b64decode(part["vector"]), "<f4").tolist())


async def test_the_vector_of_an_input(model: Any) -> None:
    """It is one response, without a shape."""
    engine, vllm = pooling(model, np.array([0.5, 1.5]))
    (body,) = await engine.pool({"kind": "embed", "ids": [5, 6, 7], "pooling": {"dimensions": 2}}, "x")

    assert ({"vector", "prompt"}, [0.5, 1.5], 3) == (set(body), numbers(body), body["prompt"])
    assert [{"task": "embed", "dimensions": 2}] == vllm.asked


@every_case("rows, sizes", [(1, [1]), (2, [2]), (3, [2, 1]), (5, [2, 2, 1])])
async def test_the_vectors_of_tokens(model: Any, rows: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in parts of whole vectors, of which the last says that it is, and how many tokens the prompt has."""
    monkeypatch.setattr(model, "PART", 2 * 3 * 4)
    values = np.arange(rows * 3).reshape(rows, 3)
    engine, _ = pooling(model, values)
    parts = await engine.pool({"kind": "token_embed", "ids": [5, 6, 7]}, "x")

    assert [[size, 3] for size in sizes] == [part["shape"] for part in parts]
    assert values.reshape(-1).tolist() == [value for part in parts for value in numbers(part)]
    assert [True] * (len(sizes) - 1) + [False] == [part["more"] for part in parts]
    assert 3 == parts[-1]["prompt"]


async def test_a_vector_that_is_longer_than_a_part(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a part by itself."""
    monkeypatch.setattr(model, "PART", 4)
    engine, _ = pooling(model, np.ones((2, 3)))
    parts = await engine.pool({"kind": "token_classify", "ids": [5, 6]}, "x")

    assert [[1, 3], [1, 3]] == [part["shape"] for part in parts]


async def test_more_vectors_than_a_request_gets(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before they are written down."""
    monkeypatch.setattr(model, "MAX_VECTORS", 23)
    engine, _ = pooling(model, np.ones((2, 3)))

    with pytest.raises(model.Refused, match="24 bytes, of at most 23") as caught:
        await engine.pool({"kind": "token_embed", "ids": [5, 6]}, "x")
    assert "input" == caught.value.fields["param"]
