"""Reading what ``/metrics`` answers, by the rules of the format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.proxy_fixture import Proxy

_COUNTER = re.compile(r"^(# TYPE \S+(?<!_total)) counter$", re.MULTILINE)


class Scrape:
    """One exposition; making it fails where the text is none, or has a metric twice."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: Mapping[str, Metric] = {}
        # The library's reader would put "_total" behind the names of Triton's counters.
        families = list(text_string_to_metric_families(_COUNTER.sub(r"\1 untyped", text)))
        types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
        assert len(types) == len(set(types)), "a metric stands in it twice"
        self.families = {family.name: family for family in families}
        samples = [(sample.name, *sorted(sample.labels.items())) for sample in self.samples()]
        assert len(samples) == len(set(samples)), "a series stands in it twice"

    def samples(self) -> Iterator[Sample]:
        """Yield every sample."""
        for family in self.families.values():
            yield from family.samples

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all samples called *name* that have these *labels*; 0 without any."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def names(self) -> set[str]:
        """Return the names of all samples."""
        return {sample.name for sample in self.samples()}

    def label_names(self, name: str) -> set[str]:
        """Return the labels that samples called *name* have."""
        return {label for sample in self.samples() if sample.name == name for label in sample.labels}


async def scrape(proxy: Proxy) -> Scrape:
    """Ask for the metrics."""
    answer = await proxy.get("/metrics")
    assert 200 == answer.status
    return Scrape(answer.body.decode())
