"""The Responses API through the official client and LangChain, in front of a real Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import SecretStr

from tests import described
from tests.clients.service import Service, steered, until
from tests.clients.weather import CALL, SCHEMA, City, get_weather
from triton_openai.api.agents import unsealed

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather.",
    "parameters": SCHEMA,
    "strict": False,
}


def test_a_text(client: OpenAI) -> None:
    """A text is answered by a message, with its usage."""
    answer = client.responses.create(
        model="vllm_model", input=steered(text="one two three"), instructions="Be brief.", metadata={"a": "b"}
    )

    assert ("one two three", "completed", "response") == (answer.output_text, answer.status, answer.object)
    assert answer.id.startswith("resp_")
    assert ({"a": "b"}, "Be brief.") == (answer.metadata, answer.instructions)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 4
    assert 0 == answer.usage.input_tokens_details.cache_write_tokens


def test_a_stream(client: OpenAI) -> None:
    """The stream helper accumulates the same answer, without gaps in the numbers of events."""
    with client.responses.stream(model="ensemble", input=steered(text="one two three")) as stream:
        events = list(stream)
        answer = stream.get_final_response()

    assert "one two three" == answer.output_text
    assert list(range(len(events))) == [event.sequence_number for event in events]
    assert ["response.created", "response.in_progress"] == [event.type for event in events[:2]]
    assert "response.completed" == events[-1].type


def test_a_cut_answer(client: OpenAI) -> None:
    """An answer that reaches the limit is incomplete; a limit beyond the context is taken for the context's end."""
    answer = client.responses.create(model="vllm_model", input=steered(text="one two three"), max_output_tokens=2)

    assert ("incomplete", "one two") == (answer.status, answer.output_text)
    assert answer.incomplete_details is not None
    assert "max_output_tokens" == answer.incomplete_details.reason


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_and_its_answer(client: OpenAI, streams: bool) -> None:
    """A call comes back as an item, and can be sent again with its output."""
    question: Any = {"role": "user", "content": steered(text=CALL)}
    options: Any = {"model": "vllm_model", "tools": [WEATHER, {"type": "web_search"}]}
    if streams:
        with client.responses.stream(input=[question], **options) as stream:
            first = stream.get_final_response()
    else:
        first = client.responses.create(input=[question], **options)
    (call,) = first.output
    assert call.type == "function_call"
    assert ("get_weather", {"city": "Bonn"}) == (call.name, json.loads(call.arguments))
    assert ["function"] == [each.type for each in first.tools]

    called: Any = call.model_dump()
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
    ask: Any = {"role": "user", "content": steered(text="It is fine.")}
    second = client.responses.create(input=[question, called, output, ask], **options)
    assert "It is fine." == second.output_text


def test_a_schema(client: OpenAI) -> None:
    """`parse` gives an object of the class."""
    parsed = client.responses.parse(model="vllm_model", input=steered(text='{"name": "Bonn"}'), text_format=City)

    assert City(name="Bonn") == parsed.output_parsed


def test_log_probabilities(client: OpenAI) -> None:
    """Log probabilities are in the text's part when a client asks for them."""
    answer = client.responses.create(
        model="vllm_model", input=steered(text="one two"), include=["message.output_text.logprobs"], top_logprobs=2
    )
    message: Any = answer.output[0]

    assert "one two" == "".join(each.token for each in message.content[0].logprobs).removesuffix("<|im_end|>")
    assert 2 == len(message.content[0].logprobs[0].top_logprobs)


def test_mistakes(client: OpenAI) -> None:
    """A mistake names the field of the request, not that of the chat which it becomes."""
    call = {"type": "function_call", "call_id": "c", "name": 1, "arguments": "{}"}
    file = {"type": "input_file", "file_id": "f"}
    for param, fields in (
        ("input", {"input": "word " * 3000}),
        ("input", {"input": []}),
        ("input[0].type", {"input": [{"type": "nonsense"}]}),
        ("input[1].name", {"input": [{"role": "user", "content": "Hello"}, call]}),
        ("input[0].content[0].file_id", {"input": [{"role": "user", "content": [file]}]}),
        ("tools[0].parameters", {"input": "Hello", "tools": [{"type": "function", "name": "f", "parameters": 1}]}),
        ("tool_choice.name", {"input": "Hello", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}),
        ("text.format.schema", {"input": "Hello", "text": {"format": {"type": "json_schema"}}}),
        ("temperature", {"input": "Hello", "temperature": 3}),
    ):  # fmt: skip
        request: Any = {"model": "vllm_model", **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**request)
        assert param == caught.value.param, caught.value


def test_a_failure_in_a_stream(client: OpenAI, tooled: Service) -> None:
    """What fails after the first token ends with an error and the failed response."""
    prompt = steered(text="one two three", fail_at=2, error="out of luck", delay_ms=5)
    events = list(client.responses.create(model="vllm_model", input=prompt, stream=True))

    last: Any = events[-1]
    assert ["error", "response.failed"] == [event.type for event in events[-2:]]
    assert ("failed", "server_error") == (last.response.status, last.response.error.code)
    assert "out of luck" in last.response.error.message


# The package uses an older way of the library websockets.
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_a_websocket(client: OpenAI, tooled: Service) -> None:
    """The official client makes responses over one connection, each of which goes on from the one before."""
    with client.responses.connect() as connection:
        previous = None
        texts = []
        for text in ("one", "two", "three"):
            connection.response.create(
                model="vllm_model", input=steered(text=text), store=False, previous_response_id=previous
            )
            for event in connection:
                if event.type == "response.completed":
                    previous = event.response.id
                    texts.append(event.response.output_text)
                    break
                assert event.type != "error", event
        assert ["one", "two", "three"] == texts
        connection.response.create(model="nobody", input="x")
        failure: Any = connection.recv()
        assert ("error", 404, "model_not_found") == (failure.type, failure.status, failure.error.code)
    plain = tooled.send("GET", "/v1/responses")
    assert (405, "POST") == (plain.status, plain.headers["Allow"])


def test_langchain(tooled: Service, connection: httpx2.Client) -> None:
    """LangChain calls a tool, sends its result, and streams."""
    chat = ChatOpenAI(
        model="vllm_model",
        base_url=tooled.base_url,
        api_key=SecretStr("none"),
        max_retries=0,
        use_responses_api=True,
        http_client=connection,
    )
    question = HumanMessage(steered(text=CALL))
    called = chat.bind_tools([get_weather]).invoke([question])
    (call,) = called.tool_calls
    assert ("get_weather", {"city": "Bonn"}) == (call["name"], call["args"])

    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    answer = chat.invoke([question, called, result, HumanMessage(steered(text="It is fine."))])
    assert "It is fine." == answer.text
    assert "one two" == "".join(piece.text for piece in chat.stream(steered(text="one two")))


def test_what_is_kept(client: OpenAI) -> None:
    """A response is there until it is deleted, with its input; the next one goes on from it."""
    first = client.responses.create(model="vllm_model", input=steered(text="one"), instructions="Be brief.")
    with client.responses.stream(
        model="vllm_model", input=steered(text="two"), previous_response_id=first.id
    ) as stream:
        second = stream.get_final_response()

    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert "one" == client.responses.retrieve(first.id).output_text
    kept = client.responses.retrieve(second.id)
    assert (second.usage, second.output_text) == (kept.usage, kept.output_text)
    (item,) = client.responses.input_items.list(second.id).data
    assert "message" == item.type
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    assert client.responses.create(model="vllm_model", input=[reference, *again("three")]).output_text == "three"
    client.responses.delete(first.id)
    for wanted in (first.id, "resp_nothing"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(wanted)
    # What goes on from it goes on without its turn.
    options: Any = {"model": "vllm_model", "input": again("four"), "previous_response_id": second.id}
    assert client.responses.create(**options).output_text == "four"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="vllm_model", input="x", previous_response_id=first.id)
    assert "previous_response_not_found" == caught.value.code
    unkept = client.responses.create(model="vllm_model", input=steered(text="one"), store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def again(text: str) -> list[Any]:
    """Return the input that is answered *text*."""
    return [{"role": "user", "content": steered(text=text)}]


def test_background(client: OpenAI) -> None:
    """A response in the background is polled, streamed from any place, or cancelled."""
    slow = steered(text="one two three four", delay_ms=30)
    made = client.responses.create(model="vllm_model", input=slow, background=True)
    assert made.status == "queued"
    ended = until(lambda: (each := client.responses.retrieve(made.id)).status not in ("queued", "in_progress") and each)
    assert ("completed", "one two three four") == (ended.status, ended.output_text)
    events = list(client.responses.retrieve(made.id, stream=True, starting_after=3))
    assert list(range(4, events[-1].sequence_number + 1)) == [event.sequence_number for event in events]
    assert "response.completed" == events[-1].type
    assert "completed" == client.responses.cancel(made.id).status

    live = client.responses.create(model="vllm_model", input=slow, background=True, stream=True)
    kinds = [event.type for event in live]
    assert ["response.created", "response.queued", "response.in_progress"] == kinds[:3]
    assert "response.completed" == kinds[-1]
    # The helper reads such a stream too.
    with client.responses.stream(model="vllm_model", input=slow, background=True) as stream:
        assert "one two three four" == stream.get_final_response().output_text

    order = steered(text="x y z", hang_at=2)
    created: Any = client.responses.create(model="vllm_model", input=order, background=True, stream=True)
    begun = next(event for event in created if event.type == "response.output_text.delta")
    endless = begun.item_id.replace("msg_", "resp_")[:37]
    cancelled: Any = client.responses.cancel(endless)
    last: Any = list(created)[-1]
    again: Any = list(client.responses.retrieve(endless, stream=True))[-1]
    for found in (cancelled, client.responses.retrieve(endless)):
        assert ("cancelled", "x") == (found.status, found.output_text.split()[0])
    # OpenAI's package does not know this event.
    for event in (last, again):
        assert ("response.cancelled", "cancelled") == (event.type, event.response["status"])
    assert last.sequence_number == again.sequence_number


def test_wrong_requests_in_the_background(client: OpenAI) -> None:
    """Wrong requests in the background are refused at once, as in the foreground, and leave no response behind."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": "word " * 3000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": [{"type": "unheard_of"}]}, "input[0].type"),
        ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": "x", "model": "text_embedding"}, "model"),
        ({"input": "x", "metadata": {"k" * 65: "v"}}, "metadata"),
    ]
    for fields, param in wrong:
        for background in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**{"model": "vllm_model", **fields}, background=background)
            assert str(caught.value.param).startswith(param), fields
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="vllm_model", input="x", conversation="conv_0", background=True)


def test_conversations(client: OpenAI) -> None:
    """A conversation grows with its responses, and its items can be read and changed."""
    conversation = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "Hello"}])
    answer = client.responses.create(model="vllm_model", input=again("one"), conversation=conversation.id)

    assert answer.conversation is not None
    assert conversation.id == answer.conversation.id
    items = client.conversations.items.list(conversation.id, order="asc", limit=2)
    assert 3 == len(list(items))
    assert ["user", "user"] == [getattr(item, "role", None) for item in items.data]
    last: Any = client.conversations.items.list(conversation.id).data[0]
    assert "one" == last.content[0].text
    assert last.id == client.conversations.items.retrieve(last.id, conversation_id=conversation.id).id
    client.conversations.items.delete(last.id, conversation_id=conversation.id)
    added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "More"}])
    assert 1 == len(added.data)
    assert {"c": "d"} == client.conversations.update(conversation.id, metadata={"c": "d"}).metadata
    assert {"c": "d"} == client.conversations.retrieve(conversation.id).metadata
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_truncation(client: OpenAI) -> None:
    """With `auto`, a conversation that is too long loses its beginning; the tokens can be counted before."""
    long: list[Any] = [{"role": "user", "content": "word " * 600}] * 5
    options: Any = {"model": "vllm_model", "input": [*long, *again("one")]}
    assert client.responses.input_tokens.count(**options).input_tokens > 2500
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**options)
    assert "one" == client.responses.create(**options, truncation="auto").output_text
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="vllm_model", input="word " * 3000, truncation="auto")


def test_compaction(client: OpenAI) -> None:
    """A conversation becomes the user's messages and a summary of the model's, from which the next response goes on."""
    first = client.responses.create(model="vllm_model", input=steered(text="one"))
    summary = "A word was said. "
    short: Any = client.responses.compact(
        model="vllm_model", input=again(summary), previous_response_id=first.id, instructions="Be brief."
    )
    assert ["message", "message", "compaction"] == [item.type for item in short.output]
    assert short.usage.output_tokens > 0
    after: list[Any] = [*(item.model_dump(warnings=False) for item in short.output), *again("two")]
    assert "two" == client.responses.create(model="vllm_model", input=after).output_text
    # A model that rambles is cut, and what it wrote is kept.
    cut: Any = client.responses.compact(model="vllm_model", input=steered(text="so on ", repeat=5000))
    assert 100 < cut.usage.output_tokens <= 2048
    message, compaction = cut.output
    assert ("message", "compaction") == (message.type, compaction.type)
    assert 100 < len((unsealed(compaction.encrypted_content) or "").split()) <= 2048
    # Only an input that is too long is the client's mistake.
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.compact(model="vllm_model", input="word " * 9000)
    with pytest.raises(openai.UnprocessableEntityError, match="no summary"):
        client.responses.compact(model="vllm_model", input=steered(text=""))


def test_the_catalogue_of_codex(tooled: Service) -> None:
    """Codex finds its own list beside OpenAI's, which others get alone."""
    both = tooled.send("GET", "/v1/models?client_version=0.169.0").json
    (model,) = [each for each in both["models"] if each["slug"] == "vllm_model"]
    required = {
        "slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api",
        "priority", "support_verbosity", "truncation_policy", "experimental_supported_tools", "base_instructions",
    }  # fmt: skip
    assert required <= model.keys()
    assert {"text_embedding"}.isdisjoint(each["slug"] for each in both["models"])
    assert ["object", "data"] == list(tooled.send("GET", "/v1/models").json)


def test_what_codex_sends(tooled: Service) -> None:
    """Codex's request is answered by the two events that it reads, with tools as it knows them."""
    request = json.loads((Path(__file__).parents[1] / "fixtures" / "codex.json").read_text())
    calls = (
        ("apply_patch", {"input": "*** End"}, {"type": "custom_tool_call", "name": "apply_patch", "input": "*** End"}),
        (
            "multi_agent_v1__wait_agent",
            {"n": 2},
            {"type": "function_call", "name": "wait_agent", "namespace": "multi_agent_v1", "arguments": '{"n": 2}'},
        ),
    )
    for name, arguments, expected in calls:
        call = json.dumps({"name": name, "arguments": arguments})
        asked = [*request["input"], *again(f"<tool_call>\n{call}\n</tool_call>")]
        reply = tooled.post("/v1/responses", {**request, "model": "vllm_model", "input": asked})
        assert 200 == reply.status, reply.body
        described.check("POST", "/v1/responses", reply.status, reply.headers, reply.body)
        events = [json.loads(block.partition("\ndata: ")[2]) for block in reply.body.decode().split("\n\n")[:-1]]
        (done,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert expected.items() <= done.items()
        assert "response.completed" == events[-1]["type"]
        assert {"id", "usage", "output"} <= events[-1]["response"].keys()
