"""`holdfast chaos run`: inject a scenario's faults into a job, and judge the result."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.tools.chaos.commands import Add, Words
from holdfast.tools.chaos.commands.check import EXIT_BROKEN, show
from holdfast.tools.chaos.judging.result import Result
from holdfast.tools.chaos.library import find
from holdfast.tools.chaos.runs import SMALLEST, ScenarioRuns
from holdfast.tools.chaos.scenarios.scenario import Scenario
from holdfast.tools.chaos.scenarios.strikes import Strike, draw
from holdfast.tools.chaos.scenarios.words import target_text, when_text
from holdfast.tools.subcommand import positive
from holdfast.tools.terminal import console, place, print_json, step_number

_OUT: Final = Path("holdfast-chaos")

WORDS: Final = Words(
    help="run a scenario and check the training",
    description="Runs the job of a scenario without faults, runs it again with the scenario's "
    "faults, and compares the training of both runs.",
    epilog="""\
examples:
  holdfast chaos run kill-a-rank
  holdfast chaos run mine.toml --seed 7 --dry-run
  holdfast chaos run mine.toml --seed 7 --only 0,3
  holdfast chaos run poisson --repeat 20 --shrink

Exit codes: 0 every check passed, 1 a check failed, 2 wrong command line or scenario.
""",
)


def declare(add: Add) -> None:
    """Declare the arguments."""
    add(
        "scenario",
        type=place,
        metavar="SCENARIO",
        help="a TOML file, or the name of an included scenario",
    )
    add(
        "--seed", type=step_number, metavar="N", help="seed of the faults (default: the scenario's)"
    )
    add("--only", type=_numbers, metavar="N,M", help="inject only the strikes with these numbers")
    add("--dry-run", action="store_true", help="show the strikes and run nothing")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"directory of the run's files (default: {_OUT}/NAME-SEED)",
    )
    add(
        "--world",
        choices=("real", "simulated"),
        default="real",
        help="use real processes or simulate them (default: %(default)s)",
    )
    add(
        "--repeat",
        type=positive,
        default=1,
        metavar="N",
        help="run under N seeds, beginning with --seed",
    )
    add(
        "--shrink",
        action="store_true",
        help="after a broken run, find a few strikes that suffice to break it",
    )
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the scenario; 1 if something is broken."""
    scenario, path = find(args.scenario)
    seed = scenario.seed if args.seed is None else args.seed
    shown = console()
    if args.dry_run:
        return _dry(scenario, seed, args.only, as_json=args.json, shown=shown)
    progress = console(stderr=True)
    runs = ScenarioRuns(
        scenario,
        path,
        name=args.scenario,
        world=args.world,
        tell=lambda text: progress.print(f"  {text}", style="dim", markup=False),
    )
    out = args.out or _OUT / f"{scenario.name}-{seed}"
    found: list[dict[str, object]] = []
    for number in range(args.repeat):
        folder = out if args.repeat == 1 else out / str(seed + number)
        result = runs.run(seed=seed + number, only=args.only, folder=folder)
        told_of = msgspec.to_builtins(result)
        if not args.json:
            _show(result, folder, console=shown)
        if args.shrink and not result.held:
            fewest = runs.shrink(result, folder=folder)
            told_of["smallest"] = {"only": fewest, "replay": runs.replay(result.seed, fewest)}
            if not args.json:
                _show_smallest(scenario, runs, result, fewest, folder, console=shown)
        found.append(told_of)
    if args.json:
        print_json(found[0] if args.repeat == 1 else found)
    return 0 if all(each["held"] for each in found) else EXIT_BROKEN


def _numbers(text: str) -> frozenset[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as in 0,3")
    return frozenset(map(int, words))


def _dry(
    scenario: Scenario,
    seed: int,
    only: Collection[int] | None,
    *,
    as_json: bool,
    shown: Console,
) -> int:
    strikes = draw(scenario, seed=seed, only=only)
    if as_json:
        print_json(strikes)
    else:
        shown.print(f"{scenario.name}, seed {seed}: {len(strikes)} strikes", markup=False)
        shown.print(schedule(strikes))
    return 0


def schedule(strikes: Collection[Strike]) -> Table:
    """Return strikes as a table."""
    table = Table("number", "fault", "hits", "when", "lasts", "amount", box=None, pad_edge=False)
    for strike in strikes:
        table.add_row(
            str(strike.number),
            strike.kind,
            target_text(strike.target, strike.target.part),
            when_text(strike.when),
            f"{strike.lasts_s:g} s" if strike.lasts_s else "",
            "" if strike.amount is None else f"{strike.amount:g}",
        )
    return table


def _show(result: Result, folder: Path, *, console: Console) -> None:
    console.print(f"{result.name}, seed {result.seed}", style="bold", markup=False)
    show(result.verdict, console=console)
    hits = sum(not each.missed for each in result.struck)
    console.print(f"  {hits} hits in {result.seconds:.1f} s; files: {folder}", markup=False)
    for problem in result.problems:
        console.print(f"  ✕ {problem}", style="bold red", markup=False)
    if not hits:
        console.print("  ! no strike hit anything: this run proves nothing", style="yellow")
    if result.held:
        console.print("  held", style="bold green")
    else:
        console.print("  broken; this command repeats the run:", style="bold red")
        console.print(f"    {result.replay}", markup=False, soft_wrap=True)


def _show_smallest(
    scenario: Scenario,
    runs: ScenarioRuns,
    result: Result,
    fewest: Collection[int],
    folder: Path,
    *,
    console: Console,
) -> None:
    if not fewest:
        console.print("  the job breaks without any fault", style="bold red")
        return
    console.print(f"  these strikes suffice to break it ({folder / SMALLEST}):", markup=False)
    console.print(schedule(draw(scenario, seed=result.seed, only=fewest)))
    console.print(f"    {runs.replay(result.seed, fewest)}", markup=False, soft_wrap=True)
