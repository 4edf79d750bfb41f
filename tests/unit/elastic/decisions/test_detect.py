"""The limit after which silence counts as a hang, and the time a survivor has to leave."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.decisions.detect import (
    SilenceLimits,
    learned_s,
    park_limit_s,
    probe_limit_s,
    silence_limit_s,
    stall_limit_s,
    stalled,
)
from holdfast.elastic.membership.phases import Beat, WorkerPhase

LIMITS = SilenceLimits(min_s=2.0, max_s=100.0, first_s=50.0, pause_s=70.0)


def beat(phase: WorkerPhase, *, limit_s: float = 0.0) -> Beat:
    return Beat(count=1, step=1, phase=phase, at_ns=0, limit_s=limit_s)


@pytest.mark.parametrize(
    ("steps", "limit_s"),
    [
        ([], 50.0),
        ([0.01] * 9, 2.0),
        ([1.0] * 9, 10.0),
        ([1.0] * 9 + [6.0], 18.0),
        ([60.0] * 9, 100.0),
    ],
    ids=["nothing known", "never too short", "by the median", "by the longest", "never too long"],
)
def test_the_limit_is_learned_and_bounded(steps: list[float], limit_s: float) -> None:
    assert learned_s(steps, limits=LIMITS) == pytest.approx(limit_s)


def test_what_is_not_a_step_has_its_own_limit() -> None:
    def limit(at: Beat, *, first: bool = False) -> float | None:
        return silence_limit_s(at, [1.0] * 9, first=first, limits=LIMITS)

    assert limit(beat(WorkerPhase.COMPUTE)) == 10.0
    assert limit(beat(WorkerPhase.COMPUTE), first=True) == 50.0, "it may compile"
    assert limit(beat(WorkerPhase.IDLE)) == 70.0
    assert limit(beat(WorkerPhase.PAUSE)) == 70.0
    assert limit(beat(WorkerPhase.PAUSE, limit_s=5.0)) == 5.0
    assert limit(beat(WorkerPhase.WAIT)) is None, "who waits is not at fault"
    assert limit(beat(WorkerPhase.MEET)) is None, "who waits is not at fault"


def test_only_when_all_ranks_wait_too_long_is_the_generation_stalled() -> None:
    def view(*since: int) -> bool:
        nodes = [
            msgspec.structs.replace(fakes.node(f"n{i}"), stalled=generation, probed=3)
            for i, generation in enumerate(since)
        ]
        ranks = [(f"n{i}", fakes.worker(f"trainer/{i}")) for i in range(2)]
        record = fakes.generation(3, nodes, ranks=ranks)
        return stalled(fakes.view(*nodes, generation=record))

    assert view(3, 3, 0), "the third node has no rank"
    assert not view(3, 0, 0)
    assert not view(3, 2, 0), "that was another generation"
    assert not stalled(fakes.view())
    assert stall_limit_s([1.0] * 9, first=False, limits=LIMITS) == 10.0
    assert stall_limit_s([1.0] * 9, first=True, limits=LIMITS) == 50.0


def test_whom_a_node_reaches_is_asked_before_a_first_step_is_late() -> None:
    assert probe_limit_s([], first=True, limits=LIMITS) == 2.0
    assert probe_limit_s([1.0] * 9, first=True, limits=LIMITS) == 10.0
    assert probe_limit_s([1.0] * 9, first=False, limits=LIMITS) == 10.0


def test_a_survivor_has_the_time_its_microbatches_take() -> None:
    assert park_limit_s([0.1, 0.2], least_s=5.0, limits=LIMITS) == 5.0
    assert park_limit_s([0.1, 20.0, 7.0], least_s=5.0, limits=LIMITS) == 40.0
    assert park_limit_s([90.0], least_s=5.0, limits=LIMITS) == 100.0
    assert park_limit_s([], least_s=5.0, limits=LIMITS) == 50.0, "it may compile"


@pytest.mark.parametrize(
    "wrong", [{"min_s": 0.0}, {"max_s": 1.0}, {"first_s": -1.0}, {"pause_s": 0.0}]
)
def test_limits_check_themselves(wrong: dict[str, float]) -> None:
    right = {"min_s": 2.0, "max_s": 100.0, "first_s": 50.0, "pause_s": 70.0}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SilenceLimits(**{**right, **wrong})
