"""
JSON that clients read line by line.

Python's ``str.splitlines``, by which ``iter_lines`` of httpx and so of ``openai`` splits text, ends a line at U+0085,
U+2028 and U+2029 too. JSON allows them in texts, where they can be escaped. The other characters that end a line there
are control characters below U+0020, which JSON always escapes.
"""

from __future__ import annotations

# In UTF-8, and as JSON's escapes.
_ESCAPES = (
    (b"\xc2\x85", rb"\u0085"),
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
)


def escape_line_breaks(data: bytes) -> bytes:
    """Return the JSON *data* with escapes in place of the characters at which a client might break it."""
    if data.isascii():
        # Most are, and tokens come one by one.
        return data
    for character, escape in _ESCAPES:
        data = data.replace(character, escape)
    return data
