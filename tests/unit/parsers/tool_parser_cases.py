# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""Texts as models write them, and what each tool parser makes of them."""

from __future__ import annotations

from typing import Any

import msgspec

from triton_openai.parsers.parser_registry import TOOL_PARSERS

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "celsius": {"type": "boolean"},
            "limit": {"type": ["number", "null"]},
            "where": {"$ref": "#/$defs/Place"},
            "tags": {"anyOf": [{"type": "array"}, {"type": "null"}]},
            "unit": {"enum": ["C", "F"]},
        },
        "$defs": {"Place": {"type": "object"}},
    },
    "now": {},
}


class Case(msgspec.Struct, frozen=True):
    """A text and what it means. A call is name and arguments (as text), or id, name and arguments."""

    parser: str
    name: str
    text: str
    calls: tuple[tuple[str, ...], ...] = ()
    content: str = ""
    reasoning: str = ""


def _same(name: str, content: str, *parsers: str) -> tuple[Case, ...]:
    """Return cases in which the text is content, as it is, for each of *parsers*."""
    return tuple(Case(parser, name, content, content=content) for parser in parsers)


#: How often a parser copies or looks at a character, at most. A cost that grows with the square is hundreds of times.
LOOKS = 6

#: Every built-in parser.
ALL = tuple(TOOL_PARSERS.table)

PLAIN = (
    *_same("empty", "", *ALL),
    *_same("plain", "Hello, world.\n\nHow are you? ", *ALL),
    *_same("only white space", " \n ", *ALL),
    *_same("comparisons", "a < b, <b>bold</b>, x[0] [1] {y} (z) <tool <|im <｜to <min [TOOL f", *ALL),
    *_same("unicode", "日本語 🎉 <日本> naïve", *ALL),
)

WEATHER = '{"city": "Paris", "days": 2}'

HERMES = (
    Case(
        "hermes",
        "arguments twice",
        '<tool_call>{"parameters": {"a": 1}, "arguments": {"b": 2}, "name": "f"}</tool_call>',
        (("f", '{"a": 1}'),),
    ),
    Case(
        "hermes",
        "names and arguments twice",
        '<tool_call>{"name": "f", "name": "g", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>',
        (("f", '{"a": 1}'),),
    ),
    Case(
        "hermes",
        "cut in the second name",
        '<tool_call>{"name": "f"}</tool_call><tool_call>{"na',
        (("f", "{}"),),
        '<tool_call>{"na',
    ),
    *_same("a comma left out", '<tool_call>{"name": "f" "arguments": {}}</tool_call>', "hermes"),
    Case(
        "hermes",
        "one call",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        (("get_weather", WEATHER),),
    ),
    Case(
        "hermes",
        "two calls and text",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n\nDone. ',
        (("get_weather", WEATHER), ("now", "{}")),
        "Let me see.\n\nDone. ",
    ),
    Case(
        "hermes",
        "arguments first, as they were written",
        '<tool_call>{"arguments": { "a" : [1, -2.5e3, {"b": null}],\n "c": "}<\\/tool_call>\\u00e9\\"" }, "name":"f"}'
        "</tool_call>",
        (("f", '{ "a" : [1, -2.5e3, {"b": null}],\n "c": "}<\\/tool_call>\\u00e9\\"" }'),),
    ),
    Case(
        "hermes",
        "markers inside of strings",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call><tool_call>{"}}</tool_call>',
        (("f", '{"s": "</tool_call><tool_call>{"}'),),
    ),
    Case(
        "hermes",
        "arguments as a string of JSON",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        (("f", '{"a": 1}'),),
    ),
    Case("hermes", "arguments null", '<tool_call>{"name": "f", "arguments": null}</tool_call>', (("f", "{}"),)),
    Case("hermes", "arguments empty", '<tool_call>{"name": "f", "arguments": " "}</tool_call>', (("f", "{}"),)),
    Case("hermes", "no arguments", '<tool_call>{"id": [1], "name": "f"}</tool_call>', (("f", "{}"),)),
    Case(
        "hermes",
        "a list",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
        (("f", "{}"), ("g", "{}")),
    ),
    Case(
        "hermes",
        "two objects behind one marker",
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>',
        (("f", "{}"), ("g", "{}")),
    ),
    Case(
        "hermes",
        "a line break inside of a string",
        '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb\x01"}}</tool_call>',
        (("f", '{"code": "a\\n\\tb\\u0001"}'),),
    ),
    Case(
        "hermes",
        "the last brace left out",
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Case(
        "hermes",
        "the closing marker left out",
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}',
        (("f", "{}"), ("g", "{}")),
    ),
    Case("hermes", "cut in the arguments", '<tool_call>{"name": "f", "arguments": {"a": "b', (("f", '{"a": "b'),)),
    Case("hermes", "cut in the closing marker", '<tool_call>{"name": "f", "arguments": {}}\n</tool_', (("f", "{}"),)),
    Case(
        "hermes",
        "malformed behind the arguments' beginning",
        '<tool_call>{"name": "f", "arguments": {"b": "c", "a": oops}}</tool_call>',
        (("f", '{"b": "c", "a": oops'),),
        "}}</tool_call>",
    ),
    *_same("malformed before a value", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "hermes"),
    Case(
        "hermes",
        "a good call between bad ones",
        '<tool_call>oh</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
        '<tool_call>{"name": 1}</tool_call>',
        (("f", "{}"),),
        '<tool_call>oh</tool_call><tool_call>{"name": 1}</tool_call>',
    ),
    Case(
        "hermes",
        "a marker in a marker's place",
        '<tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        (("f", "{}"),),
        "<tool_call>",
    ),
    *_same("cut before the name", 'Well:\n<tool_call>\n{"name": "get_', "hermes"),
    *_same("not JSON", "<tool_call>get the weather</tool_call>\n", "hermes"),
    *_same("no name", '<tool_call>{"arguments": {"a": 1}}</tool_call>', "hermes"),
    *_same("name is a number", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "hermes"),
    *_same("name is a lone surrogate", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "hermes"),
    *_same("name is half a character", '<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', "hermes"),
    *_same("arguments are a list", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "hermes"),
    *_same("arguments are no JSON", '<tool_call>{"name": "f", "arguments": "a=1"}</tool_call>', "hermes"),
    *_same("arguments are a word", '<tool_call>{"name": "f", "arguments": nothing}</tool_call>', "hermes"),
    *_same("an unknown escape", '<tool_call>{"name": "\\x41", "arguments": {}}</tool_call>', "hermes"),
    *_same("a bad escape", '<tool_call>{"name": "\\u12x4", "arguments": {}}</tool_call>', "hermes"),
    *_same("a closing marker alone", "</tool_call>", "hermes"),
)

LLAMA = (
    Case("llama3_json", "bare", f'{{"name": "get_weather", "parameters": {WEATHER}}}', (("get_weather", WEATHER),)),
    Case(
        "llama3_json",
        "with type",
        f'\n{{"type": "function", "name": "get_weather", "parameters": {WEATHER}}}\n',
        (("get_weather", WEATHER),),
    ),
    Case(
        "llama3_json",
        "several",
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "now", "parameters": {{}}}}',
        (("get_weather", WEATHER), ("now", "{}")),
    ),
    Case("llama3_json", "python tag", '<|python_tag|>{"name": "other", "arguments": {}}', (("other", "{}"),)),
    Case(
        "llama3_json",
        "text behind",
        '{"name": "now", "parameters": {}}\nThere.',
        (("now", "{}"),),
        "There.",
    ),
    Case(
        "llama3_json",
        "a call behind JSON",
        '{"name": "Alice"}\n<|python_tag|>{"name": "other", "parameters": {}}',
        (("other", "{}"),),
        '{"name": "Alice"}',
    ),
    *_same("JSON that is the answer", '{"name": "Alice", "age": 7, "parameters": {}}', "llama3_json"),
    *_same("a name that a tool has too", '{"name": "now", "age": 7, "parameters": {}}', "llama3_json"),
    *_same("other JSON", '{"answer": {"name": "now", "parameters": {}}}', "llama3_json"),
    *_same("a name and no more", '{"name": "now"}', "llama3_json"),
    *_same("an unknown function", '{"name": "other", "parameters": {}}', "llama3_json"),
    *_same("JSON further on", 'Use {"name": "now", "parameters": {}} for it.', "llama3_json"),
    *_same("code", '<|python_tag|>brave_search.call(query="x")', "llama3_json"),
)

MISTRAL = (
    Case(
        "mistral",
        "old",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        (("f", '{"a": [1]}'), ("g", "{}")),
    ),
    Case("mistral", "old with text", 'Hm. [TOOL_CALLS][{"name": "f", "arguments": {}}]', (("f", "{}"),), "Hm."),
    Case(
        "mistral",
        "new",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
        (("f", '{"a": "[TOOL_CALLS]"}'), ("g", "{}")),
    ),
    Case("mistral", "new with id", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', (("abc123XYZ", "f", '{"a": 1}'),)),
    Case("mistral", "without [ARGS]", '[TOOL_CALLS]f{"a": 1}', (("f", '{"a": 1}'),)),
    Case(
        "mistral", "cut", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": ', (("f", '{"a": 1}'), ("g", '{"b": '))
    ),
    Case(
        "mistral",
        "malformed second",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, oops]',
        (("f", "{}"),),
        ", oops]",
    ),
    *_same("prose", "[TOOL_CALLS] are not for me", "mistral"),
    *_same("cut name", "[TOOL_CALLS]get_we", "mistral"),
    *_same("not an object", "[TOOL_CALLS]f[ARGS][1]", "mistral"),
    *_same("an empty list", "[TOOL_CALLS][]", "mistral"),
)

QWEN3_CODER = (
    Case(
        "qwen3_coder",
        "typed by the schema",
        'I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=celsius>\nTrue\n</parameter>\n<parameter=limit>\n1.5\n</parameter>\n"
        "<parameter=where>\n{\"a\": [1]}\n</parameter>\n<parameter=tags>\n['x', None]\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
        (
            (
                "get_weather",
                '{"city": "New\\n\\"York\\"", "days": 3, "celsius": true, "limit": 1.5, "where": {"a": [1]}, '
                '"tags": ["x", null], "unit": "C"}',
            ),
        ),
        "I look.",
    ),
    Case(
        "qwen3_coder",
        "two calls",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=other>\n<parameter=a>\n1\n"
        "</parameter>\n</function>\n</tool_call>\n",
        (("now", "{}"), ("other", '{"a": 1}')),
    ),
    Case(
        "qwen3_coder",
        "two functions in a call",
        "<tool_call>\n<function=now>\n</function>\n<function=other>\n</function>\n</tool_call>",
        (("now", "{}"), ("other", "{}")),
    ),
    Case(
        "qwen3_coder",
        "no opening tag",
        "Now.\n<function=now>\n</function>\n</tool_call>",
        (("now", "{}"),),
        "Now.",
    ),
    Case(
        "qwen3_coder",
        "a parameter not closed",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n4\n</function>\n</tool_call>",
        (("get_weather", '{"city": "Rome", "days": 4}'),),
    ),
    Case(
        "qwen3_coder",
        "what fits no type is a string",
        "<function=get_weather><parameter=days>soon</parameter><parameter=where>{oops</parameter><parameter=limit>null"
        "</parameter><parameter=celsius>maybe</parameter></function>",
        (("get_weather", '{"days": "soon", "where": "{oops", "limit": null, "celsius": "maybe"}'),),
    ),
    Case(
        "qwen3_coder",
        "cut in a string",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew Yo",
        (("get_weather", '{"city": "New Yo'),),
    ),
    Case(
        "qwen3_coder",
        "cut in a number",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nX\n</parameter>\n<parameter=days>\n1",
        (("get_weather", '{"city": "X"'),),
    ),
    Case("qwen3_coder", "function not closed", "<tool_call><function=now></tool_call>ok", (("now", "{}"),), "ok"),
    Case(
        "qwen3_coder",
        "two functions in one block",
        "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
        (("now", "{}"), ("now", "{}")),
    ),
    *_same("no name", "<tool_call>\n<function=>\n</function>", "qwen3_coder"),
    *_same("JSON", '<tool_call>\n{"name": "f"}\n</tool_call>', "qwen3_coder"),
)

HARMONY = (
    Case(
        "openai",
        "reasoning, call",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{WEATHER}<|call|>",
        (("get_weather", WEATHER),),
        reasoning="Need it.",
    ),
    Case(
        "openai",
        "recipient before the channel, two calls, preamble",
        "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.f<|message|> <|call|>",
        (("now", "{}"), ("f", "{}")),
        "I look.",
    ),
    Case(
        "openai",
        "final",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>1+1"
        "<|call|><|start|>assistant<|channel|>final<|message|>It is 2.\n<|return|>",
        content="It is 2.\n",
        reasoning="a\n1+1",
    ),
    Case(
        "openai",
        "a tool of the model's server",
        "<|channel|>commentary to=python code<|message|>1+1<|call|><|start|>assistant<|channel|>final<|message|>2",
        content="2",
        reasoning="1+1",
    ),
    Case("openai", "cut", "<|channel|>analysis<|message|>Thinking abou", reasoning="Thinking abou"),
    Case(
        "openai",
        "cut call",
        '<|channel|>commentary to=functions.f<|message|>{"a": "b',
        (("f", '{"a": "b'),),
    ),
    Case(
        "openai",
        "malformed call",
        "<|channel|>commentary to=functions.f<|message|>print(1)<|call|>",
        content="<|channel|>commentary to=functions.f<|message|>print(1)",
    ),
    Case("openai", "a bare name", "<|channel|>commentary to=now<|message|>{}<|call|>", (("now", "{}"),)),
    Case(
        "openai",
        "the recipient first",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}<|call|>",
        (("get_weather", WEATHER),),
    ),
    Case(
        "openai",
        "the recipient first, without a space",
        "to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        (("now", "{}"),),
    ),
    *_same("words that look like a recipient", " to=nobody, or so", "openai"),
    *_same("the recipient of a call that does not come", " to=functions.f<|channel|>", "openai"),
    *_same("cut header", "<|channel|>final", "openai"),
    *_same("a header that ends", "<|channel|>final<|end|>x", "openai"),
    *_same("no header", "<|channel|>a <b> c", "openai"),
)

DEEPSEEK = (
    Case(
        "deepseek_v3",
        "V3",
        "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("f", '{"a": "```"}'), ("g", "{}")),
        "Ok.",
    ),
    Case(
        "deepseek_v31",
        "V3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g'
        "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Case("deepseek_v3", "cut", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a', (("f", '{"a'),)),
    *_same(
        "malformed", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "deepseek_v3"
    ),
    Case(
        "deepseek_v3",
        "malformed second",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g"
        "<｜tool▁sep｜>[1]",
        (("f", "{}"),),
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>[1]",
    ),
    *_same(
        "malformed in a fence",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]\n```",
        "deepseek_v3",
    ),
    Case(
        "deepseek_v32",
        "V3.2",
        'Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true"> 杭州\n"x" </｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="more" string="false">{"k": [true]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        (("get_weather", '{"city": " 杭州\\n\\"x\\" ", "days": 2, "more": {"k": [true]}}'), ("now", "{}")),
        "Ok.",
    ),
    Case(
        "deepseek_v4",
        "V4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="n" string="true">5'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        (("f", '{"n": "5"}'),),
    ),
    *_same("malformed", '<｜DSML｜function_calls>\n<｜DSML｜invoke id="f">\n', "deepseek_v32"),
)

GLM = (
    Case(
        "glm45",
        "4.5",
        "Ok\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        (("get_weather", '{"city": "Paris\\n", "days": 2}'), ("now", "{}")),
        "Ok",
    ),
    Case(
        "glm47",
        "4.7",
        "<tool_call>get_weather<arg_key>unit</arg_key><arg_value>F</arg_value><arg_key>tags</arg_key><arg_value>"
        '["a"]</arg_value></tool_call>',
        (("get_weather", '{"unit": "F", "tags": ["a"]}'),),
    ),
    Case(
        "glm45",
        "cut",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa",
        (("get_weather", '{"city": "Pa'),),
    ),
    Case(
        "glm45",
        "spaces round a name",
        "<tool_call> get_weather <arg_key> days\n</arg_key><arg_value>2</arg_value></tool_call>",
        (("get_weather", '{"days": 2}'),),
    ),
    *_same("JSON", '<tool_call>{"name": "f"}</tool_call>', "glm45"),
    *_same("prose", "<tool_call>a call, you see</tool_call>", "glm45"),
)

KIMI = (
    Case(
        "kimi_k2",
        "two calls",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{WEATHER}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        (("functions.get_weather:0", "get_weather", WEATHER), ("functions.now:1", "now", "{}")),
        "Sure.",
    ),
    Case(
        "kimi_k2",
        "another id",
        "<|tool_calls_section_begin|><|tool_call_begin|> call_7 <|tool_call_argument_begin|> {} <|tool_call_end|>",
        (("call_7", "call_7", "{}"),),
    ),
    *_same(
        "no arguments",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>1<|tool_call_end|>",
        "kimi_k2",
    ),
    *_same("cut id", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f", "kimi_k2"),
)

MINIMAX = (
    Case(
        "minimax_m2",
        "two calls",
        'Ok\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">\nA & "B"\n</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>\n',
        (("get_weather", '{"city": "A & \\"B\\"", "days": 2}'), ("now", "{}")),
        "Ok",
    ),
    Case(
        "minimax_m2",
        "malformed parameter",
        '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter><parameter>2</parameter></invoke>',
        (("f", '{"a": 1'),),
        "2</parameter></invoke>",
    ),
    *_same("malformed", "<minimax:tool_call>\n<invoke get_weather>", "minimax_m2"),
)

PYTHONIC = (
    Case(
        "pythonic",
        "literals",
        "[get_weather(city=\"It's\", days=-2, limit=1e3, celsius=True, tags=['a', None, (1, 0x10)], "
        "where={'x': {\"y\": []}, 1: '\\n\\x41\\u00e9\\q'}), now()]",
        (
            (
                "get_weather",
                '{"city": "It\'s", "days": -2, "limit": 1000.0, "celsius": true, "tags": ["a", null, [1, 16]], '
                '"where": {"x": {"y": []}, "1": "\\nAé\\\\q"}}',
            ),
            ("now", "{}"),
        ),
    ),
    Case("pythonic", "spaces", " [ now( ) , now( ), ] ", (("now", "{}"), ("now", "{}"))),
    Case(
        "pythonic",
        "triple quotes",
        "[get_weather(city='''a\n'b''c''',)]",
        (("get_weather", '{"city": "a\\n\'b\'\'c"}'),),
    ),
    Case("pythonic", "markers", "<|python_start|>[f(a='')]<|python_end|>ok", (("f", '{"a": ""}'),), "ok"),
    Case("pythonic", "cut", "[get_weather(city='Par", (("get_weather", '{"city": "Par'),)),
    *_same("a link", "[link](https://example.com)", "pythonic"),
    *_same("an unknown function", "[other(a=1)]", "pythonic"),
    *_same("no keyword", "[now(=1)]", "pythonic"),
    *_same("positional", "[now('a')]", "pythonic"),
    *_same("a list", "[1, 2, 3]", "pythonic"),
    Case(
        "lfm2",
        "tagged",
        'Well. <|tool_call_start|>[f(a="b"), g()]<|tool_call_end|>Asked.',
        (("f", '{"a": "b"}'), ("g", "{}")),
        "Well.Asked.",
    ),
    Case(
        "olmo3",
        "lines",
        "<function_calls>\nf(a='x', b=null)\ng(c=true)\n</function_calls>",
        (("f", '{"a": "x", "b": null}'), ("g", '{"c": true}')),
    ),
)

ARRAYS = (
    Case(
        "nemotron_json",
        "two calls",
        '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    *_same("malformed", "<TOOLCALL>[f]</TOOLCALL>", "nemotron_json"),
    Case("granite", "3.0", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', (("f", '{"a": 1}'),)),
    Case("granite", "3.1", '<tool_call>[{"arguments": {}, "name": "f"}]', (("f", "{}"),)),
    Case("granite", "closed", '<tool_call>[{"name": "f"}]</tool_call>', (("f", "{}"),)),
    Case("granite", "bare", '[{"name": "now", "arguments": {}}]', (("now", "{}"),)),
    *_same("a list", '[{"name": "Bob", "arguments": {}}]', "granite"),
    Case(
        "phi4_mini_json",
        "two calls",
        'functools[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}] ok',
        (("f", '{"a": 1}'), ("g", "{}")),
        "ok",
    ),
    *_same("code", "functools[0]", "phi4_mini_json"),
)

GEMMA = (
    Case(
        "gemma4",
        "values",
        'Sure.<|tool_call>call:get_weather{celsius:true,city:<|"|>a "b" {c}\n<|"|>,days:-2,limit:null,'
        'tags:[<|"|>x<|"|>,1.5,{<|"|>k e<|"|>:[]}],where:{x:{}}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        (
            (
                "get_weather",
                '{"celsius": true, "city": "a \\"b\\" {c}\\n", "days": -2, "limit": null, "tags": ["x", 1.5, '
                '{"k e": []}], "where": {"x": {}}}',
            ),
            ("now", "{}"),
        ),
        "Sure.",
    ),
    Case(
        "gemma4",
        "what the format does not say",
        '<|tool_call>\ncall:f{ a : None , b:some words,c:"x\\n", d:007,}\n<tool_call|>',
        (("f", '{"a": null, "b": "some words", "c": "x\\n", "d": "007"}'),),
    ),
    Case("gemma4", "cut", '<|tool_call>call:f{a:1,b:<|"|>xy', (("f", '{"a": 1, "b": "xy'),)),
    *_same("malformed behind the brace", "<|tool_call>call:f{a}<tool_call|>", "gemma4"),
    *_same("malformed behind nesting without end", "<|tool_call>call:f{a:" + "[" * 60, "gemma4"),
    Case(
        "functiongemma",
        "two calls",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        (("get_weather", '{"city": "Rome", "days": 2}'), ("now", "{}")),
    ),
    *_same("prose", "<|tool_call>f(1)<tool_call|>", "gemma4"),
    *_same("cut name", "<|tool_call>call:get_we", "gemma4"),
)

OTHERS = (
    Case(
        "granite4",
        "two calls",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>',
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Case(
        "granite_20b_fc",
        "two calls",
        '<function_call> {"name": "f", "arguments": {"a": 1}}<function_call> {"name": "g", "arguments": {}}',
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Case(
        "seed_oss",
        "two calls",
        "Ok\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>5</parameter>\n<parameter=days>5</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        (("get_weather", '{"city": "5", "days": 5}'), ("now", "{}")),
        "Ok",
    ),
    *_same("not its marker", "<tool_call>\n</tool_call>", "seed_oss"),
    Case(
        "cohere_command3",
        "two calls",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Case(
        "jamba",
        "an array",
        'Ok <tool_calls>[\n{"name": "f", "arguments": {"a": 1}},\n{"name": "g", "arguments": {}}\n]</tool_calls>',
        (("f", '{"a": 1}'), ("g", "{}")),
        "Ok",
    ),
    Case(
        "minimax_m1",
        "lines",
        '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}\n</tool_calls>',
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    *_same("no array", "<tool_calls>none</tool_calls>", "jamba"),
    Case(
        "step3",
        "two calls",
        "Ok\n<｜tool_calls_begin｜>\n<｜tool_call_begin｜>\nfunction<｜tool_sep｜>"
        '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">a < b</steptml:parameter>\n'
        '<steptml:parameter name="days">2</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        (("get_weather", '{"city": "a < b", "days": 2}'), ("now", "{}")),
        "Ok",
    ),
    *_same("another kind", "<｜tool_calls_begin｜><｜tool_call_begin｜>code<｜tool_sep｜>x", "step3"),
    Case(
        "internlm",
        "a call",
        'Ok<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>',
        (("f", '{"a": 1}'),),
        "Ok",
    ),
    *_same("code", "<|action_start|><|interpreter|>\n1 + 1<|action_end|>", "internlm"),
    Case(
        "longcat",
        "two calls",
        '<longcat_tool_call>{"name": "f", "arguments": {"a": 1}}</longcat_tool_call>\n'
        '<longcat_tool_call>{"name": "g", "arguments": {}}</longcat_tool_call>',
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    Case(
        "xlam",
        "two calls",
        f'[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "now", "arguments": {{}}}}]',
        (("get_weather", WEATHER), ("now", "{}")),
    ),
    Case("xlam", "a marker", '<tool_call> [{"name": "f", "arguments": {}}]', (("f", "{}"),)),
    *_same("a list", '[{"name": "Bob", "arguments": {}}]', "xlam"),
)

CASES: tuple[Case, ...] = (
    *PLAIN,
    *HERMES,
    *LLAMA,
    *MISTRAL,
    *QWEN3_CODER,
    *HARMONY,
    *DEEPSEEK,
    *GLM,
    *KIMI,
    *MINIMAX,
    *PYTHONIC,
    *ARRAYS,
    *GEMMA,
    *OTHERS,
)
