"""What the models over TensorRT-LLM share: a batcher advances their requests, and they are stopped by their id."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb

from .engine import EngineFailure
from .generation import Generation, Step
from .scripted import engine_for
from .settings import Settings
from .tensors import Recorder, scalar
from .text import Vocabulary

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class InflightModel:
    """Passes requests to the batcher, and stops them by their id. A subclass sets `job`, and calls `start`."""

    #: What requests are to the batcher: a subclass of `InflightRequest`.
    job: Any
    no_id = "A request id must be provided for request cancellation"

    def start(self, settings: Settings, tokenizer: str, check_seconds: float) -> None:
        """Open the record, read the tokenizer and start the batcher."""
        self.settings = settings
        self.check_seconds = check_seconds
        self.vocabulary = Vocabulary(tokenizer)
        self.recorder = Recorder(settings.record, settings.name)
        self.engine = engine_for(settings, self.vocabulary)
        self._batcher = self.engine.batcher()
        self._running: dict[str, InflightRequest] = {}
        self._lock = threading.Lock()

    def execute(self, requests: list[Any]) -> None:
        """Start every request; the batcher sends the answers."""
        for request in requests:
            sender = request.get_response_sender()
            self.recorder.request(request)
            try:
                if scalar(request, "stop", False):
                    self._stop(request.request_id())
                    self.answer_stop(sender)
                    continue
                job = self.job(self, request, sender)
            except Exception as error:  # noqa: BLE001 - the originals return the text of every error
                self.refuse(request.request_id(), sender, error)
                self.recorder.ended("failed", request.request_id(), 0)
                continue
            with self._lock:
                if job.id:
                    self._running[job.id] = job
            self._batcher.submit(job, job.first_delay())

    def finalize(self) -> None:
        """Stop the batcher."""
        self._batcher.close()

    def refuse(self, request_id: str, sender: Any, error: Exception) -> None:
        """Answer a request that cannot be started: with the error's text."""
        sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))), flags=FINAL)

    def answer_stop(self, sender: Any) -> None:
        """Answer a stop request: without data."""
        if self.settings.decoupled:
            sender.send(flags=FINAL)
        else:
            # Such a model must not send the flag alone.
            sender.send(pb.InferenceResponse([]), flags=FINAL)

    def forget(self, request: InflightRequest) -> None:
        """Remove a request that has ended."""
        with self._lock:
            if self._running.get(request.id) is request:
                del self._running[request.id]

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise ValueError(self.no_id)
        with self._lock:
            job = self._running.get(request_id)
        if job is not None:
            job.stopped = True
            self._batcher.hasten(job)


@dataclass
class Sequence:
    """One sequence of a request: a row of its batch and an index among those asked for."""

    generation: Generation
    prompt: list[int]
    reused_blocks: int
    row: int = 0
    index: int = 0


class InflightRequest(ABC):
    """A running request; the batcher calls `advance`. A subclass makes the sequences, and has `response`."""

    #: Begins the text of an error of the engine.
    failed = ""

    def __init__(self, model: Any, request: Any, sender: Any, sequences: list[Sequence], *, stream: bool) -> None:
        self.id: str = request.request_id()
        self.stopped = False
        self.model = model
        self.sender = sender
        self.stream = stream
        self.live = list(sequences)
        self._all = sequences
        self._turn = 0
        self._due = 0.0
        self._next_check = 0.0

    def first_delay(self) -> float:
        """Return the seconds until the first call of `advance`."""
        now = time.monotonic()
        self._due = now + self.live[0].generation.delay()
        self._next_check = now + self.model.check_seconds
        return self._pause(now)

    def advance(self) -> float | None:
        """Take one step of one sequence if it is due, and check for a cancellation."""
        if self.stopped:
            return self._end("stopped")
        now = time.monotonic()
        if now >= self._next_check:
            if self.sender.is_cancelled():
                return self._end("cancelled")
            self._next_check = now + self.model.check_seconds
        if now < self._due:
            return self._pause(now)
        return self._step(now)

    def _pause(self, now: float) -> float:
        return max(0.0, min(self._due, self._next_check) - now)

    def _step(self, now: float) -> float | None:
        sequence = self.live[self._turn % len(self.live)]
        try:
            step = sequence.generation.step()
        except EngineFailure as failure:
            self.sender.send(pb.InferenceResponse(error=pb.TritonError(f"{self.failed}{failure}")), flags=FINAL)
            return self._ended("failed")
        self._turn += 1
        if step.empty:
            return 0.0
        if step.finish is not None:
            self.live.remove(sequence)
        last = not self.live
        if self.stream or step.finish is not None:
            self.sender.send(self.response(sequence, step, last=last), flags=FINAL if last else 0)
        if last:
            return self._ended("finished")
        following = self.live[self._turn % len(self.live)]
        # Counts from when it was due, so that a busy machine does not slow down the pace.
        self._due = max(self._due, now - 1.0) + following.generation.delay() / len(self.live)
        return self._pause(time.monotonic())

    def _end(self, event: str) -> None:
        self.interrupt(event)
        self._ended(event)

    def _ended(self, event: str) -> None:
        for sequence in self._all:
            sequence.generation.close()
        self.model.forget(self)
        self.model.recorder.ended(event, self.id, sum(len(s.generation.ids) for s in self._all))

    @abstractmethod
    def response(self, sequence: Sequence, step: Step, *, last: bool) -> Any:
        """Return the response for a *step* of *sequence*; *last* is whether it is the request's last."""

    def interrupt(self, event: str) -> None:
        """Answer a request that was "stopped" or "cancelled": with an error."""
        error = pb.TritonError("The request was cancelled.", pb.TritonError.CANCELLED)
        self.sender.send(pb.InferenceResponse(error=error), flags=FINAL)
