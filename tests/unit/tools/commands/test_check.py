"""`holdfast check` as a command: its exit codes, and time that is up is no finding."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from holdfast.elastic.loop.trace.records import LoopEntered, LoopLeft, MicrobatchSeen, StateSeen
from holdfast.tools.check.launching import TrialResult
from holdfast.tools.check.limits import TrialLimits
from holdfast.tools.check.traces import RankTrace
from holdfast.tools.check.trials import Trial
from holdfast.tools.commands import check

Script = Callable[[Trial], dict[str, Any]]


def traces(*, loss: str = "loss", steps: int = 2) -> tuple[RankTrace, ...]:
    """Return the trace of one rank that makes some steps of two microbatches."""
    entered = LoopEntered(
        stage="train",
        generation=1,
        rank=0,
        world=1,
        pid=7,
        completed=0,
        exact="float32",
        microbatches=2,
        share=2,
    )
    records: list[Any] = []
    for step in range(steps):
        records += [
            MicrobatchSeen(
                step=step,
                phase=0,
                round=0,
                microbatch=number,
                input=f"{step} {number}",
                draws={},
                line="train.py:30",
                loss=f"{loss} {step}",
                value=1.0,
                gradients={},
            )
            for number in range(2)
        ]
        records.append(StateSeen(step=step, after=True, leaves={}, updates=1))
    end = [LoopLeft(step=steps, how="end")] if steps == 2 else []
    return (RankTrace(entered=entered, records=(*records, *end)),)


class Runs:
    """Stands for `ScriptRuns`: ``script`` says how a run ends; the limits are noted."""

    def __init__(self, script: Script, **_: object) -> None:
        self._script = script
        self.limits: dict[str, TrialLimits] = {}

    def run(self, trial: Trial, *, number: int, limits: TrialLimits) -> TrialResult:
        self.limits[trial.name] = limits
        found = {"traces": traces(), "seconds": 100.0, **self._script(trial)}
        return TrialResult(trial=trial, **found)


def late(name: str, **more: Any) -> Script:
    found = {"message": "not finished within 9 s", "late": True, "traces": traces(steps=1), **more}
    return lambda trial: found if trial.name == name else {}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    (tmp_path / "train.py").touch()

    def run(script: Script, *options: str) -> tuple[int, dict[str, Any], str, Runs]:
        runs, said = Runs(script), io.StringIO()
        monkeypatch.setattr(check, "ScriptRuns", lambda **_: runs)
        monkeypatch.setattr(check, "console", lambda **_: Console(file=said, width=200))
        parser = check.add_parser(argparse.ArgumentParser().add_subparsers())
        report = tmp_path / "report.json"
        words: Sequence[str] = ["--json", str(report), *options, str(tmp_path / "train.py")]
        status = check.run(parser.parse_args(words))
        found = msgspec.json.decode(report.read_bytes()) if report.exists() else {}
        return status, found, said.getvalue(), runs

    return run


def test_equal_runs_are_status_zero(command: Callable[..., Any]) -> None:
    status, report, said, _ = command(lambda trial: {})
    assert (status, report["findings"], report["unfinished"]) == (0, [], [])
    assert "bit for bit" in said


def test_a_run_whose_time_was_up_is_no_finding_and_has_a_status_of_its_own(
    command: Callable[..., Any],
) -> None:
    status, report, said, _ = command(late("kills"))
    assert (status, report["findings"]) == (3, [])
    (run,) = report["unfinished"]
    assert (run["property"], "--limit-s" in run["remedy"]) == ("kills", True)
    assert [each["property"] for each in report["checked"]] == ["again", "ranks", "disk"]
    assert "NO ANSWER" in said
    assert "DIFFERENT" not in said
    assert "not finished within 9 s" in said
    assert "runs that came to their end gave the same" in said


def test_as_far_as_it_came_a_run_whose_time_was_up_is_compared(
    command: Callable[..., Any],
) -> None:
    status, report, _, _ = command(late("kills", traces=traces(loss="other", steps=1)))
    assert status == 1
    assert report["findings"][0]["kind"] == "difference"


def test_a_first_run_whose_time_was_up_is_no_answer_either(command: Callable[..., Any]) -> None:
    status, report, said, _ = command(late("", traces=()))
    assert (status, report["findings"], len(report["unfinished"])) == (3, [], 1)
    assert "--ranks" in said


def test_a_refusal_in_one_run_is_a_finding(command: Callable[..., Any]) -> None:
    def script(trial: Trial) -> dict[str, Any]:
        return {"message": "no"} if trial.name == "kills" else {}

    status, report, _, _ = command(script)
    assert (status, report["findings"][0]["kind"]) == (1, "refused")


def test_a_slow_machine_gives_more_time(command: Callable[..., Any]) -> None:
    _, _, _, runs = command(lambda trial: {})
    assert runs.limits["kills"].run_s > 1000.0 > runs.limits[""].run_s
    _, _, _, runs = command(lambda trial: {}, "--limit-s", "7")
    assert runs.limits["kills"].run_s == 7.0
