"""The objects that answer a completion: OpenAI's ``text_completion``, whole and in chunks (openai-openapi 2.3.0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from triton_openai.answer.fan_out import Collected
from triton_openai.answer.run import Run
from triton_openai.api.generate import Task
from triton_openai.api.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    joined,
    narrowed,
    prompt_logprobs,
)
from triton_openai.api.service import RequestContext
from triton_openai.api.sse import Chunks
from triton_openai.api.usage import UsageObject
from triton_openai.generation import Delta, FinishReason

_encode = msgspec.json.Encoder().encode


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """
    One answer, or a piece of it. The last four fields are vLLM's: ``stop_reason`` is there once the answer has ended,
    the others when they were asked for.
    """

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """
    The whole answer, or one event of a stream, as in OpenAI's API.

    ``usage`` is left out if the tokens are not known. In a stream it is there on request, and null except in the
    last event, which has no choices.
    """

    id: str
    object: Literal["text_completion"] = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET


class Echo(msgspec.Struct, frozen=True):
    """The prompt before an answer, with *count* alternatives to each token; ``None`` for no log probabilities."""

    count: int | None

    def logprobs(self, run: Run) -> CompletionLogprobs | None:
        """Return the log probabilities of the prompt's tokens, if they are wanted."""
        if self.count is None:
            return None
        return completion_logprobs(narrowed(run.prompt_logprobs, self.count), offset=0)[0]


def completion_choice(
    index: int,
    echo: Echo | None,
    answer: Collected,
    *,
    logprobs: bool,
    prompt_alternatives: int | None,
    token_ids: bool,
) -> CompletionChoice:
    """
    Return a choice of the whole answer, with *logprobs* and *token_ids* where they are wanted.

    *prompt_alternatives* is how many alternatives ``prompt_logprobs`` lists for each token; ``None`` leaves it out.
    """
    run = answer.run
    before = run.generation.shown_prompt if echo is not None else ""
    found = None
    if logprobs:
        found, _ = completion_logprobs(answer.logprobs, offset=len(before))
        echoed = echo.logprobs(run) if echo is not None else None
        found = found if echoed is None else joined(echoed, found)
    return CompletionChoice(
        text=before + answer.text,
        index=index,
        logprobs=found,
        finish_reason=run.progress.finish_reason,
        stop_reason=run.progress.stop_reason,
        prompt_logprobs=msgspec.UNSET
        if prompt_alternatives is None
        else prompt_logprobs(narrowed(run.prompt_logprobs, prompt_alternatives)),
        prompt_token_ids=(run.generation.prompt_ids or ()) if token_ids else msgspec.UNSET,
        token_ids=answer.token_ids if token_ids else msgspec.UNSET,
    )


class CompletionChunks(Chunks):
    """The chunks of one stream; each choice begins with *echo*."""

    def __init__(self, context: RequestContext[Any], task: Task, runs: Sequence[Run], echo: Echo | None) -> None:
        super().__init__("text_completion", context, task, runs)
        self._text = self._head + b'{"text":'
        self._echo = echo
        choices = range(len(runs))
        self._text_tails = [
            b',"index":%d,"logprobs":null,"finish_reason":null}' % choice + self._tail for choice in choices
        ]
        # Characters of each choice so far
        self._offsets = [len(run.generation.shown_prompt) if echo is not None else 0 for run in runs]

    def first(self, choice: int) -> bytes:
        """Return the prompt with ``echo``, and its ids; else nothing: a choice begins with its first text."""
        echo, run = self._echo, self._runs[choice]
        if echo is None and not self._ids:
            return b""
        text = "" if echo is None else run.generation.shown_prompt
        logprobs = None if echo is None else echo.logprobs(run)
        ids = b',"prompt_token_ids":%b,"token_ids":[]' % _encode(run.generation.prompt_ids) if self._ids else b""
        tail = b',"index":%d,"logprobs":%b,"finish_reason":null%b}' % (choice, _encode(logprobs), ids)
        return self._text + _encode(text) + tail + self._tail

    def piece(self, choice: int, delta: Delta) -> bytes:
        """Return the chunk of a piece of text."""
        if not delta.logprobs and not self._continuous and not self._ids:
            return self._text + _encode(delta.text) + self._text_tails[choice]
        logprobs = None
        if delta.logprobs:
            logprobs, self._offsets[choice] = completion_logprobs(delta.logprobs, offset=self._offsets[choice])
        ids = b',"token_ids":%b' % _encode(list(delta.token_ids)) if self._ids else b""
        tail = b',"index":%d,"logprobs":%b,"finish_reason":null%b}' % (choice, _encode(logprobs), ids)
        return self._text + _encode(delta.text) + tail + self._counted(choice)

    def last(self, choice: int) -> bytes:
        """Return the chunk with the finish reason."""
        progress = self._runs[choice].progress
        reasons = (_encode(progress.finish_reason), _encode(progress.stop_reason))
        end = b'"","index":%d,"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (choice, *reasons)
        return self._text + end + self._ended(choice)
