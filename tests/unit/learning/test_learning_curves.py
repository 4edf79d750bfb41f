"""Learning curves are drawn whole, and compared by an exact test."""

from __future__ import annotations

import random
import xml.etree.ElementTree as xml

import pytest
from learning.__main__ import VARIANTS, _plan
from learning.charts import mean_line, paired_interval, paired_p_value, picture

from holdfast.tools.report.timeline import KILL_NODE, KILL_ROLLOUT, KILL_TRAINER


def test_a_picture_has_every_line_its_name_and_its_faults() -> None:
    lines = {name: [(0, 0.1), (10, 0.4), (20, 0.6)] for name in VARIANTS}
    drawn = xml.fromstring(picture(lines, title="a < b", faults=[5, 15]))
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in drawn.iter(f"{space}text")]
    assert "a < b" in words
    assert set(VARIANTS) <= set(words)
    curves = [e for e in drawn.iter(f"{space}path") if "curve" in e.get("class", "")]
    assert len({curve.get("class") for curve in curves}) == len(VARIANTS)
    marks = [e for e in drawn.iter(f"{space}line") if e.get("class") == "deathline"]
    assert len(marks) == 2
    style = next(drawn.iter(f"{space}style")).text or ""
    assert all(f".curve.c{at} {{ stroke: #" in style for at in range(len(VARIANTS)))


def test_the_mean_of_lines_keeps_their_steps() -> None:
    found = mean_line([[(0, 0.0), (10, 0.5)], [(0, 1.0), (10, 0.7)]])
    assert found == [(0, 0.5), (10, pytest.approx(0.6))]


def test_one_sided_pairs_have_the_smallest_p_and_equal_ones_the_largest() -> None:
    ones = [1.0] * 6
    assert paired_p_value(ones, [0.0] * 6) == 2 / 2**6
    assert paired_p_value(ones, ones) == 1.0
    assert paired_p_value([1, 0, 1, 0], [0, 1, 0, 1]) == 1.0
    with pytest.raises(ValueError, match="zip"):
        paired_p_value([1.0], [])


def test_where_nothing_differs_a_p_below_a_tenth_is_as_rare_as_it_says() -> None:
    draw = random.Random(1)
    found = [
        paired_p_value([draw.gauss(0, 1) for _ in range(6)], [draw.gauss(0, 1) for _ in range(6)])
        for _ in range(400)
    ]
    assert sum(p <= 0.1 for p in found) / len(found) == pytest.approx(0.1, abs=0.05)


def test_an_interval_has_the_differences_that_the_test_does_not_reject() -> None:
    draw = random.Random(2)
    left = [draw.gauss(0.3, 1) for _ in range(6)]
    low, high = paired_interval(left, [0.0] * 6, confidence=0.9)
    for shift, rejected in [(low - 0.01, True), (low + 0.01, False), (high - 0.01, False),
                            (high + 0.01, True)]:  # fmt: skip
        assert (paired_p_value(left, [shift] * 6) <= 0.1) is rejected
    assert paired_interval(left, [0.0] * 6, confidence=0.95) == (min(left), max(left))
    with pytest.raises(ValueError, match=r"5 pairs give no interval of confidence 0\.95"):
        paired_interval(left[:5], [0.0] * 5, confidence=0.95)


def test_an_interval_misses_the_mean_as_rarely_as_it_says() -> None:
    draw = random.Random(3)
    found = [
        paired_interval([draw.gauss(1, 1) for _ in range(7)], [0.0] * 7, confidence=0.9)
        for _ in range(400)
    ]
    missed = sum(not low <= 1 <= high for low, high in found)
    assert missed / len(found) == pytest.approx(0.1, abs=0.05)


def test_a_plan_has_as_many_kills_as_asked_of_all_kinds_in_order() -> None:
    plan = _plan(22, steps=80)
    assert len(plan) == 22
    assert {kill.kind for kill in plan} == {KILL_NODE, KILL_ROLLOUT, KILL_TRAINER}
    steps = [kill.step for kill in plan]
    assert steps == sorted(steps)
    assert 2 <= steps[0] <= steps[-1] < 76
