"""Under any faults and joins all ranks decide alike, and the job comes to an end."""

from __future__ import annotations

import math

from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.loss import LossAction, LossGuard, Past, decide, longest

STEPS = 12

guards = st.builds(
    LossGuard,
    nonfinite=st.sampled_from(["warn", "skip", "rollback", "stop"]),
    spike=st.sampled_from(["warn", "skip", "rollback", "stop"]),
    then=st.sampled_from(["skip", "stop"]),
    steps_back=st.integers(0, 4),
    limit=st.integers(0, 3),
    warmup=st.just(3),
    window=st.just(8),
)
bad = st.dictionaries(st.integers(0, STEPS - 1), st.integers(1, 9), max_size=6)
"""Step → the number of times that it goes wrong before it goes right."""


@settings(deadline=None, max_examples=examples(300))
@given(guard=guards, bad=bad, spiky=st.booleans(), joins=st.sets(st.integers(0, 30), max_size=4))
def test_ranks_decide_alike_and_come_to_an_end(
    guard: LossGuard, bad: dict[int, int], spiky: bool, joins: set[int]
) -> None:
    ranks, step, done, left = [Past(), Past()], 0, 0, dict(bad)
    trouble = 50.0 if spiky else math.nan
    while step < STEPS:
        done += 1
        assert done < 2000, "it never ends"
        wrong = left.get(step, 0) > 0
        left[step] = left.get(step, 0) - wrong
        loss = trouble if wrong else 1.0
        found = [decide(loss, past, step=step, guard=guard) for past in ranks]
        assert len({(action, why) for action, why, _ in found}) == 1
        action, why, _ = found[0]
        ranks = [past for _, _, past in found]
        assert bool(why) == (action is not LossAction.GO_ON)
        if action is LossAction.STOP:
            return
        step = max(0, step - guard.steps_back) if action is LossAction.ROLL_BACK else step + 1
        if action is LossAction.ROLL_BACK or done in joins:  # a new generation, perhaps a new rank
            known = [*ranks[: 1 if done in joins else 2], Past()]
            ranks = [longest(known, before=step)] * 2
    if not bad:
        assert done == STEPS
