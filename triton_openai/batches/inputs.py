"""The requests of a batch: read line by line from its file, and checked before any of them runs."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from io import BufferedReader, FileIO
from typing import NamedTuple

import msgspec

from triton_openai.errors import InvalidRequest
from triton_openai.storage.batch_records import Batch, BatchError, Line

#: Errors of an input that are reported.
MAX_ERRORS = 100
#: Longest ``custom_id``.
MAX_ID_LENGTH = 512
# No model has such a name, and many lines would hold much memory.
_MAX_MODEL_LENGTH = 1024
# Lines with wrong parameters that are rejected in validation, and the characters of their errors, which may repeat what
# the client has sent. Further lines fail when they run.
_MAX_REJECTED = 1000
_MAX_REJECTED_SIZE = 1024 * 1024
_Decoder = getincrementaldecoder("utf-8")
_PIECE = 256 * 1024
_BOM = b"\xef\xbb\xbf"
# Lines whose prompts begin with the same bytes run together, so that they stay in the engine's cache.
_PREFIX = 1024
_EMPTY = msgspec.Raw()


class _Body(msgspec.Struct):
    """The parameters that decide whether and when a request runs."""

    model: str = ""
    stream: bool | None = None
    background: bool | None = None
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    chat_template: msgspec.Raw = _EMPTY


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: _Body


class _Named(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


class RejectedLine(NamedTuple):
    """A line whose parameters have wrong types, and the error that is its result."""

    line: Line
    custom_id: str
    error: InvalidRequest


_decode = msgspec.json.Decoder(_Request).decode
_decode_named = msgspec.json.Decoder(_Named).decode


class InputReader:
    """
    Reads the lines of a file for *batch*, of *max_line_size* bytes at most each.

    It collects two kinds of errors. Problems are errors of the input, such as lines that are no requests: the batch
    fails. A line whose parameters have wrong types is rejected: only this line fails, as at OpenAI.

    *check_line* raises :class:`InvalidRequest` for a line that exceeds the limits of a request's JSON. Such a line is
    not decoded, because that would take long and hold the interpreter. *check_body* raises it for parameters of wrong
    types. *max_inputs* is the limit of the items of ``input`` of all lines, and *count_tokens* counts those of a body.
    The *descriptor* of the file stays open.
    """

    def __init__(
        self,
        descriptor: int,
        batch: Batch,
        *,
        max_requests: int,
        max_line_size: int,
        check_line: Callable[[bytes], None],
        check_body: Callable[[bytes], None],
        max_inputs: int | None = None,
        count_tokens: Callable[[bytes], int] = len,
    ) -> None:
        self._file = BufferedReader(FileIO(descriptor, closefd=False))
        self._file.seek(0)
        self._batch = batch
        self._max_requests = max_requests
        self._max_line_size = max_line_size
        self._check_line = check_line
        self._check_body = check_body
        self._max_inputs = max_inputs
        self._inputs = 0
        self._count_tokens = count_tokens
        #: About how many input tokens the lines have, by the models that they name.
        self.tokens: Counter[str] = Counter()
        self._seen: set[bytes] = set()
        self._number = 0
        # Reading them takes time, too.
        self._blank = 0
        #: Errors of the input, in the order of the lines.
        self.problems: list[BatchError] = []
        self.rejected: list[RejectedLine] = []
        self._rejected_size = 0
        #: The number of requests.
        self.total = 0
        #: By model and whether lines bring a chat template of their own: the first such line.
        self.asked: dict[tuple[str, bool], int] = {}

    def close(self) -> None:
        """Stop reading."""
        self._file.close()

    def report(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        """Add a problem."""
        if len(self.problems) < MAX_ERRORS:
            self.problems.append(BatchError(code=code, message=message, param=param, line=line))

    def read(self, count: int) -> Sequence[Line]:
        """Return up to *count* lines with requests; none at the end of the input, or after too many problems."""
        lines: list[Line] = []
        while len(lines) < count and len(self.problems) < MAX_ERRORS:
            offset = self._file.tell()
            data = self._file.readline(self._max_line_size + 1)
            if not data:
                break
            self._number += 1
            if len(data) > self._max_line_size:
                self._skip_line(data)
                continue
            if self._number == 1 and data.startswith(_BOM):
                data = data[len(_BOM) :]
                offset = len(_BOM)
            try:
                # First: no other check takes as little time for a line of any length.
                self._check_line(data)
            except InvalidRequest as error:
                self.total += 1
                self.report(error.code, error.message, line=self._number)
                continue
            if not data or data.isspace():
                self._blank += 1
                if self._blank > self._max_requests:
                    message = f"The input file can have {self._max_requests} blank lines at most."
                    self.report("too_many_blank_lines", message, line=self._number)
                    break
                continue
            self.total += 1
            if self.total > self._max_requests:
                message = f"A batch can have {self._max_requests} requests at most."
                self.report("too_many_requests", message, line=self._number)
                break
            request = self._request(data)
            if request is not None and not self._has_room(request):
                break
            if request is not None:
                lines.append(self._line(request, offset, data))
        if not lines and not self.total and not self.problems:
            self.report("empty_file", "The input file has no requests.")
        return lines

    def _has_room(self, request: _Request) -> bool:
        """Count the inputs of a line; return ``False`` and report that there are too many."""
        if self._max_inputs is None:
            return True
        reported = self._inputs > self._max_inputs
        self._inputs += _number_of_inputs(request.body.input)
        if self._inputs <= self._max_inputs:
            return True
        if reported:
            return False
        message = f"The requests of a batch can have {self._max_inputs} embedding inputs together."
        self.report("too_many_embedding_inputs", message, "body.input", self._number)
        return False

    def _skip_line(self, data: bytes) -> None:
        message = f"The line has more than {self._max_line_size} bytes."
        self.report("line_too_long", message, line=self._number)
        while data and not data.endswith(b"\n"):
            data = self._file.readline(self._max_line_size)

    def _line(self, request: _Request, offset: int, data: bytes) -> Line:
        """Return the line of *request*, whose *data* begins at *offset*. Reject it if its parameters are wrong."""
        body = request.body
        brings_template = bytes(memoryview(body.chat_template)[:4]) not in (b"", b"null")
        self.asked.setdefault((body.model, brings_template), self._number)
        texts = next((text for text in (body.messages, body.prompt, body.input) if memoryview(text)), b"")
        beginning = body.model.encode(errors="replace") + b"\0" + bytes(memoryview(texts)[:_PREFIX])
        prefix = int.from_bytes(blake2b(beginning, digest_size=7).digest())
        line = Line(self._number, offset, len(data), body.model, prefix)
        content = bytes(_decode_named(data).body)
        self.tokens[body.model] += self._count_tokens(content)
        if len(self.rejected) < _MAX_REJECTED:
            try:
                self._check_body(content)
            except InvalidRequest as error:
                self._reject(line, request.custom_id, error)
        return line

    def _reject(self, line: Line, custom_id: str, error: InvalidRequest) -> None:
        size = len(error.message) + len(custom_id)
        if self._rejected_size + size <= _MAX_REJECTED_SIZE:
            self._rejected_size += size
            self.rejected.append(RejectedLine(line, custom_id, error))

    def _request(self, data: bytes) -> _Request | None:
        """Return the request in *data*, or report why it is none."""
        try:
            # Fields that are not decoded could have any bytes. In pieces: a decoded text may be four times as large.
            utf8 = _Decoder()
            for start in range(0, len(data), _PIECE):
                utf8.decode(data[start : start + _PIECE])
            utf8.decode(b"", True)
            request = _decode(data)
        except UnicodeDecodeError:
            self.report("invalid_json_line", "The line is not UTF-8.", line=self._number)
            return None
        except msgspec.ValidationError as error:
            self._report_type(str(error))
            return None
        except (msgspec.DecodeError, RecursionError) as error:
            self.report("invalid_json_line", f"The line is not valid JSON: {error}.", line=self._number)
            return None
        if self._is_accepted(request):
            return request
        return None

    def _report_type(self, message: str) -> None:
        """Report a field that is missing or has a wrong type; *message* is that of the decoder."""
        if message.startswith("Object missing required field"):
            code = "missing_required_parameter"
            field = message.split("`")[1]
        elif "$." in message:
            code = "invalid_type"
            field = message.rpartition("$.")[2].rstrip("`")
        else:
            self.report("invalid_json_line", f"{message}.", line=self._number)
            return
        self.report(code, f"{message}.", field, self._number)

    def _is_accepted(self, request: _Request) -> bool:
        """Return whether a line of the batch may be *request*, or report why not."""
        custom_id = request.custom_id
        digest = blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
        seen = digest in self._seen
        self._seen.add(digest)
        body = request.body
        text = f"have 1 to {MAX_ID_LENGTH} characters"
        checks = (
            (not 1 <= len(custom_id) <= MAX_ID_LENGTH, "invalid_custom_id", "custom_id", text),
            (seen, "duplicate_custom_id", "custom_id", "differ from that of every earlier line"),
            (request.method != "POST", "invalid_method", "method", "be POST"),
            (request.url != self._batch.endpoint, "invalid_url", "url", f"be {self._batch.endpoint}"),
            (len(body.model) > _MAX_MODEL_LENGTH, "model_not_found", "body.model", "be the name of a model"),
            (bool(body.stream), "stream_not_supported", "body.stream", "not be true in a batch"),
            (bool(body.background), "background_not_supported", "body.background", "not be true in a batch"),
        )
        for wrong, code, param, requirement in checks:
            if wrong:
                self.report(code, f"'{param}' must {requirement}.", param, self._number)
                return False
        return True


def _number_of_inputs(value: msgspec.Raw) -> int:
    """Return how many texts or lists of token ids the ``input`` of a request has."""
    if bytes(memoryview(value)[:1]) != b"[":
        return 1
    items = msgspec.json.decode(value, type=list[msgspec.Raw])
    if items and bytes(memoryview(items[0])[:1]) in (b'"', b"["):
        return len(items)
    # The token ids of one input.
    return 1


def id_and_body(line: bytes) -> tuple[str, bytes]:
    """Return the ``custom_id`` and the body of a *line* that was checked."""
    named = _decode_named(line)
    return named.custom_id, bytes(named.body)
