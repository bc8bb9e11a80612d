"""What the dashboard and the alerts ask for is what the service exports, names and labels."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import promql_parser
import pytest
import yaml
from aiohttp import FormData

from tests.conformance.calls import ask, steered
from tests.programs import found
from tests.proxy_fixture import Proxy, changed, proxy_settings, serving
from tests.scrape import Scrape, scrape
from tests.triton_fixture import TestTriton
from triton_openai.api.routes import RECORDED
from triton_openai.telemetry.gauges import SCRAPED
from triton_openai.telemetry.instruments import INSTRUMENTS, OTHER
from triton_openai.telemetry.metrics import Outcome

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/grafana/triton-openai.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
SCALING = ROOT / "deploy/kubernetes"
# Labels that Prometheus itself adds when it scrapes, and Kubernetes's service discovery.
TARGET = {"instance", "job", "namespace", "pod"}
# What Triton exports only where there is a GPU, or an engine of TensorRT-LLM.
FROM_A_GPU = {
    "nv_gpu_utilization": {"gpu_uuid"},
    "nv_gpu_memory_used_bytes": {"gpu_uuid"},
    "nv_trt_llm_kv_cache_block_metrics": {"model", "version", "kv_cache_block_type"},
}
# What a service without keys, in front of one Triton, does not export.
OF_SEVERAL = {
    one.name: set(one.labels)
    for one in INSTRUMENTS
    if one.labels and one.name.startswith(("triton_openai_endpoint", "triton_openai_failovers", "triton_openai_key_"))
}
# What labels can say, where that is a list: a word that none of them says would match nothing, and alert nobody.
VALUES = {
    "outcome": set(get_args(Outcome)),
    "operation": {OTHER, *RECORDED},
    "type": {"input", "output"},
    "state": {"ready", "not_ready", "unloaded"},
}
# What Grafana puts in.
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*", "$namespace": ".*"}
# Grafana's names of units, of what the panels show.
UNITS = {"s": "seconds", "bytes": "bytes", "percentunit": "ratio", "reqps": "requests_total"}


def panels() -> list[Any]:
    """Return the dashboard's panels."""
    found: list[Any] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def rules() -> list[Any]:
    """Return the rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every expression, with the name of what it is for."""
    for panel in panels():
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            assert "$" not in text, panel["title"]
            yield panel["title"], text
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    (rule,) = yaml.safe_load((SCALING / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    filled = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="a",pod="b"')
    yield "prometheus-adapter", filled
    (trigger,) = yaml.safe_load((SCALING / "keda.yaml").read_text())["spec"]["triggers"]
    yield "KEDA", trigger["metadata"]["query"]


EXPRESSIONS = list(expressions())


def selectors(expression: str) -> list[Any]:
    """Return what *expression* selects."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return list({str(one): one for one in found}.values())


def grouped_by(expression: str) -> set[str]:
    """Return the labels by which *expression* groups and joins."""
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


@pytest.fixture(scope="module")
def exported(triton: TestTriton, tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    """Return what a service exports after some traffic."""
    return asyncio.run(after_traffic(triton, tmp_path_factory.mktemp("files")))


async def after_traffic(triton: TestTriton, folder: Path) -> Scrape:
    """Run a service, ask it something, and return its metrics."""
    settings = changed(
        proxy_settings(triton, "http"),
        metrics={"relay_triton": True, "triton_url": triton.metrics_url},
        files={"store": f"dir:{folder / 'files'}"},
        batches={"store": f"sqlite:{folder / 'batches.sqlite'}"},
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        await ask(proxy, "chat", "ensemble", steered(text="one two three"))
        await ask(proxy, "chat", "vllm_model", steered(text="one two three"), stream=True)
        await ask(proxy, "chat", "ensemble", "x", n=0)
        # It is refused: clients may not manage models.
        await proxy.post("/v1/models/ensemble/load", {})
        await ask(proxy, "chat", "ensemble", "x", no_such_field=1)
        await proxy.post("/v1/audio/speech", {"model": "file_tts", "input": "Hello."})
        await run_batch(proxy)
        return await scrape(proxy)


async def run_batch(proxy: Proxy) -> None:
    """Run a batch of one line."""
    body = {"model": "vllm_model", "prompt": steered(text="one")}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    form = FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line).encode(), filename="input.jsonl")
    async with proxy.client.post("/v1/files", data=form) as response:
        file = (await response.json())["id"]
    made = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await proxy.post("/v1/batches", made)).json
    while batch["completed_at"] is None:
        await asyncio.sleep(0.02)
        batch = (await proxy.get(f"/v1/batches/{batch['id']}")).json


@pytest.mark.parametrize("title, expression", EXPRESSIONS, ids=[title for title, _ in EXPRESSIONS])
def test_expressions(exported: Scrape, title: str, expression: str) -> None:
    """Each metric exists, and has the labels that it is asked by."""
    asked = selectors(expression)
    assert asked
    known: set[str] = set(TARGET)
    for one in asked:
        absent = FROM_A_GPU | OF_SEVERAL
        labels = absent.get(one.name, exported.label_names(one.name))
        assert one.name in absent or one.name in exported.names(), one.name
        assert {matcher.name for matcher in one.matchers.matchers} <= labels | TARGET, str(one)
        for matcher in one.matchers.matchers:
            if matcher.name in VALUES:
                assert set(matcher.value.split("|")) <= VALUES[matcher.name], str(one)
        known |= labels
    assert grouped_by(expression) <= known


def test_variables(exported: Scrape) -> None:
    """The dashboard's variables and legends name labels that metrics have and expressions leave."""
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            (metric,) = selectors(selector.replace("$namespace", ".*"))
            assert label in exported.label_names(metric.name) | TARGET
            assert ("namespace" == label) != ('namespace=~"$namespace"' in selector)
            assert variable["query"]["query"] == variable["definition"]
    for panel in panels():
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groups = grouped_by(target["expr"].replace("$__rate_interval", "5m"))
            assert shown <= (groups or TARGET | {"gpu_uuid"}), panel["title"]


def test_what_is_chosen_counts_everywhere() -> None:
    """Every panel follows the namespace and the replicas; quantiles are made of all replicas' buckets together."""
    for panel in panels():
        for target in panel.get("targets", ()):
            for one in selectors(target["expr"].replace("$__rate_interval", "5m")):
                chosen = {matcher.name: matcher.value for matcher in one.matchers.matchers}
                assert ("$namespace", "$instance") == (chosen["namespace"], chosen["instance"]), panel["title"]
            if "histogram_quantile" in target["expr"]:
                assert "le" in grouped_by(target["expr"].replace("$__rate_interval", "5m"))


def test_the_sample_in_the_documents() -> None:
    """The queries of the documents' sample are the dashboard's, but for what is chosen there."""
    asked = {(panel["title"], unchosen(target["expr"])) for panel in panels() for target in panel.get("targets", ())}
    document = (ROOT / "docs/guides/observability.md").read_text()
    sample = document.partition("<!-- sample: dashboard -->")[2].partition("<!-- end of sample -->")[0]
    shown = re.findall(r"^\| (.+?) \| `(.+?)` \| ", sample, re.MULTILINE)

    assert len(shown) > 5
    assert set(shown) <= asked


def unchosen(expression: str) -> str:
    """Return *expression* without the matchers of the dashboard's variables."""
    return re.sub(r',?\w+=~"\$\w+"', "", expression).replace("{,", "{").replace("{}", "")


def test_units() -> None:
    """Seconds are shown as seconds, and bytes as bytes."""
    for panel in panels():
        if panel["type"] not in ("timeseries", "stat"):
            continue
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or unit == "short" or unit.startswith("suffix: "), panel["title"]
        for target in panel["targets"]:
            for kind in ("s", "bytes"):
                if UNITS[kind] in target["expr"] and " / " not in target["expr"]:
                    assert kind == unit, panel["title"]


@pytest.mark.extended
def test_alerts_say_what_they_should() -> None:
    """Prometheus's own tool runs the rules over numbers, where it is installed."""
    cases = yaml.safe_load((ALERTS.parent / "alerts_test.yaml").read_text())["tests"]
    known = {rule.get("alert") for rule in rules()}
    assert {case["alertname"] for test in cases for case in test["alert_rule_test"]} <= known
    tool = found("promtool")
    done = subprocess.run(
        [tool, "test", "rules", "alerts_test.yaml"], cwd=ALERTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table(exported: Scrape) -> None:
    """The documents' table has every metric that is exported, and each with its labels."""
    suffix = {"counter": "", "gauge": "", "histogram": "_count"}
    table = {one.name + suffix[one.kind]: set(one.labels) for one in (*INSTRUMENTS, *SCRAPED)}

    assert table == {name: OF_SEVERAL.get(name, exported.label_names(name)) for name in table}
    histograms = {one.name + end for one in INSTRUMENTS if one.kind == "histogram" for end in ("_bucket", "_sum")}
    others = {name for name in exported.names() if not name.startswith(("nv_", "process_"))}
    assert others | OF_SEVERAL.keys() == table.keys() | histograms


def test_the_dashboard_is_in_order() -> None:
    """No panel stands on another, and none is nameless or twice there."""
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + column, place["y"] + row) for column in range(place["w"]) for row in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len({panel["title"] for panel in panels()}) == len(panels())


def test_alerts() -> None:
    """Each has a name of its own, a severity, a text, and its place in the documents."""
    alerts = [rule for rule in rules() if "alert" in rule]
    document = (ROOT / "docs/guides/observability.md").read_text()

    assert len(alerts) == len({rule["alert"] for rule in alerts})
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description", "runbook_url"} == rule["annotations"].keys()
        assert f'<a id="{rule["alert"].lower()}"></a>`{rule["alert"]}`' in document
        assert f"docs/guides/observability.md#{rule['alert'].lower()}" == rule["annotations"]["runbook_url"]
