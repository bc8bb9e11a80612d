"""LangChain's OpenAI classes against the service as a process in front of a real Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import openai
import pytest
import tiktoken
from pydantic import SecretStr

from tests.clients.service import Service, steered
from triton_openai.prompts.tokenizer import Tokenizer

if TYPE_CHECKING:
    import langchain_openai
    from langchain_core import messages
    from langchain_openai import ChatOpenAI

WORDS = "one two three four five"
PROMPT = steered(text=WORDS)
KEY = SecretStr("none")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import it where these tests run: each of pytest's processes collects this file, and it takes a second."""
    globals()["langchain_openai"] = importlib.import_module("langchain_openai")
    globals()["messages"] = importlib.import_module("langchain_core.messages")


@pytest.fixture
def server(service: Service) -> Iterator[dict[str, Any]]:
    """What every class is told about the server; with a connection of its own, which nobody else would close."""
    with openai.DefaultHttpxClient() as connection:
        yield {"base_url": service.base_url, "api_key": KEY, "http_client": connection}


@pytest.fixture(params=["ensemble", "vllm_model"])
def chat(request: pytest.FixtureRequest, server: dict[str, Any]) -> Callable[..., ChatOpenAI]:
    """Make a chat model with further settings."""

    def make(**settings: Any) -> ChatOpenAI:
        return langchain_openai.ChatOpenAI(model=request.param, **server, **settings)

    return make


def test_invoke(chat: Callable[..., ChatOpenAI]) -> None:
    """One call gives the text, the reason for its end and the usage."""
    asked = [messages.SystemMessage("Be brief."), messages.HumanMessage(PROMPT)]
    message = chat(max_completion_tokens=3, temperature=0).invoke(asked)

    assert "one two three" == message.content
    assert "length" == message.response_metadata["finish_reason"]
    assert message.usage_metadata is not None
    assert 3 == message.usage_metadata["output_tokens"]


def test_stream(chat: Callable[..., ChatOpenAI]) -> None:
    """A stream with ``stream_usage`` adds up to the same message, usage included."""
    pieces = list(chat(stream_usage=True).stream(PROMPT))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece

    assert isinstance(whole, messages.AIMessageChunk)
    assert WORDS == whole.content
    assert len([piece for piece in pieces if piece.content]) > 1
    assert whole.usage_metadata is not None
    # vLLM counts the token that ends the answer too.
    assert whole.usage_metadata["output_tokens"] in (5, 6)
    assert "stop" == whole.response_metadata["finish_reason"]


def test_batch(chat: Callable[..., ChatOpenAI]) -> None:
    """A batch is answered in its own order."""
    answers = chat().batch([steered(text=f"answer {number}") for number in range(8)])

    assert [f"answer {number}" for number in range(8)] == [answer.content for answer in answers]


def test_stop(chat: Callable[..., ChatOpenAI]) -> None:
    """Stop strings given to a call are supported."""
    assert "one two " == chat().invoke(PROMPT, stop=["three"]).content


async def test_async(chat: Callable[..., ChatOpenAI]) -> None:
    """The async methods give the same."""
    # A connection of its own: LangChain keeps its default one for the next test, which runs in another loop.
    async with openai.DefaultAsyncHttpxClient() as connection:
        model = chat(http_async_client=connection)
        pieces = [piece.content async for piece in model.astream(PROMPT)]
        answer = await model.ainvoke(PROMPT)

    assert (WORDS, WORDS) == (answer.content, "".join(map(str, pieces)))


def test_errors(chat: Callable[..., ChatOpenAI]) -> None:
    """What cannot be supported is the official client's exception, and names the parameter."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(model_kwargs={"modalities": ["audio"]}).invoke(PROMPT)

    assert ("modalities", "unsupported_parameter") == (caught.value.param, caught.value.code)


@pytest.mark.parametrize("model", ["text_embedding", "vllm_embedding"])
def test_embeddings(server: dict[str, Any], model: str) -> None:
    """Documents and queries are embedded when the texts themselves are sent."""
    embeddings = langchain_openai.OpenAIEmbeddings(model=model, **server, check_embedding_ctx_length=False)
    documents = embeddings.embed_documents(["first", "second"])

    assert (2, True) == (len(documents), documents[0] != documents[1])
    assert pytest.approx(documents[0]) == embeddings.embed_query("first")


@pytest.mark.parametrize("model", ["text_embedding", "vllm_embedding"])
def test_embeddings_of_token_ids(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The default sends token ids, of the encoding that tiktoken has for the model: here the model's own."""
    tokenizer = Tokenizer.load(str(files("triton_openai.demo").joinpath("tokenizer")))
    pieces = {tokenizer.pieces.first(number): number for number in range(4, tokenizer.vocab_size)}
    own = tiktoken.Encoding("own", pat_str=r"[^\r\n]+", mergeable_ranks=pieces, special_tokens={})
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: own)
    texts = ["one two", "é😀"]

    vectors = langchain_openai.OpenAIEmbeddings(model=model, **server).embed_documents(texts)

    plain = langchain_openai.OpenAIEmbeddings(model=model, **server, check_embedding_ctx_length=False).embed_documents(
        texts
    )
    assert [pytest.approx(vector, abs=1e-6) for vector in plain] == vectors


def test_embeddings_of_foreign_tokens(service: Service) -> None:
    """Token ids that the model does not have are refused with the setting that helps."""
    reply = service.post("/v1/embeddings", {"model": "text_embedding", "input": [[99_999, 2, 3]]})

    assert (400, "input") == (reply.status, reply.error["param"])
    assert "check_embedding_ctx_length=False" in reply.error["message"]


def test_completions(server: dict[str, Any]) -> None:
    """The completion class works whole and in pieces, for one prompt and for several."""
    model = langchain_openai.OpenAI(model="ensemble", **server, max_tokens=3)

    assert "one two three" == model.invoke(PROMPT)
    assert "one two three" == "".join(model.stream(PROMPT))
    assert ["a", "b"] == model.batch([steered(text="a"), steered(text="b")])
