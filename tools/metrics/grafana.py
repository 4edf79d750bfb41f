"""The dashboard for Grafana as JSON: one table of panels. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from holdfast.ckpt.types import Json

_WIDTH: Final = 24
_SOURCE: Final[dict[str, Json]] = {"type": "prometheus", "uid": "${datasource}"}
_OF: Final = 'job=~"$job",instance=~"$instance"'


class GrafanaPanel(NamedTuple):
    """A panel: its queries by legend, ``@`` stands for the labels of the chosen job."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    about: str = ""


ROWS: Final[tuple[tuple[str, tuple[GrafanaPanel, ...]], ...]] = (
    (
        "The job",
        (
            GrafanaPanel("Step", {"": "max(holdfast_step{@})"}, kind="stat", width=4, height=4),
            GrafanaPanel(
                "Goodput",
                {"": "min(holdfast_goodput_ratio{@})"},
                unit="percentunit",
                kind="stat",
                width=4,
                height=4,
                about="Productive share of the time between first and last step.",
            ),
            GrafanaPanel(
                "Not protected",
                {"": "max(holdfast_unprotected_steps{@})"},
                kind="stat",
                width=4,
                height=4,
                about="Complete steps that a failure would repeat now.",
            ),
            GrafanaPanel(
                "At risk",
                {"": "max(holdfast_unprotected_seconds{@})"},
                unit="s",
                kind="stat",
                width=4,
                height=4,
                about="Age of the work that a failure would cost now.",
            ),
            GrafanaPanel(
                "Age of the checkpoint",
                {"": "time() - max(holdfast_checkpoint_timestamp_seconds{@})"},
                unit="s",
                kind="stat",
                width=4,
                height=4,
            ),
            GrafanaPanel(
                "Trainers",
                {
                    "now": "max(holdfast_ranks{@})",
                    "wanted": "max(holdfast_ranks_wanted{@})",
                },
                kind="stat",
                width=4,
                height=4,
            ),
            GrafanaPanel(
                "Steps",
                {
                    "complete": "max(holdfast_step{@})",
                    "protected": "max(holdfast_protected_step{@})",
                    "in a checkpoint": "max(holdfast_durable_step{@})",
                },
            ),
            GrafanaPanel(
                "Time of a step",
                {
                    "median": "histogram_quantile(0.5, sum by (le) "
                    "(rate(holdfast_step_duration_seconds_bucket{@}[$__rate_interval])))",
                    "99 %": "histogram_quantile(0.99, sum by (le) "
                    "(rate(holdfast_step_duration_seconds_bucket{@}[$__rate_interval])))",
                },
                unit="s",
            ),
            GrafanaPanel(
                "Time by use",
                {"{{use}}": "sum by (use) (holdfast_time_seconds{@})"},
                unit="s",
                kind="piechart",
            ),
            GrafanaPanel(
                "Waiting in steps",
                {
                    "{{cause}}": "sum by (cause) "
                    "(rate(holdfast_step_wait_seconds_total{@}[$__rate_interval]))"
                },
                unit="s",
                about="Seconds in a second, over all ranks.",
            ),
        ),
    ),
    (
        "Faults and recoveries",
        (
            GrafanaPanel(
                "Detections",
                {
                    "{{node}} {{what}}": "sum by (node, what) "
                    '(increase(holdfast_detections_total{@,what!="join"}[$__rate_interval])) > 0'
                },
            ),
            GrafanaPanel(
                "Time of a recovery",
                {
                    "{{cause}}": "sum by (cause) "
                    "(increase(holdfast_recovery_duration_seconds_sum{@}[$__rate_interval])) / "
                    "sum by (cause) "
                    "(increase(holdfast_recovery_duration_seconds_count{@}[$__rate_interval]))"
                },
                unit="s",
            ),
            GrafanaPanel(
                "Restores by source",
                {
                    "{{tier}}": "sum by (tier) "
                    "(increase(holdfast_restores_total{@}[$__rate_interval]))"
                },
            ),
            GrafanaPanel(
                "Steps run again",
                {"steps": "sum(increase(holdfast_steps_repeated_total{@}[$__rate_interval]))"},
            ),
            GrafanaPanel("Generation", {"{{node}}": "holdfast_generation{@}"}),
            GrafanaPanel("Stragglers", {"{{node}}": "holdfast_stragglers{@} > 0"}),
        ),
    ),
    (
        "Snapshots and memory",
        (
            GrafanaPanel("Sidecars that answer", {"{{node}}": "holdfast_up{@}"}),
            GrafanaPanel(
                "Age of the restore point", {"{{node}}": "holdfast_protected_age_seconds{@}"}, "s"
            ),
            GrafanaPanel(
                "From seal to protected",
                {"{{node}}": 'holdfast_stage_median_seconds{@,stage="protect"}'},
                unit="s",
            ),
            GrafanaPanel(
                "Shared memory",
                {"{{purpose}}": "sum by (purpose) (holdfast_memory_bytes{@})"},
                unit="bytes",
            ),
            GrafanaPanel(
                "Bytes by stage",
                {
                    "{{stage}}": "sum by (stage) "
                    "(rate(holdfast_stage_bytes_total{@}[$__rate_interval]))"
                },
                unit="Bps",
            ),
            GrafanaPanel(
                "Not protected, left out",
                {
                    "{{node}} not protected": "holdfast_unprotected_snapshots{@} > 0",
                    "{{node}} left out": "holdfast_snapshots_left_out{@} > 0",
                },
            ),
        ),
    ),
    (
        "Checkpoints",
        (
            GrafanaPanel(
                "Checkpoints",
                {
                    "{{result}}": "sum by (result) "
                    "(increase(holdfast_checkpoints_total{@}[$__rate_interval]))"
                },
            ),
            GrafanaPanel(
                "Rate of writing",
                {
                    "bytes": "sum(rate(holdfast_checkpoint_bytes_total{@}[$__rate_interval])) / "
                    "sum(rate(holdfast_checkpoint_seconds_total{@}[$__rate_interval]))"
                },
                unit="Bps",
            ),
            GrafanaPanel(
                "Retries and failures",
                {
                    "retries": "sum(increase(holdfast_checkpoint_retries_total{@}"
                    "[$__rate_interval]))",
                    "failed in a row": "max(holdfast_checkpoints_failed_in_a_row{@})",
                },
            ),
        ),
    ),
    (
        "Reinforcement learning and islands",
        (
            GrafanaPanel(
                "Sampled tokens",
                {"{{node}}": "rate(holdfast_sampled_tokens_total{@}[$__rate_interval])"},
            ),
            GrafanaPanel(
                "Waiting for samples",
                {"rank 0": "rate(holdfast_rollout_wait_seconds_total{@}[$__rate_interval])"},
                unit="s",
            ),
            GrafanaPanel(
                "Merges of islands",
                {
                    "merges": "sum(increase(holdfast_tides_total{@}[$__rate_interval]))",
                    "waited": "sum(increase(holdfast_tide_wait_seconds_total{@}"
                    "[$__rate_interval]))",
                },
            ),
        ),
    ),
)


def dashboard() -> dict[str, Json]:
    """Return the dashboard, as Grafana imports it."""
    panels: list[Json] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            }
        )
        x, y, tallest = 0, y + 1, 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            place: dict[str, Json] = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            panels.append(_panel(panel, number=len(panels) + 1, place=place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "uid": "holdfast",
        "title": "Holdfast",
        "tags": ["holdfast"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def queries() -> list[str]:
    """Return the queries of all panels."""
    return [query for _, row in ROWS for panel in row for query in panel.queries.values()]


def _panel(panel: GrafanaPanel, *, number: int, place: dict[str, Json]) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query.replace("@", _OF),
                "legendFormat": legend or panel.title,
            }
            for at, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _variables() -> list[Json]:
    chosen: list[Json] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    ]
    for name, of in (("job", "holdfast_step"), ("instance", 'holdfast_step{job=~"$job"}')):
        chosen.append(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": _SOURCE,
                "query": f"label_values({of}, {name})",
                "refresh": 2,
                "includeAll": True,
                "multi": True,
                "allValue": ".+",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return chosen
