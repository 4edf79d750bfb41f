"""The sets of nodes that are lost: the run for each, and the check of its outcome."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.tools.chaos.report.losses import Loss, Prediction
from holdfast.tools.chaos.scenarios.scenario import parse
from holdfast.tools.chaos.scenarios.strikes import draw
from holdfast.tools.chaos.survival.measured import Measuring, scenario_text
from holdfast.tools.chaos.survival.sets import broken, drawn, names, sets

TWO = Prediction(nodes=("n0", "n2"), of=3, parity=1, outcome="checkpoint")


def test_all_sets_are_tried_or_some_by_the_seed_small_ones_first() -> None:
    every = list(sets(4))
    assert drawn(4, most=None, seed=0) == drawn(4, most=15, seed=0) == every
    few = drawn(4, most=5, seed=0)
    assert len(set(few)) == 5 and sorted(few, key=every.index) == few
    assert drawn(4, most=5, seed=0) == few
    assert len({tuple(drawn(4, most=5, seed=seed)) for seed in range(9)}) > 1


@pytest.mark.parametrize(
    ("predicted", "outcome", "wrong"),
    [
        ("parity", "parity", ""),
        ("memory", "parity", ""),
        ("checkpoint", "memory", ""),
        ("parity", "checkpoint", "went on from a checkpoint; predicted: went on from parity"),
        ("checkpoint", "beginning", "lost its work"),
        ("checkpoint", "refused", "ended with a clear error"),
        ("refused", "lost", "did not hold"),
        (None, "beginning", ""),
    ],
)
def test_nothing_worse_than_predicted_may_come_of_it(
    predicted: str | None, outcome: str, wrong: str
) -> None:
    document = {"nodes": ("n0",), "of": 3, "outcome": outcome, "predicted": predicted}
    found = broken(msgspec.convert(document, Loss))
    assert wrong in found and bool(found) == bool(wrong)


def test_the_scenario_of_a_set_loses_all_of_it_and_nothing_else() -> None:
    scenario = parse(tomllib.loads(scenario_text(TWO)), source="a test")
    assert list(scenario.workload.nodes) == list(names(range(3)))
    (strike,) = draw(scenario)
    assert (strike.kind, strike.target.nodes, strike.target.which) == ("lose", TWO.nodes, "all")
    assert scenario.simulated.parity == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "n0-n2").mkdir()
    (tmp_path / "n0-n2" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="contains other files"):
        Measuring(tmp_path, tell=print).lose(TWO)
    assert (tmp_path / "n0-n2" / "thesis.txt").read_text() == "mine"
