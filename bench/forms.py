"""Forms with a file, as ``multipart/form-data`` (RFC 7578)."""

from __future__ import annotations

from collections.abc import Mapping

# It must not be in the contents.
_BOUNDARY = "7b3e0f5c41d84a6f"
#: The content type of every form.
FORM_TYPE = f"multipart/form-data; boundary={_BOUNDARY}"


def form_with_file(fields: Mapping[str, str], content: bytes, name: str) -> bytes:
    """Return a form with *fields*, and then a file with *content* that is called *name*."""
    start = f"--{_BOUNDARY}\r\nContent-Disposition: form-data; "
    head = "".join(f'{start}name="{field}"\r\n\r\n{value}\r\n' for field, value in fields.items())
    head += f'{start}name="file"; filename="{name}"\r\n\r\n'
    return head.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()
