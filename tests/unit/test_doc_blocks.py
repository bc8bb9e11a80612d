"""
Each block of code in the documents is run by a test, or says why it is not.

Here commands are checked without running them. ``tests/integration/test_demo.py`` runs the blocks in Python and those
with curl against the demo, and ``tests/clients/test_documents_node.py`` those in TypeScript.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib

from tests.cases import every_case
from tests.documents import ADDRESS, DOCUMENTS, ROOT, Block, blocks, read
from triton_openai.cli import model_repository
from triton_openai.cli.arguments import parse
from triton_openai.cli.batch import BATCH
from triton_openai.cli.batch.arguments import batch_options
from triton_openai.config.options import options

#: What shows something and is no code.
_NO_CODE = ("", "text")
#: Languages whose blocks have a test for each, see the functions below and in ``test_docs.py``.
_CHECKED = ("json", "python", "sh", "toml", "ts", "yaml")
#: Models that the demo serves.
DEMO_MODELS = ("ensemble", "text_embedding", "vllm_model")


@every_case("document", DOCUMENTS)
def test_each_block_is_run(document: str) -> None:
    """A block of a language without a check has a marker, and a marker names a test that exists, or a reason."""
    languages = set(re.findall(r"^ *```(\w+)", read(document), re.MULTILINE)) - set(_NO_CODE)
    for block in blocks(*languages, documents=(document,)):
        if block.language not in _CHECKED:
            assert block.marker, block.place
        if block.marker.startswith("run by "):
            assert (ROOT / block.marker.removeprefix("run by ")).is_file(), block.place


def test_markers_stand_above_blocks() -> None:
    """A marker that has lost its block is an error."""
    for document in DOCUMENTS:
        languages = set(re.findall(r"^ *```(\w*)", read(document), re.MULTILINE))
        markers = len(re.findall(r"^ *<!-- (?:not run: |run by )", read(document), re.MULTILINE))
        assert markers == sum(bool(block.marker) for block in blocks(*languages, documents=(document,))), document


@every_case("block", [block for block in blocks("sh") if not block.marker])
def test_commands(block: Block) -> None:
    """A command is one that exists, with flags that exist."""
    for command in block.commands:
        program, *arguments = shlex.split(re.split(" [<>] ", command)[0], comments=True)
        check = _PROGRAMS.get(program)
        assert check is not None, f"{block.place}: {program} needs a marker"
        check(arguments)


def _check_service(arguments: list[str]) -> None:
    if arguments[0] == model_repository.COMMAND:
        model_repository.build_parser().parse_known_args(arguments[1:])
        return
    parsed = parse(arguments)
    if parsed.command == BATCH.name:
        batch_options(parsed.options, {})


def _check_export(arguments: list[str]) -> None:
    """A variable of the service is one that exists."""
    names = [argument.partition("=")[0] for argument in arguments]
    known = {option.variable for option in options()} | {"TRITON_OPENAI_CONFIG"}
    assert {name for name in names if name.startswith("TRITON_OPENAI_")} <= known, names


def _check_make(arguments: list[str]) -> None:
    for argument in arguments:
        if "=" not in argument:
            assert re.search(rf"^{argument}:", read("Makefile"), re.MULTILINE), argument


def _check_pip(arguments: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert "install" == arguments[0]
    for argument in arguments[1:]:
        extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", argument)
        if extras is not None and extras[1]:
            assert set(extras[1].split(",")) <= set(setup["options.extras_require"]), argument
        elif argument.endswith(".txt"):
            assert (ROOT / argument).is_file(), argument


def _check_npm(arguments: list[str]) -> None:
    assert ["install", "openai"] == arguments


def _check_curl(arguments: list[str]) -> None:
    """It asks the documents' service, and one of the demo's models, so that the integration test can run it."""
    (url,) = [argument for argument in arguments if argument.startswith("http")]
    assert url.startswith(ADDRESS), url
    models = re.findall(r'"model": "([^"]+)"', " ".join(arguments))
    assert set(models) <= set(DEMO_MODELS), models
    # The demo hears nothing.
    assert "-F" not in arguments


_PROGRAMS = {
    "curl": _check_curl,
    "export": _check_export,
    "make": _check_make,
    "npm": _check_npm,
    "pip": _check_pip,
    "triton-openai": _check_service,
}


@every_case("block", [block for block in blocks("json", "toml") if not block.marker])
def test_data(block: Block) -> None:
    """It can be read."""
    if block.language == "toml":
        tomllib.loads(block.code)
    else:
        json.loads(block.code)


@every_case("block", [block for block in blocks("python") if not block.marker])
def test_python(block: Block) -> None:
    """A program without a marker asks the documents' service, so that the integration test can run it."""
    assert ADDRESS in block.code, f"{block.place} needs a marker"
