"""Runs of a scenario: in the requested world, under several seeds, and shrunk to few strikes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.testing.shrinking import FailureOracle, fewest
from holdfast.tools.chaos import real
from holdfast.tools.chaos.judging.result import SCENARIO, STRIKES, Result, save
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE, World
from holdfast.tools.chaos.scenarios.scenario import Scenario, ScenarioError
from holdfast.tools.chaos.scenarios.strikes import draw

SMALLEST: Final = "smallest"
_TRY: Final = "try"
_TRIES: Final[dict[World, int]] = {"real": 40, "simulated": 400}

Tell = Callable[[str], None]


class ScenarioRuns:
    """Runs of one scenario; ``name`` is the user's name for it, ``path`` its file.

    The undisturbed job is run once for all of them.
    """

    def __init__(
        self, scenario: Scenario, path: Path, *, name: str, world: World, tell: Tell
    ) -> None:
        for kind in sorted({fault.kind for fault in scenario.fault}):
            if world not in CATALOGUE[kind].worlds:
                raise ScenarioError(
                    f"{path}: {kind} does not exist in the {world} world; `holdfast chaos "
                    "faults` lists the kinds of each world"
                )
        if world == "simulated" and scenario.workload.runs:
            key = "islands" if scenario.workload.islands else "policies"
            raise ScenarioError(
                f"{path}: workload.{key}: they are runs of real processes; leave --world out"
            )
        self._scenario, self._path, self._name = scenario, path, name
        self._world, self._tell = world, tell
        self._calm: real.Calm | None = None

    def run(self, *, seed: int, only: Collection[int] | None, folder: Path) -> Result:
        """Run the scenario once; ``folder`` is emptied first, and then holds all of its files."""
        emptied(folder)
        if self._path.is_file():
            shutil.copy(self._path, folder / SCENARIO)
        result = self._in_world(seed, only, folder)
        result = msgspec.structs.replace(result, replay=self.replay(seed, only))
        save(folder, result)
        return result

    def replay(self, seed: int, only: Collection[int] | None) -> str:
        """Return the command that repeats the run."""
        words = ["holdfast", "chaos", "run", self._name, "--seed", str(seed)]
        words += [] if self._world == "real" else ["--world", self._world]
        words += [] if only is None else ["--only", ",".join(map(str, sorted(only)))]
        return shlex.join(words)

    def _in_world(self, seed: int, only: Collection[int] | None, folder: Path) -> Result:
        if self._world == "simulated":
            from holdfast.tools.chaos import simulated  # the simulator, which few runs need

            return simulated.run(self._scenario, seed=seed, only=only, folder=folder)
        source = self._path.absolute().parent
        if self._scenario.checks.undisturbed and self._calm is None:
            self._calm = real.undisturbed(
                self._scenario, folder=folder, source=source, tell=self._tell
            )
        return real.run(
            self._scenario,
            seed=seed,
            only=only,
            folder=folder,
            source=source,
            calm=self._calm,
            tell=self._tell,
        )

    def shrink(self, broken: Result, *, folder: Path) -> tuple[int, ...]:
        """Return the numbers of a few strikes after which a job breaks as in a result.

        None of them can be left out, as far as a job of real processes is repeatable. The smallest
        broken run is in ``folder`` under `SMALLEST`.
        """
        wanted = _signature(broken)

        def breaks(numbers: Sequence[int]) -> bool:
            self._tell(f"again with {', '.join(map(str, numbers)) or 'no strike'}")
            trial = folder / _TRY
            result = self.run(seed=broken.seed, only=numbers, folder=trial)
            found = bool(_signature(result) & wanted)
            if found:
                shutil.rmtree(folder / SMALLEST, ignore_errors=True)
                trial.rename(folder / SMALLEST)
            else:
                shutil.rmtree(trial)
            return found

        oracle = FailureOracle(breaks, _TRIES[self._world])
        drawn = draw(self._scenario, seed=broken.seed, only=broken.only)
        everything = tuple(strike.number for strike in drawn)
        hit = tuple(sorted({each.number for each in broken.struck if not each.missed}))
        start = hit if hit and hit != everything and oracle(hit) else everything
        return fewest(start, fails=oracle)


def _signature(result: Result) -> set[str]:
    """Return the broken checks and problems, without numbers that differ from run to run."""
    problems = {problem.partition(":")[0] for problem in result.problems}
    return {violation.check for violation in result.verdict.violations} | problems


def emptied(folder: Path) -> None:
    """Make a folder, or empty it if it holds an earlier run, and nothing else."""
    try:
        if folder.exists() and any(folder.iterdir()):
            if not ((folder / STRIKES).exists() or (folder / SCENARIO).exists()):
                raise ConfigError(f"{folder}: the folder contains other files; give another --out")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}; give an --out that can be written"
        ) from error
