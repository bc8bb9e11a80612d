"""
Compares releases of vLLM with what the companion model uses of them: ``python -m tests.engine.interfaces FOLDER ...``

A folder is that of the package ``vllm`` of a release, as its wheel or its repository has it. Its code is read and not
run, so that no release has to be installed. The exit status is 1 if something that the model needs is missing.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import triton_openai.companion
from triton_openai.companion.repository import SPEECH_MODELS

_MODEL = Path(triton_openai.companion.__file__).with_name("model.py")
#: The tables of the model file.
_TABLES = (
    *("USED", "METHODS", "SAVING"),
    *("SPEECH", "SPEECH_METHODS", "PROMPT_ARGUMENTS", "PROMPT_CLASS", "PROMPT_CLASS_ARGUMENT"),
)
_INTERFACE = "SupportsTranscription"
# Those that have the interface and write no speech down: one that names the language, and classifiers.
_OTHERS = {
    "FireRedLIDForConditionalGeneration",
    "Qwen3ASRForcedAlignerForTokenClassification",
    "ClefOmniForJointSchema",
}
# What the registry has of a model: its architecture, its module and its class.
_REGISTERED = re.compile(r'"(\w+)":\s*\(\s*"(\w+)",\s*"(\w+)",?\s*\)')


@cache
def tables() -> Mapping[str, Any]:
    """Return the tables of the model file, which can be imported inside Triton only."""
    values: dict[str, Any] = {}
    for statement in ast.parse(_MODEL.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in _TABLES:
                values[name] = ast.literal_eval(statement.value)
    return values


def missing(package: Path) -> Iterator[str]:
    """Yield what the model needs and the release in the folder *package* does not have."""
    used = tables()
    yield from _lacking(package, used["USED"])
    engine = _module(package, "vllm.v1.engine.async_llm")
    for method, (first, others) in used["METHODS"].items():
        arguments = _arguments(engine, "AsyncLLM", method)
        if arguments is None:
            yield f"AsyncLLM has no {method}"
        elif tuple(arguments[: len(first)]) != tuple(first):
            yield f"AsyncLLM.{method} does not begin with {first}"
        else:
            yield from [f"AsyncLLM.{method} has no {name}" for name in others if name not in arguments]


def _lacking(package: Path, table: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield which names of *table*, by module, the release in the folder *package* does not have."""
    for module, names in table.items():
        tree = _module(package, module)
        for name in names:
            if tree is None or name not in _names(tree):
                yield f"{module} has no {name}"


def slower(package: Path) -> Iterator[str]:
    """Yield what saves time and the release in the folder *package* does not have."""
    yield from _lacking(package, tables()["SAVING"])
    arguments = _arguments(_module(package, "vllm.v1.engine.output_processor"), "OutputProcessor", "process_outputs")
    if arguments is None or arguments[2:3] != ["iteration_stats"]:
        yield "OutputProcessor.process_outputs has other arguments"


def without_speech(package: Path) -> Iterator[str]:
    """Yield why the model has no transcriptions, or not all, with the release in the folder *package*."""
    used = tables()
    yield from _lacking(package, used["SPEECH"])
    interface = _module(package, "vllm.model_executor.models.interfaces")
    for method, expected in used["SPEECH_METHODS"].items():
        if tuple(_arguments(interface, _INTERFACE, method) or ()) != tuple(expected):
            yield f"{_INTERFACE}.{method} has other arguments than {expected}"
    prompts = _arguments(interface, _INTERFACE, "get_generation_prompt") or ()
    wanted = set(used["PROMPT_ARGUMENTS"])
    if used["PROMPT_CLASS_ARGUMENT"] in prompts:
        wanted -= _fields(package, used["PROMPT_CLASS"])
    else:
        wanted -= set(prompts)
    for name in sorted(wanted):
        yield f"{_INTERFACE}.get_generation_prompt has no {name}"
    known = {model.architecture for model in SPEECH_MODELS}
    for architecture in sorted(speech_architectures(package) - known):
        yield f"{architecture} is not in SPEECH_MODELS"


def speech_architectures(package: Path) -> set[str]:
    """Return the architectures of a release that write down speech."""
    bases: dict[str, list[str]] = {}
    folder = package / "model_executor" / "models"
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name != _INTERFACE:
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    registry = folder / "registry.py"
    if not registry.exists():
        return set()
    architectures = set()
    for architecture, _, kind in _REGISTERED.findall(registry.read_text(encoding="utf-8")):
        if _derives(kind, bases):
            architectures.add(architecture)
    return architectures - _OTHERS


def _derives(kind: str, bases: Mapping[str, Sequence[str]]) -> bool:
    """Return whether the class *kind* has the interface, by the *bases* of all classes."""
    parents = [parent for parent in bases.get(kind, ()) if parent != kind]
    return _INTERFACE in parents or any(_derives(parent, bases) for parent in parents)


def _fields(package: Path, table: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names of the fields of the classes in *table*."""
    fields: set[str] = set()
    for module, kinds in table.items():
        tree = _module(package, module)
        for node in ast.walk(tree or ast.Module([], [])):
            if isinstance(node, ast.ClassDef) and node.name in kinds:
                fields.update(
                    field.target.id
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                )
    return fields


def _module(package: Path, name: str) -> ast.Module | None:
    folder = package.joinpath(*name.split(".")[1:])
    for path in (folder.with_suffix(".py"), folder / "__init__.py"):
        if path.exists():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines, imports, or imports when they are asked for."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _arguments(tree: ast.Module | None, kind: str, method: str) -> list[str] | None:
    """Return the arguments of a method but the first one, ``None`` if there is no such method."""
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for function in node.body:
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == method:
                    arguments = function.args
                    return [one.arg for one in [*arguments.args, *arguments.kwonlyargs]][1:]
    return None


def main(folders: Sequence[str]) -> int:
    """Print what each release lacks, and return the exit status."""
    status = 0
    for folder in folders:
        lacks = list(missing(Path(folder)))
        if lacks:
            status = 1
        print(f"{folder}: {'; '.join(lacks) or 'all that is needed'}")
        for line in slower(Path(folder)):
            print(f"  slower: {line}")
        for line in without_speech(Path(folder)):
            print(f"  transcriptions: {line}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
