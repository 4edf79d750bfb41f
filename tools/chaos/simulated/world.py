"""Run of a scenario on virtual time, with the decisions of production code.

Seconds of a job take milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.elastic.events import Event
from holdfast.elastic.membership.records import JobOutcome
from holdfast.elastic.testing.simulation.simulator import Simulation
from holdfast.elastic.testing.simulation.training import InvariantError
from holdfast.tools.chaos.judging.checker import HistoryVerdict, Promises, check
from holdfast.tools.chaos.judging.result import (
    CALM,
    HISTORY,
    SCENARIO,
    STRIKES,
    Result,
    Struck,
    save,
)
from holdfast.tools.chaos.scenarios.scenario import Scenario
from holdfast.tools.chaos.scenarios.strikes import Strike, draw
from holdfast.tools.chaos.simulated.striking import SimulatedStriker
from holdfast.tools.chaos.simulated.telling import Telling
from holdfast.tools.chaos.simulated.translate import config_of, names_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedResult:
    """The result of a simulated run; ``problems`` as in `Result`."""

    telling: Telling
    struck: tuple[Struck, ...]
    problems: tuple[str, ...]
    seconds: float


def run(
    scenario: Scenario,
    *,
    seed: int | None = None,
    only: Collection[int] | None = None,
    folder: Path,
) -> Result:
    """Run a scenario in the simulated world and judge it; write history and result to ``folder``.

    ``seed`` defaults to the scenario's own. Equal seeds give equal runs. Raises ``ScenarioError``
    for an entry that cannot be simulated.
    """
    seed = scenario.seed if seed is None else seed
    strikes = draw(scenario, seed=seed, only=only)
    hurt = simulate(scenario, strikes, seed=seed)
    calm = simulate(scenario, (), seed=seed) if scenario.checks.undisturbed else None
    verdict = judge(scenario, hurt, calm=calm)
    alone = calm.problems if calm is not None else ()
    problems = (*hurt.problems, *(f"undisturbed: {each}" for each in alone))
    folder.mkdir(parents=True, exist_ok=True)
    hurt.telling.write(folder / HISTORY)
    if calm is not None:
        calm.telling.write(folder / CALM)
    (folder / STRIKES).write_bytes(msgspec.json.format(msgspec.json.encode(strikes), indent=2))
    numbers = None if only is None else tuple(sorted(only))
    result = Result(
        name=scenario.name,
        world="simulated",
        seed=seed,
        only=numbers,
        held=verdict.held and not problems,
        seconds=round(hurt.seconds, 6),
        verdict=verdict,
        struck=hurt.struck,
        problems=problems,
        replay=_replay(folder, seed=seed, only=numbers),
    )
    save(folder, result)
    return result


def simulate(scenario: Scenario, strikes: Sequence[Strike], *, seed: int) -> SimulatedResult:
    """Run the job of a scenario under these strikes, and return its reports."""
    names = names_of(scenario)
    sim = Simulation(config_of(scenario), seed=seed, faults=())
    telling = Telling(sim, microbatches=scenario.simulated.microbatches, names=names)
    striker = SimulatedStriker(sim, strikes, names=names, tell=telling.strike)

    def watch(event: Event) -> None:
        telling.saw(event)
        striker.saw(event)

    sim.watch = watch
    problems: tuple[str, ...] = ()
    try:
        outcome = sim.run().outcome
        problems = _faults_of(outcome, succeeds=scenario.checks.succeeds)
    except InvariantError as error:
        problems = (str(error),)
    return SimulatedResult(
        telling=telling, struck=striker.struck, problems=problems, seconds=sim.now_s
    )


def judge(
    scenario: Scenario, hurt: SimulatedResult, *, calm: SimulatedResult | None
) -> HistoryVerdict:
    """Return the verdict on a run's history, compared with the undisturbed one."""
    checks = scenario.checks
    return check(
        hurt.telling.history,
        reference=None if calm is None else calm.telling.history,
        promises=Promises(undone_most=checks.undone_most, dense=checks.dense),
    )


def _faults_of(outcome: JobOutcome, *, succeeds: bool) -> tuple[str, ...]:
    if succeeds and not outcome.ok:
        return (f"the job failed: {outcome.message}",)
    if not succeeds and outcome.ok:
        return ("the job succeeded, though it lost more than it can survive",)
    return ()


def _replay(folder: Path, *, seed: int, only: tuple[int, ...] | None) -> str:
    words = ["holdfast chaos run", str(folder / SCENARIO), "--world simulated", f"--seed {seed}"]
    if only is not None:
        words.append(f"--only {','.join(map(str, only))}")
    return " ".join(words)
