"""`holdfast chaos soak`: random faults for minutes or hours; resources must not grow."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.commands import Add, Words
from holdfast.tools.chaos.soak.strokes import SoakFaultKind
from holdfast.tools.terminal import step_number

WORDS: Final = Words(
    help="train under random faults for minutes or hours, and check results and resources",
    description="Trains on four nodes of this machine under faults from a seed, of processes, "
    "machines, memory, disks and clocks. The soak fails if the weights differ from an undisturbed "
    "run, a protected step is lost, a process fails by itself, memory or open files grow, or "
    "anything is left behind. It names faults that this machine does not allow, and leaves them "
    "out: shared memory needs a mount namespace (unshare), disks and clocks need a C compiler.",
    epilog="""\
examples:
  holdfast chaos soak --minutes 5 --seed 7
  holdfast chaos soak --minutes 5 --kinds "lose a machine" "flip a bit in parity" --pause 0.5 2
  holdfast chaos soak --minutes 3 --kinds "jump a clock" "fail a disk" "kill all of a node"

Exit codes: 0 every check passed, 1 a check failed, 2 wrong command line.
""",
)


def declare(add: Add) -> None:
    """Declare the arguments."""
    add(
        "--minutes", type=float, default=30.0, metavar="N", help="minutes of the soak (%(default)g)"
    )
    add("--seed", type=step_number, default=0, metavar="N", help="seed of the faults (%(default)s)")
    add(
        "--pause",
        type=float,
        nargs=2,
        default=(1.0, 6.0),
        metavar="S",
        help="least and most seconds between two faults (default: 1 6)",
    )
    add(
        "--kinds",
        type=SoakFaultKind,
        nargs="+",
        default=tuple(SoakFaultKind),
        metavar="KIND",
        help=f"inject only these faults: {', '.join(map(repr, map(str, SoakFaultKind)))}",
    )
    add("--keep", action="store_true", help="keep events and logs")


def run(args: argparse.Namespace) -> int:
    """Soak; 1 if something is wrong."""
    from holdfast.tools.chaos.soak.memory import own_shared_memory
    from holdfast.tools.chaos.soak.soak import SoakOptions, say, soak

    words = _words(args)
    fills = own_shared_memory([sys.executable, "-P", "-m", "holdfast.tools.cli", *words])
    if not fills:
        say(
            "the soak does not fill shared memory: this process may not create a mount namespace "
            "(unshare)"
        )
    folder = Path(tempfile.mkdtemp(prefix="holdfast-soak-"))
    options = SoakOptions(
        minutes=args.minutes,
        seed=args.seed,
        pause_s=(args.pause[0], args.pause[1]),
        kinds=tuple(args.kinds),
    )
    wrong = soak(options, folder, fills=fills)
    for each in wrong:
        say(f"WRONG: {each}")
    if wrong or args.keep:
        say(f"events and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    if wrong:
        say(f"this command repeats the soak: {shlex.join(['holdfast', *words])}")
    say(
        f"failed: {len(wrong)} of the checks above"
        if wrong
        else "all well: equal weights, no protected step lost, no process failed by itself, flat "
        "memory, open files and threads, nothing left behind"
    )
    return 1 if wrong else 0


def _words(args: argparse.Namespace) -> Sequence[str]:
    """Return the command line that yields these arguments."""
    words = ["chaos", "soak", "--minutes", f"{args.minutes:g}", "--seed", str(args.seed)]
    words += ["--pause", *(f"{each:g}" for each in args.pause)]
    words += ["--keep"] if args.keep else []
    return (
        words
        if set(args.kinds) == set(SoakFaultKind)
        else [*words, "--kinds", *map(str, args.kinds)]
    )
