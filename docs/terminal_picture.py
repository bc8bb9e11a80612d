"""
Draws the recording of the demo: ``python -m docs.terminal_picture`` writes ``docs/images/demo.svg`` from ``demo.cast``.

It understands what the demo writes: text, line ends, and the escape sequences for bold and for colours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

_IMAGES = Path(__file__).parent / "images"
_CHARACTER_WIDTH = 8.4
_LINE_HEIGHT = 19
_PADDING = 16
_TITLE_HEIGHT = 34
# Seconds of the recording that pass before the first output are left out, but for this.
_LEAD = 0.5
_STYLES = {"1": "bold", "2": "dim", "31": "red", "32": "green", "33": "yellow", "36": "cyan"}
_ESCAPE = re.compile(r"\x1b\[([\d;]*)m|(\r?\n)")
_CSS = """
    text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d7dde5; white-space: pre; }
    .bold { font-weight: 700; fill: #ffffff; } .dim { fill: #8b95a3; } .green { fill: #6fd08c; }
    .red { fill: #ff8080; } .yellow { fill: #e8c36a; } .cyan { fill: #6ec6d9; }
    .later { opacity: 0; animation: appear 1ms linear forwards; }
    @keyframes appear { to { opacity: 1; } }
    @media (prefers-reduced-motion: reduce) { .later { animation: none; opacity: 1; } }
"""


def spans(recording: str) -> Iterator[tuple[float, int, int, str, str]]:
    """Yield what *recording* shows: the time in seconds, the line, the column, the style, and the text."""
    line = 0
    column = 0
    style = ""
    first = None
    for event in recording.splitlines()[1:]:
        at, _, data = json.loads(event)
        if first is None:
            first = at
        end = 0
        for match in [*_ESCAPE.finditer(data), None]:
            text = data[end : match.start()] if match else data[end:]
            if text:
                yield at - first, line, column, style, text
                column += len(text)
            if match is None:
                continue
            end = match.end()
            if match[2]:
                line += 1
                column = 0
            else:
                style = _STYLES.get(match[1], "")


def drawn(recording: str) -> str:
    """Return the picture of *recording* as SVG, in which each piece of text appears at its time."""
    pieces = list(spans(recording))
    columns = max(column + len(text) for _, _, column, _, text in pieces)
    lines = max(line for _, line, _, _, _ in pieces) + 1
    width = round(columns * _CHARACTER_WIDTH + 2 * _PADDING)
    height = lines * _LINE_HEIGHT + 2 * _PADDING + _TITLE_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="make demo: the models, a chat and a tool call in a terminal">',
        f"<style>{_CSS}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#14181f"/>',
        f'<text x="{_PADDING}" y="{_PADDING + 10}">'
        '<tspan class="dim">$ </tspan><tspan class="bold">make demo</tspan></text>',
    ]
    for at, line, column, style, text in pieces:
        if not text.strip():
            continue
        x = _PADDING + column * _CHARACTER_WIDTH
        y = _TITLE_HEIGHT + _PADDING + line * _LINE_HEIGHT + 10
        delay = ""
        names = style
        if at:
            names = f"{style} later".strip()
            delay = f' style="animation-delay:{_LEAD + at:.2f}s"'
        length = len(text) * _CHARACTER_WIDTH
        parts.append(
            f'<text class="{names}" x="{x:.1f}" y="{y}" textLength="{length:.1f}"{delay} xml:space="preserve">'
            f"{escape(text)}</text>"
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the picture."""
    recording = (_IMAGES / "demo.cast").read_text(encoding="utf-8")
    (_IMAGES / "demo.svg").write_text(drawn(recording), encoding="utf-8")


if __name__ == "__main__":
    main()
