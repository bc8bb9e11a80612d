"""What `deploy/` says, read once: every way in which it starts the service, and what the Helm chart makes of values."""

from __future__ import annotations

import atexit
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "triton-openai"
FORMS = ("standalone", "headless", "sidecar", "everything", "alternatives", "persistence", "replicas")
# The same in C, where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The two stages of the Dockerfile that are images, by the names under which everything else knows them.
IMAGES = {"triton-openai": "sidecar", "triton-openai:triton": "triton"}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """
    One way to start the service: where it is written, its command line, its environment, and the settings file that it
    is given. *stop_seconds* is how long whoever stops it waits before killing it, *delay* what of that passes before it
    is told.
    """

    where: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    settings: str | None = None
    container: Mapping[str, Any] = {}
    stop_seconds: float | None = None
    delay: float = 0.0


def load(path: Path) -> Any:
    """Return the only document of a YAML file."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)


class Instruction(msgspec.Struct, frozen=True):
    """One instruction of a Dockerfile, its lines joined."""

    stage: str
    word: str
    text: str


@cache
def dockerfile() -> tuple[Instruction, ...]:
    """Return the instructions of the Dockerfile's stages."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
        if word:
            found.append(Instruction(stage, word, rest))
    return tuple(found)


def of_stage(stage: str, word: str) -> list[str]:
    """Return the texts of one kind of instruction in *stage*."""
    return [one.text for one in dockerfile() if (one.stage, one.word) == (stage, word)]


def image_environment(stage: str) -> dict[str, str]:
    """Return the variables that a stage of the Dockerfile sets."""
    return dict(_assignment(word) for text in of_stage(stage, "ENV") for word in shlex.split(text))


def rendered(form: str) -> dict[str, str]:
    """Return what the chart makes of its own file of values for *form*, as the release ``demo`` in ``prod``."""
    return _rendered_forms()[form]


@cache
def _rendered_forms() -> dict[str, dict[str, str]]:
    made = render_all([load(CHART / "ci" / f"{form}-values.yaml") for form in FORMS])
    return {form: one.get("manifests") or pytest.fail(one["error"]) for form, one in zip(FORMS, made, strict=True)}


def render(values: Mapping[str, Any], *, name: str = "demo", namespace: str = "prod") -> dict[str, str]:
    """
    Return what the chart makes of *values*, by the template's path; raises ValueError with Helm's words.

    Skips the test where Helm's library has no wheel.
    """
    (made,) = render_all([values], name=name, namespace=namespace)
    if "error" in made:
        raise ValueError(made["error"])
    manifests: dict[str, str] = made["manifests"]
    return manifests


def render_all(cases: Sequence[Mapping[str, Any]], *, name: str = "demo", namespace: str = "prod") -> list[Any]:
    """
    Return for each of *cases* what the chart makes of these values: ``{"manifests"}``, or the ``{"error"}`` of Helm.

    Skips the test where Helm's library has no wheel.
    """
    pytest.importorskip("helm_python")
    helm = _helm()
    assert helm.stdin is not None
    assert helm.stdout is not None
    print(json.dumps([{"values": values, "name": name, "namespace": namespace} for values in cases]), file=helm.stdin)
    helm.stdin.flush()
    made: list[Any] = json.loads(helm.stdout.readline())
    return made


@cache
def _helm() -> subprocess.Popen[str]:
    """Return the process that renders until this one ends: to load Helm's library takes longer than a chart."""
    pipe, command = subprocess.PIPE, [sys.executable, str(DEPLOY / "generate.py"), "--render"]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    atexit.register(process.communicate)
    return process


def documents(text: str) -> list[Any]:
    """Return the documents of a YAML text, without empty ones."""
    return [one for one in yaml.load_all(text, _LOADER) if one]


def chart_documents(form: str) -> list[Any]:
    """Return every manifest that the chart makes for *form*."""
    return [one for path, text in rendered(form).items() if path.endswith(".yaml") for one in documents(text)]


def plain_documents(form: str) -> list[Any]:
    """Return the manifests of one file in ``deploy/kubernetes``."""
    return documents((DEPLOY / "kubernetes" / f"{form}.yaml").read_text(encoding="utf-8"))


def only(manifests: list[Any], kind: str) -> Any:
    """Return the one manifest of *kind*."""
    (found,) = [one for one in manifests if one["kind"] == kind]
    return found


def service_container(pod: Mapping[str, Any]) -> Any:
    """Return the container of a pod that runs the service."""
    (found,) = [one for one in pod["containers"] if one["name"] in ("triton-openai", "kserve-container")]
    return found


def triton_flags() -> set[str]:
    """Return the flags that `deploy/` gives to tritonserver."""
    lists = [load(DEPLOY / "compose/compose.yaml")["services"]["triton"]["command"]]
    lists.append(
        only(plain_documents("sidecar"), "Deployment")["spec"]["template"]["spec"]["initContainers"][0]["args"]
    )
    lists.append(load(CHART / "ci/everything-values.yaml")["triton"]["extraArgs"])
    return {one.partition("=")[0] for flags in lists for one in flags if one.startswith("--")}


def starts() -> Iterator[Start]:
    """Yield every way to start the service that does not need Helm."""
    for image, stage in IMAGES.items():
        (command,) = of_stage(stage, "CMD")
        yield Start(where=image, arguments=tuple(json.loads(command)), environment=image_environment(stage))
    for path in sorted((DEPLOY / "compose").glob("*.yaml")):
        service = load(path)["services"]["triton-openai"]
        stage = service["build"]["target"]
        yield Start(
            where=f"compose/{path.name}",
            arguments=tuple(service.get("command", ["serve"])),
            environment={**image_environment(stage), **service["environment"]},
            container=service,
            stop_seconds=_seconds(service["stop_grace_period"]),
        )
    for form in ("standalone", "sidecar"):
        yield start_of_pod(f"kubernetes/{form}.yaml", plain_documents(form))
    predictor = load(DEPLOY / "kserve" / "inference-service.yaml")["spec"]["predictor"]
    runtime = load(DEPLOY / "kserve" / "serving-runtime.yaml")["spec"]
    yield _start_of_container("kserve", service_container(runtime), predictor["terminationGracePeriodSeconds"], None)
    unit = systemd_unit()["Service"]
    yield Start(
        where="systemd",
        arguments=tuple(unit["ExecStart"][0].split()[1:]),
        environment=dict(map(_assignment, unit["Environment"])),
        settings=(DEPLOY / "systemd" / "settings.yaml").read_text(encoding="utf-8"),
        stop_seconds=_seconds(unit["TimeoutStopSec"][0]),
    )


def start_of_pod(where: str, manifests: list[Any]) -> Start:
    """Return how the Deployment in *manifests* starts the service, with the settings of the ConfigMap."""
    pod = only(manifests, "Deployment")["spec"]["template"]["spec"]
    data = [one["data"] for one in manifests if one["kind"] == "ConfigMap"]
    settings = [one["settings.yaml"] for one in data if "settings.yaml" in one]
    return _start_of_container(
        where, service_container(pod), pod["terminationGracePeriodSeconds"], settings[0] if settings else None
    )


def _start_of_container(where: str, container: Any, stop_seconds: float, settings: str | None) -> Start:
    stage = IMAGES.get(container["image"], "sidecar")
    own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    return Start(
        where=where,
        arguments=tuple(container["args"]),
        environment={**image_environment(stage), **own},
        settings=settings,
        container=container,
        stop_seconds=stop_seconds,
        delay=float(hook[1]),
    )


def systemd_unit() -> dict[str, dict[str, list[str]]]:
    """Return the sections of the systemd unit: every value of each key, which may stand several times."""
    sections: dict[str, dict[str, list[str]]] = {}
    name = ""
    for line in (DEPLOY / "systemd" / "triton-openai.service").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            sections[name] = {}
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            sections[name].setdefault(key, []).append(value)
    return sections


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def _assignment(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value
