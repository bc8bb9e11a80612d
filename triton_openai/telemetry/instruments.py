"""
Every metric that is counted here: its name, what it means, and its labels. The documents' table is made from it.

``gen_ai_server_*`` are the model server metrics of OpenTelemetry's conventions for generative AI (semantic conventions,
"Generative AI model server metrics"), named as OpenTelemetry names metrics for Prometheus, with the buckets that the
conventions ask for; what those have no name for is ours and begins with ``triton_openai_``. Their ``gen_ai.client.*``
are for who calls a model, not for who serves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from triton_openai.telemetry.gaps import BOUNDS

#: What the conventions call whoever serves the model; they have no word for Triton, and allow another one.
PROVIDER = "triton"

_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Those of gen_ai.client.token.usage, up to what a context holds.
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)
_QUEUE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREPARATION = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "adapter")
_SERVED = ("model", "adapter")
_ASKED = ("operation", "model", "adapter")


class Instrument(msgspec.Struct, frozen=True):
    """A metric as Prometheus sees it; a counter's name is that of its samples, with ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Sequence[str] = ()
    buckets: Sequence[float] = ()


REQUESTS = Instrument(
    "triton_openai_requests_total",
    "counter",
    "Requests that have ended, by HTTP status and by outcome: answered, invalid (the client's mistake), refused (no "
    "right to it, or no room for it), failed (also after the status had left), cancelled (the client left).",
    (*_ASKED, "status", "outcome"),
)
ERRORS = Instrument(
    "triton_openai_errors_total",
    "counter",
    "Requests that have ended with an error, by its code, also those whose status had left.",
    (*_ASKED, "outcome", "code"),
)
RUNNING = Instrument(
    "triton_openai_requests_running", "gauge", "Requests for a model that are being answered, without queued ones.",
    _SERVED,
)  # fmt: skip
QUEUED = Instrument(
    "triton_openai_requests_queued", "gauge", "Requests for a model that wait here for others to end.", _SERVED
)
TOKENS = Instrument(
    "triton_openai_tokens_total",
    "counter",
    "Tokens of prompts (input) and of answers (output), as far as they are known; what was generated before an answer "
    "failed or its client left counts where the backend counts with every step.",
    (*_SERVED, "type"),
)
FINISHED = Instrument(
    "triton_openai_answers_finished_total",
    "counter",
    "Answers that have ended, by the reason that the backend gave; a request has several with n or several prompts.",
    (*_SERVED, "reason"),
)
DURATION = Instrument(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "From a request's head to the last byte of its answer. error_type is empty, an error's code, or 'cancelled'.",
    (*_GEN_AI, "error_type"),
    _DURATION,
)
FIRST_TOKEN = Instrument(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "From a request's head to the first token that Triton sent, queues included; of every request that got one.",
    _GEN_AI,
    _FIRST_TOKEN,
)
PER_TOKEN = Instrument(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "Mean time between the tokens of an answer after its first; answers that came in one piece have none.",
    _GEN_AI,
    _PER_TOKEN,
)
GAPS = Instrument(
    "triton_openai_time_between_tokens_seconds",
    "histogram",
    "Between one arrival of an answer's text from Triton and the next; tokens that came together are one arrival.",
    _SERVED,
    BOUNDS,
)
QUEUE = Instrument(
    "triton_openai_queue_seconds",
    "histogram",
    "How long requests waited here for others to end; 0 for those that did not. Triton's queues are not in it.",
    _SERVED,
    _QUEUE,
)
PREPARATION = Instrument(
    "triton_openai_preparation_seconds",
    "histogram",
    "From a request's head until it was sent to Triton (reading, template, tokenizer), without the wait in the queue.",
    _SERVED,
    _PREPARATION,
)
INPUT_TOKENS = Instrument("triton_openai_input_tokens", "histogram", "Tokens of a request's prompts.", _SERVED, _TOKENS)
OUTPUT_TOKENS = Instrument(
    "triton_openai_output_tokens", "histogram", "Tokens of an answer that ended by itself.", _SERVED, _TOKENS
)
RELAYED = Instrument(
    "triton_openai_relayed_requests_total",
    "counter",
    "Requests and calls of Triton's own protocol that have ended (--enable-kserve-frontends), by protocol, by Triton's "
    "group of what they asked for, and by HTTP status or gRPC's name of it; 'cancelled' when the client left.",
    ("protocol", "group", "status"),
)
RELAYING = Instrument(
    "triton_openai_relayed_requests_running", "gauge", "Requests and calls of Triton's own protocol, and open streams.",
    ("protocol",),
)  # fmt: skip
LOOP_LAG = Instrument(
    "triton_openai_event_loop_lag_seconds",
    "histogram",
    "How late the event loop's timers come, measured ten times a second in each process.",
    (),
    _LAG,
)
WORKERS_REPLACED = Instrument(
    "triton_openai_workers_replaced_total",
    "counter",
    "Processes of several workers that have died and were replaced. Requests that one had running are in no counter.",
)

INSTRUMENTS = (
    REQUESTS, ERRORS, RUNNING, QUEUED, TOKENS, FINISHED, DURATION, FIRST_TOKEN, PER_TOKEN, GAPS, QUEUE, PREPARATION,
    INPUT_TOKENS, OUTPUT_TOKENS, RELAYED, RELAYING, LOOP_LAG, WORKERS_REPLACED,
)  # fmt: skip
