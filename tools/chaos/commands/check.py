"""`holdfast chaos check`: judge a training job from its history."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from holdfast.ckpt.store.places import open_store
from holdfast.elastic.errors import ConfigError
from holdfast.tools.chaos.commands import Add, Words
from holdfast.tools.chaos.judging.checker import HistoryVerdict, Promises, Violation, check
from holdfast.tools.chaos.judging.history import read
from holdfast.tools.chaos.judging.record import History
from holdfast.tools.islands.glance import records_of
from holdfast.tools.islands.samples import samples_of
from holdfast.tools.terminal import console, place, print_json, step_number

EXIT_BROKEN: Final = 1

WORDS: Final = Words(
    help="check a history: no step skipped, no sample lost or trained twice, equal state",
    description="Checks the history of a job, with or without Holdfast: no step skipped, no "
    "sample lost or trained twice, one attempt at a time, and the state of an undisturbed run.",
    epilog="""\
examples:
  holdfast chaos check runs/hurt/history
  holdfast chaos check runs/hurt/history --against runs/calm/history --undone-most 1
  holdfast chaos check runs/demo --json

A history is the folder that HOLDFAST_HISTORY names, into which holdfast.chaos.step, samples and
state_hash write, or the run directory of `holdfast run`, or both in one folder. A step survives if
no later attempt completed it, or an earlier step, again; the checks cover the steps that survive.
Exit codes: 0 every check passed, 1 a check failed, 2 wrong command line or unreadable history.
""",
)


def declare(add: Add) -> None:
    """Declare the arguments."""
    add("history", type=place, metavar="DIR", help="folder of the history")
    add("--against", type=place, metavar="DIR", help="history of the same job without faults")
    add(
        "--undone-most",
        type=step_number,
        metavar="N",
        help="number of steps that a restart may undo",
    )
    add(
        "--dense",
        action="store_true",
        help="sample names are consecutive numbers from 0; the check fails if one is missing",
    )
    add(
        "--of-sea",
        type=place,
        metavar="URL",
        help="compare with the samples that its logbook deals",
    )
    add("--island", metavar="NAME", help="the name of the job in that sea")
    add("--json", action="store_true", help="print the verdict as JSON")


def run(args: argparse.Namespace) -> int:
    """Judge the history; 1 if something is broken."""
    promises = Promises(undone_most=args.undone_most, dense=args.dense)
    reference = read(Path(args.against)) if args.against else None
    history = read(Path(args.history))
    verdict = check(history, reference=reference, promises=promises)
    if args.of_sea or args.island:
        more = _of_sea(args.of_sea, args.island, history)
        verdict = msgspec.structs.replace(verdict, violations=(*verdict.violations, *more))
    if args.json:
        print_json({**msgspec.structs.asdict(verdict), "held": verdict.held})
    else:
        show(verdict, console=console())
    return 0 if verdict.held else EXIT_BROKEN


def _of_sea(sea: str | None, island: str | None, history: History) -> list[Violation]:
    """Return the samples that a sea has of an island which did not train them, and the like."""
    if not sea or not island:
        raise ConfigError("give --of-sea URL and --island NAME together")
    kept = [each for each in history.consumed if history.survives(each)]
    trained = [(each.epoch, int(name)) for each in kept for name in each.ids]
    found = samples_of(records_of(open_store(sea)), {island: trained})
    return [Violation(check="samples of the sea", message=each) for each in found.wrong]


def show(verdict: HistoryVerdict, *, console: Console) -> None:
    """Print every check, its violations, and the totals of the job."""
    broken = {violation.check for violation in verdict.violations}
    for name in (*verdict.names, *sorted(broken - set(verdict.names))):
        if name in broken:
            console.print(f"  ✕ {name}", style="bold red")
            for violation in verdict.violations:
                if violation.check == name:
                    console.print(f"      {violation.message}", style="red", markup=False)
        elif name in verdict.checked:
            console.print(f"  ✓ {name}", style="green")
        else:
            console.print(f"  – {name}: not reported", style="dim")
    console.print()
    console.print(
        f"  {verdict.steps} steps survive, of {verdict.executed} that were trained in "
        f"{verdict.attempts} attempts; {verdict.undone} were undone, "
        f"{verdict.undone_most} at most by one restart"
    )
    if verdict.samples:
        console.print(f"  {verdict.samples} samples in the steps that survive")
