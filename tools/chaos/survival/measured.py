"""Loss of a set of nodes in a job of real processes.

Each set has its own job. Nearly all of its time goes into starting processes, which a returning
node would need as well; and no set can affect the result of another.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Final

import msgspec

from holdfast.tools.chaos import prediction, real
from holdfast.tools.chaos.judging.result import RESULT, SCENARIO, load, save
from holdfast.tools.chaos.reading import read
from holdfast.tools.chaos.report.losses import Loss, Prediction
from holdfast.tools.chaos.runs import Tell, emptied
from holdfast.tools.chaos.scenarios.scenario import Scenario, parse

_TEMPLATE: Final = Path(__file__).with_name("lose.toml")


class Measuring:
    """Loses sets of nodes, each in its own folder below ``folder``, which is that of a run.

    Runs that an earlier call finished for the same prediction are read and not repeated. The
    undisturbed job, the reference for all of them, is run once.
    """

    def __init__(self, folder: Path, *, tell: Tell) -> None:
        self._folder, self._tell = folder, tell
        self._calm: real.Calm | None = None

    def lose(self, predicted: Prediction) -> tuple[Loss | None, str]:
        """Lose the nodes; return the loss, and the reason if something is wrong with the run.

        The loss is None if not all nodes could be hit, in which case the run shows nothing.
        """
        folder = self._folder / "-".join(predicted.nodes)
        if not _is_done(folder, predicted):
            self._run(folder, predicted)
        result, (run,) = load(folder), read(folder)
        why = "; ".join([*result.problems, *(each.message for each in result.verdict.violations)])
        for loss in run.losses:
            if loss.nodes == predicted.nodes:
                return loss, why
        missed = f"the strike did not hit all of them: {why or 'the job ended before'}"
        return None, f"{missed}: remove {folder}, and run the command again"

    def _run(self, folder: Path, predicted: Prediction) -> None:
        emptied(folder)
        text = scenario_text(predicted)
        path = folder / SCENARIO
        path.write_text(text, encoding="utf-8")
        prediction.save(folder, predicted)
        scenario = parse(tomllib.loads(text), source=str(path))
        calm = self._undisturbed(scenario)
        self._tell(f"{' '.join(predicted.nodes)}: {scenario.about}")
        result = real.run(scenario, folder=folder, source=folder, calm=calm, tell=self._tell)
        replay = shlex.join(["holdfast", "chaos", "run", str(path)])
        save(folder, msgspec.structs.replace(result, replay=replay))

    def _undisturbed(self, scenario: Scenario) -> real.Calm:
        if self._calm is None:
            folder = self._folder / "undisturbed"
            emptied(folder)
            (folder / SCENARIO).touch()  # marks the folder as one of ours
            self._calm = real.undisturbed(scenario, folder=folder, tell=self._tell)
        return self._calm


def _is_done(folder: Path, predicted: Prediction) -> bool:
    return (folder / RESULT).is_file() and prediction.load(folder) == predicted


def scenario_text(predicted: Prediction) -> str:
    """Return the scenario that loses these nodes, as TOML."""
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        name=" ".join(predicted.nodes),
        of=predicted.of,
        parity=predicted.parity,
        nodes=", ".join(f"{name} = {{ trainer = 1 }}" for name in every(predicted.of)),
        lost=json.dumps(predicted.nodes),
    )


def every(nodes: int) -> Sequence[str]:
    """Return the names of all nodes."""
    return [f"n{number}" for number in range(nodes)]
