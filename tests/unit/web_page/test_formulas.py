"""The page's formulas: what is one, what is shown until it is typeset, and that none takes long."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.programs import found, needs
from tests.unit.web_page.test_markdown import rendered

PAGE = Path(__file__).parents[3] / "triton_openai/page"
LENGTH = 20_000
#: What is repeated, in one line and in lines of their own.
HOSTILE = (
    "$", "$$", "$x", "$x ", "$x$", "$$x", "$$x$$", "\\$", "$\\$", "$`", "`$`", "\\(", "\\[", "\\(x\\)", "\\[x\\]",
    "\\)", "\\(\\[", "$\\(", "\\\\(", "$x\\", "*$", "**$x$",
)  # fmt: skip
#: Not formulas.
TEXTS = (
    "It costs $5 to $10.",
    "$5-$6, US$7 and US$8, $1,000/$2,000",
    "$HOME/$USER and $PATH",
    "a $ b $ c",
    "\\$x\\$",
    "$$$x$$$",
    "a $$x$",
    "$ x$ and $x $",
)


def html(text: str) -> str:
    """Return the HTML of *text*, where the source of a formula is in `⟨⟩`, or in `⟪⟫` if it is one of its own."""
    text = re.sub(r"⟨(.*?)⟩", r"<span class=math><code>\1</code></span>", text)
    return re.sub(r"⟪(.*?)⟫", r"<span class=math display><code>\1</code></span>", text, flags=re.DOTALL)


CASES: Mapping[str, str] = {
    **{text: f"<p>{text}</p>".replace("\\$", "$") for text in TEXTS},
    "the $n$th, $a_1$ and $b_2$, for $5": "<p>the ⟨$n$⟩th, ⟨$a_1$⟩ and ⟨$b_2$⟩, for $5</p>",
    "\\(a*b*c\\) \\[d\\] $$e$$.": "<p>⟨\\(a*b*c\\)⟩ ⟪\\[d\\]⟫ ⟪$$e$$⟫.</p>",
    "**$a$** `$b$`": "<p><strong>⟨$a$⟩</strong> <code>$b$</code></p>",
    "\\(a \\[\\] \\( \\)": "<p>⟨\\(a \\[\\] \\( \\)⟩</p>",
    "\\(a \\[\\]": "<p>(a []</p>",
    "```\n$a$\n\\[\n```": "<div><button>Copy</button><pre><code>$a$\n\\[\n</code></pre></div>",
    "\\[\na\n\\] b\nc": "<div><code>\\[\na\n</code>⟪\\[\na\n\\]⟫<p>b</p></div><p>c</p>",
    "a\n$$\nb\n$$": "<p>a</p><div><code>$$\nb\n</code>⟪$$\nb\n$$⟫</div>",
    "- a\n  \\[ b\n  c \\]": "<ul><li>a<div><code>\\[ b\n</code>⟪\\[ b\n  c \\]⟫</div></li></ul>",
    "1. $$\n   a $$\n2. b": '<ol start="1"><li><div><code>$$\n</code>⟪$$\n   a $$⟫</div></li><li>b</li></ol>',
    "$$\na\n\n**b**": "<div><code>$$\na\n</code></div><p><strong>b</strong></p>",
}
#: What is repeated as one formula as long as the page typesets, and what ends each.
FORMULAS = (
    "{", "}", "x^", "x_", "\\frac", "\\frac{", "\\sqrt{", "\\left(", "\\left(x\\right)", "&", "\\\\", "\\text{",
    "\\hat{", "\\begin{matrix}", "\\begin{matrix}x\\end{matrix}", "\\pmod{", "\\operatorname{", "\\Set{", "\\implies ",
    "\\overbrace{", "\\color{red}", "\\xrightarrow{", "\\mathchoice{", "\\tag{", "\\not", "'", "\\over", "\u00e9",
    "\\def\\a{\\a}\\a", "\\edef\\a{\\a\\a}", "\\let\\a\\b", "\\newcommand\\a{b}", "x \\sum\\limits_", "\\verb|x|",
)  # fmt: skip
LONGEST = 3000


@needs("Node.js")
def test_what_is_a_formula() -> None:
    """Each notation is found, in a line and over lines, prices and variables are text; however the answer is cut."""
    for size in (1, 3, 1000):
        shown = rendered([("", text, 1, "", size) for text in CASES])
        expected = {text: f"<div>{html(made)}</div>" for text, made in CASES.items()}
        assert expected == dict(zip(CASES, shown, strict=True))


@needs("Node.js")
def test_hostile_marks() -> None:
    """Time grows with the text alone, whatever marks of formulas it repeats."""
    texts = []
    for one in HOSTILE:
        count = LENGTH // 10 // len(one)
        texts.append(("", one, count, "", LENGTH // 1000))
        texts.append(("", one, count, "\n", LENGTH))
        texts.append(("", f"{one}\n", count, "", LENGTH))
    texts.append(("\\[\n", "x\n", LENGTH // 2, "", LENGTH // 100))
    assert len(texts) == len(rendered(texts))


def typeset(formulas: Sequence[str]) -> list[str | None]:
    """Return the markup of formulas; None for what stays a source."""
    program = [found("Node.js"), str(Path(__file__).with_name("formulas.mjs")), str(PAGE)]
    limited = ["sh", "-c", 'ulimit -t 60 && exec "$@"', "sh", *program]
    done = subprocess.run(limited, input=json.dumps(formulas), capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr[-2000:])
    return list(json.loads(done.stdout))


@needs("Node.js")
def test_hostile_formulas() -> None:
    """No formula takes long, and none that defines macros is typeset: they could double each other."""
    doubled = "\\def\\a{xx}" + "\\edef\\a{\\a\\a}" * 40 + "\\a"
    made = typeset([one * (LONGEST // len(one)) for one in FORMULAS] + [doubled])
    assert made[-1] is None
    # Some are whole, so that there is something to typeset.
    assert any(made)
    assert [None] * 4 == [made[number] for number, one in enumerate(FORMULAS) if "\\a" in one]


@needs("Node.js")
def test_broken_and_trusted_formulas() -> None:
    """A broken formula, or one that would load or link something, stays a source."""
    shown, *sources = typeset(
        [
            "\\frac{a}{b}",
            "\\frac{a",
            "\\nosuchcommand",
            "\\href{javascript:pwned=1}{x}",
            "\\url{https://example.com}",
            "\\includegraphics{https://example.com/x.png}",
            "{" * 41 + "}" * 41,
        ]
    )
    assert shown is not None
    assert "<mfrac><mi>a</mi><mi>b</mi></mfrac>" in shown
    assert [None] * 6 == sources
