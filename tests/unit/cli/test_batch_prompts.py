"""The input of the command `batch`: what prompts and requests become, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.batch_command import parse
from tests.cases import every_case
from triton_openai.cli.batch.prompts import Prompts
from triton_openai.errors import ConfigurationError

_ROWS = '{"a": "x", "n": 1, "o": {"p": [2]}, "z": null}\n\n{"a": "y\\u2028", "n": 2.5, "o": true, "z": "{a}"}\n'
_REQUESTS = (
    '\ufeff{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x", "model": "e"}}\r\n'
    '{"custom_id": "b", "url": "/v1/embeddings", "body": {"input": "y"}}'
)


@every_case(
    "name, content, arguments, expected",
    [
        ("a.txt", "one\r\n\n  two \n", [], [("line-1", "one"), ("line-3", "  two ")]),
        ("a", "\ufeffone", ["--prompt", "Say {text} {{now}}"], [("line-1", "Say one {now}")]),
        ("a.txt", "a\u2028b\x0bc", [], [("line-1", "a\u2028b\x0bc")]),
        ("a.csv", 'id,my text\r\n7,"a ""b""\nc"\r\n8,\r\n', ["--prompt", "<{my text}>"],
         [("row-1", '<a "b"\nc>'), ("row-2", "<>")]),
        ("a.csv", "prompt,id\nx,7\ny,8", ["--id", "id"], [("7", "x"), ("8", "y")]),
        ("a.tsv", "prompt\tid\nx,y\t7", [], [("row-1", "x,y")]),
        ("a.jsonl", _ROWS, ["--prompt", "{a}|{n}|{o}|{z}"],
         [("line-1", 'x|1|{"p":[2]}|'), ("line-3", "y\u2028|2.5|true|{a}")]),
        ("a.txt", _ROWS, ["--prompt", "{a}", "--format", "jsonl"], [("line-1", "x"), ("line-3", "y\u2028")]),
    ],
)  # fmt: skip
def test_prompts_of_every_kind_of_file(
    name: str, content: str, arguments: list[str], expected: list[tuple[str, str]], tmp_path_factory: Any
) -> None:
    """Text, CSV and JSONL become prompts, with names by which their answers are known."""
    path = tmp_path_factory.mktemp("input") / name
    path.write_bytes(content.encode())
    options = parse(["run", str(path), "-o", "out", *arguments], {})
    found = []
    for request in Prompts(options).requests("m"):
        body = json.loads(request.body)
        assert {"model": "m", "messages": [{"role": "user", "content": body["messages"][0]["content"]}]} == body
        line = json.loads(request.line())
        assert 1 == len(request.line().decode().splitlines())
        assert ("POST", "/v1/chat/completions", body) == (line["method"], line["url"], line["body"])
        found.append((request.custom_id, body["messages"][0]["content"]))
    assert expected == found


def test_whole_requests_are_sent_as_they_are(tmp_path: Path) -> None:
    """What vLLM's run-batch and OpenAI's batches read needs no other options; --model is for lines without one."""
    path = tmp_path / "requests.txt"
    path.write_text(_REQUESTS)
    for arguments in (["-i", str(path), "-o", "out"], [str(path), "--output-file", "out"]):
        read = list(Prompts(parse(["run", *arguments], {})).requests("m"))
        assert [("a", "/v1/embeddings"), ("b", "/v1/embeddings")] == [(one.custom_id, one.url) for one in read]
        assert [{"input": "x", "model": "e"}, {"input": "y", "model": "m"}] == [json.loads(one.body) for one in read]


def test_other_endpoints_and_parameters(tmp_path: Path) -> None:
    """A prompt becomes what its endpoint takes."""
    path = tmp_path / "a.txt"
    path.write_text("x")
    common = ["--max-tokens", "5", "--temperature", "0.5", "--body", '{"seed": 1, "model": "n"}']
    for arguments, expected in (
        (["--endpoint", "completions", *common],
         {"model": "n", "seed": 1, "max_tokens": 5, "temperature": 0.5, "prompt": "x"}),
        (["--endpoint", "/v1/responses", "--system", "s", "--max-tokens", "5"],
         {"model": "m", "max_output_tokens": 5, "instructions": "s", "input": "x"}),
        (["--endpoint", "/v1/embeddings"], {"model": "m", "input": "x"}),
        (["--system", "s"],
         {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]}),
    ):  # fmt: skip
        (request,) = Prompts(parse(["run", str(path), "-o", "out", *arguments], {})).requests("m")
        assert expected == json.loads(request.body)


@every_case(
    "name, content, arguments, message",
    [
        ("a.txt", "x", ["--prompt", "{prompt}"], "line 1 has no field 'prompt'. Its fields are text"),
        ("a.txt", "x", ["--prompt", "{text"], "--prompt cannot be read"),
        ("a.txt", "x", ["--prompt", "{}"], "must be the name of a field"),
        ("a.txt", "x", ["--prompt", "{text!r}"], "must be the name of a field"),
        ("a.txt", "x", ["--endpoint", "rerank"], "--endpoint"),
        ("a.txt", "x", ["--endpoint", "embeddings", "--system", "s"], "--system is for"),
        ("a.txt", "x", ["--body", "[]"], "--body must be a JSON object"),
        ("a.txt", "x", ["--max-tokens", "0"], "expected a whole number above 0"),
        ("a.txt", "x", ["--url", "ftp://localhost"], "--url must begin"),
        ("a.txt", b"a\xff", [], "line 1 cannot be read"),
        ("a.csv", "prompt,b\nx", [], "row 1 has not as many fields"),
        ("a.csv", "prompt\nx,y", [], "row 1 has not as many fields"),
        ("a.csv", 'prompt\n"x', [], "row 1 cannot be read"),
        ("a.csv", "prompt,id\nx,", ["--id", "id"], "has an id of 0 characters"),
        ("a.jsonl", '{"prompt": "x"}\n{', [], "line 2 is not valid JSON"),
        ("a.jsonl", "[1]", [], "line 1 is no JSON object"),
        ("a.jsonl", _REQUESTS.replace('"url"', '"uri"', 1), [], "has no field 'prompt'"),
        ("a.jsonl", _REQUESTS + '\n{"custom_id": 1}', [], "line 3 is no request of a batch"),
        ("a.jsonl", _REQUESTS, ["--prompt", "x"], "--prompt has no meaning here"),
        ("a.jsonl", _REQUESTS, ["--id", "x"], "--id has no meaning here"),
    ],
)
def test_wrong_inputs(
    name: str, content: str | bytes, arguments: list[str], message: str, tmp_path_factory: Any
) -> None:
    """Each is a sentence that says what is wrong, and where."""
    path = tmp_path_factory.mktemp("input") / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError) as wrong:
        list(Prompts(parse(["run", str(path), "-o", "out", *arguments], {})).requests("m"))
    assert message in wrong.value.message, wrong.value.message
