"""Holds answers against the service's own description of them, strictly: nothing may be in them that is not in it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema_rs
import msgspec

from triton_openai.api.routes import describe
from triton_openai.config.tree import AccessSettings, RestrictedApi, Settings

Json = dict[str, Any]
_ANSWERS = re.compile(r"#/components/schemas/(\w+)")


@cache
def document() -> Json:
    """Return the description of the service with all guards: what the others answer is in it too."""
    restricted = RestrictedApi(
        apis=("inference", "batch", "model-repository", "metrics", "health", "info"), header="a", value="b"
    )
    settings = Settings(access=AccessSettings(api_key=("a-key",), openai_restricted_api=(restricted,)))
    return dict(json.loads(msgspec.json.encode(describe(settings))))


def check(method: str, path: str, status: int, headers: Mapping[str, str], body: bytes, *, typed: bool = True) -> None:
    """Raise `AssertionError` for an answer that the description does not have, or OpenAI's types if *typed*."""
    asked, method = method.upper(), "GET" if method.upper() == "HEAD" else method
    operation = find(method, path)
    if operation is None:
        assert status in (401, 403, 404, 405), f"{method} {path} is not described"
        _valid(_validator("#/components/schemas/ErrorEnvelope"), body, path)
        return
    place = _place(method, operation, status)
    described = _resolved(place)
    kind = headers["Content-Type"].partition(";")[0]
    for name, header in described["headers"].items():
        assert name in headers or not _resolve(header).get("required"), name
    if asked == "HEAD":
        assert body == b""
        return
    assert kind in described["content"], f"{method} {path}: {status} {kind}"
    if kind.startswith(("text/plain", "audio/")) or "openmetrics" in kind or kind.endswith(("octet-stream", "jsonl")):
        return
    schema = _validator(f"{place}/content/{_escaped(kind)}/schema")
    found = list(_events(body)) if kind == "text/event-stream" else [body]
    for event in found:
        _valid(schema, event, path)
    if not typed or status != 200:
        return
    # Only here: to import OpenAI's types takes a second of CPU time, and most processes check no answer.
    from tests import openai_types

    for event in found:
        openai_types.check_any(path, json.loads(event))
    if "/responses" in path:
        openai_types.check_events(found) if kind == "text/event-stream" else openai_types.check_object(json.loads(body))


@cache
def find(method: str, path: str) -> str | None:
    """Return the path of the description that stands for *path*, if it has *method*."""
    found = [
        str(template)
        for template, operations in document()["paths"].items()
        if method.lower() in operations
        and re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(template)), path.partition("?")[0])
    ]
    # The name of a model may hold slashes, so it could be the rest of any path.
    best = max(found, key=lambda template: template.count("/"), default=None)
    if best is None and path.startswith("/openai/"):
        best = find(method, path.removeprefix("/openai"))
        assert best is None or {"url": "/openai"} in document()["paths"][best][method.lower()]["servers"]
    return best


def _place(method: str, path: str, status: int) -> str:
    """Return where an answer stands."""
    place = f"#/paths/{_escaped(path)}/{method.lower()}/responses"
    responses = _resolved(place)
    assert str(status) in responses, f"{method} {path} answers {status}, which is not described"
    found = responses[str(status)]
    return str(found["$ref"]) if "$ref" in found else f"{place}/{status}"


def _events(body: bytes) -> Iterator[bytes]:
    *blocks, rest = body.split(b"\n\n")
    assert rest == b"", "the stream ends in the middle of an event"
    for block in blocks:
        if not block.startswith(b":"):
            name, _, data = block.rpartition(b"\n")
            assert data.startswith(b"data: "), block
            data = data.removeprefix(b"data: ")
            # An event of Anthropic's API, or of the Responses API, is named like its type. Of the others, an error is.
            found = {} if data == b"[DONE]" else json.loads(data)
            kind = found.get("type") or ("error" if "error" in found else None)
            # OpenAI's events of audio have a type, and no name.
            kind = None if str(kind).startswith(("transcript.", "speech.")) else kind
            assert name == (f"event: {kind}".encode() if kind else b""), block
            if data != b"[DONE]":
                yield data


def _valid(validator: jsonschema_rs.Draft202012Validator, data: bytes, path: str) -> None:
    value = json.loads(data)
    try:
        validator.validate(value)
    except jsonschema_rs.ValidationError as error:
        raise AssertionError(f"{path}: {error}\n{data.decode()}") from error


@cache
def _validator(place: str) -> jsonschema_rs.Draft202012Validator:
    # A reference is a URI, in which braces are written in another way.
    reference = place.replace("{", "%7B").replace("}", "%7D")
    return jsonschema_rs.Draft202012Validator({"$ref": reference, **_closed()})


@cache
def _closed() -> Json:
    """Return the description with no room in answers for what is not in it."""
    closed = copy.deepcopy(document())
    schemas = closed["components"]["schemas"]
    waiting = [name for _, name in _references({**closed["paths"], "": closed["components"]["responses"]})]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            if "properties" in schemas[name]:
                schemas[name]["additionalProperties"] = False
            waiting += [name for _, name in _references(schemas[name])]
    return closed


def _references(node: Any) -> Iterator[tuple[str, str]]:
    """Yield the schemas that *node* refers to, but for those of requests."""
    if isinstance(node, dict):
        for key, value in node.items():
            found = _ANSWERS.fullmatch(value) if key == "$ref" and isinstance(value, str) else None
            if found:
                yield key, found[1]
            elif key != "requestBody":
                yield from _references(value)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


def _resolve(node: Json) -> Json:
    return _resolved(node["$ref"]) if "$ref" in node else node


def _resolved(place: str) -> Json:
    node: Any = document()
    for part in place.removeprefix("#/").split("/"):
        node = node[part.replace("~1", "/").replace("~0", "~")]
    return dict(node)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
