"""The report: a table for people, the aims with their marks, and everything as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.cases import AGENTS, COMPARED, FLOORS, Row
from bench.chains import TURNS, Chains
from bench.demo import Demo
from bench.figures import ratio, table, written
from bench.footprint import STREAMS, Footprint
from bench.messages import CHOICES
from bench.parsers import KB, ParserRow
from bench.path import TOKEN, PathRow

_PROTOCOLS = {"ours-http": "HTTP", "ours-grpc": "gRPC"}
# A cost that grows with the length gives 1, and one that grows with its square the ratio of the lengths, about 16.
_LINEAR = 1.5
# As much as two measurements of one thing differ.
_SAME = 1.1
_TRACED = 1.15
_MIB = 1024 * 1024
# Times a handler that does nothing.
_SHORT = 3.0
# A turn that goes on from what is kept, beside one that the client sends all of.
_CHAIN = 1.3
# The tokens of the whole, of its messages, and of what fits twice.
_TRUNCATED = 5.0
_KEPT = {
    "sent": "the client sends all of", "chain": "from a response", "conversation": "in a conversation",
    "fitting": "fits", "truncated": "of which the beginning is left out",
}  # fmt: skip
# Of CPU time, for a request of an agent.
_AGENT_MS = 5.0
# Above this share of its core the load generator may be what limits the numbers.
_CLIENT_LIMIT = 0.9

# Title, digits and where the value is; a column without any value in a case is left out there.
_COLUMNS: tuple[tuple[str, int, str], ...] = (
    ("tokens", 0, "tokens"),
    ("tokens/s", 0, "tokens_per_second"),
    ("first ms p50", 2, "first_p50_ms"),
    ("p99", 1, "first_p99_ms"),
    ("max", 1, "first_max_ms"),
    (">= 1 s", 0, "stalls"),
    ("gap ms p50", 2, "gap_p50_ms"),
    ("p99", 1, "gap_p99_ms"),
    ("CPU us/token", 1, "cpu_us_per_token"),
    ("CPU us/answer", 0, "cpu_us_per_answer"),
    ("cores", 2, "relay_busy"),
    ("RSS MiB", 0, "resident_mib"),
    ("peak", 0, "peak_mib"),
    ("Triton us/token", 0, "triton_us_per_token"),
    ("client cores", 2, "client_busy"),
)
_GAPS = {"gap_p50_ms", "gap_p99_ms"}
_OF_ANSWERS = {"tokens", "first_max_ms", "stalls", "cpu_us_per_answer"}
_OF_TOKENS = {"tokens", "tokens_per_second", "cpu_us_per_token", "triton_us_per_token", *_GAPS}
# Where an answer is a token or four, only whole answers are of interest; where streams go on, the first max is not.
_NOT_SHOWN = {
    **dict.fromkeys(("paced", "flood", "crowd", "tools", "choices", "responses", "messages"), _OF_ANSWERS),
    "long": {"first_p50_ms", "first_p99_ms", "first_max_ms", "stalls", *_GAPS},
    "latency": {"stalls", *_OF_TOKENS},
    "short": {"stalls", *_OF_TOKENS},
    "agents": {"stalls", *_OF_TOKENS},
    "burst": _OF_TOKENS,
    "traces": {"tokens", "first_max_ms", "stalls"},
}


@dataclass(frozen=True)
class Aim:
    """Something to reach, and where this run stands; *value* is None where the run does not tell."""

    text: str
    limit: float
    value: float | None
    at_most: bool = True
    rounds: tuple[float, ...] = ()
    """The value of each round, where it has one."""

    @property
    def reached(self) -> bool | None:
        """Whether it is reached."""
        if self.value is None:
            return None
        if self.at_most:
            return self.value <= self.limit
        return self.value >= self.limit


def find(rows: Sequence[Row], case: str, streams: int, subject: str) -> Row | None:
    """Return a row, if it was measured."""
    return next((row for row in rows if (row.case, row.streams, row.subject) == (case, streams, subject)), None)


def aims(
    rows: Sequence[Row],
    parsers: Sequence[ParserRow] = (),
    paths: Sequence[PathRow] = (),
    footprint: Footprint | None = None,
    demo: Demo | None = None,
    chains: Chains | None = None,
) -> list[Aim]:
    """Return the project's aims with what these rows say about them."""

    def cpu(subject: str, streams: int, limit: float) -> Aim:
        ours = find(rows, "paced", streams, subject)
        nginx = find(rows, "paced", streams, "nginx")
        text = f"{_PROTOCOLS[subject]}, {streams} paced streams: CPU per token / nginx's"
        if ours is None or nginx is None:
            return Aim(text, limit, None)
        value = ratio(ours.cpu_us_per_token, nginx.cpu_us_per_token)
        return Aim(text, limit, value, rounds=_ratios(ours.round_cpu_us_per_token, nginx.round_cpu_us_per_token))

    def flood() -> Aim:
        ours = find(rows, "flood", 128, "ours-http")
        direct = find(rows, "flood", 128, "triton-http")
        text = "HTTP, 128 streams flooding: tokens/s / direct HTTP's"
        if ours is None or direct is None:
            return Aim(text, 0.85, None, at_most=False)
        value = ratio(ours.tokens_per_second, direct.tokens_per_second)
        rounds = _ratios(ours.round_tokens_per_second, direct.round_tokens_per_second)
        return Aim(text, 0.85, value, at_most=False, rounds=rounds)

    def first(subject: str) -> float | None:
        row = find(rows, "latency", 1, subject)
        if row:
            return row.first_p50_ms
        return None

    def added(subject: str, direct: str) -> float | None:
        with_us = first(subject)
        without = first(direct)
        if with_us is None or without is None:
            return None
        return with_us - without

    stalls = [row.stalls for row in rows if row.case == "burst" and row.subject.startswith("ours")]
    return [
        cpu("ours-http", 32, 1.7),
        *(cpu("ours-http", streams, 1.5) for streams in (128, 256)),
        *(cpu("ours-grpc", streams, 2.0) for streams in (128, 256)),
        flood(),
        Aim("HTTP, 1 stream: added time to first token, p50, ms", 1.0, added("ours-http", "triton-http")),
        Aim("gRPC, 1 stream: added time to first token, p50, ms", 1.0, added("ours-grpc", "triton-grpc")),
        Aim("256 clients at once: first tokens after a second or more", 0.0, float(sum(stalls)) if stalls else None),
        *(_beside_text(rows, "tools", COMPARED, subject, 1.5) for subject in ("ours-http", "ours-grpc")),
        *(_beside_text(rows, "choices", COMPARED // CHOICES, subject, 1.1) for subject in ("ours-http", "ours-grpc")),
        *(
            _beside_text(rows, api, COMPARED, subject, 1.3)
            for api in ("responses", "messages")
            for subject in ("ours-http", "ours-grpc")
        ),
        *(_agent(rows, form) for form in AGENTS),
        *(_growth(rows, subject) for subject in ("ours-http", "ours-grpc")),
        _traced(rows, COMPARED, f"{COMPARED} paced streams: CPU per token", _SAME),
        _traced(rows, 1, "chat of one token: CPU", _TRACED),
        *(_short(rows, form, floor) for floor in FLOORS for form in ("text", "whole")),
        *_counted(paths),
        *_kept(chains),
        Aim("Start until it answers: CPU in s", 1.0, None if footprint is None else footprint.start_cpu),
        Aim("10,000 paced streams: MiB in all", 500.0, None if footprint is None else _of_ten_thousand(footprint)),
        Aim(
            "Tool parsers: CPU per character of the longest call / of the shortest, the worst of all",
            _LINEAR,
            max((parser.growth for parser in parsers), default=None),
        ),
        Aim(
            "Demo: time to the first token of a warm short chat, ms",
            500.0,
            None if demo is None else demo.first_token * 1000,
        ),
        Aim("Demo: tokens/s of one stream", 25.0, None if demo is None else demo.speed, at_most=False),
        Aim("Demo: MiB of all its processes", 1536.0, None if demo is None else demo.memory / _MIB),
    ]


def _beside_text(rows: Sequence[Row], case: str, streams: int, subject: str, limit: float) -> Aim:
    """Return what a token costs in *case*, beside what it costs as the text of as many single answers."""
    what = {"tools": "tool calls", "choices": f"n={CHOICES}", "responses": "Responses", "messages": "Messages"}[case]
    text = f"{_PROTOCOLS[subject]}, {what}, {COMPARED} answers at a time: CPU per token / that of single texts"
    row = find(rows, case, streams, subject)
    plain = find(rows, "paced", COMPARED, subject)
    if row is None or plain is None:
        return Aim(text, limit, None)
    rounds = _ratios(row.round_cpu_us_per_token, plain.round_cpu_us_per_token)
    return Aim(text, limit, ratio(row.cpu_us_per_token, plain.cpu_us_per_token), rounds=rounds)


def _agent(rows: Sequence[Row], form: str) -> Aim:
    """Return what an agent's request takes, with an answer of one token."""
    text = f"HTTP, {form}: 150 kB of instructions and 40 tools: CPU in ms"
    row_of_form = next((row for row in rows if (row.form, row.subject) == (form, "ours-http")), None)
    if row_of_form is None:
        micros = None
    else:
        micros = row_of_form.cpu_us_per_answer
    return Aim(text, _AGENT_MS, None if micros is None else micros / 1000)


def _traced(rows: Sequence[Row], streams: int, what: str, limit: float) -> Aim:
    """Return what is added by traces, as the median of rounds: they are in turns, and one may be noisy."""
    text = f"HTTP with traces, {what} / without, the median of rounds"
    traced, plain = (find(rows, "traces", streams, subject) for subject in ("ours-traced", "ours-http"))
    if traced is None or plain is None:
        return Aim(text, limit, None)
    rounds = _ratios(traced.round_cpu_us_per_token, plain.round_cpu_us_per_token)
    return Aim(text, limit, median(rounds) if rounds else None, rounds=rounds)


def _short(rows: Sequence[Row], form: str, floor: str) -> Aim:
    """Return what a chat of one token costs, beside an aiohttp handler that does nothing."""
    text = f"HTTP, {'whole' if form == 'whole' else 'streamed'} chat of one token: CPU / that of {floor}"
    costs = {row.subject: row.cpu_us_per_answer for row in rows if (row.case, row.form) == ("short", form)}
    return Aim(text, _SHORT, ratio(costs.get("ours-http"), costs.get(floor)))


def _counted(paths: Sequence[PathRow]) -> Iterator[Aim]:
    row = next((row for row in paths if (row.subject, row.what) == ("ours-http", TOKEN)), None)
    for what, limit in (("modules", 6), ("calls", 10), ("coroutines", 0)):
        yield Aim(f"HTTP, a token of a stream: our own {what}", limit, None if row is None else getattr(row, what))


def _kept(chains: Chains | None) -> Iterator[Aim]:
    for what, limit in (("chain", _CHAIN), ("conversation", _CHAIN), ("truncated", _TRUNCATED)):
        if what == "truncated":
            base = "fitting"
        else:
            base = "sent"
        if chains is None:
            value = None
        else:
            value = ratio(getattr(chains, what), getattr(chains, base))
        yield Aim(f"A turn after {TURNS}, {_KEPT[what]}: CPU / one that {_KEPT[base]}", limit, value)


def _growth(rows: Sequence[Row], subject: str) -> Aim:
    """Return how the price of a token of tool arguments grows with their length."""
    text = f"{_PROTOCOLS[subject]}, tool arguments: CPU per token of the longest call / of the shortest"
    calls = sorted((row for row in rows if (row.case, row.subject) == ("long", subject)), key=lambda row: row.tokens)
    if len(calls) < 2:
        return Aim(text, _LINEAR, None)
    short = calls[0]
    long = calls[-1]
    rounds = _ratios(long.round_cpu_us_per_token, short.round_cpu_us_per_token)
    return Aim(text, _LINEAR, ratio(long.cpu_us_per_token, short.cpu_us_per_token), rounds=rounds)


def render(
    rows: Sequence[Row],
    parsers: Sequence[ParserRow] = (),
    paths: Sequence[PathRow] = (),
    footprint: Footprint | None = None,
    demo: Demo | None = None,
    chains: Chains | None = None,
) -> str:
    """Return the table of each case, with the aims below."""
    cases = dict.fromkeys(row.case for row in rows)
    parts = [f"{case}\n{_case_table([row for row in rows if row.case == case], rows)}" for case in cases]
    if paths:
        parts.append(f"path\n{_path_table(paths)}")
    if chains is not None:
        parts.append(f"chains\n{_chains_table(chains)}")
    if footprint is not None:
        parts.append(f"footprint\n{_footprint_table(footprint)}")
    if parsers:
        parts.append(f"parsers\n{_parser_table(parsers)}")
    all_aims = aims(rows, parsers, paths, footprint, demo, chains)
    return "\n\n".join([*parts, "aims\n" + "\n".join(_aim_lines(all_aims)), *_warnings(rows)])


def parser_line(row: ParserRow) -> str:
    """Return a parser's row in one sentence, for the progress."""
    costs = ", ".join(written(cost) for cost in row.ns_per_character)
    return f"parsers {row.parser:<15} {costs} ns per character"


def _parser_table(parsers: Sequence[ParserRow]) -> str:
    header = ["parser", *(f"ns/char, {size // KB} kB" for size in parsers[0].characters), "longest / shortest"]
    cells = [[row.parser, *map(written, row.ns_per_character), written(row.growth, 2)] for row in parsers]
    return table(header, cells)


def path_line(row: PathRow) -> str:
    """Return what was counted in one sentence, for the progress."""
    return f"path {row.subject:<11} {row.what}: {row.calls} calls of our own in {row.modules} modules"


def _chains_table(chains: Chains) -> str:
    cells = [[f"{chains.turns}, {text}", written(getattr(chains, name), 2)] for name, text in _KEPT.items()]
    return table(["a turn after", "CPU ms"], cells)


def _footprint_table(footprint: Footprint) -> str:
    header = ["start, CPU s", "MiB", "kB/idle connection", "streams", "kB/stream", "MiB in all"]
    numbers = (
        footprint.start_cpu,
        footprint.at_first / _MIB,
        footprint.per_idle / KB,
        footprint.streams,
        footprint.per_stream / KB,
        footprint.total / _MIB,
    )
    return table(header, [[written(number, 2) for number in numbers]], texts=0)


def _of_ten_thousand(footprint: Footprint) -> float:
    """Return the memory of so many streams; the machine may have let fewer be open."""
    return (footprint.total + (STREAMS - footprint.streams) * footprint.per_stream) / _MIB


def _path_table(paths: Sequence[PathRow]) -> str:
    header = ["subject", "of a", "modules", "calls", "coroutines", "library calls", "blocks", "tasks", "threads"]
    cells = [
        [row.subject, row.what]
        + [str(count) for count in (row.modules, row.calls, row.coroutines, sum(row.library_calls.values()))]
        + [str(count) for count in (row.blocks, row.tasks, row.threads)]
        for row in paths
    ]
    return table(header, cells, texts=2)


def line(row: Row, rows: Sequence[Row]) -> str:
    """Return a row in one sentence, for the progress."""
    line = f"{row.case} {row.streams:>3} {_name(row):<11} {row.tokens_per_second:>9,.0f} tokens/s"
    if row.cpu_us_per_answer is not None:
        line += f"  {row.cpu_us_per_answer:6.0f} us CPU per answer"
    elif row.cpu_us_per_token is not None:
        line += f"  {row.cpu_us_per_token:6.1f} us CPU per token"
    if (times := ratio(row.cpu_us_per_token, _nginx(row, rows))) is not None:
        line += f"  {times:.2f} x nginx"
    return line


def _case_table(rows: Sequence[Row], everything: Sequence[Row]) -> str:
    hidden = _NOT_SHOWN[rows[0].case]
    columns = [
        (title, [written(getattr(row, name), digits) for row in rows])
        for title, digits, name in _COLUMNS
        if name not in hidden and any(getattr(row, name) is not None for row in rows)
    ]
    times = [written(ratio(row.cpu_us_per_token, _nginx(row, everything)), 2) for row in rows]
    if any(cell != "-" for cell in times):
        column = next((index for index, (title, _) in enumerate(columns) if title == "cores"), len(columns))
        columns.insert(column, ("x nginx", times))
    header = ["streams", "subject", *(title for title, _ in columns)]
    names = [[str(row.streams).rjust(len("streams")), _name(row)] for row in rows]
    return table(header, [[*name, *(cells[i] for _, cells in columns)] for i, name in enumerate(names)], texts=2)


def _name(row: Row) -> str:
    if row.case in ("short", "agents") and row.form != "text":
        return f"{row.subject}, {row.form}"
    return row.subject


def _nginx(row: Row, rows: Sequence[Row]) -> float | None:
    # Answers of one request are as many streams for nginx.
    if row.case == "choices":
        case = "paced"
        streams = row.streams * CHOICES
    else:
        case = row.case
        streams = row.streams
    nginx = find(rows, case, streams, "nginx")
    if nginx is None:
        return None
    return nginx.cpu_us_per_token


def _aim_lines(all_aims: Sequence[Aim]) -> Iterator[str]:
    marks = {True: "reached", False: "MISSED", None: "not measured"}
    for aim in all_aims:
        if aim.at_most:
            sign = "<="
        else:
            sign = ">="
        line = f"  {marks[aim.reached]:<12}  {aim.text}: {written(aim.value, 2)} (aim {sign} {aim.limit:g})"
        if len(aim.rounds) > 1:
            line += "; by round " + ", ".join(written(value, 2) for value in aim.rounds)
        yield line


def _ratios(values: Sequence[float | None], bases: Sequence[float | None]) -> tuple[float, ...]:
    ratios = (ratio(value, base) for value, base in zip(values, bases, strict=False))
    return tuple(value_ratio for value_ratio in ratios if value_ratio is not None)


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.client_busy > _CLIENT_LIMIT:
            where = f"{row.case}, {row.streams} streams, {row.subject}"
            yield f"note: {where}: the load generator was at its limit; the server could do more."
