"""The page's Markdown: what it makes of an answer, and that it takes no longer for hostile text than for other."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.extended import sample
from tests.programs import found, needs

MODULE = Path(__file__).parents[3] / "triton_openai/page/markdown.js"
LENGTH = 1_000_000
#: What is repeated, in one line.
HOSTILE = (
    "~~x", "~~x~~", "**x", "**x**", "*x", "*x ", "x* ", "_x", "_x_ ", "__x", "__x__ ", "***x", "***x***", "**_~~x",
    "x~~_** ", "*", "_", "~", "* ", "*_", "**__", "`", "``x", "`x", "`x``y", "\\`", "\\", "[", "]", "[]", "[a](",
    "[a](b", "[a]( ", '[a](b "', '[a](b "c" ', "![", "[a](((", "[a](()", "[a](b)", "[[a]](", "[*a](b", "[a](http://x)", "http://",
    "http://x.", "http://x ", "h", "<", ">", "> ", "# ", "- ", "-", "1. ", "|", "| a ", "|-", "a|b\\|", " ", "\t", "\r",
    "# \r", "- \r", "\u2028", "\u00e9*", "\U0001f600_", "x",
)  # fmt: skip
#: The same in lines of their own.
LINES = (
    "> > > > x\n",
    "- x\n",
    "1. *x\n",
    "```\n",
    "~~~x\n",
    "```py\n",
    "# x\n",
    "\n",
    "**x\n",
    "| a | b |\n",
    "a|b\n-|-\n",
    "|-|\n|-|\n\n",
    "`\n",
    "- - -\n",
    "    x\n",
)
#: Lines of code, each as long as one that has colours.
CODE = ("'", '"', "`", "//", "/*", "#", "1.", "if ", "\\'", "'\\", "x", " ")
#: What a repetition begins or ends with.
AROUND = (
    ("", ""),
    ("", "`"),
    ("**", "**"),
    ("# ", "\rx"),
    ("- ", "\r"),
    ("[", "](http://x)"),
    ("`", "`"),
    ("~~~", "`"),
)
LINK = '<a href="https://example.com/{0}">{1}</a>'
CASES: Mapping[str, str] = {
    "**a** *b* ~~c~~ __d__ _e_": "<strong>a</strong> <em>b</em> <del>c</del> <strong>d</strong> <em>e</em>",
    "***a***": "<strong><em>a</em></strong>",
    "**a *b* c**": "<strong>a <em>b</em> c</strong>",
    "*a **b** c*": "<em>a <strong>b</strong> c</em>",
    "**a *b** c*": "<strong>a *b</strong> c*",
    "**a": "**a",
    "a** b": "a** b",
    "** a **": "** a **",
    "2*3*4, f(**kw) and snake_case_name": "2*3*4, f(**kw) and snake_case_name",
    "a ****": "a ****",
    "`a` ``b`c`` `d": "<code>a</code> <code>b`c</code> `d",
    "`**a**` \\*b\\* \\a": "<code>**a**</code> *b* \\a",
    "`a\\` b": "<code>a\\</code> b",
    "[a](https://example.com/x)": LINK.format("x", "a"),
    '[*a*](<https://example.com/x> "t")': LINK.format("x", "<em>a</em>"),
    "![a]( https://example.com/a_(b) )": LINK.format("a_(b)", "a"),
    "[a](javascript:x) [b](/v1) [c](d e)": "[a](javascript:x) [b](/v1) [c](d e)",
    "see https://example.com/x. xhttps://a.b": f"see {LINK.format('x', 'https://example.com/x')}. xhttps://a.b",
    "a<b>&": "a&lt;b&gt;&amp;",
}
BLOCKS: Mapping[str, str] = {
    "- [ ] a\n- [x] b\n1. [X] c": '<ul><li>☐ a</li><li>☑ b</li></ul><ol start="1"><li>☑ c</li></ol>',
    "- [x](https://example.com/x)": f"<ul><li>{LINK.format('x', 'x')}</li></ul>",
    "- [y] a\n- [x]b": "<ul><li>[y] a</li><li>[x]b</li></ul>",
    "```c++ title\na": '<div data-language="c++"><button>Copy</button><pre><code>a</code></pre></div>',
    "~~~ yaml\na\n~~~": '<div data-language="yaml"><button>Copy</button><pre><code>a\n</code></pre></div>',
    "```\na": "<div><button>Copy</button><pre><code>a</code></pre></div>",
    "```py\n@f('x', 2.5)  # a \"b\"": '<div data-language="py"><button>Copy</button><pre><code>@f('
    "<span class=text>'x'</span>, <span class=number>2.5</span>)  "
    '<span class=comment># a "b"</span></code></pre></div>',
    "```Rust\nfn f<'a>() // b": '<div data-language="Rust"><button>Copy</button><pre><code>'
    "<span class=word>fn</span> f&lt;'a&gt;() <span class=comment>// b</span></code></pre></div>",
    '```json\n{"a": "http://b", "c': '<div data-language="json"><button>Copy</button><pre><code>{'
    '<span class=text>"a"</span>: <span class=text>"http://b"</span>, <span class=text>"c</span></code></pre></div>',
}


def rendered(texts: Sequence[tuple[str, str, int, str, int]]) -> list[str | int]:
    """
    Return the HTML of texts, and of long ones the number of elements.

    Of each there is its beginning, what is repeated, how often, its end, and of how many characters the pieces are in
    which it is written.
    """
    program = [found("Node.js"), str(Path(__file__).with_name("markdown.mjs")), str(MODULE)]
    # What takes more than a minute of CPU time is ended. A busy machine may take longer for it.
    limited = ["sh", "-c", 'ulimit -t 60 && exec "$@"', "sh", *program]
    done = subprocess.run(limited, input=json.dumps(texts), capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr[-2000:])
    return list(json.loads(done.stdout))


@needs("Node.js")
def test_what_spans_become() -> None:
    """Emphasis, code and links are elements, and what is none of them is text; however the answer is cut."""
    for size in (1, 3, 1000):
        html = rendered([("", text, 1, "", size) for text in CASES])
        assert {text: f"<div><p>{made}</p></div>" for text, made in CASES.items()} == dict(
            zip(CASES, html, strict=True)
        )


@needs("Node.js")
def test_blocks() -> None:
    """Lists, quotes, headings, rules and code blocks are made line by line."""
    text = "# A\n- a\n  - b\n\n1. c\n---\n> d\n> e\n\n~~~\n*f*\n~~~\n* * *\n**g\nh**"
    expected = (
        '<div><h3>A</h3><ul><li>a<ul><li>b</li></ul></li></ul><ol start="1"><li>c</li></ol><hr></hr>'
        "<blockquote>d\ne</blockquote><div><button>Copy</button><pre><code>*f*\n</code></pre></div><hr></hr>"
        "<p>**g\nh**</p></div>"
    )
    assert [expected] * 3 == rendered([("", text, 1, "", size) for size in (1, 5, 1000)])


@needs("Node.js")
def test_boxes_and_languages() -> None:
    """Tasks of a list have boxes, and a code block has the name of its language; however the answer is cut."""
    for size in (1, 1000):
        html = rendered([("", text, 1, "", size) for text in BLOCKS])
        assert {text: f"<div>{made}</div>" for text, made in BLOCKS.items()} == dict(zip(BLOCKS, html, strict=True))


@needs("Node.js")
def test_tables() -> None:
    """A line of columns makes the line before it the head of a table; what is too much or too little is mended."""
    text = "a\nb | *c*\n-- | :-:\n1 | `2\\|`\n|3\n|4|5|6|\n\nd | e\n| - |\n\nf | g\n- | -\nh\n"
    head = "<thead><tr><th>{}</th><th>{}</th></tr></thead>"
    row = "<tr><td>{}</td><td>{}</td></tr>"
    rows = row.format(1, "<code>2|</code>") + "<tr><td>3</td></tr>" + row.format(4, 5)
    expected = (
        f"<div><p>a</p><div><table>{head.format('b', '<em>c</em>')}<tbody>{rows}</tbody></table></div>"
        f"<p>d | e\n| - |</p><div><table>{head.format('f', 'g')}<tbody></tbody></table></div><p>h</p></div>"
    )
    assert [expected] * 3 == rendered([("", text, 1, "", size) for size in (1, 5, 1000)])


@pytest.mark.sampled
@needs("Node.js")
def test_hostile_text() -> None:
    """Time grows with the text alone, whatever it repeats, in one line or in many, at once or in pieces."""
    texts = [("", "~~x", LENGTH // 3, "\n", 2 * LENGTH)]
    texts += [("", one, LENGTH // 10 // len(one), "\n", LENGTH) for one in LINES]
    texts += [("```js\n", f"{one * (990 // len(one))}\n", 20, "", LENGTH) for one in CODE]
    for one in HOSTILE:
        count = LENGTH // 100 // len(one)
        texts.append(("", one, count, "", LENGTH // 1000))
        texts += [(begin, one, count, f"{end}\n", LENGTH) for begin, end in AROUND]
    nested = "".join(f"{'  ' * depth}- **x\n" for depth in range(300))
    # A table with many columns and short rows.
    texts.append(("a|" * 3000 + "\n" + "-|" * 3000 + "\n", "|\n", LENGTH // 100, "", LENGTH))
    texts.append(("", nested, 1, "", LENGTH))
    # Of each kind: those of one repetition are nine in a row.
    chosen = sample(texts, few=60)
    assert len(chosen) == len(rendered(chosen))
