"""The requests of a batch: read line by line from its file, and checked before any of them runs."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from hashlib import blake2b
from io import BufferedReader, FileIO

import msgspec

from triton_openai.errors import InvalidRequest
from triton_openai.storage.batch_store import Batch, BatchError, Line

#: Errors of an input that are reported.
MOST_ERRORS = 100
#: Longest ``custom_id``.
LONGEST_ID = 512
# No model has such a name, and many lines would hold much memory.
_LONGEST_MODEL = 1024
_Decoder = getincrementaldecoder("utf-8")
_PIECE = 256 * 1024
_BOM = b"\xef\xbb\xbf"
# Lines whose prompts begin with the same bytes run together, so that they stay in the engine's cache.
_PREFIX = 1024
_NOTHING = msgspec.Raw()


class _Body(msgspec.Struct):
    """What is looked at before a request runs."""

    model: str = ""
    stream: bool | None = None
    background: bool | None = None
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    chat_template: msgspec.Raw = _NOTHING


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: _Body


class _Named(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


_decode = msgspec.json.Decoder(_Request).decode
_decode_named = msgspec.json.Decoder(_Named).decode


class InputReader:
    """
    Reads the lines of a file for *batch*, of *longest* bytes at most each, and collects what is wrong with them.

    *check* raises :class:`InvalidRequest` for a line that exceeds the limits of a request's JSON: it is not decoded,
    since that would take long, and hold the interpreter meanwhile. The *descriptor* of the file stays open.
    """

    def __init__(
        self, descriptor: int, batch: Batch, *, most: int, longest: int, check: Callable[[bytes], None]
    ) -> None:
        self._file = BufferedReader(FileIO(descriptor, closefd=False))
        self._file.seek(0)
        self._batch = batch
        self._most = most
        self._longest = longest
        self._check = check
        self._seen: set[bytes] = set()
        self._number = 0
        #: What is wrong, in the order of the lines.
        self.problems: list[BatchError] = []
        #: Requests.
        self.total = 0
        #: Each model, and the first line that names it.
        self.models: dict[str, int] = {}
        #: The same for each model and whether lines bring a chat template of their own.
        self.asked: dict[tuple[str, bool], int] = {}

    def close(self) -> None:
        """End reading."""
        self._file.close()

    def report(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        """Note an error."""
        if len(self.problems) < MOST_ERRORS:
            self.problems.append(BatchError(code=code, message=message, param=param, line=line))

    def read(self, count: int) -> Sequence[Line]:
        """Return up to *count* lines that are right; there are no more when they are none."""
        lines: list[Line] = []
        while len(lines) < count and len(self.problems) < MOST_ERRORS:
            place = self._file.tell()
            data = self._file.readline(self._longest + 1)
            if not data:
                break
            self._number += 1
            if len(data) > self._longest:
                self.report("line_too_long", f"The line has more than {self._longest} bytes.", line=self._number)
                while data and not data.endswith(b"\n"):
                    data = self._file.readline(self._longest)
                continue
            if self._number == 1 and data.startswith(_BOM):
                data = data[len(_BOM) :]
                place = len(_BOM)
            try:
                # First: nothing else takes as little time for a line of any length.
                self._check(data)
            except InvalidRequest as error:
                self.total += 1
                self.report(error.code, error.message, line=self._number)
                continue
            if not data or data.isspace():
                continue
            self.total += 1
            if self.total > self._most:
                self.report("too_many_requests", f"A batch can have {self._most} requests at most.", line=self._number)
                break
            if (request := self._request(data)) is not None:
                body = request.body
                self.models.setdefault(body.model, self._number)
                brings_template = bytes(memoryview(body.chat_template)[:4]) not in (b"", b"null")
                self.asked.setdefault((body.model, brings_template), self._number)
                texts = next((one for one in (body.messages, body.prompt, body.input) if memoryview(one)), b"")
                beginning = body.model.encode(errors="replace") + b"\0" + bytes(memoryview(texts)[:_PREFIX])
                prefix = int.from_bytes(blake2b(beginning, digest_size=7).digest())
                lines.append(Line(self._number, place, len(data), body.model, prefix))
        if not lines and not self.total and not self.problems:
            self.report("empty_file", "The input file has no requests.")
        return lines

    def _request(self, data: bytes) -> _Request | None:
        number = self._number
        try:
            # Parts that are not looked at could hold anything. Not at once: a text may be four times as large.
            utf8 = _Decoder()
            for at in range(0, len(data), _PIECE):
                utf8.decode(data[at : at + _PIECE])
            utf8.decode(b"", True)
            request = _decode(data)
        except UnicodeDecodeError:
            self.report("invalid_json_line", "The line is not UTF-8.", line=number)
            return None
        except msgspec.ValidationError as error:
            text = str(error)
            lacking = text.startswith("Object missing required field")
            if lacking:
                field = text.split("`")[1]
            elif "$." in text:
                field = text.rpartition("$.")[2].rstrip("`")
            else:
                field = None
            if lacking:
                code = "missing_required_parameter"
            elif field:
                code = "invalid_type"
            else:
                code = "invalid_json_line"
            self.report(code, f"{text}.", field, number)
            return None
        except (msgspec.DecodeError, RecursionError) as error:
            self.report("invalid_json_line", f"The line is not valid JSON: {error}.", line=number)
            return None
        named = request.custom_id
        digest = blake2b(named.encode(errors="surrogatepass"), digest_size=16).digest()
        body = request.body
        seen = digest in self._seen
        checks = (
            (not 1 <= len(named) <= LONGEST_ID, "invalid_custom_id", "custom_id", f"have 1 to {LONGEST_ID} characters"),
            (seen, "duplicate_custom_id", "custom_id", "differ from that of every earlier line"),
            (request.method != "POST", "invalid_method", "method", "be POST"),
            (request.url != self._batch.endpoint, "invalid_url", "url", f"be {self._batch.endpoint}"),
            (len(body.model) > _LONGEST_MODEL, "model_not_found", "body.model", "be the name of a model"),
            (bool(body.stream), "stream_not_supported", "body.stream", "not be true in a batch"),
            (bool(body.background), "background_not_supported", "body.background", "not be true in a batch"),
        )
        self._seen.add(digest)
        for wrong, code, param, text in checks:
            if wrong:
                self.report(code, f"'{param}' must {text}.", param, number)
                return None
        return request


def id_and_body(line: bytes) -> tuple[str, bytes]:
    """Return the ``custom_id`` and the body of a *line* that was checked."""
    found = _decode_named(line)
    return found.custom_id, bytes(found.body)
