"""Shapes of forms that are slow to parse for parsers that go through them byte by byte or line by line."""

from __future__ import annotations

from collections.abc import Sequence

#: Bytes of a form that is hostile. Its boundary is xx.
SIZE = 60_000_000
HEAD = b'--xx\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
LONG = b"b" * 70

#: What is sent once, and then again and again. None of it may take more than what is not contents may have.
OVERHEAD: list[tuple[str, bytes, bytes]] = [
    ("line feeds", b"", b"\n"),
    ("carriage returns", b"", b"\r"),
    ("line breaks", b"", b"\r\n"),
    ("hyphens", b"", b"-"),
    ("hyphens in lines", b"", b"\n--"),
    ("lines that are nearly a boundary", b"", b"\r\n--x"),
    ("boundaries within lines", b"", b"a--xx"),
    ("a preamble of text", b"", b"words "),
    ("zeros", b"", b"\0"),
    ("empty heads", b"", b"--xx\r\n\r\n\r\n"),
    ("boundaries", b"", b"--xx\r\n"),
    ("ends", b"", b"--xx--\r\n"),
    ("parts of one byte", b"", HEAD + b"a\r\n"),
    ("parts without contents", b"", HEAD + b"\r\n"),
    ("lines of a head", b"--xx\r\n", b"a:\r\n"),
    ("a name in a head", b"--xx\r\n", b"a"),
    ("blanks in a head", b"--xx\r\na:", b" "),
    ("a value in a head", b"--xx\r\na:", b"b"),
    ("carriage returns in a head", b"--xx\r\na:", b"\r"),
    ("semicolons", b"--xx\r\nContent-Disposition: form-data; name=", b";"),
    ("long heads", b"", b"--xx\r\nContent-Disposition: form-data; name=a\r\nb: " + b"c" * 4000 + b"\r\n\r\na\r\n"),
    ("blanks behind a boundary", HEAD + b"\r\n--xx", b" "),
    ("an epilogue of line breaks", HEAD + b"\r\n--xx--", b"\r\n"),
    ("an epilogue of hyphens", HEAD + b"\r\n--xx--", b"--"),
    ("an epilogue of parts", HEAD + b"\r\n--xx--\r\n", HEAD),
    ("contents that begin like the next boundary", HEAD, b"\r\n--xxa"),
    ("contents that begin like a part", HEAD, b"\r\n--xx\r"),
    ("contents that begin like the end", HEAD, b"\r\n--xx-"),
]
#: What is contents, however it looks.
CONTENTS: Sequence[bytes] = [
    *(
        b"\n",
        b"\r",
        b"\r\n",
        b"-",
        b"\r\n-",
        b"\r\n--",
        b"\r\n--x",
        b"\r\n--xy",
        b"\r\n\r\n--x",
        b"--xx",
        b"--xx--",
        b"\0",
        b"a",
    ),
    *(b"\n--xx\r\n", b"\r--xx", b"\r\n--" + LONG),
]
