"""The borders between the parts of the code, read from its syntax trees."""

from __future__ import annotations

import ast
import configparser
import contextlib
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.syntax_trees import nodes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "triton_openai"

# Run inside Triton's Python processes, as if they were somebody's model repository: no part of the service.
STANDINS = ("triton_openai/demo/standins/", "triton_openai/companion/model.py")

# Programs of their own, with a command line of their own: nothing of the service imports them to run in its process.
PROGRAMS = {
    "triton_openai/tritonserver/_guard.py",
    "triton_openai/demo/engine.py",
    "triton_openai/demo/make_tokenizer.py",
}

# Words that name a backend. Which of them a model runs on is asked of its adapter, never of its name.
BACKENDS = re.compile(
    r"(?<![a-z])(vllm|trt-?llm|tensorrt|tensorrtllm|onnx|onnxruntime|pytorch|libtorch|openvino|dali)(?![a-z])",
    re.IGNORECASE,
)

# The names of a server's metrics and request fields are words that others share; nothing is told apart by them.
VOCABULARY = re.compile(r"vllm[_-](metrics|names|xargs)|vllm:|vLLM's names")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _modules() -> dict[str, ast.Module]:
    """Return every module of the service by its path; adapters and templates under their top-level folders."""
    paths = [
        path
        for folder in (PACKAGE, ROOT / "adapters", ROOT / "templates")
        for path in sorted(folder.rglob("*.py"))
        if not _name(path).startswith((*STANDINS, "triton_openai/adapters/", "triton_openai/templates/"))
    ]
    return {_name(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


@cache
def _nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of *tree*, which a dozen rules look at."""
    return nodes(tree)


@cache
def _import_statements(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Return those of *tree*: few nodes are, and half of the rules look for them."""
    return [node for node in _nodes(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """Forget the trees: the garbage collector would walk through their half a million nodes until the run ends."""
    yield
    _modules.cache_clear()
    _nodes.cache_clear()
    _import_statements.cache_clear()


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    for node in _import_statements(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        else:
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: -node.level + 1 or None]
                base = ".".join([*parents, base] if base else parents)
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _package(name: str) -> str:
    dotted = name.rpartition("/")[0].replace("/", ".")
    return f"triton_openai.{dotted}" if dotted.split(".")[0] in {"adapters", "templates"} else dotted


def _is(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _dotted(name: str) -> str:
    """Return the name of the module at the path *name*; adapters and templates under the service's."""
    dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return dotted if _is(dotted, "triton_openai") else f"triton_openai.{dotted}"


def _imported() -> Iterator[tuple[str, str]]:
    """Yield the path of each module with each of the service's own that it imports."""
    modules = {_dotted(name) for name in _modules()} - {"triton_openai"}
    for name, tree in _modules().items():
        yield from ((name, module) for module, _ in _imports(tree, _package(name)) if module in modules)


def _found(rule: Callable[[str, ast.Module], Iterator[tuple[str, int]]]) -> list[str]:
    return [f"{name}:{line}: {what}" for name, tree in _modules().items() for what, line in rule(name, tree)]


def test_there_is_something_to_read() -> None:
    """The rules below are about the service's own modules, adapters included."""
    assert any(name.startswith("adapters/") for name in _modules())
    assert "triton_openai/errors.py" in _modules()


def test_triton_libraries_stay_in_one_package() -> None:
    """`tritonclient`, `grpc` and `google.protobuf` are imported under `triton_openai/triton/` only."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if not name.startswith("triton_openai/triton/"):
            for module, line in _imports(tree, _package(name)):
                if _is(module, "tritonclient", "grpc", "google.protobuf"):
                    yield module, line

    assert [] == _found(rule)


def test_operations_do_not_depend_on_http() -> None:
    """`aiohttp` is not imported under `triton_openai/api/`: lines of batches run there too, which have no request."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if name.startswith("triton_openai/api/"):
            for module, line in _imports(tree, _package(name)):
                if _is(module, "aiohttp"):
                    yield module, line

    assert [] == _found(rule)


# The APIs for chats: each is read into a conversation by itself.
FACES = (
    ("triton_openai.api.chat", "triton_openai.api.chat_tools", "triton_openai.api.stored_chats"),
    ("triton_openai.api.responses.create", "triton_openai.api.responses.request_reader"),
    ("triton_openai.api.messages.operations", "triton_openai.api.messages.message_reader"),
)


def test_no_api_for_chats_is_the_base_of_another() -> None:
    """None of them imports the types or the operations of another one: what they share is the conversation."""
    found = [
        f"{name}: {module}"
        for name, module in _imported()
        for own in FACES
        if _dotted(name) in own
        for other in FACES
        if other != own and module in other
    ]

    assert [] == found


def test_errors_are_not_edited() -> None:
    """The text of an error is written once, where the error is made."""
    # It puts the errors of single requests into the sentence about their batch.
    allowed = {"triton_openai/api/messages/batch_body.py"}

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if name not in allowed:
            for node in _nodes(tree):
                targets = node.targets if isinstance(node, ast.Assign) else ()
                for target in targets:
                    if isinstance(target, ast.Attribute) and target.attr == "message" and not _own(target.value):
                        yield ast.unparse(target), target.lineno

    assert [] == _found(rule)


def test_databases_stay_in_one_package() -> None:
    """Drivers of databases are imported under `triton_openai/storage/` only, so all SQL is there; limits use Redis."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if not name.startswith("triton_openai/storage/") and name != "triton_openai/access/redis_limits.py":
            for module, line in _imports(tree, _package(name)):
                if _is(module, "sqlite3", "asyncpg", "redis"):
                    yield module, line

    assert [] == _found(rule)


def test_numbers_are_crunched_in_few_places() -> None:
    """`numpy` is imported where logits, vectors, LoRA files and audio are read; the programs that make the demo may."""
    media = {
        *("media/alignment.py", "media/audio.py", "media/cutting.py", "media/decode.py", "media/encode.py"),
        *("media/pcm.py", "media/voice_activity.py"),
    }
    readers = {"answer/logits_reader.py", "models/lora/lora_files.py", *media}
    allowed = {
        "adapters/companion.py",
        "adapters/transcriber.py",
        "adapters/_common/audio_sequence.py",
        "adapters/embeddings.py",
        *(f"triton_openai/{name}" for name in readers),
        *PROGRAMS,
    }

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if name not in allowed:
            yield from ((module, line) for module, line in _imports(tree, _package(name)) if _is(module, "numpy"))

    assert [] == _found(rule)


def test_adapters_know_the_middle_and_tensors_only() -> None:
    """Adapters import nothing of the service but the middle, the errors, the tensors and each other; and no aiohttp."""
    allowed = (
        "triton_openai.generation",
        "triton_openai.jobs",
        "triton_openai.languages",
        "triton_openai.errors",
        "triton_openai.triton.tensors",
        "triton_openai.adapters",
    )

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if name.startswith("adapters/"):
            for module, line in _imports(tree, _package(name)):
                # `from triton_openai import generation` also yields the bare package, which says nothing.
                inner = _is(module, "triton_openai") and module not in {"triton_openai", "triton_openai.triton"}
                if _is(module, "aiohttp", "adapters") or (inner and not _is(module, *allowed)):
                    yield module, line

    assert [] == _found(rule)


def _room(module: str) -> str:
    """Return the package of the service, or the module beside the packages, that *module* is in."""
    return ".".join(module.split(".")[:2])


def _circle(place: Callable[[str], str]) -> list[str]:
    """Return places of modules that import each other in a circle, each imported by the one behind it, if any do."""
    imports: dict[str, set[str]] = {}
    for name, module in _imported():
        imports.setdefault(place(_dotted(name)), set()).add(place(module))
    try:
        tuple(TopologicalSorter({one: others - {one} for one, others in imports.items()}).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_packages_import_each_other_in_a_circle() -> None:
    """What imports a package stands above it: nothing that the package imports, at any remove, imports it."""
    assert [] == _circle(_room)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Nor are there circles within a package."""
    assert [] == _circle(lambda module: module)


# What these packages never import, and what they may import of it all the same. That nothing imports what stands above
# it follows from the rule about circles.
NEVER: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "serving/": (("triton_openai.api",), ()),
    "access/": (("triton_openai.api",), ()),
    "triton/": (("triton_openai.telemetry",), ()),
    "telemetry/": (
        ("triton_openai",),
        (
            *("triton_openai.generation", "triton_openai.errors", "triton_openai.json_bytes", "triton_openai.config"),
            "triton_openai.telemetry",
        ),
    ),
}


def test_packages_keep_their_borders() -> None:
    """The packages of `NEVER` import nothing that is closed to them."""
    found = [
        f"{name}: {module}"
        for name, module in _imported()
        for folder, (closed, open_) in NEVER.items()
        if name.startswith(f"triton_openai/{folder}") and _is(module, *closed) and not _is(module, *open_)
    ]

    assert [] == found


def _docstrings(tree: ast.Module) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in _nodes(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }


def _strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield every string that the code works with: docstrings are for readers."""
    docstrings = _docstrings(tree)
    for node in _nodes(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            if isinstance(node.value, str):
                yield node.value, node.lineno
            elif isinstance(node.value, bytes):
                yield node.value.decode("latin-1"), node.lineno


def _identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in _nodes(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def test_no_backend_is_named_in_the_core() -> None:
    """A backend has a name in the adapters, the companion model, the demo and the command line, nowhere else."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if not name.startswith(("adapters/", "triton_openai/companion/", "triton_openai/demo/", "triton_openai/cli/")):
            for text, line in (*_strings(tree), *_identifiers(tree)):
                if BACKENDS.search(VOCABULARY.sub("", text)):
                    yield repr(text), line

    assert [] == _found(rule)


def test_one_module_frames_events() -> None:
    """Nothing outside `api/sse.py` writes `data:`; the client of Triton may read it."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if name != "triton_openai/api/sse.py" and not name.startswith("triton_openai/triton/"):
            for text, line in _strings(tree):
                # `data:image/png;base64,...` is another thing.
                if re.match(r"data:\s*($|\{|\[DONE\])", text) or "\ndata:" in text:
                    yield repr(text), line

    assert [] == _found(rule)


def test_operations_find_models_in_one_place() -> None:
    """Nothing of the API looks up a served model past `api/service.py`: the request's key may not open it."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if name.startswith("triton_openai/api/") and name != "triton_openai/api/service.py":
            for node in _nodes(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("models.find"):
                    yield ast.unparse(node.func), node.lineno

    assert [] == _found(rule)


def test_environment_and_arguments_are_read_in_one_place() -> None:
    """Nothing reads `os.environ` or `sys.argv` outside the settings and the command line."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if name.startswith(("triton_openai/config/", "triton_openai/cli/")) or name in PROGRAMS:
            return
        for node in _nodes(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                dotted = f"{node.value.id}.{node.attr}"
                if dotted in {"os.environ", "os.environb", "os.getenv", "sys.argv"}:
                    yield dotted, node.lineno
        for module, line in _imports(tree, _package(name)):
            if module in {"os.environ", "os.environb", "os.getenv", "sys.argv"}:
                yield module, line

    assert [] == _found(rule)


def test_print_belongs_to_the_command_line() -> None:
    """No `print` outside the command line: everything else logs."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        if not name.startswith("triton_openai/cli/") and name not in PROGRAMS:
            for node in _nodes(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    yield "print", node.lineno

    assert [] == _found(rule)


# Names with an underscore that are public: documented, and one only to keep clear of field names.
_PUBLIC = {"os._exit", "_asdict", "_fields", "_make", "_replace"}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(tree: ast.AST) -> set[str]:
    """Return the private names that *tree* defines: functions, variables, and attributes."""
    names = {node.attr for node in _nodes(tree) if isinstance(node, ast.Attribute) and not _loads(node)}
    names |= {node.id for node in _nodes(tree) if isinstance(node, ast.Name) and not _loads(node)}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names |= {node.name for node in _nodes(tree) if isinstance(node, functions)}
    return {name for name in names if _private(name)}


def _loads(node: ast.Attribute | ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _called(node: ast.Call) -> str:
    """Return the name of the function that *node* calls, or "" if it is no plain name."""
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _own(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return not node.args and _called(node) == "super"
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _private_names_of_bases(name: str, made: ast.ClassDef) -> set[str]:
    """Return the private names that classes of other packages use on *made*, which inherits from them."""
    module = importlib.import_module(f"{_package(name)}.{Path(name).stem}")
    inherited = getattr(module, made.name).__mro__
    return set().union(*(_private_names(one) for one in inherited if not one.__module__.startswith("triton_openai")))


@cache
def _private_names(foreign: type) -> set[str]:
    names = set(dir(foreign))
    with contextlib.suppress(OSError, TypeError):
        names |= set(re.findall(r"\bself\.(\w+)", inspect.getsource(foreign)))
    return {each for each in names if _private(each)}


def test_private_names_of_other_packages_are_left_alone() -> None:
    """
    No attribute, module or name with a leading underscore is used but where it is defined.

    A class that inherits from one of another package neither uses nor replaces what is private there.
    """

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        defined = _defined(tree) | _PUBLIC
        for node in _nodes(tree):
            if isinstance(node, ast.Attribute) and _private(node.attr) and not _own(node.value):
                if node.attr not in defined and ast.unparse(node) not in _PUBLIC:
                    yield ast.unparse(node), node.lineno
            elif isinstance(node, ast.Call) and _called(node) in {"getattr", "setattr", "hasattr"}:
                named = node.args[1]
                if isinstance(named, ast.Constant) and _private(str(named.value)):
                    yield ast.unparse(node), node.lineno
        for made in tree.body:
            if isinstance(made, ast.ClassDef) and made.bases:
                used = {one.attr for one in _nodes(made) if isinstance(one, ast.Attribute) and _own(one.value)}
                for attribute in sorted((used | _defined(made)) & _private_names_of_bases(name, made)):
                    yield f"{made.name}.{attribute}", made.lineno
        for module, line in _imports(tree, _package(name)):
            if any(map(_private, module.split("."))) and not _is(module, "triton_openai", "__future__"):
                yield module, line

    assert [] == _found(rule)


# Calls that open, read, start, ask or configure something. Making constants, types and declarations is what imports do.
_WORK = re.compile(
    r"(^|\.)(open|read_text|read_bytes|write_text|urlopen|getenv|listdir|iterdir|glob|rglob|exists|is_file|is_dir|stat"
    r"|import_module|entry_points|files|parse_args|basicConfig|configure|configure_logging|load_settings|create_app"
    r"|run|Popen|check_output|Thread|start|connect|bind|listen|socket|create_connection|get_event_loop|new_event_loop"
    r"|ThreadPoolExecutor|ProcessPoolExecutor|ClientSession|from_pretrained|from_file|filterwarnings|simplefilter"
    r"|time|monotonic|sleep|uuid4|token_hex|gethostname|getpid|print)$"
)


def _import_time(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """Yield the calls that run when a module is imported."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.ClassDef):
            yield from _import_time(statement.body)
        elif isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        else:
            lambdas = [n for n in _nodes(statement) if isinstance(n, ast.Lambda)]
            inside = {id(inner) for one in lambdas for inner in _nodes(one)}
            yield from (n for n in _nodes(statement) if isinstance(n, ast.Call) and id(n) not in inside)


def test_nothing_works_at_import() -> None:
    """Importing a module makes constants and types: it opens, reads, starts and asks nothing."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        for call in _import_time(tree.body):
            called = ast.unparse(call.func)
            if _WORK.search(called):
                yield f"{called}()", call.lineno

    assert [] == _found(rule)


def test_what_is_seldom_used_is_not_imported() -> None:
    """A service that uses neither gRPC nor numbers has not their libraries in memory: 30 MB in every worker."""
    heavy = ("grpc", "tritonclient", "numpy", "opentelemetry.sdk", "liquid")
    program = f"import sys, triton_openai.cli.serve; print(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)

    assert "" == done.stdout.strip()


def test_every_module_says_what_it_is() -> None:
    """The docstring of a module names its idea."""
    assert [] == [name for name, tree in _modules().items() if not ast.get_docstring(tree)]


def test_large_modules_and_classes_say_why() -> None:
    """No module is longer than 600 lines, and a class with more than 20 methods gives the reason in its docstring."""
    reason = re.compile(r"(more than 20|many|more) methods|Its methods are those of")
    found = []
    for name, tree in _modules().items():
        if len((ROOT / name).read_text(encoding="utf-8").splitlines()) > 600:
            found.append(name)
        for node in _nodes(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            docstring = " ".join((ast.get_docstring(node) or "").split())
            if len(methods) > 20 and not reason.search(docstring):
                found.append(f"{name}: {node.name} has {len(methods)} methods")
    assert [] == found


def test_fields_are_documented_at_the_field() -> None:
    """The docstring of a class tells of none of its fields: a comment at the field does, which begins with ``#:``."""

    def rule(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
        for kind in (node for node in _nodes(tree) if isinstance(node, ast.ClassDef)):
            fields = {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
            for word in re.findall(r"\*(\w+)\*", ast.get_docstring(kind) or ""):
                if word in fields:
                    yield f"{kind.name}.{word}", kind.lineno

    assert [] == _found(rule)


def test_every_package_is_distributed() -> None:
    """The wheel has the packages that setup.cfg lists, and those are all that there are."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = settings["options"]["packages"].split()
    linked = {f"triton_openai.{part}" for part in ("adapters", "adapters._common", "templates")}
    found = {_name(path.parent) for path in PACKAGE.rglob("__init__.py")} - {STANDINS[0].rstrip("/")}

    assert sorted({name.replace("/", ".") for name in found} | linked) == listed
