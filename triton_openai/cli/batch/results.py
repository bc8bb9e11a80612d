"""Lines of results: those of batches as they are, and those of live requests in the same form."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import msgspec

from triton_openai.cli.batch.answers import RunFiles
from triton_openai.cli.batch.client import error_of
from triton_openai.cli.batch.progress import Counts, Progress
from triton_openai.json_bytes import escape_line_breaks


class _Usage(msgspec.Struct):
    """The tokens of an answer, by the names of both of OpenAI's APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    status_code: int = 0
    body: msgspec.Raw = msgspec.Raw()


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _FailedLine(msgspec.Struct):
    response: _Response | None = None
    error: _Error | None = None


_line = msgspec.json.Decoder(_Line).decode


class Result(NamedTuple):
    """A line of a file of results."""

    custom_id: str
    succeeded: bool
    data: bytes
    input_tokens: int = 0
    output_tokens: int = 0


def read_result(data: bytes) -> Result:
    """Return the result in a line of a batch's files. Raises :class:`msgspec.MsgspecError` for what is none."""
    line = _line(data)
    response = line.response
    if response is None or not 200 <= response.status_code < 300:
        return Result(line.custom_id, False, data)
    read, written = tokens_of(bytes(response.body))
    return Result(line.custom_id, True, data, read, written)


def reason_of(data: bytes) -> str:
    """Return why the line of a file of results has failed: the message of its error, or of the answer's."""
    try:
        line = msgspec.json.decode(data, type=_FailedLine)
    except msgspec.MsgspecError:
        return ""
    if line.error is not None:
        return line.error.message
    message = ""
    if line.response is not None:
        message, _ = error_of(bytes(line.response.body))
        message = f"HTTP {line.response.status_code}: {message}"
    return message


def tokens_of(body: bytes) -> tuple[int, int]:
    """Return the tokens that went in and came out, as the JSON *body* of an answer counts them; 0 if it does not."""
    try:
        usage = msgspec.json.decode(body, type=_Body).usage
    except msgspec.MsgspecError:
        return 0, 0
    if usage is None:
        return 0, 0
    return usage.prompt_tokens or usage.input_tokens, usage.completion_tokens or usage.output_tokens


def result_line(
    custom_id: str, *, status: int = 0, request_id: str = "", body: bytes = b"", error: tuple[str, str] | None = None
) -> bytes:
    """
    Return the line with an answer, in the form of OpenAI's batches; *error* has code and message of a line without.

    Raises :class:`msgspec.MsgspecError` for a *body* that is no JSON.
    """
    response: dict[str, Any] | None = None
    if status:
        # One line, whatever the service has sent.
        answer = msgspec.Raw(msgspec.json.format(body, indent=-1))
        response = {"status_code": status, "request_id": request_id, "body": answer}
    failure = None
    if error is not None:
        failure = {"code": error[0], "message": error[1]}
    line = {"id": f"live_req_{os.urandom(16).hex()}", "custom_id": custom_id, "response": response, "error": failure}
    return escape_line_breaks(msgspec.json.encode(line)) + b"\n"


class RunCounts:
    """What a run has done, with its files and what shows it."""

    def __init__(self, files: RunFiles, total: int, progress: Progress) -> None:
        self._files = files
        self._progress = progress
        self.total = total
        #: What batches have done whose results are not in the files yet.
        self.remote = Counts()
        # The tokens of the lines that this run has written into the files.
        self._tokens = (0, 0)

    @property
    def current(self) -> Counts:
        """What has been done so far."""
        failed = len(self._files.errors.ids)
        return Counts(
            done=len(self._files.answers.ids) + failed + self.remote.done,
            failed=failed + self.remote.failed,
            input_tokens=self._tokens[0] + self.remote.input_tokens,
            output_tokens=self._tokens[1] + self.remote.output_tokens,
        )

    def add(self, result: Result) -> None:
        """Write *result* into the file that it belongs to, unless it is there."""
        if self._files.has_result(result.custom_id):
            return
        if result.succeeded:
            self._files.answers.add(result.custom_id, result.data)
        else:
            self._files.errors.add(result.custom_id, result.data)
        read, written = self._tokens
        self._tokens = (read + result.input_tokens, written + result.output_tokens)

    def show(self) -> None:
        """Show the progress."""
        self._progress.update(self.current)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._progress.note(text)
