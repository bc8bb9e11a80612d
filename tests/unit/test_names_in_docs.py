"""What the documents name exists: flags, variables, settings, metrics, paths, codes and files; commands can be read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from functools import cache
from pathlib import Path

from docs import generate
from tests import deploy_files as files
from tests.cases import every_case
from triton_openai.adapters import companion
from triton_openai.app import create_app
from triton_openai.cli import model_repository
from triton_openai.cli.aliases import ALIASES, REFUSED, WITHOUT_EFFECT
from triton_openai.cli.arguments import build_parsers, parse
from triton_openai.cli.batch import BATCH
from triton_openai.cli.batch.arguments import batch_options
from triton_openai.config.options import ENVIRONMENT_PREFIX, options
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import AudioSettings, ServerSettings, Settings
from triton_openai.config.validation import did_you_mean
from triton_openai.telemetry.gauges import SCRAPED
from triton_openai.telemetry.instruments import INSTRUMENTS

ROOT = generate.ROOT
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "deploy/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    )
}
# The changelog also names what is gone.
PRESENT = [name for name in TEXTS if name != "CHANGELOG.md"]
# Those of all actions of `batch`.
BATCH_FLAGS = {name for names, _ in build_parsers(everything=False)[1][BATCH.name].arguments for name in names}
COMMANDS = {
    *("--config", "--json", "--once", "--help", "--help-all", "--version"),
    *("--all", "--model", "--scripted", "--speech", "--weights"),
    *("--from", "--lora-modules", "--name", "--to"),
    *("--format", "--reasoning", "--tools", "--prompt", "--cut"),
    *("--url", "--system", "--no-history", "--strict"),
    *(
        "--streams",
        "--requests",
        "--seconds",
        "--max-tokens",
        "--ignore-eos",
        "--prompts",
        "--completions",
        "--timeout",
    ),
}
# Of the programs that the documents call, by the document.
_DOCKER = {
    *("--build", "--build-arg", "--cap-drop", "--gpus", "--init", "--read-only", "--rm", "--shm-size", "--target"),
    *("--stop-timeout", "--tmpfs", "--name", "--ulimit"),
}
_KUBERNETES = {
    *("--create-namespace", "--install", "--namespace", "--set", "--values", "--wait", "--timeout"),
    *("--from-file", "--from-literal"),
}
# Of vLLM's engine, and of the Triton that it runs in.
_ENGINE = {
    "--max-logprobs",
    *("--backend-config", "--dtype", "--enable-lora", "--gpu-memory-utilization", "--hf-overrides", "--name"),
    *("--no-enable-prefix-caching", "--scheduling-policy", "--tensor-parallel-size"),
    *("--tokenizer-mode", "--config-format", "--load-format", "--runner", "--pooler-config"),
}
FOREIGN = {
    "docs/guides/chat-templates.md": {"--history-template-file"},
    "docs/guides/clients.md": {"--key", "--no-deps", "--schema"},
    "docs/guides/deployment.md": {*_DOCKER, "--strict"},
    "docs/guides/kubernetes.md": _KUBERNETES,
    "docs/guides/kubernetes-gateway.md": {*_KUBERNETES, "--refresh-metrics-interval"},
    "docs/guides/migrating.md": {
        *_DOCKER,
        *(flag for flags in (*ALIASES.values(), *WITHOUT_EFFECT.values(), *REFUSED.values()) for flag in flags),
        *generate.ENGINE_ARGUMENTS,
    },
    "docs/explanation/performance.md": {"--replicas"},
    "docs/contributing/benchmarks.md": {"--cases", "--quick", "--rounds", "--seconds", "--streams", "--subjects"},
    "docs/contributing/deployment-tests.md": {*_DOCKER, "--format", "--include", "--network", "--strict", "--variant"},
    "docs/explanation/reliability.md": {
        *("--clients", "--faults", "--lines", "--only", "--poison", "--requests", "--seconds", "--seed", "--tritons"),
    },
    "docs/guides/vllm.md": {*_DOCKER, *_ENGINE},
    "docs/reference/vllm-differences.md": {"--enable-prompt-tokens-details"},
    "docs/guides/tracing.md": {"--cases", "--trace-config"},
    "docs/tutorials/tracing-on-kubernetes.md": _KUBERNETES,
    "examples/embeddings-onnx/README.md": {"--source"},
    "examples/kubernetes/README.md": _KUBERNETES,
    "examples/langchain/README.md": {"--base-url", "--model", "--embedding-model"},
    "examples/tensorrt-llm-llmapi/README.md": {*_DOCKER, "--depth", "--branch", "--model_repo"},
    "examples/vllm/README.md": {*_DOCKER, *_ENGINE},
}
# Triton's own.
TRITON = {
    "--http-max-input-size",
    "--http-thread-count",
    "--model-control-mode",
    "--model-repository",
    "--strict-readiness",
    "--grpc-use-ssl",
    "--grpc-use-ssl-mutual",
}


def unknown(named: Collection[str], known: Collection[str]) -> list[str]:
    """Return those of *named* that are not *known*, with what may have been meant."""
    return [f"{name}{did_you_mean(name, known)}" for name in sorted(set(named) - set(known))]


@every_case("document", PRESENT)
def test_flags(document: str) -> None:
    """Wherever they stand, examples included."""
    known = [option for option in options() if not option.file_only]
    flags = {option.flag for option in known} | COMMANDS | BATCH_FLAGS
    switches = {f"--no-{option.name}" for option in known if option.is_switch}
    named = re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]", TEXTS[document])

    assert [] == unknown(named, flags | switches | FOREIGN.get(document, set()) | TRITON)


@every_case("document", PRESENT)
def test_variables_and_settings(document: str) -> None:
    """Environment variables, and settings as the file has them."""
    known = {option.variable for option in options() if not option.file_only}
    known |= {f"{ENVIRONMENT_PREFIX}CONFIG", ENVIRONMENT_PREFIX}
    assert [] == unknown(re.findall(rf"{ENVIRONMENT_PREFIX}\w*", TEXTS[document]), known)

    places = {".".join(option.path) for option in options()} | {".".join(option.path[:-1]) for option in options()}
    # Those of a model's own group are written without what precedes it.
    places |= {f"audio.{name}" for name in AudioSettings.__struct_fields__}
    sections = {place.partition(".")[0] for place in places}
    values = {".".join(key) for key in _keys(files.load(files.CHART / "values.yaml"))}
    named = {
        name
        for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", TEXTS[document])
        if name.partition(".")[0] in sections and not name.endswith(".py")
    }
    # Attributes of spans that are called like settings.
    spans = {"triton.model_name", "triton.request_id", "server.address", "server.port"}
    assert [] == unknown(named, places | values | spans | {"models.NAME"})


def _keys(values: object, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if not isinstance(values, dict):
        return set()
    return {(*at, key) for key in values}.union(*(_keys(value, (*at, key)) for key, value in values.items()))


@every_case("document", TEXTS)
def test_metrics(document: str) -> None:
    """Documents name metrics that exist, also as Prometheus and the rule for prometheus-adapter have them."""
    known = {one.name for one in (*INSTRUMENTS, *SCRAPED)}
    known |= {one.name + end for one in INSTRUMENTS if one.kind == "histogram" for end in ("_bucket", "_sum", "_count")}
    (rule,) = files.load(files.DEPLOY / "kubernetes/prometheus-adapter.yaml")["rules"]["custom"]
    known |= {rule["name"]["as"]}
    named = re.findall(r"(?<![\w./:-])(?:triton_openai|gen_ai_server)_[a-z_]*[a-z]", TEXTS[document])

    # The last two are parameters in a model's configuration.
    assert [] == unknown(set(named) - {"gen_ai_server", companion.CONTRACT, companion.RUNNER}, known)


@every_case("document", TEXTS)
def test_paths(document: str) -> None:
    """Those of the service; of Triton's, only where it says so."""
    app = create_app(Settings(server=ServerSettings(page=False)))
    known = {re.sub(r":[^}]+\}", "}", resource.canonical) for resource in app.router.resources()}
    known |= {path.removeprefix("/v1") for path in known}
    named = set(
        re.findall(r"(?<=[`\s9}])(/(?:v[12]|health|metrics|version|openapi\.json)\b[\w/{}.]*)", TEXTS[document])
    )
    # The base of all, and places of others.
    named -= {"/v1", "/v1/traces", "/v1/models/ensemble/load", "/v1/models/ensemble/unload"}

    assert [] == unknown({name.rstrip(".") for name in named if not name.startswith("/v2/health")}, known)


@cache
def _source() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "triton_openai").rglob("*.py"))


@every_case("document", TEXTS)
def test_error_codes(document: str) -> None:
    """A code behind a status, or with one of the words that codes have, is one that the service gives."""
    named = re.findall(r"\b[45]\d\d `([a-z_]+)`", TEXTS[document])
    named += re.findall(
        r"`(\w+_(?:exceeded|parameter|unavailable|silent|disconnected|type|value|stopping))`", TEXTS[document]
    )
    for code in set(named) - {"finish_type", "error_type"}:
        assert f'"{code}"' in _source(), code


@every_case("document", TEXTS)
def test_files(document: str) -> None:
    """A file of this checkout that is named by its path is there."""
    folders = "|".join(("adapters", "bench", "deploy", "docs", "templates", "tests", "triton_openai"))
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", TEXTS[document]):
        assert (ROOT / name).exists(), name
    # Modules are named by their place in the package, and some with what is in them.
    package = ROOT / "triton_openai"
    packages = "|".join(sorted(path.name for path in package.iterdir() if path.is_dir()))
    for name in re.findall(rf"`((?:{packages})/[\w/]+\.py)`", TEXTS[document]):
        assert (package / name).exists(), name
    for what, name in re.findall(rf"`(\w+)` in\s+`((?:{packages})/[\w/]+\.py)`", TEXTS[document]):
        assert re.search(rf"\b{what}\b", (package / name).read_text(encoding="utf-8")), f"{what} in {name}"
    if "make " in TEXTS[document]:
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert [] == unknown(re.findall(r"`make ([\w-]+)", TEXTS[document]), targets)


def commands() -> list[str]:
    """Return every call of the command in the documents' blocks for a shell."""
    found = []
    for text in TEXTS.values():
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [line for line in lines if line.startswith("triton-openai ")]
    return found


@every_case("line", dict.fromkeys(commands()))
def test_commands(line: str, tmp_path: Path) -> None:
    """Commands are read as the service would read them."""
    command, *arguments = shlex.split(line)[1:]
    if command == model_repository.COMMAND:
        _, further = model_repository.build_parser().parse_known_args(arguments)
        model_repository.engine_arguments(further)
        return
    if command == BATCH.name:
        words = shlex.split(line.partition(" >")[0], comments=True)
        batch_options(parse(words[1:]).options, {})
        return
    # Without what the shell does with it.
    parsed = parse(shlex.split(re.split(r" [<|#]", line)[0])[1:])

    load_settings(parsed.settings, {})


def test_the_index_leads_everywhere() -> None:
    """Each document is linked from the index of the documents, and that one from the README."""
    index = TEXTS["docs/README.md"]
    pages = [name.removeprefix("docs/") for name in TEXTS if name.startswith("docs/") and name != "docs/README.md"]

    assert [] == [name for name in pages if f"]({name}" not in index]
    assert "](docs/README.md" in TEXTS["README.md"]
