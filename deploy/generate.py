"""
Writes ``deploy/kubernetes``: what the Helm chart makes of two of its files of values, for those who do without Helm.

    pip install helm-python-sdk && python deploy/generate.py

``--render`` reads lists of ``{"values", "name", "namespace"}``, one a line as JSON, and answers each with a line: what
the chart makes, as ``{"manifests"}`` by template or ``{"error"}``. That is for the tests: Helm's library is Go, and
runs in a process of its own.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
CHART = DEPLOY / "helm" / "triton-openai"
FORMS = ("standalone", "sidecar")
# The severity of a warning in what `helm lint` reports.
_WARNING = 2

_HEADER = """\
# {summary}
# Written by `python deploy/generate.py` from the Helm chart and its ci/{form}-values.yaml: change those, or patch this
# with kustomize. Image names and what is specific to a cluster are to be replaced.
"""
_SUMMARIES = {
    "standalone": "The service alone, in front of a Triton that the Service `triton` leads to.",
    "sidecar": "Triton and the service in one pod; the PersistentVolumeClaim `model-repository` holds the models.",
}
# Says what Helm knows of a release; there is none.
_OF_HELM = re.compile(r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n", re.MULTILINE)


def values_of(form: str) -> dict[str, Any]:
    """Return the values in the chart's file for *form*."""
    loaded: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{form}-values.yaml").read_text(encoding="utf-8"))
    return loaded


def render(values: dict[str, Any], *, name: str, namespace: str) -> dict[str, Any]:
    """
    Return what the chart makes of *values*: ``manifests`` by the path of their template, or the ``error`` of Helm or of
    ``helm lint --strict``.

    Raises ImportError where Helm's library is missing.
    """
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        try:
            chart.validate_schema(values)
            manifests = chart.render(values, name=name, namespace=namespace)
        except helm_python.HelmError as error:
            return {"error": str(error)}
    report = helm_python.lint(str(CHART), values, strict=True, namespace=namespace)
    warnings = [one["error"] for one in report["messages"] if one["severity"] >= _WARNING]
    if warnings or report["errors"]:
        return {"error": f"helm lint --strict: {warnings or report['errors']}"}
    # Paths come with the name of the chart before them.
    return {"manifests": {path.partition("/")[2]: text for path, text in manifests.items()}}


def plain(form: str, manifests: dict[str, str]) -> str:
    """Return *manifests*, made for the release ``triton-openai``, as one file for ``kubectl apply``."""
    texts = [
        _OF_HELM.sub("", text).strip()
        for path, text in sorted(manifests.items())
        if path.endswith(".yaml") and "/tests/" not in path and text.strip()
    ]
    return _HEADER.format(summary=_SUMMARIES[form], form=form) + "".join(f"---\n{text}\n" for text in texts)


def main() -> None:
    """Write the files, or render what is asked for."""
    if sys.argv[1:] == ["--render"]:
        for line in sys.stdin:
            print(json.dumps([render(**case) for case in json.loads(line)]), flush=True)
        return
    for form in FORMS:
        made = render(values_of(form), name="triton-openai", namespace="default")
        (DEPLOY / "kubernetes" / f"{form}.yaml").write_text(plain(form, made["manifests"]), encoding="utf-8")


if __name__ == "__main__":
    main()
