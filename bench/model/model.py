"""
A model for Triton's Python backend that sends tokens at a known pace and does nothing else.

One thread serves every stream, as an in-flight batcher does: each tick it sends one token to each active stream. With a
tick of zero it goes round as fast as it can. It never computes anything, so what is measured is the way of the tokens.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb  # type: ignore[import-not-found]  # exists inside Triton only

# Asking costs a round trip to the server, so a stream asks now and then, like the real backends.
_CANCEL_CHECK_SECONDS = 0.25


class TritonPythonModel:
    """The model: `execute` hands requests to the ticking thread and returns at once."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the pace from the config's parameters, make the constant tensors, start the thread."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._tick = float(parameters["tick_ms"]["string_value"]) / 1000
        opening, token, closing = (
            parameters[name]["string_value"].encode() for name in ("opening", "token", "closing")
        )
        # Made once and sent again and again: that takes half of the server's time off every token.
        self._answer = _Answer(_response(opening), _response(token), _response(closing, b"length"))
        self._arrived: list[_Stream] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Take in requests; they answer from the ticking thread."""
        arrived = [_Stream(request) for request in requests]
        with self._changed:
            self._arrived += arrived
            self._changed.notify()

    def finalize(self) -> None:
        """End the thread; streams that still run are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5)

    def _run(self) -> None:
        active: list[_Stream] = []
        due = time.monotonic()
        while True:
            with self._changed:
                if not active:
                    self._changed.wait_for(lambda: self._arrived or self._closed)
                    # An idle batcher starts at once; a busy one takes newcomers along at its next step.
                    due = max(due, time.monotonic())
                elif self._tick:
                    self._changed.wait_for(lambda: self._closed, due - time.monotonic())
                if self._closed:
                    return
                active += self._arrived
                self._arrived = []
            if any(stream.ends_all for stream in active):
                for stream in active:
                    stream.end_next()
            active = [stream for stream in active if stream.send(self._answer)]
            # A tick that took too long delays the following ones, as in an engine; nothing is made up for.
            due = max(due + self._tick, time.monotonic())


class _Answer(NamedTuple):
    """The responses that an answer is made of: one that opens it, any number of tokens, one that closes it."""

    opening: Any
    token: Any
    closing: Any


class _Stream:
    """One request."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        sampling = pb.get_input_tensor_by_name(request, "sampling_parameters")
        if sampling is None:
            values = {}
        else:
            values = json.loads(sampling.as_numpy()[0])
        self._left = int(values.get("max_tokens", 16))
        self._begun = False
        self._next_check = time.monotonic() + _CANCEL_CHECK_SECONDS

    @property
    def ends_all(self) -> bool:
        """Whether this is no request for tokens but the order to end every stream (a limit of zero tokens)."""
        return self._left == 0

    def end_next(self) -> None:
        """Make the next token the last one."""
        self._left = 1

    def send(self, answer: _Answer) -> bool:
        """Send one token; return whether more are to follow."""
        try:
            return self._step(answer)
        except Exception:  # noqa: BLE001 - whatever it was, the other streams go on; the server's log has it
            traceback.print_exc()
            return False

    def _step(self, answer: _Answer) -> bool:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _CANCEL_CHECK_SECONDS
            if self._sender.is_cancelled():
                self._sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return False
        self._left -= 1
        if self._left > 0:
            self._sender.send(answer.token if self._begun else answer.opening)
            self._begun = True
            return True
        self._sender.send(answer.closing, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return False


def _response(token: bytes, finish: bytes = b"None") -> Any:
    return pb.InferenceResponse(
        [
            pb.Tensor("text_output", np.array([token], dtype=np.object_)),
            pb.Tensor("finish_reason", np.array([finish], dtype=np.object_)),
            pb.Tensor("num_input_tokens", np.array([7], dtype=np.uint32)),
            pb.Tensor("num_output_tokens", np.array([1], dtype=np.uint32)),
        ]
    )
