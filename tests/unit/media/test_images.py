"""Image files and data URLs: what is taken, and that nothing else is."""

from __future__ import annotations

import base64
import hashlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.pictures import data_url, png
from triton_openai.errors import InvalidRequest
from triton_openai.generation import Image
from triton_openai.media import images
from triton_openai.media.images import from_base64, from_bytes, from_data_url, is_data_url, media_type_of

HEADS = {
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF\0\1",
    "image/png": b"\x89PNG\r\n\x1a\n\0\0\0\r",
    "image/gif": b"GIF89a\1\0\1\0\0\0",
    "image/webp": b"RIFF\x24\0\0\0WEBP",
    "image/bmp": b"BM\x46\0\0\0\0\0\0\0\x36\0",
    "image/tiff": b"II*\0\x08\0\0\0\0\0\0\0",
}
LIMIT = 10_000_000


def encoded(data: bytes) -> str:
    """Return *data* in base64."""
    return base64.b64encode(data).decode()


@every_case("kind", HEADS)
async def test_formats(kind: str) -> None:
    """The first bytes decide, whichever way the file came and whatever it was said to be."""
    file = HEADS[kind] + b"rest"

    assert kind == (await from_bytes(file)).media_type
    assert kind == (await from_base64(encoded(file))).media_type
    assert kind == (await from_data_url(data_url(file, "image/heic"), max_size=LIMIT)).media_type


@every_case("head", [b"", b"G", b"RIFF\0\0\0\0WAVE", b"<svg xmlns=", b"%PDF-1.7", b"\0" * 12, b"GIF88a"])
async def test_what_is_no_image(head: bytes) -> None:
    """Other files are refused, with the formats that are taken."""
    assert media_type_of(head) is None
    with pytest.raises(InvalidRequest, match="JPEG, PNG, GIF, WebP"):
        await from_bytes(head)


@given(st.sampled_from(sorted(HEADS.values())), st.binary(max_size=200))
async def test_both_ways_give_the_same(head: bytes, rest: bytes) -> None:
    """A file given in base64 and the same file fetched are one image, bit for bit."""
    file = head + rest

    fetched = await from_bytes(file)

    assert fetched == await from_base64(encoded(file))
    assert file == base64.b64decode(fetched.base64, validate=True)
    assert len(file) == fetched.size
    assert 0 < fetched.digest < 2**63


@given(st.integers(1, 40), st.integers(0, 3))
async def test_slices_join(slices: int, rest: int) -> None:
    """Work in slices gives what work in one piece gives."""
    file = png(slices, size=slices * 7 + rest)
    whole = await from_bytes(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_SLICE", 8)
        assert whole == await from_bytes(file)
        assert whole == await from_base64(encoded(file))
    expected = hashlib.sha256(encoded(file).encode()).digest()
    assert int.from_bytes(expected[:8], "big") >> 1 == whole.digest


@given(st.text(alphabet="AB9+/=-_\n é", max_size=24).map(lambda tail: encoded(HEADS["image/png"]) + tail))
async def test_wrong_base64_never_passes(text: str) -> None:
    """What is taken is what a strict decoder takes, so no backend can fail on it."""
    with suppress(InvalidRequest):
        image = await from_base64(text)
        decoded = base64.b64decode(text.encode("ascii"), validate=True)
        assert HEADS["image/png"] == decoded[:12]
        assert len(decoded) == image.size


@given(st.text(max_size=300), st.sampled_from(["", "data:", "data:image/png;base64,", "DATA:image/png;a=b;BASE64,"]))
async def test_no_url_breaks_it(text: str, prefix: str) -> None:
    """Whatever stands there: an image or a refusal."""
    url = prefix + text
    with suppress(InvalidRequest):
        image = await from_data_url(url, max_size=LIMIT)
        assert is_data_url(url)
        assert media_type_of(base64.b64decode(image.base64, validate=True)) == image.media_type


@every_case(
    "head",
    [
        "data:image/png;base64,",
        "DATA:Image/PNG;Base64,",
        "data:image/png;charset=utf-8;base64,",
        "data: image/x ;base64,",
    ],
)
async def test_heads_of_data_urls(head: str) -> None:
    """Case and parameters are of no account."""
    assert png() == base64.b64decode((await from_data_url(head + encoded(png()), max_size=LIMIT)).base64)


@every_case(
    "url,code",
    [
        ("data:,x", "invalid_image_url"),
        ("data:image/png,x", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:image/png;base64;x=y,AAAA", "invalid_image_url"),
        ("data:" + "image/png" * 1000 + ";base64,AAAA", "invalid_image_url"),
        ("data:;base64,AAAA", "invalid_image_format"),
        ("data:text/html;base64,AAAA", "invalid_image_format"),
        ("data:image/png;base64,", "invalid_image_format"),
        ("data:image/png;base64,====", "invalid_base64"),
        ("data:image/png;base64,AA%3D%3D", "invalid_base64"),
        ("data:image/png;base64,AAAA", "invalid_image_format"),
    ],
)
async def test_wrong_data_urls(url: str, code: str) -> None:
    """Each mistake has its code."""
    with pytest.raises(InvalidRequest) as caught:
        await from_data_url(url, max_size=LIMIT)
    assert code == caught.value.code
    assert len(caught.value.message) < 300


async def test_line_breaks() -> None:
    """Encoders that break lines are understood, and what is passed on has none."""
    file = png(size=500)
    broken = base64.encodebytes(file).decode().replace("\n", "\r\n")

    for text in (broken, f"{encoded(file)}\n"):
        assert encoded(file) == (await from_data_url(f"data:image/png;base64,{text}", max_size=LIMIT)).base64


@every_case("over,taken", [(0, True), (1, False), (2, False)])
async def test_the_limit_is_exact(over: int, taken: bool) -> None:
    """A file of just the limit is taken, one byte more is not; nothing is decoded to know it."""
    file = png(size=100)
    if taken:
        assert len(file) == (await from_data_url(data_url(file), max_size=len(file))).size
        return
    with pytest.raises(InvalidRequest) as caught:
        await from_data_url(data_url(file + b"\0" * over), max_size=len(file))
    assert "image_too_large" == caught.value.code


def test_an_image_does_not_show_itself() -> None:
    """What prints an image, a log among others, prints no data of it."""
    image = Image(media_type="image/png", base64="SECRET==", size=4, digest=1)

    assert "SECRET" not in repr((image,))
    assert "SECRET" not in f"{image}"
