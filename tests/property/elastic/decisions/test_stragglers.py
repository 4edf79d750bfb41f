"""No alarm on equal ranks with any noise; always an alarm on a slow rank."""

from __future__ import annotations

import random

from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.decisions.stragglers import STEPS, StepTimes, outliers, pace


def microbatch_s(draw: random.Random, *, base_s: float, noise: float, slow: float = 1.0) -> float:
    """Measure a rank whose steps vary, some of them a lot, as an agent does."""
    times = []
    hiccups = set(draw.sample(range(STEPS), STEPS // 4))
    for step in range(STEPS):
        hiccup = 5.0 if step in hiccups else 1.0
        computes_s = 4 * slow * base_s * hiccup * draw.lognormvariate(0.0, noise)
        waited_s = draw.random() * base_s
        times.append(
            StepTimes(
                seconds=computes_s + waited_s,
                waited_s=waited_s,
                stalled_s=0.0,
                data_s=0.0,
                cpu_s=computes_s,
                microbatches=4,
            )
        )
    found = pace(times)
    assert found is not None
    return 1.0 / found.speed


ranks = st.integers(2, 80)
seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=examples(60))
@given(count=ranks, seed=seeds, noise=st.floats(0.0, 0.1), base_s=st.floats(1e-3, 10.0))
def test_even_ranks_raise_no_alarm(count: int, seed: int, noise: float, base_s: float) -> None:
    draw = random.Random(seed)
    seconds = {str(r): microbatch_s(draw, base_s=base_s, noise=noise) for r in range(count)}
    assert outliers(seconds) == {}


@settings(deadline=None, max_examples=examples(60))
@given(count=ranks, seed=seeds, noise=st.floats(0.0, 0.05), slow=st.floats(2.0, 50.0))
def test_a_slow_rank_is_found_and_only_that(
    count: int, seed: int, noise: float, slow: float
) -> None:
    draw = random.Random(seed)
    seconds = {str(r): microbatch_s(draw, base_s=0.1, noise=noise) for r in range(count)}
    victim = str(draw.randrange(count))
    seconds[victim] = microbatch_s(draw, base_s=0.1, noise=noise, slow=slow)
    found = outliers(seconds)
    assert list(found) == [victim]
    assert slow / 1.5 < found[victim][0] < slow * 1.5


@settings(deadline=None)
@given(seconds=st.dictionaries(st.text(max_size=3), st.floats(0.0, 1e6), max_size=50))
def test_any_times_are_judged_without_an_error(seconds: dict[str, float]) -> None:
    found = outliers(seconds)
    assert len(found) <= len(seconds)
    assert all(times >= 1.0 for times, _ in found.values())
