"""
``python -m tests.faults.batch_soak``: a batch over several Tritons, which are killed and frozen and lose their model,
while the service is killed and some lines end each Triton that works for them.

It prints what became of the lines, and how often each of those that end a Triton did. The exit status is 1 if a line is
lost or there twice, if a line failed that ends nothing, or if one that does was answered or ended too many Tritons.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from tests.clients.service import Service, serving, steered, until
from tests.triton_fixture import frozen
from triton_openai.demo.record import Record
from triton_openai.demo.repository import build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

MODEL = "vllm_model"
#: Tritons that a line may end before it fails: one with others, and two alone.
MAX_DEATHS = 3
_POISON = "ends its Triton"
_SETTINGS = {
    "triton": {"refresh_interval": 0.5, "ejection": {"time": 1, "max_time": 5}},
    # What a frozen Triton does not answer is not waited for until the end of the run.
    "batches": {"request_timeout": 30, "lease": 5},
}
_POLL_SECONDS = 0.01
_LONGEST_SECONDS = 1800.0


@dataclass
class OneTriton:
    """A Triton, what its model was asked, and how it is ended."""

    server: EmbeddedTriton
    record: Record
    tokenizer: Path
    #: Whoever does something to it, so that nobody else does.
    busy: threading.RLock = field(default_factory=threading.RLock)
    #: The requests that have been looked at.
    seen: int = 0

    def restart(self) -> None:
        """Kill it, and start it again."""
        with self.busy:
            self.server.kill()
            self.server.start()

    def asked(self) -> list[str]:
        """Return the prompts that it got since the last call."""
        events = self.record.events(model=MODEL, event="request")
        new = events[self.seen :]
        self.seen = len(events)
        tensors = [tensor for event in new for tensor in event["inputs"].values() if tensor["dtype"] == "BYTES"]
        return [text for tensor in tensors for text in tensor["value"] if isinstance(text, str) and "line " in text]


@dataclass
class Figures:
    """What was done, and what became of the lines."""

    faults: Counter[str] = field(default_factory=Counter)
    #: By the number of a line: Tritons that it ended.
    deaths: Counter[int] = field(default_factory=Counter)
    results: Counter[int] = field(default_factory=Counter)
    #: By the number of a line: the status that it failed with.
    failed: dict[int, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    seconds: float = 0.0


class BatchSoak:
    """A batch of *lines*, of which so many are *poison*, over *tritons*, with faults of the *kinds*."""

    def __init__(
        self,
        folder: Path,
        tritons: Sequence[OneTriton],
        options: Sequence[str],
        *,
        lines: int,
        poison: int,
        kinds: Sequence[str],
        seed: int,
    ) -> None:
        self._folder = folder
        self._tritons = tritons
        self._options = options
        self._chance = random.Random(seed)
        self._lines = lines
        #: The numbers of the lines that end their Triton.
        self.poison = set(self._chance.sample(range(1, lines + 1), poison))
        self._over = threading.Event()
        self.figures = Figures()
        does: Mapping[str, Callable[[], None]] = {"kill": self._kill, "freeze": self._freeze, "flap": self._flap}
        self._faults = {kind: do for kind, do in does.items() if kind in kinds}
        self._kills_service = "service" in kinds

    def run(self) -> Figures:
        """Run the batch to its end, and return what was seen."""
        began = time.monotonic()
        threads = [threading.Thread(target=self._execute, args=(triton,), daemon=True) for triton in self._tritons]
        threads.append(threading.Thread(target=self._disturb, daemon=True))
        batch_id = ""
        ended = False
        while not ended:
            with self._service() as service, OpenAI(base_url=service.base_url, api_key="none") as client:
                if not batch_id:
                    batch_id = self._make(client)
                    for thread in threads:
                        thread.start()
                ended = self._wait(service, client, batch_id)
                if ended:
                    self._over.set()
                    self._count(client, batch_id)
                self.figures.complaints += service.complaints()
            assert time.monotonic() < began + _LONGEST_SECONDS, "the batch does not end"
        for thread in threads:
            thread.join()
        self.figures.seconds = time.monotonic() - began
        return self.figures

    @contextlib.contextmanager
    def _service(self) -> Iterator[Service]:
        with serving(self._folder, *self._options, settings=_SETTINGS) as service:
            yield service

    def _make(self, client: OpenAI) -> str:
        until(lambda: any(model.id == MODEL for model in client.models.list()))
        content = b"".join(map(self._line, range(1, self._lines + 1)))
        file = client.files.create(file=("input.jsonl", content), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        return made.id

    def _line(self, number: int) -> bytes:
        if number in self.poison:
            prompt = steered(f"line {number} {_POISON}", hang_at=1)
        else:
            prompt = steered(f"line {number}", text="one two three four", delay_ms=self._chance.choice((5, 50, 200)))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 50}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(line).encode() + b"\n"

    def _wait(self, service: Service, client: OpenAI, batch_id: str) -> bool:
        """Wait until the batch has ended, and return ``True``, or until it is time to kill the service, which dies."""
        ends = time.monotonic() + self._chance.uniform(2, 12)
        while not self._kills_service or time.monotonic() < ends:
            with contextlib.suppress(APIError):
                batch = client.batches.retrieve(batch_id)
                if batch.completed_at or batch.failed_at or batch.expired_at:
                    return True
            time.sleep(0.1)
        self.figures.faults["service killed"] += 1
        service.process.send_signal(signal.SIGKILL)
        return False

    def _count(self, client: OpenAI, batch_id: str) -> None:
        batch = client.batches.retrieve(batch_id)
        for file_id in (batch.output_file_id, batch.error_file_id):
            lines = [] if file_id is None else client.files.content(file_id).text.splitlines()
            for one in map(json.loads, lines):
                number = int(one["custom_id"])
                self.figures.results[number] += 1
                if file_id == batch.error_file_id:
                    answer: Any = one["response"]
                    self.figures.failed[number] = 0 if answer is None else answer["status_code"]

    # What is done to the Tritons

    def _execute(self, triton: OneTriton) -> None:
        """End *triton* whenever it gets a line that is to do that."""
        while not self._over.is_set():
            lines = {int(prompt.split()[1]) for prompt in triton.asked() if _POISON in prompt}
            if lines:
                self.figures.deaths.update(lines)
                triton.restart()
            with triton.busy:
                if triton.server.poll() is not None:
                    # It does now and then when calls are cancelled.
                    self.figures.faults["Triton ended by itself"] += 1
                    triton.restart()
            time.sleep(_POLL_SECONDS)

    def _disturb(self) -> None:
        """Do one thing to one Triton after the other."""
        kinds = list(self._faults)
        turn = 0
        while kinds and not self._over.wait(self._chance.uniform(1, 4)):
            kind = kinds[turn % len(kinds)]
            self._triton = self._tritons[turn % len(self._tritons)]
            self._faults[kind]()
            self.figures.faults[f"Triton: {kind}"] += 1
            turn += 1

    def _kill(self) -> None:
        self._triton.restart()

    def _freeze(self) -> None:
        with self._triton.busy, frozen(self._triton.server):
            self._over.wait(self._chance.uniform(1, 16))

    def _flap(self) -> None:
        """Have it without its model for a while."""
        # Unless it has just ended by itself.
        with self._triton.busy, contextlib.suppress(OSError):
            self._change("unload")
            self._over.wait(8)
            self._change("load")

    def _change(self, what: str) -> None:
        url = f"{self._triton.server.http_url}/v2/repository/models/{MODEL}/{what}"
        with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60) as response:
            response.read()


def verdicts(figures: Figures, lines: int, poison: set[int]) -> Mapping[str, Sequence[int]]:
    """Return what must not be, each with the numbers of the lines."""
    numbers = range(1, lines + 1)
    return {
        "lost": [number for number in numbers if not figures.results[number]],
        "there twice": [number for number in numbers if figures.results[number] > 1],
        "failed though they end nothing": [number for number in figures.failed if number not in poison],
        "answered though they end their Triton": [number for number in poison if number not in figures.failed],
    }


def render(figures: Figures, lines: int, poison: set[int]) -> str:
    """Return the figures as text."""
    faults = ", ".join(f"{name} {count}" for name, count in sorted(figures.faults.items())) or "none"
    each = ", ".join(f"line {number}: {figures.deaths[number]}" for number in sorted(poison)) or "none"
    report = [
        f"lines: {lines} in {figures.seconds:.0f} s, {len(poison)} of which end their Triton",
        f"faults: {faults}",
        f"succeeded: {len(figures.results) - len(figures.failed)}, failed: {len(figures.failed)}",
        f"Tritons ended by lines: {figures.deaths.total()} ({each})",
    ]
    for what, numbers in verdicts(figures, lines, poison).items():
        named = [f"{number} ({figures.failed.get(number, 'no error')})" for number in numbers]
        report.append(f"{what}: {', '.join(named) or 'none'}")
    return "\n".join(report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.batch_soak", description="A batch with faults.")
    parser.add_argument("--tritons", type=int, default=3)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--poison", type=int, default=3)
    parser.add_argument("--faults", default="kill,freeze,flap,service", help="those that happen, or none")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="triton-openai-batch-soak-")))
        tritons = [opened.enter_context(_started(folder / f"{number}")) for number in range(options.tritons)]
        flags = [part for one in tritons for part in ("--endpoint", f"{one.server.http_url}+{one.server.grpc_url}")]
        if len(tritons) == 1:
            flags = ["--triton-url", tritons[0].server.http_url]
        flags += ["--tokenizer", str(tritons[0].tokenizer)]
        soak = BatchSoak(
            folder,
            tritons,
            flags,
            lines=options.lines,
            poison=options.poison,
            kinds=options.faults.split(","),
            seed=options.seed,
        )
        figures = soak.run()
    print(render(figures, options.lines, soak.poison))
    for line in figures.complaints:
        print(line, file=sys.stderr)
    wrong = any(verdicts(figures, options.lines, soak.poison).values())
    # Where others end Tritons and the service, too, such a line may run more often.
    disturbed = figures.faults.total()
    wrong |= any(count > MAX_DEATHS + disturbed for count in figures.deaths.values())
    return 1 if wrong or figures.complaints else 0


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[OneTriton]:
    folder.mkdir()
    record = folder / "record.jsonl"
    repository = build_repository(folder, models=[MODEL], record=record)
    server = EmbeddedTriton(
        model_repository=repository.path,
        backends=repository.backends,
        environment=os.environ,
        model_control_mode="explicit",
        load_models=[MODEL],
    )
    server.start()
    try:
        yield OneTriton(server, Record(record), repository.tokenizer)
    finally:
        server.stop(timeout=1.0)


if __name__ == "__main__":
    sys.exit(main())
