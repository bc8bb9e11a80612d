"""
Text files in chats: which types are accepted, and how a prompt shows them.

A file counts as text of its request, in base64, so it is within the limit of the body's text before it is decoded.
"""

from __future__ import annotations

import binascii
import re

from triton_openai.errors import InvalidRequest, UnsupportedParameter, printable
from triton_openai.media.images import DATA_URL, MAX_HEAD_CHARS, is_data_url

# Types outside of text/ whose files are text. What has no type, or only that of bytes, is judged by its content.
_TEXT = re.compile(
    r"(text/.*|application/([\w.-]+\+)?(json|x-ndjson|jsonl|csv|xml|x?-?yaml|toml|markdown|javascript|sql|x-sh)"
    r"|application/octet-stream|)"
)
_MAX_NAME_CHARS = 255
_NOT_IN_NAMES = re.compile(r'["<>]|[^ -~\w]')


def render(name: str | None, text: str) -> str:
    """Return the *text* of a file as a prompt shows it, between lines that name the file."""
    if name is None:
        called = ""
    else:
        called = f' name="{_NOT_IN_NAMES.sub("_", name[:_MAX_NAME_CHARS])}"'
    return f"<file{called}>\n{text}\n</file>"


def decode(data: str, name: str | None) -> str:
    """
    Return the text of a file: *data* is base64, or a data URL with it.

    Raises :class:`UnsupportedParameter` for files that are not text, and :class:`InvalidRequest` for what is not UTF-8.
    """
    if name:
        called = f"The file '{printable(name, 100)}'"
    else:
        called = "The file"
    kind = ""
    if is_data_url(data):
        head = DATA_URL.match(data[:MAX_HEAD_CHARS])
        if head is None or head["base64"] is None:
            raise InvalidRequest("A file's data URL must have the form data:text/plain;base64,...", code="invalid_file")
        kind = head["type"].strip().lower()
        data = data[head.end() :]
    try:
        content = binascii.a2b_base64("".join(data.split()).encode("ascii"), strict_mode=True)
    except ValueError as error:
        raise InvalidRequest(f"{called} is not valid base64.", code="invalid_base64") from error
    if content.startswith(b"%PDF-"):
        kind = "application/pdf"
    if not _TEXT.fullmatch(kind):
        raise UnsupportedParameter(f"{called} is of type '{printable(kind, 100)}'; only files of text are supported.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{called} is not text in UTF-8.", code="invalid_file") from error
