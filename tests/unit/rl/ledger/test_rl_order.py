"""The choice of groups for a step, and its waiting, one sentence each."""

from __future__ import annotations

from doubles.plain_claims import urgency

from holdfast.adapters.rl.ledger.order import Open, choose, fits, needs, oldest_version


def group(ordinal: int, due: int | None = None, arrived: int | None = None) -> Open:
    return Open(ordinal=ordinal, due=due, arrived=arrived)


def test_a_step_takes_what_arrived_first() -> None:
    open_ = [group(0, 5), group(1, 5, 2), group(2, 5, 0), group(3, 5, 1)]
    assert choose(open_, step=3, groups=2) == [2, 3]
    assert choose(open_, step=3, groups=4) is None


def test_a_step_waits_for_what_no_later_one_may_take() -> None:
    open_ = [group(0, 3), group(1, 5, 0), group(2, 5, 1)]
    assert choose(open_, step=3, groups=2) is None
    assert urgency(open_, step=3, groups=2) == {0: 0}
    arrived = [group(0, 3, 2), *open_[1:]]
    assert choose(arrived, step=3, groups=2) == [0, 1]


def test_a_step_takes_now_what_later_ones_would_have_no_room_for() -> None:
    open_ = [group(each, 4, 9 - each) for each in range(3)] + [group(8, 6, 0), group(9, 6, 1)]
    assert needs([4, 4, 4, 6, 6], step=3, groups=2) == [(4, 1)]
    assert choose(open_, step=3, groups=2) == [2, 8]
    assert not fits([4, 4, 4], step=4, groups=2)
    assert fits([4, 4, 5, 5], step=4, groups=2)


def test_what_a_step_can_do_without_comes_after_what_it_waits_for_by_its_last_step() -> None:
    open_ = [group(0), group(1, 6), group(2, 4), group(3), group(4), group(5, 4, 0)]
    assert urgency(open_, step=3, groups=2) == {2: 0, 1: 1, 0: 1, 3: 2, 4: 2}


def test_a_group_may_begin_with_as_old_a_version_as_there_is_room_for() -> None:
    assert oldest_version([], step=5, groups=2, eta=2) == 3
    assert oldest_version([5, 5], step=5, groups=2, eta=2) == 4
    assert oldest_version([5, 5, 6, 6], step=5, groups=2, eta=2) == 5
    assert oldest_version([], step=1, groups=2, eta=2) == 0
    assert oldest_version([], step=4, groups=2, eta=0) == 4
