"""The runs of `holdfast check` with ranks that are forked from a server instead of started."""

from __future__ import annotations

import argparse
import io
import time
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster, Kill
from rich.console import Console

from holdfast.elastic.loop.trace.records import TraceSettings
from holdfast.tools.check.launching import TrialResult, read_traces
from holdfast.tools.check.limits import TrialLimits
from holdfast.tools.check.trials import Trial
from holdfast.tools.check.verdict import CheckReport
from holdfast.tools.commands.check import Checking, add_parser

PRELOAD = "warmed"
"""The module to import before ranks are forked."""
_BEAT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedRuns:
    """Stands for `ScriptRuns`. Begins again from a checkpoint, which the loop must write.

    The loop is ``module.port``, or a ``script``. No rank dies in a second stage: the hub of
    `cluster` brings no new process into one.
    """

    ranks: Cluster
    folder: Path
    steps: int
    module: str = ""
    script: str = ""

    def run(self, trial: Trial, *, number: int, limits: TrialLimits) -> TrialResult:
        """Make a run as `ScriptRuns.run` does, in new processes; without ``limits``."""
        folder, began_s = self.folder / str(number), time.monotonic()
        trace = folder / "trace"
        trace.mkdir(parents=True)
        deaths = [d for d in trial.deaths if d.stage in ("", trial.deaths[0].stage)]
        order = TraceSettings(
            folder=str(trace), steps=self.steps, uneven=trial.uneven, deaths=tuple(deaths)
        )
        again = trial.hold >= 0
        kill = Kill(step=trial.hold, beat=_BEAT, everyone=True) if again else None
        for each, every in ((kill, 1 if again else 100), (None, 100))[: 1 + again]:
            outcome = self.ranks.run(
                self.module or "script",
                folder,
                size=trial.ranks,
                every=every,
                kill=each,
                script=self.script,
                trace=order,
            )
            self.ranks.close()  # what a run has left in a process must not reach the next
        traces = tuple(read_traces(trace))
        assert not again or any(t.entered.completed for t in traces)
        marks = [trace / f"death-{death.number}" for death in deaths]
        return TrialResult(
            trial=trial,
            traces=traces,
            message=outcome.error,
            crashed="Traceback" in outcome.error,
            log=outcome.error,
            notes=tuple(f"no {path.name}" for path in marks if not path.exists()),
            seconds=time.monotonic() - began_s,
        )


def checked(
    ranks: Cluster, folder: Path, *options: str, module: str = "", script: str = ""
) -> CheckReport:
    """Return the report of `holdfast check` with these options."""
    parser = add_parser(argparse.ArgumentParser().add_subparsers())
    args = parser.parse_args([*options, script or module])
    runs = ForkedRuns(ranks=ranks, folder=folder, steps=args.steps, module=module, script=script)
    found = Checking(runs, args, Console(file=io.StringIO())).check()  # type: ignore[arg-type]
    assert found is not None, "the loop fails by itself"
    return found
