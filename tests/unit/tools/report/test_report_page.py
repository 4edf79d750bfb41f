"""The page is one self-contained, well-formed document with the content of the report."""

import re
from xml.etree import ElementTree

import msgspec
import pytest
from self_contained import assert_self_contained
from synthetic_run import hurt_job

from holdfast.elastic.events import JobEnded, JobStarted
from holdfast.tools.report import charts, html, timeline
from holdfast.tools.report.record import (
    DemoReport,
    HeldOutResult,
    fault_rows,
    recovery_rows,
    summarise,
)
from holdfast.tools.report.snapshot_costs import Cost
from holdfast.tools.report.svg import Scale, marks, text


def make_report(**changes: object) -> DemoReport:
    story = timeline.build(hurt_job())
    rows = recovery_rows(story)
    report = DemoReport(
        verdict=dict.fromkeys(html.CHECKS, True),
        failures=[],
        faults=fault_rows(story),
        recoveries=rows,
        recovery_summary=summarise(rows),
        final_hash="abc123",
        reference_hash="abc123",
        goodput=story.goodput,
        time_shares=story.shares,
        reference_goodput=0.9,
        reference_time_shares={"productive": 20.0, "startup": 2.4},
        reward=[0.1, 0.4, 0.3],
        reference_reward=[0.1, 0.4, 0.3],
        heldout=[
            HeldOutResult(step=0, exact_match=0.25, greedy=0.3),
            HeldOutResult(step=18, exact_match=0.5, greedy=0.6),
        ],
        ledger={"trained": 288, "dropped": {"too long": 0}},
        generations=[],
        steps=18,
        wall_s=story.wall_s,
        reference_wall_s=22.4,
        config={"mode": "fixed_lag", "note": "<script>alert(1)</script>"},
        software={"holdfast": "0.1.0"},
        machine={"cores": "2"},
        seed=7,
        command="holdfast demo --seed 7",
        timeline=story,
    )
    return msgspec.structs.replace(report, **changes)


def test_the_page_is_balanced_and_needs_no_network() -> None:
    assert_self_contained(html.render(make_report()))


def test_the_page_says_what_happened() -> None:
    page = html.render(make_report())
    for words in ("same weights to the last bit", "trainer/1", "generation", "Every check held"):
        assert words in page


def test_the_page_says_what_snapshots_cost() -> None:
    cost = Cost(
        stall_share=0.004,
        protected_median_s=0.03,
        protected_max_s=0.2,
        copied_bytes=5 << 20,
        discarded=1,
    )
    page = html.render(make_report(snapshots=cost))
    assert "snapshots held training for 0.4% of the step time" in page
    assert "held training" not in html.render(make_report())


def test_a_failed_check_shows() -> None:
    verdict = {**dict.fromkeys(html.CHECKS, True), "exact": False}
    page = html.render(make_report(verdict=verdict, failures=["final weights differ"]))
    assert "Some checks failed" in page
    assert "final weights differ" in page
    assert "did not end with" in page


def test_what_others_wrote_is_escaped() -> None:
    assert "<script>" not in html.render(make_report())


def test_a_job_without_faults_or_steps_still_gives_a_page() -> None:
    story = timeline.build([JobStarted(time_s=1.0), JobEnded(time_s=2.0, ok=False)])
    page = html.render(make_report(timeline=story, faults=[], recoveries=[], reward=[], heldout=[]))
    assert "nothing measured" in page


@pytest.mark.parametrize("draw", ["timeline", "bars", "shares", "curve"])
def test_every_picture_is_well_formed(draw: str) -> None:
    report = make_report()
    picture = {
        "timeline": lambda: charts.timeline(report.timeline),
        "bars": lambda: charts.recovery_bars(report.recoveries),
        "shares": lambda: charts.share_bar(report.time_shares),
        "curve": lambda: charts.curve({"reward": [(1, 0.2), (2, 0.4)]}, label="reward"),
    }[draw]()
    ElementTree.fromstring(picture)


def test_lanes_begin_behind_the_longest_names() -> None:
    story = make_report().timeline
    lives = [
        msgspec.structs.replace(each, node=f"{each.node}-with-a-long-name") for each in story.lives
    ]
    long = msgspec.structs.replace(story, lives=tuple(lives), steps=(), faults=())
    name = re.compile(r'<text x="([0-9.]+)"[^>]*class="seat"')
    short_x, long_x = (float(name.findall(charts.timeline(each))[0]) for each in (story, long))
    assert long_x > short_x + 17 * 7


def test_every_worker_has_a_lane_and_every_fault_a_cross() -> None:
    report = make_report()
    picture = charts.timeline(report.timeline)
    assert picture.count('class="fault"') == 3
    places = {(life.node, life.seat) for life in report.timeline.lives}
    assert picture.count('class="seat"') == len(places) < len(report.timeline.lives)
    assert picture.count('class="step lost"') == 2


def test_the_report_survives_json() -> None:
    report = make_report()
    again = msgspec.json.decode(msgspec.json.encode(report), type=DemoReport)
    assert again == report
    assert again.passed


def test_marks_are_round_and_inside() -> None:
    assert marks(0.0, 10.0, about=5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert all(0.3 <= mark <= 0.9 for mark in marks(0.3, 0.9))
    assert marks(1.0, 1.0) == [1.0]


def test_a_scale_maps_ends_to_ends() -> None:
    scale = Scale(domain=(0.0, 4.0), range=(10.0, 50.0))
    assert (scale(0.0), scale(4.0)) == (10.0, 50.0)
    assert Scale(domain=(1.0, 1.0), range=(0.0, 9.0))(1.0) == 0.0


def test_words_in_a_picture_are_escaped() -> None:
    assert text(0, 0, "a < b") == '<text x="0" y="0">a &lt; b</text>'
