# ruff: noqa: E501, RUF001 - texts as models write them; DeepSeek's markers are made of full-width bars
"""Slips of models in calls, by class, and what they mean with a request's tools."""

from __future__ import annotations

from typing import Any

import msgspec

SLIP_TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "multiply": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "grep": {"type": "object", "properties": {"pattern": {"type": "string"}}},
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    "exec": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "list_files": {"type": "object", "properties": {"path": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
    "load": {"type": "object", "properties": {"refs": {"type": "array"}, "opts": {"type": "object"}}},
    "web-browsing": {"type": "object", "properties": {"url": {"type": "string"}}},
    "run": {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}},
    "flag": {"type": "object", "properties": {"on": {"type": "boolean"}}},
    "mcp__github__create_issue": {"type": "object", "properties": {"title": {"type": "string"}}},
    "edit": {
        "type": "object",
        "properties": {
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
                },
            },
            "dry": {"type": "boolean"},
        },
    },
    "pick": {
        "type": "object",
        "oneOf": [
            {"type": "object", "properties": {"number": {"type": "number"}}},
            {"type": "object", "properties": {"word": {"type": "string"}}},
        ],
    },
}


class Slip(msgspec.Struct, frozen=True):
    """A text with a slip, the format in which the model should have written, and what it means."""

    slip: str
    parser: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    content: str = ""
    reasoning: str = ""
    #: A reasoning parser, and what the prompt ends with.
    thinks: str | None = None
    prompt: str = ""


def _hermes(arguments: str, name: str = "write_file") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _kimi(arguments: str, id: str = "functions.exec:0") -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


def _mistral(arguments: str, name: str = "exec") -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


def _qwen(*parameters: tuple[str, str], name: str = "write_file") -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


_NESTED = "<x><parameter>1</parameter></x>\nend"
_OWN_FORM = "<tool_call>\n<function=exec>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>\nas above"

QUOTES = (
    Slip(
        "unescaped",
        "hermes",
        _hermes('{"content": "a "b" c", "path": "x"}'),
        (("write_file", {"content": 'a "b" c', "path": "x"}),),
    ),
    Slip(
        "unescaped at the beginning", "hermes", _hermes('{"content": ""b" c"}'), (("write_file", {"content": '"b" c'}),)
    ),
    Slip(
        "JSON in a string",
        "hermes",
        _hermes('{"content": "{"a": "b"}", "path": "x"}'),
        (("write_file", {"content": '{"a": "b"}', "path": "x"}),),
    ),
    Slip(
        "JSON in the last string",
        "hermes",
        _hermes('{"path": "x", "content": "{"a": "b"}"}'),
        (("write_file", {"path": "x", "content": '{"a": "b"}'}),),
    ),
    Slip(
        "code in a string",
        "mistral",
        _mistral('{"command": "python -c "print(1)""}'),
        (("exec", {"command": 'python -c "print(1)"'}),),
    ),
    Slip(
        "HTML in a string",
        "kimi_k2",
        _kimi('{"command": "echo <a href="x">y</a>"}'),
        (("exec", {"command": 'echo <a href="x">y</a>'}),),
    ),
    Slip(
        "a bracket and a quote",
        "hermes",
        _hermes('{"content": "if (a == "}") {"}', "write_file"),
        (("write_file", {"content": 'if (a == "}") {'}),),
    ),
    Slip(
        "two brackets and a quote",
        "hermes",
        _hermes('{"content": "x("}}") y"}'),
        (("write_file", {"content": 'x("}}") y'}),),
    ),
    Slip(
        "inch marks",
        "hermes",
        _hermes('{"content": "a 5" pipe", "path": "x"}'),
        (("write_file", {"content": 'a 5" pipe', "path": "x"}),),
    ),
    Slip(
        "no quote behind a key",
        "hermes",
        _hermes('{"city: "Bonn", "days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "no quote before a key",
        "hermes",
        _hermes('{city": "Bonn"}', "get_weather"),
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip(
        "keys without quotes",
        "mistral",
        _mistral('{city: "Bonn", days: 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "no quotes",
        "hermes",
        _hermes('{"city": Bonn, "days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "no quote at the beginning",
        "hermes",
        _hermes('{"city": Bonn", "days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "no quote at the end",
        "hermes",
        _hermes('{"city": "Bonn, "days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "no last quote",
        "hermes",
        _hermes('{"days": 2, "city": "Bonn}', "get_weather"),
        (("get_weather", {"days": 2, "city": "Bonn"}),),
    ),
    Slip("doubled", "hermes", _hermes('{""city"": ""Bonn""}', "get_weather"), (("get_weather", {"city": "Bonn"}),)),
    Slip(
        "doubled at the beginning",
        "kimi_k2",
        _kimi('{"city": ""Bonn"}', "functions.get_weather:0"),
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip(
        "doubled at the end",
        "kimi_k2",
        _kimi('{"city": "Bonn""}', "functions.get_weather:0"),
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip("the last one escaped", "kimi_k2", _kimi('{"command": "ls\\"}'), (("exec", {"command": "ls"}),)),
    Slip(
        "the last one escaped, at the end of the text",
        "mistral",
        _mistral('{"command": "git commit -m \\"x\\"}'),
        (("exec", {"command": 'git commit -m "x"'}),),
    ),
    Slip("all of them escaped", "mistral", _mistral('{\\"command\\": \\"ls\\"}'), (("exec", {"command": "ls"}),)),
    Slip("Python's", "hermes", _hermes("{'city': 'Bonn'}", "get_weather"), (("get_weather", {"city": "Bonn"}),)),
    Slip(
        "an apostrophe in Python's",
        "hermes",
        _hermes("{'content': 'it's', 'path': 'x'}"),
        (("write_file", {"content": "it's", "path": "x"}),),
    ),
    Slip("typographic", "hermes", _hermes("{“city”: “Bonn”}", "get_weather"), (("get_weather", {"city": "Bonn"}),)),
    Slip(
        "the whole call in Python's",
        "hermes",
        "<tool_call>\n{'name': 'exec', 'arguments': {'command': 'ls'}}\n</tool_call>",
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "in an array", "hermes", _hermes('{"refs": ["a "b" c", "d"]}', "load"), (("load", {"refs": ['a "b" c', "d"]}),)
    ),
    Slip(
        "in objects of an array",
        "hermes",
        _hermes('{"edits": [{"old": "a "b"", "new": "c"}], "dry": true}', "edit"),
        (("edit", {"edits": [{"old": 'a "b"', "new": "c"}], "dry": True}),),
    ),
    Slip("of three", "hermes", _hermes('{"content": """a\n"b" c"""}'), (("write_file", {"content": 'a\n"b" c'}),)),
    Slip(
        "in DeepSeek's form",
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>exec<｜tool▁sep｜>{"command": "echo "a b" c"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (("exec", {"command": 'echo "a b" c'}),),
    ),
    Slip(
        "in gpt-oss's form",
        "openai",
        '<|channel|>commentary to=functions.exec <|constrain|>json<|message|>{"command": "echo "a b" c"}<|call|>',
        (("exec", {"command": 'echo "a b" c'}),),
    ),
    Slip(
        "in a list",
        "nemotron_json",
        '<TOOLCALL>[{"name": "exec", "arguments": {"command": "echo "a b" c"}}, {"name": "now", "arguments": {}}]</TOOLCALL>',
        (("exec", {"command": 'echo "a b" c'}), ("now", {})),
    ),
    Slip("in Python's form", "pythonic", '[exec(command="echo "a b" c")]', (("exec", {"command": 'echo "a b" c'}),)),
)

TEXTS = (
    Slip("a line break", "hermes", _hermes('{"content": "a\nb"}'), (("write_file", {"content": "a\nb"}),)),
    Slip("a backslash", "hermes", _hermes('{"pattern": "\\d+\\.py"}', "grep"), (("grep", {"pattern": "\\d+\\.py"}),)),
    Slip(
        "a line break and a backslash",
        "hermes",
        _hermes('{"content": "a\\n\\d"}'),
        (("write_file", {"content": "a\n\\d"}),),
    ),
    Slip(
        "an apostrophe's backslash", "hermes", _hermes('{"content": "it\\\'s"}'), (("write_file", {"content": "it's"}),)
    ),
)

COMMAS = (
    Slip(
        "after the last",
        "hermes",
        _hermes('{"city": "Bonn", "days": 2,}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip("in an array", "hermes", _hermes('{"refs": ["a", "b",],}', "load"), (("load", {"refs": ["a", "b"]}),)),
    Slip(
        "twice",
        "hermes",
        _hermes('{"city": "Bonn",, "days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "none",
        "hermes",
        _hermes('{"city": "Bonn" "days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "a line break instead",
        "hermes",
        _hermes('{"city": "Bonn"\n"days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "behind the arguments",
        "llama3_json",
        '{"name": "exec", "parameters": {"command": "ls"},}',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "a comment",
        "hermes",
        _hermes('{"city": "Bonn", // the city\n"days": 2}', "get_weather"),
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
)

LITERALS = (
    Slip("True", "hermes", _hermes('{"on": True}', "flag"), (("flag", {"on": True}),)),
    Slip(
        "None",
        "hermes",
        _hermes('{"refs": None, "opts": {"a": False}}', "load"),
        (("load", {"refs": None, "opts": {"a": False}}),),
    ),
    Slip("a tuple", "mistral", _mistral("{\"refs\": ('a', 'b')}", "load"), (("load", {"refs": ["a", "b"]}),)),
    Slip("numbers", "hermes", _hermes('{"a": .5, "b": +2}', "add"), (("add", {"a": 0.5, "b": 2}),)),
    Slip(
        "a type",
        "hermes",
        "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Bonn', 'days': '2'}}</tool_call>",
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "JSON's in Python's form",
        "pythonic",
        "[flag(on=true), load(refs=null)]",
        (("flag", {"on": True}), ("load", {"refs": None})),
    ),
)

BRACKETS = (
    Slip(
        "parentheses for the call's braces",
        "hermes",
        '<tool_call>\n("name": "exec", "arguments": {"command": "ls"})\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "parentheses for the braces of arguments",
        "hermes",
        '<tool_call>\n{"name": "exec", "arguments": ("command": "ls")}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "doubled braces of a call",
        "hermes",
        '<tool_call>\n{{"name": "exec", "arguments": {"command": "ls"}}}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "doubled braces everywhere",
        "hermes",
        '<tool_call>\n{{"name": "exec", "arguments": {{"command": "ls"}}}}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "doubled braces of arguments",
        "hermes",
        '<tool_call>\n{"name": "exec", "arguments": {{"command": "ls"}}}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "braces doubled at the beginning only",
        "hermes",
        '<tool_call>\n{"name": "exec", "arguments": {{"command": "ls"}}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip("doubled braces of Kimi's arguments", "kimi_k2", _kimi('{{"command": "ls"}}'), (("exec", {"command": "ls"}),)),
    Slip(
        "doubled braces of Mistral's arguments",
        "mistral",
        _mistral('{{"command": "ls"}}'),
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no last one",
        "hermes",
        '<tool_call>\n{"name": "load", "arguments": {"opts": {"a": 1}}\n</tool_call>',
        (("load", {"opts": {"a": 1}}),),
    ),
    Slip(
        "no last two",
        "hermes",
        '<tool_call>\n{"name": "load", "arguments": {"opts": {"a": 1}\n</tool_call>',
        (("load", {"opts": {"a": 1}}),),
    ),
    Slip(
        "one too many",
        "hermes",
        '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip("one too many behind arguments", "kimi_k2", _kimi('{"command": "ls"}}'), (("exec", {"command": "ls"}),)),
    Slip("none behind arguments", "kimi_k2", _kimi('{"command": "ls"'), (("exec", {"command": "ls"}),)),
    Slip(
        "no bracket of the list",
        "nemotron_json",
        '<TOOLCALL>[{"name": "exec", "arguments": {"command": "ls"}}</TOOLCALL>',
        (("exec", {"command": "ls"}),),
    ),
    Slip("no bracket of an array", "hermes", _hermes('{"refs": ["a", "b"}', "load"), (("load", {"refs": ["a", "b"]}),)),
    Slip(
        "parentheses",
        "gemma4",
        '<|tool_call>call:get_weather(city=<|"|>Bonn<|"|>, days=5)<tool_call|>',
        (("get_weather", {"city": "Bonn", "days": 5}),),
    ),
    Slip(
        "parentheses and colons",
        "gemma4",
        '<|tool_call>call:get_weather(city:<|"|>Bonn<|"|>,days:5)<tool_call|>',
        (("get_weather", {"city": "Bonn", "days": 5}),),
    ),
    Slip(
        "parentheses and JSON",
        "gemma4",
        '<|tool_call>call:get_weather({"city": "Bonn"})<tool_call|>',
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip(
        "braces for parentheses",
        "pythonic",
        '[get_weather{city="Bonn", days=5}]',
        (("get_weather", {"city": "Bonn", "days": 5}),),
    ),
    Slip("no list", "pythonic", 'get_weather(city="Bonn", days=5)', (("get_weather", {"city": "Bonn", "days": 5}),)),
    Slip(
        "parentheses in Mistral's form",
        "mistral",
        '[TOOL_CALLS]get_weather(city="Bonn")',
        (("get_weather", {"city": "Bonn"}),),
    ),
)

NOTATIONS = (
    Slip("JSON for tags", "qwen3_coder", _hermes('{"command": "ls"}', "exec"), (("exec", {"command": "ls"}),)),
    Slip("JSON for GLM's tags", "glm45", _hermes('{"command": "ls"}', "exec"), (("exec", {"command": "ls"}),)),
    Slip(
        "a name and JSON for GLM's tags",
        "glm45",
        '<tool_call>exec\n{"command": "ls"}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "JSON in a function",
        "qwen3_coder",
        '<tool_call>\n<function=exec>\n{"command": "ls"}\n</function>\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "JSON in invoke",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="exec">\n{"command": "ls"}\n</invoke>\n</minimax:tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "tags for JSON",
        "hermes",
        _qwen(("path", "x"), ("content", "y")),
        (("write_file", {"path": "x", "content": "y"}),),
    ),
    Slip(
        "GLM's tags for JSON",
        "hermes",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bonn</arg_value></tool_call>",
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip(
        "tags without an outer one for JSON",
        "hermes",
        "<function=exec>\n<parameter=command>\nls\n</parameter>\n</function>",
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "Python for JSON",
        "hermes",
        '<tool_call>\nget_weather(city="Bonn", days=2)\n</tool_call>',
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "JSON for Python",
        "pythonic",
        '[{"name": "exec", "parameters": {"command": "ls"}}, {"name": "now", "parameters": {}}]',
        (("exec", {"command": "ls"}), ("now", {})),
    ),
    Slip(
        "JSON for Liquid's Python",
        "lfm2",
        '<|tool_call_start|>[{"name": "exec", "arguments": {"command": "ls"}}]<|tool_call_end|>',
        (("exec", {"command": "ls"}),),
    ),
    Slip("Python for Llama's JSON", "llama3_json", '[get_weather(city="Bonn")]', (("get_weather", {"city": "Bonn"}),)),
    Slip(
        "the wrapper of OpenAI's API",
        "hermes",
        '<tool_call>\n{"type": "function", "function": {"name": "exec", "arguments": {"command": "ls"}}}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "arguments in a string, not escaped",
        "hermes",
        '<tool_call>\n{"name": "exec", "arguments": "{"command": "ls"}"}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "arguments beside the name",
        "hermes",
        '<tool_call>\n{"name": "exec", "command": "ls"}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "attributes for names",
        "qwen3_coder",
        '<tool_call>\n<function name="exec">\n<parameter name="command">ls</parameter>\n</function>\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "JSON in DeepSeek's section",
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{"name": "exec", "arguments": {"command": "ls"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (("exec", {"command": "ls"}),),
    ),
    Slip("Hermes' tags for Mistral's", "mistral", _hermes('{"command": "ls"}', "exec"), (("exec", {"command": "ls"}),)),
    Slip(
        "Hermes' tags for Llama's JSON",
        "llama3_json",
        _hermes('{"command": "ls"}', "exec"),
        (("exec", {"command": "ls"}),),
    ),
)

TAGS = (
    Slip(
        "no opening one",
        "hermes",
        '{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip("none", "hermes", '{"name": "exec", "arguments": {"command": "ls"}}', (("exec", {"command": "ls"}),)),
    Slip(
        "a fence for it",
        "hermes",
        '<tool_call>\n```json\n{"name": "exec", "arguments": {"command": "ls"}}\n```\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "doubled",
        "hermes",
        '<tool_call>\n<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>\n</tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "doubled at the end", "qwen3_coder", _qwen(("path", "x")) + "\n</tool_call>", (("write_file", {"path": "x"}),)
    ),
    Slip("doubled for GLM", "glm45", "<tool_call><tool_call>now</tool_call></tool_call>", (("now", {}),)),
    Slip(
        "another outer one",
        "qwen3_coder",
        "<function_calls>\n<function=exec>\n<parameter=command>\nls\n</parameter>\n</function>\n</function_calls>",
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no section",
        "kimi_k2",
        '<|tool_call_begin|>functions.exec:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no outer one for MiniMax",
        "minimax_m2",
        '<invoke name="exec">\n<parameter name="command">ls</parameter>\n</invoke>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no end of a function",
        "qwen3_coder",
        "<tool_call>\n<function=exec>\n<parameter=command>\nls\n</parameter>\n</tool_call>",
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no end of a call",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="exec">\n<parameter name="command">ls</parameter>\n</minimax:tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no end of a value",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="exec">\n<parameter name="command">ls\n</invoke>\n</minimax:tool_call>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no end at all",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="exec">\n<parameter name="command">ls</parameter>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no <arg_value>",
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key>Bonn</arg_value></tool_call>",
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip(
        "no </arg_key>",
        "glm45",
        "<tool_call>get_weather<arg_key>city<arg_value>Bonn</arg_value></tool_call>",
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip(
        "no </arg_value>",
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bonn\n<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
        (("get_weather", {"city": "Bonn", "days": 2}),),
    ),
    Slip(
        "no last </arg_value>",
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bonn</tool_call>",
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip(
        "no last </arg_value>, with lines",
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bonn\n</tool_call>",
        (("get_weather", {"city": "Bonn"}),),
    ),
    Slip("no end of Gemma's", "gemma4", '<|tool_call>call:exec{command:<|"|>ls<|"|>}', (("exec", {"command": "ls"}),)),
)

VALUES = (
    Slip(
        "Qwen's end tag",
        "qwen3_coder",
        _qwen(("content", _NESTED), ("path", "a")),
        (("write_file", {"content": _NESTED, "path": "a"}),),
    ),
    Slip(
        "Qwen's end of a function",
        "qwen3_coder",
        _qwen(("content", "a\n</function>\nb")),
        (("write_file", {"content": "a\n</function>\nb"}),),
    ),
    Slip(
        "Qwen's whole form",
        "qwen3_coder",
        _qwen(("path", "a"), ("content", _OWN_FORM)),
        (("write_file", {"path": "a", "content": _OWN_FORM}),),
    ),
    Slip(
        "GLM's end tag",
        "glm45",
        "<tool_call>write_file<arg_key>content</arg_key><arg_value>a</arg_value>b</arg_value><arg_key>path</arg_key><arg_value>x</arg_value></tool_call>",
        (("write_file", {"content": "a</arg_value>b", "path": "x"}),),
    ),
    Slip(
        "MiniMax's end tag",
        "minimax_m2",
        f'<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="content">{_NESTED}</parameter>\n</invoke>\n</minimax:tool_call>',
        (("write_file", {"content": _NESTED}),),
    ),
    Slip(
        "DeepSeek's end tag",
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write_file">\n<｜DSML｜parameter name="content" string="true">a</｜DSML｜parameter>b</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        (("write_file", {"content": "a</｜DSML｜parameter>b"}),),
    ),
    Slip(
        "Gemma's quote",
        "gemma4",
        '<|tool_call>call:exec{command:<|"|>echo <|"|>a b<|"|> c<|"|>}<tool_call|>',
        (("exec", {"command": 'echo "a b" c'}),),
    ),
    Slip(
        "Gemma's quote and a comma",
        "gemma4",
        '<|tool_call>call:exec{command:<|"|>f(<|"|>a<|"|>, <|"|>b<|"|>)<|"|>}<tool_call|>',
        (("exec", {"command": 'f("a", "b")'}),),
    ),
)

NAMES = (
    Slip("no separators", "kimi_k2", _kimi('{"command": "ls"}', "functionsexec0"), (("exec", {"command": "ls"}),)),
    Slip("no colon", "kimi_k2", _kimi('{"command": "ls"}', "functions.exec12"), (("exec", {"command": "ls"}),)),
    Slip("no prefix", "kimi_k2", _kimi('{"command": "ls"}', "exec:0"), (("exec", {"command": "ls"}),)),
    Slip("underscores", "kimi_k2", _kimi('{"command": "ls"}', "functions_exec_0"), (("exec", {"command": "ls"}),)),
    Slip("a prefix", "hermes", _hermes('{"command": "ls"}', "functions.exec"), (("exec", {"command": "ls"}),)),
    Slip("a namespace", "hermes", _hermes('{"command": "ls"}', "default_api.exec"), (("exec", {"command": "ls"}),)),
    Slip("an underscore", "hermes", _hermes('{"url": "x"}', "web_browsing"), (("web-browsing", {"url": "x"}),)),
    Slip("another case", "mistral", _mistral('{"city": "Bonn"}', "getWeather"), (("get_weather", {"city": "Bonn"}),)),
    Slip(
        "no namespace",
        "hermes",
        _hermes('{"title": "x"}', "create_issue"),
        (("mcp__github__create_issue", {"title": "x"}),),
    ),
    Slip(
        "a namespace by dots",
        "qwen3_coder",
        _qwen(("title", "x"), name="mcp.github.create_issue"),
        (("mcp__github__create_issue", {"title": "x"}),),
    ),
    Slip("an id", "kimi_k2", _kimi('{"city": "Bonn"}', "call_8f2a01"), (("get_weather", {"city": "Bonn"}),)),
    Slip(
        "an id, and the name in the arguments",
        "kimi_k2",
        _kimi('{"name": "exec", "arguments": {"command": "ls"}}', "call_1"),
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "gpt-oss's prefix",
        "openai",
        '<|channel|>commentary to=functions.functions.exec <|constrain|>json<|message|>{"command": "ls"}<|call|>',
        (("exec", {"command": "ls"}),),
    ),
)

SCHEMAS = (
    Slip("a union at the root", "qwen3_coder", _qwen(("number", "42"), name="pick"), (("pick", {"number": 42}),)),
    Slip(
        "a union at the root, text",
        "glm45",
        "<tool_call>pick<arg_key>word</arg_key><arg_value>42</arg_value></tool_call>",
        (("pick", {"word": "42"}),),
    ),
)

THINKING = (
    Slip(
        "a call in it",
        "hermes",
        "Hm.\n" + _hermes('{"command": "ls"}', "exec"),
        (("exec", {"command": "ls"}),),
        reasoning="Hm.",
        thinks="qwen3",
        prompt="<think>\n",
    ),
    Slip(
        "a call in it, then more of it",
        "hermes",
        "Hm.\n" + _hermes('{"command": "ls"}', "exec") + "\nSo.\n</think>\n\nOk.",
        (("exec", {"command": "ls"}),),
        "Ok.",
        "Hm.\nSo.",
        "qwen3",
        "<think>\n",
    ),
    Slip(
        "its end in a value",
        "qwen3_coder",
        "Hm.\n" + _qwen(("content", "a</think>b")),
        (("write_file", {"content": "a</think>b"}),),
        reasoning="Hm.",
        thinks="qwen3",
        prompt="<think>\n",
    ),
    Slip(
        "a marker in it",
        "hermes",
        "The <tool_call> tag.\n</think>\nOk.",
        content="Ok.",
        reasoning="The <tool_call> tag.",
        thinks="qwen3",
        prompt="<think>\n",
    ),
    Slip(
        "opened by the model, a call in it",
        "hermes",
        "<think>Hm.\n" + _hermes('{"command": "ls"}', "exec"),
        (("exec", {"command": "ls"}),),
        reasoning="Hm.",
        thinks="qwen3",
    ),
    Slip("skipped", "hermes", "It is 4.\nReally.", content="It is 4.\nReally.", thinks="qwen3", prompt="<think>\n"),
    Slip(
        "skipped, with a call",
        "hermes",
        _hermes('{"command": "ls"}', "exec"),
        (("exec", {"command": "ls"}),),
        thinks="qwen3",
        prompt="<think>\n",
    ),
    Slip(
        "a call with a slip in it",
        "kimi_k2",
        "Hm." + _kimi('{"command": "ls",}', "functionsexec0"),
        (("exec", {"command": "ls"}),),
        reasoning="Hm.",
        thinks="kimi_k2",
        prompt="<think>",
    ),
)

#: What has two meanings, or none: it stays text.
UNCLEAR = tuple(
    Slip(slip, parser, text, content=text)
    for slip, parser, text in (
        ("two tools take the arguments", "kimi_k2", _kimi('{"a": 1, "b": 2,}', "call_1")),
        ("an unknown tool", "hermes", _hermes('{"a": 1,}', "delete_everything")),
        ("a word for a number", "hermes", _hermes('{"days": many}', "get_weather")),
        ("a program's word", "hermes", _hermes('{"city": undefined}', "get_weather")),
        ("an expression", "hermes", _hermes('{"a": 1 + 2}', "add")),
        ("prose", "hermes", "<tool_call> is the tag for exec, you know.</tool_call>"),
        ("JSON of the answer", "hermes", '{"name": "exec", "age": 7}'),
        ("a list of the answer", "pythonic", "[1, 2, 3] is exec's list."),
        ("code of the answer", "pythonic", "exec(command) runs a command."),
    )
)

_SECTION = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.exec:0<|tool_call_argument_begin|>{"command": "ls"}'
    '<|tool_call_end|><|tool_call_begin|>functions.run:1<|tool_call_argument_begin|>{"command": "a "b"",}'
    "<|tool_call_end|><|tool_call_begin|>functions.now:2<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
#: More of each class, in other formats.
MORE = (
    Slip(
        "among others", "kimi_k2", _SECTION, (("exec", {"command": "ls"}), ("run", {"command": 'a "b"'}), ("now", {}))
    ),
    Slip("no comma", "pythonic", '[run(command="ls" timeout=5)]', (("run", {"command": "ls", "timeout": 5}),)),
    Slip("a method", "llama3_json", '<|python_tag|>exec.call(command="ls")', (("exec", {"command": "ls"}),)),
    Slip(
        "no end of a tag",
        "qwen3_coder",
        "<tool_call>\n<function=exec\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no opening tag of GLM",
        "glm45",
        "exec<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>",
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "no opening tag of Gemma",
        "gemma4",
        'call:exec{command:<|"|>ls<|"|>}<tool_call|>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "a closing tag of Mistral",
        "mistral",
        _mistral('{"command": "ls"}') + "[/TOOL_CALLS]",
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "a comma in a fence",
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>exec\n```json\n{"command": "ls",}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (("exec", {"command": "ls"}),),
    ),
    Slip(
        "a bracket too many",
        "openai",
        '<|channel|>commentary to=functions.exec<|message|>{"command": "ls"}}<|call|>',
        (("exec", {"command": "ls"}),),
    ),
)

#: Every slip, by its class.
CLASSES = {
    "quotes": QUOTES,
    "texts": TEXTS,
    "commas": COMMAS,
    "literals": LITERALS,
    "brackets": BRACKETS,
    "notations": NOTATIONS,
    "tags": TAGS,
    "values": VALUES,
    "names": NAMES,
    "schemas": SCHEMAS,
    "thinking": THINKING,
    "more": MORE,
    "unclear": UNCLEAR,
}
SLIPS = (
    *QUOTES, *TEXTS, *COMMAS, *LITERALS, *BRACKETS, *NOTATIONS, *TAGS, *VALUES, *NAMES, *SCHEMAS, *THINKING, *MORE, *UNCLEAR,
)  # fmt: skip
