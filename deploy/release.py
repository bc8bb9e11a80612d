"""
What a release needs of this checkout, for ``.github/workflows/release.yml``.

    release.py check VERSION    compare VERSION with the package, the chart and the changelog
    release.py notes VERSION    print what the changelog says of VERSION
    release.py readme VERSION   write the address of VERSION's files into the links of README.md, which PyPI shows
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def versions() -> dict[str, str]:
    """Return the version that each file says."""
    package = (ROOT / "triton_openai" / "__init__.py").read_text(encoding="utf-8")
    chart = (ROOT / "deploy" / "helm" / "triton-openai" / "Chart.yaml").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    return {
        "triton_openai/__init__.py": re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)[0],
        "version of Chart.yaml": re.findall(r"^version: (\S+)$", chart, re.MULTILINE)[0],
        "appVersion of Chart.yaml": re.findall(r"^appVersion: (\S+)$", chart, re.MULTILINE)[0],
        "CITATION.cff": re.findall(r"^version: (\S+)$", citation, re.MULTILINE)[0],
    }


def notes(version: str) -> str:
    """Return the section of *version* in the changelog, with links that work outside. Raises ValueError without one."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## \[?{re.escape(version)}\]?[^\n]*\n(.*?)(?=^## |^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise ValueError(f"CHANGELOG.md has no section for {version}.")
    # Relative links lead nowhere from the page of a release: the words stay.
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", section[1]).strip()


def readme(version: str) -> str:
    """Return the README with links that work outside of the repository: to the files and pictures of *version*."""
    settings = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    repository = re.findall(r"^url = (\S+)$", settings, re.MULTILINE)[0]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = r"(?!https?:|mailto:|#)"
    pictures = rf'(!\[[^\]]*\]\(|\bsrc="|\bsrcset="){relative}'
    text = re.sub(pictures, rf"\g<1>{repository}/raw/v{version}/", text)
    return re.sub(rf"\]\({relative}", f"]({repository}/blob/v{version}/", text)


def problems(version: str) -> list[str]:
    """Return why *version* cannot be released."""
    wrong = [f"{file} says {own}, and the tag {version}." for file, own in versions().items() if own != version]
    try:
        notes(version)
    except ValueError as error:
        wrong.append(str(error))
    return wrong


def main(arguments: list[str]) -> int:
    """Do what the command line asks for; return the exit status."""
    if len(arguments) != 2 or arguments[0] not in ("check", "notes", "readme"):
        print(__doc__, file=sys.stderr)
        return 2
    command, version = arguments
    if command == "notes":
        print(notes(version))
        return 0
    if command == "readme":
        (ROOT / "README.md").write_text(readme(version), encoding="utf-8")
        return 0
    wrong = problems(version)
    for problem in wrong:
        print(problem, file=sys.stderr)
    if wrong:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
