"""The page of metrics has every metric, alert and span name that the code has."""

from __future__ import annotations

import re
from typing import Final

import yaml
from tree import ROOT

from holdfast.tools.metrics.command import rules
from holdfast.tools.metrics.families import FAMILIES
from holdfast.tools.metrics.tally import KINDS_OF_DETECTIONS, TIERS
from holdfast.tools.report.accounting import CLASSES
from holdfast.tools.traces.outbox import MOST_SPANS

PAGE: Final = (ROOT / "docs" / "how-to" / "metrics.md").read_text()


def rows(pattern: str) -> list[list[str]]:
    """Return the cells of the rows whose first cell has this pattern."""
    lines = [line for line in PAGE.splitlines() if re.match(rf"\| `{pattern}`", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_metric_is_in_a_table_as_the_code_has_it() -> None:
    expected = [
        [
            f"`{family.name}`",
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels) or "–",
            family.about.rstrip("."),
        ]
        for family in FAMILIES.values()
    ]
    assert rows("holdfast_[a-z_]+") == expected


def test_every_alert_is_in_the_table() -> None:
    (group,) = yaml.safe_load(rules())["groups"]
    assert [row[0] for row in rows("Holdfast[A-Za-z]+")] == [
        f"`{rule['alert']}`" for rule in group["rules"]
    ]


def test_the_values_of_labels_are_listed() -> None:
    named = re.findall(r"`([a-z_-]+)`", PAGE)
    uses = {name.replace(" ", "_") for name in CLASSES}
    assert {*KINDS_OF_DETECTIONS, *TIERS, "other", *uses} <= set(named)


def test_the_bound_of_waiting_spans_is_the_code_s() -> None:
    assert f"up to\n{MOST_SPANS:,} spans wait" in PAGE
