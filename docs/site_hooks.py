"""
What MkDocs does with the Markdown of the repository before it writes the site, see ``mkdocs.yml``.

The documents stay plain Markdown that GitHub shows as well. Two things are changed for the site: links to files outside
of ``docs/`` lead to the repository, and blocks of the same request in several languages become tabs.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()(\.\.?/[^)\s]+)(\))")
#: Between these comments, each paragraph that is one bold word is the name of a tab.
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->$", re.DOTALL | re.MULTILINE)
_TAB = re.compile(r"^\*\*([^*\n]+)\*\*\n", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the Markdown that MkDocs renders (MkDocs calls it for each page)."""
    base = f"{config['repo_url'].rstrip('/')}/blob/main"
    return with_tabs(with_repository_links(markdown, page.file.src_uri, base))


def with_repository_links(markdown: str, document: str, base: str) -> str:
    """Return *markdown* of a *document* (its path in ``docs/``), in which links out of ``docs/`` begin with *base*."""
    folder = posixpath.dirname(posixpath.join("docs", document))

    def absolute(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        if path.startswith("docs/"):
            return match[0]
        return f"{match[1]}{base}/{path}{match[3]}"

    parts = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        parts.append(_LINK.sub(absolute, markdown[end : fence.start()]))
        parts.append(fence[0])
        end = fence.end()
    parts.append(_LINK.sub(absolute, markdown[end:]))
    return "".join(parts)


def with_tabs(markdown: str) -> str:
    """Return *markdown* in which blocks between the comments for tabs are tabs."""
    return _TABS.sub(_tabs, markdown)


def _tabs(match: re.Match[str]) -> str:
    _, *parts = _TAB.split(match[1])
    lines = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        lines.append(f'=== "{name}"')
        lines.append("")
        lines += [f"    {line}".rstrip() for line in text.strip("\n").splitlines()]
        lines.append("")
    return "\n".join(lines)
