"""The companion's model file, run here with a stand-in for Triton's module and without vLLM."""

from __future__ import annotations

import json
import queue
import sys
import threading
import types
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case


class Sender:
    """Takes responses, as Triton's response sender does."""

    def __init__(self) -> None:
        self.sent: queue.Queue[Any] = queue.Queue()
        self.cancelled = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.put(None if response is None else json.loads(response))

    def is_cancelled(self) -> bool:
        return self.cancelled

    def next(self) -> Any:
        """Return the next response that is no pulse, None at the end."""
        while True:
            response = self.sent.get(timeout=120)
            if response is None or response["d"] or response["n"] == 0:
                return response


class Loop:
    """Runs what belongs into the engine's loop at once."""

    def call_soon(self, function: Any, *arguments: Any) -> None:
        self.waiting = function

    def call_soon_threadsafe(self, function: Any, *arguments: Any) -> None:
        function(*arguments)


class Owner:
    """What a carrier belongs to."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.gone = threading.Event()
        self.waiting: list[int] | None = None

    def queue(self) -> list[int] | None:
        return self.waiting

    def lost(self, carrier: Any) -> None:
        self.gone.set()


def turn(carrier: Any, owner: Owner, *events: list[Any]) -> None:
    """Have the engine produce *events* in one turn of its loop."""
    for event in events:
        carrier.put(event)
    owner.loop.waiting()


def test_what_one_turn_produces_is_one_response(model: Any) -> None:
    """The streams of a carrier share its responses, which are numbered."""
    owner, sender = Owner(), Sender()
    carrier = model.Carrier(owner, "front", sender)
    assert {"n": 0, "d": [], "v": 1} == sender.next()

    turn(carrier, owner, [1, [5]], [2, [6]])
    assert {"n": 1, "d": [[1, [5]], [2, [6]]]} == sender.next()
    carrier.close()
    assert sender.next() is None
    assert owner.gone.wait(120)


def test_a_client_that_never_reads(model: Any) -> None:
    """Without an acknowledgement no more than the window is sent; the rest is joined, one event for each stream."""
    owner, sender = Owner(), Sender()
    carrier = model.Carrier(owner, "front", sender)
    sender.next()
    for number in range(model.WINDOW):
        turn(carrier, owner, [1, [number]])
        assert [[1, [number]]] == sender.next()["d"]
    for number in range(1000):
        turn(carrier, owner, [1, [number]], [2, [number]])
    assert sender.sent.empty()
    assert 2 == len(carrier._waiting)

    turn(carrier, owner, [1, [7], "stop", 7, [3, None, 1001]])
    carrier.acknowledge(1)
    (first, second) = sender.next()["d"]
    assert [1, [*range(1000), 7], "stop", 7, [3, None, 1001]] == first
    assert [2, list(range(1000))] == second
    carrier.close()


def test_a_carrier_that_nobody_acknowledges_is_lost(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has stopped reading loses its carrier, and with it its streams."""
    monkeypatch.setattr(model, "WINDOW", 1)
    monkeypatch.setattr(model, "SILENCE", 0.01)
    monkeypatch.setattr(model, "PULSE", 0.04)
    owner, sender = Owner(), Sender()
    carrier = model.Carrier(owner, "front", sender)
    turn(carrier, owner, [1, [5]])

    assert owner.gone.wait(120)


def test_a_client_that_has_gone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton says that the carrier's request is cancelled: its streams end."""
    monkeypatch.setattr(model, "PULSE", 0.04)
    owner, sender = Owner(), Sender()
    model.Carrier(owner, "front", sender)
    sender.cancelled = True

    assert owner.gone.wait(120)


_JOINED = {
    "tokens": ([1, [5]], [1, [6]], [1, [5, 6]]),
    "the end": ([1, [5]], [1, [6], "length", None, [1, 0, 2]], [1, [5, 6], "length", None, [1, 0, 2]]),
    "an error": (
        [1, [5]],
        [1, [], None, None, None, None, {"kind": "dead"}],
        [1, [5], None, None, None, None, {"kind": "dead"}],
    ),
    "log probabilities": (
        [1, [5], None, None, None, [[5, -1.0, 1, []]]],
        [1, [6], None, None, None, [[6, -2.0, 1, []]]],
        [1, [5, 6], None, None, None, [[5, -1.0, 1, []], [6, -2.0, 1, []]]],
    ),
    "the prompt's log probabilities, of the first alone": (
        [1, [5], None, None, None, None, None, [None, [7, -1.0, 1, []]]],
        [1, [6], "stop"],
        [1, [5, 6], "stop", None, None, None, None, [None, [7, -1.0, 1, []]]],
    ),
}


@every_case("name", list(_JOINED))
def test_events_are_joined(model: Any, name: str) -> None:
    """Nothing of either event is lost."""
    first, second, expected = [json.loads(json.dumps(event)) for event in _JOINED[name]]
    model.join(first, second)

    assert expected == first


_ENGINES = {
    "none": (None, "needs vLLM"),
    "too old": ("0.10.2", "needs vLLM 0.11 or newer, and this is 0.10.2"),
    "of another interface": ("9.0.0", "vLLM 9.0.0 has another interface"),
}


@every_case("name", list(_ENGINES))
def test_an_engine_that_does_not_fit(model: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model is not loaded, and Triton's log says why in a sentence."""
    version, expected = _ENGINES[name]
    package = None
    if version is not None:
        package = types.ModuleType("vllm")
        package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)

    with pytest.raises(RuntimeError, match=expected):
        model.Engine(tmp_path)


class Method:
    """The methods of vLLM's engine, with the arguments of a release."""

    async def add_request(
        self, request_id: Any, prompt: Any, params: Any, arrival: Any = 0, lora_request: Any = None, priority: Any = 0
    ) -> None: ...

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: Any, *, lora_request: Any = None, priority: Any = 0
    ) -> None: ...

    def encode(self, prompt: Any, pooling_params: Any, request_id: Any, lora_request: Any = None) -> None: ...

    def abort(self, request_id: Any, internal: Any = False) -> None: ...

    def shutdown(self, timeout: Any = None) -> None: ...

    @classmethod
    def from_engine_args(cls, engine_args: Any, stat_loggers: Any = None) -> None: ...


class OtherOrder(Method):
    """A release in which two arguments have changed places."""

    def add_request(self, prompt: Any, request_id: Any, params: Any, **options: Any) -> None: ...  # type: ignore[override]


class NoPriority(Method):
    """A release without one of the arguments."""

    def add_request(self, request_id: Any, prompt: Any, params: Any, lora_request: Any = None) -> None: ...  # type: ignore[override]


class NoEncode(Method):
    """A release without one of the methods."""

    encode = None  # type: ignore[assignment]


_LIBRARIES: dict[str, tuple[str, Any, str | None, list[str]]] = {
    "the oldest": ("0.11.0", Method, None, []),
    "a build of one's own": ("0.20.1.dev3+g1234", Method, None, []),
    "a version that is no number": ("dev", Method, None, []),
    "newer than any that was tried": ("1.0.0", Method, None, ["newer than"]),
    "arguments in another order": ("0.40.0", OtherOrder, "add_request does not begin with", ["newer than"]),
    "an argument that has gone": ("0.40.0", NoPriority, "add_request has no argument priority", ["newer than"]),
    "a method that has gone": ("0.40.0", NoEncode, "another interface", ["newer than"]),
    "a class that has gone": ("0.40.0", None, "another interface", ["newer than"]),
}


@every_case("name", list(_LIBRARIES))
def test_the_interface_of_a_release(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is taken by its interface: one that differs is refused at the start, and not at the first request."""
    version, engine, refused, logged = _LIBRARIES[name]
    lines: list[str] = []
    monkeypatch.setattr(model.pb.Logger, "log_info", lines.append)
    for module, names in model.USED.items():
        package = types.ModuleType(module)
        package.__path__ = []
        for one in names:
            if (one, engine) != ("AsyncLLM", None):
                setattr(package, one, engine)
        package.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module, package)
    for module in ("vllm.engine", "vllm.lora", "vllm.v1", "vllm.v1.engine"):
        package = types.ModuleType(module)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, module, package)

    if refused is None:
        library = model.Library()
        assert library.SamplingParams is engine
        assert library.EngineCoreOutput is None
        assert not library.has_collectors
    else:
        with pytest.raises(RuntimeError, match=refused):
            model.Library()
    assert len(logged) == len(lines)
    assert all(part in line for part, line in zip(logged, lines, strict=True))


class Logger:
    """Stands for vLLM's logger for Prometheus, which registers metrics when it is made."""

    def __init__(self, config: Any, engine_indexes: Any = None) -> None:
        raise AssertionError("It registers metrics.")

    def log(self) -> None:
        raise AssertionError("It writes a log.")


def stats(**fields: Any) -> Any:
    """Return what a scheduler says of its load."""
    return types.SimpleNamespace(
        **{"num_running_reqs": 2, "num_waiting_reqs": 1, "kv_cache_usage": 0.5, "num_skipped_waiting_reqs": 1, **fields}
    )


def test_the_newest_statistics_are_kept(model: Any) -> None:
    """One of each engine; nothing is logged, and no metrics are registered."""
    kept: dict[int, Any] = {}
    logger = model.scheduler_logger(Logger, kept)(object(), [0, 1])
    logger.record(scheduler_stats="old", iteration_stats=None, mm_cache_stats=None, engine_idx=0)
    logger.record("new", None, engine_idx=0)
    logger.record("other", None, None, 1)
    logger.record(None, None, engine_idx=0)
    logger.log()
    logger.log_engine_initialized()
    logger.record_sleep_state(0, 0)

    assert {0: "new", 1: "other"} == kept


_LOADS: dict[str, tuple[int, int, dict[int, Any], tuple[Any, Any, Any]]] = {
    "an engine": (4, 0, {0: stats()}, (2, 2, 0.5)),
    "several engines": (9, 0, {0: stats(), 1: stats(num_running_reqs=5, kv_cache_usage=0.75)}, (7, 4, 0.75)),
    "an engine whose last request was aborted": (0, 0, {0: stats()}, (0, 0, 0.0)),
    "vectors alone": (0, 1, {0: stats()}, (2, 2, 0.5)),
    "a release without the number": (4, 0, {0: types.SimpleNamespace(num_running_reqs=2, num_waiting_reqs=1,
                                                                     kv_cache_usage=0.5)}, (2, 1, 0.5)),
    "no statistics": (4, 0, {}, (None, None, None)),
}  # fmt: skip


@every_case("name", list(_LOADS))
def test_the_load(model: Any, name: str) -> None:
    """It is what the schedulers say, and nothing while nothing runs."""
    streams, pooling, scheduled, expected = _LOADS[name]
    engine = model.Engine.__new__(model.Engine)
    cache = types.SimpleNamespace(num_gpu_blocks=100, block_size=16)
    engine._config = types.SimpleNamespace(cache_config=cache)
    engine._scheduled = scheduled
    engine._pooling = pooling
    load = engine._load(streams)

    assert expected == (load["running"], load["waiting"], load["cache_usage"])
    assert (100, 16) == (load["cache_blocks"], load["block_size"])


_QUEUES: dict[str, tuple[int, dict[int, Any], str, Any]] = {
    "an engine": (4, {0: stats()}, "fcfs", [2, 8]),
    "several engines": (9, {0: stats(), 1: stats()}, "fcfs", [4, 16]),
    "nothing has run yet": (0, {}, "fcfs", [0, 8]),
    "no statistics": (4, {}, "fcfs", None),
    "an engine that puts requests in order": (4, {0: stats()}, "priority", None),
}


@every_case("name", list(_QUEUES))
def test_the_queue_of_the_engine(model: Any, name: str) -> None:
    """A client hears how many wait, where it may hold requests back itself."""
    streams, scheduled, policy, expected = _QUEUES[name]
    engine = model.Engine.__new__(model.Engine)
    engine._config = types.SimpleNamespace(scheduler_config=types.SimpleNamespace(policy=policy, max_num_seqs=8))
    engine._scheduled = scheduled
    engine._pooling = 0

    assert expected == engine.queue(streams)


def test_responses_bring_the_queue(model: Any) -> None:
    """Each of them, so that a client knows it within a step of the engine."""
    owner, sender = Owner(), Sender()
    owner.waiting = [3, 8]
    carrier = model.Carrier(owner, "front", sender)
    assert [3, 8] == sender.next()["q"]
    owner.waiting = [5, 8]
    turn(carrier, owner, [1, [5]])

    assert [5, 8] == sender.next()["q"]
    carrier.close()


class Output:
    """An output of vLLM's engine: its struct says what its fields are, and what they are without a value."""

    __struct_fields__: tuple[str, ...] = (
        "request_id",
        "new_token_ids",
        "finish_reason",
        "new_logprobs",
        "num_nans_in_logits",
    )
    __struct_defaults__ = (None, None, 0)

    def __init__(self, name: str, ids: list[int], **more: Any) -> None:
        self.request_id = name
        self.new_token_ids = ids
        self.finish_reason = more.pop("finish_reason", None)
        self.new_logprobs = more.pop("new_logprobs", None)
        self.num_nans_in_logits = more.pop("num_nans_in_logits", 0)


class OtherOutput(Output):
    """One of a release with other fields."""

    __struct_fields__ = ("new_token_ids", "request_id")


class Processor:
    """What vLLM processes outputs with."""

    def __init__(self, *, tracing: bool = False, interval: int = 1) -> None:
        self.tracing_enabled = tracing
        self.stream_interval = interval
        self.got: Any = None

    def process_outputs(self, outputs: Any, timestamp: Any = None, iteration_stats: Any = None, **more: Any) -> Any:
        self.got = (outputs, timestamp, iteration_stats, more)
        return "processed"


class OtherProcessor(Processor):
    """That of a release with another interface."""

    def process_outputs(self, outputs: Any, statistics: Any = None) -> Any:  # type: ignore[override]
        self.got = (outputs, statistics)


def test_times_of_tokens_are_not_taken(model: Any) -> None:
    """Unless vLLM sends traces, which have them; another interface stays as it is."""
    plain, tracing, other = Processor(), Processor(tracing=True), OtherProcessor()
    for processor in (plain, tracing, other):
        model.ShortWay.into(types.SimpleNamespace(output_processor=processor), OtherOutput)
    assert model.ShortWay.into(types.SimpleNamespace(), Output) is None
    output = OtherOutput("a", [5])
    assert "processed" == plain.process_outputs([output], 2.0, "times", weight_version="v")
    tracing.process_outputs([output], 2.0, "times")
    other.process_outputs([output], "times")

    assert ([output], 2.0, None, {"weight_version": "v"}) == plain.got
    assert ([output], 2.0, "times", {}) == tracing.got
    assert ([output], "times") == other.got


_WAYS = {
    "tokens alone": (Processor(), Output("a", [5, 6]), [5, 6]),
    "the last tokens": (Processor(), Output("a", [5], finish_reason="length"), None),
    "log probabilities": (Processor(), Output("a", [5], new_logprobs=[-1.0]), None),
    "a number that is not 0": (Processor(), Output("a", [5], num_nans_in_logits=2), None),
    "those of another request": (Processor(), Output("b", [5]), None),
    "an engine that holds tokens back": (Processor(interval=4), Output("a", [5]), None),
    "outputs with other fields": (Processor(), OtherOutput("a", [5]), None),
}


@every_case("name", list(_WAYS))
def test_tokens_go_the_short_way(model: Any, name: str) -> None:
    """Where an output has nothing else, vLLM does not see it; all others go its way."""
    processor, output, expected = _WAYS[name]
    way = model.ShortWay.into(types.SimpleNamespace(output_processor=processor), type(output))
    taken: list[Any] = []
    way.open("a", taken.append)
    processor.process_outputs([output], 1.0, None)
    (left, *_) = processor.got

    if expected is None:
        assert ([], [output]) == (taken, left)
    else:
        assert ([expected], []) == (taken, left)


def test_a_request_that_has_ended_leaves_the_short_way(model: Any) -> None:
    """Nothing is kept of it."""
    processor = Processor()
    way = model.ShortWay.into(types.SimpleNamespace(output_processor=processor), Output)
    way.open("a", None)
    way.close("a")
    way.close("a")
    late = Output("a", [5])
    processor.process_outputs([late])

    assert [late] == processor.got[0]


class Collector:
    """vLLM's collector of a request, which the engine puts outputs into."""

    def __init__(self, name: str, early: Any = None) -> None:
        self.request_id = name
        self._early = early

    def get_nowait(self) -> Any:
        return self._early


class Beginning:
    """An engine that has just taken a request."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.prompts: list[Any] = []

    async def add_request(self, name: str, prompt: Any, params: Any, **options: Any) -> Collector:
        self.prompts.append(prompt)
        return self._collector


def output(ids: list[int], *, finished: bool = False) -> Any:
    """Return an output as vLLM makes it."""
    return types.SimpleNamespace(ids=ids, finished=finished)


@every_case("early", [True, False])
async def test_an_answer_takes_the_short_way_after_its_first_output(model: Any, early: bool) -> None:
    """Its first output and its last one go vLLM's way, however early the first one comes."""
    processor = Processor()
    first = output([1])
    collector = Collector("a-7")
    if early:
        collector = Collector("a-7", first)
    engine = searching(model, Beginning(collector))
    engine._library = types.SimpleNamespace(has_collectors=True)
    engine._short_way = model.ShortWay.into(types.SimpleNamespace(output_processor=processor), Output)
    stream = types.SimpleNamespace(name="a")
    taken: list[Any] = []

    def take(_: Any, one: Any) -> None:
        taken.append(one)

    await engine.generate(stream, {"ids": [1]}, [], take, take)
    if not early:
        processor.process_outputs([Output("a-7", [1])])
        assert 1 == len(processor.got[0])
        collector.put(first)  # type: ignore[attr-defined]
    processor.process_outputs([Output("a-7", [2])])
    last = output([3], finished=True)
    collector.put(last)  # type: ignore[attr-defined]
    processor.process_outputs([Output("a-7", [4])])

    assert [first, [2], last] == taken
    assert 1 == len(processor.got[0])


class Scored:
    """A token's log probability."""

    def __init__(self, logprob: float, rank: int = 1) -> None:
        self.logprob = logprob
        self.rank = rank


class Table:
    """An engine whose next tokens depend on the tokens so far, as a table says."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]]) -> None:
        self._table = table
        self.asked: list[str] = []

    async def generate(self, prompt: Any, params: Any, name: str, **options: Any) -> Any:
        self.asked.append(name)
        values = self._table[tuple(prompt["prompt_token_ids"])]
        choice = types.SimpleNamespace(logprobs=[{token: Scored(value) for token, value in values.items()}])
        yield types.SimpleNamespace(outputs=[choice])


#: The greedy answer is 5 6, the likeliest 7 8; 9 ends an answer.
TABLE = {
    (1,): {5: -0.5, 7: -0.75, 9: -3.0},
    (1, 5): {6: -2.0, 9: -2.5},
    (1, 7): {8: -0.25, 9: -4.0},
}


def searching(model: Any, table: Any) -> Any:
    """Return an engine of the model file over *table*."""
    engine = model.Engine.__new__(model.Engine)
    engine._engine = table
    engine._vocabulary = 100
    engine._arguments = {}
    engine._encodes = False
    engine._sampling = lambda message: message
    return engine


_SEARCHES: dict[str, tuple[dict[str, Any], list[tuple[list[int], str, Any]]]] = {
    "two beams": ({"width": 2}, [([7, 8], "length", None), ([5, 6], "length", None)]),
    "one beam is greedy": ({"width": 1}, [([5, 6], "length", None)]),
    "an answer that ends": (
        {"width": 3, "ends": [9]},
        [([7, 8], "length", None), ([5, 6], "length", None), ([5, 9], "stop", 9)],
    ),
    "short answers": (
        {"width": 3, "ends": [9], "length_penalty": -4.0},
        [([9], "stop", 9), ([5, 9], "stop", 9), ([7, 9], "stop", 9)],
    ),
}


@every_case("name", list(_SEARCHES))
async def test_a_beam_search(model: Any, name: str) -> None:
    """It finds the answers that are likeliest as a whole, the best first, with their log probabilities."""
    beams, expected = _SEARCHES[name]
    message = {"ids": [1], "sampling": {"max_tokens": 2}, "beams": beams}
    found = await searching(model, Table(TABLE)).search("x", message, [], lambda: True)

    assert expected == [(beam.token_ids, beam.finish_reason, beam.stop_reason) for beam in found]
    assert all(len(beam.logprobs) == len(beam.token_ids) for beam in found)


async def test_a_beam_search_that_nobody_wants_ends(model: Any) -> None:
    """The engine gets no more work for it."""
    table = Table(TABLE)
    wanted = iter([True, False])
    message = {"ids": [1], "sampling": {"max_tokens": 2}, "beams": {"width": 2}}
    await searching(model, table).search("x", message, [], lambda: next(wanted))

    assert ["x/0-0"] == table.asked


class VLLMClientError(Exception):
    """The base of vLLM's errors for what a client does wrong."""


def raised(kind: type[Exception], text: str, **fields: Any) -> Exception:
    """Return an error of vLLM with these *fields*."""
    error = kind(text)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


_ERRORS: dict[str, tuple[Exception, str, str | None]] = {
    "a parameter": (raised(VLLMClientError, "no", parameter="top_p"), "invalid", "top_p"),
    "a value": (ValueError("no"), "invalid", None),
    "vLLM's limit of its queue": (
        raised(Exception, "no", http_status=HTTPStatus.SERVICE_UNAVAILABLE),
        "overloaded",
        None,
    ),
    "what can be tried again": (
        raised(Exception, "no", status_code=HTTPStatus.SERVICE_UNAVAILABLE),
        "overloaded",
        None,
    ),
    "another status": (raised(Exception, "no", status_code=HTTPStatus.INTERNAL_SERVER_ERROR), "engine", None),
    "a fault": (RuntimeError("no"), "engine", None),
}


@every_case("name", list(_ERRORS))
def test_the_errors_of_vllm(model: Any, name: str) -> None:
    """What a client does wrong, what can be tried again, and what has failed are told apart."""
    error, kind, param = _ERRORS[name]

    assert {"kind": kind, "message": "no", "param": param} == model.error_fields(error)


_REFUSED = {
    "a misspelt key": (lambda model: model.check_keys({"temprature": 1}, {"temperature"}, "sampling"), "'temprature'"),
    "a misspelt key of a part": (lambda model: model.check_keys({"x": 1}, {"y"}, "return", "return."), "'return.x'"),
    "a part that is no object": (lambda model: model.Engine._sampling(_bare(model), {"sampling": [1]}), "'sampling'"),
    "another version": (lambda model: model.read(_request('{"v": 2}')), "version 1"),
    "no JSON": (lambda model: model.read(_request("{")), "no JSON"),
    "no object": (lambda model: model.read(_request("[]")), "no JSON object"),
    "nested too deeply": (lambda model: model.read(_request("[" * 100_000)), "no JSON"),
    "no place": (lambda model: model.read(_request("{}", '["x"]')), "'carrier'"),
    "no base64": (
        lambda model: model.multi_modal_data([{"type": "image", "at": 0, "encoding": "base64"}], [b"?"]),
        "no base64",
    ),
    "no sound": (lambda model: model.multi_modal_data([{"type": "audio", "at": 0}], [b"?"]), "cannot be read"),
    "another medium": (lambda model: model.multi_modal_data([{"type": "smell", "at": 0}], [b"?"]), "'smell'"),
    "a file that is missing": (lambda model: model.multi_modal_data([{"type": "image", "at": 3}], [b"?"]), "3"),
}


_PROMPTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image for a model of texts": ({"ids": [1], "media": [{"type": "image", "at": 0}]}, "unsupported", "texts only"),
    "audio for a model of texts": ({"ids": [1], "media": [{"type": "audio", "at": 0}]}, "unsupported", "texts only"),
    "no tokens": ({"ids": []}, "invalid", "empty"),
    "nothing": ({}, "invalid", "empty"),
    "a token that there is not": ({"ids": [1, 100]}, "invalid", "100"),
    "no token": ({"ids": [1, True]}, "invalid", "True"),
}


@every_case("name", list(_PROMPTS))
def test_prompts_that_are_refused(model: Any, name: str) -> None:
    """The error says what is wrong, and the engine does not see the prompt."""
    message, kind, expected = _PROMPTS[name]
    engine = searching(model, Table({}))
    engine._multimodal = False

    with pytest.raises(model.Refused, match=expected) as caught:
        engine._prompt(message, [b""])
    assert kind == caught.value.fields["kind"]


_FORMS: dict[str, tuple[dict[str, Any], bool, Any]] = {
    "token ids": ({"ids": [1], "salt": "s"}, False, "token"),
    "a text": ({"prompt": "x"}, False, None),
    "an image": ({"ids": [1], "media": [{"type": "image", "at": 0}]}, False, None),
    "options of the processor": ({"ids": [1], "mm": {"size": 1}}, False, None),
    "a model with an encoder": ({"ids": [1]}, True, None),
}


@every_case("name", list(_FORMS))
def test_prompts_that_need_no_thread_of_vllm(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids alone are handed over as vLLM's renderer gives them; all else is left to it."""
    message, encodes, expected = _FORMS[name]
    monkeypatch.setattr(model, "multi_modal_data", lambda *_: {})
    engine = searching(model, Table({}))
    engine._multimodal = True
    engine._encodes = encodes
    prompt = engine._prompt(message, [b""])

    assert expected == prompt.get("type")
    assert message.get("salt") == prompt.get("cache_salt")


def _bare(model: Any) -> Any:
    """Return an engine of the model file that knows no parameters."""
    engine = model.Engine.__new__(model.Engine)
    engine._known = set()
    return engine


def _request(*texts: str) -> Any:
    return dict(zip(("request", "carrier"), texts, strict=False))


@every_case("name", list(_REFUSED))
def test_what_is_refused(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is wrong gets an error that says what is, and reaches no engine."""

    def tensor(request: dict[str, str], name: str) -> Any:
        if name not in request:
            return None
        values = types.SimpleNamespace(reshape=lambda _: [request[name].encode()])
        return types.SimpleNamespace(as_numpy=lambda: values)

    monkeypatch.setattr(model.pb, "get_input_tensor_by_name", tensor, raising=False)
    does, expected = _REFUSED[name]

    with pytest.raises(model.Refused, match=expected):
        does(model)
