"""Bodies into structs, and what is wrong with them into errors that name the field."""

# ruff: noqa: E501 - a row of a table stays on its line

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai import offload
from triton_openai.api.bodies import explain, parse_json
from triton_openai.api.parameters import is_neutral
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.errors import InvalidRequest


class Part(msgspec.Struct):
    """An inner object."""

    text: str
    size: int | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """An outer object with each kind of field."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    count: Annotated[int, msgspec.Meta(ge=1, le=9)] | None = None
    ratio: float | None = None
    flag: bool | None = None
    kind: Literal["a", "b"] | None = None
    parts: list[Part] = []
    value: str | list[str] | None = None
    table: dict[str, int] = {}


GOOD = {"model": "m"}


@every_case(
    "fields, param, code, message",
    [
        ({}, None, None, None),
        ({"model": None}, "model", "invalid_type", "Invalid type for 'model': expected a string, got null."),
        ({"model": 1}, "model", "invalid_type", "Invalid type for 'model': expected a string, got an integer."),
        ({"model": ""}, "model", "invalid_value", "Invalid value for 'model': expected a string of length >= 1."),
        ({"count": "1"}, "count", "invalid_type", "Invalid type for 'count': expected an integer or null, got a string."),
        ({"count": 1.5}, "count", "invalid_type", "Invalid type for 'count': expected an integer or null, got a number."),
        ({"count": True}, "count", "invalid_type", "Invalid type for 'count': expected an integer or null, got a boolean."),
        ({"count": 0}, "count", "invalid_value", "Invalid value for 'count': expected an integer >= 1."),
        ({"ratio": "x"}, "ratio", "invalid_type", None),
        ({"flag": 1}, "flag", "invalid_type", None),
        ({"kind": "c"}, "kind", "invalid_value", None),
        ({"parts": {}}, "parts", "invalid_type", "Invalid type for 'parts': expected an array, got an object."),
        ({"parts": [{}]}, "parts[0].text", "missing_required_parameter", "Missing required parameter: 'parts[0].text'."),
        ({"parts": [{"text": "a"}, {"text": 2}]}, "parts[1].text", "invalid_type", None),
        ({"parts": [1]}, "parts[0]", "invalid_type", None),
        ({"value": 1}, "value", "invalid_type", "Invalid type for 'value': expected a string or an array or null, got an integer."),
        ({"value": ["a", 1]}, "value[1]", "invalid_type", None),
        ({"table": {"a": "x"}}, "table", "invalid_type", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields, param, code, message):
    """The error has OpenAI's dotted name of the field, a code for the kind of fault, and says both types."""
    body = msgspec.json.encode({**GOOD, **fields})
    if code is None:
        assert Body(model="m") == parse_json(body, Body)
        return
    with pytest.raises(InvalidRequest) as caught:
        parse_json(body, Body)

    assert (param, code) == (caught.value.param, caught.value.code)
    assert message is None or message == caught.value.message
    assert "$" not in caught.value.message


def test_a_missing_field_is_named():
    """What is required and not there is named."""
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b"{}", Body)

    assert ("model", "missing_required_parameter") == (caught.value.param, caught.value.code)
    assert "Missing required parameter: 'model'." == caught.value.message


@every_case(
    "body, code",
    [
        (b"", "invalid_json"),
        (b" \n", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"model": "a",}', "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"ratio": Infinity, "model": "m"}', "invalid_json"),
        (b"[" * 100_000, "invalid_type"),
        (b'{"model":' + b"[" * 100_000, "invalid_json"),
        (b'{"model":"m","unknown":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'"text"', "invalid_type"),
        (b"1", "invalid_type"),
    ],
)
def test_bodies_that_are_no_objects(body, code):
    """What is no JSON, or no object, is refused without a field to blame."""
    with pytest.raises(InvalidRequest) as caught:
        parse_json(body, Body)

    assert 400 == caught.value.status
    assert code == caught.value.code or caught.value.param == "model"
    assert len(caught.value.message) < 300


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*Body.__struct_fields__, "x"]), inner, max_size=4)
        ),
        max_leaves=8,
    ).map(msgspec.json.encode)
)
def test_any_body_is_read_or_refused(body):
    """There is no third way."""
    names: list[str] = []
    for ignored in (None, names):
        with suppress(InvalidRequest):
            assert parse_json(body, Body, ignored).model


def test_strict_refuses_unknown_fields():
    """An unknown field is named, and cut where it is long, also if it is null; a known one passes."""
    for value in (b"1", b"null"):
        with pytest.raises(InvalidRequest) as caught:
            parse_json(b'{"model": "m", "%s": %s}' % (b"x" * 500, value), Body)
        assert ("x" * 100, "unknown_parameter") == (caught.value.param, caught.value.code)
    assert Body(model="m", count=1) == parse_json(b'{"model": "m", "count": 1}', Body)


class Numbers(msgspec.Struct, forbid_unknown_fields=True):
    """Where a request has integers."""

    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    ids: str | list[str | int | list[int]] | None = None
    ratio: float | None = None
    other: Any = None


@every_case(
    "body, expected",
    [
        (b'{"count": 4.0}', Numbers(count=4)),
        (b'{"count": 4.000e0, "ratio": 2.0}', Numbers(count=4, ratio=2.0)),
        (b'{"count": 1.2E3}', Numbers(count=1200)),
        (b'{"count": 18446744073709551615.0}', Numbers(count=2**64 - 1)),
        (b'{"ids": [[1], [2, 3]], "count":  5.0 }', Numbers(ids=[[1], [2, 3]], count=5)),
        (
            b'{"count": 1.0, "other": {"x": [1.0, "2.0"]}, "ids": "3.0"}',
            Numbers(count=1, other={"x": [1.0, "2.0"]}, ids="3.0"),
        ),
    ],
)
def test_whole_numbers_are_integers(body: bytes, expected: Numbers):
    """Whole numbers are integers, however they are written, as JSON Schema has it; texts stay as they are."""
    found = parse_json(body, Numbers)

    assert expected == found
    assert type(expected.count) is type(found.count)


@every_case("count", [b"4.5", b"1e-3", b"1e400", b"1e999999999", b"-1.0", b"0.0", b'"4.0"', b"[4.0]", b"true"])
def test_what_is_no_integer(count: bytes):
    """What is no integer is refused by name, and at no cost."""
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"count": %b}' % count, Numbers)

    assert "count" == (caught.value.param or "count")


@every_case("ids", [b"[1.0]", b"[1, 2.0]", b"[[1.0]]", b"[1e0]"])
def test_token_ids_are_written_as_integers(ids: bytes):
    """Token ids that are no integers are refused, and not rounded."""
    with pytest.raises(InvalidRequest, match="got a number") as caught:
        parse_json(b'{"ids": %b, "count": 4.0}' % ids, Numbers)

    assert str(caught.value.param).startswith("ids[")


@given(st.integers(1, 2**64), st.integers(0, 5))
def test_any_whole_number_is_an_integer(number: int, zeros: int):
    """Large ones too, which a float could not hold."""
    written = f'{{"count": {number}.{"0" * (zeros + 1)}}}'.encode()

    assert number == parse_json(written, Numbers).count


def test_unknown_fields_are_told():
    """What is ignored is named, beside a number that has to be mended; null asks for nothing, and errors stay."""
    ignored: list[str] = []
    body = b'{"model": "m", "a`b": [], "count": 4.0, "nothing": null, "parts": [{"text": "a", "inner": 1}], "b": 1}'

    assert Body(model="m", count=4, parts=[Part(text="a")]) == parse_json(body, Body, ignored)
    assert ["a`b", "b"] == ignored
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"model": "m", "x": 1, "count": "a"}', Body, ignored)
    assert "count" == caught.value.param


@every_case(
    "message, param, shown",
    [
        ("Expected `str`, got `int` - at `$.messages[0].role`", "messages[0].role", "expected a string, got an integer"),
        ("Object missing required field `role` - at `$.messages[1]`", "messages[1].role", "'messages[1].role'"),
        ("Expected `str`, got `int` - at `$.messages[...].content`", "messages.content", "'messages.content'"),
        ("Expected `int`, got `str` - at `key` in `$.logit_bias`", "logit_bias", "a key of 'logit_bias'"),
        ("Expected `object`, got `array`", None, "the request's body"),
        ("Integer value out of range - at `$.seed`", "seed", "'seed': integer value out of range."),
    ],
)  # fmt: skip
def test_messages_of_msgspec(message, param, shown):
    """Every form of msgspec's messages is understood."""
    error = explain(message)

    assert param == error.param
    assert shown in error.message


@every_case(
    "value, neutral, expected",
    [
        (None, (), True), (1, (1,), True), (True, (1,), False), (1.0, (1,), True), (1, (True,), False), (False, (0,), False), (0, (False,), False),
        ([], ([],), True), ([1], ([],), False), ({}, ({},), True), ("", ("",), True),
    ],
)  # fmt: skip
def test_neutral_values(value: Any, neutral: tuple[Any, ...], expected: bool):
    """A value is neutral by value: 1.0 is 1, and ``True`` is not."""
    assert expected is is_neutral(value, neutral)


def test_unknown_names_that_are_no_text() -> None:
    """A field's name that is not UTF-8 is no JSON, though nobody reads the field."""
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"\xd5": 1}', Body, [])

    assert "invalid_json" == caught.value.code


async def test_a_large_body_is_read_in_a_thread_with_a_decoder_made_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that make the decoders of one type at the same time can crash msgspec."""
    made: set[threading.Thread] = set()
    decoder = msgspec.json.Decoder

    def make(*arguments: Any, **named: Any) -> msgspec.json.Decoder[Any]:
        made.add(threading.current_thread())
        return decoder(*arguments, **named)

    async with (
        FakeTriton(config_of("m")) as triton,
        serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        await proxy.ready()
        offload.json_decoder.cache_clear()
        monkeypatch.setattr(msgspec.json, "Decoder", make)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"):
            await proxy.post(path, {"model": "m", "metadata": "a" * 100_000})
    assert {threading.main_thread()} == made
