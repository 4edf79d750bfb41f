"""Small pieces join a large fixed part once that has paid for writing all of it anew."""

from __future__ import annotations

from holdfast.ckpt.snapshot.fixed_choice import FixedChoice

MIB = 1 << 20
SIZES = {"base": 64 * MIB, "rests": 2 * MIB, "moves": 2 * MIB}


def test_a_piece_joins_when_it_would_have_spared_what_the_part_costs() -> None:
    choice: FixedChoice[str] = FixedChoice()
    now = choice.choose(SIZES, now=(), frozen={"base"})
    assert now == {"base"}
    joined = 0
    for step in range(1, 60):
        choice.observe({"base": 1, "rests": 2, "moves": step})
        now = choice.choose(SIZES, now=now, frozen={"base"})
        joined = joined or ("rests" in now) * step
    assert joined == 34, "66 MiB are written for 2 MiB that have rested for 33 snapshots"


def test_what_is_frozen_joins_at_once() -> None:
    choice: FixedChoice[str] = FixedChoice()
    now = choice.choose(SIZES, now=(), frozen={"base"})
    choice.observe({"base": 1, "rests": 2, "moves": 3})
    assert choice.choose(SIZES, now=now, frozen={"base", "rests"}) == {"base", "rests"}
