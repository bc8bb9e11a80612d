"""Azure's paths and its header for keys, through the official client for Azure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import openai
import pytest
from openai import AsyncAzureOpenAI, AzureOpenAI, OpenAI

from tests.clients.service import Service, serving, steered
from tests.triton_fixture import TestTriton

KEY = "a-key-of-azures-clients"
VERSION = "2026-10-01"
KEYS = f"""
keys:
  - {{name: everything, key: {KEY}}}
  - {{name: one, key: "only-vllm", models: [vllm_model]}}
  - {{name: few, key: "twice", requests_per_minute: 1}}
"""
MESSAGES: Any = [{"role": "user", "content": steered(text="one two three")}]


@pytest.fixture(scope="module", params=["http", "grpc"])
def azure(
    request: pytest.FixtureRequest, triton: TestTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A service with keys, over each transport in turn."""
    folder = tmp_path_factory.mktemp("azure")
    keys, settings = folder / "keys.yaml", folder / "settings.yaml"
    keys.write_text(KEYS)
    settings.write_text("models: {ensemble: {aliases: [acme/chat-7b]}}\naccess: {cors_allow_origin: ['*']}")
    url = triton.http_url if request.param == "http" else triton.grpc_url
    options = ("--tokenizer", str(triton.tokenizer), "--api-keys-file", str(keys), "--config", str(settings))
    with serving(folder, "--triton-url", url, *options) as running:
        yield running
        assert [] == running.complaints()
        assert KEY not in running.log.read_text()


def client_of(service: Service, **fields: Any) -> AzureOpenAI:
    """Return the client."""
    given = {"api_key": KEY, "api_version": VERSION, "max_retries": 0, **fields}
    return AzureOpenAI(azure_endpoint=service.address, **given)


@pytest.mark.parametrize("model", ["vllm_model", "acme/chat-7b"])
def test_chats_and_completions(azure: Service, model: str) -> None:
    """Chats and completions are answered, whole and streamed, with the deployment of the request or of the client."""
    prompt = steered(text="one two three")
    with client_of(azure) as client, client_of(azure, azure_deployment=quote(model, safe="")) as deployed:
        for asked, named in ((client, model), (deployed, "another name")):
            chat = asked.chat.completions.create(model=named, messages=MESSAGES)
            completion = asked.completions.create(model=named, prompt=prompt)
            chunks = asked.chat.completions.create(model=named, messages=MESSAGES, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

            assert ["one two three"] * 3 == [chat.choices[0].message.content, completion.choices[0].text, text]
            assert model == chat.model


def test_embeddings_and_what_has_no_deployment(azure: Service) -> None:
    """Embeddings name a deployment; models, responses and conversations do not."""
    with client_of(azure, azure_deployment="text_embedding") as client:
        vectors = client.embeddings.create(model="any", input=["a", "b"])
        response = client.responses.create(model="vllm_model", input=steered(text="one"))

        assert 2 == len(vectors.data)
        assert "one" == response.output_text
        assert "one" == client.responses.retrieve(response.id).output_text
        assert "vllm_model" in {model.id for model in client.models.list()}


async def test_async(azure: Service) -> None:
    """The client for asyncio does the same."""
    given: Any = {"azure_endpoint": azure.address, "api_key": KEY, "api_version": VERSION, "max_retries": 0}
    async with AsyncAzureOpenAI(**given) as client:
        chat = await client.chat.completions.create(model="vllm_model", messages=MESSAGES)
        stream = await client.chat.completions.create(model="vllm_model", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert "one two three" == chat.choices[0].message.content == text


def test_the_newer_paths(azure: Service) -> None:
    """OpenAI's own client with the base URL of Azure's newer API."""
    with OpenAI(base_url=f"{azure.address}/openai/v1/", api_key=KEY, max_retries=0) as client:
        response = client.responses.create(model="vllm_model", input=steered(text="one"))
        chat = client.chat.completions.create(model="vllm_model", messages=MESSAGES)

    assert ("one", "one two three") == (response.output_text, chat.choices[0].message.content)


def test_keys(azure: Service) -> None:
    """The key in Azure's header opens what it opens as a bearer, and is held to the same limits."""
    with client_of(azure, api_key="wrong") as wrong, client_of(azure, api_key="only-vllm") as one:
        with pytest.raises(openai.AuthenticationError):
            wrong.chat.completions.create(model="vllm_model", messages=MESSAGES)
        one.chat.completions.create(model="vllm_model", messages=MESSAGES)
        with pytest.raises(openai.NotFoundError):
            one.chat.completions.create(model="ensemble", messages=MESSAGES)
    with client_of(azure, api_key="twice") as few:
        few.chat.completions.create(model="vllm_model", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError):
            few.chat.completions.create(model="vllm_model", messages=MESSAGES)


def test_a_deployment_that_does_not_exist(azure: Service) -> None:
    """A deployment that does not exist is a model that does not, and an operation that is not served is no endpoint."""
    with client_of(azure) as client:
        with pytest.raises(openai.NotFoundError) as model:
            client.chat.completions.create(model="nothing", messages=MESSAGES)
        with pytest.raises(openai.NotFoundError) as path:
            client.images.generate(model="vllm_model", prompt="a cat")

    assert ("model_not_found", "not_found") == (model.value.code, path.value.code)


def test_browsers(azure: Service) -> None:
    """A page may use the paths as it may use the others."""
    path = f"/openai/deployments/vllm_model/chat/completions?api-version={VERSION}"
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = azure.send("OPTIONS", path, headers={**asks, "Access-Control-Request-Headers": "api-key"})
    answer = azure.send("POST", path, {"messages": MESSAGES}, {"Origin": "https://a.example", "api-key": KEY})

    assert (204, "api-key") == (allowed.status, allowed.headers["Access-Control-Allow-Headers"])
    assert (200, "*") == (answer.status, answer.headers["Access-Control-Allow-Origin"])
