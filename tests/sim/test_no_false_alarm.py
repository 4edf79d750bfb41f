"""Clean runs hold: a harness with false alarms is soon ignored.

``-m exhaustive`` runs 500 simulated runs of ready and drawn scenarios under many seeds; otherwise a
part of them runs.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from holdfast.tools.chaos import real
from holdfast.tools.chaos.library import FOLDER, load
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE
from holdfast.tools.chaos.scenarios.scenario import Scenario, ScenarioError, parse
from holdfast.tools.chaos.scenarios.strikes import draw
from holdfast.tools.chaos.simulated.translate import EVENTS, KINDS, config_of
from holdfast.tools.chaos.simulated.world import judge, simulate

CLEAN_RUNS = 500
REAL_RUNS = 20
PART = 40
READY = sorted(FOLDER.glob("*.toml"))


def drawn(seed: int) -> Scenario:
    """Return a scenario of a seed: a few nodes, one to four faults of any kind at any moment."""
    draw_from = random.Random(f"clean scenario {seed}")
    names = "abcd"[: draw_from.choice((2, 3, 3, 4))]
    faults = [_fault(draw_from) for _ in range(draw_from.randint(1, 4))]
    document: dict[str, Any] = {
        "name": f"drawn {seed}",
        "about": "drawn by a test",
        "workload": {"command": ["train"], "nodes": {name: {"trainer": 1} for name in names}},
        "simulated": {
            "steps": draw_from.choice((30, 60)),
            "parity": draw_from.choice((0, 1, 1, 2)),
            "keep": draw_from.choice((1, 2)),
            "snapshot_every": draw_from.choice((1, 1, 3)),
            "microbatches": draw_from.choice((4, 7, 8)),
        },
        "checks": {"dense": True},
        "lifetime_s": 120.0,
        "fault": faults,
    }
    return parse(document, source=f"seed {seed}")


def _fault(source: random.Random) -> dict[str, Any]:
    kind, part = source.choice(sorted(KINDS))
    when = source.choice(
        (
            {"s": round(source.uniform(0, 6), 2)},
            {"step": source.randint(1, 30)},
            {"state": source.choice(EVENTS), "after_s": round(source.uniform(0, 1), 2)},
            {"recovery": source.choice(("fencing", "fenced", "proposed", "restored"))},
            {"poisson_s": 2.0, "times": 3},
        )
    )
    fault: dict[str, Any] = {"kind": kind, "when": when, "target": {"part": part}}
    if CATALOGUE[kind].lasts:  # nothing stays broken, so that every job can end
        fault["lasts_s"] = [0.1, 3.0]
    return fault


def alarms(scenario: Scenario, *, seed: int) -> list[str]:
    """Return all that is found wrong with a run in which nothing is."""
    hurt = simulate(scenario, draw(scenario, seed=seed), seed=seed)
    calm = simulate(scenario, (), seed=seed)
    verdict = judge(scenario, hurt, calm=calm)
    return [*hurt.problems, *calm.problems, *(each.message for each in verdict.violations)]


@pytest.mark.parametrize("part", range(4))
def test_drawn_scenarios_hold(part: int) -> None:
    seeds = range(part, PART, 4)
    assert {seed: found for seed in seeds if (found := alarms(drawn(seed), seed=seed))} == {}


def simulated() -> list[Scenario]:
    """Return the ready scenarios that exist in the simulated world."""
    found = []
    for path in READY:
        with contextlib.suppress(ScenarioError):
            scenario = load(path)
            config_of(scenario)
            found.append(scenario)
    return found


def test_ready_scenarios_of_both_worlds_are_there() -> None:
    there = {"kill-a-rank", "kill-during-recovery", "kill-two-at-once", "lose-a-machine", "poisson"}
    assert there <= {scenario.name for scenario in simulated()}


@pytest.mark.parametrize("scenario", simulated(), ids=lambda scenario: scenario.name)
def test_ready_scenarios_hold(scenario: Scenario) -> None:
    assert alarms(scenario, seed=scenario.seed) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_five_hundred_clean_runs_hold() -> None:
    ready, found = simulated(), {}
    for number in range(CLEAN_RUNS):
        seed, which = divmod(number, len(ready) + 1)
        scenario = ready[which] if which < len(ready) else drawn(1000 + number)
        if problems := alarms(scenario, seed=seed):
            found[scenario.name, seed] = problems
    assert found == {}


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_twenty_clean_real_runs_hold(tmp_path: Path) -> None:
    """Every second one is disturbed, by what production is to survive."""
    path = next(path for path in READY if path.stem == "kill-a-rank")
    scenario = load(path)
    calm = real.undisturbed(scenario, folder=tmp_path / "calm", source=path.parent)
    for seed in range(REAL_RUNS):
        only = [] if seed % 2 else None
        folder = tmp_path / str(seed)
        result = real.run(
            scenario, seed=seed, only=only, folder=folder, source=path.parent, calm=calm
        )
        assert result.held, (seed, result.problems, result.verdict.violations)
