"""The nemesis kills on time, waits until the job is whole, and does not count a miss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.elastic.events import (
    Event,
    GenerationProposed,
    RolloutRecovered,
    SamplingChanged,
    StateRestored,
    StepDone,
    WorkerStarted,
)
from holdfast.elastic.events.log import EventReader
from holdfast.elastic.launch.local import Launcher
from holdfast.tools.demo import kills as chaos
from holdfast.tools.demo.kills import ScheduledKills
from holdfast.tools.demo.schedule import Kill
from holdfast.tools.report.timeline import KILL_NODE, KILL_ROLLOUT, KILL_TRAINER
from holdfast.tools.show.live_state import LiveState

WANTED = {"trainer": 2, "rollout": 2}


class Scene:
    """A job of four workers on two nodes, told by events, whose kills are only noted."""

    def __init__(self, run_dir: Path, plan: list[Kill], monkeypatch: pytest.MonkeyPatch) -> None:
        self.hit: list[list[int]] = []
        monkeypatch.setattr(chaos, "_sigkill", lambda pids: self.hit.append(list(pids)) or True)
        self.reader, self.state, self.now = EventReader(run_dir), LiveState(), 0.0
        monkeypatch.setattr(chaos.time, "time", lambda: self.now)
        launcher = SimpleNamespace(
            run_dir=run_dir,
            config=SimpleNamespace(wanted=WANTED),
            lose_machine=lambda node: self.hit.append([1, 2]) or [1, 2],
        )
        self.nemesis = ScheduledKills(
            cast("Launcher", launcher), plan, seed=0, hold_file=run_dir / "hold"
        )
        for at, seat in enumerate(("trainer/0", "rollout/0", "trainer/1", "rollout/1")):
            self.tell(WorkerStarted, seat=seat, node="ab"[at // 2], pid=10 + at)
        self.generation(1)

    def generation(self, number: int) -> None:
        self.tell(GenerationProposed, generation=number)
        for node, seat in (("a", "trainer/0"), ("b", "trainer/1")):
            self.tell(StateRestored, generation=number, seat=seat, node=node)

    def tell(self, kind: type[Event], **fields: Any) -> None:
        self.state.apply([kind(time_s=self.now, **fields)])

    def step(self, number: int, *, generation: int = 1) -> None:
        self.tell(StepDone, step=number, generation=generation, seconds=0.0)

    def tick(self) -> list[list[int]]:
        """Let the nemesis look, feed its events back, and return its victims so far."""
        self.nemesis.tick(self.state)
        self.state.apply(self.reader.new())
        return self.hit


def kill(kind: str, step: int) -> Kill:
    return Kill(kind=kind, step=step, delay=0.0)


def test_nothing_is_hurt_before_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, [kill(KILL_TRAINER, 5)], monkeypatch)
    scene.step(4)
    assert scene.tick() == []
    scene.step(5)
    assert scene.tick() in ([[10]], [[12]])
    assert scene.nemesis.pending == 0
    assert scene.state.faults[0].what == KILL_TRAINER


def test_the_next_kill_waits_until_the_job_stands_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, [kill(KILL_TRAINER, 1), kill(KILL_NODE, 2)], monkeypatch)
    scene.step(1)
    scene.tick()
    scene.step(2)
    assert len(scene.tick()) == 1
    assert (tmp_path / "hold").exists()
    victim = scene.state.faults[0]
    scene.tell(WorkerStarted, seat=victim.victim, node=victim.on, pid=20)
    scene.generation(2)
    assert len(scene.tick()) == 1
    assert not (tmp_path / "hold").exists()
    scene.step(3, generation=2)
    hit = scene.tick()
    assert len(hit) == 2
    assert hit[1][:2] == [1, 2]


def test_the_job_is_not_held_when_no_kill_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, [kill(KILL_TRAINER, 1), kill(KILL_NODE, 9)], monkeypatch)
    scene.step(1)
    scene.tick()
    scene.step(2)
    scene.tick()
    assert not (tmp_path / "hold").exists()


def test_holding_ends_when_nobody_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, [kill(KILL_TRAINER, 1), kill(KILL_NODE, 2)], monkeypatch)
    scene.step(1)
    scene.tick()
    scene.step(2)
    scene.tick()
    assert (tmp_path / "hold").exists()
    monkeypatch.setattr(chaos, "_HOLD_MOST_S", -1.0)
    scene.tick()
    assert not (tmp_path / "hold").exists()


def test_a_rollout_worker_is_hit_only_while_it_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, [kill(KILL_ROLLOUT, 1)], monkeypatch)
    scene.step(1)
    assert scene.tick() == []
    scene.tell(SamplingChanged, seat="rollout/1", samples=8)
    scene.now += 1.0
    assert scene.tick() == []
    scene.tell(SamplingChanged, seat="rollout/1", samples=8)
    assert scene.tick() == [[13]]


@pytest.mark.parametrize(("unfinished", "hits"), [(3, 1), (0, 2)])
def test_a_miss_between_two_sequences_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfinished: int, hits: int
) -> None:
    scene = Scene(tmp_path, [kill(KILL_ROLLOUT, 1)], monkeypatch)
    scene.step(1)
    scene.tell(SamplingChanged, seat="rollout/1", samples=8)
    scene.tick()
    none = {"samples": 0, "tokens": 0, "resampled": 0}
    scene.tell(RolloutRecovered, worker="rollout/1", unfinished=unfinished, **none)
    scene.tell(WorkerStarted, seat="rollout/1", node="b", pid=21)
    scene.step(2)
    scene.tell(SamplingChanged, seat="rollout/0", samples=8)
    assert len(scene.tick()) == hits
