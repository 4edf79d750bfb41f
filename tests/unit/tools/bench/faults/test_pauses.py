"""The figures of many recoveries, their table, and the share of useful time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.events import (
    Event,
    FaultInjected,
    GenerationProposed,
    JobEnded,
    JobStarted,
    StateRestored,
    StepDone,
)
from holdfast.tools.bench.faults import goodput, mttr, pauses, peers
from holdfast.tools.bench.faults.recoveries import MeasuredRecovery
from holdfast.tools.bench.samples import BenchSetup, Figure, Tempo


def recovery(pause_s: float, *, lost: int = 0) -> MeasuredRecovery:
    ends = {"detected": 0.1, "proposed": 0.2, "reformed": 0.3, "restored": 0.4, "begun": pause_s}
    return MeasuredRecovery(
        began_s=0.0,
        ends_s=ends,
        step_s=pause_s + 1,
        new_s=pause_s + 1 + lost,
        generation=2,
        world=3,
        lost_steps=lost,
    )


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_recoveries_become_medians_with_their_range_and_95th_percentile() -> None:
    found = by_name(
        pauses.figures("mttr", "a kill", [recovery(1.0), recovery(2.0, lost=1)], step_s=0.5)
    )
    pause = found[f"a kill: {pauses.PAUSE}"]
    assert (pause.value, pause.low, pause.high) == (1.5, 1.0, 2.0)
    assert pause.p95 == pytest.approx(1.95)
    assert pause.samples == (1.0, 2.0)
    assert found[f"a kill: {pauses.USEFUL}"].high == 4.0
    assert found[f"a kill: {pauses.LOST}"].high == 1
    assert found["a kill: detect"].value == pytest.approx(0.1)
    assert found["a kill: begin"].value == pytest.approx(1.1)


def test_what_others_take_is_told_as_a_multiple_of_ours() -> None:
    ours = pauses.figures("mttr", "ours", [recovery(0.5)], step_s=0.5)
    theirs = pauses.figures("mttr", "theirs", [recovery(5.0)], step_s=0.5, versus=ours[0])
    assert theirs[0].ratio == pytest.approx(10)
    assert theirs[0].versus == ours[0].name
    assert theirs[0].figures()[0]["samples"] == (5.0,)


def test_the_table_has_a_line_for_each_kind_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "has_torchft", lambda: False)
    figures = [
        pauses.sampled("mttr", f"memcpy of the state: {pauses.PAUSE}", [0.08]),
        *pauses.figures("mttr", mttr.KILL, [recovery(0.25), recovery(0.5)], step_s=0.4),
        *pauses.figures("mttr", mttr.HANG, [recovery(3.5)], step_s=0.4),
        pauses.sampled("mttr", f"{mttr.HANG}: {pauses.BEYOND}", [0.5]),
        pauses.sampled("mttr", f"{mttr.TORCHRUN}: {mttr.ENDED}", [3.0], unit=""),
    ]
    output = printed(lambda console: mttr.show(figures, console=console))
    wanted = (mttr.KILL, "0.375", "0.250–0.500", pauses.BEYOND, "80.0 ms", "not installed")
    for text in (*wanted, f"{mttr.TORCHRUN}: {mttr.ENDED}: 3"):
        assert text in output


def test_a_job_that_does_not_survive_is_told_with_what_it_survived(tmp_path: Path) -> None:
    def way() -> Any:
        yield recovery(2.0), FakeJob()
        raise PeerError("the job ended with 1")

    setup = BenchSetup(size_bytes=1, repeat=1, directory=tmp_path, lap=lambda: None)
    versus = pauses.figures("mttr", mttr.KILL, [recovery(0.5)], step_s=0.4)[0]
    with Tempo(setup, total=5) as tempo:
        found = by_name(mttr._under(mttr.TORCHRUN, way, faults=5, tempo=tempo, versus=versus))
    assert found[f"{mttr.TORCHRUN}: {mttr.ENDED}"].value == 1
    assert found[f"{mttr.TORCHRUN}: {pauses.PAUSE}"].ratio == pytest.approx(4)


class FakeJob:
    """A job of which one step is known."""

    class log:
        events = (StepDone(step=1, time_s=2.0, start_s=1.0),)


def printed(show: Any) -> str:
    console = Console(file=io.StringIO(), width=140)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def step(number: int, start: float, t: float, *, generation: int = 1) -> Event:
    return StepDone(
        time_s=t,
        node="n0",
        seat="trainer/0",
        step=number,
        generation=generation,
        start_s=start,
        seconds=t - start,
    )


def test_the_time_between_first_and_last_step_is_in_one_class_each() -> None:
    events: list[Event] = [
        JobStarted(),
        *(step(number, 10.0 + number - 1, 10.0 + number) for number in range(1, 6)),
        FaultInjected(
            time_s=15.5, what="kill_trainer", victim="trainer/1", on="n0", seats=("trainer/1",)
        ),
        GenerationProposed(time_s=16.0, generation=2, ranks=("trainer/0",)),
        StateRestored(time_s=16.5, generation=2),
        *(step(n, 16.5 + n - 6, 17.5 + n - 6, generation=2) for n in range(6, 10)),
        JobEnded(time_s=30.0, ok=False),
    ]
    found = by_name([*goodput._shares(events), *goodput._steps(events)])
    assert found["time accounted for"].value == pytest.approx(10.5)
    assert found[goodput.USEFUL].value == pytest.approx(9 / 10.5)
    assert found["lost: recovery"].value == pytest.approx(1 / 10.5)
    assert found["a step undisturbed"].value == pytest.approx(1.0)
    assert found[goodput.RATE].value == pytest.approx(8 / 9.5)


def test_the_rounds_of_a_section_are_shared_out_and_all_told_in_the_end(tmp_path: Path) -> None:
    laps: list[str] = []
    setup = BenchSetup(size_bytes=1, repeat=2, directory=tmp_path, lap=lambda: laps.append("lap"))
    with Tempo(setup, total=6) as tempo:
        for _ in range(4):
            tempo.beat()
        assert len(laps) == 2
    assert len(laps) == 3
