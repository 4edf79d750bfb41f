"""Shares by measured speed: equal on all ranks, changed rarely, and only if it pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.ckpt.types import Json
from holdfast.elastic.config import Batch, Exact, Mesh, Settings
from holdfast.elastic.data.sharing import LOOK_EVERY, Sharing
from holdfast.elastic.errors import ConfigError


class FakeGroups:
    """One of several groups of ``cell`` ranks; the others say what the test says."""

    def __init__(self, index: int, speeds: Sequence[float], *, cell: int = 1) -> None:
        self.index, self.size, self.speeds = index, len(speeds) // cell, list(speeds)
        self.cell, self.gathers, self.now_s = cell, 0, 0.0

    def clock(self) -> float:
        return self.now_s

    def train(self, sharing: Sharing, seconds: float, microbatches: int) -> None:
        """Run so many microbatches in so many seconds, and complete the step."""
        sharing.begin()
        self.now_s += seconds
        sharing.end(microbatches)
        sharing.settle()

    def gather(self, value: Json) -> list[Json]:
        self.gathers += 1
        assert value == pytest.approx(self.speeds[self.index * self.cell], abs=1e-6)
        return list(self.speeds)


def run(rank: int, speeds: Sequence[float], microbatches: int, **how: Any) -> list[range]:
    """Return the parts of a rank in its first steps, each as fast as it is."""
    ranks = FakeGroups(rank, speeds)
    sharing = Sharing(ranks, microbatches, gather=ranks.gather, clock=ranks.clock, **how)
    parts = []
    for _ in range(LOOK_EVERY + 1):
        mine = sharing.mine()
        parts.append(range(mine[0], mine[-1] + 1))
        ranks.train(sharing, len(mine) / speeds[rank], len(mine))
    assert ranks.gathers == 1
    return parts


def test_the_slow_rank_gets_fewer_and_all_ranks_agree() -> None:
    reports: list[Any] = []
    speeds = [10.0, 10.0, 2.5]

    def tell(reason: str, shares: Sequence[int]) -> None:
        reports.append((reason, list(shares)))

    parts = [run(rank, speeds, 9, tell=tell) for rank in range(3)]
    assert [part[0] for part in parts] == [range(3), range(3, 6), range(6, 9)]
    assert [part[LOOK_EVERY - 1] for part in parts] == [part[0] for part in parts]
    assert [part[LOOK_EVERY] for part in parts] == [range(4), range(4, 8), range(8, 9)]
    assert [shares for _, shares in reports] == [[4, 4, 1]] * 3
    assert "by measured speed" in reports[0][0]


def test_the_shares_of_the_generation_stand_while_they_are_good() -> None:
    parts = run(1, [10.0, 5.0], 9, shares=(6, 3))
    assert set(parts) == {range(6, 9)}


def test_shares_stay_where_they_are_not_to_follow_speed_or_cannot() -> None:
    for microbatches, follows in ((9, False), (2, True)):
        ranks = FakeGroups(0, [1.0, 9.0])
        gather = ranks.gather if follows else None
        sharing = Sharing(ranks, microbatches, gather=gather, clock=ranks.clock)
        before = sharing.mine()
        for _ in range(2 * LOOK_EVERY):
            ranks.train(sharing, 1.0, 1)
        assert sharing.mine() == before
        assert not ranks.gathers


def test_a_group_is_as_fast_as_its_slowest_rank() -> None:
    ranks = FakeGroups(0, [8.0, 8.0, 8.0, 4.0], cell=2)
    sharing = Sharing(ranks, 6, gather=ranks.gather, clock=ranks.clock)
    for _ in range(LOOK_EVERY):
        ranks.train(sharing, 1 / 8, 1)
    assert sharing.mine() == range(4)


def test_groups_abreast_have_as_many_side_by_side_and_the_speed_of_the_slowest() -> None:
    speeds = [9.0, 3.0, 9.0, 9.0]
    parts, reports = [], []
    for rank in range(4):
        ranks = FakeGroups(rank, speeds)
        sharing = Sharing(
            ranks,
            8,
            abreast=2,
            gather=ranks.gather,
            clock=ranks.clock,
            tell=lambda _reason, shares: reports.append(list(shares)),
        )
        before = list(sharing.mine())
        for _ in range(LOOK_EVERY):
            ranks.train(sharing, 2 / speeds[rank], 2)
        parts.append((before, list(sharing.mine())))
    assert [before for before, _ in parts] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [after for _, after in parts] == [[0], [1], [2, 4, 6], [3, 5, 7]]
    assert reports == [[1, 1, 3, 3]] * 4


def test_a_rank_without_steps_of_its_own_says_so() -> None:
    ranks = FakeGroups(0, [0.0, 1.0])
    sharing = Sharing(ranks, 8, gather=ranks.gather, clock=ranks.clock)
    for _ in range(LOOK_EVERY):
        ranks.train(sharing, 1.0, 0)
    assert ranks.gathers == 1
    assert sharing.mine() == range(4)


def test_more_ranks_than_microbatches_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 microbatches cannot be shared by 3 data-p"):
        Sharing(FakeGroups(0, [1.0] * 3), 2, clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("exact", "by_speed", "pp", "planned"),
    [
        ("float32", None, 1, 6),
        (None, None, 1, 0),
        ("float32", False, 1, 0),
        (None, True, 1, 6),
        ("float32", None, 2, 0),
        ("float32", None, (2, 1), 0),
        ("float32", True, 2, 6),
    ],
)
def test_shares_follow_speed_where_no_bit_changes_or_where_it_is_asked(
    exact: Exact, by_speed: bool | None, pp: int | tuple[int, ...], planned: int
) -> None:
    batch = Batch(microbatches=6, by_speed=by_speed)
    settings = Settings(mesh=Mesh(pp=pp), batch=batch, exact=exact)
    assert settings.job().microbatches == planned


@pytest.mark.parametrize(
    ("microbatches", "shares", "even"), [(6, (), True), (7, (), False), (6, (2, 4), False)]
)
def test_shares_say_whether_they_are_even(
    microbatches: int, shares: tuple[int, ...], even: bool
) -> None:
    groups = FakeGroups(0, [1.0, 1.0])
    sharing = Sharing(groups, microbatches, shares=shares, clock=lambda: 0.0)
    assert sharing.is_even == even
