"""Images through the clients that people use."""

from __future__ import annotations

import base64

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import SecretStr

from tests.clients.service import Service, steered
from tests.pictures import data_url, png

SEEING = ("vllm_model", "tensorrt_llm_bls_multimodal")


@pytest.mark.parametrize("model", SEEING)
def test_openai(service: Service, model: str) -> None:
    """The official client's part, in a stream and in a whole answer."""
    messages: list[ChatCompletionMessageParam] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": steered(text="a red dot")},
                {"type": "image_url", "image_url": {"url": data_url(png(1)), "detail": "low"}},
            ],
        }
    ]
    with OpenAI(base_url=service.base_url, api_key="none") as client:
        whole = client.chat.completions.create(model=model, messages=messages)
        with client.chat.completions.stream(model=model, messages=messages) as stream:
            streamed = stream.get_final_completion()

    assert "a red dot" == whole.choices[0].message.content == streamed.choices[0].message.content


def test_openai_refused(service: Service) -> None:
    """A URL of a host that is not allowed is the client's ``BadRequestError``, with its place."""
    with OpenAI(base_url=service.base_url, api_key="none") as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="vllm_model",
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}
            ],
        )
    assert "invalid_image_url" == caught.value.code
    assert "messages[0].content[0].image_url" == caught.value.param


def test_langchain(service: Service) -> None:
    """LangChain's own form of an image, which it turns into OpenAI's."""
    # Not at the top: each of pytest's processes collects this file, and it takes a second.
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    message = HumanMessage(
        content=[
            {"type": "text", "text": "What is it?"},
            {
                "type": "image",
                "source_type": "base64",
                "mime_type": "image/png",
                "data": base64.b64encode(png()).decode(),
            },
            {"type": "image_url", "image_url": {"url": data_url(png(2))}},
        ]
    )
    with openai.DefaultHttpxClient() as connection:
        chat = ChatOpenAI(
            model="vllm_model", base_url=service.base_url, api_key=SecretStr("none"), http_client=connection
        )

        assert "You sent 2 images." in str(chat.invoke([message]).content)
