"""Runs that share samples, die, go back and begin steps again keep every promise of sharing."""

from __future__ import annotations

import hypothesis.strategies as st
from doubles.sharing_runs import STEPS, SharedPool, SharingRun
from exploring import examples
from hypothesis import given, settings

from holdfast.adapters.rl.samples.borrowed import GroupOrigin, borrowed_from
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.adapters.rl.sharing.choosing import TakingRules, chosen, fitted, shared_group

NAMES = ("oslo", "lyon")
MOVES = st.tuples(
    st.sampled_from(NAMES), st.sampled_from(("step", "die", "back")), st.integers(0, 3)
)


@settings(max_examples=examples(25), deadline=None)
@given(
    others=st.integers(0, 3), keep=st.integers(1, 8), moves=st.lists(MOVES, min_size=6, max_size=24)
)
def test_no_group_is_trained_twice_or_comes_home_and_none_changes(
    others: int, keep: int, moves: list[tuple[str, str, int]]
) -> None:
    pool = SharedPool()
    runs = {name: SharingRun(pool, name, others=others, keep=keep) for name in NAMES}
    for name, move, count in moves:
        run = runs[name]
        if move == "back":
            run.go_back(count)
        elif run.done == STEPS:
            continue
        elif move == "die":
            run.die_in_step(lag=count % 2)
        else:
            run.step(lag=count % 2)
    assert [what for run in runs.values() for what in run.judge()] == []
    mailbox = pool.mailbox
    assert all(len(mailbox.origins(name)) <= keep for name in mailbox.islands())


ORIGINS = st.builds(
    GroupOrigin,
    island=st.sampled_from(("oslo", "lyon", "rome")),
    lineage=st.just("a"),
    ordinal=st.integers(0, 9),
)


@given(
    stock=st.sets(ORIGINS), taken=st.sets(ORIGINS), count=st.integers(0, 5), turn=st.integers(0, 9)
)
def test_the_newest_groups_are_chosen_and_every_run_has_its_turn(
    stock: set[GroupOrigin], taken: set[GroupOrigin], count: int, turn: int
) -> None:
    found = chosen(stock, count=count, turn=turn, may_take=lambda each: each not in taken)
    free = stock - taken
    assert len(found) == len(set(found)) == min(count, len(free))
    assert set(found) <= free
    for each in free - set(found):
        same = [other.ordinal for other in found if other.island == each.island]
        assert not same or min(same) > each.ordinal
    counts = {island: sum(each.island == island for each in found) for island in ("oslo", "lyon")}
    if all(sum(each.island == island for each in free) >= count for island in counts):
        assert abs(counts["oslo"] - counts["lyon"]) <= 1
    again = chosen(
        sorted(stock, key=str), count=count, turn=turn, may_take=lambda o: o not in taken
    )
    assert again == found, "a function of the pool and the turn alone"


class Digits:
    size, end = 12, 9

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, text))

    def decode(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(str, tokens))


@given(
    prompt=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    answers=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=5), min_size=2, max_size=2),
    ended=st.booleans(),
)
def test_a_group_that_travels_by_its_text_has_the_tokens_that_it_had(
    prompt: list[int], answers: list[list[int]], ended: bool
) -> None:
    samples = [
        Trajectory(
            ordinal=3,
            sample=number,
            prompt=tuple(prompt),
            tokens=(tokens := (*answer, *((9,) if ended else ()))),
            logprobs=(-0.5,) * len(tokens),
            stamps=(Stamp(generation=1, version=2, count=len(tokens)),),
        )
        for number, answer in enumerate(answers)
    ]
    group = shared_group(samples, island="oslo", lineage="a", family="f", tokenizer=Digits())
    same = TakingRules(group=2, context=20, family="f")
    assert fitted(group, same) == borrowed_from(group)
    other = TakingRules(group=2, context=20, family="g", tokenizer=Digits(), recodes=True)
    found = fitted(group, other)
    assert not isinstance(found, str)
    for sample, original in zip(found, samples, strict=True):
        assert (sample.prompt, sample.tokens) == (original.prompt, original.tokens)
        assert sample.recoded
        assert sample.versions == {2}
