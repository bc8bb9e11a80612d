"""Several Tritons: requests are spread, fail over, and survive what happens to one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.cases import every_case
from tests.faults.surroundings import ENDS
from tests.fleet.conftest import MODELS, NAMES, One, fleet, settings_of, write_endpoints
from tests.proxy_fixture import Proxy
from tests.triton_fixture import frozen, wait_for_end
from triton_openai.api.service import Service
from triton_openai.app import SERVICE
from triton_openai.cli.inspect import inspect_models
from triton_openai.config.tree import BatchesSettings, FilesSettings, RoutingSettings

COMPLETIONS = "/v1/completions"


def steered(prompt: str, **steering: Any) -> str:
    return f"{prompt} <<steer {json.dumps(steering)}>>"


def body(model: str, prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 8, **more}


async def stream(proxy: Proxy, sent: dict[str, Any], first: asyncio.Event | None = None) -> tuple[int, bytes]:
    """Return the status and the whole body of a stream, however it ends; *first* is set with its first token."""
    async with proxy.client.post(COMPLETIONS, json={**sent, "stream": True}) as response:
        data = b""
        try:
            async for piece in response.content.iter_any():
                data += piece
                if first is not None:
                    first.set()
        except Exception:  # noqa: BLE001 - a stream that failed is cut
            return response.status, data
        return response.status, data


def complete(answer: tuple[int, bytes]) -> bool:
    status, data = answer
    return status == 200 and data.rstrip().endswith(b"data: [DONE]")


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


async def test_requests_take_turns(three: dict[str, One]) -> None:
    """Each Triton gets its share, of streams, whole answers and embeddings."""
    before = {name: sum(map(one.asked, MODELS)) for name, one in three.items()}
    async with fleet(settings_of(three, routing=RoutingSettings(policy="round_robin"))) as proxy:
        work: list[Any] = [stream(proxy, body("vllm_model", f"Hello {number}")) for number in range(12)]
        work += [proxy.post("/v1/embeddings", {"model": "text_embedding", "input": "Hello"}) for _ in range(12)]
        work += [proxy.post(COMPLETIONS, body("vllm_model", "Hello")) for _ in range(12)]
        await asyncio.gather(*work)
        status = (await proxy.get("/status")).json
    assert {name: sum(map(one.asked, MODELS)) - before[name] for name, one in three.items()} == dict.fromkeys(NAMES, 12)
    assert {line["name"]: line["state"] for line in status["endpoints"]} == dict.fromkeys(NAMES, "ready")
    assert set(status["endpoints"][0]["models"]) == set(MODELS)


@contextlib.asynccontextmanager
async def running(proxy: Proxy, count: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run *count* streams that do not end, each with a token already."""
    begun = [asyncio.Event() for _ in range(count)]
    streams = [
        asyncio.create_task(stream(proxy, body("vllm_model", steered(f"Long {number}", hang_at=2)), event))
        for number, event in enumerate(begun)
    ]
    try:
        await asyncio.gather(*(event.wait() for event in begun))
        yield streams
    finally:
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def _queued(proxy: Proxy) -> int:
    assert proxy.client.app is not None
    service: Service = proxy.client.app[SERVICE]
    return len(service.admission.queue)


def leases(proxy: Proxy) -> dict[str, int]:
    """Return how many requests each Triton runs."""
    return {name: len(member.leases) for name, member in proxy.models.fleet.members.items()}


async def test_the_fewest_requests_decide(three: dict[str, One]) -> None:
    """Of streams that run at a time, each Triton has as many."""
    async with fleet(settings_of(three)) as proxy, running(proxy, 12):
        assert leases(proxy) == dict.fromkeys(NAMES, 4)


async def test_a_request_waits_until_a_triton_has_room(three: dict[str, One]) -> None:
    """With a limit for each Triton, it waits in the service, and goes to the one where a request ends."""
    settings = settings_of(three, routing=RoutingSettings(policy="affinity"))
    limited = msgspec.structs.replace(settings.server, max_running_requests_per_endpoint=1)
    async with fleet(msgspec.structs.replace(settings, server=limited)) as proxy, running(proxy, 3) as streams:
        assert leases(proxy) == dict.fromkeys(NAMES, 1)
        waiting = asyncio.create_task(stream(proxy, body("vllm_model", "Hello")))
        await until(lambda: _queued(proxy) == 1)
        # Another model is another engine.
        assert 200 == (await proxy.post("/v1/embeddings", {"model": "text_embedding", "input": "Hello"})).status
        assert not waiting.done()
        streams[0].cancel()
        assert complete(await waiting)
        assert _queued(proxy) == 0


async def test_a_session_stays_at_its_triton(three: dict[str, One]) -> None:
    """With affinity, requests of one session, and such with the same beginning, go to the same Triton."""
    async with fleet(settings_of(three, routing=RoutingSettings(policy="affinity"))) as proxy:
        for headers, prompts in (({"x-session-id": "s1"}, "abcdef"), ({}, ["The same beginning"] * 6)):
            before = {name: one.asked("vllm_model") for name, one in three.items()}
            for prompt in prompts:
                assert 200 == (await proxy.post(COMPLETIONS, body("vllm_model", prompt), **headers)).status
            got = [one.asked("vllm_model") - before[name] for name, one in three.items()]
            assert sorted(got) == [0, 0, 6]


# What each API says who asks by, with a body that differs from request to request.
_SESSIONS: dict[str, tuple[str, Callable[[str], dict[str, Any]], Sequence[dict[str, Any]]]] = {
    "chat": (
        "/v1/chat/completions",
        lambda text: {"model": "vllm_model", "messages": [{"role": "user", "content": text}], "max_tokens": 4},
        [{"prompt_cache_key": "k"}, {"safety_identifier": "k"}, {"user": "k"}, {"session_id": "k"}, {"user": 7}],
    ),
    "completions": (
        COMPLETIONS,
        lambda text: body("vllm_model", text),
        [{"prompt_cache_key": "k"}, {"safety_identifier": "k"}, {"user": "k"}],
    ),
    "responses": (
        "/v1/responses",
        lambda text: {"model": "vllm_model", "input": text, "max_output_tokens": 16, "store": False},
        [{"prompt_cache_key": "k"}, {"safety_identifier": "k"}, {"user": "k"}],
    ),
    "compact": (
        "/v1/responses/compact",
        lambda text: {"model": "vllm_model", "input": text},
        [{"prompt_cache_key": "k"}],
    ),
    "messages": (
        "/v1/messages",
        lambda text: {"model": "vllm_model", "messages": [{"role": "user", "content": text}], "max_tokens": 4},
        [{"metadata": {"user_id": "k"}}, {"metadata": {"user_id": '{"session_id": "k"}', "more": 1}}],
    ),
    "embeddings": (
        "/v1/embeddings",
        lambda text: {"model": "text_embedding", "input": text},
        [{"user": "k"}],
    ),
}


@every_case("api", _SESSIONS)
async def test_what_a_request_is_part_of_keeps_it_at_its_triton(three: dict[str, One], api: str) -> None:
    """With affinity, each field that names a session or a user keeps its requests together, whatever they ask."""
    path, make, fields = _SESSIONS[api]
    async with fleet(settings_of(three, routing=RoutingSettings(policy="affinity"))) as proxy:
        for field in fields:
            before = {name: sum(map(one.asked, MODELS)) for name, one in three.items()}
            for number in range(9):
                answer = await proxy.post(path, {**make(f"{number} is another beginning"), **field})
                assert answer.status == 200, answer.json
            got = [sum(map(one.asked, MODELS)) - before[name] for name, one in three.items()]
            assert sorted(got) == [0, 0, 9], field


async def test_lines_of_batches_stay_at_their_tritons(three: dict[str, One], tmp_path: Path) -> None:
    """The field of a line counts as that of a live request does."""
    routing = RoutingSettings(policy="affinity", load_factor=100)
    settings = msgspec.structs.replace(
        settings_of(three, routing=routing),
        files=FilesSettings(store=f"dir:{tmp_path / 'files'}"),
        batches=BatchesSettings(store=f"sqlite:{tmp_path / 'db'}"),
    )
    path, make, _ = _SESSIONS["chat"]
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": path, "body": {**make(f"{number} begins"), "user": "k"}}
        for number in range(9)
    ]
    async with fleet(settings) as proxy:
        before = {name: one.asked("vllm_model") for name, one in three.items()}
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="input.jsonl")
        async with proxy.client.post("/v1/files", data=form) as response:
            file = (await response.json())["id"]
        wanted = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
        batch = (await proxy.post("/v1/batches", wanted)).json
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.01)
            batch = (await proxy.get(f"/v1/batches/{batch['id']}")).json
        assert batch["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
        got = [one.asked("vllm_model") - before[name] for name, one in three.items()]
        assert sorted(got) == [0, 0, 9]


async def test_fields_without_a_session_change_nothing(three: dict[str, One]) -> None:
    """A field that is empty, no text, or too long, is accepted as before, and names no session."""
    async with fleet(settings_of(three, routing=RoutingSettings(policy="affinity", affinity=("session",)))) as proxy:
        for value in (None, "", {"a": 1}, [1], 1.5, True, "x" * 5000, "\ud800"):
            before = {name: one.asked("vllm_model") for name, one in three.items()}
            sent = [body("vllm_model", f"{number}", user=value) for number in range(9)]
            answers = await asyncio.gather(*(proxy.post(COMPLETIONS, one) for one in sent))
            assert {answer.status for answer in answers} <= {200, 400}, value
            got = [one.asked("vllm_model") - before[name] for name, one in three.items()]
            assert max(got) < 9 or answers[0].status == 400, (value, got)


@pytest.mark.parametrize("kind", ["previous_response_id", "conversation"])
async def test_a_conversation_stays_at_its_triton(three: dict[str, One], kind: str) -> None:
    """With affinity, responses that go on from one another, or are part of a conversation, go to the same Triton."""
    routing = RoutingSettings(policy="affinity", affinity=("conversation",))
    async with fleet(settings_of(three, routing=routing)) as proxy:
        first = "/v1/responses" if kind == "previous_response_id" else "/v1/conversations"
        begun = {"model": "vllm_model", "input": "0", "max_output_tokens": 16} if first == "/v1/responses" else {}
        answer = await proxy.post(first, begun)
        assert answer.status == 200, answer.json
        last = answer.json["id"]
        before = {name: one.asked("vllm_model") for name, one in three.items()}
        for number in range(9):
            sent = {"model": "vllm_model", "input": f"{number}", "max_output_tokens": 16, kind: last}
            answer = await proxy.post("/v1/responses", sent)
            assert answer.status == 200, answer.json
            last = answer.json["id"] if kind == "previous_response_id" else last
        got = [one.asked("vllm_model") - before[name] for name, one in three.items()]
        assert sorted(got) == [0, 0, 9]


async def test_several_answers_share_a_triton(three: dict[str, One]) -> None:
    """The answers to one prompt go to the Triton that has its beginning in its cache."""
    async with fleet(settings_of(three)) as proxy:
        before = {name: one.asked("vllm_model") for name, one in three.items()}
        assert 200 == (await proxy.post(COMPLETIONS, body("vllm_model", "Hello", n=5))).status
        assert sorted(one.asked("vllm_model") - before[name] for name, one in three.items()) == [0, 0, 5]


async def test_a_triton_that_is_killed_loses_only_what_has_a_token(three: dict[str, One]) -> None:
    """Of 64 streams, those without a token are answered by the others; those with one end with an error event."""
    settings = settings_of(three, routing=RoutingSettings(policy="round_robin"))
    async with fleet(settings) as proxy, running(proxy, 15) as streams:
        assert leases(proxy) == dict.fromkeys(NAMES, 5)
        # So that it gives no token to those that come now.
        with frozen(three["a"].server):
            sent = [body("vllm_model", f"Waiting {number}") for number in range(49)]
            waiting = [asyncio.create_task(stream(proxy, one)) for one in sent]
            await until(lambda: leases(proxy)["a"] >= 5 + 16 or all(one.done() for one in waiting))
            kill(three["a"])
        answers = await asyncio.gather(*waiting)
        assert all(map(complete, answers))
        await until(lambda: sum(one.done() for one in streams) == 5)
        told = {one for one in streams if one.done()}
        assert all(b"event: error" in one.result()[1] for one in told)
        await until(lambda: {line.state for line in _lines(proxy) if line.name == "a"} == {"does not answer"})
        assert leases(proxy) == {"a": 0, "b": 5, "c": 5}


def _lines(proxy: Proxy) -> Any:
    from triton_openai.models.overview import endpoint_lines

    return endpoint_lines(proxy.models)


async def test_a_triton_that_is_frozen_is_left(three: dict[str, One]) -> None:
    """Requests that wait for its first token go on elsewhere once it does not answer a simple question either."""
    async with fleet(settings_of(three)) as proxy:
        with frozen(three["b"].server):
            answers = await asyncio.gather(
                *(stream(proxy, body("vllm_model", f"Hello {number}")) for number in range(30))
            )
            assert all(map(complete, answers))
            await until(lambda: "vllm_model" not in proxy.models.fleet.members["b"].targets)
            again = await asyncio.gather(*(stream(proxy, body("vllm_model", "Hello")) for _ in range(10)))
            assert all(map(complete, again))
        await until(lambda: "vllm_model" in proxy.models.fleet.members["b"].targets)


async def test_all_tritons_are_replaced_under_load(three: dict[str, One], tmp_path: Path) -> None:
    """Each is taken off the list, stopped, started and put back, and no request fails."""
    file = tmp_path / "endpoints.yaml"
    endpoints = {name: one.endpoint for name, one in three.items()}
    write_endpoints(file, *endpoints.values())
    settings = settings_of(three)
    triton = msgspec.structs.replace(settings.triton, endpoints=(), endpoints_file=file)
    async with fleet(msgspec.structs.replace(settings, triton=triton)) as proxy:
        stop, outcomes = asyncio.Event(), Counter[bool]()

        async def client(number: int) -> None:
            while not stop.is_set():
                # Several run at any time, and few begin: the Tritons that start have the cores.
                sent = body("vllm_model", steered(f"Hello {number}", delay_ms=100))
                outcomes[complete(await stream(proxy, sent))] += 1

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        members = proxy.models.fleet.members
        for name, one in three.items():
            member = members[name]
            write_endpoints(file, *(each for other, each in endpoints.items() if other != name))
            await until(lambda name=name: name not in members)
            await until(lambda member=member: not member.leases)
            # It would take three seconds to unload its models.
            await asyncio.to_thread(one.server.stop, timeout=0.1)
            await asyncio.to_thread(one.server.start)
            write_endpoints(file, *endpoints.values())
            await until(lambda name=name: name in members and "vllm_model" in members[name].targets)
            # All clients have been answered with this one.
            answered = outcomes.total()
            await until(lambda answered=answered: outcomes.total() >= answered + 2 * len(clients))
        stop.set()
        await asyncio.gather(*clients)
    assert outcomes.keys() == {True}


async def test_a_triton_that_leaves_gives_its_requests_a_time(three: dict[str, One], tmp_path: Path) -> None:
    """What has not ended within the grace of a shutdown ends with an error event; the others' requests go on."""
    file = tmp_path / "endpoints.yaml"
    endpoints = {name: one.endpoint for name, one in three.items()}
    write_endpoints(file, *endpoints.values())
    settings = settings_of(three)
    triton = msgspec.structs.replace(settings.triton, endpoints=(), endpoints_file=file)
    server = msgspec.structs.replace(settings.server, shutdown_grace=0.1)
    async with (
        fleet(msgspec.structs.replace(settings, triton=triton, server=server)) as proxy,
        running(proxy, 3) as streams,
    ):
        assert leases(proxy) == dict.fromkeys(NAMES, 1)
        write_endpoints(file, endpoints["a"], endpoints["b"])
        done, others = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        (told,) = done
        assert b"event: error" in told.result()[1]
        assert len(others) == 2
        assert leases(proxy) == {"a": 1, "b": 1}


async def test_stop_requests_reach_the_triton_that_works(three: dict[str, One]) -> None:
    """Clients that leave an ensemble stop the engine that works for them, on whichever Triton."""
    async with fleet(settings_of(three)) as proxy:
        before = {name: len(one.record.events(event="request")) for name, one in three.items()}
        begun = [asyncio.Event() for _ in range(9)]
        streams = [
            asyncio.create_task(
                stream(proxy, body("ensemble", steered(f"Long {number}", delay_ms=100), max_tokens=400), event)
            )
            for number, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        assert all(len(one.record.events(event="request")) > before[name] for name, one in three.items())
        for running in streams:
            running.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for one in three.values():
            begun_ids = {event["id"] for event in one.record.events(model="tensorrt_llm", event="request")}
            # In a thread: the service, which stops the engines, runs in this event loop.
            ended = partial(_have_ended, begun_ids)
            await asyncio.to_thread(one.record.wait_for, ended, 120, model="tensorrt_llm")


def _have_ended(ids: set[str], events: Sequence[Mapping[str, Any]]) -> bool:
    return ids <= {str(event["id"]) for event in events if event["event"] in ENDS}


async def test_models_are_loaded_and_unloaded_everywhere(three: dict[str, One]) -> None:
    """A load and an unload reach every Triton, or the one that is named; a model is served by those that have it."""
    async with fleet(settings_of(three)) as proxy:
        members = proxy.models.fleet.members
        path = "/v1/models/text_embedding"

        def having() -> set[str]:
            return {name for name, member in members.items() if "text_embedding" in member.targets}

        async def post(what: str, query: str = "") -> Any:
            async with proxy.client.post(f"{path}/{what}{query}") as response:
                return response.status, await response.json()

        assert (await post("unload", "?endpoint=b"))[0] == 200
        await until(lambda: having() == {"a", "c"})
        answers = await asyncio.gather(
            *(proxy.post("/v1/embeddings", {"model": "text_embedding", "input": "x"}) for _ in range(9))
        )
        assert {answer.status for answer in answers} == {200}
        reports = {one.name: one for one in await inspect_models(settings_of(three))}
        assert any("not ready at b" in note for note in reports["text_embedding"].notes)
        assert (await post("load", "?endpoint=d"))[1]["error"]["param"] == "endpoint"
        status, answer = await post("load")
        assert (status, answer["id"]) == (200, "text_embedding")
        assert answer["endpoints"] == dict.fromkeys(NAMES, "ready")
        assert having() == {"a", "b", "c"}
        assert (await post("unload"))[0] == 200
        assert having() == set()
        assert (await proxy.post("/v1/embeddings", {"model": "text_embedding", "input": "x"})).status == 404
        assert (await post("load"))[0] == 200
        assert having() == {"a", "b", "c"}


def kill(one: One) -> None:
    """Kill a Triton as the kernel does, with all its processes."""
    assert one.server.pid is not None
    os.killpg(one.server.pid, signal.SIGKILL)
    # The next test starts those again of which the end is known.
    assert wait_for_end(one.server, 120) is not None


def load(one: One, model: str) -> None:
    """Have a Triton load *model* as its files are now."""
    url = f"{one.server.http_url}/v2/repository/models/{model}/load"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=120) as response:
        assert 200 == response.status


async def test_a_request_goes_to_the_variant_that_takes_it(three: dict[str, One]) -> None:
    """A model that one Triton has with other tensors is served by each as it can, and the log says how they differ."""
    config = three["c"].repository.path / "vllm_model" / "config.pbtxt"
    before = config.read_text()
    # Without log probabilities, as an older release.
    text = before.replace('name: "return_logprobs"', 'name: "return_nothing"')
    assert text != before
    config.write_text(text)
    try:
        await asyncio.to_thread(load, three["c"], "vllm_model")
        # In turns, so that each gets some.
        async with fleet(settings_of(three, routing=RoutingSettings(policy="round_robin"))) as proxy:
            (variant,) = proxy.models.served["vllm_model"].variants
            assert variant.endpoints == {"c"}
            asked = three["c"].asked("vllm_model")
            answers = [await proxy.post(COMPLETIONS, body("vllm_model", "Hello", logprobs=1)) for _ in range(12)]
            assert {answer.status for answer in answers} == {200}
            assert three["c"].asked("vllm_model") == asked
            answers = [await proxy.post(COMPLETIONS, body("vllm_model", "Hello")) for _ in range(12)]
            assert {answer.status for answer in answers} == {200}
            assert three["c"].asked("vllm_model") > asked
            # Nor is what waits at one way of it lost with its only Triton.
            with frozen(three["c"].server):
                waiting = [asyncio.create_task(stream(proxy, body("vllm_model", "Hello"))) for _ in range(12)]
                await until(lambda: leases(proxy)["c"] >= 2 or all(one.done() for one in waiting))
                kill(three["c"])
            assert all(map(complete, await asyncio.gather(*waiting)))
    finally:
        config.write_text(before)
        # The next test has it started with its files as they were.
        await asyncio.to_thread(three["c"].server.stop, timeout=0.1)
