"""What the parent tells the load generator and what it gets back, each as one JSON object."""

from __future__ import annotations

from typing import Literal

import msgspec

Protocol = Literal["generate", "chat", "grpc"]
#: What is asked for: a stream of text, of a tool call, of several answers, a whole chat, an embedding;
#: or the text as the stream of another API, asked for in a word or as agents do, with long instructions and many tools.
Form = Literal[
    "text", "tools", "choices", "whole", "embeddings", "responses", "messages", "agent-responses", "agent-messages"
]
#: Answers of a request of the form ``choices``.
CHOICES = 4


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go: Triton's generate_stream (or a relay of it), OpenAI's chat, or Triton's gRPC stream."""

    protocol: Protocol
    host: str
    port: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. The window opens when every stream has its first token and *warm* seconds have passed."""

    target: Target
    model: str
    streams: int
    form: Form = "text"
    # Tokens of each answer. A stream that has its answer asks again, until the measurement ends.
    tokens: int
    # Seconds over which the streams start.
    ramp: float = 0.0
    warm: float = 0.0
    seconds: float = 0.0
    # Not a window of time, but this many answers in all, counted and timed from the first request on.
    answers: int | None = None
    # Whether first tokens count inside the window only.
    settled: bool = False
    # Where the model is told to end all streams when the window has closed. Without it they are dropped.
    control: Target | None = None
    # Processes whose CPU time and memory are read at both ends of the window.
    relay: tuple[int, ...] = ()
    triton: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()


class Outcome(msgspec.Struct, kw_only=True):
    """What was seen: times in seconds, CPU time in nanoseconds, memory in bytes."""

    seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    # From the beginning of a request (of its connection, for the first of a stream) to its first token.
    first: list[float] = []
    # Between the tokens of one stream, in microseconds.
    gaps: list[int] = []
    relay_cpu: int = 0
    triton_cpu: int = 0
    client_cpu: int = 0
    resident: int = 0
    peak: int = 0
    errors: list[str] = []
