"""Chats, streams, structured output, a tool call and a search over embeddings with LangChain."""

import argparse
from typing import Annotated

from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Capital(BaseModel):
    """The capital of a country."""

    country: str = Field(max_length=40)
    city: str = Field(max_length=40)


@tool
def get_weather(city: Annotated[str, "The name of a city"]) -> str:
    """Get the weather in a city."""
    return f"It is sunny in {city}."


def main() -> None:
    """Run each example once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://localhost:9000/v1")
    parser.add_argument("--model", default="vllm_model")
    parser.add_argument("--embedding-model", default="text_embedding")
    arguments = parser.parse_args()
    server = {"base_url": arguments.base_url, "api_key": "none"}
    chat = ChatOpenAI(
        model=arguments.model, temperature=0, seed=1, max_completion_tokens=64, stream_usage=True, **server
    )
    question = "What is the capital of France?"

    print("invoke:", chat.invoke(question).content)

    print("stream:", end=" ")
    for chunk in chat.stream(question):
        print(chunk.content, end="")
    print()

    capital = chat.with_structured_output(Capital, method="json_schema").invoke(question)
    print("structured output:", capital)

    bound = chat.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    message = bound.invoke("What is the weather in Paris?")
    for call in message.tool_calls:
        print("tool call:", call["name"], call["args"], "->", get_weather.invoke(call["args"]))

    # The service takes texts, not the token ids of an OpenAI tokenizer.
    embeddings = OpenAIEmbeddings(model=arguments.embedding_model, check_embedding_ctx_length=False, **server)
    texts = ["Paris is the capital of France.", "Triton serves models.", "The sea is blue."]
    store = InMemoryVectorStore.from_texts(texts, embeddings)
    print("search:", store.similarity_search(question, k=1)[0].page_content)


if __name__ == "__main__":
    main()
