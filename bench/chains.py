"""
``make bench ARGS="--cases chains"``: the next turn of a long conversation, in front of the fake Triton.

The client sends all of it, or goes on from a response or in a conversation, which the service keeps in its file; or it
is too long for the model, and ``truncation`` leaves out its beginning.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.accounting import CpuClock
from bench.processes import HOST, BenchError, free_port, running, wait_until_answers
from bench.repository import PACED
from bench.subjects import Subject, ours

TURNS = 200
_ROUNDS = 5
# Of each way, in each round: the clock of the kernel is exact to some microseconds.
_REPEATED = 4
_TEXT = "What stands in the report about the harbour, and who has written it? " * 2
# Tokens are the bytes of the text, and a turn has some 200 of them: this part of the conversation fits.
_CONTEXT = 160
_FITTING = 0.65


class Chains(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time of the service in milliseconds, for a turn after *turns* others."""

    turns: int
    sent: float
    chain: float
    conversation: float
    #: With a tokenizer: a conversation that fits, and one of which the beginning is left out.
    fitting: float
    truncated: float


class _Client:
    """Sends requests one after the other, and reads the service's CPU time."""

    def __init__(self, subject: Subject) -> None:
        self._clock = CpuClock(subject.relay)
        self._connection = http.client.HTTPConnection(subject.target.host, subject.target.port)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer."""
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        read: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise BenchError(f"refused: {read}")
        return read

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()

    def cost(self, **fields: Any) -> float:
        """Return the milliseconds of a turn."""
        before = self._clock.read()
        for _ in range(_REPEATED):
            self.post("/v1/responses", {"model": PACED, "max_output_tokens": 1, **fields})
        return (self._clock.read() - before) / _REPEATED / 1e6


def measure_chains(turns: int = TURNS, rounds: int = _ROUNDS) -> Chains:
    """Measure. Raises :class:`BenchError`."""
    with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as name:
        folder = Path(name)
        port = free_port()
        log = folder / "triton.log"
        with running([sys.executable, "-m", "bench.fake_triton", str(port), "0"], log):
            wait_until_answers(port, "/v2", log)
            url = f"http://{HOST}:{port}"
            environment = {"XDG_STATE_HOME": name}
            with ours("ours-http", url, folder, environment) as subject, closing(_Client(subject)) as client:
                costs = _kept(client, turns, rounds)
            options = ("--tokenizer", _byte_tokenizer(folder), "--max-model-len", str(_CONTEXT * turns))
            cut = ours("ours-tokenizer", url, folder, environment, options=options)
            with cut as subject, closing(_Client(subject)) as client:
                costs |= _truncated(client, turns, rounds)
    return Chains(turns=turns, **costs)


def _kept(client: _Client, turns: int, rounds: int) -> dict[str, float]:
    """Return what a turn costs that the client sends all of, and that goes on from what is kept."""
    items: list[dict[str, Any]] = []
    previous: dict[str, Any] = {}
    question = [{"role": "user", "content": _TEXT}]
    for _ in range(turns):
        made = client.post("/v1/responses", {"model": PACED, "max_output_tokens": 1, "input": question, **previous})
        previous = {"previous_response_id": made["id"]}
        # As clients keep them.
        items += [*question, *made["output"]]
    conversation = client.post("/v1/conversations", {})["id"]
    # What is measured stays in it: on average, it is as long as the others.
    for start in range((rounds + 1) * _REPEATED, len(items), 20):
        client.post(f"/v1/conversations/{conversation}/items", {"items": items[start : start + 20]})
    ways: dict[str, dict[str, Any]] = {
        "sent": {"input": [*items, *question]},
        "chain": {"input": question, **previous},
        "conversation": {"input": question, "conversation": conversation},
    }
    return _medians(client, ways, rounds)


def _truncated(client: _Client, turns: int, rounds: int) -> dict[str, float]:
    """Return what a turn costs that fits, and that does not."""
    question = {"role": "user", "content": _TEXT}
    items = [question, {"role": "assistant", "content": "word"}] * turns
    ways: dict[str, dict[str, Any]] = {
        "fitting": {"input": [*items[: 2 * round(_FITTING * turns)], question]},
        "truncated": {"input": [*items, question], "truncation": "auto"},
    }
    return _medians(client, ways, rounds)


def _medians(client: _Client, ways: dict[str, dict[str, Any]], rounds: int) -> dict[str, float]:
    costs_by_name: dict[str, list[float]] = {name: [] for name in ways}
    # The first one of each is not counted; then they take turns.
    for _ in range(rounds + 1):
        for name, fields in ways.items():
            costs_by_name[name].append(client.cost(store=False, **fields))
    return {name: median(costs[1:]) for name, costs in costs_by_name.items()}


def _byte_tokenizer(folder: Path) -> str:
    """Write a tokenizer with a token for each byte; return its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
