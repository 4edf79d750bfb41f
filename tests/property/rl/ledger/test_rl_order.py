"""Steps that take samples as they arrive: none gets too old, no step waits longer than needed."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from doubles.plain_claims import urgency
from hypothesis import given

from holdfast.adapters.rl.ledger.order import Open, choose, fits, oldest_version

ETA = 2


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Open], int, int]:
    """Draw open ordinals that fit their limits and due steps, the step, and the groups per step."""
    groups, step = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    count = draw(st.integers(0, groups * (ETA + 1)))
    due: list[int | None] = []
    for _ in range(count):
        wish = draw(st.none() | st.integers(step, step + ETA))
        steps = [each for each in (*due, wish) if each is not None]
        due.append(wish if fits(steps, step=step, groups=groups) else None)
    begun = [index for index, each in enumerate(due) if each is not None]
    complete = draw(st.lists(st.sampled_from(begun), unique=True)) if begun else []
    places = {index: place for place, index in enumerate(complete)}
    open_ = [
        Open(ordinal=10 + index, due=each, arrived=places.get(index))
        for index, each in enumerate(due)
    ]
    return open_, step, groups


def rest_fits(open_: list[Open], taken: set[int], *, step: int, groups: int) -> bool:
    due = [each.due for each in open_ if each.ordinal not in taken and each.due is not None]
    return fits(due, step=step + 1, groups=groups)


@given(worlds())
def test_a_choice_leaves_what_can_be_trained_in_time_and_is_made_as_soon_as_there_is_one(
    world: tuple[list[Open], int, int],
) -> None:
    open_, step, groups = world
    ready = [each.ordinal for each in open_ if each.arrived is not None]
    chosen = choose(open_, step=step, groups=groups)
    possible = [
        set(some)
        for some in itertools.combinations(ready, groups)
        if rest_fits(open_, set(some), step=step, groups=groups)
    ]
    assert (chosen is not None) == bool(possible)
    if chosen is not None:
        assert set(chosen) in possible
        assert chosen == sorted(set(chosen))


@given(worlds())
def test_a_step_waits_for_just_as_many_as_it_needs(world: tuple[list[Open], int, int]) -> None:
    open_, step, groups = world
    awaited = {o for o, steps in urgency(open_, step=step, groups=groups).items() if steps == 0}
    if len(open_) < groups:
        return
    assert not awaited or choose(open_, step=step, groups=groups) is None
    after = [
        Open(ordinal=each.ordinal, due=each.due, arrived=100 + each.ordinal)
        if each.ordinal in awaited
        else each
        for each in open_
    ]
    assert choose(after, step=step, groups=groups) is not None


@given(worlds())
def test_one_more_group_may_begin_with_the_oldest_version_that_fits(
    world: tuple[list[Open], int, int],
) -> None:
    open_, step, groups = world
    due = [each.due for each in open_ if each.due is not None]
    if len(due) == groups * (ETA + 1):
        return
    oldest = oldest_version(due, step=step, groups=groups, eta=ETA)
    assert max(0, step - ETA) <= oldest <= step
    assert fits([*due, oldest + ETA], step=step, groups=groups)
    assert not any(
        fits([*due, version + ETA], step=step, groups=groups)
        for version in range(max(0, step - ETA), oldest)
    )
