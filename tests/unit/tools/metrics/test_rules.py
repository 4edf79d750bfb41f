"""The alerts and the dashboard: Prometheus accepts them, and each metric in them exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml
from promtool import checked

from holdfast.tools import cli
from holdfast.tools.metrics.command import rules
from holdfast.tools.metrics.families import FAMILIES, series
from holdfast.tools.metrics.grafana import dashboard, queries

CASES: Final = Path(__file__).with_name("rules_cases.yaml")
SERIES: Final = {name: family for family in FAMILIES.values() for name in series(family)}
LABELS: Final = {"job", "instance", "le"}


def used(query: str) -> set[str]:
    return set(re.findall(r"\bholdfast_\w+", query))


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(rules())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_prometheus_accepts_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(rules())
    assert f"SUCCESS: {len(alerts())} rules found" in checked("check", "rules", str(path))


def test_alerts_fire_on_the_series_they_are_for_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules())
    (tmp_path / "cases.yaml").write_text(CASES.read_text())
    assert "SUCCESS" in checked("test", "rules", "cases.yaml", folder=tmp_path)


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load(CASES.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert tested == {alert["alert"] for alert in alerts()}


def test_every_metric_of_the_rules_exists() -> None:
    for alert in alerts():
        assert used(alert["expr"])
        assert used(alert["expr"]) <= SERIES.keys(), alert["alert"]


def test_every_metric_of_the_dashboard_exists_with_the_labels_it_is_grouped_by() -> None:
    for query in queries():
        assert used(query)
        assert used(query) <= SERIES.keys(), query
        known = {label for name in used(query) for label in SERIES[name].labels} | LABELS
        grouped = {
            label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")
        }
        assert grouped <= known, query


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    panels: list[Any] = dashboard()["panels"]  # type: ignore[assignment]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_command_prints_what_grafana_and_prometheus_read(capsys: Any) -> None:
    assert cli.main(["metrics", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["uid"] == "holdfast"
    assert cli.main(["metrics", "--rules"]) == 0
    assert capsys.readouterr().out == rules()
    assert cli.main(["metrics", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAMILIES)
    assert cli.main(["metrics"]) == 2
    assert "give RUN_DIR, or one of --rules" in capsys.readouterr().err
