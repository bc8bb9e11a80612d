"""
Lists the licences of the packages in a folder, which ``make licenses`` fills with what the images install.

    licenses.py FOLDER

The exit status is 1 if a package names no licence, or one that is not permissive and not weak copyleft.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

#: Permissive licences, and those whose conditions hold for changed files of the package only.
_ALLOWED = re.compile(
    r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public License|Unlicense|Zlib|ZPL|CC0|"
    r"Public Domain",
    re.IGNORECASE,
)
_FORBIDDEN = re.compile(r"GPL|GNU|Proprietary|Commercial", re.IGNORECASE)
_PREFIX = "License :: "


def licence_of(package: Distribution) -> str:
    """Return what *package* says of its licence: an expression, classifiers, or the first line of a text."""
    fields = package.metadata
    expression = fields.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [text for text in fields.get_all("Classifier") or [] if text.startswith(_PREFIX)]
    names = [text.rpartition(" :: ")[2] for text in classifiers if text != "License :: OSI Approved"]
    if names:
        return ", ".join(sorted(names))
    lines = str(fields.get("License") or "").strip().splitlines() or [""]
    return lines[0][:80]


def problem(licence: str) -> str | None:
    """Return what is wrong with *licence*, if something is."""
    if not licence or licence == "UNKNOWN":
        return "it names no licence"
    # One of several may be chosen.
    choices = re.split(r"\bOR\b", licence)
    if any(_ALLOWED.search(choice) and not _FORBIDDEN.search(choice) for choice in choices):
        return None
    return "its licence is not on the list of deploy/licenses.py"


def report(packages: Iterable[Distribution]) -> tuple[list[str], list[str]]:
    """Return a Markdown table of *packages* and their licences, and the problems."""
    rows = sorted(
        {(each.metadata["Name"], each.version, licence_of(each)) for each in packages}, key=lambda row: row[0].lower()
    )
    lines = ["| Package | Version | Licence |", "| --- | --- | --- |"]
    lines += [f"| {name} | {version} | {licence} |" for name, version, licence in rows]
    problems = []
    for name, _, licence in rows:
        wrong = problem(licence)
        if wrong is not None:
            problems.append(f"{name}: {wrong} ({licence or 'nothing'}).")
    return lines, problems


def main(arguments: list[str]) -> int:
    """Print the table of the folder that *arguments* name; return the exit status."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    lines, problems = report(distributions(path=arguments))
    print("\n".join(lines))
    for line in problems:
        print(line, file=sys.stderr)
    if problems:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
