"""Names of models that are safe to hand to a Triton, which makes paths of files from them."""

from __future__ import annotations

import re

from triton_openai.errors import InvalidRequest

# The longest name of a folder on the usual file systems.
_LONGEST = 255
_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_name(name: str) -> None:
    """
    Raise :class:`InvalidRequest` for what cannot be the name of a folder in a model repository.

    Triton 2.51 takes ``..`` for a model, and reads its configuration from outside of the repository.
    """
    if not name:
        raise InvalidRequest("The model's name is empty.", param="model", code="invalid_value")
    if name in (".", "..") or _FORBIDDEN.search(name):
        raise InvalidRequest(
            "The model's name is none of a folder in a model repository.", param="model", code="invalid_value"
        )
    if len(name.encode()) > _LONGEST:
        raise InvalidRequest(f"The model's name is longer than {_LONGEST} bytes.", param="model", code="invalid_value")
