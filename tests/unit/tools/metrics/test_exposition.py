"""The text for Prometheus: what its own client and its own checker read there."""

from __future__ import annotations

import re
from typing import Final

import pytest
from node_answers import ANSWERING, SILENT, STORED
from prometheus_client.parser import text_string_to_metric_families
from promtool import checked
from synthetic_run import hurt_job

from holdfast.tools.metrics.exposition import exposition
from holdfast.tools.metrics.families import FAMILIES, PREFIX, BucketCounts, MetricSample, series
from holdfast.tools.metrics.status_samples import status_samples
from holdfast.tools.metrics.tally import EventTally
from holdfast.tools.show.node_status import NodeStatus

UNITS: Final = ("seconds", "bytes", "ratio")
FEW: Final = {
    *("node", "stage", "purpose", "reason", "cause", "what", "role", "tier", "result"),
    *("action", "how", "use"),
}


def parsed(text: str) -> dict[str, float]:
    """Return ``name{labels}`` and value, as prometheus_client reads them."""
    return {
        f"{s.name}{{{','.join(f'{k}={v}' for k, v in sorted(s.labels.items()))}}}": s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_the_answers_of_sidecars_are_gauges_and_counters_by_node() -> None:
    samples = parsed(exposition(status_samples([ANSWERING, SILENT])))
    assert {
        "holdfast_up{node=n0}": 1,
        "holdfast_up{node=n1}": 0,
        "holdfast_protected_step{node=n0}": 40,
        "holdfast_durable_step{node=n0}": 30,
        "holdfast_protected_age_seconds{node=n0}": 0.25,
        "holdfast_stage_seconds_total{node=n0,stage=seal}": 2,
        "holdfast_stage_bytes_total{node=n0,stage=protect}": 1 << 30,
        "holdfast_memory_bytes{node=n0,purpose=parity}": 1 << 20,
        "holdfast_memory_budget_bytes{node=n0}": 8 << 20,
        "holdfast_queue_length{node=n0,purpose=fragments}": 3,
        "holdfast_queue_oldest_seconds{node=n0,purpose=fragments}": 4.2,
        "holdfast_log_lag_records{node=n0}": 7,
        "holdfast_refused_messages_total{node=n0,reason=stale generation}": 2,
        "holdfast_unprotected_snapshots{node=n0}": 1,
    }.items() <= samples.items()


def test_what_a_node_does_not_know_is_left_out() -> None:
    names = {sample.name for sample in status_samples([SILENT])}
    assert names == {PREFIX + name for name in ("up", "workers", "unreachable_nodes")}


def test_labels_are_escaped() -> None:
    awkward = NodeStatus(node='a"b\\c\nd', sidecar=7, status=STORED)
    text = exposition(status_samples([awkward]))
    assert 'holdfast_up{node="a\\"b\\\\c\\nd"} 1' in text


def test_a_histogram_adds_its_buckets_up() -> None:
    name = PREFIX + "recovery_duration_seconds"
    counts = [1, 0, 2, *[0] * (len(FAMILIES[name].bounds) - 3), 4]
    samples = parsed(exposition([MetricSample(name, ("loss",), BucketCounts(counts, 12.5))]))
    assert samples[f"{name}_bucket{{cause=loss,le=0.1}}"] == 1
    assert samples[f"{name}_bucket{{cause=loss,le=1}}"] == 3
    assert samples[f"{name}_bucket{{cause=loss,le=+Inf}}"] == 7
    assert samples[f"{name}_count{{cause=loss}}"] == 7
    assert samples[f"{name}_sum{{cause=loss}}"] == 12.5


def test_prometheus_own_checker_has_nothing_to_say() -> None:
    tally = EventTally()
    tally.add(hurt_job())
    text = exposition([*tally.samples(), *status_samples([ANSWERING, SILENT])])
    assert len(parsed(text)) > 100
    assert checked("check", "metrics", given=text) == ""


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_metric_is_named_by_convention_and_its_labels_have_few_values(family: object) -> None:
    name, kind, labels, about, bounds = family  # type: ignore[misc]
    assert re.fullmatch(r"holdfast_[a-z]+(_[a-z0-9]+)*", name)
    assert (kind == "counter") == name.endswith("_total")
    assert set(labels) <= FEW
    assert about.endswith(".")
    assert about[0].isupper() or about[0].isdigit()
    assert (kind == "histogram") == bool(bounds)
    assert bounds == tuple(sorted(bounds))
    unit = next((part for part in name.split("_") if part in UNITS), None)
    if "time" in about.lower().split(" ")[0].lower() and "timestamp" not in name:
        assert unit == "seconds"
    assert series(FAMILIES[name])
