"""
The table of metrics for Prometheus that are counted; ``gauges`` has those of a scrape.

``gen_ai_server_*`` are the model server metrics of OpenTelemetry's semantic conventions for generative AI, in
Prometheus's spelling and with the conventions' buckets. Metrics that the conventions do not name begin with
``triton_openai_``. The table in the documents is generated from this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client.utils import floatToGoString

#: Operation of a request that is no inference, or was refused before its operation was known.
OTHER = "other"
#: ``gen_ai.provider.name``; the conventions have no name for Triton, and allow others.
PROVIDER = "triton"

_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# The higher ones are those of vLLM's server.
_INTER_TOKEN_LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# The buckets of gen_ai.client.token.usage, up to the size of a context.
_TOKENS = tuple(4.0**power for power in range(11))
_QUEUE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREPARATION = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "adapter")
_MODEL = ("model", "adapter")
_OPERATION = ("operation", "model", "adapter")


class Instrument(msgspec.Struct, frozen=True, eq=False):
    """A metric for Prometheus; a counter's name is that of its samples, with ``_total``."""

    name: str
    labels: Sequence[str]
    help: str
    buckets: Sequence[float] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Its type."""
        if self.buckets:
            return "histogram"
        if self.name.endswith("_total"):
            return "counter"
        return "gauge"

    @property
    def bounds(self) -> Sequence[str]:
        """The upper bounds of its buckets as Prometheus writes them."""
        if self.buckets:
            return [*map(floatToGoString, self.buckets), "+Inf"]
        return []


def instruments_in(module: Mapping[str, object]) -> Sequence[Instrument]:
    """Return the instruments among the names of a *module*, in their order."""
    return [value for value in module.values() if isinstance(value, Instrument)]


REQUESTS = Instrument(
    "triton_openai_requests_total", (*_OPERATION, "status", "outcome"),
    "Requests that ended, by HTTP status and outcome: answered, invalid (the client's mistake), refused (no "
    "permission, or no capacity), failed (also after the status was sent), cancelled (the client left).",
)  # fmt: skip
ERRORS = Instrument(
    "triton_openai_errors_total", (*_OPERATION, "outcome", "code"),
    "Requests that ended with an error, by its code, including errors after the status was sent.",
)  # fmt: skip
RUNNING = Instrument("triton_openai_requests_running", _MODEL, "Running requests for a model, without queued ones.")
QUEUED = Instrument("triton_openai_requests_queued", _MODEL, "Requests for a model in this service's queue.")
TOKENS = Instrument(
    "triton_openai_tokens_total", (*_MODEL, "type"),
    "Tokens of prompts (input) and answers (output), where known. Tokens generated before an answer failed or its "
    "client left count if the backend counts with every step.",
)  # fmt: skip
FINISHED = Instrument(
    "triton_openai_answers_finished_total", (*_MODEL, "reason"),
    "Answers that ended, by finish reason; a request with n or several prompts has several answers.",
)  # fmt: skip
DURATION = Instrument(
    "gen_ai_server_request_duration_seconds", (*_GEN_AI, "error_type"),
    "From a request's head to the last byte of its answer. error_type is empty, an error's code, or 'cancelled'.",
    _DURATION,
)  # fmt: skip
FIRST_TOKEN = Instrument(
    "gen_ai_server_time_to_first_token_seconds", _GEN_AI,
    "From a request's head to the first token from Triton, queues included; not of answers that come whole.",
    _FIRST_TOKEN,
)  # fmt: skip
PER_TOKEN = Instrument(
    "gen_ai_server_time_per_output_token_seconds", _GEN_AI,
    "Mean time between an answer's tokens after the first; answers in one piece are not included.", _PER_TOKEN,
)  # fmt: skip
INTER_TOKEN_LATENCY = Instrument(
    "triton_openai_time_between_tokens_seconds", _MODEL,
    "Time between arrivals of an answer's text from Triton; tokens that arrive together are one arrival.",
    _INTER_TOKEN_LATENCY,
)  # fmt: skip
QUEUE = Instrument(
    "triton_openai_queue_seconds", _MODEL,
    "Time in this service's queue, 0 for requests that did not wait; Triton's queues are not included.", _QUEUE,
)  # fmt: skip
PREPARATION = Instrument(
    "triton_openai_preparation_seconds", _MODEL,
    "From a request's head until it was sent to Triton (reading, template, tokenizer), without the wait in the queue.",
    _PREPARATION,
)  # fmt: skip
INPUT_TOKENS = Instrument("triton_openai_input_tokens", _MODEL, "Tokens of a request's prompts.", _TOKENS)
OUTPUT_TOKENS = Instrument("triton_openai_output_tokens", _MODEL, "Tokens of a complete answer.", _TOKENS)
AUDIO_SECONDS = Instrument(
    "triton_openai_audio_seconds_total", (*_MODEL, "direction"),
    "Seconds of audio in requests (input) and in answers (output), as far as they were sent.",
)  # fmt: skip
TOOL_CALLS = Instrument(
    "triton_openai_tool_calls_total", (*_MODEL, "outcome", "repair"),
    "Calls of tools in answers, by outcome: strict (as the format has it), repaired (repair says what: brackets, "
    "commas, escapes, literals, name, notation, quotes, tags, types), unknown_tool, cut (its arguments are not whole), "
    "text (what began like a call and could not be read as one).",
)  # fmt: skip
UNKNOWN_FIELDS = Instrument(
    "triton_openai_unknown_fields_total", (*_MODEL, "field"),
    "Requests with an unknown field that was ignored, by its name; 'other' stands for names beyond the first hundred, "
    "and for names that are not identifiers.",
)  # fmt: skip
NOT_ANSWERING = Instrument(
    "triton_openai_model_not_answering", _MODEL,
    "Processes of this service that get no answer from a ready Triton model: neither to several clients' requests in a "
    "row, nor to the service's own small requests since.",
)  # fmt: skip
EVENT_LOOP_LAG = Instrument(
    "triton_openai_event_loop_lag_seconds", (),
    "Delay of the event loop's timers, measured ten times a second in each process.", _LAG,
)  # fmt: skip
WORKERS_REPLACED = Instrument(
    "triton_openai_workers_replaced_total", (),
    "Worker processes that died and were replaced. Their running requests are in no counter.",
)  # fmt: skip
LOG_LINES_LOST = Instrument(
    "triton_openai_log_lines_lost_total", (),
    "Log lines that could not be written: stderr failed, or was not read fast enough.",
)  # fmt: skip
KEY_TOKENS = Instrument(
    "triton_openai_key_tokens_total", ("key", "type"),
    "Tokens of prompts (input) and answers (output) by the name of the API key or of the gateway's tenant, batches "
    "included, where known. Beyond 100 names, 'other' stands for the rest.",
)  # fmt: skip
KEY_REFUSALS = Instrument(
    "triton_openai_key_refusals_total", ("key", "reason"),
    "Refused requests by key, as above, empty without one, and by reason: the limit of the key that was reached "
    "(requests, tokens, audio_seconds), else the error's code.",
)  # fmt: skip
TRACES_LOST = Instrument(
    "triton_openai_traces_lost_total", (),
    "Requests whose spans were lost: the collector did not take them, or too many waited.",
)  # fmt: skip

# The name of a Triton is the first label.
_ENDPOINT = ("endpoint", "model")
ENDPOINT_UP = Instrument(
    "triton_openai_endpoint_up", ("endpoint",), "Processes of this service to which one of several Tritons answers."
)
ENDPOINT_REQUESTS = Instrument(
    "triton_openai_endpoint_requests_total", (*_ENDPOINT, "outcome"),
    "Requests that one of several Tritons has got, by outcome: answered, failed, cancelled. One that was sent to two "
    "Tritons counts for both. 'other' stands for those beyond 64 at a time. The series of a Triton end when it leaves.",
)  # fmt: skip
ENDPOINT_RUNNING = Instrument(
    "triton_openai_endpoint_requests_running", _ENDPOINT, "Running requests of a model at one of several Tritons."
)
ENDPOINT_EJECTED = Instrument(
    "triton_openai_endpoint_ejected", _ENDPOINT,
    "Processes of this service that send no requests for a model to a Triton, because it failed several in a row.",
)  # fmt: skip
EJECTIONS = Instrument(
    "triton_openai_endpoint_ejections_total", (*_ENDPOINT, "reason"), "Ejections, by the code of the last failure."
)
ENDPOINT_PANIC = Instrument(
    "triton_openai_endpoint_panic", ("model",),
    "Processes of this service for which so many Tritons are ejected that requests go to all again.",
)  # fmt: skip
FAILOVERS = Instrument(
    "triton_openai_failovers_total", ("model", "reason"),
    "Requests that were sent to another Triton before their first token, by the code of the failure.",
)  # fmt: skip
RETRY_BUDGET_EXHAUSTED = Instrument(
    "triton_openai_retry_budget_exhausted_total", (),
    "Requests that could have gone to another Triton, and did not because too many had.",
)  # fmt: skip
LOOKUP_FAILURES = Instrument(
    "triton_openai_endpoint_lookup_failures_total", (),
    "Lookups of the name of Tritons that failed or found no address. The old addresses stay.",
)  # fmt: skip
LIMITS_STORE_UP = Instrument(
    "triton_openai_limits_store_up", (),
    "Processes of this service to which the Redis for rate limits answers; missing without one.",
)  # fmt: skip

BATCH_LINES = Instrument(
    "triton_openai_batch_lines_total", ("outcome",),
    "Lines of batches that have a result: succeeded, failed, or never_ran, because their batch was cancelled, has "
    "expired or failed.",
)  # fmt: skip
BATCHES_ENDED = Instrument(
    "triton_openai_batches_ended_total", ("status",),
    "Batches that ended, by status: completed, failed, expired, cancelled.",
)  # fmt: skip
BATCH_RUNNING = Instrument("triton_openai_batch_running", (), "Running lines of batches.")
BATCH_LIMIT = Instrument(
    "triton_openai_batch_limit", ("model",),
    "Lines that may run for a Triton model now, if live requests leave room. Missing before its first line.",
)  # fmt: skip
BATCHES_PAUSED = Instrument(
    "triton_openai_batches_paused", (),
    "Batches that wait because the disk is full or the database fails, at least 1 in each process where it does.",
)  # fmt: skip

BATCH_MODELS_AWAY = Instrument(
    "triton_openai_batch_models_away", (),
    "Models for which lines of batches wait because they are not served or do not answer.",
)  # fmt: skip
BATCH_QUARANTINED = Instrument(
    "triton_openai_batch_quarantined", (),
    "Lines of batches that wait to run alone because they ran when a process or Triton ended.",
)  # fmt: skip
#: All of the above.
INSTRUMENTS = instruments_in(vars())
