"""
The documents of the repository, and the blocks of code in them.

A block is run by a test, or a comment directly above it says why it is not, or which test runs it::

    <!-- not run: needs a GPU -->
    <!-- run by tests/unit/test_chart.py -->
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "deploy/README.md"),
    *(path.relative_to(ROOT).as_posix() for top in ("docs", "examples") for path in sorted((ROOT / top).rglob("*.md"))),
)
#: Where the documents' service listens.
ADDRESS = "http://localhost:9000"
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<marker>(?:not run: |run by )[^\n]+) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$"
    r"(?:\n\n^ *```text\n(?P<output>.*?)^ *```$)?",
    re.DOTALL | re.MULTILINE,
)


#: Blocks of the same request in several languages, and the output of the programs among them.
_TABS = re.compile(
    r"^<!-- tabs -->$.*?^<!-- /tabs -->$(?:\n\n```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE
)
_PROGRAMS = ("python", "ts")


class Block(NamedTuple):
    """A block of code: where it is, its text, the output that the document shows below it, and its marker."""

    document: str
    line: int
    language: str
    code: str
    output: str
    marker: str

    @property
    def place(self) -> str:
        """The file and the line."""
        return f"{self.document}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, without lines that are comments; each may have several lines."""
        commands = []
        command = ""
        for line in re.sub(r"\\\n\s*", "", self.code).splitlines():
            command += line
            # Within quotes, the command goes on.
            if command.count("'") % 2:
                command += "\n"
                continue
            if command.strip() and not command.startswith("#"):
                commands.append(command)
            command = ""
        return commands


def read(document: str) -> str:
    """Return the text of *document*."""
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(*languages: str, documents: tuple[str, ...] = DOCUMENTS) -> list[Block]:
    """Return the blocks of *languages* in *documents*."""
    found = []
    for document in documents:
        text = read(document)
        tabs = list(_TABS.finditer(text))
        for match in _BLOCK.finditer(text):
            if match["language"] in languages:
                line = text.count("\n", 0, match.start("language")) + 1
                code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
                output = match["output"] or ""
                if match["language"] in _PROGRAMS:
                    around = [tab for tab in tabs if tab.start() < match.start() < tab.end()]
                    output = "".join(tab["output"] or "" for tab in around) or output
                found.append(Block(document, line, match["language"], code, output, match["marker"] or ""))
    return found
