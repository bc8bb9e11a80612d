"""What the parent tells the load generator and what it gets back, each as one JSON object."""

from __future__ import annotations

from typing import Literal

import msgspec

from triton_openai.load.tally import Outcome, Plan

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


class Load(Plan, frozen=True, kw_only=True):
    """One measurement, of one subject."""

    target: Target
    model: str
    form: Form = "text"
    # Tokens of each answer.
    tokens: int
    # Where the model is told to end all streams when the window has closed. Without it they are dropped.
    control: Target | None = None
    # Processes whose CPU time and memory are read at both ends of the window.
    relay: tuple[int, ...] = ()
    triton: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()


class Measured(Outcome, kw_only=True):
    """What was seen: also CPU time in nanoseconds, and memory in bytes."""

    relay_cpu: int = 0
    triton_cpu: int = 0
    client_cpu: int = 0
    resident: int = 0
    peak: int = 0
