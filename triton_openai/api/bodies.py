"""Bodies: reads requests, JSON or forms, into typed structs, with errors that name the field, and writes answers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from triton_openai import json_bytes, offload
from triton_openai.config.tree import LimitSettings, Settings
from triton_openai.errors import InvalidRequest, InvalidValue, PayloadTooLarge, missing, printable
from triton_openai.json_bytes import MAX_DEPTH, MAX_DIGITS, MAX_QUOTES_PER_VALUE, MAX_VALUES
from triton_openai.operations import Form, Operation, Whole
from triton_openai.telemetry.request_record import RequestRecord

_T = TypeVar("_T", bound=msgspec.Struct)
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
#: Returns the JSON of a value.
encode = msgspec.json.Encoder().encode

#: Most messages of a chat, and most prompts, inputs, texts or documents of a request.
MAX_MESSAGES = 4096
MAX_ITEMS = 2048
#: The usual ranges of numbers in requests.
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=60_000)]


class ModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests to a model; an empty name means the default model."""

    model: str = ""

    def json_texts(self) -> Iterable[tuple[str, Any]]:
        """Return those of the request's texts that hold JSON, each with its path. Other values are ignored."""
        return ()


#: The header of an answer that names what of its request had no effect: parameters, types of tools and of items.
IGNORED_HEADER = "x-triton-openai-ignored"
#: The header of an answer that names the functions whose past calls had arguments that were no object.
REPAIRED_HEADER = "x-triton-openai-repaired"
_MAX_NAMES = 16
_MAX_NAME_LENGTH = 64
# Others would end a name, or the header.
_NOT_IN_NAMES = re.compile(r"[^!-+\--~]")


def report_ignored(record: RequestRecord, names: Iterable[str]) -> None:
    """Add the *names* of what has no effect, as the client wrote them, to the header of the answer."""
    _report(record, IGNORED_HEADER, names)


def report_repaired(record: RequestRecord, names: Iterable[str]) -> None:
    """Add the *names* of functions to the header of the answer: past calls of them had broken arguments."""
    _report(record, REPAIRED_HEADER, names)


def _report(record: RequestRecord, header: str, names: Iterable[str]) -> None:
    """Add *names* to a *header* of the answer, and an ellipsis if they are too many."""
    reported: dict[str, None] = {}
    if header in record.headers:
        reported = dict.fromkeys(record.headers[header].split(", "))
    for name in names:
        shown = _NOT_IN_NAMES.sub("?", printable(name, _MAX_NAME_LENGTH))
        if len(reported) < _MAX_NAMES or shown in reported:
            reported.setdefault(shown)
        else:
            reported.setdefault("...")
    if reported:
        record.headers = {**record.headers, header: ", ".join(reported)}


async def decode_json(body: bytes, operation: Operation, record: RequestRecord, settings: Settings) -> Any:
    """
    Return *body* as the type of *operation*, within the limits of *settings*.

    *record* gets the body's size, and the names of unknown fields. Raises :class:`InvalidRequest`.
    """
    limits = settings.limits
    kind: Any = operation.hidden_request or operation.request
    if operation.strict is None:
        strict = settings.api.strict_parameters
    else:
        strict = operation.strict
    record.body_size = len(body)
    ignored: list[str] = []
    record.unknown_fields = ignored
    if strict:
        names = None
    else:
        names = ignored
    cost = offload.json_cost(len(body))
    if cost <= offload.INLINE:
        # Nothing is awaited for most requests.
        parsed = read_within(body, kind, limits, names)
    else:
        # Made here: two threads that use a type for the first time at the same time can crash msgspec (0.22).
        offload.json_decoder(kind)
        parsed = await offload.run(read_within, body, kind, limits, names, cost=cost)
    if ignored:
        report_ignored(record, ignored)
    return parsed


def read_within(body: bytes, kind: type[_T], limits: LimitSettings, ignored: list[str] | None = None) -> _T:
    """Return *body* as *kind*, as :func:`parse_json`. Raises also for a body that exceeds *limits*."""
    check = JsonCheck(limits)
    clear = check.check(body)
    parsed = parse_json(body, kind, ignored)
    if not clear and isinstance(parsed, ModelRequest):
        check_texts(parsed.json_texts(), check)
    return parsed


class FileField(msgspec.Struct, frozen=True):
    """A file in a form."""

    #: As the client gave it.
    name: str
    #: As the client gave it.
    media_type: str
    content: bytes


class FormRequest(ModelRequest, kw_only=True):
    """
    Base of the requests that come as forms. A :class:`FileField` is a file; items of a list ``a`` are ``a[]``.

    Its floats have limits: without them, "nan" would be one.
    """


async def read_form(
    form: Form,
    kind: type[_T],
    record: RequestRecord,
    limits: LimitSettings,
    *,
    strict: bool,
    max_size: int,
    on_arrival: Callable[[int], Awaitable[None]] | None = None,
) -> _T:
    """
    Return *form*, of *max_size* bytes at most, as *kind*; *strict* refuses fields that *kind* does not know.

    The type of a field decides what a part is, whether the client gives it a file name or not. A text that is empty is
    left out: clients write so what they do not set. Items of a list come with or without brackets. *record* gets the
    form's size, and the names of unknown fields. *on_arrival* is that of :meth:`Form.parts`. Raises
    :class:`InvalidRequest`.
    """
    known = kind.__struct_encode_fields__
    file_fields, list_fields = _form_fields(kind)
    fields: dict[str, Any] = {}
    ignored: list[str] = []
    record.unknown_fields = ignored
    text_left = limits.max_text_size
    async for part in form.parts(max_size, on_arrival):
        name = part.name
        is_item = name in list_fields
        list_name = _LIST_ITEM.sub("", name)
        if name not in known and list_name in known:
            name = list_name
            is_item = True
        if name not in known:
            if strict:
                raise unknown_field(name)
            if len(ignored) < _MAX_UNKNOWN:
                ignored.append(name)
            continue
        if name in file_fields:
            content = await part.read(max_size)
            value: str | FileField = FileField(part.filename or name, part.media_type, content)
        else:
            content = await part.read(text_left)
            text_left -= len(content)
            if not content:
                continue
            try:
                value = content.decode()
            except UnicodeDecodeError as error:
                raise InvalidValue(f"'{name}' is not UTF-8.", name) from error
        if is_item and isinstance(items := fields.setdefault(name, []), list):
            items.append(value)
        elif name in fields:
            raise InvalidValue(f"The request's form has '{name}' twice.", name)
        else:
            fields[name] = value
    record.body_size = form.size
    report_ignored(record, ignored)
    return converted(fields, kind, strict=False)


# What follows the name of a list's field in the names of its items: "a[]", and "a[0]" of PHP and others.
_LIST_ITEM = re.compile(r"\[\d{0,4}\]$")


@cache
def _form_fields(kind: type[msgspec.Struct]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the fields of *kind* that are files, and of those that are lists."""
    files = set()
    lists = set()
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    for field in described.fields:
        if isinstance(field.type, msgspec.inspect.UnionType):
            types = field.type.types
        else:
            types = (field.type,)
        for one in types:
            if isinstance(one, msgspec.inspect.StructType) and one.cls is FileField:
                files.add(field.encode_name)
            elif isinstance(one, msgspec.inspect.CollectionType):
                lists.add(field.encode_name)
    return frozenset(files), frozenset(lists)


_NORMALIZABLE = re.compile(r"got `float`|^Object contains unknown field `")
# Unknown fields of a request that are logged.
_MAX_UNKNOWN = 16
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# Of the largest integers that a backend takes.
_DIGITS = 20


def parse_json(body: bytes, kind: type[_T], ignored: list[str] | None = None) -> _T:
    """
    Return *body* as *kind*.

    The names of the first few unknown fields that are not null are added to *ignored*; without it, unknown fields are
    refused, as OpenAI does it. Raises :class:`InvalidRequest`.
    """
    if not body.strip():
        raise InvalidRequest("The request's body is empty; a JSON object is needed.", code="invalid_json")
    decoder: msgspec.json.Decoder[_T] = offload.json_decoder(kind)
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if not _NORMALIZABLE.search(str(error)):
                raise
            return decoder.decode(_normalized(body, kind, ignored))
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The request's body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("The request's JSON is nested too deeply.", code="invalid_json") from error


def _normalized(body: bytes, kind: type[msgspec.Struct], ignored: list[str] | None) -> bytes:
    """
    Return *body* without the fields that *kind* does not know, and with whole numbers such as 4.0 written as integers.

    Such numbers are integers in JSON Schema and not in msgspec. Those in a list, such as token ids, stay as they are.
    Raises :class:`InvalidRequest` for an unknown field if there is no *ignored*.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = kind.__struct_encode_fields__
    normalized = {}
    for name, raw in fields.items():
        if name in known:
            number = _NUMBER.fullmatch(raw)
            if number is None:
                normalized[name] = raw
            else:
                normalized[name] = msgspec.Raw(_integer(number))
        elif ignored is None:
            raise unknown_field(name)
        elif bytes(raw) != b"null" and len(ignored) < _MAX_UNKNOWN:
            ignored.append(name)
    return msgspec.json.encode(normalized)


def _integer(match: re.Match[bytes]) -> bytes:
    number = Decimal(match[0].decode())
    # A number that no integer field can hold is not written out.
    whole = number.adjusted() < _DIGITS and number == number.to_integral_value()
    if whole:
        return b"%d" % int(number)
    return match[0]


def unknown_field(name: str) -> InvalidRequest:
    """Return the error for a request with a field *name* that it does not have."""
    return InvalidRequest(f"Unknown parameter: '{name[:100]}'.", param=name[:100], code="unknown_parameter")


_WHERE = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>.*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_WRONG_TYPE = re.compile(r"Expected `[^`]*`(, got `[^`]*`)?$")
_TYPE = re.compile(r"`([^`]*)`")
_TYPE_NAMES = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "a boolean", "array": "an array",
    "object": "an object",
}  # fmt: skip


def explain(message: str, root: str = "") -> InvalidRequest:
    """
    Turn a msgspec validation message (``… - at `$.messages[0].role```) into our error with OpenAI's ``param``.

    *root* is the path of the value that was validated.
    """
    where = _WHERE.search(message)
    what = message
    path = root
    if where:
        what = message[: where.start()]
        path += where.group("path")
    # msgspec writes [...] where it does not say which element it is.
    param = path.replace("[...]", "").strip(".") or None
    lacking = _MISSING.search(what)
    if lacking:
        field = lacking.group("field")
        if param:
            field = f"{param}.{field}"
        return missing(field)
    if param:
        subject = f"'{param}'"
    else:
        subject = "the request's body"
    if where and where.group("key"):
        subject = f"a key of {subject}"
    if _WRONG_TYPE.search(what):
        fault = "type"
    else:
        fault = "value"
    code = f"invalid_{fault}"
    if "`array` of length <=" in what:
        code = "array_above_max_length"
    what = _TYPE.sub(_type_names, what)
    what = what.removeprefix("Invalid enum value ").removeprefix("Invalid value ")
    what = f"{what[:1].lower()}{what[1:]}"
    return InvalidRequest(f"Invalid {fault} for {subject}: {what}.", param=param, code=code)


def _type_names(match: re.Match[str]) -> str:
    """Return the names of types, which msgspec writes in backticks, with bars between alternatives."""
    return " or ".join([_TYPE_NAMES.get(name, name) for name in match[1].split(" | ")])


def converted(value: Any, kind: type[_T], *, strict: bool = True) -> _T:
    """Return *value* as *kind*; without *strict*, texts may be numbers. Raises :class:`InvalidRequest`."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error


_DIGIT_BYTES = b"0123456789"
# A data URL begins with the first of these and the second, and a field with a file in base64 with another one.
_DATA = b'"data'
_OPENINGS = (b":", b'":"', b'": "')
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=\\"
# Data URLs of one request that do not count as text; more than a request may have images.
_MAX_DATA_URLS = 4096

# What is around a request in a batch: its id and its URL, and names; some clients have fields of their own there.
_ENVELOPE_VALUES = 100
_ENVELOPE_SIZE = 16 * 1024


class JsonCheck:
    """
    Counts the values and token ids of one request against its limits, JSON inside its strings included.

    Every step is a pass of compiled code over the bytes. The decoder reports what is not JSON. *beside* is how many
    values the request has elsewhere, where that is known: only JSON that is clearly few with them needs no counting.
    *batched* is for a request within the line of a batch, or the item of a list, that it comes in: those have a few
    bytes and a level of their own.
    """

    def __init__(self, limits: LimitSettings, beside: int = 0, *, batched: bool = False) -> None:
        self._limits = limits
        self._values = MAX_VALUES
        self._max_depth = MAX_DEPTH
        self._max_text_size = limits.max_text_size
        if batched:
            self._values += _ENVELOPE_VALUES
            self._max_depth += 1
            self._max_text_size += _ENVELOPE_SIZE
        self._ids = limits.max_token_ids
        #: The values that the request has at most, *beside* those of JSON that was not counted.
        self.max_values = beside

    def check(self, body: bytes, *, exactly: bool = False, nested: bool = False, param: str | None = None) -> bool:
        """
        Raise for JSON with too much text, too many values or token ids, too long numbers, or too deep nesting.

        JSON that is clearly within the limits is not counted, unless *exactly* is set; the nesting of what is *nested*
        is known to be. *param* is the path of a JSON text within the request. Returns whether the strings need no
        check: the JSON that they may hold is clearly within the limits too.
        """
        limits = self._limits
        max_size = self._max_text_size
        if len(body) <= max_size:
            text = body
        else:
            text = _without_images(body, max_size, param)
        opened = text.count(b"[") + text.count(b"{")
        values = self.max_values + opened + text.count(b",")
        few = values < self._values and (nested or opened <= self._max_depth)
        if few and not exactly and not json_bytes.has_long_number(text):
            # It is within the limits, whatever its strings contain.
            self.max_values = values
            return values < self._ids and text is body and text.find(b"\\u") < 0
        plain = json_bytes.without_escapes(text)
        too_many = PayloadTooLarge(f"The request's JSON has more than {MAX_VALUES} values.", param=param)
        if plain.count(b'"') > MAX_QUOTES_PER_VALUE * self._values:
            raise too_many
        bare = json_bytes.without_strings(plain)
        if json_bytes.has_long_number(bare):
            raise InvalidRequest(
                f"A number in the request's JSON has more than {MAX_DIGITS} digits.", param=param, code="invalid_json"
            )
        # Each value but the first of a list or an object follows a comma, and the first an opening bracket.
        opened = json_bytes.opened(bare)
        if opened > self._values:
            raise too_many
        ids = _token_ids(bare)
        self._values -= 1 + opened + bare.count(b",") - ids
        if self._values < 0:
            raise too_many
        self._ids -= ids
        if self._ids < 0:
            raise PayloadTooLarge(f"The request has more than {limits.max_token_ids} token ids.", param=param)
        if json_bytes.depth(bare) > self._max_depth:
            raise InvalidRequest(
                f"The request's JSON is nested too deeply: more than {MAX_DEPTH} levels.",
                param=param,
                code="invalid_json",
            )
        return False


_PIECE = 1024 * 1024


def text_size(body: bytes) -> int:
    """Return the bytes of the JSON *body* without its images and files."""
    if body.find(_DATA) < 0:
        return len(body)
    return len(_without_images(body, len(body), None))


def _without_images(body: bytes, max_size: int, param: str | None) -> bytes:
    """
    Return a *body* of more than *max_size* bytes without the data URLs of images and the base64 in fields ``data``.

    The removed contents have no quotes, and no escape but base64's ``\\/``, so the result is still JSON. Raises
    :class:`PayloadTooLarge`, about *param*, if more than *max_size* bytes are left.
    """
    # Without copies of what may be tens of megabytes: to make one keeps the interpreter lock.
    plain = body.isascii()
    view = memoryview(body)
    offsets: list[int] = []
    offset = body.find(_DATA)
    while offset >= 0 and len(offsets) < _MAX_DATA_URLS:
        offsets.append(offset)
        offset = body.find(_DATA, offset + 1)
    kept: list[bytes | memoryview] = []
    begin = 0
    for offset, following in pairwise([*offsets, len(body)]):
        opening = _opening_at(body, offset + len(_DATA))
        if not opening:
            continue
        start = offset + len(_DATA) + len(opening)
        end = body.find(b'"', start, following)
        if end < 0 or not (plain or body[start:end].isascii()) or not _has_few_escapes(body, start, end):
            continue
        if opening == b":":
            if body[offset + 6 : offset + 12].lower() != b"image/":
                # A file of text, or one that is refused.
                continue
            kept += view[begin:offset], b'""'
        elif _is_base64(body, start, end):
            kept += view[begin:start], b'"'
        else:
            continue
        begin = end + 1
    kept.append(view[begin:])
    if sum(map(len, kept)) > max_size:
        raise PayloadTooLarge(
            f"The request has more than {max_size} bytes besides its images.",
            param=param,
            code="string_above_max_length",
        )
    return b"".join(kept)


def _opening_at(body: bytes, offset: int) -> bytes:
    """Return what precedes the data at *offset* of *body*; nothing if there is no data."""
    for opening in _OPENINGS:
        if body.startswith(opening, offset):
            return opening
    return b""


def _is_base64(data: bytes, start: int, end: int) -> bool:
    # In pieces, as each step keeps the interpreter lock.
    for offset in range(start, end, _PIECE):
        if data[offset : min(offset + _PIECE, end)].translate(None, _BASE64):
            return False
    return True


def _has_few_escapes(data: bytes, start: int, end: int) -> bool:
    """Return whether the escapes between *start* and *end* are few, as many take long to read, and all are ``\\/``."""
    escapes = 0
    # In pieces: counting 20 million of them in one call keeps the event loop waiting.
    for offset in range(start, end, _PIECE):
        escapes += data.count(b"\\", offset, min(offset + _PIECE, end))
        if escapes * 16 > end - start:
            return False
    return not escapes or escapes == data.count(b"\\/", start, end)


def _token_ids(bare: bytes) -> int:
    """Return the number of values that follow a comma in lists of integers, which are decoded quickly."""
    lists = (part.partition(b"]") for part in bare.split(b"[")[1:])
    return sum(inner.count(b",") for inner, _, _ in lists if not inner.translate(None, _DIGIT_BYTES + b","))


def check_texts(texts: Iterable[tuple[str, Any]], check: JsonCheck) -> None:
    """Raise if the JSON in *texts*, each with its path, exceeds the limits of *check* with the rest of the request."""
    for path, text in texts:
        if isinstance(text, str):
            check.check(text.encode("utf-8", "replace"), exactly=True, param=path)


def decoded_arguments(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """
    Yield those of the *arguments* of past calls, each with its path, that are decoded.

    A model can write longer numbers, and nest deeper, than a request may: such arguments are shown to it as text.
    """
    for path, text in arguments:
        if not isinstance(text, str) or json_bytes.is_within_limits(text):
            yield path, text


def separated(value: str | list[str | int | list[int]], param: str) -> list[Any]:
    """Return texts and lists of token ids one by one. Raises :class:`InvalidRequest` for none and too many."""
    items: list[Any] = [value]
    if isinstance(value, list) and set(map(type, value)) != {int}:
        items = value
    if not items:
        raise InvalidValue(f"'{param}' must not be an empty list.", param)
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(
            f"'{param}' may hold {MAX_ITEMS} items at most.", param=param, code="array_above_max_length"
        )
    if int in map(type, items):
        raise InvalidRequest(f"'{param}' must not mix token ids with lists or texts.", param=param, code="invalid_type")
    return items


def json_reply(answer: msgspec.Struct, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS) -> Whole:
    """Return *answer* in JSON as a reply."""
    return Whole(encode(answer), status, headers=headers)


async def json_reply_of(make: Callable[[], msgspec.Struct], *, cost: float) -> Whole:
    """Return what *make* returns as a reply; to make and to encode it takes about *cost* microseconds."""
    return Whole(await offload.run(lambda: encode(make()), cost=cost))


def new_id(prefix: str, separator: str = "-") -> str:
    """Return a new id of an object, such as ``chatcmpl-…``; Triton gets the same id for the request."""
    return f"{prefix}{separator}{os.urandom(16).hex()}"


def now() -> int:
    """Return the time for OpenAI's ``created``: whole seconds since the epoch."""
    return int(time.time())


def encode_each(values: Iterable[Any]) -> list[Any]:
    """Return each of *values* in JSON. To encode all of them in one call would hold the event loop."""
    return [msgspec.Raw(encode(value)) for value in values]
