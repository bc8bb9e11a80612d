# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""What tool parsers are put together from: registry, detection, markers, types of parameters, JSON and Python text."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.errors import ConfigurationError
from triton_openai.parsers.events import Event
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS, Registry, choose
from triton_openai.parsers.reader import Ended, Malformed, Markers, Reader
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.json_calls import Mistral
from triton_openai.parsers.tools.literals import to_json
from triton_openai.parsers.tools.schema import Parameters
from triton_openai.parsers.tools.tool_parser import ToolParser, Tools
from triton_openai.prompts import prompter


@every_case("registry", (TOOL_PARSERS, REASONING_PARSERS))
def test_every_name_loads(registry: Registry[Any]) -> None:
    """Every built-in name and every alias is a parser, and of one parser only."""
    names = [each for name, (_, *aliases) in registry.table.items() for each in (name, *aliases)]

    for name in names:
        assert isinstance(registry.load(name), type)
    assert len(names) == len(set(names))
    assert list(registry.table) == registry.names()[: len(registry.table)]


def test_names_are_lenient() -> None:
    """SGLang's hyphens and a capital letter are no obstacle."""
    assert TOOL_PARSERS.load("GPT-OSS") is TOOL_PARSERS.load("openai")
    assert TOOL_PARSERS.load("minimax-m2") is TOOL_PARSERS.load("minimax_m2")
    assert REASONING_PARSERS.load("deepseek-r1") is REASONING_PARSERS.load("deepseek_r1")


def test_an_unknown_name() -> None:
    """The error lists what there is."""
    with pytest.raises(
        ConfigurationError, match=r"There is no tool parser 'nonesuch'. Known names: hermes, llama3_json"
    ):
        TOOL_PARSERS.load("nonesuch")


def _points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, "triton_openai.tool_parsers") for name, value in values.items()]
    monkeypatch.setattr("triton_openai.parsers.parser_registry.entry_points", lambda group: points)


def test_a_third_party(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point's class loads as a built-in one does."""
    _points(monkeypatch, mine="triton_openai.parsers.tools.json_calls:Mistral")

    assert Mistral is TOOL_PARSERS.load("mine")
    assert TOOL_PARSERS.names()[-1] == "mine"


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("mine", "no_such_module:Parser", "cannot be loaded"),
        (
            "mine",
            "json:loads",
            "is not a class that is derived from triton_openai.parsers.tools.tool_parser.ToolParser",
        ),
        ("hermes2", "json:JSONDecoder", "is not a class that is derived from"),
        ("mine", "tests.unit.parsers.test_tools_in_parts:Unfinished", "cannot be made: TypeError: .*abstract.* '?feed"),
        ("mine", "tests.unit.parsers.test_tools_in_parts:Stubborn", "cannot be made: TypeError: .*new_id"),
    ],
)
def test_a_broken_third_party(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    """An entry point that is no parser is named in the error."""
    _points(monkeypatch, **{name: value})

    with pytest.raises(ConfigurationError, match=message):
        TOOL_PARSERS.load(name)


class Unfinished(ToolParser):
    """A third party's class that reads nothing."""


class Stubborn(Unfinished):
    """One that cannot be made as a parser is."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)

    def feed(self, text: str) -> list[Event]:
        """Return nothing."""
        return []


def test_a_broken_reasoning_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken reasoning parser is told by the same registry, with the base of its own kind."""
    points = [EntryPoint("mine", "tests.unit.parsers.test_tools_in_parts:Stubborn", "triton_openai.reasoning_parsers")]
    monkeypatch.setattr("triton_openai.parsers.parser_registry.entry_points", lambda group: points)

    with pytest.raises(ConfigurationError, match=r"reasoning.ReasoningParser"):
        REASONING_PARSERS.load("mine")


def test_a_doubled_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party may not take a built-in parser's name."""
    _points(monkeypatch, hermes="json:loads")

    with pytest.raises(ConfigurationError, match="taken twice"):
        TOOL_PARSERS.load("mine")


def assert_chosen(template: str, tools: str | None, reasoning: str | None) -> None:
    """Check that the chat *template* leads to the parsers of these names."""
    chosen = choose(template, tools=None, reasoning=None)
    assert chosen.tools is (None if tools is None else TOOL_PARSERS.load(tools))
    assert chosen.reasoning is (None if reasoning is None else REASONING_PARSERS.load(reasoning))


@every_case(
    "name,expected",
    [
        ("chatml", ("hermes", None)),
        ("llama3", ("llama3_json", None)),
        ("gemma", (None, None)),
        ("mistral", (None, None)),
        ("plain", (None, None)),
    ],
)
def test_the_built_in_templates(name: str, expected: tuple[str | None, str | None]) -> None:
    """Built-in templates that write calls show which parser reads them."""
    assert_chosen(prompter.read_builtin(name), *expected)


@every_case(
    "family,marks,expected",
    [
        ("Qwen 3", "<tool_call> <think> </think>", ("hermes", "qwen3")),
        ("Qwen 3 Coder", "<tool_call>\n<function=example_function_name>\n<parameter=a>", ("qwen3_coder", None)),
        ("Qwen 3.5", "<tool_call>\n<function=f>\n<parameter=a> <think>", ("qwen3_coder", "qwen3")),
        ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>", ("openai", "openai_gptoss")),
        ("Llama 3.1", "<|start_header_id|> <|python_tag|>", ("llama3_json", None)),
        ("Llama 4", '<|header_start|> {"name": f, "parameters": d}', ("llama3_json", None)),
        ("Llama 4, pythonic", "<|header_start|> [func_name1(param1=value1)]", ("pythonic", None)),
        ("Mistral Small", "[TOOL_CALLS] [", ("mistral", None)),
        ("Magistral", "[TOOL_CALLS]f[ARGS] [THINK]", ("mistral", "mistral")),
        ("DeepSeek R1", "<｜Assistant｜> <｜tool▁call▁begin｜> </think>", ("deepseek_v3", "deepseek_r1")),
        (
            "DeepSeek V3.1",
            "<｜Assistant｜> <｜tool▁call▁begin｜> </think> if not thinking",
            ("deepseek_v3", "deepseek_v3"),
        ),
        ("DeepSeek V3.2", 'dsml_token = "｜DSML｜" </think> function_calls>', ("deepseek_v32", "deepseek_v3")),
        ("GLM 4.6", "<tool_call>{f}\n<arg_key>k</arg_key>\n<arg_value> <think></think>", ("glm45", "glm45")),
        ("Kimi K2", "<|im_system|>tool_declare<|im_middle|>", ("kimi_k2", None)),
        ("Kimi K2 Thinking", "<|im_middle|> <|tool_calls_section_begin|> <think></think>", ("kimi_k2", "kimi_k2")),
        ("MiniMax M2", "<minimax:tool_call> </think> <think>", ("minimax_m2", "minimax_m2")),
        ("Nemotron Nano 2", "<TOOLCALL>[ </think>", ("nemotron_json", "qwen3")),
        ("LFM2", "<|tool_list_start|>", ("lfm2", None)),
        ("Olmo 3", "<function_calls>\nf()\n</function_calls>", ("olmo3", None)),
        ("Phi 4 mini", "<|tool|> <|/tool|>", ("phi4_mini_json", None)),
        ("Granite 3.2", "<|start_of_role|>available_tools Here is my thought process:", ("granite", "granite")),
        ("Granite 4", "<|start_of_role|>available_tools <tool_call>", ("granite4", None)),
        ("Seed OSS", "<seed:tool_call>\n<function=f>\n<parameter=a> <seed:think>", ("seed_oss", "seed_oss")),
        ("Gemma 4", "<|tool_call>call: <|channel>thought\n", ("gemma4", "gemma4")),
        ("FunctionGemma", "<start_function_call>call:", ("functiongemma", None)),
        ("Command R7B", "<|START_ACTION|>[ <|START_THINKING|>", ("cohere_command3", "cohere_command3")),
        ("Apriel 1.5", "<tool_calls>[ <tool_call>", ("jamba", None)),
        ("LFM2.5", "<|im_start|>system List of tools: [ <think>", ("lfm2", "qwen3")),
        ("MiniMax M3", "]<]minimax[>[ <tool_call> <mm:think>", ("minimax_m3", "minimax_m3")),
        ("Functionary 3.1", "<|python_tag|> <function=f>{}</function>", (None, None)),
        ("Granite 3.3", "<|start_of_role|>available_tools <|tool_call|> <think> <response>", ("granite", "granite")),
    ],
)
def test_marks_of_published_templates(family: str, marks: str, expected: tuple[str | None, str | None]) -> None:
    """The marks by which the families' own templates differ lead to their parsers."""
    assert_chosen(marks, *expected)


def test_markers_that_begin_others() -> None:
    """The longest of those that begin together wins, once it is known."""
    markers = Markers("<a", "<ab>", "<abc>", "x")

    assert (1, 1 + len("<ab"), "") == markers.search(" <ab", 0, ended=False)
    assert (1, 3, "<a") == markers.search(" <ab", 0, ended=True)
    assert (0, 5, "<abc>") == markers.search("<abc>", 0, ended=True)
    assert (0, 4, "<ab>") == markers.search("<ab><abc>", 0, ended=False)
    assert (4, 9, "<abc>") == markers.search("<ab><abc>", 1, ended=False)
    assert (0, 2, "<a") == markers.search("<abd", 0, ended=False)
    assert (2, 2, "") == markers.search("<b", 0, ended=False)


SCHEMA = {
    "properties": {
        "a": {"type": "integer"},
        "b": {"$ref": "#/$defs/B"},
        "c": {"$ref": "#/$defs/Loop"},
        "d": {"$ref": "http://elsewhere"},
        "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "f": {"allOf": [{"description": "x"}, {"type": "number"}]},
        "g": {"const": 1.5},
        "h": {"enum": [True, None, {}, [], 1, "x"]},
        "i": {"oneOf": [{"type": "string"}, {}]},
        "j": True,
        "k": {"$ref": "#/properties/a/type/x"},
        "l": {"type": "string"},
        "m": {"$ref": "#/$defs/a~1b~01c"},
        "n": {"type": ["string", 5]},
        "o": {"$ref": 5, "enum": [1]},
        "p": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "q": {"anyOf": [], "const": 1},
        "r": {"enum": "x"},
        "s": {"$ref": "elsewhere/properties/a"},
        "t": {"$ref": "#/$defs/0"},
        "u": {"allOf": [{"type": "string"}, {"$ref": "#/$defs/Wide"}]},
    },
    "$defs": {
        "B": {"type": ["boolean", "array"]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b~1c": {"type": "string"},
        # More references after each other than anybody writes, and more alternatives
        **{str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(6)},
        "6": {"type": "integer"},
        "Wide": {"anyOf": [{"$ref": "#/$defs/Wide"}] * 20},
    },
}


@every_case(
    "name,types",
    [
        ("a", {"integer"}),
        ("b", {"boolean", "array"}),
        ("c", set()),
        ("d", set()),
        ("e", {"string", "null"}),
        ("f", {"number"}),
        ("g", {"number"}),
        ("h", {"boolean", "null", "object", "array", "integer", "string"}),
        ("i", set()),
        ("j", set()),
        ("k", set()),
        ("l", {"string"}),
        ("m", {"string"}),
        ("n", {"string"}),
        ("o", {"integer"}),
        ("p", {"string", "integer"}),
        ("q", {"integer"}),
        ("r", set()),
        ("s", set()),
        ("t", {"integer"}),
        ("u", set()),
        ("none", set()),
    ],
)
def test_types_of_parameters(name: str, types: set[str]) -> None:
    """A schema's types are found behind references and alternatives; what is open stays open."""
    assert types == Parameters(SCHEMA).types(name)


@every_case(
    "name,text,expected",
    [
        ("a", " 5\n", "5"),
        ("a", "5.0", "5.0"),
        ("a", "05", '"05"'),
        ("a", "1" * 5000, "1" * 5000),
        ("g", "1e999", '"1e999"'),
        ("b", "TRUE", "true"),
        ("b", "[1,  2]", "[1,  2]"),
        ("b", "[True, ('a', -1.5), {'k': None}]", '[true, ["a", -1.5], {"k": null}]'),
        ("b", "[1, 2", '"[1, 2"'),
        ("b", "[1] [2]", '"[1] [2]"'),
        ("e", "null", "null"),
        ("e", "5", '"5"'),
        ("none", "5", "5"),
        ("none", "false", "false"),
        ("none", "None", "null"),
        ("none", '{"a": 1}', '{"a": 1}'),
        ("none", "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ("none", "plain", '"plain"'),
        ("none", " 5 apples\n", '" 5 apples\\n"'),
        ("l", "null", '"null"'),
    ],
)
def test_values_of_parameters(name: str, text: str, expected: str) -> None:
    """A value becomes JSON of the schema's type, and a string where it fits none."""
    assert expected == Parameters(SCHEMA).value(name, text)


def test_a_schema_that_is_none() -> None:
    """What clients put in the place of a schema does no harm."""
    assert Parameters(None).value("a", "1") == "1"
    assert Parameters({"properties": [1]}).types("a") == frozenset()
    assert Parameters([1]).types("a") == frozenset()  # type: ignore[arg-type]


def read_json(text: str) -> str | None:
    """Return *text* as the incremental reader passes it on, the same for any cut; nothing where it is no value."""
    found = read_pieces(text)
    for size in (3, 10, len(text) or 1):
        assert found == read_pieces([text[at : at + size] for at in range(0, len(text), size)])
    return found


def read_pieces(text: Iterable[str]) -> str | None:
    """Return what the reader passes on of *text*, fed piece by piece."""
    reader = Reader()
    parts: list[str] = []
    reading = json_text.value(reader, parts.append)
    try:
        for piece in text:
            reader.add(piece)
            next(reading)
        reader.end()
        next(reading)
    except StopIteration:
        return "".join(parts)
    except (Malformed, Ended):
        return None
    return None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES, indent=st.none() | st.integers(0, 2), ascii_only=st.booleans())
def test_json_passes_as_it_is(value: object, indent: int | None, ascii_only: bool) -> None:
    """Valid JSON is passed on to the letter."""
    text = json.dumps([value], indent=indent, ensure_ascii=ascii_only)

    assert text == read_json(text)


@every_case(
    "text",
    [
        "01",
        "-",
        "1.",
        ".5",
        "1e",
        "1e+",
        "+1",
        "0x1",
        "nul",
        "True",
        '"\\x"',
        '"\\u00g0"',
        '"\\u000g"',
        "1 2",
        ",",
        "1,",
    ],
)
def test_faults_of_json(text: str) -> None:
    """Each of these is refused, alone in an array and behind another item."""
    assert read_json(f"[{text}]") is None
    assert read_json(f"[true, {text}]") is None


@given(text=st.text(alphabet='{}[]":,\\u0aE+-.tnfrlse \n', max_size=12))
def test_what_is_not_json(text: str) -> None:
    """What json.loads refuses is refused, but for control characters inside of strings, which are escaped."""
    found = read_json(f"[{text}]")
    try:
        json.loads(f"[{text}]", strict=False)
    except ValueError:
        assert found is None or json.loads(found) is not None
    else:
        assert found is not None
        assert json.loads(f"[{text}]", strict=False) == json.loads(found)


@given(value=VALUES)
def test_python_literals(value: object) -> None:
    """What Python writes of JSON's values is read as JSON of the same value."""
    text = to_json(repr(value))

    assert text is not None
    assert ast.literal_eval(repr(value)) == json.loads(text)


@every_case(
    "text,expected",
    [
        ("1_000", "1000"),
        ("0x10", "16"),
        ("+5", "5"),
        (".5", "0.5"),
        ("()", "[]"),
        ("(1,)", "[1]"),
        ('"\\101\\0\\v\\\nx\\U0001F389"', '"A\\u0000\\u000bx🎉"'),
        ('""', '""'),
        ('""""""', '""'),
        ('"""a"b"""', '"a\\"b"'),
        ("true", "true"),
        ("{1: 2, True: 3}", '{"1": 2, "true": 3}'),
        ("{1}", None),
        ("nan", None),
        ("1e999", None),
        ("f(1)", None),
        ("1 2", None),
        ("'a' 'b'", None),
        ("'a", None),
        ("'\\x1'", None),
        ("'\\ud800'", None),
        ("'\\U99999999'", None),
        ("[1 2]", None),
        ("[,]", None),
        ("--1", None),
        ("", None),
        ("[" * 60 + "]" * 60, None),
    ],
)
def test_python_text(text: str, expected: str | None) -> None:
    """Python's literals become JSON; what is none does not."""
    assert expected == to_json(text)
