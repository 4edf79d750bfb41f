"""`holdfast check`: find out in small whether a training script keeps the promise."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.config import python_command
from holdfast.elastic.processes.run_dirs import temporary_place
from holdfast.tools.check.launching import ScriptRuns, TrialResult
from holdfast.tools.check.leaving import left_alone
from holdfast.tools.check.limits import TrialLimits, UndisturbedRun, limits_for, more_time
from holdfast.tools.check.trials import PROPERTIES, QUICK, Trial, reference, trials
from holdfast.tools.check.verdict import (
    CheckedProperty,
    CheckFinding,
    CheckReport,
    Judge,
    Kind,
    UnfinishedRun,
    lines,
)
from holdfast.tools.environment import software
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive, report
from holdfast.tools.terminal import console, print_json

EXIT_DIFFERENT: Final = 1
EXIT_UNCHECKED: Final = 2
EXIT_UNFINISHED: Final = 3

_EPILOG: Final = """\
examples:
  holdfast check train.py --lr 1e-3            everything, a few minutes for a small model
  holdfast check --quick train.py              the most telling runs only
  holdfast check --only kills --steps 10 train.py
  holdfast check --ranks 2,4,6 train.py        a script with Mesh(tp=2)
  holdfast check --json - train.py > check.json

The properties are again (a second run), ranks, shares (of the work, dealt otherwise), kills (in
every phase of a step) and disk (everything killed, begun again). With `exact` every bit must be
equal; without it inputs and random draws must, and losses and weights to rounding. Exit codes:
0 all equal, 1 a difference or a refusal, 2 the check could not be made, 3 nothing differs as far as
the runs came, but at least one was not finished in its time.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "check",
        help="find out in small whether a training script keeps the promise",
        description="Runs a few steps of a script several times: alone and again, with other "
        "numbers of ranks and other shares, with kills in every phase of a step, and begun again "
        "from disk. Compares inputs, random draws, losses, gradients and the tracked state, and "
        "names the first thing that differs, with its cause. Snapshots and checkpoints of these "
        "runs go to a temporary folder; files that the script itself writes go where they always "
        "go.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add(
        "--steps",
        type=positive,
        default=6,
        metavar="N",
        help="steps of each run, whatever the script says (default 6)",
    )
    add(
        "--ranks",
        type=_ranks,
        default=(1, 2, 3),
        metavar="N,N",
        help="numbers of ranks; the first is the reference (default 1,2,3)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--only",
        action="append",
        choices=tuple(PROPERTIES),
        metavar="PROPERTY",
        help=f"look at this only: {', '.join(PROPERTIES)}; may be repeated",
    )
    which.add_argument(
        "--quick", action="store_true", help=f"only {', '.join(QUICK)}, and at most two ranks"
    )
    add("--all", action="store_true", help="go on after the first run that differs")
    add("--json", metavar="FILE", help="write the report as JSON to FILE; - for stdout")
    add(
        "--limit-s",
        type=positive,
        metavar="S",
        help="give a run up after S seconds (default: 180, or five times as long as it would take "
        "at the pace of the runs before it)",
    )
    add(
        "--hang-s",
        type=positive,
        metavar="S",
        help="call a rank hung after S seconds of silence (default: 60, or as long as the longest "
        "run before took as a whole)",
    )
    add("--keep", type=Path, metavar="DIR", help="keep traces and logs in DIR")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    add("script", metavar="SCRIPT", help="Python script to check")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def run(args: argparse.Namespace) -> int:
    """Check, show the report, and return the exit code that the epilog explains."""
    command = _command(args)
    shown = console(stderr=args.json == "-")
    with _folder(args.keep) as folder:
        runs = ScriptRuns(
            command=command,
            folder=folder,
            steps=args.steps,
        )
        made = Checking(runs, args, shown).check()
    if made is None:
        return EXIT_UNCHECKED
    for line in lines(made):
        shown.print(line, markup=False, soft_wrap=True)
    if args.json == "-":
        print_json(made)
    elif args.json:
        Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(made)) + b"\n")
    if made.findings:
        return EXIT_DIFFERENT
    return EXIT_UNFINISHED if made.unfinished else 0


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    if args.module:
        return python_command("-m", [args.script, *args.args])
    if not Path(args.script).is_file():
        raise ConfigError(
            f"{args.script}: no such script (in {Path.cwd()}); give the path of the Python script "
            "to check, or -m and the name of a module"
        )
    return python_command(args.script, args.args)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(
            prefix="holdfast-check-", dir=temporary_place()
        ) as directory:
            yield Path(directory)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise ConfigError(f"--keep {keep}: the folder is not empty; name a new one")
    yield keep.absolute()


_UNTRAINED: Final = "ended without training"
"""Part of the launcher's message on a script that calls no decorated function."""


class Checking:
    """One check: the reference, then run after run, each compared with those before."""

    def __init__(self, runs: ScriptRuns, args: argparse.Namespace, shown: Console) -> None:
        self._runs, self._args, self._shown = runs, args, shown
        self._made = 0
        self._checked: list[CheckedProperty] = []
        self._findings: list[CheckFinding] = []
        self._unfinished: list[UnfinishedRun] = []
        self._undisturbed: list[UndisturbedRun] = []
        self._notes: list[str] = []

    def check(self) -> CheckReport | None:
        """Return the report; None, after a message, if nothing can be said about the script."""
        args = self._args
        first = self._run(reference(args.ranks[0]))
        if first.message and _UNTRAINED not in first.message:
            return self._unstarted(first)
        if not first.traces:
            report(
                f"{args.script} made no step: have it call a function decorated with "
                "holdfast.resilient that takes its steps from run.steps or run.epochs"
            )
            return None
        judge = Judge(first.traces)
        if (misuse := judge.misuse()) is not None:
            self._findings.append(misuse)
            if not args.all:
                return self._report(judge)
        for trial in self._trials(judge):
            self._judge(judge, self._run(trial))
            if self._findings and not args.all:
                break
        return self._report(judge)

    def _trials(self, judge: Judge) -> list[Trial]:
        args, microbatches = self._args, judge.entered.microbatches
        wanted = QUICK if args.quick else args.only or tuple(PROPERTIES)
        ranks = args.ranks[:2] if args.quick else args.ranks
        for count in ranks:
            if count > microbatches:
                self._notes.append(
                    f"not with {count} ranks: a step has {microbatches} microbatches"
                )
        if judge.by_world:
            self._notes.append(
                "ranks have state of their own, and `exact` is not set: only runs with the same "
                "number of ranks were compared, and none had uneven shares"
            )
        return trials(
            wanted,
            ranks=ranks,
            microbatches=microbatches,
            stages=judge.stages,
            by_world=judge.by_world,
        )

    def _run(self, trial: Trial) -> TrialResult:
        spinner = (
            self._shown.status(f"{trial.where} …") if self._shown.is_terminal else nullcontext()
        )
        with spinner:
            limits = self._limits(trial)
            result = self._runs.run(trial, number=self._made, limits=limits)
        self._made += 1
        if not result.message and not trial.deaths and trial.hold < 0:
            self._undisturbed.append(UndisturbedRun(ranks=trial.ranks, seconds=result.seconds))
        return result

    def _limits(self, trial: Trial) -> TrialLimits:
        return limits_for(
            trial, self._undisturbed, run_s=self._args.limit_s, silence_s=self._args.hang_s
        )

    def _unstarted(self, first: TrialResult) -> CheckReport | None:
        """Report that the reference failed: a refusal is a result, all else is not."""
        if (left := left_alone(first.traces)) is not None:
            text = f"rank {left.names[0]} left the loop at step {left.moment.step}, others did not"
            self._found(first, "difference", text)
        elif first.late:
            self._note_unfinished(first)
        elif first.crashed:
            report(f"{self._args.script} fails by itself: {first.message}\n{first.log}")
        else:
            self._found(first, "refused", first.message)
        return self._report(None) if self._findings or self._unfinished else None

    def _judge(self, judge: Judge, result: TrialResult) -> None:
        """Compare one run with those before it, and show its line."""
        trial = result.trial
        found = None
        if result.message and not result.late and left_alone(result.traces) is None:
            kind: Kind = "failed" if result.crashed else "refused"
            self._found(result, kind, f"{trial.where}: {result.message}")
        else:
            found = judge.judge(result.traces, name=trial.name, where=trial.where)
        if found is not None:
            self._findings.append(found)
        self._notes += result.notes
        if found is None and result.late:
            self._note_unfinished(result)
            mark = "NO ANSWER"
        else:
            holds = found is None and not result.message
            self._checked.append(
                CheckedProperty(
                    property=trial.name, where=trial.where, holds=holds, seconds=result.seconds
                )
            )
            mark = "same" if holds else "DIFFERENT"
        self._shown.print(
            f"{trial.name:8} {trial.where:28} {mark:10} {result.seconds:5.1f} s", markup=False
        )

    def _found(self, result: TrialResult, kind: Kind, text: str) -> None:
        self._findings.append(
            CheckFinding(
                property=result.trial.name or "again",
                kind=kind,
                where=result.trial.where,
                text=text,
                also=tuple(result.log.splitlines()[-3:]) if kind == "failed" else (),
            )
        )

    def _note_unfinished(self, result: TrialResult) -> None:
        """Note that a run was given up; as far as it came it is like those before."""
        trial = result.trial
        self._unfinished.append(
            UnfinishedRun(
                property=trial.name,
                where=trial.where,
                text=f"{trial.where}: {result.message}",
                remedy=more_time(trial, self._limits(trial), ended=result.message),
                seconds=result.seconds,
            )
        )

    def _report(self, judge: Judge | None) -> CheckReport:
        entered = judge.entered if judge else None
        return CheckReport(
            script=" ".join([self._args.script, *self._args.args]),
            versions=software(),
            exact=entered.exact if entered else None,
            steps=self._args.steps,
            microbatches=entered.microbatches if entered else 0,
            checked=self._checked,
            findings=self._findings,
            notes=self._notes,
            unfinished=self._unfinished,
        )


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers of ranks, as in 1,2,3")
    return tuple(dict.fromkeys(int(part) for part in parts))
