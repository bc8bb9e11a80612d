"""The benchmark's arithmetic, its reading of the kernel's accounts, and its load generator against a tiny server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench import parsers, report
from bench.accounting import CpuClock, memory, parse_schedstat, parse_stat, parse_status, tree
from bench.cases import CASES, Row, plans
from bench.chains import Chains, measure_chains
from bench.demo import Demo
from bench.figures import ratio, table, written
from bench.footprint import Footprint
from bench.machine import Cores, place
from bench.messages import CHOICES, Load, Measured, Target
from bench.parsers import ParserRow, measure_parsers
from bench.path import STREAMED, TOKEN, TRACED, UNSAMPLED, WHOLE, PathRow, measure_path
from bench.profile import sampled
from bench.repository import TICK_MS, build_repository
from bench.tally import BenchTally
from bench.wire import AnswerReader, http_request
from tests.cases import every_case
from triton_openai.load.tally import percentile
from triton_openai.parsers.parser_registry import TOOL_PARSERS

_ROOT = Path(__file__).parents[2]
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class TestFigures:
    def test_percentile_lies_between_neighbours(self):
        assert 1.5 == percentile([2.0, 1.0], 0.5)
        assert 3.0 == percentile([3.0, 1.0, 2.0], 1.0)

    def test_percentile_of_nothing_is_unknown(self):
        assert percentile([], 0.5) is None

    def test_ratio_needs_both_sides(self):
        assert 2.0 == ratio(4.0, 2.0)
        assert ratio(None, 2.0) is None
        assert ratio(1.0, None) is None
        assert ratio(1.0, 0.0) is None

    def test_unknown_is_written_as_a_dash(self):
        assert "-" == written(None)
        assert "1,234.50" == written(1234.5, 2)

    def test_table_aligns_texts_left_and_numbers_right(self):
        lines = table(["name", "n"], [["a", "1"], ["bcdef", "100"]]).splitlines()
        assert ["name     n", "-----  ---", "a        1", "bcdef  100"] == lines


def _process(proc: Path, pid: int, threads: dict[int, int], ticks: int, children: str = "") -> None:
    """Write what the kernel shows of a process: its threads' nanoseconds and its own total."""
    for tid, spent in threads.items():
        task = proc / str(pid) / "task" / str(tid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{spent} 5 7\n")
        (task / "children").write_text(children if tid == pid else "")
    fields = " ".join(["S", *["0"] * 10, str(ticks), "0", *["0"] * 20])
    (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) {fields}\n")
    (proc / str(pid) / "status").write_text("Name:\tx\nVmHWM:\t    200 kB\nVmRSS:\t     100 kB\n")


class TestAccounting:
    def test_schedstat_begins_with_the_time_on_a_cpu(self):
        assert 123456789 == parse_schedstat("123456789 42 7\n")

    def test_stat_is_read_behind_a_name_with_brackets(self):
        fields = " ".join(["S", *["0"] * 10, "30", "12", *["0"] * 20])
        assert 42 == parse_stat(f"7 (odd) name)) {fields}")

    def test_status_gives_bytes(self):
        assert 2048 == parse_status("VmPeak:\t 9 kB\nVmRSS:\t       2 kB\n", "VmRSS")
        assert 0 == parse_status("Name:\tkernel thread\n", "VmRSS")

    def test_cpu_time_is_the_sum_over_threads_and_children(self, tmp_path):
        _process(tmp_path, 10, {10: 5 * _TICK_NS, 11: 3 * _TICK_NS}, ticks=8, children="20 ")
        _process(tmp_path, 20, {20: 2 * _TICK_NS}, ticks=2)
        assert 10 * _TICK_NS == CpuClock([10], tmp_path).read()

    def test_a_thread_that_has_ended_keeps_its_time(self, tmp_path):
        _process(tmp_path, 10, {10: 5 * _TICK_NS, 11: 3 * _TICK_NS}, ticks=8)
        clock = CpuClock([10], tmp_path)
        clock.read()
        for name in ("schedstat", "children"):
            (tmp_path / "10/task/11" / name).unlink()
        (tmp_path / "10/task/11").rmdir()
        assert 8 * _TICK_NS == clock.read()

    def test_threads_that_nobody_saw_are_found_in_the_total(self, tmp_path):
        _process(tmp_path, 10, {10: 5 * _TICK_NS}, ticks=50)
        assert 50 * _TICK_NS == CpuClock([10], tmp_path).read()

    def test_the_time_never_falls(self, tmp_path):
        """What was found in the total stays, although the rounded total is behind the threads a moment later."""
        _process(tmp_path, 10, {10: 5 * _TICK_NS}, ticks=8)
        clock = CpuClock([10], tmp_path)
        before = clock.read()
        _process(tmp_path, 10, {10: 6 * _TICK_NS}, ticks=8)
        assert before < clock.read()

    def test_rounding_of_the_total_is_no_unseen_thread(self, tmp_path):
        _process(tmp_path, 10, {10: 5 * _TICK_NS}, ticks=6)
        assert 5 * _TICK_NS == CpuClock([10], tmp_path).read()

    def test_a_process_that_has_ended_keeps_its_time(self, tmp_path):
        _process(tmp_path, 10, {10: 5 * _TICK_NS}, ticks=5)
        clock = CpuClock([10], tmp_path)
        clock.read()
        (tmp_path / "10").rename(tmp_path / "gone")
        assert 5 * _TICK_NS == clock.read()

    def test_memory_adds_up_the_tree(self, tmp_path):
        _process(tmp_path, 10, {10: 0}, ticks=0, children="20")
        _process(tmp_path, 20, {20: 0}, ticks=0)
        seen = memory([10], tmp_path)
        assert (200 * 1024, 400 * 1024) == (seen.resident, seen.peak)

    @pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the kernel has no /proc")
    def test_the_real_kernel_is_understood(self):
        assert os.getpid() in tree([os.getpid()])
        assert memory([os.getpid()]).resident > 0
        assert CpuClock([os.getpid()]).read() > 0


class TestPlace:
    def test_each_has_a_core_of_its_own(self):
        assert Cores((1,), (2,), (3,)) == place([3, 1, 0, 2])

    def test_too_few_cores_are_shared(self):
        assert Cores() == place([0, 1])


class TestAnswerReader:
    HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-request-id: f0\r\n\r\n"

    def test_tokens_are_counted_and_the_end_is_seen(self):
        reader = AnswerReader()
        assert 2 == reader.feed(self.HEAD + b'10\r\ndata: {"t":"a~"}\n\ndata: {"t":"b~"}\n\n\r\n')
        assert not reader.ended
        assert 0 == reader.feed(b"0\r\n\r\n")
        assert reader.ended

    def test_headers_that_end_in_a_zero_are_not_the_end(self):
        reader = AnswerReader()
        reader.feed(self.HEAD)
        assert not reader.ended

    def test_an_end_in_pieces_is_an_end(self):
        reader = AnswerReader()
        reader.feed(self.HEAD + b"3\r\na~\n\r\n")
        for piece in (b"0", b"\r\n", b"\r", b"\n"):
            assert not reader.ended
            reader.feed(piece)
        assert reader.ended

    @pytest.mark.parametrize(
        "pieces, seen",
        [
            (("Content-Length: 6\r\n\r\n", '"a~', '"\r\n'), [(0, False), (1, False), (0, True)]),
            (('content-length: 4\r\n\r\n"a~"',), [(1, True)]),
        ],
    )
    def test_a_length_says_where_a_body_ends(self, pieces, seen):
        reader = AnswerReader()
        reader.feed(b"HTTP/1.1 200 OK\r\n")
        assert seen == [(reader.feed(piece.encode()), reader.ended) for piece in pieces]

    def test_another_status_is_an_error(self):
        with pytest.raises(ValueError, match="503"):
            AnswerReader().feed(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")


@every_case("protocol", ["generate", "chat"])
def test_requests_have_the_length_they_say(protocol):
    target = Target(protocol=protocol, host="127.0.0.1", port=1)
    head, _, body = http_request(target, "m", 7).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert isinstance(msgspec.json.decode(body), dict)


@every_case("form, field, value", [("tools", "tools", 1), ("choices", "n", CHOICES)])
def test_forms_are_for_chats_only(form, field, value):
    """Triton itself gets the same request whatever the form."""
    bodies = {}
    for protocol in ("generate", "chat"):
        content = http_request(Target(protocol=protocol, host="127.0.0.1", port=1), "m", 7, form)
        bodies[protocol] = msgspec.json.decode(content.partition(b"\r\n\r\n")[2])
    found = bodies["chat"][field]

    assert value == (len(found) if isinstance(found, list) else found)
    assert field not in bodies["generate"]


def test_a_chat_that_is_not_streamed_says_so():
    content = http_request(Target(protocol="chat", host="127.0.0.1", port=1), "m", 1, "whole")
    assert msgspec.json.decode(content.partition(b"\r\n\r\n")[2])["stream"] is False


def test_every_parser_has_a_call():
    """A parser without a text of its own would be missing in the table."""
    assert TOOL_PARSERS.table.keys() <= parsers.CALLS.keys()


def test_parsers_are_measured(monkeypatch):
    """Each parser makes one call of its text, however long that is; what it takes is not for a test to say."""
    monkeypatch.setattr(parsers, "SIZES", (400, 4000))
    rows = list(measure_parsers(quick=False))

    assert list(TOOL_PARSERS.table) == [row.parser for row in rows]
    assert all((400, 4000) == tuple(row.characters) and min(row.ns_per_character) > 0 for row in rows)


def test_repository_has_a_paced_and_a_flooding_model(tmp_path):
    """Both have all tensors by which the service knows the kind of model."""
    for name in TICK_MS:
        config = (build_repository(tmp_path / name) / name / "config.pbtxt").read_text()
        assert f'name: "{name}"' in config
        assert "decoupled: true" in config
        assert all(tensor in config for tensor in ('"text_input"', '"sampling_parameters"', '"text_output"'))


def test_every_case_has_plans():
    planned = list(plans(CASES, [1, 128], 2.0, 1, quick=True))
    # These need no load.
    assert set(CASES) - {"parsers", "path", "chains", "footprint", "demo"} == {plan.case for plan in planned}
    assert [1, 128] == [plan.streams for plan in planned if plan.case == "paced"]
    assert {"tools": 128, "choices": 32} == {
        plan.case: plan.streams for plan in planned if plan.form in ("tools", "choices") and plan.case != "long"
    }
    sizes = [plan.tokens for plan in plans(["long"], [1], 2.0, 1, quick=False)]
    assert 15 < sizes[-1] / sizes[0] < 16


def test_a_tally_counts_inside_its_window_only():
    load = Load(target=Target(protocol="generate", host="127.0.0.1", port=1), model="m", streams=1, tokens=2, answers=1)

    async def run() -> Measured:
        tally = BenchTally(load)
        tally.tokens(5, None)
        measuring = asyncio.create_task(tally.measure())
        await asyncio.sleep(0)
        tally.first(0.25, of_stream=True)
        tally.tokens(1, None)
        tally.tokens(2, 0.02)
        assert not tally.answered(0.5)
        await measuring
        tally.tokens(5, None)
        return tally.measured

    outcome = asyncio.run(run())
    assert (3, 1, [0.25], [20_000, 0]) == (outcome.tokens, outcome.answers, outcome.first, outcome.gaps)


def _row(case: str, streams: int, subject: str, **values: float | str | list[float]) -> Row:
    fields = dict.fromkeys(name for name in Row.__struct_fields__ if not name.startswith("round_"))
    numbers = {"form": "text", "tokens_per_second": 100.0, "client_busy": 0.1, "stalls": 0, "tokens": 0}
    return msgspec.convert({**fields, **numbers, "case": case, "streams": streams, "subject": subject, **values}, Row)


#: What Python may do for one token or one request at most. Lower them whenever you can.
MOST = {
    TOKEN: {"modules": 6, "calls": 9, "coroutines": 0, "blocks": 20, "tasks": 0, "threads": 0},
    STREAMED: {"modules": 48, "calls": 269, "coroutines": 43, "blocks": 245, "tasks": 0, "threads": 0},
    WHOLE: {"modules": 48, "calls": 264, "coroutines": 38, "blocks": 225, "tasks": 0, "threads": 0},
    # A client whose trace is not recorded costs two calls of our own. Libraries make a few calls more where an answer
    # arrives in several pieces.
    TRACED: {"modules": 49, "calls": 285, "library": 157, "coroutines": 38, "tasks": 0, "threads": 0},
    UNSAMPLED: {"modules": 49, "calls": 266, "library": 165, "coroutines": 38, "tasks": 0, "threads": 0},
}


# It starts two services and a Triton. The arithmetic of what is measured is that of the other cases.
@pytest.mark.extended
def test_chains_are_measured():
    """Each way to ask for a turn after others costs something, and a conversation that is too long is answered."""
    found = measure_chains(turns=10, rounds=1)
    assert 10 == found.turns
    assert min(found.sent, found.chain, found.conversation, found.fitting, found.truncated) > 0


def test_the_path_of_a_token_and_of_a_request_stays_short():
    """Counts, not times: they are the same on every machine."""
    rows = measure_path()
    assert list(MOST) == [row.what for row in rows]
    for row in rows:
        counts = {name: getattr(row, name) for name in MOST[row.what]}
        if sys.version_info >= (3, 14):
            # It takes more blocks of its own, and not always as many.
            counts.pop("blocks", None)
        over = {name: count for name, count in counts.items() if count > MOST[row.what][name]}
        assert not over, f"{row.what}: {over}; our functions: {row.functions}"
        # What is counted is there.
        assert counts["calls"] == sum(row.functions.values())
        assert counts["modules"]


def test_samples_are_added_up_by_function():
    idle = "run (threading.py:9);_worker (concurrent/futures/thread.py:81)"
    stacks = f"main (a.py:1);work (b.py:2) 6\nmain (a.py:1);work (b.py:3) 2\nmain (a.py:9) 2\n{idle} 90\n"
    assert [("work (b.py)", 80.0, 80.0), ("main (a.py)", 20.0, 100.0)] == sampled(stacks)


class TestReport:
    ROWS = (
        _row("paced", 128, "nginx", cpu_us_per_token=20.0, round_cpu_us_per_token=[20.0, 20.0]),
        _row("paced", 128, "ours-http", cpu_us_per_token=50.0, round_cpu_us_per_token=[48.0, 52.0]),
        _row("paced", 128, "ours-grpc", cpu_us_per_token=80.0),
        _row("flood", 128, "triton-http", tokens_per_second=1000.0),
        _row("flood", 128, "ours-http", tokens_per_second=900.0, client_busy=0.95),
        _row("latency", 1, "triton-http", first_p50_ms=1.0),
        _row("latency", 1, "ours-http", first_p50_ms=1.5),
        _row("burst", 256, "ours-http", stalls=3),
        _row("tools", 128, "nginx", cpu_us_per_token=25.0),
        _row("tools", 128, "ours-http", cpu_us_per_token=60.0),
        _row("choices", 32, "ours-http", cpu_us_per_token=100.0),
        _row("messages", 128, "ours-http", cpu_us_per_token=60.0),
        _row("agents", 4, "ours-http", cpu_us_per_answer=6000.0, form="agent-responses"),
        _row("long", 1, "ours-http", tokens=100, cpu_us_per_token=40.0),
        _row("long", 1, "ours-http", tokens=1000, cpu_us_per_token=80.0),
        _row("traces", 128, "ours-http", round_cpu_us_per_token=[50.0]),
        _row("traces", 128, "ours-traced", round_cpu_us_per_token=[52.0]),
        _row("traces", 1, "ours-http", round_cpu_us_per_token=[400.0, 800.0, 400.0]),
        _row("traces", 1, "ours-traced", round_cpu_us_per_token=[500.0, 500.0, 500.0]),
        _row("short", 4, "floor", cpu_us_per_answer=100.0, form="text"),
        _row("short", 4, "floor-logged", cpu_us_per_answer=160.0, form="text"),
        _row("short", 4, "ours-http", cpu_us_per_answer=400.0, form="text"),
        _row("short", 4, "floor", cpu_us_per_answer=100.0, form="whole"),
        _row("short", 4, "ours-http", cpu_us_per_answer=300.0, form="whole"),
    )
    FOOTPRINT = Footprint(
        start_cpu=0.9,
        at_first=60 << 20,
        per_idle=20_480.0,
        streams=9_000,
        per_stream=40_960.0,
        total=(600 << 20) - 1_000 * 40_960,
    )
    CHAINS = Chains(turns=200, sent=4.0, chain=6.0, conversation=5.0, fitting=5.0, truncated=20.0)
    DEMO = Demo(first_token=0.2, speed=20.0, memory=800 << 20)
    PATHS = (
        PathRow(
            subject="ours-http",
            what=TOKEN,
            modules=6,
            calls=11,
            coroutines=0,
            library_calls={"aiohttp": 3},
            blocks=9,
            tasks=0,
            threads=0,
            functions={},
        ),
    )
    PARSERS = (
        ParserRow(parser="good", characters=(64_000, 1_000_000), ns_per_character=(100.0, 100.0)),
        ParserRow(parser="bad", characters=(64_000, 1_000_000), ns_per_character=(100.0, 1600.0)),
    )

    def test_aims_are_ratios_within_the_run(self):
        found = [(aim.value, aim.reached) for aim in report.aims(self.ROWS)]
        unmeasured = (None, None)
        assert [unmeasured, (2.5, False), unmeasured, (4.0, False), unmeasured] == found[:5]
        assert [(0.9, True), (0.5, True), unmeasured, (3.0, False)] == found[5:9]

    def test_forms_are_compared_with_text(self):
        """Calls with as many texts, answers of one request with as many of their own, long calls with short ones."""
        found = [
            (aim.value, aim.reached)
            for aim in report.aims(self.ROWS, self.PARSERS, self.PATHS, self.FOOTPRINT, self.DEMO, self.CHAINS)[9:]
        ]
        assert [
            (1.2, True),
            (None, None),
            (2.0, False),
            *[(None, None)] * 3,
            (1.2, True),
            (None, None),
            (6.0, False),
            (None, None),
            (2.0, False),
            (None, None),
            (1.04, True),
            (1.25, False),
            (4.0, False),
            (3.0, True),
            (2.5, True),
            (None, None),
            (6, True),
            (11, False),
            (0, True),
            (1.5, False),
            (1.25, True),
            (4.0, True),
            (0.9, True),
            (600.0, False),
            (16.0, False),
            (200.0, True),
            (20.0, False),
            (800.0, True),
        ] == found

    def test_parsers_have_a_table(self):
        text = report.render([], self.PARSERS)
        assert "ns/char, 1000 kB" in text
        assert "bad" in text.partition("aims")[0]
        assert "100.0, 1,600.0 ns" in report.parser_line(self.PARSERS[1])

    def test_counts_have_a_table(self):
        text = report.render([], paths=self.PATHS)
        assert "ours-http  token of a stream        6     11" in text
        assert "11 calls of our own in 6 modules" in report.path_line(self.PATHS[0])

    def test_memory_is_told_for_as_many_streams_as_were_open(self):
        assert "200, from a response" in report.render([], chains=self.CHAINS)
        text = report.render([], footprint=self.FOOTPRINT)
        (line,) = [line for line in text.splitlines() if "9,000" in line and "aim" not in line]
        assert ["0.90", "60.00", "20.48", "9,000.00", "40.96", "560.94"] == line.split()

    def test_forms_of_short_chats_have_a_line_each(self):
        assert "ours-http, whole" in report.render(self.ROWS)

    def test_answers_of_one_request_are_as_many_streams_for_nginx(self):
        line = next(line for line in report.render(self.ROWS).splitlines() if "     32  ours-http" in line)
        assert "5.00" in line

    def test_a_run_without_rows_reaches_and_misses_nothing(self):
        assert {None} == {aim.reached for aim in report.aims([])}

    def test_table_has_each_row_and_the_ratio(self):
        text = report.render(self.ROWS)
        line = next(line for line in text.splitlines() if "ours-http" in line)
        assert "2.50" in line
        assert "2.50 (aim <= 1.5); by round 2.40, 2.60" in text
        assert "MISSED" in text
        assert "reached" in text

    def test_a_load_generator_at_its_limit_is_named(self):
        assert "note: flood, 128 streams, ours-http" in report.render(self.ROWS)

    def test_no_ratio_where_nginx_was_left_out(self):
        assert "x nginx" not in report.render([row for row in self.ROWS if row.subject != "nginx"]).partition("aims")[0]


def test_load_generator_measures_a_server():
    """The real load generator, as a process, against a server that answers at once."""
    answer = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n"a~"\n\r\n5\r\n"b~"\n\r\n0\r\n\r\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}")
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> Measured:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            load = Load(
                target=Target(protocol="chat", host="127.0.0.1", port=server.sockets[0].getsockname()[1]),
                model="m",
                streams=2,
                tokens=2,
                answers=6,
                relay=(os.getpid(),),
            )
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.client", stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
            )
            try:
                said, _ = await asyncio.wait_for(client.communicate(msgspec.json.encode(load)), 120)
            finally:
                if client.returncode is None:
                    client.kill()
        return msgspec.json.decode(said, type=Measured)

    outcome = asyncio.run(run())
    assert [] == outcome.errors
    assert 6 == outcome.answers
    assert 12 == outcome.tokens
    assert 6 <= len(outcome.first)
