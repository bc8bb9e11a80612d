"""
Draws the chart of the README: ``python -m docs.charts`` writes ``docs/images/cost.svg``.

The figures are medians of alternating runs, see ``docs/explanation/performance.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

_PICTURE = Path(__file__).parent / "images" / "cost.svg"
_WIDTH = 860
_LABEL_WIDTH = 300
_BAR_WIDTH = 430
_BAR_HEIGHT = 20
_ROW_HEIGHT = 28
_HEAD_HEIGHT = 62
_GAP = 18
_CSS = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2733; }
    .title { font-weight: 650; font-size: 16px; } .note { font-size: 12.5px; fill: #5b6675; }
    .bar { fill: #9aa7b8; } .own { fill: #0f8b8d; } .ground { fill: #ffffff; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e3e8ef; } .note { fill: #9aa5b4; } .bar { fill: #64748b; } .own { fill: #2bb3b1; }
      .ground { fill: #0d1117; }
    }
"""


class Bar(NamedTuple):
    """A subject and its figure; *own* bars are this service's."""

    name: str
    value: float
    own: bool = False


class Panel(NamedTuple):
    """Bars of one unit, with what was measured."""

    title: str
    note: str
    bars: Sequence[Bar]


PANELS = (
    Panel(
        "CPU for a token, in µs: less is better",
        "Two cores, 128 streams of 50 tokens/s, one Triton 2.51. All processes: front end, Triton and its model.",
        (
            Bar("nginx, which only relays", 122),
            Bar("triton-openai over HTTP", 147, own=True),
            Bar("openai_trtllm (Rust)", 166),
            Bar("triton-openai over gRPC", 181, own=True),
            Bar("NVIDIA's frontend, uvloop", 208),
            Bar("NVIDIA's frontend, as installed", 312),
        ),
    ),
    Panel(
        "Tokens a second: more is better",
        "The same two cores, 256 streams that ask for 12,800 tokens/s.",
        (
            Bar("nginx, which only relays", 11_219),
            Bar("triton-openai over HTTP", 11_036, own=True),
            Bar("triton-openai over gRPC", 9_722, own=True),
            Bar("openai_trtllm (Rust)", 7_681),
            Bar("NVIDIA's frontend, uvloop", 5_770),
        ),
    ),
    Panel(
        "One H100, a vLLM engine, 128 streams: tokens a second",
        "Means of two runs. What stands before Triton's vLLM backend does not matter: the backend is the limit.",
        (
            Bar("vLLM's own server, no Triton", 14_060),
            Bar("triton-openai over gRPC", 6_923, own=True),
            Bar("Triton alone, no front end", 6_618),
            Bar("triton-openai over HTTP", 6_277, own=True),
            Bar("NVIDIA's frontend", 5_268),
        ),
    ),
    Panel(
        "The same without the limit: the companion model, 128 streams",
        "Two cores, vLLM with an engine that computes nothing. Not measured on a GPU yet.",
        (
            Bar("triton-openai, companion model", 15_468, own=True),
            Bar("vLLM's own server, no Triton", 12_228),
        ),
    ),
)  # fmt: skip


def drawn(panels: Sequence[Panel]) -> str:
    """Return the chart as SVG, which follows the reader's light or dark theme."""
    height = sum(_HEAD_HEIGHT + _ROW_HEIGHT * len(panel.bars) + _GAP for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'role="img" aria-label="CPU for a token and tokens a second, beside other front ends">',
        f"<style>{_CSS}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="8"/>',
    ]
    top = 0
    for panel in panels:
        parts.append(f'<text class="title" x="16" y="{top + 26}">{escape(panel.title)}</text>')
        parts.append(f'<text class="note" x="16" y="{top + 46}">{escape(panel.note)}</text>')
        top += _HEAD_HEIGHT
        largest = max(bar.value for bar in panel.bars)
        for bar in panel.bars:
            parts += _row(bar, top, _BAR_WIDTH * bar.value / largest)
            top += _ROW_HEIGHT
        top += _GAP
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _row(bar: Bar, top: int, width: float) -> list[str]:
    kind = "bar"
    if bar.own:
        kind = "own"
    baseline = top + 15
    return [
        f'<text x="16" y="{baseline}">{escape(bar.name)}</text>',
        f'<rect class="{kind}" x="{_LABEL_WIDTH}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="3"/>',
        f'<text x="{_LABEL_WIDTH + width + 8:.1f}" y="{baseline}">{bar.value:,}</text>',
    ]


def main() -> None:
    """Write the chart."""
    _PICTURE.write_text(drawn(PANELS), encoding="utf-8")


if __name__ == "__main__":
    main()
