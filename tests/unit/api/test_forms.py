"""Forms: what a request that is one becomes, and which are refused, by the service as a whole."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
import pytest
from aiohttp import FormData
from msgspec import Meta

from tests.clock import Clock, turns
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Proxy, serving
from tests.zstd import zstd_module
from triton_openai import app
from triton_openai.api import media_limits, routes
from triton_openai.api.bodies import FileField, FormRequest, json_reply
from triton_openai.api.media_limits import Upload, form_of, receiving_audio
from triton_openai.api.service import Service, begin
from triton_openai.app import SERVICE
from triton_openai.config.tree import (
    AccessSettings,
    ApiSettings,
    AudioLimits,
    LimitSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.generation import Generation
from triton_openai.operations import BodyKind, Call, Form, Operation, Reply
from triton_openai.serving.forms import MAX_PARTS

KEY = {"Authorization": "Bearer k"}
LARGEST = 200_000
# What a form of a file may have beside that.
FIELDS = 1000


class HearingRequest(FormRequest, kw_only=True):
    """A request with a file."""

    file: FileField
    prompt: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    words: tuple[str, ...] = ()


class Heard(msgspec.Struct):
    """What the handler has read."""

    body: dict[str, Any]


async def hear(service: Service, call: Call[Form]) -> Reply:
    """Say what is in a form."""
    return await heard_of(service, call, None)


async def heard_of(service: Service, call: Call[Form], upload: Upload | None) -> Reply:
    """Say what is in a form, whose bytes *upload* counts."""
    form = await form_of(service, call, HearingRequest, max_size=LARGEST + FIELDS, upload=upload)
    context = await begin(service, call.with_body(form))
    body = msgspec.structs.asdict(context.body)
    file = body.pop("file")
    complete = file.content == b"\r\n" * 50_000
    return json_reply(Heard({**body, "file": [file.name, file.media_type, len(file.content), complete]}))


async def listen(service: Service, call: Call[Form]) -> Reply:
    """Say what is in a form with audio."""
    async with receiving_audio(service, call) as upload:
        return await heard_of(service, call, upload)


async def count(service: Service, call: Call[Form]) -> Reply:
    """Count the bytes of each part as they come, and skip those that are not called so."""
    sizes = {}
    async for part in call.body.parts(LARGEST):
        if part.name != "skipped":
            sizes[part.name] = sum([len(piece) async for piece in part.pieces()])
    return json_reply(Heard(sizes))


@asynccontextmanager
async def heard(
    monkeypatch: pytest.MonkeyPatch, *, strict: bool = False, patience: float = 300
) -> AsyncIterator[Proxy]:
    """Serve two operations with forms, to holders of a key."""
    more = (
        Operation(
            *(hear, ("POST /v1/hear",), "hear", "inference", HearingRequest, Heard),
            reads=BodyKind.FORM,
            jobs=(Generation,),
        ),
        Operation(
            *(listen, ("POST /v1/listen",), "listen", "inference", HearingRequest, Heard),
            reads=BodyKind.FORM,
            jobs=(Generation,),
        ),
        Operation(count, ("POST /v1/count",), "count", "inference", answer=Heard, reads=BodyKind.FORM),
    )
    monkeypatch.setattr(media_limits, "_FIELDS", FIELDS)
    monkeypatch.setattr(app, "OPERATIONS", (*routes.OPERATIONS, *more))
    monkeypatch.setattr(routes, "OPERATIONS", (*routes.OPERATIONS, *more))
    routes._schemas.cache_clear()
    monkeypatch.setattr(routes, "_schemas", routes._schemas.__wrapped__)
    async with FakeTriton(config_of("m")) as triton:
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            api=ApiSettings(strict_parameters=strict),
            access=AccessSettings(api_key=("one:k", "two:l")),
            server=ServerSettings(max_body_size=LARGEST),
            audio=AudioLimits(max_file_size=LARGEST, max_total_size=4 * LARGEST),
            limits=LimitSettings(body_timeout=patience, max_text_size=1000),
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            yield proxy


def form(**fields: Any) -> FormData:
    """Return a form with a file and *fields*."""
    data = FormData({"model": "m", **fields})
    data.add_field("file", b"\r\n" * 50_000, filename="a.wav", content_type="audio/wav")
    return data


async def ask(proxy: Proxy, data: Any, path: str = "/v1/hear", **headers: str) -> tuple[int, Any]:
    """Return the status and the JSON of the answer."""
    async with proxy.client.post(path, data=data, headers={**KEY, **headers}) as answer:
        return answer.status, await answer.json()


async def test_fields_have_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts become numbers, flags and lists as the type says; what the type does not know is ignored, and named."""
    async with heard(monkeypatch) as proxy:
        data = form(prompt="null é", temperature="0.5", stream="true")
        for name, value in (("words[]", "a"), ("unknown", "x" * 5000), ("words[]", "b")):
            data.add_field(name, value)
        async with proxy.client.post("/v1/hear", data=data, headers=KEY) as answer:
            assert {
                **{"model": "m", "prompt": "null é", "temperature": 0.5, "stream": True, "words": ["a", "b"]},
                "file": ["a.wav", "audio/wav", 100_000, True],
            } == (await answer.json())["body"]
            assert "unknown" == answer.headers["x-triton-openai-ignored"]
        async with proxy.client.get("/openapi.json", headers=KEY) as answer:
            document = await answer.json()
    content = document["paths"]["/v1/hear"]["post"]["requestBody"]["content"]
    assert {"multipart/form-data": {"schema": {"$ref": "#/components/schemas/HearingRequest"}}} == content
    assert "binary" == document["components"]["schemas"]["FileField"]["format"]


async def test_parts_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler reads them as they arrive; what it leaves is skipped, and an empty part is one too."""
    async with heard(monkeypatch) as proxy:
        data = FormData({"a": "x" * 10})
        data.add_field("skipped", b"s" * 90_000, filename="s")
        data.add_field("big", b"\r\n--" * 20_000, filename="b")
        data.add_field("empty", b"", filename="e")
        status, answer = await ask(proxy, data, "/v1/count")
        assert (200, {"a": 10, "big": 80_000, "empty": 0}) == (status, answer["body"])


def raw(*parts: bytes, end: bytes = b"--x--\r\n") -> bytes:
    """Return a form with the boundary x."""
    return b"".join([b"--x\r\n" + part + b"\r\n" for part in parts]) + end


NAMED = b'Content-Disposition: form-data; name="%b"\r\n'
MODEL = NAMED % b"model" + b"\r\nm"
FILE = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\nf'


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "zstd"])
async def test_compressed_forms(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form may come compressed. What comes out counts, is parsed in slices, and a bomb is a 413."""
    pack: Callable[[bytes], bytes] = gzip.compress
    if coding == "deflate":
        pack = zlib.compress
    if coding == "zstd":
        pack = zstd_module().compress
    typed = {"Content-Type": "multipart/form-data; boundary=x", "Content-Encoding": coding}
    # As a client of slow lines sends it, and with much more in each piece than in a slice.
    forms = [raw(MODEL, FILE), raw(MODEL, FILE + b"f" * (LARGEST // 2))]
    bomb = pack(raw(MODEL, FILE + bytes(64 * LARGEST)))
    assert len(bomb) < LARGEST
    async with heard(monkeypatch) as proxy:
        for form in forms:
            expected = await ask(proxy, form, **{"Content-Type": typed["Content-Type"]})
            assert 200 == expected[0]
            for data in (pack(form), _in_pieces(pack(form))):
                assert expected == await ask(proxy, data, **typed)
        for data in (bomb, _in_pieces(bomb)):
            status, answer = await ask(proxy, data, **typed)
            assert (413, "request_too_large") == (status, answer["error"]["code"])
            assert "decompressed" in answer["error"]["message"]


async def test_wrong_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused with its field, or for what it is."""
    typed = {"Content-Type": "multipart/form-data; boundary=x"}
    cases: list[tuple[bytes, dict[str, str], int, str | None, str]] = [
        (b"{}", {"Content-Type": "application/json"}, 415, None, "unsupported_media_type"),
        (raw(MODEL, FILE), {"Content-Type": "multipart/form-data"}, 400, None, "invalid_form"),
        (raw(MODEL, FILE), {**typed, "Content-Encoding": "br"}, 415, None, "unsupported_media_type"),
        (raw(MODEL, FILE), {**typed, "Content-Encoding": "gzip"}, 400, None, "invalid_encoding"),
        (gzip.compress(raw(MODEL, FILE))[:-1], {**typed, "Content-Encoding": "gzip"}, 400, None, "invalid_encoding"),
        (gzip.compress(raw(MODEL, FILE)) + b"x", {**typed, "Content-Encoding": "gzip"}, 400, None, "invalid_encoding"),
        (gzip.compress(raw(MODEL, FILE)) * 2, {**typed, "Content-Encoding": "gzip"}, 400, None, "invalid_encoding"),
        (gzip.compress(raw(MODEL, FILE, end=b"")), {**typed, "Content-Encoding": "gzip"}, 400, None, "invalid_form"),
        (gzip.compress(raw(MODEL, FILE + b"a" * (LARGEST + FIELDS))), {**typed, "Content-Encoding": "gzip"}, 413, None,
         "request_too_large"),
        (b"", typed, 400, None, "invalid_form"),
        (b"nothing", typed, 400, None, "invalid_form"),
        (raw(MODEL, FILE, end=b""), typed, 400, None, "invalid_form"),
        (raw(b"\r\nm", FILE), typed, 400, None, "invalid_form"),
        (raw(b'Content-Disposition: ; name="model"\r\n\r\nm', FILE), typed, 400, None, "invalid_form"),
        (raw(b"Content-Type: multipart/mixed; boundary=y\r\n\r\nm"), typed, 400, None, "invalid_form"),
        (raw(NAMED % b"model" + b"X: y\r\n" * 20 + b"\r\nm"), typed, 400, None, "invalid_form"),
        (raw(NAMED % b"model" + b"X: %b\r\n\r\nm" % (b"y" * 5000)), typed, 400, None, "invalid_form"),
        (raw(NAMED % b"model" + b"Content-Transfer-Encoding: base64\r\n\r\nbQ=="), typed, 415, None,
         "unsupported_media_type"),
        (raw(MODEL), typed, 400, "file", "missing_required_parameter"),
        (raw(MODEL, FILE, FILE), typed, 400, "file", "invalid_value"),
        (raw(FILE, NAMED % b"model[]" + b"\r\nm"), typed, 400, "model", "invalid_type"),
        (raw(MODEL, FILE, NAMED % b"temperature" + b"\r\n2"), typed, 400, "temperature", "invalid_value"),
        (raw(MODEL, FILE, NAMED % b"temperature" + b"\r\nnan"), typed, 400, "temperature", "invalid_value"),
        (raw(MODEL, FILE, NAMED % b"temperature" + b"\r\nhot"), typed, 400, "temperature", "invalid_type"),
        (raw(MODEL, FILE, NAMED % b"prompt" + b"\r\n\xff"), typed, 400, "prompt", "invalid_value"),
        (raw(MODEL, FILE, NAMED % b"prompt" + b"\r\n" + b"a" * 1001), typed, 413, "prompt", "request_too_large"),
        (raw(MODEL, *[NAMED % b"words[]" + b"\r\na"] * MAX_PARTS), typed, 413, None, "request_too_large"),
        (raw(MODEL, FILE + b"a" * (LARGEST + FIELDS)), typed, 413, None, "request_too_large"),
        (raw(NAMED % b"model" + b"\r\nother", FILE), typed, 404, "model", "model_not_found"),
        (raw(MODEL, FILE, NAMED % b"unknown" + b"\r\na"), typed, 400, "unknown", "unknown_parameter"),
    ]  # fmt: skip
    async with heard(monkeypatch, strict=True) as proxy:
        assert 200 == (await ask(proxy, raw(MODEL, FILE), **typed))[0]
        for body, headers, status, param, code in cases:
            for data in (body, _in_pieces(body)):
                got, answer = await ask(proxy, data, **headers)
                error = answer["error"]
                assert (status, param, code) == (got, error["param"], error["code"]), (body[:300], answer)


async def test_what_clients_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no form to the letter, and means something: each is taken."""
    typed = {"Content-Type": "multipart/form-data; boundary=x"}
    whole = raw(MODEL, FILE)
    cases: list[tuple[str, bytes, dict[str, str], dict[str, Any]]] = [
        ("a file without a name", raw(MODEL, NAMED % b"file" + b"\r\nf"), typed, {"file": ["file", "", 1, False]}),
        ("an empty name", raw(MODEL, FILE.replace(b'"f"', b'""')), typed, {"file": ["file", "", 1, False]}),
        ("a name that is not UTF-8", raw(MODEL, FILE.replace(b'"f"', b'"\xff"')), typed,
         {"file": ["\N{REPLACEMENT CHARACTER}", "", 1, False]}),
        ("a name in the form of RFC 8187", raw(MODEL, FILE.replace(b'filename="f"', b"filename*=UTF-8''%C3%BC.wav")),
         typed, {"file": ["\u00fc.wav", "", 1, False]}),
        ("both names", raw(MODEL, FILE.replace(b'"f"', b"\"?.wav\"; filename*=utf-8''%c3%bc%ff.wav")), typed,
         {"file": ["\u00fc\N{REPLACEMENT CHARACTER}.wav", "", 1, False]}),
        ("a name with quotes and semicolons", raw(MODEL, FILE.replace(b'"f"', b'"a\\"; b;.wav"')), typed,
         {"file": ['a"; b;.wav', "", 1, False]}),
        ("names without quotes", raw(MODEL.replace(b'"model"', b"model"), FILE.replace(b'"', b"")), typed, {}),
        ("heads in other letters", raw(MODEL.replace(b"Content-Disposition: ", b"content-disposition:"), FILE), typed,
         {}),
        ("more heads", raw(b"Content-Length: 1\r\nContent-Type: text/plain; charset=utf-8\r\n" + MODEL, FILE), typed,
         {}),
        ("a text with a name of a file", raw(MODEL.replace(b'"model"', b'"model"; filename="m"'), FILE), typed, {}),
        *(
            (f"an empty {name}", raw(MODEL, FILE, NAMED % name.encode() + b"\r\n"), typed, {})
            for name in ("temperature", "stream", "prompt", "words", "words[]")
        ),
        ("a list without brackets", raw(MODEL, FILE, NAMED % b"words" + b"\r\na", NAMED % b"words" + b"\r\nb"), typed,
         {"words": ["a", "b"]}),
        ("both kinds of lists", raw(MODEL, FILE, NAMED % b"words" + b"\r\na", NAMED % b"words[]" + b"\r\nb"), typed,
         {"words": ["a", "b"]}),
        ("a list with numbers", raw(MODEL, FILE, NAMED % b"words[0]" + b"\r\na", NAMED % b"words[1]" + b"\r\nb"), typed,
         {"words": ["a", "b"]}),
        ("a flag of Python", raw(MODEL, FILE, NAMED % b"stream" + b"\r\nTrue"), typed, {"stream": True}),
        ("a preamble", b"This is a form.\r\n" + whole, typed, {}),
        ("a preamble of an empty line", b"\r\n" + whole, typed, {}),
        ("a preamble with line feeds, and nearly boundaries", b"--\n--y\n\r\r-- x\n" + whole, typed, {}),
        ("an epilogue", whole + b"\r\nThe end.\r\n--x\r\n", typed, {}),
        ("no line break at the end", whole[:-2], typed, {}),
        ("blanks behind a boundary", whole.replace(b"\r\n--x\r\n", b"\r\n--x \t\r\n"), typed, {}),
        ("a boundary in quotes", whole, {"Content-Type": 'Multipart/Form-Data; charset=utf-8; BOUNDARY="x"'}, {}),
    ]  # fmt: skip
    async with heard(monkeypatch) as proxy:
        expected: dict[str, Any] = {"model": "m", "prompt": None, "temperature": None, "stream": None, "words": []}
        for name, body, headers, special in cases:
            for data in (body, _in_pieces(body, 1)):
                status, answer = await ask(proxy, data, **headers)
                assert 200 == status, (name, answer)
                assert {**expected, "file": ["f", "", 1, False], **special} == answer["body"], name


async def _in_pieces(body: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def test_slow_uploads_keep_nobody_out(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """They have what has arrived of them, and not what they promise; another key's upload does not wait for them."""
    typed = {"Content-Type": "multipart/form-data; boundary=x"}
    end, begun = asyncio.Event(), [asyncio.Event() for _ in range(8)]

    async def slow(number: int) -> AsyncIterator[bytes]:
        begun[number].set()
        yield raw(MODEL, FILE, end=b"")[:-2] + b"a" * 1000
        await end.wait()
        yield b"\r\n--x--"

    async with heard(monkeypatch, patience=10_000) as proxy:
        media = proxy.client.app[SERVICE].media
        tasks = [asyncio.create_task(ask(proxy, slow(number), "/v1/listen", **typed)) for number in range(len(begun))]
        for one in begun:
            await one.wait()
        # All have come: the first one has memory, and the others wait for it.
        while len(media._waiting) < len(begun) - 1:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        assert 200 == (await ask(proxy, raw(MODEL, FILE), "/v1/listen", **{**typed, "Authorization": "Bearer l"}))[0]
        # However many there are, they are admitted one after the other within seconds.
        for _ in range(4):
            assert media.reserved <= 2 * (LARGEST + FIELDS) + 10_000
            await clock.elapse(5.1)
            await turns(20)
        assert 200 == (await ask(proxy, raw(MODEL, FILE), "/v1/listen", **typed))[0]
        for _ in range(6):
            await clock.elapse(4)
            await turns(20)
        end.set()
        answers = await asyncio.gather(*tasks)
        assert 0 == media.reserved
    statuses = [status for status, _ in answers]
    assert 5 <= statuses.count(200)
    assert set(statuses) <= {200, 503}


async def test_who_may_not_send_one_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the form is read before the key is; a client that stops sending is not waited for."""

    async def endless() -> AsyncIterator[bytes]:
        yield raw(MODEL, end=b"")
        await asyncio.Event().wait()

    typed = {"Content-Type": "multipart/form-data; boundary=x"}
    async with heard(monkeypatch, patience=0.05) as proxy:
        assert 401 == (await ask(proxy, endless(), Authorization="Bearer x", **typed))[0]
        status, answer = await ask(proxy, endless(), **typed)
        assert (408, "request_timeout") == (status, answer["error"]["code"])
