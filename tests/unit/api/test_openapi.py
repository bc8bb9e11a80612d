"""The service's description of itself: complete, well-formed, and true to the types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.cases import every_case
from tests.described import check, document
from triton_openai import __version__
from triton_openai.api.parameters import neutral_values
from triton_openai.api.routes import OPERATIONS, describe, prose
from triton_openai.app import apply_settings, create_app
from triton_openai.config.tree import AccessSettings, ApiSettings, RestrictedApi, ServerSettings, Settings

Json = dict[str, Any]


def operations() -> Iterator[tuple[str, str, Json]]:
    """Yield path, method and description of every operation."""
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_has_an_operation_and_every_operation_a_route() -> None:
    """What is served is described, and the other way round; no line of the table is for nothing."""
    served = list(create_app(Settings(server=ServerSettings(page=False))).router.routes())
    methods = {(route.resource.canonical, route.method.lower()) for route in served if route.resource is not None}
    paths = {(path, method) for path, method in methods if method != "head"}

    assert paths == {
        (server["url"].rstrip("/") + path, method)
        for path, method, operation in operations()
        for server in operation.get("servers", [{"url": "/"}])
    }
    assert len({route.handler for route in served}) == len(OPERATIONS)
    assert {path for path, method in methods if method == "head"} == {path for path, method in paths if method == "get"}


def test_names_are_unique_and_plain() -> None:
    """Generators of clients make functions and classes of these names."""
    ids = [operation["operationId"] for _, _, operation in operations()]

    assert len(ids) == len(set(ids))
    assert all(name.isidentifier() for name in [*ids, *document()["components"]["schemas"]])
    assert "create_chat_completion" == document()["paths"]["/v1/chat/completions"]["post"]["operationId"]


def references(node: Any) -> Iterator[str]:
    """Yield all references in *node*."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for requirement in node.get("security", ()):
            yield from (f"#/components/securitySchemes/{name}" for name in requirement)
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def test_references_lead_somewhere_and_nothing_is_left_over() -> None:
    """Every component is used."""
    components = document()["components"]
    known = {f"#/components/{group}/{name}" for group, members in components.items() for name in members}

    assert known == set(references(document()))


def test_the_body_of_each_operation_is_the_type_that_it_reads() -> None:
    """A request is described by the struct that it is decoded into."""
    schemas = document()["components"]["schemas"]
    for operation in OPERATIONS:
        if operation.request is not None:
            fields = {field.encode_name for field in msgspec.structs.fields(operation.request)}
            assert fields == schemas[operation.request.__name__]["properties"].keys()


def test_no_field_is_left_undescribed() -> None:
    """Fields that are read by hand are described by hand, and those that are refused take what means "not used"."""
    for operation in OPERATIONS:
        if operation.request is None:
            continue
        request = document()["components"]["schemas"][operation.request.__name__]
        assert request["description"], operation.request
        for name, schema in request["properties"].items():
            assert schema, name
            refused = neutral_values(operation.request)
            if name in refused:
                assert schema["enum"] == [*refused[name], None]


def described_with(**access: Any) -> Json:
    """Return the description of a service with these settings of *access*."""
    settings = Settings(access=AccessSettings(**access))
    return dict(json.loads(msgspec.json.encode(describe(settings))))


def test_what_is_asked_for_is_described_and_nothing_else() -> None:
    """Without keys and restrictions nobody is turned away for lacking them; no header that opens is told."""
    restricted = RestrictedApi(apis=("inference",), header="secret-header", value="b")
    open_to_all, keys, inference = (
        described_with(), described_with(api_key=("a-key",)), described_with(openai_restricted_api=(restricted,)),
    )  # fmt: skip
    chat, health, models = "/v1/chat/completions", "/health", "/v1/models"

    assert "securitySchemes" not in open_to_all["components"]
    assert not [op for methods in open_to_all["paths"].values() for op in methods.values() if "401" in op["responses"]]
    assert {"bearer", "api-key", "x-api-key"} == {
        scheme.get("name", scheme.get("scheme")) for scheme in keys["components"]["securitySchemes"].values()
    }
    # Any of them is enough; for health there is nothing to show.
    assert [["BearerKey"], ["ApiKeyHeader"], ["XApiKeyHeader"]] == [
        list(one) for one in keys["paths"][chat]["post"]["security"]
    ]
    assert [] == keys["paths"][health]["get"]["security"]
    assert {"401", "429"} <= keys["paths"][chat]["post"]["responses"].keys()
    assert "x-ratelimit-remaining-tokens" in keys["paths"][chat]["post"]["responses"]["200"]["headers"]
    assert "x-ratelimit-remaining-tokens" not in keys["paths"][models]["get"]["responses"]["200"]["headers"]
    assert "429" not in keys["paths"][models]["get"]["responses"]
    assert "401" not in keys["paths"][health]["get"]["responses"]
    # A key of certain models does not open the metrics, which are about all of them.
    assert "403" in keys["paths"]["/metrics"]["get"]["responses"]
    assert "403" not in open_to_all["paths"]["/metrics"]["get"]["responses"]
    assert "WWW-Authenticate" in keys["components"]["responses"]["Error401"]["headers"]
    # Who restricts inference restricts embeddings.
    for path, method, answered in ((chat, "post", True), ("/v1/embeddings", "post", True), (models, "get", False)):
        assert answered == ("401" in inference["paths"][path][method]["responses"])
    assert "secret-header" not in json.dumps(inference)


async def test_the_description_is_made_again_when_settings_have_changed() -> None:
    """What is read again while the service runs shows in its description."""
    app = create_app(Settings())
    async with TestClient(TestServer(app)) as client:
        before = await (await client.get("/openapi.json")).json()
        settings = Settings(access=AccessSettings(api_key=("a-key",)), api=ApiSettings(strict_parameters=True))
        await apply_settings(app, settings, False)
        after = await (await client.get("/openapi.json", headers={"api-key": "a-key"})).json()

    assert "securitySchemes" not in before["components"]
    assert after == json.loads(msgspec.json.encode(describe(settings)))


@every_case("strict", [False, True])
def test_strict_parameters_are_described(strict: bool) -> None:
    """Where unknown fields are refused, the description says so; only where they are, at the top."""
    settings = Settings(api=ApiSettings(strict_parameters=strict))
    schemas = describe(settings)["components"]["schemas"]

    assert schemas["ChatRequest"].get("additionalProperties", True) is not strict
    assert "additionalProperties" not in schemas["UserMessage"]


def test_docstrings_become_descriptions() -> None:
    """Descriptions are for people who do not read reStructuredText."""
    assert "`stream` is :ref:, see `Run`.\n\nMore." == prose("``stream`` is :ref:,\n see :class:`~Run`.\n\n    More.\n")
    assert "The `name`, **bold**.\n\nMore." == prose("The *name*, **bold**. Raises :class:`~Run`\n or none.\n\nMore.")


def texts(node: Any) -> Iterator[str]:
    """Yield every text for people in *node*."""
    if isinstance(node, dict):
        yield from (node[name] for name in ("summary", "description") if isinstance(node.get(name), str))
        node = [*node.values()]
    if isinstance(node, list):
        for value in node:
            yield from texts(value)


def test_no_text_is_about_the_code() -> None:
    """Clients do not know classes, modules and roles; a name that looks like a class is that of a schema."""
    known = {
        *document()["components"]["schemas"],
        "OpenAI",
        "OpenAPI",
        "LoRA",
        "TensorRT",
        "WebSocket",
        "DeepSeek",
        "OpenRouter",
    }
    for text in texts(document()):
        names = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]*)+\b|\b\w+Error\b", text))
        assert [] == sorted(names - known), text
        assert not re.search(
            r"``|:[a-z]+:`|\b(?:Raises?|[Bb]ase of)\b|triton_openai|(?<!\*)\*\w+\*(?!\*)|\bself\b", text
        ), text
    for _, _, operation in operations():
        assert "\n" not in operation["summary"]


async def test_the_description_is_served_with_the_version() -> None:
    """The description and the version are served without Triton."""
    app = create_app(Settings())
    async with TestClient(TestServer(app)) as client:
        first = await (await client.get("/openapi.json")).read()
        version = await (await client.get("/version")).json()

    assert {"version": __version__, "name": "triton-openai"} == version
    assert __version__ == json.loads(first)["info"]["version"]


async def test_the_description_follows_the_settings() -> None:
    """What a running service has taken over is in it."""
    app = create_app(Settings())
    async with TestClient(TestServer(app)) as client:
        before = await (await client.get("/openapi.json")).json()
        await apply_settings(app, Settings(api=ApiSettings(strict_parameters=True)), False)
        after = await (await client.get("/openapi.json")).json()

    for found, closed in ((before, None), (after, False)):
        assert closed is found["components"]["schemas"]["ChatRequest"].get("additionalProperties")


@every_case(
    "method, path, status, kind, body",
    [
        ("GET", "/version", 200, "application/json", {"version": "1", "name": "triton-openai", "more": 1}),
        ("GET", "/version", 200, "application/json", {"version": "1"}),
        ("GET", "/version", 200, "application/json", {"version": "1", "name": "triton-openai", "triton": {}}),
        ("GET", "/version", 200, "text/plain", {"version": "1", "name": "triton-openai"}),
        ("GET", "/version", 418, "application/json", {"version": "1", "name": "triton-openai"}),
        ("GET", "/versions", 200, "application/json", {"version": "1", "name": "triton-openai"}),
        ("POST", "/v1/completions", 400, "application/json", {"error": {"message": "", "type": "", "param": None}}),
    ],
)
def test_answers_are_really_checked(method: str, path: str, status: int, kind: str, body: Json) -> None:
    """What holds all answers of the other tests against the description lets nothing else through."""
    with pytest.raises(AssertionError):
        check(method, path, status, {"Content-Type": kind, "x-request-id": "a"}, json.dumps(body).encode())
