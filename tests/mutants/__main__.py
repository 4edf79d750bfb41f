"""``python -m mutants``: plant every bug, and report the seed that found it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import count, islice
from typing import Final

from mutants.hunt import BUGS, TRIALS, Found, hunt, try_once

_SEEDS: Final = 1000
_LONGEST: Final = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Hunt; 1 if a bug was not found, or if a trial without a bug fails."""
    parser = argparse.ArgumentParser(
        prog="python -m mutants",
        description="Plants bugs into production code, one at a time and only in this process, and "
        "looks for each of them: seed by seed, or with --known under the seed that found it.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="the bugs to plant (all of them)")
    add(
        "--seeds", type=int, default=_SEEDS, metavar="N", help="give up after so many (%(default)s)"
    )
    add("--known", action="store_true", help="try only the seed that is known to find it")
    add("--table", action="store_true", help="print only the table of docs/how-to/chaos.md")
    add("--sound", type=int, metavar="N", help="plant nothing; N seeds of every trial must hold")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - {bug.name for bug in BUGS}):
        parser.error(f"no bug {unknown[0]!r}; there are {', '.join(bug.name for bug in BUGS)}")
    if args.table:
        print("\n".join(table()))
        return 0
    if args.sound is not None:
        return _try_sound(args.sound)
    missed = 0
    for bug in BUGS:
        if args.names and bug.name not in args.names:
            continue
        seeds = [bug.seed] if args.known else islice(count(), args.seeds)
        found = hunt(bug, seeds=seeds)
        missed += found is None
        print(f"{bug.name:22} {bug.trial:8} {_told(found)}", flush=True)
    return 1 if missed else 0


def table() -> list[str]:
    """Return the rows of all bugs, in Markdown."""
    rows = [
        "| bug | what is wrong | where | found by | seed | after |",
        "|---|---|---|---|---|---|",
    ]
    for bug in BUGS:
        where = bug.where.rpartition(":")[2]
        cells = (bug.name, bug.about, f"`{where}`", bug.trial, str(bug.seed), str(bug.after))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _told(found: Found | None) -> str:
    if found is None:
        return "NOT FOUND"
    how = found.how if len(found.how) <= _LONGEST else f"{found.how[:_LONGEST]}…"
    return f"seed {found.seed:4}  {how}"


def _try_sound(seeds: int) -> int:
    failed = 0
    for trial in TRIALS:
        wrong = [(seed, how) for seed in range(seeds) if (how := try_once(trial, seed))]
        failed += len(wrong)
        outcome = f"seed {wrong[0][0]}: {wrong[0][1]}" if wrong else "all hold"
        print(f"{trial:8} {seeds} seeds, {len(wrong)} fail; {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
