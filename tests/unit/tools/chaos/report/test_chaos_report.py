"""The report of many runs: its figures and its output formats."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from chaos_runs import SYNTHETIC, holdfast_events, plain_events, struck, write_history, write_run
from hypothesis import given
from hypothesis import strategies as st
from self_contained import assert_self_contained

from holdfast.tools.chaos import prediction
from holdfast.tools.chaos.commands.report import to_json
from holdfast.tools.chaos.judging.checker import CHECKS
from holdfast.tools.chaos.judging.history import HistoryError
from holdfast.tools.chaos.judging.result import ResultError
from holdfast.tools.chaos.reading import read
from holdfast.tools.chaos.report.junit import ENDED, to_junit
from holdfast.tools.chaos.report.losses import Loss, Prediction
from holdfast.tools.chaos.report.page import headline, render
from holdfast.tools.chaos.report.summary import ALL, compare, percentile, summarise, survival
from holdfast.tools.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs in one folder: two of Holdfast, one broken, one of a plain job."""
    write_run(tmp_path / "today" / "1", holdfast_events(), strikes=SYNTHETIC)
    write_run(tmp_path / "today" / "2", holdfast_events(), strikes=SYNTHETIC, seed=8)
    write_run(
        tmp_path / "today" / "<3>", holdfast_events(), name="stuck", problems=("was <stuck>\x1b",)
    )
    strikes = [struck(0, "kill", "the job", 7.5)]
    write_run(tmp_path / "today" / "4", plain_events(), strikes=strikes, name="plain")
    return tmp_path / "today"


def test_a_folder_is_a_run_or_many_or_a_history(folder: Path, tmp_path: Path) -> None:
    assert [run.folder for run in read(folder)] == ["1", "2", "4", "<3>"]
    assert [run.folder for run in read(folder / "2")] == ["2"]
    (history,) = read(folder / "4" / "history")
    assert (history.world, history.seed, history.held) == (None, None, True)
    assert history.verdict.undone == 2
    with pytest.raises(HistoryError, match="neither a run nor a history"):
        read(write_history(tmp_path / "empty", []))
    with pytest.raises(HistoryError, match="no such folder"):
        read(tmp_path / "nowhere")


def test_recoveries_are_counted_by_fault_and_phase(folder: Path) -> None:
    summary = summarise(read(folder))
    assert (summary.runs, summary.held, summary.strikes, summary.missed) == (4, 3, 9, 2)
    every, kill, lose = summary.repairs
    assert (every.fault, every.count, kill.count, lose.count) == (ALL, 7, 5, 2)
    assert lose.phases["detect_s"].p50_s == pytest.approx(0.9)
    assert lose.phases["detect_s"].count == 2
    assert kill.phases["detect_s"].count == 4, "the plain job does not tell it"
    assert kill.phases["reexecute_s"].count == 3, "a rollout worker needs none"
    assert kill.samples_s == pytest.approx((0.06, 0.06, 0.17, 0.17, 6.5))
    assert kill.total.p50_s == pytest.approx(0.17)
    assert kill.total.p95_s == pytest.approx(0.17 + 0.8 * (6.5 - 0.17))
    assert 0.0 < summary.goodput < 1.0
    assert summary.shares["re-executed"] == pytest.approx(
        sum(run.shares["re-executed"] for run in read(folder))
    )


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=40), part=st.floats(0, 1))
def test_a_percentile_lies_between_the_values_beside_it(values: list[float], part: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, part)
    at = int(part * (len(ordered) - 1))
    slack = 1e-6 * max(ordered[-1], 1.0)
    assert ordered[at] - slack <= found <= ordered[min(at + 1, len(ordered) - 1)] + slack


def test_the_matrix_shows_the_worst_of_every_set_and_those_never_lost() -> None:
    def loss(nodes: str, outcome: str) -> Loss:
        return msgspec.convert({"nodes": tuple(nodes), "of": 3, "outcome": outcome}, Loss)

    losses = [loss("a", "parity"), loss("a", "lost"), loss("b", "checkpoint"), loss("ac", "lost")]
    table = survival(losses)
    assert [(cell.nodes, cell.count, cell.outcome) for cell in table[1]] == [
        (("a",), 2, "lost"),
        (("b",), 1, "checkpoint"),
        (("c",), 0, None),
    ]
    assert [cell.outcome for cell in table[2]] == [None, "lost", None]


def test_what_was_predicted_of_lost_nodes_stands_beside_what_came_of_it(tmp_path: Path) -> None:
    lost = [struck(4, "lose", "node a", 17.0)]
    for name, outcome in (("as", "memory"), ("otherwise", "parity")):
        folder = write_run(tmp_path / name, holdfast_events(), strikes=lost, name=name)
        nodes = ("a",) if name == "as" else ("a", "b")
        found = msgspec.convert(
            {"nodes": nodes, "of": 3, "parity": 1, "outcome": outcome}, Prediction
        )
        prediction.save(folder, found)
    (cell,) = (cell for cell in summarise(read(tmp_path / "as")).survival[1] if cell.count)
    assert (cell.outcome, cell.predicted, cell.differs) == ("memory", "memory", False)
    assert "None of 1 ended otherwise" in render(read(tmp_path / "as"))
    (other,) = (cell for cell in summarise(read(tmp_path / "otherwise")).survival[1] if cell.count)
    assert (other.predicted, other.differs) == (None, False), "that was said of two nodes"
    said = Prediction(nodes=("a",), of=3, parity=1, outcome="checkpoint")
    prediction.save(tmp_path / "otherwise", said)
    runs = read(tmp_path / "otherwise")
    (other,) = (cell for cell in summarise(runs).survival[1] if cell.count)
    assert other.differs
    page = render(runs)
    assert "1 of 1 ended otherwise" in page
    assert "≠ predicted: checkpoint" in page and 'class="set o-memory differs"' in page
    report = json.loads(to_json(runs))
    (cell,) = (each for each in report["summary"]["survival"]["1"] if each["count"])
    assert (cell["outcome"], cell["predicted"]) == ("memory", "checkpoint")


def test_a_prediction_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", holdfast_events())
    (folder / "predicted.json").write_text("{}")
    with pytest.raises(ResultError, match=r"predicted.json: not a prediction"):
        read(folder)


def test_two_sets_of_runs_are_compared_figure_by_figure(folder: Path) -> None:
    runs = {run.folder: run for run in read(folder)}
    rows = {row.name: row for row in compare([runs["1"]], [runs["4"]])}
    assert rows["recovery, kill: p50"].better == "before"
    assert rows["recovery, lose: p50"].after is None
    assert rows["recovery, lose: p50"].better == ""
    assert rows["runs that held"].better == ""
    same = compare([runs["1"]], [runs["2"]])
    assert {row.better for row in same} == {""}


def test_junit_has_a_case_for_each_check_of_each_run(folder: Path) -> None:
    root = ElementTree.fromstring(to_junit(read(folder)))
    suites = root.findall("testsuite")
    assert len(suites) == 4
    assert root.get("tests") == str(4 * (len(CHECKS) + 1))
    assert root.get("failures") == "1"
    (failure,) = root.iter("failure")
    assert failure.get("message") == "was <stuck>\N{REPLACEMENT CHARACTER}"
    assert "again: holdfast chaos run stuck.toml --seed 7" in (failure.text or "")
    failed = [case for case in root.iter("testcase") if case.find("failure") is not None]
    assert [case.get("name") for case in failed] == [ENDED]
    plain = next(suite for suite in suites if suite.get("name") == "plain, seed 7")
    skipped = {c.get("name") for c in plain.iter("testcase") if c.find("skipped") is not None}
    assert "samples once" not in skipped
    assert "state of the reference" in skipped


def test_the_page_is_whole_and_says_what_happened(folder: Path) -> None:
    runs = read(folder)
    page = render(runs, against=runs[:1], command="holdfast chaos report <x>")
    assert_self_contained(page)
    assert "1 of 4 runs broke a promise" in page
    assert "was &lt;stuck&gt;" in page
    assert "<stuck>" not in page
    assert "Compared" in page
    assert "Machines lost" in page
    assert "holdfast chaos run stuck.toml --seed 7" in page
    assert "Not told: generations, and the phases of recoveries" in page
    assert page.count("<details") == 4
    assert page.index("stuck, seed 7") < page.index("plain, seed 7"), "what broke comes first"


def test_the_page_of_one_history_leaves_out_what_it_does_not_know(folder: Path) -> None:
    runs = read(folder / "4" / "history")
    page = render(runs)
    assert_self_contained(page)
    assert headline(summarise(runs)) == "1 run, every promise kept"
    for absent in ("Compared", "Machines lost", "Time to recover", "<h2>Runs</h2>"):
        assert absent not in page
    assert "attempt <em>n</em> begins" in page
    assert page.count('text-anchor="end">worker/') == 2
    assert "Where the time went" in page


def test_the_command_writes_a_page_junit_and_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {name: tmp_path / "made" / name for name in ("page.html", "junit.xml", "all.json")}
    words = ["chaos", "report", str(folder), "--against", str(folder / "1")]
    words += ["--out", str(out["page.html"]), "--junit", str(out["junit.xml"])]
    assert main([*words, "--json", str(out["all.json"])]) == 0
    shown = capsys.readouterr().out
    assert "1 of 4 runs broke a promise" in shown
    assert "recovery, kill: p95" in shown
    assert_self_contained(out["page.html"].read_text())
    ElementTree.parse(out["junit.xml"])
    report = json.loads(out["all.json"].read_text())
    assert report["format"] == 2
    assert report["summary"]["repairs"][0]["count"] == 7
    assert [run["held"] for run in report["runs"]] == [True, True, True, False]
    assert report["runs"][0]["recoveries"][0]["victim"] == "trainer/1"
    assert "timeline" not in report["runs"][0]
    assert report["compared"]


def test_a_folder_without_a_run_is_told_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "report", str(tmp_path)]) == 2
    assert "neither a run nor a history" in capsys.readouterr().err
