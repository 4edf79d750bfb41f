"""The chosen move follows from who waits, the bounds of the roles, and what is left to gain."""

from __future__ import annotations

import pytest

from holdfast.adapters.rl.balance.choosing import (
    SETTLING_STEPS,
    Balancer,
    JobShape,
    RoleChoice,
    Roles,
    Shares,
    StepTime,
)
from holdfast.adapters.rl.balance.settings import BalanceConfig
from holdfast.ckpt.errors import ArgumentError

WAITING = StepTime(seconds=10.0, waited_s=9.0, working=1.0)
BUSY = StepTime(seconds=10.0, waited_s=0.0, working=0.3)
EVEN = StepTime(seconds=10.0, waited_s=0.1, working=0.95)
TWO = Roles(trainers=2, rollouts=2)


def chosen(
    shape: JobShape, time: StepTime, roles: Roles = TWO, *, left: int = 1000
) -> RoleChoice | None:
    """Return the choice after the first window of equal steps."""
    balancer = Balancer(shape=shape, settings=BalanceConfig(window=2))
    balancer.begin()
    found = [balancer.step(time, roles, left=left) for _ in range(SETTLING_STEPS + 2)]
    assert not any(found[:-1])
    return found[-1]


def test_a_trainer_that_waits_becomes_a_rollout_worker() -> None:
    choice = chosen(JobShape(microbatches=8), WAITING)
    assert choice is not None
    assert choice.roles == Roles(trainers=1, rollouts=3)
    assert choice.expected_s == pytest.approx(20 / 3)
    assert choice.reason == ("trainers wait for 90% of a step, rollout workers work for 100% of it")


def test_a_rollout_worker_that_waits_becomes_a_trainer() -> None:
    choice = chosen(JobShape(microbatches=8), BUSY)
    assert choice is not None
    assert choice.roles == Roles(trainers=3, rollouts=1)
    assert choice.expected_s == pytest.approx(10 * 3 / 4), "three passes in place of four"


@pytest.mark.parametrize(
    ("shape", "time", "roles", "left"),
    [
        (JobShape(microbatches=8), EVEN, TWO, 1000),
        (JobShape(microbatches=8, least_groups=2), WAITING, TWO, 1000),
        (JobShape(microbatches=2), BUSY, TWO, 1000),
        (JobShape(microbatches=8), BUSY, Roles(trainers=2, rollouts=1), 1000),
        (JobShape(microbatches=8), WAITING, TWO, 2),
        (JobShape(microbatches=8, unit=2), WAITING, TWO, 1000),
    ],
    ids=["nobody waits", "min_dp", "microbatches", "one samples", "the end is near", "tp"],
)
def test_nobody_moves_where_it_gains_nothing_or_a_role_is_at_its_bound(
    shape: JobShape, time: StepTime, roles: Roles, left: int
) -> None:
    assert chosen(shape, time, roles, left=left) is None


def test_a_group_of_tensor_parallel_ranks_moves_as_a_whole() -> None:
    choice = chosen(JobShape(microbatches=8, unit=2), WAITING, Roles(trainers=4, rollouts=1))
    assert choice is not None
    assert choice.roles == Roles(trainers=2, rollouts=3)


def test_without_overlap_a_step_takes_both_parts() -> None:
    shape = JobShape(microbatches=4, overlaps=False)
    shares = Shares(step_s=10.0, waits=0.5, works=0.5)
    assert shares.after(TWO, Roles(trainers=1, rollouts=3), shape) == pytest.approx(10 + 10 / 3)


def test_a_move_that_cost_time_is_undone_with_its_reason() -> None:
    balancer = Balancer(shape=JobShape(microbatches=8), settings=BalanceConfig(window=2))
    moved = Roles(trainers=1, rollouts=3)
    balancer.step(WAITING, TWO, left=1000)
    assert balancer.step(WAITING, TWO, left=999) is not None
    balancer.begin()
    slower = StepTime(seconds=14.0, waited_s=13.0, working=1.0)
    choices = [balancer.step(slower, moved, left=900) for _ in range(SETTLING_STEPS + 2)]
    assert choices[-1] is not None
    assert choices[-1].roles == TWO
    assert choices[-1].reason == ("the last move cost time: 10 s a step before it, 14 s since")


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"window": 1}, "window=1"), ({"least_gain": 0.0}, "least_gain=0.0")],
)
def test_settings_outside_their_bounds_are_refused_by_name(
    settings: dict[str, float], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        BalanceConfig(**settings)  # type: ignore[arg-type]
