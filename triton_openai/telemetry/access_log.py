"""One log line per request, and a second one with its content for operators who want to see that."""

from __future__ import annotations

from typing import Any

from triton_openai.errors import ModelNotFound
from triton_openai.telemetry.content import input_messages, output_messages
from triton_openai.telemetry.logging import get_logger
from triton_openai.telemetry.observation import Observation, Observer

_log = get_logger("triton_openai.access")
# A name of its own, so that these lines can be sent elsewhere.
_content_log = get_logger("triton_openai.content")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class AccessLog(Observer):
    """
    Writes the line when the request has ended: "info" for what asks for work and for what is refused, "debug" for the
    rest, which is mostly health checks.
    """

    def ended(self, observation: Observation) -> None:
        """Write the line."""
        error = observation.error
        fields: dict[str, Any] = {"request_id": observation.request_id}
        if observation.method:
            fields |= {"method": observation.method, "path": observation.path}
        fields |= {"status": observation.status, "seconds": round(observation.duration, 4)}
        if observation.key is not None:
            fields["key"] = observation.key
        if error is not None:
            fields["error"] = error.code
        if observation.client_left:
            fields["client_left"] = True
        if observation.operation is None:
            if isinstance(error, ModelNotFound):
                fields["model"] = error.name
            told = error is not None or observation.client_left or observation.method not in _READS
            (_log.info if told else _log.debug)("request", **fields)
            return
        fields |= {"model": observation.model, "adapter": observation.adapter, "stream": observation.stream}
        if observation.response_id is not None:
            # What the ids of its requests to Triton begin with.
            fields["response_id"] = observation.response_id
        usage = observation.usage
        if usage is not None:
            fields |= {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        first = observation.time_to_first_token
        if first is not None:
            fields["first_token_seconds"] = round(first, 4)
        if observation.queued_seconds:
            fields["queued_seconds"] = round(observation.queued_seconds, 4)
        if observation.finish_reasons:
            fields["finish_reason"] = ",".join(dict.fromkeys(observation.finish_reasons))
        _log.info("request", **fields)


class ContentLog(Observer):
    """
    Writes what a request asked and what it was answered, each text cut to *longest* characters.

    Only of requests whose body could be read, and for whose model there is somebody to answer.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def ended(self, observation: Observation) -> None:
        """Write the line."""
        if observation.operation is None:
            return
        _content_log.info(
            "content",
            request_id=observation.request_id,
            model=observation.model,
            input_messages=input_messages(observation.parameters, self._longest),
            output_messages=output_messages(observation.answers, self._longest),
        )
