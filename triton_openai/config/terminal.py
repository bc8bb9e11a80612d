"""Whether a terminal shows colours, and its user wants them."""

from __future__ import annotations

import os


def shows_colours(stream: object) -> bool:
    """
    Return whether to write colours to *stream*, which may be None: to a terminal, unless its user wants none.

    Source: https://no-color.org, and the terminal type ``dumb``.
    """
    is_terminal = getattr(stream, "isatty", None)
    if is_terminal is None or not is_terminal():
        return False
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
