"""Reads the input: prompts in a text file, rows of CSV or JSONL, or request lines of OpenAI's batches."""

from __future__ import annotations

import csv
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from triton_openai.cli.batch.arguments import BatchOptions
from triton_openai.errors import ConfigurationError
from triton_openai.json_bytes import escape_line_breaks

# Longer fields of CSV files are refused by the reader.
_MAX_FIELD = 128 * 1024 * 1024
_MAX_ID_LENGTH = 512


class Request(NamedTuple):
    """A request of the input."""

    custom_id: str
    #: The path of its endpoint.
    url: str
    #: A JSON object.
    body: bytes

    def line(self) -> bytes:
        """Return the request as a line of a batch."""
        fields = {"custom_id": self.custom_id, "method": "POST", "url": self.url, "body": msgspec.Raw(self.body)}
        return escape_line_breaks(msgspec.json.encode(fields)) + b"\n"


class _RequestLine(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class _Row(NamedTuple):
    """A row with its fields, and its number in the input."""

    number: int
    fields: Mapping[str, Any]


class Template:
    """A text with names of fields in braces; two braces are a brace. Raises :class:`ConfigurationError`."""

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []
        try:
            for literal, name, form, conversion in string.Formatter().parse(text):
                if form or conversion or name == "":
                    raise ConfigurationError(
                        f"--prompt: {{{name}}} must be the name of a field. Write {{{{ and }}}} for braces."
                    )
                self._parts.append((literal, name))
        except ValueError as error:
            raise ConfigurationError(
                f"--prompt cannot be read: {error}. Write the names of fields in braces, and {{{{ and }}}} for braces."
            ) from error

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return the text for *fields*. Raises :class:`KeyError` for one that is missing."""
        texts: list[str] = []
        for literal, name in self._parts:
            texts.append(literal)
            if name is not None:
                texts.append(_text(fields[name]))
        return "".join(texts)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


class Prompts:
    """The requests of the input that *options* name. Raises :class:`ConfigurationError` for what is wrong in it."""

    def __init__(self, options: BatchOptions) -> None:
        self._options = options
        self._path = options.input
        self.format = options.format or _format_of(self._path)
        default = "{prompt}"
        if self.format == "text":
            default = "{text}"
        #: What errors call a piece of the input.
        self._unit = "line"
        if self.format == "csv":
            self._unit = "row"
        self._template = Template(options.prompt or default)
        if self.format == "requests":
            for name, value in (("prompt", options.prompt), ("system", options.system), ("id", options.id_field)):
                if value is not None:
                    raise ConfigurationError(f"--{name} has no meaning here: {self._path} has whole requests.")
        elif options.endpoint not in _BODIES:
            names = ", ".join(_BODIES)
            raise ConfigurationError(f"--endpoint: prompts can be sent to {names}. Write whole requests for others.")

    def requests(self, model: str) -> Iterator[Request]:
        """Yield the requests, to *model* where they name none."""
        if self.format == "requests":
            return self._whole_requests(model)
        return self._rendered(model)

    def _whole_requests(self, model: str) -> Iterator[Request]:
        for number, text in self._lines():
            try:
                read = msgspec.json.decode(text, type=_RequestLine)
            except msgspec.MsgspecError as error:
                raise self._error(number, f"is no request of a batch: {error}") from error
            body = {**self._options.body, **read.body}
            if model and not body.get("model"):
                body["model"] = model
            yield Request(self._checked_id(number, read.custom_id), read.url, msgspec.json.encode(body))

    def _rendered(self, model: str) -> Iterator[Request]:
        options = self._options
        fixed: dict[str, Any] = dict(options.body)
        if model:
            fixed = {"model": model, **fixed}
        make_body = _BODIES[options.endpoint]
        for row in self._rows():
            try:
                prompt = self._template.render(row.fields)
                custom_id = f"{self._unit}-{row.number}"
                if options.id_field is not None:
                    custom_id = _text(row.fields[options.id_field])
            except KeyError as error:
                names = ", ".join(map(str, row.fields))
                raise self._error(row.number, f"has no field {error}. Its fields are {names}") from error
            body = {**fixed, **make_body(prompt, options.system)}
            yield Request(self._checked_id(row.number, custom_id), options.endpoint, msgspec.json.encode(body))

    def _rows(self) -> Iterator[_Row]:
        if self.format == "csv":
            yield from self._csv_rows()
            return
        for number, text in self._lines():
            if self.format == "text":
                yield _Row(number, {"text": text})
                continue
            try:
                fields = msgspec.json.decode(text)
            except msgspec.MsgspecError as error:
                raise self._error(number, f"is not valid JSON: {error}") from error
            if not isinstance(fields, dict):
                raise self._error(number, "is no JSON object")
            yield _Row(number, fields)

    def _csv_rows(self) -> Iterator[_Row]:
        csv.field_size_limit(_MAX_FIELD)
        delimiter = ","
        if self._path.suffix.lower() == ".tsv":
            delimiter = "\t"
        number = 0
        try:
            with self._path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, delimiter=delimiter, strict=True)
                for number, row in enumerate(reader, 1):
                    if None in row or None in row.values():
                        raise self._error(number, "has not as many fields as the head")
                    yield _Row(number, row)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise self._error(number + 1, f"cannot be read: {error}") from error

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines that have a text, with their numbers."""
        number = 0
        try:
            # Only these end a line: a prompt may have others, such as U+2028.
            with self._path.open(encoding="utf-8-sig", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    text = line.rstrip("\r\n")
                    if text.strip():
                        yield number, text
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(number + 1, f"cannot be read: {error}") from error

    def _checked_id(self, number: int, custom_id: str) -> str:
        if not 1 <= len(custom_id) <= _MAX_ID_LENGTH:
            raise self._error(number, f"has an id of {len(custom_id)} characters, which must be 1 to {_MAX_ID_LENGTH}")
        return custom_id

    def _error(self, number: int, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path}: {self._unit} {number} {problem}.")


def _format_of(path: Path) -> str:
    """Return how to read *path*, by its name and its first line."""
    try:
        with path.open("rb") as file:
            first = file.readline(_MAX_FIELD).removeprefix(b"\xef\xbb\xbf").strip()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return "csv"
    if first.startswith(b"{"):
        try:
            fields = msgspec.json.decode(first)
        except msgspec.MsgspecError:
            fields = {}
        if {"custom_id", "url", "body"} <= fields.keys():
            return "requests"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    return "text"


def _chat(prompt: str, system: str | None) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def _response(prompt: str, system: str | None) -> dict[str, Any]:
    if system is None:
        return {"input": prompt}
    return {"instructions": system, "input": prompt}


def _plain(name: str, prompt: str, system: str | None) -> dict[str, Any]:
    if system is not None:
        raise ConfigurationError("--system is for chats and responses.")
    return {name: prompt}


def _completion(prompt: str, system: str | None) -> dict[str, Any]:
    return _plain("prompt", prompt, system)


def _embedding(prompt: str, system: str | None) -> dict[str, Any]:
    return _plain("input", prompt, system)


# By endpoint: what makes the body of a prompt and a system message.
_BODIES = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embedding,
}
