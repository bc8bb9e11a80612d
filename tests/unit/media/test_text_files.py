"""Text files: what is taken, what a prompt shows, and that nothing else passes."""

from __future__ import annotations

import base64
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.media.text_files import decode, render


def encoded(data: bytes) -> str:
    """Return *data* in base64."""
    return base64.b64encode(data).decode()


@given(st.text(), st.sampled_from(["", "text/plain", "text/markdown", "application/json", "application/ld+json"]))
def test_text_stays_as_it_is(text: str, kind: str) -> None:
    """Any text comes out of its file as it went in, but for a byte-order mark."""
    data = encoded(text.encode())

    lines = base64.encodebytes(text.encode()).decode()

    assert text.removeprefix("\ufeff") == decode(data, None) == decode(f"DATA:{kind};charset=utf-8;base64,{lines}", "a")


@given(st.one_of(st.text(), st.binary().map(encoded), st.binary().map(lambda data: f"data:;base64,{encoded(data)}")))
def test_anything_is_text_or_refused(data: str) -> None:
    """Whatever a client sends is a text, or its own mistake."""
    with suppress(InvalidRequest):
        decode(data, "x" * 1000)


@every_case("kind, data", [
    ("application/pdf", "data:application/pdf;base64,AAAA"),
    ("application/pdf", encoded(b"%PDF-1.7 and so on")),
    ("image/png", "data:image/png;base64,AAAA"),
    ("application/zip", "data:application/zip;base64,AAAA"),
])  # fmt: skip
def test_other_files_are_named(kind: str, data: str) -> None:
    """The message says which file it is, and of what type."""
    with pytest.raises(UnsupportedParameter, match=f"'a.bin' is of type '{kind}'"):
        decode(data, "a.bin")


@every_case(
    "data", ["data:text/plain,a", "data:text/plain", "a b", "AAA", "ä", encoded(b"\xff\xfe"), encoded(b"a\xff")]
)
def test_what_is_no_text(data: str) -> None:
    """Neither base64 without its padding nor other encodings of text are taken for a text."""
    with pytest.raises(InvalidRequest):
        decode(data, None)


@given(st.text())
def test_a_name_stays_in_its_place(name: str) -> None:
    """No name ends the line that it stands in."""
    first, middle, last = render(name, "text").split("\n")

    assert ("text", "</file>") == (middle, last)
    assert first.startswith('<file name="')
    assert 2 == first.count('"')
    assert first.endswith('">')
