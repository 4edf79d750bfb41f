"""Samples as families of `prometheus_client`, and their text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from holdfast.tools.metrics.families import FAMILIES, BucketCounts, MetricFamily, MetricSample


class Gathered(Collector):
    """A collector whose samples a function returns; it must return at once."""

    def __init__(self, samples: Callable[[], Iterable[MetricSample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have samples, in the order of their table."""
        found: dict[str, list[MetricSample]] = {}
        for sample in self._samples():
            found.setdefault(sample.name, []).append(sample)
        for name, family in FAMILIES.items():
            if samples := found.get(name):
                yield _metric(family, samples)


def registry(samples: Callable[[], Iterable[MetricSample]]) -> CollectorRegistry:
    """Return a registry of its own, without the metrics of this process."""
    made = CollectorRegistry(auto_describe=False)
    made.register(Gathered(samples))
    return made


def exposition(samples: Iterable[MetricSample]) -> str:
    """Return samples as Prometheus' text."""
    return generate_latest(registry(lambda: samples)).decode()


def _metric(family: MetricFamily, samples: list[MetricSample]) -> Metric:
    labels = list(family.labels)
    if family.kind == "histogram":
        return _histogram(family, samples)
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(family.name, family.about, labels=labels)
    for _, values, value in samples:
        assert not isinstance(value, BucketCounts)
        metric.add_metric(list(values), value)
    return metric


def _histogram(family: MetricFamily, samples: list[MetricSample]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.about, labels=list(family.labels))
    limits = [*(f"{bound:g}" for bound in family.bounds), "+Inf"]
    for _, values, spread in samples:
        assert isinstance(spread, BucketCounts)
        buckets = list(zip(limits, map(float, accumulate(spread.counts)), strict=True))
        metric.add_metric(list(values), buckets=buckets, sum_value=spread.total)
    return metric
