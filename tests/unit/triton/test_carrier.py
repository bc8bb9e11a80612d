"""Many streams over one open request: what reaches each, and how all of them end."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from tests.clock import Clock, turns
from triton_openai.errors import InvalidAnswer, ModelCrashed, ServiceError
from triton_openai.triton import carrier as module
from triton_openai.triton.carrier import Carriers, fault_error
from triton_openai.triton.engine_capacity import EngineCapacity
from triton_openai.triton.tensors import InferRequest, JsonResponse, Tensor


class Sent:
    """A request that the client got, and its receiver."""

    def __init__(self, request: InferRequest, receiver: Any) -> None:
        self.request = request
        self.receiver = receiver
        self.closed = False

    def close(self, *, silent: bool = False) -> None:
        self.closed = True

    @property
    def kind(self) -> str:
        return str(json.loads(self.request.inputs[0].values[0])["kind"])

    @property
    def place(self) -> list[Any]:
        (tensor,) = [one for one in self.request.inputs if one.name == "carrier"]
        return list(json.loads(tensor.values[0]))

    def answer(self, *bodies: Any) -> None:
        self.receiver.receive([JsonResponse({"response": json.dumps(body)}, "companion") for body in bodies])


class Client:
    """A Triton that answers what the test says."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.loaded: list[str] = []

    def stream(self, request: InferRequest, receiver: Any) -> Sent:
        self.sent.append(Sent(request, receiver))
        return self.sent[-1]

    def of_kind(self, kind: str) -> list[Sent]:
        return [one for one in self.sent if one.kind == kind]

    async def unload_model(self, model: str) -> None:
        """Take it."""

    async def load_model(self, model: str) -> None:
        self.loaded.append(model)


class Reader:
    """Receives one stream."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.deliveries: list[Any] = []
        self.ends: list[Exception | None] = []
        self.taken: Callable[[], None] = lambda: None

    def receive(self, responses: Sequence[Any]) -> None:
        self.taken()
        self.deliveries += [response.delivery for response in responses]
        self.ids += [response.delivery.ids for response in responses]

    def end(self, error: Exception | None) -> None:
        self.ends.append(error)


def generation(**fields: Any) -> InferRequest:
    """Return a carried request."""
    body = Tensor("request", "BYTES", (1,), ('{"v":1,"kind":"generate"}',))
    return InferRequest(model="companion", id="x", inputs=(body,), stream=True, carried=True, **fields)


@pytest.fixture(autouse=True)
def _own_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Share the locks of models that are loaded again with no other process of this machine that runs tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def client() -> Client:
    """A Triton that answers what the test says."""
    return Client()


async def test_streams_share_a_carrier(client: Any, clock: Clock) -> None:
    """It is opened once, before the streams begin; each stream gets what is its own, and ends alone."""
    carriers = Carriers(EngineCapacity())
    readers = [Reader(), Reader()]
    for reader in readers:
        carriers.stream(client, generation(), reader)
    (opening,) = client.sent
    opening.answer({"n": 0, "d": []})
    assert ["carrier", "generate", "generate"] == [one.kind for one in client.sent]

    opening.answer({"n": 1, "d": [[1, [5]], [2, [6, 7]]]})
    opening.answer({"n": 2, "d": [[1, [8], "stop", None, [3, 0, 2]]]})
    assert [[[5], [8]], [[6, 7]]] == [reader.ids for reader in readers]
    assert [[None], []] == [reader.ends for reader in readers]
    carriers.close()


async def test_what_comes_together_is_passed_on_together(client: Any, clock: Clock) -> None:
    """The tokens of several responses become one for each stream, with all that came once; a lost one ends the rest."""
    carriers = Carriers(EngineCapacity())
    readers = [Reader(), Reader()]
    for reader in readers:
        carriers.stream(client, generation(), reader)
    opening = client.sent[0]
    scored = [[5, -1.0, 1, []]]
    opening.answer({"n": 0, "d": []})
    opening.answer(
        {"n": 1, "d": [[1, [5], None, None, None, scored, None, [None]], [2, [6]]]},
        {"n": 2, "d": [[1, [5], None, None, None, scored]]},
        {"n": 3, "d": [[1, [7], "stop", 7, [3, 0, 3], scored], [2, [8]]]},
        {"n": 5, "d": [[2, [9]]]},
    )

    assert [[[5, 5, 7]], [[6, 8]]] == [reader.ids for reader in readers]
    (whole,) = readers[0].deliveries
    assert ("stop", 7, (3, 0, 3), [None]) == (whole.finish, whole.stop, whole.usage, whole.prompt_logprobs)
    assert 3 == len(whole.logprobs)
    assert [None] == readers[0].ends
    assert isinstance(readers[1].ends[0], InvalidAnswer)


async def test_tokens_can_be_taken_one_by_one(client: Any, clock: Clock) -> None:
    """Where each token may end the answer, what came together is taken apart."""
    carriers, reader = Carriers(EngineCapacity()), Reader()
    carriers.stream(client, generation(token_by_token=True), reader)
    client.sent[0].answer({"n": 0, "d": []})
    client.sent[0].answer({"n": 1, "d": [[1, [5, 6, 7], "length", None, [3, 0, 3]]]})

    assert [[5], [6], [7]] == reader.ids
    assert [None] == reader.ends
    carriers.close()


async def test_responses_are_acknowledged(client: Any, clock: Clock) -> None:
    """After some of them, and with each request on the way."""
    carriers = Carriers(EngineCapacity())
    carriers.stream(client, generation(), Reader())
    opening = client.sent[0]
    for number in range(17):
        opening.answer({"n": number, "d": []})
    (credit,) = client.of_kind("credit")
    assert 16 == credit.place[2]

    opening.answer({"n": 17, "d": []})
    carriers.stream(client, generation(), Reader())
    await turns()
    assert 17 == client.sent[-1].place[2]
    carriers.close()


async def test_the_queue_of_the_engine_is_reported(client: Any, clock: Clock) -> None:
    """With each response; before the first one a limit holds, and the last limit when the carrier has gone."""
    room = EngineCapacity()
    seen: list[tuple[str, float, float]] = []
    room.on_change = lambda *values: seen.append(values)
    carriers = Carriers(room)
    carriers.stream(client, generation(), Reader())
    opening = client.sent[0]
    opening.answer({"n": 0, "d": [], "q": [0, 64]})
    opening.answer({"n": 1, "d": [], "q": [20, 64]})
    opening.answer({"n": 2, "d": []})
    opening.answer({"n": 3, "d": [], "q": [16, 64]})
    carriers.close()

    unknown = float("inf")
    limits = [(256, 256), (16, 80), (-4, 80), (unknown, unknown), (0, 80), (unknown, 80)]
    assert [("companion", *limit) for limit in limits] == seen


async def test_an_engine_that_never_reports_its_queue(client: Any, clock: Clock) -> None:
    """Its first response ends the limit. Those that follow cost nothing, until one brings the queue."""
    capacity = EngineCapacity()
    seen: list[tuple[str, float, float]] = []
    capacity.on_change = lambda *values: seen.append(values)
    carriers = Carriers(capacity)
    carriers.stream(client, generation(), Reader())
    opening = client.sent[0]
    for number in range(5):
        opening.answer({"n": number, "d": []})
    opening.answer({"n": 5, "d": [], "q": [0, 64]})
    opening.answer({"n": 6, "d": [], "q": [0, 64]})
    opening.answer({"n": 7, "d": []})
    opening.answer({"n": 8, "d": []})
    carriers.close()

    unlimited = float("inf")
    limits = [(256, 256), (unlimited, unlimited), (16, 80), (16, 80), (unlimited, unlimited), (unlimited, unlimited)]
    assert [("companion", *limit) for limit in limits] == seen


def test_the_room_of_several_engines() -> None:
    """It is summed; an engine that has not been asked lately counts as one that has room."""
    room = EngineCapacity()
    seen: list[tuple[str, float, float]] = []
    room.on_change = lambda *values: seen.append(values)
    room.tritons = lambda model: 3
    room.report("m", "first", "carrier", (40, 64))
    room.report("m", "second", "carrier", (0, 32))
    room.forget("m", "first", "carrier")
    room.forget("m", "second", "carrier")
    room.forget("m", "second", "carrier")

    limits = [(-24 + 512, 80 + 512), (-24 + 8 + 256, 80 + 40 + 256), (8 + 512, 40 + 512), (float("inf"), 3 * 40)]
    assert [("m", *limit) for limit in limits] == seen


async def test_two_carriers_to_one_engine(clock: Clock) -> None:
    """Requests over HTTP and over gRPC have a carrier each, and share what the one engine takes."""
    room = EngineCapacity()
    seen: list[tuple[float, float]] = []
    room.on_change = lambda model, more, limit: seen.append((more, limit))
    room.tritons = lambda model: 2
    carriers = Carriers(room)
    clients: list[Any] = [Client(), Client()]
    for number, client in enumerate(clients):
        carriers.stream(client, generation(), Reader())
        client.sent[0].answer({"n": 0, "d": [], "q": [number, 64]})
    # Opening the second one changes nothing, and neither does the end of one of the two.
    clients[0].sent[0].receiver.end(None)
    carriers.close()

    unknown = 256
    one = [(unknown, unknown), (16, 80), (16, 80), (15, 80)]
    assert [*[(more + unknown, limit + unknown) for more, limit in one], (float("inf"), 160)] == seen


async def test_a_carrier_that_cannot_be_opened(clock: Clock) -> None:
    """Nothing is left of it: its engine is not counted, and nobody waits for its first answer."""

    class Broken(Client):
        def stream(self, request: InferRequest, receiver: Any) -> Sent:
            raise ServiceError("no")

    room = EngineCapacity()
    seen: list[Any] = []
    room.on_change = lambda *values: seen.append(values)
    carriers = Carriers(room)
    client: Any = Broken()
    with pytest.raises(ServiceError):
        carriers.stream(client, generation(), Reader())
    await clock.elapse(module.SILENCE + 2, steps=12)
    assert ([], []) == (seen, client.loaded)


async def test_a_stream_that_is_closed_is_cancelled(client: Any, clock: Clock) -> None:
    """The engine is told, and what was on its way is dropped."""
    carriers, reader = Carriers(EngineCapacity()), Reader()
    stream = carriers.stream(client, generation(), reader)
    opening = client.sent[0]
    opening.answer({"n": 0, "d": []})
    stream.close()
    (cancel,) = client.of_kind("cancel")
    assert client.of_kind("generate")[0].place[1] == cancel.place[1]

    opening.answer({"n": 1, "d": [[1, [5]]]})
    assert ([], []) == (reader.ids, reader.ends)
    carriers.close()


async def test_a_client_that_reads_slowly(client: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes for a paused stream waits, to a limit; beyond it the engine stops and the client learns why."""
    monkeypatch.setattr(module, "_MAX_WAITING", 24)
    carriers, reader = Carriers(EngineCapacity()), Reader()
    stream = carriers.stream(client, generation(), reader)
    opening = client.sent[0]
    opening.answer({"n": 0, "d": []})
    stream.pause()
    opening.answer({"n": 1, "d": [[1, [5]]]})
    opening.answer({"n": 2, "d": [[1, [6]]]})
    assert [] == reader.ids
    stream.resume()
    assert [[5], [6]] == reader.ids

    # A reader that takes one delivery at a time, and less than comes.
    reader.taken = stream.pause
    stream.pause()
    number = 3
    while not reader.ends and number < 20:
        opening.answer({"n": number, "d": [[1, [1]]]}, {"n": number + 1, "d": []})
        opening.answer({"n": number + 2, "d": [[1, [1]]]})
        number += 3
        stream.resume()
    (error,) = reader.ends
    assert isinstance(error, ServiceError)
    assert "client_too_slow" == error.code
    assert client.of_kind("cancel")
    carriers.close()


async def test_a_lost_carrier_ends_its_streams(client: Any, clock: Clock) -> None:
    """Each ends with an error, and the next stream opens another carrier."""
    carriers = Carriers(EngineCapacity())
    readers = [Reader(), Reader()]
    for reader in readers:
        carriers.stream(client, generation(), reader)
    client.sent[0].answer({"n": 0, "d": []})
    client.sent[0].receiver.end(None)
    assert all(isinstance(reader.ends[0], ServiceError) for reader in readers)

    carriers.stream(client, generation(), Reader())
    assert 2 == len(client.of_kind("carrier"))
    carriers.close()


_WRONG = {
    "no JSON": "{",
    "another shape": '{"n": "x"}',
    "a delivery of another shape": '{"n": 1, "d": [["x", [1]]]}',
    "a number that is missing": '{"n": 7, "d": []}',
    "nested too deeply": "[" * 100_000,
}


@every_case("name", list(_WRONG))
async def test_an_answer_that_is_wrong(clock: Clock, name: str) -> None:
    """All streams of the carrier end: what came cannot be told apart any more."""
    client: Any = Client()
    carriers, reader = Carriers(EngineCapacity()), Reader()
    carriers.stream(client, generation(), reader)
    opening = client.sent[0]
    opening.answer({"n": 0, "d": []})
    opening.receiver.receive([JsonResponse({"response": _WRONG[name]}, "companion")])

    assert [InvalidAnswer] == [type(error) for error in reader.ends]
    carriers.close()


_FAULTS = {
    "a client's mistake": ({"kind": "invalid", "message": "no", "param": "x"}, 400, "x"),
    "an unknown parameter": ({"kind": "unsupported", "message": "no", "param": "x"}, 400, "x"),
    "a LoRA adapter": ({"kind": "lora", "message": "no", "param": "model"}, 404, "model"),
    "no room": ({"kind": "overloaded", "message": "no"}, 429, None),
    "the engine": ({"kind": "engine", "message": "out of luck"}, 502, None),
    "a dead engine": ({"kind": "dead", "message": "dead"}, 503, None),
    "another kind": ({"kind": "?", "message": "no"}, 502, None),
    "no object": ("x", 502, None),
}


@every_case("name", list(_FAULTS))
def test_errors_by_kind(name: str) -> None:
    """The model says what kind of error it is, so that a client's mistake is never the service's."""
    fault, status, param = _FAULTS[name]
    error = fault_error(fault, "companion")

    assert (status, param) == (error.status, error.param)


async def test_a_process_that_falls_silent(client: Any, clock: Clock) -> None:
    """Triton says nothing of a model's process that was killed: its streams end, and Triton loads the model again."""
    carriers, reader = Carriers(EngineCapacity()), Reader()
    carriers.stream(client, generation(), reader)
    client.sent[0].answer({"n": 0, "d": []})
    carriers.stream(client, generation(), Reader()).close()
    cancelled = carriers.stream(client, generation(), Reader())
    await turns()
    cancelled.close()
    await clock.elapse(module.SILENCE + 2, steps=12)

    # Neither what asks for a stream nor what cancels one stays open: Triton unloads no model that has open requests.
    assert ["carrier", "generate", "generate", "cancel"] == [one.kind for one in client.sent]
    assert [True] * 4 == [one.closed for one in client.sent]
    assert [ModelCrashed] == [type(error) for error in reader.ends]
    assert ["companion"] == client.loaded
    carriers.close()
