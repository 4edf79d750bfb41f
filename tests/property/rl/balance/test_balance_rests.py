"""Moves come to rest, keep the bounds, and leave no job slower, with any times of steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from exploring import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.adapters.rl.balance.choosing import (
    SETTLING_STEPS,
    Balancer,
    JobShape,
    Roles,
    Shares,
    StepTime,
)
from holdfast.adapters.rl.balance.settings import BalanceConfig

SHARE = st.floats(0.0, 1.0)
SECONDS = st.floats(0.01, 20.0)


@dataclass(frozen=True)
class Parts:
    """A job of which a step takes ``training_s`` for all microbatches, and ``sampling_s``."""

    training_s: float
    sampling_s: float

    def step(self, roles: Roles, shape: JobShape) -> StepTime:
        training_s = self.training_s * shape.passes(roles) / shape.microbatches
        sampling_s = self.sampling_s / roles.rollouts
        if not shape.overlaps:
            seconds = training_s + sampling_s
            return StepTime(
                seconds=seconds, waited_s=sampling_s, working=sampling_s / max(seconds, 1e-9)
            )
        seconds = max(training_s, sampling_s)
        return StepTime(
            seconds=seconds,
            waited_s=max(0.0, sampling_s - training_s),
            working=sampling_s / seconds,
        )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[JobShape, Roles]:
    unit = draw(st.sampled_from((1, 1, 2)))
    microbatches = draw(st.integers(1, 16))
    groups = draw(st.integers(1, min(8, microbatches)))
    shape = JobShape(
        unit=unit,
        least_groups=draw(st.integers(1, groups)),
        microbatches=microbatches,
        overlaps=draw(st.booleans()),
    )
    return shape, Roles(trainers=groups * unit, rollouts=draw(st.integers(1, 12)))


def windows(
    balancer: Balancer, roles: Roles, times: object, count: int, *, left: int = 10**9
) -> list[Roles]:
    """Run windows of steps whose times follow from the roles; return the roles after each."""
    found = []
    balancer.begin()
    for _ in range(count):
        for _ in range(balancer.settings.window + SETTLING_STEPS):
            choice = balancer.step(times(roles), roles, left=left)  # type: ignore[operator]
            if choice is not None:
                assert balancer.shape.allows(choice.roles), choice
                assert (
                    choice.roles.trainers + choice.roles.rollouts == roles.trainers + roles.rollouts
                )
                assert abs(choice.roles.trainers - roles.trainers) == balancer.shape.unit
                roles = choice.roles
                balancer.begin()
                break
        found.append(roles)
    return found


def changes(roles: list[Roles]) -> int:
    return sum(one != other for one, other in itertools.pairwise(roles))


@settings(max_examples=examples(150), deadline=None)
@given(shapes(), SECONDS, SECONDS)
def test_a_job_as_expected_goes_one_way_and_gets_faster_with_every_move(
    drawn: tuple[JobShape, Roles], training_s: float, sampling_s: float
) -> None:
    shape, start = drawn
    job = Parts(training_s, sampling_s)
    balancer = Balancer(shape=shape, settings=BalanceConfig(window=3))
    roles = [start, *windows(balancer, start, lambda now: job.step(now, shape), 30)]
    moves = [b.trainers - a.trainers for a, b in itertools.pairwise(roles) if a != b]
    assert len(set(moves)) <= 1
    seconds = [job.step(each, shape).seconds for each in roles]
    assert all(b <= a * 0.91 for a, b in itertools.pairwise(seconds) if a != b)
    assert len(set(roles[-10:])) == 1


@settings(max_examples=examples(150), deadline=None)
@given(shapes(), st.data())
def test_moves_become_rare_whatever_a_step_takes(
    drawn: tuple[JobShape, Roles], data: st.DataObject
) -> None:
    """A step's time and shares are drawn for each number of trainers: no model holds."""
    shape, start = drawn
    table: dict[int, StepTime] = {}

    def times(roles: Roles) -> StepTime:
        if roles.trainers not in table:
            seconds = data.draw(SECONDS)
            table[roles.trainers] = StepTime(
                seconds=seconds, waited_s=seconds * data.draw(SHARE), working=data.draw(SHARE)
            )
        return table[roles.trainers]

    balancer = Balancer(shape=shape, settings=BalanceConfig(window=2))
    roles = [start, *windows(balancer, start, times, 600)]
    assert changes(roles[300:]) <= 16
    assert changes(roles) <= 60


@settings(max_examples=examples(100), deadline=None)
@given(shapes(), SECONDS, SHARE, SHARE, st.sampled_from((-1, 1)))
def test_a_move_that_costs_time_is_undone_and_not_made_again_at_once(
    drawn: tuple[JobShape, Roles], seconds: float, waits: float, works: float, way: int
) -> None:
    shape, start = drawn
    balancer = Balancer(shape=shape, settings=BalanceConfig(window=2))

    def times(roles: Roles) -> StepTime:
        slow = 1.0 if roles == start else 1.5
        return StepTime(seconds=seconds * slow, waited_s=seconds * slow * waits, working=works)

    roles = windows(balancer, start, times, 3)
    assume(roles[0] != start)
    assert roles[1] == roles[2] == start or shape.unit * way == 0


@settings(max_examples=examples(100), deadline=None)
@given(shapes(), SECONDS, SHARE, SHARE)
def test_nothing_moves_where_too_little_is_left_to_gain(
    drawn: tuple[JobShape, Roles], seconds: float, waits: float, works: float
) -> None:
    shape, start = drawn
    time = StepTime(seconds=seconds, waited_s=seconds * waits, working=works)
    balancer = Balancer(shape=shape, settings=BalanceConfig(window=2), move_s=seconds)
    assert windows(balancer, start, lambda _: time, 2, left=1) == [start, start]


@settings(max_examples=examples(150), deadline=None)
@given(shapes(), SECONDS, SHARE, SHARE, SHARE)
def test_who_waits_longer_is_served_first(
    drawn: tuple[JobShape, Roles], seconds: float, waits: float, more: float, works: float
) -> None:
    """The longer trainers wait, the less another trainer promises, and the more one fewer."""
    shape, now = drawn
    less, longer = sorted((waits, more))
    for way in (shape.unit, -shape.unit):
        then = now.moved(way)
        if not shape.allows(then):
            continue

        def gain(share: float, then: Roles = then) -> float:
            shares = Shares(step_s=seconds, waits=share, works=works)
            return seconds - shares.after(now, then, shape)

        low, high = (longer, less) if way > 0 else (less, longer)
        assert gain(low) <= gain(high) + 1e-9
