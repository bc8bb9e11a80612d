"""
Compares releases of vLLM with what the companion model uses of them: ``python -m tests.engine.interfaces FOLDER ...``

A folder is that of the package ``vllm`` of a release, as its wheel or its repository has it. Its code is read and not
run, so that no release has to be installed. The exit status is 1 if something that the model needs is missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_openai.companion

_MODEL = Path(triton_openai.companion.__file__).with_name("model.py")
#: The tables of the model file.
_TABLES = ("USED", "METHODS", "SAVING")


def tables() -> Mapping[str, Mapping[str, Sequence[Any]]]:
    """Return the tables of the model file, which can be imported inside Triton only."""
    values = {}
    for statement in ast.parse(_MODEL.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in _TABLES:
                values[name] = ast.literal_eval(statement.value)
    return values


def missing(package: Path) -> Iterator[str]:
    """Yield what the model needs and the release in the folder *package* does not have."""
    used = tables()
    for module, names in used["USED"].items():
        tree = _module(package, module)
        for name in names:
            if tree is None or name not in _names(tree):
                yield f"{module} has no {name}"
    engine = _module(package, "vllm.v1.engine.async_llm")
    for method, (first, others) in used["METHODS"].items():
        arguments = _arguments(engine, "AsyncLLM", method)
        if arguments is None:
            yield f"AsyncLLM has no {method}"
        elif tuple(arguments[: len(first)]) != tuple(first):
            yield f"AsyncLLM.{method} does not begin with {first}"
        else:
            yield from [f"AsyncLLM.{method} has no {name}" for name in others if name not in arguments]


def slower(package: Path) -> Iterator[str]:
    """Yield what saves time and the release in the folder *package* does not have."""
    for module, names in tables()["SAVING"].items():
        tree = _module(package, module)
        for name in names:
            if tree is None or name not in _names(tree):
                yield f"{module} has no {name}"
    arguments = _arguments(_module(package, "vllm.v1.engine.output_processor"), "OutputProcessor", "process_outputs")
    if arguments is None or arguments[2:3] != ["iteration_stats"]:
        yield "OutputProcessor.process_outputs has other arguments"


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
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
