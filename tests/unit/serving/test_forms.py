"""The parser of forms: what it costs, whatever a form is made of, and that contents come as they are."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import pytest

from tests.cases import every_case
from tests.form_shapes import CONTENTS, HEAD, LONG, OVERHEAD, SIZE
from triton_openai.errors import InvalidRequest, PayloadTooLarge, ServiceError
from triton_openai.serving.forms import MAX_OVERHEAD, MAX_PARTS, MAX_PREAMBLE, SLICE, FormParser, PartHead


def fed_until_refused(parser: FormParser, data: Iterable[bytes]) -> tuple[int, ServiceError]:
    """Return how many bytes of *data* a parser takes before it refuses them, and why it does."""
    fed = 0
    for piece in data:
        for start in range(0, len(piece), SLICE):
            fed += len(piece[start : start + SLICE])
            try:
                parser.feed(piece[start : start + SLICE])
            except ServiceError as error:
                return fed, error
    raise AssertionError(f"{fed} bytes were taken")


@every_case("name, before, repeated", OVERHEAD)
def test_what_is_no_contents_ends_soon(name: str, before: bytes, repeated: bytes) -> None:
    """Of 60 MB of it, no more is parsed than a form may have besides its contents."""
    parser = FormParser(b"xx")
    piece = repeated * (SLICE // len(repeated))
    fed, error = fed_until_refused(parser, [before, *[piece] * (SIZE // len(piece))])
    assert isinstance(error, InvalidRequest)
    assert error.status in (400, 413)
    assert fed <= MAX_OVERHEAD + 2 * SLICE, name
    assert len(parser.events) <= 4 * MAX_PARTS, name


@every_case("repeated", CONTENTS)
def test_contents_are_searched_in_large_steps(repeated: bytes) -> None:
    """A slice of contents is a few pieces, whatever it looks like: it is not gone through byte by byte."""
    parser, fed = FormParser(b"xx"), 0
    piece = repeated * (SLICE // len(repeated))
    parser.feed(HEAD)
    assert isinstance(parser.events.popleft(), PartHead)
    while fed < SIZE // 2:
        parser.feed(piece)
        fed += len(piece)
        assert len(parser.events) <= 3
        parser.events.clear()


@pytest.mark.parametrize("boundary", [b"x", b"xx", b"--", b"-x", LONG, b"'()+_,-./:=?"])
def test_contents_come_as_they_are(boundary: bytes) -> None:
    """However a form is cut, its parts have the contents that were sent."""
    chance = random.Random(boundary)
    begin = b"\r\n--" + boundary
    alphabet = [
        b"\r",
        b"\n",
        b"-",
        b"\r\n",
        b"\r\n--",
        b"--",
        b"a",
        begin[:-1],
        b"\r" + begin[:4],
        begin[2:],
        begin + b"a",
    ]
    alphabet += [begin + b"\ra", begin + b"-a", b"\0" * 50]
    ends = re.compile(re.escape(begin) + rb"(--|\r\n|[ \t])")
    for _ in range(300):
        parts = [b"".join(chance.choices(alphabet, k=chance.randrange(12))) for _ in range(chance.randrange(1, 4))]
        parts = [part for part in parts if ends.search(part + b"\r\n") is None]
        form = b"".join(
            b"--%b\r\nContent-Disposition: form-data; name=p%d\r\n\r\n%b\r\n" % (boundary, number, part)
            for number, part in enumerate(parts)
        )
        form = (
            chance.choice((b"", b"\r\n", b"words\r\n")) + form + b"--%b--%b" % (boundary, chance.choice((b"", b"\r\n")))
        )
        parser, start = FormParser(boundary), 0
        while start < len(form):
            size = chance.choice((1, 2, 3, 10, 1000))
            parser.feed(form[start : start + size])
            start += size
        parser.close()
        found: list[bytes] = []
        names: list[str] = []
        for event in parser.events:
            if isinstance(event, PartHead):
                names.append(event.name)
                found.append(b"")
            elif event is not None:
                found[-1] += event
        assert [f"p{number}" for number in range(len(parts))] == names
        assert parts == found, (form, found)


def test_a_preamble_has_a_limit() -> None:
    """A short one is skipped, and a long one refused as soon as it is too long, however it arrives."""
    for size in (0, 1, MAX_PREAMBLE - 2):
        parser = FormParser(b"xx")
        parser.feed(b"a" * size + b"\r\n" + HEAD)
        assert PartHead(name="a", filename=None, media_type="") == parser.events[0]
    for size in (1, 10, 1000):
        fed, _ = fed_until_refused(FormParser(b"xx"), [b"\n" * size] * SIZE)
        assert fed <= MAX_PREAMBLE + size + 10


def test_a_form_without_an_end() -> None:
    """A form that is cut off is refused, wherever that is."""
    form = HEAD + b"text\r\n--xx--"
    for end in range(len(form)):
        parser = FormParser(b"xx")
        parser.feed(form[:end])
        with pytest.raises(InvalidRequest):
            parser.close()
    parser = FormParser(b"xx")
    parser.feed(form)
    parser.close()


def test_parts_have_a_number() -> None:
    """As many parts as a form may have are taken, and no more."""
    parser = FormParser(b"xx")
    parser.feed((HEAD + b"a\r\n") * MAX_PARTS + b"--xx--")
    parser.close()
    parser = FormParser(b"xx")
    with pytest.raises(PayloadTooLarge):
        parser.feed((HEAD + b"a\r\n") * (MAX_PARTS + 2) + b"--xx--")
