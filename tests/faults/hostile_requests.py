"""
Hostile requests for every endpoint: right ones that are changed at random places.

A seed, a number and the ids that the service has given out determine a request.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from random import Random
from typing import Any
from urllib.parse import quote

import msgspec

from tests.clients.service import steered
from tests.form_shapes import CONTENTS, OVERHEAD
from tests.speech import encoded, muxed, speak
from triton_openai.api.bodies import FormRequest, JsonCheck
from triton_openai.api.routes import OPERATIONS
from triton_openai.config.tree import LimitSettings
from triton_openai.errors import InvalidRequest
from triton_openai.jobs import ClassificationJob, EmbeddingJob, JobType, ScoreJob, TokenEmbeddingJob
from triton_openai.operations import BodyKind, Operation

KEYS = ("sk-one", "sk-two")
#: The only model that is loaded and unloaded.
MANAGED = "text_rerank"
GENERATING = ("vllm_model", "vllm_model", "ensemble", "tensorrt_llm", "tensorrt_llm_llmapi", "text_model")
RANKING = ("text_rerank_pairs", "text_rerank_ids", "text_embedding")
SPEAKING = ("file_tts",)
#: Who does the jobs about texts, each by itself.
DOING: Mapping[JobType, tuple[str, ...]] = {
    EmbeddingJob: ("text_embedding", "text_embedding", "vllm_embedding"),
    ClassificationJob: ("text_classification", "text_classification_ids"),
    # The demo has none: the body is read before the model is found to do something else.
    TokenEmbeddingJob: ("text_embedding",),
}
HEARING = ("sensevoice",)
MODELS = tuple(dict.fromkeys((*GENERATING, *RANKING, *HEARING, *SPEAKING, *chain.from_iterable(DOING.values()))))
WORDS = "one two three"
_WORDS = steered(text=WORDS)
_PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()
_LONG_FILE = base64.b64encode(b"x, " * 900_000).decode()
_CSV = "data:text/csv;base64," + base64.b64encode(b"a,b\n1,2\n").decode()
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer", "maximum": 2**70}}}
_FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": _SCHEMA}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Paris"}'}}
_CALL_ITEM = {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": '{"city": "Paris"}'}
#: Values that a field may really have, by its name, so that a request reaches what the field does.
_PLAUSIBLE: Mapping[str, tuple[Any, ...]] = {
    "n": (1, 2, 16, 128),
    "best_of": (1, 128),
    "logprobs": (True, 0, 1, 5, 20),
    "top_logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 1, 20),
    "echo": (True, False),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}),
    "store": (True, False),
    "background": (True, False),
    "max_tokens": (1, 2, 50, 500),
    "max_output_tokens": (16, 50),
    "stop": ("two", ["o", "e", "x" * 1000]),
    "seed": (0, 2**63 - 1, -(2**63)),
    "logit_bias": ({"5": 1}, {str(number): -100 for number in range(300)}),
    "tools": (
        [{"type": "function", "function": _FUNCTION}] * 3,
        [{"type": "function", **_FUNCTION}],
        [{"name": "look_up", "input_schema": _SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
        [{"type": "custom", "name": "look_up"}, {"type": "custom", "custom": {"name": "look_up"}}],
        [{"type": "namespace", "name": "a", "tools": [{"type": "function", **_FUNCTION}]}, {"type": "web_search"}],
        [{"type": "mcp", "server_label": "a", "server_url": "https://a", "unheard_of": 2**70}, {"type": "file_search"}],
    ),
    "mcp_servers": ([{"type": "url", "url": "https://a", "name": "a"}],),
    "tool_choice": ("auto", "none", "required", {"type": "function", "name": "look_up"}),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}),
    "text": ({"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}, {"verbosity": "low"}),
    "include": (["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
    "truncate_prompt_tokens": (1, -1, 5),
    "truncation": ("auto", "disabled"),
    "encoding_format": ("base64", "float"),
    "reasoning": ({"effort": "low", "summary": "auto"}, {"summary": "detailed"}),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}),
    "metadata": ({"a": "b"}, {str(number): "x" * 512 for number in range(16)}),
    "return_token_ids": (True,),
    "return_token_strs": (True,),
    "add_special_tokens": (True, False),
    "chat_template_kwargs": ({"thinking": False}, {"a": 2**70}),
    "suffix": ("end", ""),
    "top_n": (1, 0, 2**31),
    "use_activation": (True, False),
    "order": ("asc", "desc"),
    "limit": (1, 20, 100, 1000, 10_000),
    "api-version": ("2024-10-21", "preview"),
}
_TEXTS = (
    *("", " ", "a", "\0", "\ud800", "\udc00\ud800", "\ufeff", "\u202e", "é😀", "\r\nX: y", "../../etc/passwd", "%s%n"),
    *(
        "{{ 1 / 0 }}",
        "<|im_end|>",
        "<tool_call>{",
        "</think>",
        "(a+)+$",
        "data:image/png;base64,AAAA",
        "data:,",
        "null",
    ),
    *("http://127.0.0.1:1/x", "file:///etc/passwd", "conv_", "resp_", "msg_1", "[DONE]", "1e400", "\u2028"),
)
_NUMBERS = (
    *(0, -1, 1, 2, 127, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 2**65),
    *(2**100, -(2**100), 2**200, 10**300, 0.5, -0.0, 1e308, -1e308, 5e-324, 2.0**63),
    *(float("nan"), float("inf"), float("-inf")),
)
#: Stand in JSON for a number of more digits than Python writes, and for values that are nested deeply.
_UNKNOWN = ["unheard_of", "", "\0", "a" * 300]
_LONG_NUMBER = "a number of 5000 digits"
_DEEP = re.compile(r'"(lists|objects) nested (\d+) times"')


_MOST_BYTES = 10 * 1024 * 1024


#: What stands in paths, by its name there: models, and the kinds of ids.
_SEGMENTS = {
    "model": "model",
    "deployment": "model",
    "response": "resp",
    "conversation": "conv",
    "item": "msg",
    "completion": "resp",
    "batch": "resp",
    "file": "resp",
    "upload": "upload",
}
_KINDS = ("resp", "conv", "msg", "upload", "part", "batch")
_GIVEN_OUT = re.compile(rb'"((resp|conv|msg|upload|part|batch)_[0-9a-zA-Z_]+)"')


class Known:
    """Ids that the service has given out, by their kind; those of *foreign* belong to another key."""

    def __init__(self) -> None:
        self.ids: dict[str, deque[str]] = {kind: deque(maxlen=32) for kind in _KINDS}
        self.foreign: dict[str, deque[str]] = {kind: deque(maxlen=32) for kind in self.ids}

    def note(self, answer: bytes, *, foreign: bool) -> None:
        """Remember the ids in the beginning of an *answer*."""
        for found in _GIVEN_OUT.findall(answer[:4000]):
            (self.foreign if foreign else self.ids)[found[1].decode()].append(found[0].decode())

    def id(self, chance: Random, kind: str) -> str:
        """Return an id that is there, or belongs to somebody else, or was never given out."""
        pools = [self.ids[kind], self.ids[kind], self.ids[kind], self.foreign[kind]]
        pool = chance.choice(pools)
        return chance.choice(pool) if pool and chance.random() < 0.9 else f"{kind}_{chance.randbytes(16).hex()}"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """
    A request as it is sent: *parts* one after the other. *whole* is whether it is HTTP and complete.

    An answer is expected to every one of *count* times that it stands in *parts*. *plain* is whether its path is one of
    the description.
    """

    operation: str
    method: str
    path: str
    parts: bytes
    key: str
    count: int = 1
    whole: bool = True
    plain: bool = True
    leaves: bool = False


def make(seed: int, number: int, known: Known) -> Request:
    """Return a request."""
    return _Maker(Random(f"{seed}/{number}"), known).request()


class HostileBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a batch to *endpoint*, and the ids of its lines. One that is not *whole* may fail as a whole."""

    endpoint: str
    content: bytes
    names: Sequence[str]
    whole: bool


def make_batch(seed: int, number: int, known: Known, *, lines: int) -> HostileBatch:
    """Return a batch of so many *lines*: right ones that are changed, of which each is answered, or any."""
    chance = Random(f"{seed}/batch/{number}")
    maker = _Maker(chance, known)
    operation = chance.choice(_BATCHED)
    whole = chance.random() < 0.8
    made: list[bytes] = []
    while len(made) < lines:
        name = f"line-{len(made)}"
        body = maker.batched_body(operation)
        line = _json({"custom_id": name, "method": "POST", "url": operation.path, "body": body})[:_MOST_BYTES]
        if not whole:
            made.append(maker.damaged(line))
        elif _is_right_line(line, operation):
            made.append(line)
    names = [f"line-{number}" for number in range(lines)]
    return HostileBatch(endpoint=operation.path, content=b"\n".join(made), names=names, whole=whole)


def _is_right_line(line: bytes, operation: Operation) -> bool:
    """Return whether the validation of a batch takes a line for *operation*, whatever becomes of it when it runs."""
    try:
        JsonCheck(LimitSettings(), batched=True).check(line)
        body = _decode_line(line).body
    except (InvalidRequest, msgspec.DecodeError, RecursionError):
        return False
    models = RANKING if ScoreJob in operation.jobs else DOING.get(operation.jobs[0], GENERATING)
    return not body.stream and not body.background and body.model in models


class _LineBody(msgspec.Struct):
    model: str = ""
    stream: bool | None = None
    background: bool | None = None


class _Line(msgspec.Struct):
    body: _LineBody


_decode_line = msgspec.json.Decoder(_Line).decode


class _Maker:
    def __init__(self, chance: Random, known: Known) -> None:
        self._chance = chance
        self._known = known

    def request(self) -> Request:
        chance = self._chance
        operation = chance.choice(_WEIGHTED)
        method, route = chance.choice(operation.routes).split()
        body = self.body(operation)
        plain = True
        if isinstance(body, dict):
            if chance.random() < 0.1:
                body |= HEAVY.get(operation.name, _Maker.heavy_inputs if _about_texts(operation) else _Maker.nothing)(
                    self
                )
            for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 3))):
                body = self._with_field(body, operation)
            for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 3))):
                body = self._changed(body)
        form = _takes_form(operation)
        data = b"" if body is None else self._form(body) if form else self._written(body)
        path = re.sub(r"\{(\w+):[^}]*\}", lambda found: quote(self._segment(found[1], operation.name), safe="/"), route)
        if operation.query or chance.random() < 0.03:
            path += self._query(operation)
        if chance.random() < 0.03:
            path, plain = chance.choice(("/" + path, path + "/", path + "/%00", path + "%2f..", "/v1" + path)), False
        if chance.random() < 0.02:
            method, plain = chance.choice(("HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "DELETE", "GET", "POST")), False
        return self._sent(operation, method, path, data, plain)

    # Lines of batches

    def batched_body(self, operation: Operation) -> Any:
        """Return the body of a line to *operation*: a right one with a few changes."""
        chance = self._chance
        body: Any = {name: value for name, value in (self.body(operation) or {}).items() if name != "stream"}
        if chance.random() < 0.02:
            heavy = HEAVY.get(operation.name, _Maker.heavy_inputs if _about_texts(operation) else _Maker.nothing)
            body |= heavy(self)
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            body = self._with_field(body, operation)
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            body = self._changed(body)
        return body

    def damaged(self, line: bytes) -> bytes:
        """Return *line*, or what is left of it."""
        chance, place = self._chance, self._chance.randrange(len(line))
        return chance.choice((
            line, line[:place], line[:place] + chance.randbytes(3) + line[place:], line.replace(b"a", b"\xff", 1),
            b"", b" " * 100_000, b"[" * 100_000, b'{"custom_id":"' + b"x" * 100_000, b"\0", b"[1,2]",
            b'{"custom_id":"a","body":{"a":[' + b"{}," * 100_000 + b"{}]}}",
        ))  # fmt: skip

    # Values

    def text(self, most: float = 5.5) -> str:
        chance = self._chance
        if chance.random() < 0.7:
            return chance.choice(_TEXTS)
        piece = chance.choice(("a", "word ", "é", "😀", '"', "\\", "\n", "\ud800", "{", "<", "1", "\u4e2d", "data:"))
        return piece * int(10 ** chance.uniform(0, most) / len(piece))

    def number(self) -> Any:
        return self._chance.choice(_NUMBERS)

    def value(self) -> Any:
        """Return any value at all."""
        chance = self._chance
        kind = chance.randrange(14)
        if kind < 3:
            return self.number()
        if kind < 6:
            return self.text()
        if kind < 8:
            return chance.choice((None, True, False, [], {}, [[]], [None], {"": None}, _LONG_NUMBER))
        if kind == 8:
            return self._deep()
        if kind == 9:
            inner: Any = chance.choice((1, 2**70, "a", None, {}, [], {"type": "text", "text": "a"}, 1e308))
            return [inner] * int(10 ** chance.uniform(0, 4.7))
        if kind == 10:
            return {f"k{number}": self.number() for number in range(int(10 ** chance.uniform(0, 3.5)))}
        if kind == 11:
            return {"type": "item_reference", "id": self._known.id(chance, "msg")}
        if kind == 12:
            return self._known.id(chance, chance.choice(("resp", "conv", "msg")))
        name, limit = chance.choice(("maximum", "minimum", "multipleOf", "maxLength", "const")), self.number()
        return {"type": "object", "properties": {"a": {"type": "integer", name: limit}, "b": {"$ref": "#"}}}

    def _deep(self) -> Any:
        chance = self._chance
        depth = chance.choice((3, 20, 60, 90, 98, 99, 100, 101, 500, 40_000))
        return f"{chance.choice(('lists', 'objects'))} nested {depth} times"

    # Changes

    def _with_field(self, body: dict[str, Any], operation: Operation) -> dict[str, Any]:
        """Return *body* with one more field, of those that the operation knows or of others."""
        chance = self._chance
        known = () if operation.request is None else msgspec.structs.fields(operation.request)
        fields = [field.encode_name for field in known] if known and chance.random() < 0.9 else _UNKNOWN
        name = chance.choice(fields)
        if name in ("previous_response_id", "conversation") and chance.random() < 0.8:
            value: Any = self._known.id(chance, "resp" if name == "previous_response_id" else "conv")
        elif name in _PLAUSIBLE and chance.random() < 0.8:
            value = chance.choice(_PLAUSIBLE[name])
        else:
            value = self.value()
        return {**body, name: value}

    def _changed(self, body: Any) -> Any:
        """Return *body* with a change at a random place."""
        chance = self._chance
        places = list(_places(body))
        if not places:
            return body
        path = chance.choice(places)
        # What others may hold too stays as it is.
        body = holder = body.copy()
        for step in path[:-1]:
            holder[step] = holder[step].copy()
            holder = holder[step]
        key = path[-1]
        old = holder[key]
        kind = chance.randrange(8)
        if kind < 4:
            holder[key] = self.value()
        elif kind == 4:
            del holder[key]
        elif kind == 5:
            holder[key] = chance.choice(([old], {"a": old}, [old, old], str(old)[:1000], [old] * min(30, _most(old))))
        elif kind == 6 and isinstance(old, list):
            holder[key] = old * min(int(10 ** chance.uniform(0, 3.3)), _most(old))
        elif isinstance(holder, dict):
            holder[chance.choice(("id", "type", "text", "content", "role", "name", "unheard_of"))] = self.value()
        else:
            holder[key] = [old, self.value(), old]
        return body

    def _written(self, body: Any) -> bytes:
        """Return the JSON of *body*, or nearly JSON."""
        chance = self._chance
        data = _json(body)[:_MOST_BYTES]
        kind = chance.randrange(100)
        place = chance.randrange(len(data))
        if kind == 0:
            return data[:place]
        if kind == 1:
            return data[:place] + chance.randbytes(chance.choice((1, 3, 40))) + data[place:]
        if kind == 2:
            return data.replace(b"a", chance.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80")), 3)
        if kind == 3:
            return chance.choice((b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"), data + b"{}", b"[" * 50_000))
        if kind == 4 and isinstance(body, dict) and body:
            name = chance.choice(list(body))
            return b"{%s:%s,%s" % (json.dumps(name).encode(), _json(self.value()), data[1:])
        if kind == 6:
            return _json(self.value())[:_MOST_BYTES]
        if kind == 7:
            return chance.randbytes(int(10 ** chance.uniform(0, 3)))
        if kind == 5:
            return chance.choice((b"", b"null", b"1", b'"a"', b"[]", b"true", b" ", b"{}"))
        return data

    def _form(self, body: Any) -> bytes:
        """Return *body* as a form, in the ways of clients, or nearly one, or a shape that is slow to parse."""
        chance = self._chance
        if chance.random() < 0.1:
            _, before, repeated = chance.choice(OVERHEAD)
            return before + repeated * (int(10 ** chance.uniform(1, 7)) // len(repeated))
        parts = []
        for name, value in body.items() if isinstance(body, dict) else ():
            content, file = value, b""
            if value == _A_FILE:
                content, file = bytearray(chance.choice(_files())), chance.choice(_FILE_NAMES)
                for _ in range(chance.choice((0, 0, 1, 30)) if content else 0):
                    content[chance.randrange(len(content))] = chance.randrange(256)
                if chance.random() < 0.1:
                    content = bytearray(chance.choice(CONTENTS) * chance.choice((1, 1000, 100_000)))
            elif not isinstance(value, str):
                content = _json(value)[:_MOST_BYTES]
            content = content.encode("utf-8", "replace") if isinstance(content, str) else bytes(content)
            if chance.random() < 0.1 and not file:
                content = b""
            field = name.encode("utf-8", "replace") + chance.choice((b"", b"", b"", b"", b"[]", b"[0]"))
            head = b'--xx\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n' % (field, file)
            parts.append(head + content + b"\r\n")
        before, behind = chance.choice(_AROUND_FORMS)
        data = b"".join([before, *parts, b"--xx--", behind])
        kind, place = chance.randrange(30), chance.randrange(len(data))
        if kind == 0:
            return data[:place]
        if kind == 1:
            return data[:place] + chance.randbytes(chance.choice((1, 3, 40))) + data[place:]
        if kind == 2:
            return data.replace(b"form-data", chance.choice((b"attachment", b"form-data; name=a", b"")), 1)
        if kind == 3:
            return data.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n", 1)
        return data.replace(b"\r\n", b"\n") if kind == 4 else data

    # What is around the body

    def _segment(self, name: str, operation: str) -> str:
        chance = self._chance
        if name == "model" and operation in ("load_model", "unload_model"):
            return chance.choice((MANAGED, MANAGED, "nobody", "a/b", "\0", "é" * 100, "../x", "x" * 3000))
        if chance.random() < 0.1:
            return self.text(3.3).encode("utf-8", "replace").decode() or "-"
        kind = _SEGMENTS[name]
        if operation == "get_batch_output":
            # Other operations end batches that are still looked at.
            kind = "batch"
        return chance.choice(MODELS) if kind == "model" else self._known.id(chance, kind)

    def _query(self, operation: Operation) -> str:
        chance = self._chance
        names = [*operation.query, "unheard_of", "stream", "include[]", "limit", "before_id"]
        values: tuple[Any, ...] = (*_NUMBERS, *_TEXTS, "true", 1, 5, 100, self._known.id(chance, "msg"))
        pairs = []
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            name = chance.choice(names)
            value = chance.choice(_PLAUSIBLE[name] if name in _PLAUSIBLE and chance.random() < 0.5 else values)
            pairs.append(f"{name}={quote(str(value).encode('utf-8', 'replace'))}")
        return "?" + "&".join(pairs) if pairs else ""

    def _sent(self, operation: Operation, method: str, path: str, data: bytes, plain: bool) -> Request:
        chance = self._chance
        key = KEYS[chance.random() < 0.1]
        head = {"Host": "localhost", "Authorization": f"Bearer {key}"}
        if data or method == "POST":
            kind_of_body = "multipart/form-data; boundary=xx" if _takes_form(operation) else "application/json"
            head |= {"Content-Type": kind_of_body, "Content-Length": str(len(data))}
        if operation.anthropic or (operation.shared is not None and chance.random() < 0.5):
            head["anthropic-version"] = "2023-06-01"
        whole, leaves, count = True, False, 1
        kind = chance.randrange(120)
        if kind < 10 and data:
            head["Content-Type"] = chance.choice(_CONTENT_TYPES)
        elif kind < 14 and data:
            packed = gzip.compress(data, 1) if chance.random() < 0.5 else data
            head |= {"Content-Encoding": chance.choice(("gzip", "deflate", "br", "gzip, gzip", "zstd", "identity"))}
            head["Content-Length"], data = str(len(packed)), packed
        elif kind < 24:
            name = chance.choice(_HEADERS)
            # Errors have the form of Anthropic's API for who asks in its way.
            head[name], plain = chance.choice(_HEADER_VALUES), plain and name != "anthropic-version"
        elif kind < 26 and data:
            del head["Content-Length"]
            head["Transfer-Encoding"] = "chunked"
            cut = chance.randrange(len(data))
            chunks = (piece for piece in (data[:cut], data[cut:]) if piece)
            data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in chunks) + b"0\r\n\r\n"
        elif kind == 26 and data:
            head["Content-Length"], whole = str(len(data) + 5), False
        elif kind == 27:
            head["Content-Length"], whole = chance.choice(("-1", "abc", "99999999999999999999", "5, 5", "")), False
        elif kind == 28:
            key = head["Authorization"] = chance.choice(("Bearer nobody", "Basic eA==", "Bearer", "Bearer \xff", ""))
        elif kind == 29:
            head["Expect"] = "100-continue"
        elif kind < 32:
            leaves = True
        elif kind == 32:
            whole, data = False, data[: len(data) // 2]
        elif kind == 33:
            path, whole = path + chance.choice((" ", "\t", "\xff", " HTTP/9.9 x", "#a")), False
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        raw = f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1", "replace") + data
        if whole and not leaves and chance.random() < 0.02:
            count = chance.choice((2, 3, 8))
        return Request(
            operation=operation.name, method=method, path=path, parts=raw * count, key=key, count=count, whole=whole,
            plain=plain, leaves=leaves,
        )  # fmt: skip

    # Right requests

    def _model(self, models: tuple[str, ...]) -> str:
        return self._chance.choice(models if self._chance.random() < 0.97 else (*MODELS, "nobody"))

    def spoken(self) -> dict[str, Any]:
        return {"model": self._model(HEARING), "file": _A_FILE, "response_format": self._chance.choice(_FORMATS)}

    def filed(self) -> dict[str, Any]:
        return {"purpose": self._chance.choice(("batch", "user_data", "x")), "file": _A_FILE}

    def uploaded(self) -> dict[str, Any]:
        return {
            "filename": "lines.jsonl",
            "purpose": self._chance.choice(("batch", "user_data", "x")),
            "bytes": self._chance.choice((1, 4, 1000, 500_000, 2**40)),
            "mime_type": "text/jsonl",
        }

    def upload_part(self) -> dict[str, Any]:
        return {"data": _A_FILE}

    def completed(self) -> dict[str, Any]:
        count = self._chance.choice((1, 1, 2, 5))
        return {"part_ids": [self._known.id(self._chance, "part") for _ in range(count)]}

    def batched(self) -> dict[str, Any]:
        endpoint = self._chance.choice(("/v1/chat/completions", "/v1/embeddings", "/v1/files", "x"))
        return {"input_file_id": "file-" + "0" * 32, "endpoint": endpoint, "completion_window": "24h"}

    def batched_messages(self) -> dict[str, Any]:
        return {"requests": [{"custom_id": str(number), "params": self.message()} for number in range(3)]}

    def chat(self) -> dict[str, Any]:
        chance = self._chance
        messages: list[Any] = [{"role": "user", "content": _WORDS}]
        kind = chance.randrange(7)
        if kind == 0:
            called = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
            messages = [*messages, called, {"role": "tool", "tool_call_id": "call_1", "content": "x"}, *messages]
        elif kind == 1:
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PIXEL}"}}
            messages[0] = {"role": "user", "content": [{"type": "text", "text": _WORDS}, image]}
        elif kind == 2:
            messages = [{"role": "system", "content": "Be brief."}, *messages * chance.choice((1, 3, 400))]
        elif kind == 3:
            file = {"type": "file", "file": {"filename": "a.csv", "file_data": _CSV}}
            messages[0] = {"role": "user", "content": [{"type": "text", "text": _WORDS}, file]}
        return {"model": self._model(GENERATING), "max_tokens": 20, "messages": messages}

    def completion(self) -> dict[str, Any]:
        prompt = self._chance.choice((_WORDS, _WORDS, [_WORDS] * 4, [75, 76, 77], [[75], [76]]))
        return {"model": self._model(GENERATING), "max_tokens": 20, "prompt": prompt}

    def _item(self) -> dict[str, Any]:
        chance = self._chance
        return chance.choice((
            {"type": "message", "role": "user", "content": _WORDS},
            {"role": "user", "content": [{"type": "input_text", "text": _WORDS}]},
            {"role": "user", "content": [{"type": "input_file", "filename": "a.csv", "file_data": _CSV}]},
            {"type": "custom_tool_call", "call_id": "call_1", "name": "look_up", "input": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "item_reference", "id": self._known.id(chance, "msg")},
            {"id": self._known.id(chance, "msg")},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "web_search_call", "id": "ws_1", "unheard_of": self.number()},
            {"type": "message", "role": "user", "content": "x" * 100_000},
        ))  # fmt: skip

    def _items(self, most: int = 6) -> list[Any]:
        items = [self._item() for _ in range(self._chance.randrange(1, most))]
        if self._chance.random() < 0.2:
            items += [_CALL_ITEM, {"type": "function_call_output", "call_id": "call_1", "output": "x"}]
        if self._chance.random() < 0.05:
            items *= self._chance.choice((20, 200))
        return items

    def response(self) -> dict[str, Any]:
        chance = self._chance
        given: Any = _WORDS if chance.random() < 0.4 else [*self._items(), {"role": "user", "content": _WORDS}]
        body: dict[str, Any] = {"model": self._model(GENERATING), "max_output_tokens": 20, "input": given}
        body["store"] = chance.random() < 0.7
        if chance.random() < 0.3:
            body["previous_response_id"] = self._known.id(chance, "resp")
        elif chance.random() < 0.3:
            body["conversation"] = self._known.id(chance, "conv")
        if chance.random() < 0.2:
            body["background"] = True
        if chance.random() < 0.3:
            body["stream"] = True
        return body

    def compaction(self) -> dict[str, Any]:
        return {"model": self._model(GENERATING), "input": self._items()}

    def conversation(self) -> dict[str, Any]:
        return {"items": self._items(12), "metadata": {"a": "b"}}

    def update(self) -> dict[str, Any]:
        return {"metadata": {f"k{number}": "v" for number in range(self._chance.choice((0, 1, 16, 17)))}}

    def items(self) -> dict[str, Any]:
        return {"items": self._items(12)}

    def message(self) -> dict[str, Any]:
        chance = self._chance
        blocks: list[Any] = [{"type": "text", "text": _WORDS}]
        if chance.random() < 0.2:
            source = {"type": "base64", "media_type": "image/png", "data": _PIXEL}
            blocks.append(chance.choice((
                {"type": "image", "source": source},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
                {"type": "search_result", "source": "https://a", "title": "a", "content": blocks[:1]},
            )))  # fmt: skip
        messages: list[Any] = [{"role": "user", "content": chance.choice((_WORDS, blocks))}]
        if chance.random() < 0.3:
            use = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"city": "Paris"}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
            thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
            hosted = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
            messages += [
                {"role": "assistant", "content": [thought, hosted, use]},
                {"role": "user", "content": [result]},
            ]
        body = {"model": self._model(GENERATING), "max_tokens": 20, "messages": messages}
        return {**body, "stream": True} if chance.random() < 0.3 else body

    def counted(self) -> dict[str, Any]:
        return {name: value for name, value in self.message().items() if name in ("model", "messages")}

    def body(self, operation: Operation) -> dict[str, Any] | None:
        """Return a right body for *operation*."""
        if operation.request is None:
            return None
        if not _about_texts(operation):
            return BODIES[operation.name](self)
        given = self._chance.choice(("a", ["a", "b"], [75, 76], [[75], [76]], ["word " * 20] * 100))
        return {"model": self._model(DOING[operation.jobs[0]]), "input": given}

    def ranking(self) -> dict[str, Any]:
        documents = self._chance.choice((["a", "b"], [{"text": "a"}], ["word " * 20] * 60))
        return {"model": self._model(RANKING), "query": "a", "documents": documents}

    def scoring(self) -> dict[str, Any]:
        return {"model": self._model(RANKING), "text_1": "a", "text_2": self._chance.choice(("b", ["b", "c"]))}

    def tokenizing(self) -> dict[str, Any]:
        chance = self._chance
        if chance.random() < 0.4:
            return {"model": self._model(GENERATING), "messages": [{"role": "user", "content": "a"}]}
        return {"model": self._model(GENERATING), "prompt": chance.choice(("a", "word " * 1000))}

    def detokenizing(self) -> dict[str, Any]:
        return {"model": self._model(GENERATING), "tokens": [75] * self._chance.choice((0, 1, 3, 10_000))}

    def speaking(self) -> dict[str, Any]:
        chance = self._chance
        formats = ("mp3", "opus", "aac", "flac", "wav", "pcm")
        return {
            "model": self._model(SPEAKING),
            "input": chance.choice(("Hello. ", "Hello. " * 500, "<nothing>", "<die>", "<nan>", "\u4f60\u597d\u3002")),
            "voice": chance.choice(("alloy", {"id": "alloy"}, "../../etc/passwd", None)),
            "response_format": chance.choice(formats),
            "stream_format": chance.choice(("audio", "sse")),
        }

    # What is much work, though every field is right

    def nothing(self) -> dict[str, Any]:
        return {}

    def heavy_chat(self) -> dict[str, Any]:
        chance = self._chance
        many = steered(text=f"{WORDS} " * 60, tokens_per_response=chance.choice((1, 50)))
        call = {"role": "assistant", "content": None, "tool_calls": [_CALL] * 2000}
        return chance.choice((
            {"logprobs": True, "top_logprobs": 20, "max_tokens": 300, "messages": [{"role": "user", "content": many}]},
            {"logprobs": True, "top_logprobs": 20, "n": 128},
            {"tools": [{"type": "function", "function": _FUNCTION}] * 500, "tool_choice": "required", "n": 128},
            {"messages": [{"role": "user", "content": "a"}] * 4000},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}]},
            {"messages": [{"role": "user", "content": "a"}, call]},
            {"messages": [{"role": "assistant", "reasoning_content": "word " * 50, "content": "a"}] * 4000},
            {"stop": ["stop " * 100_000] * 4},
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": _LONG_FILE}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": _CSV}}] * 4000}]},
        ))  # fmt: skip

    def heavy_completion(self) -> dict[str, Any]:
        chance = self._chance
        return chance.choice((
            {"echo": True, "logprobs": 5, "n": 128, "prompt": "word " * 300, "max_tokens": chance.choice((0, 1, 20))},
            {"logprobs": 5, "n": 128, "max_tokens": 50},
            {"prompt": [_WORDS] * 2048},
            {"prompt": [_WORDS] * 16, "n": 128},
            {"prompt": [75] * 200_000, "n": 128},
            {"prompt": [[75]] * 2000, "echo": True, "logprobs": 5, "max_tokens": 1},
            {"bad_words": ["word"] * 20_000},
            {"logit_bias": {str(number): 1 for number in range(40_000)}},
            {"prompt": "word " * chance.choice((100_000, 700_000)), "truncate_prompt_tokens": 100},
        ))  # fmt: skip

    def heavy_response(self) -> dict[str, Any]:
        chance = self._chance
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm " * 100}]}
        tools = {"type": "additional_tools", "tools": [{"type": "function", "name": "a", "parameters": _SCHEMA}]}
        return chance.choice((
            {"input": [thought] * 4000},
            {"input": [tools] * 3500},
            {"input": [{"type": "item_reference", "id": self._known.id(chance, "msg")}] * 4000},
            {"input": [_CALL_ITEM] * 4000},
            {"input": [{"role": "user", "content": "x" * 3_900_000}], "store": True},
            {"tools": [{"type": "function", **_FUNCTION}] * 3500},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 20},
        ))  # fmt: skip

    def heavy_items(self) -> dict[str, Any]:
        return {"items": [{"type": "message", "role": "user", "content": "x" * 190_000}] * 20}

    def heavy_message(self) -> dict[str, Any]:
        source = {"type": "text", "media_type": "text/plain", "data": "x" * 3_000_000}
        thought = {"type": "thinking", "thinking": "hm " * 100, "signature": "x"}
        return self._chance.choice((
            {"messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]},
            {"messages": [{"role": "assistant", "content": [thought] * 4000}, {"role": "user", "content": "a"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2000},
            {"system": [{"type": "text", "text": "a"}] * 4000},
        ))  # fmt: skip

    def heavy_inputs(self) -> dict[str, Any]:
        return {"input": self._chance.choice((["word " * 40] * 2048, [[75] * 250] * 1000, "word " * 100_000))}

    def heavy_documents(self) -> dict[str, Any]:
        return {"query": "a", "documents": ["word " * 40] * 2048}

    def heavy_sides(self) -> dict[str, Any]:
        return {"text_1": ["word " * 20] * 1000, "text_2": ["word " * 20] * 1000}

    def heavy_prompt(self) -> dict[str, Any]:
        prompt = self._chance.choice(("word ", '"', "\u4e2d", "é😀")) * self._chance.choice((50_000, 200_000))
        return {"prompt": prompt, "return_token_strs": True}

    def heavy_tokens(self) -> dict[str, Any]:
        return {"tokens": [75] * 250_000}

    def optional(self) -> dict[str, Any] | None:
        return {} if self._chance.random() < 0.5 else None


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every place in *node*: names and numbers; of long lists and objects the first places."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in islice(pairs, 8 if path else 50):
        yield *path, key
        yield from _places(inner, (*path, key))


def _most(value: Any) -> int:
    """Return how many times *value* may stand in a body: what changes multiply has no other bound."""
    return 1 + _MOST_BYTES // len(_json(value))


def _json(value: Any) -> bytes:
    """Return the JSON of *value*, with what Python cannot write."""

    def nested(found: re.Match[str]) -> str:
        count = int(found[2])
        return "[" * count + "1" + "]" * count if found[1] == "lists" else '{"a":' * count + "1" + "}" * count

    return _DEEP.sub(nested, json.dumps(value).replace(f'"{_LONG_NUMBER}"', "1" * 5000)).encode()


#: In the place of a file.
_A_FILE = "a file of audio"
#: What a part with a file has behind its name: names in the ways of clients, and none.
_FILE_NAMES = (
    b'; filename="a.wav"',
    b"; filename=a.wav",
    b'; filename="\xff"',
    b'; filename=""',
    b"",
    b'; filename="a\\"b;.wav"',
    b"; filename*=UTF-8''%ff%00",
    b"; filename*=",
    b'; filename="\0\xed\xa0\x80"',
    b'; filename="' + b";" * 60 + b'"',
)
#: What precedes and follows the parts of a form.
_AROUND_FORMS = (
    (b"", b"\r\n"),
    (b"", b"\r\n"),
    (b"", b""),
    (b"\r\n", b"\r\n\r\n"),
    (b"A preamble.\r\n", b"\r\nAn epilogue.\r\n"),
    (b"\n" * 5000, b""),
    (b"", b"\r\n--xx" * 5000),
)
_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")


def _takes_form(operation: Operation) -> bool:
    return operation.reads is BodyKind.FORM


@cache
def _files() -> list[bytes]:
    """Return files of audio, right and wrong ones."""
    tone = speak(("never", "again"), rate=48_000)
    return [
        *(encoded(tone, 48_000, *kind) for kind in (("WAV", "PCM_16"), ("FLAC", None), ("MP3", None), ("OGG", "OPUS"))),
        *(muxed(tone, 48_000, *kind) for kind in (("mp4", "aac"), ("webm", "libopus"))),
        *(b"", b"#EXTM3U\nhttp://127.0.0.1:1/\n", b"RIFF\xff\xff\xff\xffWAVE"),
    ]


def _about_texts(operation: Operation) -> bool:
    return bool(DOING.keys() & operation.jobs[:1])


#: What makes a right body for each operation that is not about texts, each by itself. One without fails the start.
BODIES: Mapping[str, Callable[[_Maker], dict[str, Any] | None]] = {
    "create_chat_completion": _Maker.chat,
    "create_completion": _Maker.completion,
    "create_response": _Maker.response,
    "count_input_tokens": _Maker.response,
    "compact_response": _Maker.compaction,
    "create_conversation": _Maker.conversation,
    "update_conversation": _Maker.update,
    "update_chat_completion": _Maker.update,
    "add_items": _Maker.items,
    "create_message": _Maker.message,
    "count_message_tokens": _Maker.counted,
    "create_file": _Maker.filed,
    "create_upload": _Maker.uploaded,
    "add_upload_part": _Maker.upload_part,
    "complete_upload": _Maker.completed,
    "create_batch": _Maker.batched,
    "create_message_batch": _Maker.batched_messages,
    "create_transcription": _Maker.spoken,
    "create_translation": _Maker.spoken,
    "rerank": _Maker.ranking,
    "score": _Maker.scoring,
    "create_speech": _Maker.speaking,
    "tokenize": _Maker.tokenizing,
    "detokenize": _Maker.detokenizing,
    "load_model": _Maker.optional,
    "unload_model": _Maker.optional,
}
#: What turns the body of an operation into one that is much work.
HEAVY: Mapping[str, Callable[[_Maker], dict[str, Any]]] = {
    "create_chat_completion": _Maker.heavy_chat,
    "create_completion": _Maker.heavy_completion,
    "create_response": _Maker.heavy_response,
    "count_input_tokens": _Maker.heavy_response,
    "compact_response": _Maker.heavy_response,
    "create_conversation": _Maker.heavy_items,
    "add_items": _Maker.heavy_items,
    "create_message": _Maker.heavy_message,
    "count_message_tokens": _Maker.heavy_message,
    "rerank": _Maker.heavy_documents,
    "score": _Maker.heavy_sides,
    "tokenize": _Maker.heavy_prompt,
    "detokenize": _Maker.heavy_tokens,
}
_OFTEN = ("create_chat_completion", "create_completion", "create_response", "create_message", "add_items")
_RARE = (
    *("load_model", "unload_model", "openapi", "metrics", "version", "status", "live", "ready"),
    *("delete_conversation", "delete_response"),
)
_WEIGHTED = [each for each in OPERATIONS for _ in range(8 if each.name in _OFTEN else 1 if each.name in _RARE else 3)]
_BATCHED = [
    each
    for each in OPERATIONS
    if each.jobs and not each.media and each.request is not None and not issubclass(each.request, FormRequest)
]
_CONTENT_TYPES = (
    *("text/plain", "application/json; charset=utf-16", "application/json;charset=latin-1", "application/xml", ""),
    *(
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "application/json; charset=nobody",
        "\xff",
    ),
)
_HEADERS = (
    *("x-request-id", "x-request-timeout", "x-first-token-timeout", "x-idle-timeout", "anthropic-version", "Accept"),
    *("traceparent", "tracestate", "anthropic-beta", "Last-Event-ID", "Idempotency-Key", "Origin", "Cookie", "Range"),
    *("Accept-Encoding", "If-None-Match", "Connection", "Upgrade", "X-Forwarded-For", "api-key", "x-api-key", "Via"),
)
_HEADER_VALUES = (
    *("", "0", "-1", "1", "0.01", "nan", "inf", "1e400", "a" * 200, "a" * 6000, "\xff\xfe", "é", "*", "null", "true"),
    *("00-" + "0" * 32 + "-" + "0" * 16 + "-00", "close", "keep-alive, close", "websocket", "bytes=0-1", "q=0", ",,,"),
)


def check_complete() -> None:
    """Raise `AssertionError` if the service has an operation for which no request is made."""
    names = {each.name for each in OPERATIONS if each.request is not None and not _about_texts(each)}
    assert names == BODIES.keys(), f"no requests are made for {sorted(names ^ BODIES.keys())}"
    routes = " ".join(route for operation in OPERATIONS for route in operation.routes)
    segments = set(re.findall(r"\{(\w+)", routes))
    assert segments <= _SEGMENTS.keys(), f"nothing is put in paths for {sorted(segments - _SEGMENTS.keys())}"
