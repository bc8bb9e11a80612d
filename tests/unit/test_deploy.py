"""What `deploy/` names exists: flags, variables, ports, paths, metrics and files; and every way to start works."""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import deploy_files as files
from tests.cases import every_case
from tests.deploy_files import DEPLOY, ROOT, Start
from tests.ports import closed_port
from tests.programs import found
from tests.tls_fixture import Authority
from triton_openai.app import create_app
from triton_openai.cli.arguments import parse
from triton_openai.config.options import ENVIRONMENT_PREFIX, options
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import ServerSettings, Settings
from triton_openai.config.validation import did_you_mean
from triton_openai.telemetry.gauges import SCRAPED
from triton_openai.telemetry.instruments import INSTRUMENTS

STARTS = {start.where: start for start in files.starts()}
TEXTS = {
    path.relative_to(DEPLOY).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DEPLOY.rglob("*"))
    # A link is read as the file that it leads to.
    if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
}
HEALTH_CHECK = ["/opt/triton-openai/bin/python", "/opt/triton-openai/healthcheck.py"]
# What Triton answers, and what the programs around it listen on.
TRITON_PATHS = {"/v2/health/ready"}
PORTS = {
    "triton": {8000, 8001, 8002},
    "otel-collector": {4317, 4318},
    "jaeger": {16686, 4317},
    "prometheus": {9090},
    "grafana": {3000},
    "open-webui": {8080},
    "triton-openai": {9000},
}


def settings_of(start: Start, folder: Path) -> Settings:
    """Read what *start* asks for, as the service would."""
    environment = {name: value for name, value in start.environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    if "TRITON_OPENAI_CONFIG" in environment:
        assert start.settings is not None
        file = folder / "settings.yaml"
        file.write_text(start.settings)
        environment["TRITON_OPENAI_CONFIG"] = str(file)
    parsed = parse(start.arguments)
    assert "serve" == parsed.command
    return load_settings(parsed.settings, environment)


def check(start: Start, folder: Path) -> Settings:
    """Assert what every way to start has to fulfil, and return its settings."""
    settings = settings_of(start, folder)
    server = settings.server
    assert ("systemd" == start.where) == ("127.0.0.1" == server.host)
    if start.stop_seconds is not None:
        # Workers get ten seconds more before their parent ends them.
        assert start.stop_seconds >= start.delay + server.shutdown_delay + server.shutdown_grace + 10
    ports = start.container.get("ports", [])
    if ports:
        opened = [one["containerPort"] if isinstance(one, dict) else int(one.rpartition(":")[2]) for one in ports]
        assert [server.port] == opened
    for kind, path in (("livenessProbe", "/health/live"), ("readinessProbe", "/health/ready")):
        if kind in start.container and settings.tls.client_ca is not None:
            program, script, *asked = start.container[kind]["exec"]["command"]
            assert HEALTH_CHECK == [program, script]
            assert [path] == asked
        elif kind in start.container:
            asked = start.container[kind]["httpGet"]
            assert path == asked["path"]
            assert asked["port"] in (server.port, ports[0].get("name"))
            assert ("HTTP" if settings.tls.certificate is None else "HTTPS") == asked.get("scheme", "HTTP")
    return settings


@pytest.mark.parametrize("where", STARTS)
def test_every_way_to_start(where: str, tmp_path: Path) -> None:
    """Flags, variables and settings are accepted; ports and probes fit them, and the time to stop suffices."""
    check(STARTS[where], tmp_path)


@pytest.mark.parametrize("where", [where for where in STARTS if where.startswith("k")])
def test_pods_serve_on_while_the_cluster_learns_that_they_end(where: str, tmp_path: Path) -> None:
    """Kubernetes sends requests for some seconds more: none of them may be turned away."""
    assert STARTS[where].delay + settings_of(STARTS[where], tmp_path).server.shutdown_delay >= 5


def test_pods_have_no_variables_of_services() -> None:
    """Those of a Service `triton-openai` look like settings, and keep the service from starting."""
    pods = [
        files.only(files.plain_documents(form), "Deployment")["spec"]["template"]["spec"]
        for form in ("standalone", "sidecar")
    ]
    pods.append(files.load(DEPLOY / "kserve" / "inference-service.yaml")["spec"]["predictor"])

    assert [False] * 3 == [pod["enableServiceLinks"] for pod in pods]


@pytest.mark.parametrize("form", files.FORMS)
def test_every_way_of_the_chart(form: str, tmp_path: Path) -> None:
    """The chart starts the service as well."""
    settings = check(files.start_of_pod(form, files.chart_documents(form)), tmp_path)

    assert "json" == settings.server.log_format
    assert (form in ("standalone", "alternatives", "persistence", "replicas")) == (
        "http://127.0.0.1:8000" not in settings.triton.url
    )


def test_variables_that_are_named() -> None:
    """A variable of the service that stands anywhere, comments included, is one."""
    known = {option.variable for option in options()} | {f"{ENVIRONMENT_PREFIX}CONFIG", ENVIRONMENT_PREFIX}
    for name, text in TEXTS.items():
        for variable in re.findall(rf"{ENVIRONMENT_PREFIX}\w*", text):
            assert variable in known, f"{name}: {variable}{did_you_mean(variable, known)}"


def test_flags_that_are_named() -> None:
    """A flag that a comment or a document names is one of the service, or of a program that is known here."""
    ours = {option.flag for option in options()} | {"--config"}
    # Triton's own are checked against a real one in tests/integration/test_image.py.
    others = {
        *(
            "--build",
            "--build-arg",
            "--platform",
            "--version",
            "--yes",
            "--no-install-recommends",
            "--strip-debug",
            "--create-namespace",
            "--namespace",
            "--render",
            "--raw",
            "--set",
            "--target",
            "--values",
        ),
        *("--from", "--install", "--mount", "--chown", "--port-forward"),
        *("--no-cache-dir", "--no-deps", "--wheel-dir", "--without-pip", "--python", "--now"),
        *("--require-hashes", "--requirement", "--hash", "--strict"),
        # llm-d's endpoint picker
        *("--pool-name", "--pool-group", "--config-file", "--grpc-health-port", "--refresh-metrics-interval"),
        *("--interval", "--timeout", "--start-period", "--gid", "--uid", "--system", "--no-create-home"),
        *("--config.file", "--storage.tsdb.path", "--fail", "--silent", "--output", "--url"),
        *files.triton_flags(),
    }
    for name, text in TEXTS.items():
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z.-]+", text):
            assert flag in ours | others, f"{name}: {flag}{did_you_mean(flag, ours)}"


def test_paths_that_are_asked() -> None:
    """Health checks and scrapes go to paths that are served."""
    app = create_app(Settings(server=ServerSettings(page=False)))
    known = {resource.canonical for resource in app.router.resources()} | TRITON_PATHS
    asked = set()
    for name, text in TEXTS.items():
        if name.endswith((".yaml", ".py", ".md", "NOTES.txt")):
            asked |= set(re.findall(r"(?<=[\s\"'`0-9}])/(?:v\d/)?(?:health|metrics)(?:/\w+)?(?=[\s\"'`]|$)", text))

    assert asked >= {"/health/live", "/health/ready", "/metrics"}
    assert set() == asked - known


def test_metrics_that_are_named() -> None:
    """A metric that autoscaling or a document asks for is exported; dashboard and alerts have a test of their own."""
    known = {one.name for one in (*INSTRUMENTS, *SCRAPED)}
    (rule,) = files.load(DEPLOY / "kubernetes/prometheus-adapter.yaml")["rules"]["custom"]
    known.add(rule["name"]["as"])
    named = {
        name: set(re.findall(r"(?<![\w/])triton_openai_[a-z_]+", text))
        for name, text in TEXTS.items()
        if not name.startswith(("grafana/", "prometheus/alerts"))
    }

    assert set(re.findall(r"name: (triton_openai_\w+)", TEXTS["helm/triton-openai/templates/hpa.yaml"])) == {
        rule["name"]["as"]
    }
    assert "triton_openai_requests_running" in set().union(*named.values())
    assert {} == {name: found - known for name, found in named.items() if found - known}


@pytest.mark.parametrize("name", ["compose.yaml", "open-webui.yaml"])
def test_compose_fits_together(name: str) -> None:
    """Mounted files exist, services ask each other where they listen, and nothing is open to other machines."""
    folder = DEPLOY / "compose"
    compose = files.load(folder / name)
    services = compose["services"]
    for service in services.values():
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            assert source in compose["volumes"] or source.startswith("${") or (folder / source).is_dir(), source
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
        assert set(service.get("depends_on", ())) <= set(services)
        if build := service.get("build"):
            assert (folder / build["context"] / build["dockerfile"]).is_file()
            assert build["target"] == files.IMAGES[service["image"]]
    around = (
        [name]
        if name != "compose.yaml"
        else [name, *(path for path in TEXTS if path.startswith(("otel", "prom", "grafana/prov")))]
    )
    for path in around:
        text = TEXTS[f"compose/{path}" if path == name else path]
        for host, port in re.findall(r"(?<![\w.-])([a-z][a-z-]+):(\d{4,5})\b", text):
            if host != "localhost":
                assert host in services, f"{path}: {host}"
                assert int(port) in PORTS[host], f"{path}: {host}:{port}"


def test_compose_guards_the_ports_of_this_machine() -> None:
    """A service whose port is published on the loopback checks hosts, though requests arrive from Docker's network."""
    published = []
    for name in ("compose.yaml", "eight-gpus.yaml", "open-webui.yaml"):
        service = files.load(DEPLOY / "compose" / name)["services"]["triton-openai"]
        if any(port.startswith("127.0.0.1:") for port in service.get("ports", ())):
            published.append(name)
            # By this name, Prometheus asks it.
            assert "triton-openai" == service["environment"]["TRITON_OPENAI_ALLOWED_HOST"]
    assert ["compose.yaml", "eight-gpus.yaml"] == published


def test_compose_knows_what_is_healthy() -> None:
    """Every image has a tag of its own, and all are asked whether they are well that can be."""
    for name in ("compose.yaml", "open-webui.yaml"):
        for service, described in files.load(DEPLOY / "compose" / name)["services"].items():
            image = re.sub(r"\$\{\w+:-(.+)\}", r"\1", described["image"])
            built = "build" in described
            assert built or re.search(r":v?\d+\.\d+", image), image
            # Ours and that of Open WebUI come with a check; the two others have no program for one.
            asked = "healthcheck" in described
            assert asked != (built or service in ("otel-collector", "jaeger", "open-webui")), service
            if asked:
                (port,) = re.findall(r"//127\.0\.0\.1:(\d+)", " ".join(described["healthcheck"]["test"]))
                assert int(port) in PORTS[service]


def test_what_compose_mounts_is_found() -> None:
    """Prometheus's rules and Grafana's dashboards lie where their configurations look."""
    services = files.load(DEPLOY / "compose/compose.yaml")["services"]
    mounts = {
        target: (DEPLOY / "compose" / source).resolve()
        for service in services.values()
        for source, target, *_ in (mount.split(":") for mount in service.get("volumes", ()))
        if source.startswith("..")
    }
    (config,) = [flag.partition("=")[2] for flag in services["prometheus"]["command"] if flag.startswith("--config")]
    prometheus = mounts[str(Path(config).parent)] / Path(config).name
    (rules,) = files.load(prometheus)["rule_files"]
    (provider,) = files.load(mounts["/etc/grafana/provisioning"] / "dashboards/dashboards.yaml")["providers"]
    (collector,) = [flag.partition("=")[2] for flag in services["otel-collector"]["command"]]

    assert (prometheus.parent / rules).is_file()
    assert list(mounts[provider["options"]["path"]].glob("*.json"))
    assert (mounts[str(Path(collector).parent)] / Path(collector).name).is_file()


def test_the_collector_is_whole() -> None:
    """Every part of its configuration is used, and what is used is there."""
    config = files.load(DEPLOY / "otel-collector/config.yaml")
    (pipeline,) = config["service"]["pipelines"].values()
    for kind, names in pipeline.items():
        assert set(names) == set(config[kind])


def test_compose_files_have_the_form_of_compose() -> None:
    """Compose files are valid by the schema of the compose specification."""
    validated("--builtin-schema", "vendor.compose-spec", *map(str, sorted((DEPLOY / "compose").glob("*.yaml"))))


def validated(*arguments: str) -> None:
    """Run check-jsonschema; skip where it is not installed."""
    pytest.importorskip("check_jsonschema")
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_backends_have_a_home() -> None:
    """Where Triton runs without rights, its home is a volume or a folder made for it: vLLM compiles into it."""
    home = files.image_environment("triton")["HOME"]
    assert [line for line in files.of_stage("triton", "RUN") if f"chown 1000:1000 {home}" in line]

    runtime = files.load(DEPLOY / "kserve/serving-runtime.yaml")["spec"]["containers"][0]
    pod = files.only(files.plain_documents("sidecar"), "Deployment")["spec"]["template"]["spec"]
    for container in (runtime, pod["initContainers"][0]):
        (home,) = [one["value"] for one in container["env"] if one["name"] == "HOME"]
        assert any(home.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_the_image_is_made_of_what_is_there() -> None:
    """What is copied exists and is in the build's context; the last stage is the sidecar, and both run unprivileged."""
    allowed = {line[1:] for line in TEXTS["Dockerfile.dockerignore"].splitlines() if line.startswith("!")}
    for one in files.dockerfile():
        if one.word == "COPY" and not one.text.startswith("--from"):
            for source in one.text.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in allowed
    assert "sidecar" == files.dockerfile()[-1].stage
    for stage in files.IMAGES.values():
        (user,) = files.of_stage(stage, "USER")
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
        (check_command,) = files.of_stage(stage, "HEALTHCHECK")
        assert HEALTH_CHECK == json.loads(check_command.partition(" CMD ")[2])
        assert [str(Settings().server.port)] == files.of_stage(stage, "EXPOSE")


@every_case(
    "lock, extras_of_image",
    [
        ("requirements.lock", ("otlp", "postgresql", "redis", "s3")),
        ("requirements-liquid.lock", ("liquid", "otlp", "postgresql", "redis", "s3")),
    ],
)
def test_the_lock_files_fit(lock: str, extras_of_image: tuple[str, ...]) -> None:
    """
    Each lock file pins what the service and its image's extras need, with hashes, and names no place to get it from.
    """
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    texts = [config["options"]["install_requires"]]
    texts += [extras[name] for name in extras_of_image]
    needed = [Requirement(line) for text in texts for line in text.splitlines() if line]
    text = TEXTS[lock]
    pins = [Requirement(line.partition("\\")[0]) for line in text.splitlines() if re.match(r"\w", line)]

    assert "://" not in text
    assert len(pins) == len(re.findall(r"^\w.*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE))
    for one in needed:
        versions = [pin.specifier for pin in pins if canonicalize_name(pin.name) == canonicalize_name(one.name)]
        assert versions, one
        for version in versions:
            assert one.specifier.contains(str(version).removeprefix("==")), f"{one}: make lock"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd's own checker has nothing to say of the unit, and calls it well shut in."""
    analyze = found("systemd-analyze")
    unit = tmp_path / "triton-openai.service"
    text = TEXTS["systemd/triton-openai.service"]
    unit.write_text(text.replace("/opt/triton-openai/bin/triton-openai", sys.executable))

    def run(*arguments: str) -> Any:
        command = [analyze, *arguments, str(unit)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    verified = run("verify", "--man=no")
    if "Failed to" in verified.stderr and "bus" in verified.stderr:
        pytest.skip("systemd-analyze does not work here")
    assert (0, "") == (verified.returncode, verified.stderr)
    shut_in = run("security", "--offline=true", "--threshold=15")
    assert shut_in.returncode == 0, shut_in.stdout[-300:]


def test_the_template_starts_a_triton_for_a_gpu(tmp_path: Path) -> None:
    """The unit of the GPU 3 sees that alone, and has ports of its own; systemd's checker has nothing to say of it."""
    text = TEXTS["systemd/triton@.service"]
    (command,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", text, re.MULTILINE)
    server = tmp_path / "tritonserver"
    server.write_text('#!/bin/sh\necho "$@"\n')
    server.chmod(0o755)
    # As systemd reads it.
    words = shlex.split(command.replace("\\\n", " ").replace("%i", "3").replace("$$", "$"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL_REPOSITORY": "/srv/a b"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    ports = "--http-port=8030 --grpc-port=8031 --metrics-port=8032"
    assert done.stdout == f"--model-repository=/srv/a b {ports}\n"
    assert "Environment=CUDA_VISIBLE_DEVICES=%i\n" in text

    (tmp_path / "triton@.service").write_text(text)
    verify = [found("systemd-analyze"), "verify", "--man=no", str(tmp_path / "triton@3.service")]
    verified = subprocess.run(verify, capture_output=True, text=True, check=False, timeout=120)
    if "Failed to" in verified.stderr and "bus" in verified.stderr:
        pytest.skip("systemd-analyze does not work here")
    assert (0, "") == (verified.returncode, verified.stderr)


def test_the_unit_leaves_metrics_of_the_process() -> None:
    """The unit leaves /proc/stat, which has the time of the boot: metrics of the process need it."""
    assert ["all"] == files.systemd_unit()["Service"].get("ProcSubset", ["all"])


@pytest.mark.parametrize("status", [200, 503])
async def test_the_health_check_of_the_images(status: int) -> None:
    """The health check of the images ends with 0 when the service answers with 200, and else says what is wrong."""

    async def answer(request: web.Request) -> web.Response:
        assert "/health/live" == request.path
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        ended, said = await health_check(TRITON_OPENAI_PORT=str(server.port), http_proxy="http://127.0.0.1:9")

    assert (int(status != 200), status != 200) == (ended, "503" in said)


async def test_the_health_check_without_a_service() -> None:
    """Nobody listens: it ends with 1 and says where it asked."""
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}/health/live"
        ended, said = await health_check(HEALTHCHECK_URL=url)

    assert 1 == ended
    assert url in said


async def test_the_health_check_where_clients_show_certificates(tmp_path: Path) -> None:
    """
    The health check shows the service's certificate, and asks for the path that it is given; without one it is not
    let in.
    """
    authority = Authority(tmp_path)
    certificate = authority.issue("service")

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.path == "/health/ready" else 503)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    own = {"TRITON_OPENAI_TLS_CERTIFICATE": str(certificate)}
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=authority.server(certificate, clients=True))
    own["TRITON_OPENAI_PORT"] = str(server.port)
    healthy = await health_check("/health/ready", **own, TRITON_OPENAI_TLS_CLIENT_CA=str(authority.file))
    refused, _ = await health_check("/health/ready", **own)
    await server.close()

    assert (0, "") == healthy
    assert 1 == refused


async def test_the_health_check_with_an_encrypted_key(tmp_path: Path) -> None:
    """The health check with an encrypted key is an error, and no question for a passphrase."""
    authority = Authority(tmp_path)
    certificate = authority.issue("service")
    key = load_pem_private_key(certificate.read_bytes(), None)
    encrypted = tmp_path / "service.key"
    sealed = BestAvailableEncryption(b"open sesame")
    encrypted.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, sealed))
    app = web.Application()
    app.router.add_get("/health/live", answered)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=authority.server(certificate, clients=True))
    own = {
        "TRITON_OPENAI_PORT": str(server.port),
        "TRITON_OPENAI_TLS_CERTIFICATE": str(certificate),
        "TRITON_OPENAI_TLS_KEY": str(encrypted),
        "TRITON_OPENAI_TLS_CLIENT_CA": str(authority.file),
    }
    status, said = await health_check(**own)
    await server.close()

    assert (1, False) == (status, "Traceback" in said)


async def answered(_request: web.Request) -> web.Response:
    """Answer with 200."""
    return web.Response()


async def health_check(*arguments: str, **environment: str) -> tuple[int | None, str]:
    """
    Run the script with *arguments* and *environment*; return its exit status and what it said.

    It waits for an answer for longer than its two seconds: the server runs in the process of the test.
    """
    program = (
        f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import healthcheck\n"
        "healthcheck._SECONDS = 120.0\n"
        "healthcheck.main()"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, *arguments), env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    return process.returncode, said.decode()
