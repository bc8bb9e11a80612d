"""The site of the documents, and the pictures in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs import charts, site_hooks, terminal_picture
from tests.cases import every_case
from tests.documents import ROOT

BASE = "https://example.com/blob/main"
LINKS = {
    "[a](../../examples/vllm/README.md)": f"[a]({BASE}/examples/vllm/README.md)",
    "[a](../../CONTRIBUTING.md#b)": f"[a]({BASE}/CONTRIBUTING.md#b)",
    "[a](../reference/errors.md)": "[a](../reference/errors.md)",
    "[a](models.md) [b](https://x/../y)": "[a](models.md) [b](https://x/../y)",
    "```sh\n[a](../../Makefile)\n```\n[a](../../Makefile)": f"```sh\n[a](../../Makefile)\n```\n[a]({BASE}/Makefile)",
}
TABS = """Before.

<!-- tabs -->
**Python**

```python
if a:

    b
```

**curl**

```sh
c
```
<!-- /tabs -->

After.
"""


@every_case("markdown, expected", LINKS.items())
def test_links_out_of_the_documents(markdown: str, expected: str) -> None:
    """They lead to the repository; others, and what looks like one in code, stay."""
    assert expected == site_hooks.with_repository_links(markdown, "guides/a.md", BASE)


def test_tabs() -> None:
    """Blocks of code become tabs, whose text is indented; empty lines stay empty."""
    written = site_hooks.with_tabs(TABS)

    assert (
        'Before.\n\n=== "Python"\n\n    ```python\n    if a:\n\n        b\n    ```\n\n=== "curl"\n\n    ```sh'
        in written
    )
    assert written.endswith("    ```\n\n\nAfter.\n")


def test_pictures_are_current() -> None:
    """They are what their programs draw."""
    images = ROOT / "docs/images"

    assert charts.drawn(charts.PANELS) == (images / "cost.svg").read_text()
    assert terminal_picture.drawn((images / "demo.cast").read_text()) == (images / "demo.svg").read_text()


@pytest.mark.extended
def test_the_site(tmp_path: Path) -> None:
    """MkDocs finds nothing to warn of, such as a link that leads nowhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert 0 == build.returncode, build.stderr
    assert "Search" in (tmp_path / "index.html").read_text()
